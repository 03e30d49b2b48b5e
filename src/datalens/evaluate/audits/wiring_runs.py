"""Every method there is, as a tiny run on made-up records: what the wiring audit (`evaluate.wiring`) looks at.

Found by walking the tables of methods, compressors and plug-ins, so that a new one is looked at without being named.
No record of an owner is read.
"""

import contextlib
import functools
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datalens import driver
from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.errors import DatalensError
from datalens.evaluate.audits.wiring_tape import Killed, Tape
from datalens.options import TrainOptions
from datalens.plans.plugins import COMPRESSORS, available
from datalens.plans.registry import make_plan, method_named, names, options_of
from datalens.privacy.events import Relation
from datalens.run.reservation import planned

SIDE, COUNT, CLASSES = 8, 180, 2
EPSILON, DELTA = 50.0, 1e-5
SIZES: dict[str, Any] = {"teachers": 3, "steps": 3, "batch": 4}  # where a method knows them
TINY: dict[str, Any] = {"k": 8, "basis": "dct", "basis_size": 16, "network": "spectral"}
EACH = 3  # records of a person
NAME = "records.npz"
SGD, OURS = "sgd", ("datalens", "datalens-paper")


# --- records --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """Records that nobody owns; `whose` has every record's person, in any order."""

    images: np.ndarray
    labels: np.ndarray
    whose: np.ndarray

    def write(self, folder: Path) -> Path:
        path = folder / NAME
        ids = np.array([f"p{person}" for person in self.whose])
        names = np.array([f"class {label}" for label in range(CLASSES)])
        np.savez(path, images=self.images, labels=self.labels, classes=names, persons=ids)
        return path

    def __getitem__(self, which: np.ndarray) -> "Made":
        return Made(images=self.images[which], labels=self.labels[which], whose=self.whose[which])


def records(seed: int = 0) -> Made:
    """Blurred noise, brighter in the second class; every person has `EACH` of them, here and there."""
    luck = np.random.default_rng(seed)
    labels = luck.permutation(np.arange(COUNT) % CLASSES)
    images = luck.integers(0, 160, (COUNT, SIDE, SIDE)) + 60 * labels[:, None, None]
    return Made(images=images.astype(np.uint8), labels=labels, whose=np.arange(COUNT) % (COUNT // EACH))


def other_records() -> dict[str, Made]:
    """Data sets that have nothing in common with `records()`: a value that follows records is another one here."""
    some = records(1)
    alike = np.zeros((COUNT, SIDE, SIDE), np.uint8)
    return {
        "other records, and fewer": some[np.arange(COUNT - 7)],
        "all records alike": Made(images=alike, labels=np.zeros(COUNT, np.int64), whose=some.whose),
    }


def neighbour(made: Made, relation: Relation, *, person: bool) -> Made:
    """One unit less, the last one; or the last one replaced by something else."""
    last = made.whose == made.whose[-1] if person else np.arange(len(made.labels)) == len(made.labels) - 1
    if relation == "add-remove":
        return made[~last]
    images, labels = made.images.copy(), made.labels.copy()
    images[last], labels[last] = 255 - images[last], 1 - labels[last]
    return Made(images=images, labels=labels, whose=made.whose)


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Ran:
    """What a run left behind."""

    tape: Tape
    folder: Path
    facts: dict[str, Any]
    said: str

    @property
    def files(self) -> dict[str, bytes]:
        """All of the run folder. The path to the records is the same text in all of them."""
        found = [path for path in sorted((self.folder / "run").rglob("*")) if path.is_file()]
        here = str(self.folder.absolute()).encode()
        return {
            str(path.relative_to(self.folder / "run")): in_order(path, path.read_bytes()).replace(here, b"")
            for path in found
        }

    @property
    def released(self) -> dict[str, bytes]:
        """What may be handed on, every charge, and the state of the student."""
        return {
            name: content
            for name, content in self.files.items()
            if name.startswith(("release/", "ledger.jsonl", "checkpoints/latest"))
        }


def in_order(path: Path, content: bytes) -> bytes:
    """safetensors writes its header in any order."""
    if path.suffix != ".safetensors":
        return content
    size = 8 + int.from_bytes(content[:8], "little")
    return json.dumps(json.loads(content[8:size]), sort_keys=True).encode() + content[size:]


Train = Callable[[Path, Path, bool, int | None], dict[str, Any]]  # (records, run, resume, noise seed) → facts


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A method with its options, under one relation, for images or for persons."""

    name: str
    relation: Relation
    person: bool
    train: Train

    def run(
        self,
        made: Made,
        folder: Path,
        tape: Tape,
        *,
        resume: bool = False,
        noise_seed: int | None = None,
        may_be_killed: bool = False,
    ) -> Ran:
        folder.mkdir(parents=True, exist_ok=True)
        path = made.write(folder)
        said = io.StringIO()
        facts: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(*[Killed] * may_be_killed))
            stack.enter_context(tape.playing())
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(said))
            facts = self.train(path, folder / "run", resume, noise_seed)
        facts = {name: value for name, value in facts.items() if name not in ("seconds", "run")}
        return Ran(tape=tape, folder=folder, facts=facts, said=said.getvalue().replace(str(folder), ""))


RELATIONS: tuple[tuple[Relation, bool], ...] = (("add-remove", False), ("add-remove", True), ("replace-one", False))


def subjects(method: str | None = None) -> Iterator[Subject]:
    """All of them, or those of one method; under every relation, and for persons, wherever that is offered."""
    for name, options in asked(method):
        for relation, person in RELATIONS:
            found = subject(name, options, relation, person=person)
            if found is not None:
                yield found


def asked(method: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, options) of every method, compressor and mechanism there is, ours and others', and of `datalens sgd`."""
    votes: dict[str, Any] = {"method": "datalens", "preset": "quick", "warm_start": "off"} | SIZES | TINY
    for name in OURS if method is None else {method} & set(OURS):
        if name != "datalens":
            yield name, {"method": name} | SIZES | TINY
            continue
        yield "datalens moments", {"method": "datalens", "coordinates": 9, "texture": 3, "texture_steps": 1}
        for compress in (*COMPRESSORS, *available("compressors")):
            yield f"datalens {compress}", votes | {"compress": compress}
        for mechanism in available("mechanisms"):
            yield f"datalens {mechanism}", votes | {"mechanism": mechanism}
    theirs = available("methods")
    for name in [other for other in (*names(), *theirs) if other not in OURS and method in (None, other)]:
        known, preset = options_of(name), method_named(name).presets[-1]
        sizes = {option: value for option, value in (SIZES | TINY).items() if option in known}
        for choice in _choices(known):
            yield (
                " ".join((name, *choice.values())),
                {"method": name, "preset": preset} | sizes | choice,
            )
    if method in (None, SGD):
        yield SGD, {}


def _choices(known: frozenset[str]) -> list[dict[str, str]]:
    """Ways to add votes up, where a method has several."""
    return [{"aggregate": "gnmax"}, {"aggregate": "laplace"}] if "aggregate" in known else [{}]


def subject(name: str, options: dict[str, Any], relation: Relation, *, person: bool) -> Subject | None:
    """None where the plan refuses this relation or unit: it is not offered. What has no plan at all is an error."""
    if name == SGD:
        return _sgd(person=person) if relation == "add-remove" else None
    options = {**options, "relation": relation}
    said = {"nominal_size": COUNT // EACH if person else COUNT, "record_id": "persons" if person else None}
    whole = {"epsilon": EPSILON, "delta": DELTA, "device": "cpu", **said, **options}
    variants = [whole, without(whole, "k"), {**whole, "epsilon": math.inf}]  # some have no k, and one no finite price
    refused = None
    for variant in variants:
        try:
            planned_steps(variant)
        except DatalensError as error:
            refused = refused or error
            continue
        return Subject(name=name, relation=relation, person=person, train=_train(short(variant)))
    if relation == "add-remove" and not person:
        raise DatalensError(f"no small run of {name} could be planned, so nothing was looked at: {refused}")
    return None


def _train(options: dict[str, Any]) -> Train:
    def train(path: Path, out: Path, resume: bool, noise_seed: int | None) -> dict[str, Any]:
        return driver.train(
            TrainOptions(**{**options, "data": str(path), "out": out, "resume": resume, "noise_seed": noise_seed})
        )

    return train


def planned_steps(options: dict[str, Any]) -> list[int]:
    """How many steps each planned charge is for; raises if there is no such run."""
    return _planned_steps(tuple(sorted(options.items())))


@functools.lru_cache(maxsize=256)
def _planned_steps(listed: tuple[tuple[str, Any], ...]) -> list[int]:
    options = dict(listed)
    with tempfile.TemporaryDirectory() as folder:
        chosen = TrainOptions(**{**options, "data": str(records().write(Path(folder))), "out": Path("nowhere")})
        schema = formats.schema(str(chosen.data), nominal_size=chosen.nominal_size, reading=Reading.of(chosen))
        budget, settings = make_plan(chosen, schema)
        return [getattr(event, "repeats", 1) for event, _ in planned(settings, schema, budget)]


def short(options: dict[str, Any]) -> dict[str, Any]:
    """Two blocks are as good as three where a step is a block of steps."""
    return options | {"steps": 2} if "steps" in options and max(planned_steps(options)) > 1 else options


def without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def _sgd(*, person: bool) -> Subject:
    count = COUNT // EACH if person else COUNT
    options = {"method": "sgd", "epsilon": EPSILON, "delta": DELTA, "accountant": "rdp-improved", "device": "cpu"}
    options |= {"batch_size": 4, "epochs": 8 * 4 / count, "nominal_size": count}
    options |= {"record_id": "persons" if person else None}
    return Subject(name=SGD, relation="add-remove", person=person, train=_train(options))
