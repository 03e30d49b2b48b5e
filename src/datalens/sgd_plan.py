"""What `datalens sgd` is asked for, and every setting of the run that follows, before a record is read."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datalens.datasets import formats
from datalens.datasets.own import Reading
from datalens.datasets.schema import Schema
from datalens.errors import DatalensError
from datalens.presets import sgd_usual
from datalens.privacy.accountant import AccountantName
from datalens.privacy.ledger import Budget, check_epsilon, read_ledger
from datalens.runs import read_config
from datalens.settings import SgdSettings, check_seed

if TYPE_CHECKING:
    import torch

    from datalens.methods.dpsgd import Plan


@dataclass(frozen=True, kw_only=True)
class SgdOptions:
    """What may be asked for; `commands.sgd` is the command line of it."""

    data: str | None
    out: Path
    epsilon: float = 1.0
    delta: float = 1e-5
    topk: float = 1.0
    selector: Literal["norm", "dim", "none"] = "norm"
    sigma: float | None = None
    clip: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    epochs: float | None = None
    constant_rate: bool = False
    network: Literal["cnn", "linear"] | None = None
    extractor: str | None = None
    last: bool = False
    accountant: AccountantName = "prv"
    nominal_size: int | None = None
    data_folder: Path | None = None
    label: str | None = None
    classes: str | None = None
    image_size: str | None = None
    grayscale: bool = False
    record_id: str | None = None
    seed: int = 0
    noise_seed: int | None = None
    budget: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False

    def as_dict(self) -> dict[str, Any]:
        """What a run is begun with; where it runs is left out."""
        fields = dict(self.__dict__)
        for name in ("out", "device", "resume"):
            fields.pop(name)
        for name in ("data", "data_folder", "classes", "extractor", "budget"):
            value = fields[name]
            fields[name] = str(Path(value).absolute()) if value is not None and os.path.exists(value) else value
        return {k: str(v) if isinstance(v, Path) or v in (math.inf,) else v for k, v in fields.items()}


def plan(options: SgdOptions, device: "torch.device") -> tuple[SgdSettings, Schema, Budget]:
    """Every setting, before a record is read."""
    from datalens.methods.dpsgd import plan_steps
    from datalens.private import features

    if options.data is None:
        raise DatalensError("say which data: --data mnist, or see `datalens data list`")
    schema = formats.schema(
        options.data, nominal_size=options.nominal_size, folder=options.data_folder, reading=Reading.of(options)
    )
    check_epsilon(options.epsilon)
    budget = Budget(epsilon=options.epsilon, delta=options.delta, relation="add-remove", accountant=options.accountant)
    name = options.extractor or (features.DEFAULT if schema.name == "cifar10" else "none")
    extractor = None if name == "none" else features.find(name)
    small = min(schema.height, schema.width) < 14
    network = options.network or ("linear" if extractor or small else "cnn")
    if extractor and network != "linear":
        raise DatalensError("a frozen extractor has a linear head: leave --network out, or add --extractor none")
    if small and network == "cnn":
        raise DatalensError(f"--network cnn needs images of at least 14x14, not {schema.height}x{schema.width}")
    usual = sgd_usual(
        network=network,
        features=extractor is not None,
        nominal_size=schema.nominal_size,
        epsilon=budget.epsilon,
    )
    epochs = options.epochs
    if epochs is None and (options.sigma is None or math.isinf(budget.epsilon)):
        epochs = usual.epochs
    made = plan_steps(
        budget=budget,
        nominal_size=schema.nominal_size,
        batch_size=options.batch_size or usual.batch_size,
        epochs=epochs,
        clip=usual.clip if options.clip is None else options.clip,
        topk=options.topk,
        selector=options.selector,
        sigma=options.sigma,
    )
    rate = usual.pace / made.compress.clip if options.lr is None else options.lr
    if not 0 < rate < math.inf:
        raise DatalensError(f"--lr must be above 0, not {rate:g}")
    check_seed(options.seed)
    if options.noise_seed is not None and options.noise_seed < 0:
        raise DatalensError(f"--noise-seed must be at least 0, not {options.noise_seed}")
    settings = SgdSettings(
        method="dpsgd",
        preset="default",
        seed=options.seed,
        noise_seeded=options.noise_seed is not None,
        noise="gaussian",
        network=network,
        extractor=extractor.name if extractor else "none",
        extractor_sha256=extractor.sha256 if extractor else "",
        features=extractor.size if extractor else 0,
        selector=options.selector,
        topk=options.topk,
        clip=made.compress.clip,
        sigma=made.schedule.sigma,
        batch_size=made.batch_size,
        steps=made.schedule.steps,
        rate=rate,
        falls=usual.falls and not options.constant_rate,
        average=not options.last,
    )
    return settings, schema, budget


def as_begun(options: SgdOptions) -> tuple[SgdOptions, SgdSettings, Schema, Budget]:
    """The run goes on as it was begun: an option that says otherwise is an error, not a surprise."""
    config = read_config(options.out)
    if config["settings"].get("method") != "dpsgd":
        raise DatalensError(f"{options.out} was begun by `datalens train`: go on with that")
    begun, asked, default = config["options"], options.as_dict(), SgdOptions(data=None, out=options.out).as_dict()
    for name, value in asked.items():
        if value not in (default[name], begun.get(name)):
            raise DatalensError(
                f"{options.out} was begun with {name.replace('_', '-')} {begun.get(name)}; --resume cannot change it"
            )
    known = {name: begun[name] for name in default if name in begun}
    paths = {
        name: None if (path := known.pop(name, None)) is None else Path(path) for name in ("data_folder", "budget")
    }
    whole = {"epsilon": float(known.pop("epsilon")), **paths, **known}
    options = SgdOptions(**whole, out=options.out, device=options.device, resume=True)
    budget, _ = read_ledger(options.out / "ledger.jsonl")
    return options, SgdSettings.from_dict(config["settings"]), Schema.from_dict(config["schema"]), budget


def schedule_of(settings: SgdSettings, schema: Schema) -> "Plan":
    """The plan that these settings, which may come from a file, are."""
    from datalens.bounded.norm_topk import NormTopK
    from datalens.methods.dpsgd import Plan
    from datalens.privacy.dpsgd import Schedule

    s = settings
    compress = NormTopK(clip=s.clip, topk=s.topk, selector=s.selector)
    rate = s.batch_size / schema.nominal_size
    schedule = Schedule(
        sigma=s.sigma,
        rate=rate,
        steps=s.steps,
        unit=compress.bound,
        l2_bound=compress.l2_bound,
        row_unit="person" if schema.by_person else "record",
    )
    return Plan(compress=compress, schedule=schedule, batch_size=s.batch_size)
