"""The command line, called in this process (to start Python and torch anew takes seconds), and a small run."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--data", "digits", "--preset", "quick", "--teachers", "20")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout; with --json it is also the only one."""
        return json.loads(self.out.splitlines()[-1])

    def succeeded(self) -> "Result":
        assert self.code == 0, self.err
        assert "Traceback" not in self.err
        return self

    def refused(self, code: int = 2, *, after_start: bool = False) -> str:
        """One line a person can read, the same for a machine that asked for it, the right exit code. Returns the line.

        `after_start`: the line about the plan may come before it.
        """
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        *before, line = self.err.splitlines() or [""]
        assert line.startswith("datalens: ")
        assert self.out == "" or self.json == {"error": line.removeprefix("datalens: "), "exit_code": code}
        assert not [earlier for earlier in before if earlier.startswith("datalens: ")]
        assert after_start or not before
        return line


def call(*arguments: object) -> Result:
    """`datalens …`. An exception that the command line does not turn into a line goes through: the test fails."""
    from datalens.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    code = ended.value.code
    assert code is None or isinstance(code, int)
    said = [line for line in err.getvalue().splitlines(keepends=True) if not line.endswith(" so far\n")]
    return Result(code=code or 0, out=out.getvalue(), err="".join(said))  # without lines of a busy machine


@pytest.fixture(scope="session")
def datalens() -> Callable[..., Result]:
    return call


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Options of a run that takes a fraction of a second; add --steps and --out."""
    return SMALL


@pytest.fixture(scope="session")
def script() -> list[str]:
    """The installed console script, for the few tests that need a real process."""
    installed = Path(sys.executable).with_name("datalens")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "datalens"]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a child process: one thread each, and streams buffered as a person's would be."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps. Look, do not touch: use `copy` for that."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with _quickly():
        call("train", *SMALL, "--steps", 3, "--out", out).succeeded()
    return out


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A finished run to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """One thread: tensors this small are slower on two, and tenfold so where another job has one of the cores.

    And a generator of a few thousand weights. Processes of their own have the real one.
    """
    import torch

    from datalens.methods import topagg as method

    make, threads = method.dcgan_architecture, torch.get_num_threads()

    def narrow(*sizes: Any, **named: Any) -> Any:
        full = make(*sizes, **named)
        return dataclasses.replace(full, dense=min(32, full.dense), widths=(8,) * len(full.widths))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "dcgan_architecture", narrow)
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quickly() -> Iterator[None]:
    with _quickly():
        yield


class TooSlow(BaseException):
    """Not an OSError, which the command line would explain away."""


@pytest.fixture
def time_limit() -> Iterator[Callable[[float], None]]:
    """Ends the test after so many seconds, for what is known to hang."""

    def ring(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
