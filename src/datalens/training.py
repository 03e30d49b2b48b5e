"""One training run from start to release: what `datalens train` and the reproduce harness both call."""

import dataclasses
import hashlib
import math
import time
from typing import Any

from datalens.config import Settings, TrainOptions, options_as_dict
from datalens.datasets import formats
from datalens.datasets.sources import Dataset
from datalens.errors import BudgetExceeded, DatalensError
from datalens.plan import make_plan, warnings
from datalens.privacy.ledger import json_number
from datalens.private.partition import check_enough
from datalens.progress import say
from datalens.runs import Run


def train(options: TrainOptions, given: set[str] | None = None) -> dict[str, Any]:
    """Train, or continue a run, and write its release. Returns the facts `--json` prints.

    `given`: options that were named by the caller, where that is known; one may repeat a default and mean it.
    """
    began = time.monotonic()
    device = choose_device(options.device)
    run = _continue(options, given) if options.resume else _start(options)
    try:
        settings, budget = run.settings, run.ledger.budget
        private = math.isfinite(budget.epsilon) and not settings.noise_seeded
        stamp = "" if private else " NOT PRIVATE."
        noisy = "no noise" if settings.sigma == 0 else f"σ = {settings.sigma:.5g}"
        say(
            f"{settings.method} [{settings.preset}] on {run.schema.name}: {settings.teachers} teachers, "
            f"{settings.steps} steps of {settings.batch} images, k = {settings.k} of {settings.basis_size}, {noisy}; "
            f"budget {budget.describe(budget.epsilon)}.{stamp}"
        )
        steps = _train_and_release(run, device)
        spent = run.ledger.spent()
        queries = sum(getattr(event, "queries", 0) for event in run.ledger.events)
        lost = len(run.ledger.events) - steps
        short = "" if run.interrupted or steps == settings.steps else f" of {settings.steps}"
        wasted = f" ({lost} of the charges went to releases that an interruption lost)" if lost else ""
        state = "interrupted; continue with --resume. So far:" if run.interrupted else "done:"
        say(
            f"{state} {steps}{short} steps{wasted}, spent {budget.describe(spent)}.{stamp} "
            f"Pictures: {run.path / 'release' / 'samples.png'}"
        )
        return {
            "run": str(run.path),
            "method": settings.method,
            "preset": settings.preset,
            "epsilon": json_number(budget.epsilon),
            "epsilon_spent": json_number(spent),
            "delta": budget.delta,
            "relation": budget.relation,
            "accountant": budget.accountant,
            "steps": steps,
            "queries": queries,
            "sigma": settings.sigma,
            "seconds": round(time.monotonic() - began, 2),
            "private": private,
            "interrupted": run.interrupted,
        }
    finally:
        run.close()


def choose_device(name: str) -> "Any":
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DatalensError("no CUDA device is at hand: use --device cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _start(options: TrainOptions) -> Run:
    if options.data is None:
        raise DatalensError("say which data: --data mnist, or see `datalens data list`")
    if options.nominal_size is not None and not options.data.endswith(".npz"):
        raise DatalensError("--nominal-size is for your own file: what a named data set holds is public")
    schema = formats.schema(options.data, nominal_size=options.nominal_size)
    budget, settings = make_plan(options, schema)
    for line in warnings(budget, schema):
        say(f"warning: {line}")
    dataset = formats.load(options.data, nominal_size=options.nominal_size)  # found broken before the run exists
    check_enough(len(dataset.images), settings.teachers)
    return Run.create(
        options.out,
        options=options_as_dict(options),
        settings=settings,
        budget=budget,
        schema=schema,
        data_sha256=_fingerprint(dataset),
    )


def _fingerprint(dataset: Dataset) -> str:
    """Of all records: a resumed run must go on with the data it was begun with."""
    digest = hashlib.sha256(dataset.images.tobytes())
    digest.update(dataset.labels.tobytes())
    return digest.hexdigest()


def _continue(options: TrainOptions, given: set[str] | None) -> Run:
    """The run goes on as it was begun: an option that says otherwise is an error, not a surprise."""
    run = Run.open(options.out)
    begun, asked = run.config["options"], options_as_dict(options)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
    for name, value in asked.items():
        named = getattr(options, name) != defaults[name] if given is None else name in given
        if named and value != begun.get(name):
            run.close()
            raise DatalensError(
                f"{options.out} was begun with {name.replace('_', '-')} {begun.get(name)}; --resume cannot change it"
            )
    return run


def _train_and_release(run: Run, device: "Any") -> int:
    """Steps whose releases the student has learned from."""
    from datalens.methods import datalens
    from datalens.privacy.noise import SecureNoise, SeededNoise
    from datalens.released.release import write_release

    settings: Settings = run.settings
    begun = run.config["options"]
    noise_seed = begun["noise_seed"]
    noise = SecureNoise() if noise_seed is None else SeededNoise(noise_seed + len(run.ledger.events))
    dataset = formats.load(begun["data"], nominal_size=begun["nominal_size"])
    if dataset.schema != run.schema or _fingerprint(dataset) != run.config.get("data_sha256"):
        raise DatalensError(f"{begun['data']} is not what {run.path} was begun with: put it back, or start another run")
    student = datalens.train(run, dataset, settings, noise=noise, device=device)
    if run.completed == 0:
        raise BudgetExceeded("the budget is spent and not one release survived: there is nothing to learn from")
    write_release(run.path, student.generator, settings=settings, schema=run.schema, ledger=run.ledger)
    return run.completed
