"""A killed process leaves its temporary folder, with what is private in it: the next one clears it away."""

import gc
import multiprocessing
import os
import signal
import stat
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from datalens import DataLens
from datalens.run.scratch import ALIVE, Scratch, clear_abandoned


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(act: Any) -> None:
    """In a forked child, which does it and is killed."""
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def leave_a_folder() -> None:
    home = Scratch()
    (Path(home.name) / "records").write_text("private")
    die()


def test_what_a_killed_process_left_is_cleared_away(temporary: Path) -> None:
    killed(leave_a_folder)
    (left,) = temporary.iterdir()
    assert (left / "records").exists() and stat.S_IMODE(left.stat().st_mode) == 0o700
    with Scratch() as now:
        assert list(temporary.iterdir()) == [Path(now)]
    assert list(temporary.iterdir()) == []


def test_folders_in_use_and_in_doubt_are_left(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Scratch()
    forked = multiprocessing.get_context("fork").Process(target=clear_abandoned)  # another process looks
    forked.start()
    forked.join()
    assert forked.exitcode == 0 and Path(mine.name).is_dir()
    (temporary / "datalens-begun").mkdir()  # without a lock yet, or of version 0.1.0
    (temporary / "datalens-file").write_text("")
    (temporary / "other").mkdir()
    (temporary / "other" / ALIVE).write_text("")
    (temporary / "datalens-link").symlink_to(temporary / "other")
    killed(leave_a_folder)
    before = set(temporary.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)  # another user's are not ours to remove
        clear_abandoned()
    assert set(temporary.iterdir()) == before
    clear_abandoned()
    gone = before - set(temporary.iterdir())
    assert len(gone) == 1 and gone.pop() not in (Path(mine.name), temporary / "datalens-begun")
    name = mine.name
    del mine
    gc.collect()
    assert not Path(name).exists()


def test_a_killed_fit_leaves_nothing_for_long(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = np.zeros((12, 8, 8), np.uint8), np.arange(12) % 2

    def fit() -> None:
        DataLens(nominal_size=12, classes=[0, 1]).fit(images, labels)

    def begin(options: Any, **_: Any) -> None:
        options.out.mkdir()
        (options.out / "ledger.jsonl").write_text("private")
        die()

    class Reached(Exception):
        pass

    def look(options: Any, **_: Any) -> None:
        assert [path.name for path in temporary.iterdir()] == [options.out.parent.name]  # its own, and no other
        raise Reached

    monkeypatch.setattr("datalens.driver.train", begin)
    killed(fit)
    assert len(list(temporary.iterdir())) == 1
    monkeypatch.setattr("datalens.driver.train", look)
    with pytest.raises(Reached):
        fit()
