"""Tiny runs of every method on made-up records, for the wiring audit (`wiring`).

They are found in the tables of methods, compressors and plug-ins, so a new one is audited without being named here. No
record of an owner is read.
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
SIZES: dict[str, Any] = {"teachers": 3, "steps": 3, "batch": 4}  # options of those methods that have them
TINY: dict[str, Any] = {"k": 8, "basis": "dct", "basis_size": 16, "network": "spectral"}
REFINED: dict[str, Any] = {"refine": "diffusion", "refine_steps": 3, "refine_batch": 4, "pretraining": 1}
REFINED |= {"accountant": "rdp-improved"}  # a quick one
EACH = 3  # records of a person
NAME = "records.npz"
SGD, OURS = "sgd", ("datalens", "datalens-paper")


# --- records --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """Made-up records; `whose` has the person of every record, in any order."""

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
    """Return images of noise, brighter in the second class. Every person has `EACH` of them, spread over the data."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(COUNT) % CLASSES)
    images = random.integers(0, 160, (COUNT, SIDE, SIDE)) + 60 * labels[:, None, None]
    return Made(images=images.astype(np.uint8), labels=labels, whose=np.arange(COUNT) % (COUNT // EACH))


def other_records() -> dict[str, Made]:
    """Return data sets that differ from `records()` in everything, so that any value computed from records differs."""
    some = records(1)
    equal = np.zeros((COUNT, SIDE, SIDE), np.uint8)
    return {
        "other records, and fewer": some[np.arange(COUNT - 7)],
        "all records alike": Made(images=equal, labels=np.zeros(COUNT, np.int64), whose=some.whose),
    }


def neighbour(made: Made, relation: Relation, *, person: bool) -> Made:
    """Return a neighbouring data set: the last unit is removed or, under replace-one, replaced by something else."""
    last = made.whose == made.whose[-1] if person else np.arange(len(made.labels)) == len(made.labels) - 1
    if relation == "add-remove":
        return made[~last]
    images, labels = made.images.copy(), made.labels.copy()
    images[last], labels[last] = 255 - images[last], 1 - labels[last]
    return Made(images=images, labels=labels, whose=made.whose)


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Ran:
    """A run that has ended: its tape, its folder, its facts, and everything it printed."""

    tape: Tape
    folder: Path
    facts: dict[str, Any]
    said: str

    @property
    def files(self) -> dict[str, bytes]:
        """Return the contents of the run folder, without the path of the folder, which differs between runs."""
        paths = [path for path in sorted((self.folder / "run").rglob("*")) if path.is_file()]
        here = str(self.folder.absolute()).encode()
        return {
            str(path.relative_to(self.folder / "run")): in_order(path, path.read_bytes()).replace(here, b"")
            for path in paths
        }

    @property
    def released(self) -> dict[str, bytes]:
        """Return the files of the released side: the release, the ledger, and the state of the student."""
        return {
            name: content
            for name, content in self.files.items()
            if name.startswith(("release/", "ledger.jsonl", "checkpoints/latest"))
        }


def in_order(path: Path, content: bytes) -> bytes:
    """Return a file's content, with the header sorted if it is of safetensors, which writes it in any order."""
    if path.suffix != ".safetensors":
        return content
    size = 8 + int.from_bytes(content[:8], "little")
    return json.dumps(json.loads(content[8:size]), sort_keys=True).encode() + content[size:]


Train = Callable[[Path, Path, bool, int | None], dict[str, Any]]  # (records, run, resume, noise seed) → facts


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A method with its options, for one neighbouring relation, and for images or persons."""

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
    """Yield the subjects of all methods, or of one, for every relation and unit that the method offers."""
    for name, options in asked(method):
        for relation, person in RELATIONS:
            offered = subject(name, options, relation, person=person)
            if offered is not None:
                yield offered


def asked(method: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, options) of every method, compressor and mechanism, including plug-ins, and of `datalens sgd`."""
    votes: dict[str, Any] = {"method": "datalens", "preset": "quick", "warm_start": "off"} | SIZES | TINY
    for name in OURS if method is None else {method} & set(OURS):
        if name != "datalens":
            yield name, {"method": name} | SIZES | TINY
            continue
        moments = {"method": "datalens", "coordinates": 9, "texture": 3, "texture_steps": 1}
        yield "datalens moments", moments
        yield "datalens refined", moments | REFINED
        for compress in (*COMPRESSORS, *available("compressors")):
            yield f"datalens {compress}", votes | {"compress": compress}
        for mechanism in available("mechanisms"):
            yield f"datalens {mechanism}", votes | {"mechanism": mechanism}
    plugins = available("methods")
    for name in [other for other in (*names(), *plugins) if other not in OURS and method in (None, other)]:
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
    """Return the options that choose between ways to aggregate votes, where a method has several."""
    return [{"aggregate": "gnmax"}, {"aggregate": "laplace"}] if "aggregate" in known else [{}]


def subject(name: str, options: dict[str, Any], relation: Relation, *, person: bool) -> Subject | None:
    """Return a subject, or None if the method does not offer this relation or unit, so that its plan refuses it.

    Raises:
        DatalensError: the method has no plan even for the standard relation and unit.
    """
    if name == SGD:
        return _sgd(person=person) if relation == "add-remove" else None
    options = {**options, "relation": relation}
    declared = {"nominal_size": COUNT // EACH if person else COUNT, "record_id": "persons" if person else None}
    whole = {"epsilon": EPSILON, "delta": DELTA, "device": "cpu", **declared, **options}
    variants = [whole, without(whole, "k"), {**whole, "epsilon": math.inf}]  # some lack k; DC-GAN has no finite price
    refused = None
    for variant in variants:
        try:
            planned_steps(variant)
        except DatalensError as error:
            refused = refused or error
            continue
        return Subject(name=name, relation=relation, person=person, train=_train(short(variant)))
    if relation == "add-remove" and not person:
        raise DatalensError(f"no small run of {name} could be planned, so it was not audited: {refused}")
    return None


def _train(options: dict[str, Any]) -> Train:
    def train(path: Path, out: Path, resume: bool, noise_seed: int | None) -> dict[str, Any]:
        return driver.train(
            TrainOptions(**{**options, "data": str(path), "out": out, "resume": resume, "noise_seed": noise_seed})
        )

    return train


def planned_steps(options: dict[str, Any]) -> list[int]:
    """Return the number of steps of each planned charge. Raises DatalensError if there is no such run."""
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
    """Plan two steps instead of three where a step is a whole block of steps."""
    return options | {"steps": 2} if "steps" in options and max(planned_steps(options)) > 1 else options


def without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def _sgd(*, person: bool) -> Subject:
    count = COUNT // EACH if person else COUNT
    options = {"method": "sgd", "epsilon": EPSILON, "delta": DELTA, "accountant": "rdp-improved", "device": "cpu"}
    options |= {"batch_size": 4, "epochs": 8 * 4 / count, "nominal_size": count}
    options |= {"record_id": "persons" if person else None}
    return Subject(name=SGD, relation="add-remove", person=person, train=_train(options))
