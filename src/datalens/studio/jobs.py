"""Runs that the studio starts: each is a process `datalens …` of its own, and all of its state is in files.

So a studio that is killed loses nothing, and two studios on one folder see the same runs. While a process works on a
run, it holds the lock on a file of that run; the lock ends with the process, however that ends.
"""

import contextlib
import fcntl
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datalens.data.own.tables import PATHS, read_csv
from datalens.errors import DatalensError
from datalens.files import replacing
from datalens.plans.registry import read_settings
from datalens.privacy.budget import DataBudget
from datalens.privacy.ledger import Budget, json_number, read_ledger
from datalens.released.certificate import PICTURE
from datalens.run.folder import PREVIEW, read_config
from datalens.run.reservation import describe

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")
LONGEST = 4000  # characters of one answer in a form
QUICK_SECONDS = 540  # for inspect, plan and verify
MOST_IMAGES = 20_000  # drawn to be downloaded: a page holds them all
BUDGETS, IMAGES = "budgets", "images"  # folders beside the runs
_KEPT = ".studio"  # another: commands and their output
_DATA = (".csv", ".parquet", ".npz", "-ubyte")
_MOST_ENTRIES = 500

# Fields of a form → options of the command line that they become.
READING = ("label", "classes", "image_size", "record_id")
PUBLIC = ("nominal_size", "epsilon", "delta")


@dataclass(frozen=True, kw_only=True)
class Studio:
    """The two folders of a studio: nothing outside them is shown or written."""

    data: Path
    out: Path
    lines: dict[str, str] = field(default_factory=dict)  # "of": the file of what a command says while it works

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

    def entries(self, name: str) -> dict[str, Any]:
        """Return the folders and files of data in a folder, and how many of them are not listed."""
        folder = self.inside(name)
        found, others = [], 0
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                is_folder = entry.is_dir(follow_symlinks=False)
                is_data = entry.name.endswith(_DATA)
                if not entry.name.startswith(".") and (is_folder or is_data):
                    path = Path(entry.path).relative_to(self.data.resolve()).as_posix()
                    found.append({"name": entry.name, "path": path, "folder": is_folder})
                else:
                    others += 1
        found.sort(key=lambda entry: bool(entry["folder"]))  # files first
        return {
            "entries": found[:_MOST_ENTRIES],
            "more": max(0, len(found) - _MOST_ENTRIES),
            "others": others,
        }

    # --- commands ---------------------------------------------------------------------------------

    def reading(self, asked: dict[str, Any]) -> dict[str, str]:
        """Return how the data is read, from the answers in a form; a file of classes is named by its full path.

        Raises:
            DatalensError: the data, or a file that it names, is outside the folder of the studio.
        """
        data = self.inside(_text(asked.get("data")))
        self._check_confined(data)
        given = {name: _text(asked.get(name)).strip() for name in READING}
        if "," not in given["classes"] and given["classes"]:
            named = self.data.resolve() / given["classes"]
            if named.is_file() or os.path.isfile(given["classes"]):
                given["classes"] = str(self.inside(given["classes"]))
        return {"data": str(data), **{name: value for name, value in given.items() if value}}

    def _check_confined(self, data: Path) -> None:
        """Raise if a list names, or a link is, a file outside the folder of the studio."""
        root = self.data.resolve()
        if data.suffix == ".csv":
            columns, rows = read_csv(data)
            column = next((name for name in PATHS if name in columns), None)
            names = [] if column is None else [row[column] for row in rows]
            paths = (os.path.join(data.parent, name) for name in names)
        else:
            folder = data if data.is_dir() else data.parent
            paths = (entry.path for entry in os.scandir(folder) if entry.is_symlink() and entry.name.endswith(_DATA))
        inside = os.path.join(root, "")
        if any("\0" not in path and not os.path.realpath(path).startswith(inside) for path in paths):
            raise DatalensError(
                f"{data.name} leads to files outside the folder that the studio was started with: start it with a "
                "folder that holds them all"
            )

    def words(self, verb: str, asked: dict[str, Any], *more: str) -> list[str]:
        """Return a command line that reads data, from the answers in a form."""
        given = self.reading(asked)
        path = given.pop("data")
        words = [verb, *more, path if verb == "inspect" else f"--data={path}"]
        if verb not in ("inspect", "evaluate"):
            given |= {name: value for name in PUBLIC if (value := _text(asked.get(name)).strip())}
        words += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        if asked.get("grayscale") is True:
            words.append("--grayscale")
        if verb == "train" and _text(asked.get("budget")):
            words.append(f"--budget={self.budget_folder(asked['budget'])}")
        return [*words, "--json"]

    def commands(self, asked: dict[str, Any]) -> dict[str, str]:
        """Return the commands that the answers in a form amount to, as a person would type them; nothing is run."""
        name = _text(asked.get("name"))
        out = [f"--out={self.run_folder(name)}"] if NAME.fullmatch(name) else []
        return {
            "inspect": shown(self.words("inspect", asked)),
            "plan": shown(self.words("plan", asked)),
            "train": shown(self.words("train", asked, *out)),
        }

    def ask(self, words: list[str]) -> dict[str, Any]:
        """Run a command that is soon done, and return what it says, with the command itself."""
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as said:
            self.lines["of"] = said.name
            try:
                done = subprocess.run(
                    _command(words),
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    check=False,
                    timeout=QUICK_SECONDS,
                    stdin=subprocess.DEVNULL,
                )
            except subprocess.TimeoutExpired:
                raise DatalensError(
                    f"no answer in {QUICK_SECONDS} seconds: run it in a shell: {shown(words)}"
                ) from None
            errors = Path(said.name).read_text(encoding="utf-8", errors="replace")
        last = done.stdout.splitlines()[-1:]
        with contextlib.suppress(ValueError):
            said = json.loads(last[0]) if last else {}
            if said and "error" not in said:
                return {**said, "command": shown(words)}
        raise DatalensError(_last_line(errors) or f"the command ended with code {done.returncode}")

    def said(self) -> str:
        """Return the last line that the command said which was asked last, such as how long it takes."""
        try:
            lines = Path(self.lines["of"]).read_text(encoding="utf-8", errors="replace").splitlines()
        except (KeyError, OSError):
            return ""
        return lines[-1] if lines else ""

    # --- runs -------------------------------------------------------------------------------------

    def run_folder(self, name: str) -> Path:
        if not NAME.fullmatch(_text(name)):
            raise DatalensError("a run is named by letters, digits, - and _, and begins with a letter or a digit")
        if name in (BUDGETS, IMAGES):
            raise DatalensError(f"{name} is a folder of the studio: choose another name")
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
        """Continue a run that was stopped."""
        kept = self._read(name)
        self._begin(name, ["train", f"--out={self.run_folder(name)}", "--resume", "--json"], kept["asked"])
        return self.status(name)

    def stop(self, name: str) -> dict[str, Any]:
        """Ask a run to stop after its step, as Ctrl-C does. What was paid for is kept."""
        kept = self._read(name)
        if self.working(name):
            if kept["pid"] is None:
                raise DatalensError(f"the studio was killed while it began {name}: end its process in a shell")
            with contextlib.suppress(ProcessLookupError):
                os.kill(kept["pid"], signal.SIGINT)
        return self.status(name)

    def evaluate(self, name: str) -> dict[str, Any]:
        """Measure a run on held-out images, for the owner; the run's page shows the result when it is there."""
        kept = self._read(name)
        words = self.words("evaluate", kept["asked"], str(self.run_folder(name)))
        self._begin(name, [*words, "--seeds=1"], kept["asked"], doing="evaluate")
        return self.status(name)

    def sample(self, name: str, count: object) -> dict[str, Any]:
        """Draw images to hand on, with their papers.

        Raises:
            DatalensError: they are too many for a page.
        """
        kept, many = self._read(name), _text(count).strip()
        if not many.isdecimal() or not 1 <= int(many[:9]) <= MOST_IMAGES:
            raise DatalensError(f"draw 1 to {MOST_IMAGES} images here; more with `datalens sample` in a shell")
        self._begin(name, self._drawing(name, int(many)), kept["asked"], doing="sample")
        return self.status(name)

    def images(self, name: str) -> Path:
        """Return the folder of the images that were drawn to hand on."""
        return self.out / IMAGES / self.run_folder(name).name

    def _drawing(self, name: str, count: int) -> list[str]:
        run, folder = self.run_folder(name), self.images(name)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ["sample", str(run), f"--count={count}", f"--out={folder}/", "--force", "--json"]

    # --- budgets ----------------------------------------------------------------------------------

    def budget_folder(self, name: object) -> Path:
        """Return the folder of a budget that several runs share."""
        if not NAME.fullmatch(_text(name)):
            raise DatalensError("a budget is named by letters, digits, - and _, and begins with a letter or a digit")
        return self.out / BUDGETS / str(name)

    def make_budget(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Make a budget, whose limit nobody can change later."""
        folder = self.budget_folder(asked.get("name"))
        limit = [f"--{name}={_text(asked.get(name)).strip()}" for name in ("epsilon", "delta")]
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.ask(["budget", str(folder), *limit, "--json"])

    def budgets(self) -> list[dict[str, Any]]:
        """Return every budget, what is reserved in it, and what is left."""
        found = []
        for folder in sorted(path for path in (self.out / BUDGETS).glob("*") if NAME.fullmatch(path.name)):
            try:
                with DataBudget.open(folder) as budget:
                    fields, lines = describe(budget)
                fields |= {"lines": lines[:3], "runs": len(fields["runs"])}
            except (DatalensError, OSError) as error:
                fields = {"lines": [f"cannot be read: {error}"], "runs": 0}
            found.append({"name": folder.name, "command": shown(["budget", str(folder)]), **fields})
        return found

    # --- what a run is at -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all runs, the newest first."""
        kept = [path for path in (self.out / _KEPT).glob("*.json") if NAME.fullmatch(path.stem)]
        began = {path.stem: float(_json_of(path).get("first", 0)) for path in kept}
        return sorted(began, key=lambda name: (-began[name], name))

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
        elif released and (kept["doing"] != "train" or not (said.get("interrupted") or "error" in said)):
            state = "done"
        else:
            state = "stopped" if (folder / "config.json").is_file() else "failed"
        error = ""
        if not working and "error" in said:
            error = str(said["error"])
        evaluation = _json_of(folder / "evaluation.json").get("utility", {}) if released else {}
        picture = folder / "release" / PICTURE if released else folder / PREVIEW
        images = self.images(name)
        return {
            "name": name,
            "state": state,
            "doing": kept["doing"],
            "released": released,
            "error": error,
            "command": shown(kept["words"] if working else kept.get("train", kept["words"])),
            "commands": self._next_commands(name, kept) if released else [],
            "picture": picture.stat().st_mtime if picture.is_file() else None,
            "images": _images_in(images) if released and not working else None,
            "reads": {name: kept["asked"].get(name) or "" for name in ("data", *READING, "grayscale")},
            "accuracy": evaluation.get("accuracy"),
            "accuracy_real": evaluation.get("accuracy_real"),
            **_progress(folder),
        }

    def _next_commands(self, name: str, kept: dict[str, Any]) -> list[str]:
        run = str(self.run_folder(name))
        words = [["verify", run], ["sample", run, f"--out={self.images(name)}/"], ["report", run]]
        with contextlib.suppress(DatalensError):  # the data is not there any more
            words.append(self.words("evaluate", kept["asked"], run))
        return [shown(one) for one in words]

    def _begin(self, name: str, words: list[str], asked: dict[str, Any], *, doing: str = "train") -> None:
        (self.out / _KEPT).mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _locked(self._kept(name, "lock"), tries=20)
        if lock is None:
            raise DatalensError(f"{name} is at work already: wait until it is done, or stop it")
        now = time.time()
        before = _json_of(self._kept(name, "json")) if self.run_folder(name).exists() else {}
        kept = {"words": words, "asked": asked, "doing": doing, "pid": None, "began": now}
        kept |= {"first": before.get("first", now), "train": before.get("train", words)}
        try:
            self._keep(name, kept)  # before it begins: whoever is killed in between leaves no run that nobody knows
            with open(self._kept(name, "out"), "wb") as out, open(self._kept(name, "err"), "wb") as err:
                child = subprocess.Popen(
                    _command(words),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
            self._keep(name, {**kept, "pid": child.pid})
        finally:
            os.close(lock)

    def _keep(self, name: str, kept: dict[str, Any]) -> None:
        with replacing(self._kept(name, "json"), private=True) as stream:
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
        ledger = folder / "ledger.jsonl"
        budget, spent = _spent(ledger, ledger.stat().st_mtime_ns, ledger.stat().st_size)
        settings = read_settings(read_config(folder)["settings"])
        planned = settings.steps_planned
    except (DatalensError, OSError, KeyError, ValueError):
        return {}
    lines = (
        (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if (folder / "metrics.jsonl").exists()
        else []
    )
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    if settings.stepped:  # of several parts, the one whose steps are planned logs the length of its gradients
        entries = [one for one in entries if "gradient" in one]
    times = list({one.get("step"): one.get("time") for one in entries}.values())
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


@functools.lru_cache(maxsize=256)  # a page asks every second, and pricing a long ledger takes longer
def _spent(ledger: Path, changed: int, size: int) -> tuple[Budget, float]:
    budget, events = read_ledger(ledger)
    return budget, budget.pricing().epsilon(events, budget.delta) if events else 0.0


def _images_in(folder: Path) -> int | None:
    """Return how many images a folder that `datalens sample` wrote has."""
    with contextlib.suppress(OSError), (folder / "metadata.csv").open("rb") as lines:
        return sum(1 for _ in lines) - 1
    return None


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
