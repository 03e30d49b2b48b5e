"""Valid files to damage, all made from one small run."""

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps with a generator of a few thousand weights, and one value left in its journal."""
    import torch

    from datalens.cli.main import main
    from datalens.methods import topagg as method
    from datalens.privacy.journal import Journal
    from datalens.privacy.ledger import Ledger
    from datalens.privacy.released import Released

    out, make, threads = tmp_path_factory.mktemp("fuzz") / "run", method.dcgan_architecture, torch.get_num_threads()
    narrow = {"dense": 16, "widths": (4, 4)}
    small = ("--data", "digits", "--preset", "quick", "--teachers", "5", "--batch", "4", "--steps", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "dcgan_architecture", lambda *a, **k: dataclasses.replace(make(*a, **k), **narrow))
        torch.set_num_threads(1)
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), pytest.raises(SystemExit) as ended:
            main(["train", *small, "--out", str(out)])
        torch.set_num_threads(threads)
    assert not ended.value.code
    ledger = Ledger.open(out / "ledger.jsonl")
    Journal(out / "journal").save(Released(value=np.arange(24).reshape(4, 6), event=ledger.events[1], number=1))  # type: ignore[arg-type]
    ledger.close()
    return out


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A parser that takes this long hangs."""
    import signal

    def ring(number: int, frame: object) -> None:
        raise AssertionError("a parser hangs")

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
