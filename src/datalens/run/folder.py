"""A run folder: everything about one training run. Its subfolder `release/` may be handed on.

Everything but `release/` is private: folders have mode 0700, files 0600.

config.json      options and settings
ledger.jsonl     every charge, durable before its noise is used
metrics.jsonl    for the owner: losses and the like, not covered by ε
checkpoints/     teachers, a file for each rank; and `latest`: the student, the step and the names of those files
                 (teachers are trained on records, so whoever has them learns something about every record)
journal/         released values since the last checkpoint
publication/     of a published accuracy: its ledger and journal; beside it publication.json, with its table
tensorboard/     for the owner: logs for TensorBoard, on request
preview.png      images of what has been released so far, until the run is done
owner.html       for the owner: written by `datalens report`
release/         generator, certificate, a copy of the ledger, a picture, a report
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Protocol

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.files import for_the_owner, load_tensors, save_tensors, sync_directory, write_atomically
from datalens.plans.base import Settings
from datalens.plans.registry import read_settings
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger
from datalens.run import live
from datalens.run.board import Board, is_due
from datalens.run.places import check_text, check_vacant
from datalens.run.wholeness import check_kept, check_promised, check_whole, used

if TYPE_CHECKING:
    from torch import Tensor

    from datalens.released.weights import AnyGenerator

CHECKPOINT_SECONDS = 20.0
# Larger states are not written if the method keeps a journal: replaying the journal is cheaper than writing.
CHECKPOINT_BYTES = 4 * 2**30


class Stateful(Protocol):
    """An object whose state checkpoints save and restore."""

    def state(self) -> "dict[str, Tensor]": ...

    def load_state(self, state: "dict[str, Tensor]") -> None: ...


class Spread(Protocol):
    """The teachers of all ranks (see `run.remote_teachers.Crowd`)."""

    def state_bytes(self) -> int: ...

    def save(self, step: int) -> list[str]: ...

    def restore(self, step: int, names: list[str]) -> None: ...


class Alone:
    """State other than the student's, in a run with one process: one file for each checkpoint."""

    def __init__(self, what: Stateful, folder: Path) -> None:
        self._what = what
        self._folder = folder

    def state_bytes(self) -> int:
        return sum(value.nbytes for value in self._what.state().values())

    def save(self, step: int) -> list[str]:
        name = part_name(step, range(1))
        save_tensors(self._folder / name, self._what.state(), {"step": str(step), "first": "0", "end": "1"})
        return [name]

    def restore(self, step: int, names: list[str]) -> None:
        path = self._folder / names[0]
        with _damage_explained(path):
            state, facts = load_tensors(path)
            if int(facts["step"]) != step:
                raise ValueError(f"it is of step {facts['step']}, not {step}")
            self._what.load_state(state)


class NoTeachers:
    """The teachers of a method without teachers, whose whole state is the student's."""

    def state_bytes(self) -> int:
        return 0

    def save(self, step: int) -> list[str]:
        return []

    def restore(self, step: int, names: list[str]) -> None:
        pass


class Run:
    """An open run folder, locked for this process until it ends.

    Attributes:
        interrupted: whether the run was asked to stop before its last step.
        completed: number of steps that the student has learned from.
        answered: number of answered queries, if the method charges for answers.
        lost: number of charges that interruptions lost, if steps do not tell it.
        facts: what `--json` prints besides the facts about all runs.
    """

    def __init__(self, path: Path, config: dict[str, Any], lock: IO[bytes]) -> None:
        self.path = path
        self.config = config
        self.settings = read_settings(config["settings"])
        self.schema = Schema.from_dict(config["schema"])
        self.interrupted = False
        self.completed = 0
        self.answered: int | None = None
        self.lost: int | None = None
        self.facts: dict[str, Any] = {}
        self._lock = lock
        self._written = 0  # steps of the last checkpoint
        self._keep: Callable[[], None] = lambda: None
        self._view: live.View | None = None
        self._board: Board | None = None
        self.ledger = Ledger.open(path / "ledger.jsonl")
        self.journal = Journal(path / "journal", self.ledger)
        self.ledger.make_room = self.journal.make_room
        try:
            budget = self.ledger.budget
            check_promised(path, options=config["options"], settings=self.settings, budget=budget)
            check_whole(path, settings=self.settings, ledger=self.ledger, checkpoint=path / "checkpoints" / LATEST)
        except BaseException:
            self.ledger.close()
            raise

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        options: dict[str, Any],
        settings: Settings,
        budget: Budget,
        schema: Schema,
        data_sha256: str,
        launch: str | None = None,
        data_budget: "Callable[[], dict[str, str] | None] | None" = None,
    ) -> "Run":
        """Create a run folder and open it. It is written completely beside its place, and then moved there.

        Args:
            path: the folder, which must not exist yet, or be empty.
            options: what config.json keeps of the options.
            data_sha256: fingerprint of all records.
            launch: the call of torchrun that began it (see `run.ranks.launch`).
            data_budget: makes the reservation in the budget of the data set (see `reservation.begin`), and returns what
                config.json keeps of it. Called last, after everything else that can fail.

        Raises:
            DatalensError: there is something in `path`, or no room in the budget.
        """
        check_vacant(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            for folder in (draft, draft / "checkpoints", draft / "journal"):
                folder.mkdir(mode=0o700)
            Ledger.create(draft / "ledger.jsonl", budget).close()
            kept = None if data_budget is None else data_budget()
            config = {
                "version": 1,
                "options": options,
                "settings": settings.as_dict(),
                "schema": schema.as_dict(),
                "data_sha256": data_sha256,  # of the records: private, like all of this file
                "launch": launch,
                **({} if kept is None else {"data_budget": kept}),
            }
            write_atomically(draft / "config.json", json.dumps(config, indent=1).encode())
            for file in (draft / "config.json", draft / "ledger.jsonl"):
                file.chmod(0o600)  # the ledger's copy in release/ is the one to hand on
            os.replace(draft, path)
            sync_directory(path.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return cls.open(path)

    @classmethod
    def resume(cls, path: Path) -> "Run":
        """Open a run to continue it from what it has learned.

        Raises:
            DatalensError: it cannot be opened (see `open`), or nothing of what it learned is left.
        """
        run = cls.open(path)
        try:
            latest = path / "checkpoints" / LATEST
            check_kept(path, settings=run.settings, ledger=run.ledger, journal=run.journal, checkpoint=latest)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open and lock a run folder.

        Raises:
            DatalensError: it is not a run folder, damaged, or locked by another process.
        """
        check_text(path)
        config = read_config(path)
        lock = open(path / "lock", "wb", opener=for_the_owner)  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise DatalensError(
                f"another process is training in {path}: wait for it, or choose another --out"
            ) from None
        try:
            return cls(path, config, lock)
        except BaseException:
            lock.close()
            raise

    @property
    def noise_seed(self) -> int | None:
        """Seed of the next noise; None: noise comes from the operating system.

        It changes with every charge, so that no noise is used twice.
        """
        seed = self.config["options"]["noise_seed"]
        return None if seed is None else seed + len(self.ledger.events)

    def close(self) -> None:
        try:
            if self._board is not None:
                self._board.close()
        finally:
            self.journal.close()
            self.ledger.close()
            self._lock.close()

    def steps(self, count: int, *, student: Stateful, teachers: Spread, part: str = "") -> Iterator[int]:
        """Yield the steps still to do, show progress, and write checkpoints. Ends early if the run is interrupted.

        The process may also be killed at any moment: what was charged stays charged, and journaled values are reused.

        Args:
            count: number of all steps.
            student: learns from released values.
            teachers: the rest of the state of a checkpoint.
            part: the part of the run that these steps belong to, if it has several. The charges of these steps name it,
                and a checkpoint forgets journaled values of this part alone. Only one part of a run has checkpoints.

        Raises:
            DatalensError: the checkpoint is damaged, or of another part.
        """
        self.completed = self._written = start = self._restore(student, teachers, part)

        def keep() -> None:
            step = self.completed
            if step > self._written and self.journal.find(self.ledger, step=step - 1, part=part) is None:
                self._checkpoint(step, student, teachers, part)

        self._keep = keep
        written, cost = time.monotonic(), 0.0
        with self._until_interrupted(), self.watched("training", count) as view:
            view.done(start)
            for step in range(start, count):
                yield step
                self.completed = step + 1
                view.done(step + 1)
                self._draw(step + 1, count, student)
                due = time.monotonic() - written > max(CHECKPOINT_SECONDS, 20 * cost)
                if due or self.interrupted or step + 1 == count:
                    began = time.monotonic()
                    self._checkpoint(step + 1, student, teachers, part)
                    written, cost = time.monotonic(), time.monotonic() - began
                if self.interrupted:
                    self.interrupted = step + 1 < count  # after the last step, nothing was cut short
                    return

    def keep(self) -> None:
        """Write what was learned since the last checkpoint, unless a journal has it.

        For a run that ends before its last step, when an interruption had cost some: gone on with, it would have less
        to release than it has released. Not for teachers on several ranks: the others have been dismissed by then.
        """
        self._keep()

    def log(self, step: int, **values: float) -> None:
        """Write one line to metrics.jsonl, for the owner only: losses are not covered by ε."""
        spent = self.ledger.spent()
        line = {"step": step, "time": round(time.time(), 3), "epsilon_spent": str(spent), **values}
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8", opener=for_the_owner) as file:
            file.write(json.dumps(line) + "\n")
        if self._view is not None:
            self._view.told(values)
        if self._board is not None:
            self._board.scalars(step, {"epsilon_spent": spent, **values})

    @contextlib.contextmanager
    def watched(self, what: str, total: int) -> "Iterator[live.View]":
        """Show progress, and logged values, on the terminal until the block ends."""
        with live.view(what, total, self.ledger) as self._view:
            yield self._view

    def open_board(self) -> None:
        """Write logged values for TensorBoard, too, from now on."""
        self._board = Board(self.path)

    def preview(self, generator: "AnyGenerator") -> None:
        """Draw what has been released so far, for whoever watches the run. A full disk does not stop the run here."""
        from datalens.released.drawing import draw_picture

        picture = BytesIO()
        draw_picture(generator, self.schema, shown=False).save(picture, "PNG")
        with contextlib.suppress(OSError):
            write_atomically(self.path / PREVIEW, picture.getvalue(), private=True)

    def show_release(self, release: Path) -> None:
        (self.path / PREVIEW).unlink(missing_ok=True)
        if self._board is not None and (release / "samples.png").is_file():
            self._board.file(self.completed, release / "samples.png")

    def _draw(self, step: int, count: int, student: Stateful) -> None:
        generator: Any = getattr(student, "generator", getattr(student, "module", None))
        if not hasattr(generator, "architecture") or not is_due(step, count):
            return
        if self._board is not None:
            self._board.generator(step, generator)
        if step < count:
            training = generator.training
            self.preview(generator.eval())
            generator.train(training)

    def _checkpoint(self, step: int, student: Stateful, teachers: Spread, part: str) -> None:
        """Write a checkpoint: first every rank's teachers; then one file with the student, the step and their names.

        The last file makes the checkpoint valid. A kill at any moment leaves the old one with its files or the new one.
        """
        large = teachers.state_bytes() > CHECKPOINT_BYTES
        if large and self.journal.find(self.ledger, step=step - 1, part=part) is not None:
            return
        folder = self.path / "checkpoints"
        names = teachers.save(step)
        facts = {"step": str(step), "teachers": json.dumps(names), **used(self.ledger, self.answered, part=part)}
        save_tensors(folder / LATEST, student.state(), facts)
        self._written = step
        for path in folder.iterdir():
            if path.name not in (LATEST, *names):
                path.unlink()
        self.journal.forget_before(self.ledger, step=step, part=part)

    def _restore(self, student: Stateful, teachers: Spread, part: str) -> int:
        path = self.path / "checkpoints" / LATEST
        if not path.exists():
            return 0
        with _damage_explained(path):
            state, facts = load_tensors(path)
            step, names = int(facts["step"]), json.loads(facts["teachers"])
            if facts.get("part", "") != part:
                raise DatalensError(f"{path} is of another part of this run: only one part of a run has checkpoints")
            self.answered = int(facts["answered"]) if "answered" in facts else None
            student.load_state(state)
        teachers.restore(step, names)
        return step

    @contextlib.contextmanager
    def _until_interrupted(self) -> Iterator[None]:
        """Let the first Ctrl-C (or SIGTERM) finish and save the current step; a second one stops at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            os.write(2, b"finishing this step; interrupt again to stop at once\n")

        try:
            before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread may handle signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


LATEST = "latest.safetensors"
PREVIEW = "preview.png"


def part_name(step: int, numbers: range) -> str:
    """Return the name of the file with the states of these teachers after so many steps."""
    return f"teachers-{step}-{numbers[0]}-{numbers[-1]}.safetensors"


def load_part(folder: Path, names: list[str], *, step: int, numbers: range) -> "dict[str, Tensor]":
    """Return the states of teachers `numbers`, from whichever files have them: the number of ranks may have changed.

    Raises:
        DatalensError: a file is damaged, or there is none with one of these teachers.
    """
    import torch
    from safetensors import safe_open

    parts: dict[str, list[Tensor]] = {}
    wanted = numbers.start
    for name in names:  # in order of teachers
        with _damage_explained(folder / name), safe_open(folder / name, "pt") as file:
            facts = {key: int(value) for key, value in file.metadata().items()}
            if facts["step"] != step:
                raise ValueError(f"it is of step {facts['step']}, not {step}")
            start, stop = max(wanted, facts["first"]), min(numbers.stop, facts["end"])
            if start != wanted or start >= stop:
                continue
            for key in file.keys():  # noqa: SIM118 (no mapping)
                rows = file.get_slice(key)
                scalar = not rows.get_shape()
                value = file.get_tensor(key) if scalar else rows[start - facts["first"] : stop - facts["first"]]
                parts.setdefault(key, []).append(value)
            wanted = stop
    if wanted != numbers.stop:
        raise DatalensError(f"{folder / LATEST} names no file with teacher {wanted}: {_WHAT_TO_DO}")
    return {key: torch.cat(values) if values[0].dim() else values[0] for key, values in parts.items()}


_WHAT_TO_DO = f"restore a copy of it, or delete {LATEST}; the steps it held are then asked (and charged) again"


@contextlib.contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, OSError) as error:
        raise DatalensError(f"{path} is damaged ({type(error).__name__}): {_WHAT_TO_DO}") from error


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a run folder.

    Raises:
        DatalensError: this is not a run folder, or the file is damaged.
    """
    if not (path / "config.json").is_file() or not (path / "ledger.jsonl").is_file():
        why = "has no config.json and ledger.jsonl" if path.exists() else "does not exist"
        raise DatalensError(f"{path} is not a run: it {why}; to begin one, leave out --resume")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        Schema.from_dict(config["schema"])
        options = config["options"]
        if not {"data", "nominal_size", "noise_seed"} <= set(options) or "settings" not in config:
            raise ValueError("fields are missing")
        numbers = [options[name] for name in ("nominal_size", "noise_seed") if options[name] is not None]
        if not isinstance(options["data"], str) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise ValueError("data must be a name, nominal_size and noise_seed whole numbers")
        if not isinstance(options.get("data_folder"), str | None):
            raise ValueError("data_folder must be a path")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DatalensError(f"{path / 'config.json'} is damaged ({error})") from error
    return config
