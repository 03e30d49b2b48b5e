"""Trainings with DP-SGD, from which Tables 8-11 and Figure 3 are made.

Every training is a run of its own, which charges its ledger before it adds noise, with a release and a certificate. Its
results are kept as one line of JSON.
"""

import concurrent.futures
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.methods.sgd import SgdSettings
from datalens.privacy.accountant import AccountantName
from datalens.privacy.ledger import Budget
from datalens.progress import bar
from datalens.reproduce.kept import keep_cell, read_cells

if TYPE_CHECKING:
    from torch import Tensor

INF = math.inf
DELTA = 1e-5
SIZES = {"mnist": 60_000, "cifar10": 50_000}
QUICK_SIDE = 112  # side of the extractor's input images in quick mode, in pixels


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of one training. One of `sigma` and `steps` may be None, and is then computed from the other."""

    data: str
    epsilon: float
    k: float
    selector: Literal["norm", "dim", "none"]
    clip: float
    batch: int
    rate: float
    sigma: float | None = None
    steps: int | None = None
    noise: Literal["bound", "clip", "none"] = "bound"  # what σ multiplies; the paper's Table 10 has all three
    accountant: AccountantName = "prv"
    falls: bool = False  # whether the learning rate falls to zero
    records: int | None = None  # number of training records to use (quick mode); None: all
    held_out: bool = False  # for the search: leave out a sixth of the training records, and score on them

    def solved(self) -> "Setting":
        """Return the setting with both σ and steps, computed from public facts.

        Raises:
            BudgetExceeded: no noise is enough for this ε.
        """
        if self.sigma is not None and self.steps is not None:
            return self
        from datalens.gradients.optimizer import plan_steps

        made = plan_steps(
            budget=self.budget,
            nominal_size=self.nominal,
            batch_size=self.batch,
            epochs=None if self.steps is None else self.steps * self.batch / self.nominal,
            clip=self.clip,
            topk=self.k,
            selector=self.selector,
            sigma=self.sigma,
        )
        return replace(self, sigma=made.schedule.sigma, steps=made.schedule.steps)

    @classmethod
    def parse(cls, fields: dict[str, str]) -> "Setting":
        """Return the setting of a kept training, whose fields are texts."""
        words = {"inf": INF, "None": None, "True": True, "False": False}

        def value(text: str) -> Any:
            if text in words or not text[:1].isdigit():
                return words.get(text, text)
            return int(text) if text.isdigit() else float(text)

        return cls(**{name: value(text) for name, text in fields.items()})

    @property
    def nominal(self) -> int:
        return self.records or SIZES[self.data]

    @property
    def budget(self) -> Budget:
        return Budget(epsilon=self.epsilon, delta=DELTA, relation="add-remove", accountant=self.accountant)

    @property
    def name(self) -> str:
        """Return a file name, which is a function of all fields."""
        fields = json.dumps({key: str(value) for key, value in asdict(self).items()}, sort_keys=True)
        digest = hashlib.sha256(fields.encode()).hexdigest()[:12]
        return f"{self.data}-eps{self.epsilon:g}-{self.selector}{self.k:g}-{digest}"


# --- one training ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def load(name: str, records: int | None, device: str) -> "tuple[Tensor, Tensor, Tensor, Tensor, Schema, SgdSettings]":
    """Return training and test records as the model's inputs (pixels, or cached features), schema and settings."""
    import torch

    from datalens.data import formats
    from datalens.private import features

    parts: list[Tensor] = []
    for split, most in (("train", records), ("test", None if records is None else 1000)):
        dataset = formats.load(name, split)
        images, labels = dataset.images[:most], dataset.labels[:most]
        if name == "cifar10":
            extractor = features.find(features.DEFAULT)
            if records is not None:
                extractor = replace(extractor, side=QUICK_SIDE)
            x = features.extract(extractor, images, device=torch.device(device), about=len(images))
        else:
            x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        parts += [x.to(device), torch.from_numpy(labels).to(device)]
    shown = features.DEFAULT if records is None else f"{features.DEFAULT} at {QUICK_SIDE} pixels"
    public = replace(dataset.schema, nominal_size=records or dataset.schema.nominal_size)
    linear = name == "cifar10"
    about = SgdSettings(
        method="dpsgd", preset="reproduce", seed=0, noise_seeded=False, noise="gaussian",
        network="linear" if linear else "cnn", extractor=shown if linear else "none",
        extractor_sha256=extractor.sha256 if linear else "", features=int(parts[0].shape[1]) if linear else 0,
        selector="none", topk=1.0, clip=1.0, sigma=1.0, batch_size=1, steps=1, rate=0.1, falls=False, average=True,
    )  # fmt: skip
    return parts[0], parts[1], parts[2], parts[3], public, about


def run(setting: Setting, seed: int, device: str, folder: Path) -> dict[str, Any]:
    """Train once, in `folder`. `seed` decides the initial weights; samples and noise are the operating system's."""
    import torch

    from datalens.bounded.norm_topk import NormTopK
    from datalens.gradients.optimizer import Plan
    from datalens.methods.sgd import accuracy, make_trainer
    from datalens.privacy.dpsgd import GradientGate, Schedule
    from datalens.privacy.ledger import Ledger
    from datalens.privacy.noise import SecureNoise
    from datalens.released.certificate import read_certificate
    from datalens.released.release import write_release
    from datalens.released.verification import check_release

    if device == "cpu" and multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)
    began = time.monotonic()
    s = setting.solved()
    assert s.sigma is not None and s.steps is not None
    x, y, tx, ty, schema, about = load(s.data, s.records, device)
    if s.held_out:
        inside = len(x) * 5 // 6
        x, tx, y, ty = x[:inside], x[inside:], y[:inside], y[inside:]
    compress = NormTopK(clip=s.clip, topk=s.k, selector=s.selector)
    sigma = {"bound": s.sigma, "clip": s.sigma * compress.clip / compress.bound, "none": 0.0}[s.noise]
    rate, steps = s.batch / s.nominal, s.steps
    schedule = Schedule(sigma=sigma, rate=rate, steps=steps, unit=compress.bound, l2_bound=compress.l2_bound)
    budget = s.budget if sigma > 0 else replace(s.budget, epsilon=INF)
    settings = replace(
        about, seed=seed, selector=s.selector, topk=s.k, clip=s.clip, sigma=sigma, batch_size=s.batch, steps=steps,
        rate=s.rate, falls=s.falls,
    )  # fmt: skip
    folder = _vacant(folder)
    folder.mkdir(parents=True)
    ledger = Ledger.create(folder / "ledger.jsonl", budget)
    try:
        gate = GradientGate(ledger, schedule, SecureNoise(), blocks=1)
        plan = Plan(compress=compress, schedule=schedule, batch_size=s.batch)
        trainer = make_trainer(settings, schema, gate, plan, torch.device(device))
        for _ in range(steps):
            trainer.step(x, y)
        release = write_release(folder, trainer.average, settings=settings, schema=schema, ledger=ledger)
        spent = ledger.spent()
    finally:
        ledger.close()
    if problems := check_release(release).problems:
        raise DatalensError(f"{release}: {problems[0]}")
    certificate = read_certificate(release)
    return {
        "setting": {key: str(value) for key, value in asdict(setting).items()},
        "seed": seed,
        "run": folder.name,
        "method_version": version(),
        "date": datetime.now(UTC).date().isoformat(),
        "accuracy": accuracy(trainer.model, tx, ty),  # of the last weights, as in the paper
        "averaged": accuracy(trainer.average, tx, ty),  # of a weighted mean, in which late weights count most
        "epsilon_spent": str(spent),
        "delta": DELTA,
        "relation": "add-remove",
        "accountant": budget.accountant,
        "private": sigma > 0,
        "sigma": 0.0 if s.noise == "none" else s.sigma,  # as in Table 10; a certificate's σ multiplies the rows' bound
        "steps": steps,
        "extractor": about.extractor,
        "certificate_sha256": certificate["sha256"]["certificate"],
        "versions": certificate["versions"],
        "seconds": round(time.monotonic() - began, 2),
    }


def version() -> int:
    """Return the version of DP-SGD that a training would be made by (`plans.base.Method.version`)."""
    from datalens.plans.registry import method_named

    return method_named("sgd").version


def _vacant(folder: Path) -> Path:
    """Return a folder that does not exist: this one or a numbered one.

    The ledger of an interrupted training stays, since its charges were spent.
    """
    tries = itertools.chain([folder], (folder.with_name(f"{folder.name}.{n}") for n in itertools.count(2)))
    return next(place for place in tries if not place.exists())


class Lab:
    """Runs trainings, several at a time, and keeps each when it ends. Trainings that are kept are not run again.

    With `trains=False` it runs none and returns kept trainings only, with `again=True` those of older code once more.
    """

    def __init__(self, path: Path, device: str, *, workers: int, trains: bool = True, again: bool = False) -> None:
        self._path, self._device, self._workers, self.trains, self._again = path, device, workers, trains, again

    def all(self, wanted: Iterable[tuple[Setting, int]]) -> dict[tuple[Setting, int], dict[str, Any]]:
        """Return the results of these trainings, (setting, seed), after running those that are missing."""
        jobs = {job: f"{job[0].name}-seed{job[1]}" for job in wanted}
        done = read_cells(self._path)
        if self.trains and self._again:
            done = {name: result for name, result in done.items() if result.get("method_version") == version()}
        results = {job: done[name] for job, name in jobs.items() if name in done}
        missing = [job for job in jobs if job not in results]
        if not missing or not self.trains:
            return results
        with bar("trainings", len(missing)) as (progress, task):

            def keep(job: tuple[Setting, int], result: dict[str, Any]) -> None:
                results[job] = keep_cell(self._path, jobs[job], result)
                progress.advance(task)

            runs = self._path.parent / "runs"
            if self._workers == 1:
                for job in missing:
                    keep(job, run(*job, self._device, runs / jobs[job]))
                return results
            context = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
            with concurrent.futures.ProcessPoolExecutor(self._workers, mp_context=context) as pool:
                pending = {pool.submit(run, *job, self._device, runs / jobs[job]): job for job in missing}
                for ended in concurrent.futures.as_completed(pending):
                    keep(pending[ended], ended.result())
        return results

    def of_kept(self) -> "Lab":
        """Return one that trains nothing, on the same file."""
        return Lab(self._path, self._device, workers=1, trains=False)

    def kept(self) -> list[Setting]:
        """Return the settings of kept trainings, each once."""
        return list(dict.fromkeys(Setting.parse(cell["setting"]) for cell in read_cells(self._path).values()))
