"""Runs that the studio starts: each is a process `datalens …` of its own, and all of its state is in files.

So a studio that is killed loses nothing, and two studios on one folder see the same runs. While a process works on a
run, it holds the lock on a file of that run; the lock ends with the process, however that ends.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datalens.errors import DatalensError
from datalens.files import replacing
from datalens.plans.registry import read_settings
from datalens.privacy.ledger import json_number, read_ledger
from datalens.run.folder import read_config

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")
LONGEST = 4000  # characters of one answer in a form
QUICK_SECONDS = 540  # for inspect, plan, verify and sample
_KEPT = ".studio"  # beside the runs: commands and their output

# Fields of a form → options of the command line that they become.
READING = ("label", "classes", "image_size", "record_id")
PUBLIC = ("nominal_size", "epsilon", "delta")


@dataclass(frozen=True, kw_only=True)
class Studio:
    """The two folders of a studio: nothing outside them is shown or written."""

    data: Path
    out: Path

    def inside(self, name: str) -> Path:
        """Return a path in the folder of data.

        Raises:
            DatalensError: it leads out of it, or does not exist.
        """
        root = self.data.resolve()
        path = (root / _text(name)).resolve()
        if not path.is_relative_to(root):
            raise DatalensError("this path leads out of the folder that the studio was started with")
        if not path.exists():
            raise DatalensError("there is no such file or folder any more: choose again")
        return path

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Return the folders and files of data in a folder."""
        folder = self.inside(name)
        found = []
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                is_folder = entry.is_dir(follow_symlinks=False)
                is_data = entry.name.endswith((".csv", ".parquet", ".npz", "-ubyte"))
                if not entry.name.startswith(".") and (is_folder or is_data):
                    path = Path(entry.path).relative_to(self.data.resolve()).as_posix()
                    found.append({"name": entry.name, "path": path, "folder": is_folder})
        return sorted(found, key=lambda entry: bool(entry["folder"]))[:500]  # files first

    # --- commands ---------------------------------------------------------------------------------

    def words(self, verb: str, asked: dict[str, Any], *more: str) -> list[str]:
        """Return a command line that reads data, from the answers in a form."""
        path = str(self.inside(_text(asked.get("data"))))
        given = [path] if verb == "inspect" else [f"--data={path}"]
        names = READING if verb in ("inspect", "evaluate") else (*READING, *PUBLIC)
        for name in names:
            value = _text(asked.get(name)).strip()
            if value:
                given.append(f"--{name.replace('_', '-')}={value}")
        if asked.get("grayscale") is True:
            given.append("--grayscale")
        return [verb, *more, *given, "--json"]

    def ask(self, words: list[str]) -> dict[str, Any]:
        """Run a command that is soon done, and return what it says, with the command itself."""
        done = subprocess.run(
            _command(words),
            capture_output=True,
            text=True,
            check=False,
            timeout=QUICK_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        last = done.stdout.splitlines()[-1:]
        with contextlib.suppress(ValueError):
            said = json.loads(last[0]) if last else {}
            if said and "error" not in said:
                return {**said, "command": shown(words)}
        raise DatalensError(_last_line(done.stderr) or f"the command ended with code {done.returncode}")

    # --- runs -------------------------------------------------------------------------------------

    def run_folder(self, name: str) -> Path:
        if not NAME.fullmatch(_text(name)):
            raise DatalensError("a run is named by letters, digits, - and _, and begins with a letter or a digit")
        return self.out / name

    def start(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Begin a run.

        Raises:
            DatalensError: there is a run of this name, or an answer is missing.
        """
        folder = self.run_folder(name)
        words = self.words("train", asked, f"--out={folder}")
        if folder.exists() or self.working(name):
            raise DatalensError(f"there is a run {name} already: choose another name")
        self._begin(name, words, asked)
        return self.status(name)

    def resume(self, name: str) -> dict[str, Any]:
        """Go on with a run that was stopped."""
        kept = self._read(name)
        self._begin(name, ["train", f"--out={self.run_folder(name)}", "--resume", "--json"], kept["asked"])
        return self.status(name)

    def stop(self, name: str) -> dict[str, Any]:
        """Ask a run to stop after its step, as Ctrl-C does. What was paid for is kept."""
        kept = self._read(name)
        if self.working(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(kept["pid"], signal.SIGINT)
        return self.status(name)

    def evaluate(self, name: str) -> dict[str, Any]:
        """Measure a run on held-out images, for the owner; the run's page shows the result when it is there."""
        kept = self._read(name)
        words = self.words("evaluate", kept["asked"], str(self.run_folder(name)))
        self._begin(name, [*words, "--seeds=1"], kept["asked"], doing="evaluate")
        return self.status(name)

    def names(self) -> list[str]:
        """Return the names of all runs, the newest first."""
        kept = (self.out / _KEPT).glob("*.json") if (self.out / _KEPT).is_dir() else iter(())
        return [path.stem for path in sorted(kept, key=lambda path: (-path.stat().st_mtime, path.stem))]

    def working(self, name: str) -> bool:
        """Return whether a process works on this run."""
        lock = _locked(self._kept(name, "lock"))
        if lock is None:
            return True
        os.close(lock)
        return False

    def status(self, name: str) -> dict[str, Any]:
        """Return what is known about a run, from its files."""
        folder, kept = self.run_folder(name), self._read(name)
        working = self.working(name)
        said = _json_line(self._kept(name, "out"))
        released = (folder / "release" / "certificate.json").is_file()
        if working:
            state = "working"
        elif released and (kept["doing"] == "evaluate" or not (said.get("interrupted") or "error" in said)):
            state = "done"
        else:
            state = "stopped" if (folder / "config.json").is_file() else "failed"
        error = ""
        if not working and "error" in said:
            error = str(said["error"])
        evaluation = _json_of(folder / "evaluation.json").get("utility", {}) if released else {}
        return {
            "name": name,
            "state": state,
            "doing": kept["doing"],
            "released": released,
            "error": error,
            "command": shown(kept["words"]),
            "reads": {name: kept["asked"].get(name) or "" for name in ("data", *READING, "grayscale")},
            "accuracy": evaluation.get("accuracy"),
            "accuracy_real": evaluation.get("accuracy_real"),
            **_progress(folder),
        }

    def _begin(self, name: str, words: list[str], asked: dict[str, Any], *, doing: str = "train") -> None:
        (self.out / _KEPT).mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _locked(self._kept(name, "lock"), tries=20)
        if lock is None:
            raise DatalensError(f"{name} is at work already: wait until it is done, or stop it")
        try:
            with open(self._kept(name, "out"), "wb") as out, open(self._kept(name, "err"), "wb") as err:
                child = subprocess.Popen(
                    _command(words),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        finally:
            os.close(lock)
        kept = {"words": words, "asked": asked, "doing": doing, "pid": child.pid, "began": time.time()}
        with replacing(self._kept(name, "json")) as stream:
            stream.write(json.dumps(kept).encode())

    def _kept(self, name: str, suffix: str) -> Path:
        return self.out / _KEPT / f"{self.run_folder(name).name}.{suffix}"

    def _read(self, name: str) -> dict[str, Any]:
        kept = _json_of(self._kept(name, "json"))
        if not kept:
            raise DatalensError(f"there is no run {name}")
        return kept


def shown(words: list[str]) -> str:
    """Return a command as a person would type it."""
    return shlex.join(["datalens", *(word for word in words if word != "--json")])


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "datalens", *words]


def _text(value: object) -> str:
    """Return an answer as text.

    Raises:
        DatalensError: a command line cannot have it.
    """
    text = "" if value is None else str(value) if isinstance(value, str | int | float) else None
    if text is None or len(text) > LONGEST or not text.isprintable():
        raise DatalensError("an answer is too long, or is not text")
    return text


def _locked(path: Path, *, tries: int = 1) -> int | None:
    """Return a locked file, or None if another process has locked it. (A look at the lock holds it for a moment.)"""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(tries):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        time.sleep(0.02 if tries > 1 else 0)
    os.close(handle)
    return None


def _progress(folder: Path) -> dict[str, Any]:
    """Return the steps and the budget of a run, or an empty dict before it has begun."""
    try:
        config = read_config(folder)
        budget, events = read_ledger(folder / "ledger.jsonl")
        spent = budget.pricing().epsilon(events, budget.delta) if events else 0.0
        planned = read_settings(config["settings"]).steps_planned
    except (DatalensError, OSError, KeyError, ValueError):
        return {}
    lines = (
        (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if (folder / "metrics.jsonl").exists()
        else []
    )
    times = [json.loads(line).get("time") for line in lines if line.endswith("}")]
    done = len(times)
    left = None
    if done > 1 and planned > done:
        left = round((times[-1] - times[0]) / (done - 1) * (planned - done))
    return {
        "steps": done,
        "planned": planned,
        "budget": budget.describe(budget.epsilon),
        "spent": budget.describe(spent),
        "part": min(1.0, spent / budget.epsilon) if json_number(budget.epsilon) != "inf" else None,
        "seconds_left": left,
    }


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json_line(path: Path) -> dict[str, Any]:
    """Return the JSON object on the last line of a file, if there is one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        return found if isinstance(found, dict) else {}
    return {}


def _last_line(text: str) -> str:
    lines = [line.removeprefix("datalens: ") for line in text.splitlines() if line.startswith("datalens: ")]
    return lines[-1] if lines else ""
