"""What `verify` compares of a ledger with the settings, for every method: whatever is changed in a charge is noticed.

Nothing is trained. A ledger is written down as a run would charge it, and then one field of one charge is changed.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from datalens.data.schema import PERSON, Schema
from datalens.errors import DatalensError
from datalens.evaluate.audits import wiring_runs
from datalens.evaluate.audits.wiring_runs import CLASSES, COUNT, DELTA, EACH, EPSILON, SIDE
from datalens.methods import moments
from datalens.methods.sgd import SgdSettings, schedule_of
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.plans.base import Settings, gaussian_event
from datalens.plans.registry import make_plan, read_settings
from datalens.privacy.events import (
    Charge,
    DiscreteGaussianEvent,
    GaussianEvent,
    SubsampledGaussianEvent,
)
from datalens.privacy.ledger import Budget, Ledger
from datalens.released.checks import check_ledger, check_steps, check_unit
from datalens.run.reservation import planned

SCHEMA = Schema(name="small", height=SIDE, width=SIDE, channels=1, classes=("a", "b"), nominal_size=COUNT)
PERSONS = dataclasses.replace(SCHEMA, nominal_size=COUNT // EACH, record_unit=PERSON)
SGD_OPTIONS: dict[str, Any] = {"method": "sgd", "batch_size": 4, "epochs": 0.2}
# `sgd` may be charged for longer rows than it has, and moments for a larger distance of two.
MAY_GROW = {("sgd", "l2_bound"), ("datalens moments", "diameter"), ("datalens refined", "diameter")}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A small plan of a method."""

    method: str
    settings: Settings
    schema: Schema
    budget: Budget

    @functools.cached_property
    def charges(self) -> list[Charge]:
        """The charges of a run that nothing interrupts."""
        if isinstance(self.settings, moments.MomentSettings):
            return moment_charges(self.settings, self.schema, self.budget)
        made: list[Charge] = []
        for event, times in planned(self.settings, self.schema, self.budget):
            if isinstance(self.settings, TopAggSettings):
                event = dataclasses.replace(event, queries=self.settings.batch)  # as the sum of a batch states it
            length = event.repeats if isinstance(event, SubsampledGaussianEvent) else 1
            made += [dataclasses.replace(event, step=number * length) for number in range(times)]
        return made

    def problems(self, events: list[Charge]) -> list[str]:
        """What `verify` says of a release whose weights learned from all of the run, and of this ledger."""
        own = [event for event in self.charges if event.part == self.settings.stepped]
        answered = self.settings.answers_paid(own) if self.settings.answers else None
        facts = {"settings": self.settings, "schema": self.schema, "budget": self.budget, "events": tuple(events)}
        facts |= {"weights": SimpleNamespace(completed=self.settings.steps_planned, answered=answered), "version": 2}
        claim: Any = SimpleNamespace(**facts)
        return check_ledger(claim) + check_unit(claim) + check_steps(claim)


def moment_charges(settings: moments.MomentSettings, schema: Schema, budget: Budget) -> list[Charge]:
    """Every release gets its part of what those before it have left."""
    ledger = Ledger.in_memory(budget)
    for line in settings.release_costs(schema, budget):
        name = line["release"]
        facts = {"row_unit": settings.unit, "relation": budget.relation, "noise": settings.origin}
        facts |= {
            "l2_bound": settings.l2_bound(name),
            "diameter": settings.diameter(name),
            "coordinates": line["cells"],
        }
        facts |= {"queries": 1 if "norms" in name else CLASSES, "step": moments.RELEASES.index(name)}
        ledger.charge(gaussian_event(settings.noise, facts | {"sigma": moments.noise_for(name, settings, ledger)}))
    return list(ledger.events)  # type: ignore[arg-type]


NAMES = [
    *(
        "datalens moments add-remove record",
        "datalens moments add-remove person",
        "datalens moments replace-one record",
    ),
    *(
        "datalens topk-sign add-remove record",
        "datalens sketch add-remove person",
        "datalens klevel replace-one record",
    ),
    *("datalens-paper add-remove record", "sgd add-remove record", "sgd add-remove person", "dpgan add-remove record"),
    *(
        "dpsgd-gan add-remove record",
        "dpmerf replace-one record",
        "gpate add-remove record",
        "gswgan add-remove person",
    ),
    *("pategan gnmax add-remove record", "pategan laplace replace-one record"),
]
ASKED = dict(wiring_runs.asked(None))


@functools.cache
def plan(name: str) -> Ask:
    """Return a small plan, named by method, relation and privacy unit."""
    method, relation, unit = name.rsplit(" ", 2)
    schema = PERSONS if unit == "person" else SCHEMA
    options = {"epsilon": EPSILON, "delta": DELTA, "accountant": "rdp", **(ASKED[method] or SGD_OPTIONS)}
    options |= {"relation": relation, "record_id": "id" if unit == "person" else None, "out": Path("unused")}
    try:
        budget, settings = make_plan(TrainOptions(**options), schema)
    except DatalensError:  # some have no k
        budget, settings = make_plan(TrainOptions(**{k: v for k, v in options.items() if k != "k"}), schema)
    return Ask(method, settings, schema, budget)


def test_every_method_is_here() -> None:
    """But for DC-GAN, which promises nothing; of `datalens refined`, tests/unit/test_refined.py."""
    elsewhere = {"dcgan", "datalens refined", "datalens sign", "datalens topk"}
    assert {name.rsplit(" ", 2)[0] for name in NAMES} == ASKED.keys() - elsewhere


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_ledger_stands(name: str) -> None:
    ask = plan(name)
    assert len(ask.charges) >= 1
    assert ask.problems(ask.charges) == []


def changed(ask: Ask, event: Charge) -> Iterator[Charge]:
    """Yield a charge with one field changed, in ways that would state less than was done, or something else."""
    fields = {field.name for field in dataclasses.fields(event)}
    changes: list[tuple[str, Any]] = [("row_unit", unit) for unit in ("record", "person", "teacher")]
    changes += [("noise", "seeded"), ("part", "other")]
    changes += [] if ask.method == "gpate" else [("step", event.step + 1)]  # whose answers are counted together
    for field in sorted(fields & {"l2_bound", "diameter", "sigma", "rate", "scale"}):
        value = getattr(event, field)
        more = [value * 1.01, value * 2] if (ask.method, field) not in MAY_GROW else []
        changes += [(field, other) for other in (value * 0.99, value * 0.5, *more)]
    for field in sorted(fields & {"queries", "teachers", "coordinates", "moved"}):
        changes += [(field, getattr(event, field) + 1), (field, getattr(event, field) - 1)]
    for field, value in changes:
        with contextlib.suppress(DatalensError):  # some values no event can have
            if value != getattr(event, field):
                yield dataclasses.replace(event, **{field: value})


@pytest.mark.parametrize("name", NAMES)
def test_any_field_of_any_charge(name: str) -> None:
    ask = plan(name)
    unnoticed = []
    for number, event in list(enumerate(ask.charges))[:4]:  # private moments have eight, and these are every kind
        for other in changed(ask, event):
            events = [*ask.charges[:number], other, *ask.charges[number + 1 :]]
            unnoticed += [] if ask.problems(events) else [(number, other)]
    assert unnoticed == []


@pytest.mark.parametrize("name", NAMES)
def test_another_kind_of_noise(name: str) -> None:
    ask = plan(name)
    for number, event in enumerate(ask.charges):
        if isinstance(event, DiscreteGaussianEvent):
            fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name != "coordinates"}
            other: Charge = GaussianEvent(**fields)
        elif isinstance(event, GaussianEvent):
            other = DiscreteGaussianEvent(**vars(event), coordinates=8)
        else:
            continue
        assert ask.problems([*ask.charges[:number], other, *ask.charges[number + 1 :]]) != []


@pytest.mark.parametrize("name", NAMES)
def test_charges_that_are_missing_or_too_many(name: str) -> None:
    ask = plan(name)
    for number in range(len(ask.charges)):
        assert ask.problems([*ask.charges[:number], *ask.charges[number + 1 :]]) != []
    last = ask.charges[-1]
    length = last.repeats if isinstance(last, SubsampledGaussianEvent) else 1
    if ask.method not in ("dpgan", "dpsgd-gan", "gpate"):  # where a charge too many only costs more
        assert ask.problems([*ask.charges, dataclasses.replace(last, step=last.step + length)]) != []
    if isinstance(last, GaussianEvent) and not isinstance(ask.settings, moments.MomentSettings):
        assert ask.problems([ask.charges[0], *ask.charges]) == []  # an interruption lost it


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_plan_costs_what_the_whole_ledger_does(name: str) -> None:
    """`verify` adds up both; and what is set aside beforehand is the schedule."""
    ask = plan(name)
    settings, delta, pricing = ask.settings, ask.budget.delta, ask.budget.pricing()
    whole = settings.whole_plan(ask.schema, ask.budget, ask.charges)
    due = pricing.price([(event, 1) for event in ask.charges], delta)
    assert due <= ask.budget.epsilon * (1 + 1e-9)
    for priced in (whole, planned(settings, ask.schema, ask.budget)):
        if priced or not isinstance(settings, moments.MomentSettings):
            assert pricing.price(priced, delta) == pytest.approx(due, rel=1e-4)
    for part in settings.schedule(ask.schema, ask.budget):
        assert part.event.step == 0 and part.times >= 1
        if isinstance(part.event, GaussianEvent):
            assert part.sensitivity == part.event.sensitivity


@pytest.mark.parametrize("change", [{"topk": 0.0}, {"topk": 1.5}, {"clip": 0.0}, {"extractor_sha256": "ab"}])
def test_settings_of_sgd_that_have_no_bound(change: dict[str, Any]) -> None:
    fields = plan("sgd add-remove record").settings.as_dict()
    with pytest.raises(DatalensError):
        read_settings(fields | change)


def test_sgd_is_charged_for_steps_over_its_own_units_alone() -> None:
    ask = plan("sgd add-remove record")
    (event,) = ask.charges
    assert isinstance(event, SubsampledGaussianEvent)
    one, two = dataclasses.replace(event, repeats=4), dataclasses.replace(event, step=4, repeats=event.repeats - 4)
    facts: dict[str, Any] = {"row_unit": "record", "l2_bound": 1.0, "diameter": 1.0, "relation": "add-remove"}
    other = GaussianEvent(**facts, sigma=1.0, queries=1, step=0, noise="operating-system")
    assert ask.settings.disagreements(SCHEMA, ask.budget, (one, two)) == []
    by_person = [dataclasses.replace(step, row_unit="person") for step in (one, two)]
    for events in ((one, two, other), (one, by_person[1]), (by_person[0], two)):
        said = ask.settings.disagreements(SCHEMA, ask.budget, events)
        assert said[0] == "the ledger has other events than steps over sampled records"


def test_only_the_norm_selector_shortens_rows() -> None:
    settings = plan("sgd add-remove record").settings
    assert isinstance(settings, SgdSettings)
    for selector, bound in (("norm", 0.5), ("dim", 1.0), ("none", 1.0)):
        one = dataclasses.replace(settings, topk=0.25, selector=selector, clip=3.0)
        assert one.bound == 3.0 * bound == schedule_of(one, SCHEMA).schedule.unit
    assert settings.whole_plan(SCHEMA, plan("sgd add-remove record").budget, []) == []


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_cannot_be(name: str) -> None:
    """They are read from files that anybody may have edited."""
    settings = plan(name).settings
    fields = settings.as_dict()
    assert read_settings(fields) == settings
    for field, value in fields.items():
        wrong: list[Any] = [None, [value]]
        if isinstance(value, bool):
            wrong += [1, "true"]
        elif isinstance(value, int | float):
            wrong += [math.inf, math.nan, 1e301, "1", True, *([-1] if field != "seed" else [])]
            wrong += [0] if isinstance(value, int) and field not in (*settings.ZERO, "seed") else []
        else:
            wrong += [value + "x", 1]
        for other in wrong:
            if other != value and not (field in ("preset", "extractor") and isinstance(other, str)):
                with pytest.raises(DatalensError):
                    read_settings(fields | {field: other})
    for field in fields.keys() - settings.OMITTED.keys() - {"noise"}:  # which older runs do not state
        with pytest.raises(DatalensError):
            read_settings({name: value for name, value in fields.items() if name != field})
    with pytest.raises(DatalensError):
        read_settings(fields | {"other": 1})
