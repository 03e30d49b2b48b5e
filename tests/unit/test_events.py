"""Events: the sensitivity follows from the facts, and what is malformed is refused, never made cheaper."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.errors import TamperedError, UnpriceableEvent
from datalens.privacy.accountant import Accountant
from datalens.privacy.events import GaussianEvent, UnknownEvent, parse_event

GOOD: dict[str, Any] = {
    "row_unit": "teacher",
    "l2_bound": 5.0,
    "diameter": 8.0,
    "relation": "add-remove",
    "sigma": 100.0,
    "queries": 15,
    "step": 3,
    "noise": "operating-system",
}

# What moves between neighbours. A teacher's row is always replaced; one's own row appears, vanishes, or is replaced.
SENSITIVITY = {
    ("teacher", "add-remove"): "diameter",
    ("teacher", "replace-one"): "diameter",
    ("record", "add-remove"): "l2_bound",
    ("record", "replace-one"): "diameter",
    ("person", "add-remove"): "l2_bound",
    ("person", "replace-one"): "diameter",
}


def wrong_sensitivities(sensitivity_of: Callable[[GaussianEvent], float]) -> list[tuple[str, str]]:
    """The (unit, relation) pairs for which this is not how far the sum can move."""
    wrong = []
    for (unit, relation), field in SENSITIVITY.items():
        event = GaussianEvent(**(GOOD | {"row_unit": unit, "relation": relation}))
        if sensitivity_of(event) != GOOD[field]:
            wrong.append((unit, relation))
    return wrong


def test_sensitivity_of_every_unit_and_relation() -> None:
    assert wrong_sensitivities(lambda event: event.sensitivity) == []


def test_wrong_sensitivities_are_caught() -> None:
    """Broken twins: the norm of a row for everything; the diameter for everything; unit and relation mixed up."""
    assert ("teacher", "add-remove") in wrong_sensitivities(lambda event: event.l2_bound)
    assert ("record", "add-remove") in wrong_sensitivities(lambda event: event.diameter)
    assert ("teacher", "add-remove") in wrong_sensitivities(
        lambda event: event.l2_bound if event.relation == "add-remove" else event.diameter
    )


def test_mu_is_sensitivity_over_sigma() -> None:
    assert GaussianEvent(**GOOD).mu == 8.0 / 100.0
    assert GaussianEvent(**(GOOD | {"sigma": 0.0})).mu == math.inf
    assert GaussianEvent(**(GOOD | {"l2_bound": 0.0, "diameter": 0.0, "sigma": 0.0})).mu == 0.0
    assert GaussianEvent(**(GOOD | {"l2_bound": 0.0, "diameter": 0.0})).mu == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, bad)
            for name in ("l2_bound", "diameter", "sigma")
            for bad in (-1.0, math.nan, math.inf, "5", None, True)
        ),
        *((name, bad) for name in ("queries", "step") for bad in (-1, 1.0, "1", None, True)),
        ("diameter", 10.1),  # farther apart than two rows of norm 5 can be
        ("row_unit", "class"),
        ("relation", "zero-out"),
        ("noise", "secure"),
        ("noise", None),
        ("relation", ["add-remove"]),
    ],
)
def test_an_event_that_cannot_be_is_refused(field: str, value: Any) -> None:
    with pytest.raises(TamperedError, match=field if value != 10.1 else "apart"):
        GaussianEvent(**(GOOD | {field: value}))


def test_a_whole_number_past_every_float_is_refused() -> None:
    with pytest.raises(TamperedError):
        GaussianEvent(**(GOOD | {"sigma": 10**400}))


@pytest.mark.parametrize("diameter", [0.0, 4.9])
def test_a_diameter_below_the_bound_is_refused(diameter: float) -> None:
    with pytest.raises(TamperedError):
        GaussianEvent(**(GOOD | {"diameter": diameter}))


def test_an_event_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        GaussianEvent(**GOOD).sigma = 1e9  # type: ignore[misc]


numbers = st.floats(0, 1e12, allow_nan=False)


@given(
    bound=numbers,
    part=st.floats(0.5, 1),
    sigma=numbers,
    queries=st.integers(0, 10**6),
    step=st.integers(0, 10**6),
    unit=st.sampled_from(["teacher", "record", "person"]),
    relation=st.sampled_from(["add-remove", "replace-one"]),
    noise=st.sampled_from(["operating-system", "seeded"]),
)
@settings(max_examples=60, deadline=None)
def test_json_round_trip_keeps_every_bit(
    bound: float, part: float, sigma: float, queries: int, step: int, unit: Any, relation: Any, noise: Any
) -> None:
    event = GaussianEvent(
        row_unit=unit,
        l2_bound=bound,
        diameter=2 * bound * part,
        relation=relation,
        sigma=sigma,
        queries=queries,
        step=step,
        noise=noise,
    )
    again = parse_event(json.loads(json.dumps(event.as_dict())))
    assert again == event
    assert isinstance(again, GaussianEvent) and again.mu == event.mu


def test_missing_and_extra_fields_are_refused() -> None:
    full = GaussianEvent(**GOOD).as_dict()
    for name in GOOD:
        with pytest.raises(TamperedError, match="fields"):
            parse_event({k: v for k, v in full.items() if k != name})
    with pytest.raises(TamperedError, match="fields"):
        parse_event({**full, "sensitivity": 1e-9})


@pytest.mark.parametrize("kind", ["laplace", "Gaussian", "", None, 7])
def test_another_kind_is_kept_but_never_priced(kind: Any) -> None:
    event = parse_event({"kind": kind, "sigma": 1.0})
    assert event == UnknownEvent(kind=str(kind))
    for name in ("exact", "rdp"):
        with pytest.raises(UnpriceableEvent):
            Accountant(name=name).epsilon([event], 1e-5)  # type: ignore[arg-type]
    assert parse_event({}) == UnknownEvent(kind="None")
