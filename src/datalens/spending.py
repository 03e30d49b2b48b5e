"""What a run will charge, from its settings alone, and its place in the data set's own budget (`privacy/budget.py`)."""

from pathlib import Path
from typing import Any

from datalens.config import AnySettings, MomentSettings, SgdSettings
from datalens.datasets.schema import Schema
from datalens.errors import DatalensError
from datalens.peers.settings import PeerSettings
from datalens.plan import costs
from datalens.privacy.budget import DataBudget
from datalens.privacy.events import Charge, DiscreteGaussianEvent, GaussianEvent, NoiseOrigin
from datalens.privacy.ledger import Budget
from datalens.progress import say


def planned(settings: AnySettings, schema: Schema, budget: Budget) -> list[tuple[Charge, int]]:
    """(event, how many times) of the whole run, before the first record is read."""
    if isinstance(settings, PeerSettings):
        return [(part.event, part.times) for part in settings.schedule(schema, budget)]
    origin: NoiseOrigin = "seeded" if settings.noise_seeded else "operating-system"
    if isinstance(settings, SgdSettings):
        from datalens.sgd import schedule_of

        schedule = schedule_of(settings, schema).schedule
        return [(schedule.event(repeats=schedule.steps, step=0, noise=origin), 1)]
    facts: dict[str, Any] = {"relation": budget.relation, "queries": 0, "step": 0, "noise": origin}
    if isinstance(settings, MomentSettings):
        releases = [
            facts
            | {"row_unit": "record", "l2_bound": settings.l2_bound(name), "diameter": settings.diameter(name)}
            | {"sigma": part["sigma"], "coordinates": part["cells"]}
            for name, part in zip(settings.releases, costs(settings, schema, budget), strict=True)
        ]
        return [(_gaussian(settings.noise, release), 1) for release in releases]
    bound = settings.l2_bound
    votes = facts | {"row_unit": "teacher", "l2_bound": bound, "diameter": 2 * bound}
    votes |= {"sigma": settings.sigma, "coordinates": settings.batch * settings.cells}
    return [(_gaussian(settings.noise, votes), settings.steps)]


def _gaussian(law: str, facts: dict[str, Any]) -> GaussianEvent:
    if law == "discrete-gaussian":
        return DiscreteGaussianEvent(**facts)
    return GaussianEvent(**{name: value for name, value in facts.items() if name != "coordinates"})


DECIDED = "not all of this budget is Gaussian noise: it holds for runs that were decided on beforehand (docs/budget.md)"


def check_room(folder: Path | None, settings: AnySettings, schema: Schema, budget: Budget) -> None:
    """Before the long reading: would there be room?"""
    if folder is not None:
        with DataBudget.open(folder) as data:
            data.check(planned(settings, schema, budget), budget, **_facts(settings, schema))


def reserve(folder: Path | None, settings: AnySettings, schema: Schema, budget: Budget) -> dict[str, str] | None:
    """Before a run begins: set aside all it may charge. What config.json keeps of it, to show it again on --resume."""
    if folder is None:
        return None
    with DataBudget.open(folder) as data:
        run = data.reserve(planned(settings, schema, budget), budget, **_facts(settings, schema))
        if len(data.reservations) > 1 and not _all_gaussian(data):
            say(f"note: {DECIDED}")
    return {"folder": str(folder.absolute()), "run": run}


def _facts(settings: AnySettings, schema: Schema) -> dict[str, Any]:
    """`GradientGate` charges no step twice; elsewhere what an interruption lost is charged again."""
    unit = f"one {schema.record_unit}"
    return {"data": schema.name, "unit": unit, "final": isinstance(settings, SgdSettings)}


def check_reserved(config: dict[str, Any]) -> None:
    """Before a run goes on: its reservation is there, and is not made twice."""
    kept = config.get("data_budget")
    if kept is None:
        return
    if not isinstance(kept, dict) or not all(isinstance(kept.get(name), str) for name in ("folder", "run")):
        raise DatalensError("data_budget in config.json is damaged: put a copy of the file in its place")
    with DataBudget.open(Path(kept["folder"])) as data:
        if not data.holds(kept["run"]):
            raise DatalensError(
                f"the budget in {kept['folder']} does not know this run: it is an older copy, or another data set's; "
                "put the right one in its place"
            )


def standing(config: dict[str, Any]) -> list[tuple[str, str]]:
    """For the owner's page of a run: what is left of the data set's own budget, now; nothing where it has none."""
    if config.get("data_budget") is None:
        return []
    try:
        check_reserved(config)
        with DataBudget.open(Path(config["data_budget"]["folder"])) as data:
            _, lines = describe(data)
    except DatalensError as error:
        return [("Budget of the data set", f"cannot be read: {error}")]
    return [("Budget of the data set", line) for line in lines[:3]]


def describe(data: DataBudget) -> tuple[dict[str, Any], list[str]]:
    """For the owner: the cap, what is reserved, and what is left."""
    spent, accountant = data.spent()
    left, cap = data.left(), data.cap
    fields = {
        "epsilon": cap.epsilon,
        "delta": cap.delta,
        "relation": cap.relation,
        "epsilon_reserved": spent,
        "accountant": accountant,
        "epsilon_left": left,
        "runs": [{"run": r.run, "data": r.data, "unit": r.unit} for r in data.reservations],
        "data": list(data.names),
    }
    names = ", ".join(data.names) or "it"
    lines = [
        f"cap: ε = {cap.epsilon:g} (δ = {cap.delta:g}, {cap.relation}), over all runs on {names}",
        f"reserved by {len(data.reservations)} runs: {data.describe(spent, accountant)}",
        f"left for one more run with Gaussian noise: {data.describe(left, 'exact')}",
    ]
    if not _all_gaussian(data):
        lines.append(DECIDED)
    lines.append("private, like the data: keep this folder, and no older copy of it")
    return fields, lines


def _all_gaussian(data: DataBudget) -> bool:
    return all(isinstance(event, GaussianEvent) for event, _ in data.charges)
