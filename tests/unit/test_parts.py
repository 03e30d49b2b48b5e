"""Runs with several kinds of release: what a mix costs, and what goes by the part of the run that a charge names.

Prices are held against loss distributions that are convolved here, rounded up for one bound and down for the other, and
against dp-accounting. Twins that forget a kind, or another part's entries, must be caught.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from datalens.bounded.contributions import Ballots, BoundedSum, Contributions, count_ballots, sum_bounded
from datalens.bounded.norm_topk import NormTopK
from datalens.errors import BudgetExceeded, DatalensError, TamperedError, UnpriceableEvent
from datalens.methods.sgd import SgdSettings
from datalens.plans.base import Part, StepSettings
from datalens.privacy import reserve as reserving
from datalens.privacy import tables
from datalens.privacy.accountant import Accountant, AccountantName, side_by_side
from datalens.privacy.budget import Cap, DataBudget
from datalens.privacy.curves import PAPER_ORDERS, SAMPLED_ORDERS
from datalens.privacy.dpsgd import GradientGate, Schedule
from datalens.privacy.events import (
    Charge,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    OneOfManyEvent,
    SubsampledGaussianEvent,
    UnknownEvent,
    of_part,
    parse_event,
)
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.privacy.mechanisms import (
    ConfidentGNMax,
    DiscreteGaussianSum,
    GaussianSum,
    LaplaceVote,
    ThirdParty,
    make_mechanism,
)
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.privacy.released import Released
from datalens.privacy.reserve import most_charged
from datalens.released.checks import check_ledger, check_steps
from datalens.run.folder import LATEST, Alone, Run, load_tensors
from tests.unit import test_wholeness as whole

DELTA = 1e-5
FACTS: dict[str, Any] = {"relation": "add-remove", "queries": 3, "noise": "operating-system"}
Counted = Sequence[tuple[Any, int]]


def gaussian(mu: float, **more: Any) -> GaussianEvent:
    return GaussianEvent(
        **{**FACTS, "row_unit": "record", "l2_bound": mu, "diameter": mu, "sigma": 1.0, "step": 0, **more}
    )


def sampled(mu: float, rate: float, repeats: int = 1, **more: Any) -> SubsampledGaussianEvent:
    own = {"row_unit": "record", "l2_bound": mu, "rate": rate, "sigma": 1.0, "repeats": repeats, "step": 0}
    return SubsampledGaussianEvent(**{**FACTS, **own, **more})


def discrete(sigma: float, bound: float, coordinates: int = 7, **more: Any) -> DiscreteGaussianEvent:
    own = {"row_unit": "record", "l2_bound": bound, "diameter": bound, "sigma": sigma, "step": 0}
    return DiscreteGaussianEvent(**{**FACTS, **own, "coordinates": coordinates, **more})


def laplace(scale: float, **more: Any) -> LaplaceEvent:
    return LaplaceEvent(**{**FACTS, "row_unit": "teacher", "moved": 2, "scale": scale, "step": 0, **more})


def one_of_many(sigma: float, **more: Any) -> OneOfManyEvent:
    own = {"row_unit": "teacher", "l2_bound": 1.0, "diameter": 2.0, "teachers": 50, "sigma": sigma, "step": 0}
    return OneOfManyEvent(**{**FACTS, **own, "repeats": 2, **more})


def priced(name: AccountantName, counted: Counted, delta: float = DELTA) -> float:
    return Accountant(name=name).price(counted, delta)


# --- what a mix costs, from below and from above -------------------------------------------------------------------


def losses(mu: float, rate: float, edges: np.ndarray, *, appears: bool) -> np.ndarray:
    """P(loss <= edge) of one release: log of (1−q)·N(0,1) + q·N(mu,1) over N(0,1), or of the reverse if it appears."""

    def below(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where log(1 − q + q·e^(mu·x − mu²/2)) is at most t: the x up to here, by either distribution."""
        inside = np.exp(t) - 1 + rate if rate < 1 else np.exp(t)
        x = (np.log(np.maximum(inside, 1e-300) / rate) + mu * mu / 2) / mu
        x = np.where(inside > 0, x, -np.inf)
        return ndtr(x), (1 - rate) * ndtr(x) + rate * ndtr(x - mu)

    return 1 - below(-edges)[0] if appears else below(edges)[1]


def bracket(parts: Sequence[tuple[float, float, int]], delta: float) -> tuple[float, float]:
    """(at least, at most) ε of (mu, rate, times), over both directions: losses rounded down, and up, to a grid."""
    step, half = 8e-5, 2**19  # up to ±42
    edges = step * np.arange(-half, half)
    found = []
    for up in (False, True):
        worst = 0.0
        for appears in (False, True):
            spectrum = np.ones(half + 1, dtype=complex)
            for mu, rate, times in parts:
                reached = losses(mu, rate, edges, appears=appears)
                mass = np.diff(reached, prepend=0.0) if up else np.diff(reached, append=1.0)
                spectrum *= np.fft.rfft(np.fft.ifftshift(mass)) ** times
            together = np.maximum(np.fft.fftshift(np.fft.irfft(spectrum, 2 * half)), 0.0)
            tail = np.cumsum(together[::-1])[::-1]  # P(loss >= edge)
            weighted = np.cumsum((together * np.exp(-np.maximum(edges, -30.0)))[::-1])[::-1]
            curve = tail - np.exp(np.minimum(edges, 30.0)) * weighted
            at = int(np.argmax((curve <= delta) & (edges >= 0)))
            worst = max(worst, float(edges[at] if up else edges[at] - step))
        found.append(worst)
    return found[0], found[1]


MIXES: list[tuple[tuple[float, ...], tuple[float, float, int]]] = [
    ((0.5,), (1.0, 0.05, 60)),  # as loud as each other
    ((0.3, 0.4, 0.1), (0.5, 0.2, 30)),  # several Gaussians
    ((0.05,), (1.25, 0.01, 100)),  # nearly all is sampled
    ((1.5,), (0.8, 0.02, 50)),  # nearly all is Gaussian
    ((0.4,), (2.0, 0.3, 3)),  # few, loud steps: here the directions differ most
]


def charges_of(mus: Sequence[float], steps: tuple[float, float, int]) -> list[tuple[Charge, int]]:
    return [*((gaussian(mu), 1) for mu in mus), (sampled(*steps), 1)]


def bracket_of(mus: Sequence[float], steps: tuple[float, float, int]) -> tuple[float, float]:
    return bracket([*((mu, 1.0, 1) for mu in mus), steps], DELTA)


# (at least, at most) of each. Written down, so that no test of a price waits for them; a test makes them again.
TRUTHS = [(3.48096, 3.48592), (3.46584, 3.46856), (1.51408, 1.52224), (7.08416, 7.08832), (13.73648, 13.73688)]


def is_a_price(name: AccountantName, price: float, truth: tuple[float, float], error: float) -> bool:
    """Never below the truth; and above it by no more than the accountant's error, if it is one that is tight."""
    low, high = truth
    if name in ("pld", "prv"):
        return low <= price <= high + error
    return low <= price <= (1.5 * high + 1.0 if name == "rdp-improved" else math.inf)


def is_a_price_of_mixes(price: Callable[[Counted], float], name: AccountantName) -> bool:
    return all(
        is_a_price(name, price(mix), truth, Accountant(name=name).tolerance_of(mix, DELTA))
        for mix, truth in zip([charges_of(*mix) for mix in MIXES], TRUTHS, strict=True)
    )


@pytest.mark.parametrize(("mix", "truth"), list(zip(MIXES, TRUTHS, strict=True)))
def test_the_bounds_are_those_of_losses_convolved(mix: Any, truth: tuple[float, float]) -> None:
    low, high = bracket_of(*mix)
    assert (low, high) == pytest.approx(truth, abs=1e-4)
    assert 0 < high - low < 0.01


MIXING: tuple[AccountantName, ...] = ("rdp", "rdp-improved", "moments", "pld", "prv")


def test_the_bracket_is_that_of_one_gaussian() -> None:
    """The reference itself: mu² adds up, and the exact curve lies between the two bounds."""
    low, high = bracket([(0.6, 1.0, 1), (0.8, 1.0, 1)], DELTA)
    assert low <= priced("exact", [(gaussian(1.0), 1)]) <= high <= low + 5e-4


@pytest.mark.parametrize("name", MIXING)
def test_every_mix_is_priced_between_bounds_from_both_sides(name: AccountantName) -> None:
    if name == "pld":
        pytest.importorskip("dp_accounting")
    assert is_a_price_of_mixes(lambda mix: priced(name, mix), name)


@pytest.mark.parametrize("name", MIXING)
def test_a_mix_priced_as_if_one_kind_were_free_is_caught(name: AccountantName) -> None:
    """Broken twins: without the Gaussians; without the steps; with Gaussians that sampling is said to hide."""
    if name == "pld":
        pytest.importorskip("dp_accounting")

    def without(kind: type) -> Callable[[Counted], float]:
        return lambda mix: priced(name, [(event, times) for event, times in mix if not isinstance(event, kind)])

    def hidden(mix: Counted) -> float:
        rate = mix[-1][0].rate
        return priced(name, [(sampled(e.mu, rate) if isinstance(e, GaussianEvent) else e, n) for e, n in mix])

    for mix in [charges_of(*mix) for mix in MIXES]:
        if name in ("pld", "prv"):  # in every mix; coarser prices are above their truth even with a kind forgotten
            for twin in (without(GaussianEvent), without(SubsampledGaussianEvent), hidden):
                assert twin(mix) < priced(name, mix) - Accountant(name=name).tolerance_of(mix, DELTA) / 4, mix
    for twin in (without(GaussianEvent), without(SubsampledGaussianEvent), hidden):
        assert not is_a_price_of_mixes(twin, name)


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_by_dp_accounting(mix: Any) -> None:
    """Its own tables, rounded up and down, around ours; and its RDP, at the same orders, is ours."""
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution
    from dp_accounting.rdp import RdpAccountant

    mus, (mu, rate, times) = mix
    bounds = []
    for pessimistic in (False, True):
        facts = {"pessimistic_estimate": pessimistic, "value_discretization_interval": 1e-4}
        one = privacy_loss_distribution.from_gaussian_mechanism(1 / mu, sampling_prob=rate, **facts)
        whole = one.self_compose(times)
        for plain in mus:
            whole = whole.compose(privacy_loss_distribution.from_gaussian_mechanism(1 / plain, **facts))
        bounds.append(whole.get_epsilon_for_delta(DELTA))
    counted = charges_of(*mix)
    low, high = bounds
    assert low <= priced("pld", counted) <= high * (1 + 5e-4) + 1e-5
    assert low <= priced("prv", counted) <= high + Accountant(name="prv").tolerance_of(counted, DELTA)
    for name, orders in (("rdp-improved", SAMPLED_ORDERS), ("rdp", SAMPLED_ORDERS)):
        theirs = RdpAccountant(orders=orders)
        theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(1 / mu)), times)
        for plain in mus:
            theirs.compose(dp_accounting.GaussianDpEvent(1 / plain))
        if name == "rdp-improved":
            assert priced(name, counted) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-6)
        assert priced(name, counted) >= theirs.get_epsilon(DELTA) * (1 - 1e-6)


def test_opacus_takes_a_rate_of_one() -> None:
    """Of a Gaussian alone its table is the exact curve, from above, by less than twice the error it is asked for."""
    for mu in (1e-6, 1e-3, 0.05, 0.5, 1.0, 2.0, 5.0):
        rough, exact = priced("rdp-improved", [(gaussian(mu), 1)]), priced("exact", [(gaussian(mu), 1)])
        error = 2 * tables.prv_error(1, DELTA, rough)
        assert exact <= tables.prv_composed(((mu, 1.0, 1),), DELTA, rough) <= exact + error
    # And no surprise at either end: a Gaussian that is hardly there costs hardly anything.
    steps = [(sampled(1.0, 0.01, 100), 1)]
    for quiet in (1e-160, 1e-12, 1e-9):
        mix = [*steps, (gaussian(quiet), 1)]
        assert 0 <= priced("prv", mix) - priced("prv", steps) < 2 * Accountant(name="prv").tolerance_of(mix, DELTA)
    assert priced("prv", [*steps, (gaussian(0.0), 5)]) == priced("prv", steps)


def test_gaussians_of_a_mix_are_one_gaussian() -> None:
    steps = (sampled(0.7, 0.05, 20), 1)
    for name in MIXING:
        apart = priced(name, [(gaussian(0.3), 1), steps, (gaussian(0.4), 1)])
        assert apart == pytest.approx(priced(name, [(gaussian(0.5), 1), steps]), rel=1e-3)
    # A step that leaves nobody out is a Gaussian too, wherever it stands.
    everybody = priced("prv", [(sampled(0.3, 1.0), 1), steps, (gaussian(0.4), 1)])
    assert everybody == priced("prv", [(gaussian(0.3), 1), steps, (gaussian(0.4), 1)])


def test_discrete_noise_in_a_mix_is_the_gaussian_behind_it() -> None:
    """N_Z(0, σ²) as variance σ² − 4, with its slack; by RDP as its own ρ. Coarse noise has no table."""
    steps = (sampled(0.7, 0.05, 20), 1)
    fine = discrete(12.0, 6.0)
    behind = gaussian(6.0 / math.sqrt(12.0**2 - 4))
    assert priced("prv", [(fine, 1), steps]) == pytest.approx(priced("prv", [(behind, 1), steps]), rel=1e-9)
    assert priced("prv", [(fine, 1), steps]) > priced("prv", [(gaussian(0.5), 1), steps])
    assert priced("pld", [(fine, 1), steps]) == pytest.approx(priced("pld", [(behind, 1), steps]), rel=1e-9)
    assert priced("rdp", [(fine, 1), steps]) == pytest.approx(priced("rdp", [(gaussian(0.5), 1), steps]), rel=1e-12)
    many = discrete(12.0, 6.0, coordinates=10**32)  # so many numbers that the slack of 2e-34 each shows: 0.02 for each
    more = priced("prv", [(many, 1), steps]) - priced("prv", [(fine, 1), steps])
    assert 0.04 <= more < 0.06  # twice the slack, and what e^−slack of δ costs
    coarse = discrete(5.0, 2.0)
    for name in ("prv", "pld"):
        with pytest.raises(UnpriceableEvent, match="discrete noise below sigma 10"):
            priced(name, [(coarse, 1), steps])  # type: ignore[arg-type]
    assert 0 < priced("rdp-improved", [(coarse, 1), steps]) < math.inf


def test_who_prices_which_mix() -> None:
    """As the table in `privacy/accountant.py` has it."""
    plain, steps, many, counts = gaussian(0.3), sampled(0.7, 0.05, 20), one_of_many(40.0), laplace(40.0)
    for others, names in [
        ([plain, steps], {"rdp", "rdp-improved", "moments", "pld", "prv"}),
        ([plain, many], {"rdp", "rdp-improved", "pld"}),
        ([steps, many], {"rdp", "rdp-improved", "moments", "pld"}),
        ([plain, steps, many], {"rdp", "rdp-improved", "moments", "pld"}),
        ([plain, counts], {"rdp", "rdp-improved"}),
        ([steps, counts], {"rdp", "rdp-improved", "moments"}),
        ([discrete(5.0, 1.0), plain], {"rdp", "rdp-improved"}),
    ]:
        found = side_by_side([(event, 1) for event in others], DELTA)
        assert {name for name, price in found.items() if isinstance(price, float)} == names
        for name in names:
            without = max(priced(name, [(event, 1) for event in others if event is not left]) for left in others)
            assert found[name] >= without  # type: ignore[arg-type, operator]
    with pytest.raises(UnpriceableEvent, match="plain Gaussian events only, not 'subsampled-gaussian'"):
        priced("exact", [(plain, 1), (steps, 1)])


def test_a_mix_under_replace_one() -> None:
    """Sampled steps have no price there, so no ledger of it takes any; Gaussians and one of many compose."""
    ledger = Ledger.in_memory(Budget(epsilon=9.0, delta=DELTA, relation="replace-one", accountant="rdp-improved"))
    ledger.charge(gaussian(0.5, diameter=1.0, relation="replace-one", part="moments"))
    ledger.charge(one_of_many(40.0, relation="replace-one", part="rows"))
    assert ledger.spent() > priced("rdp-improved", [(gaussian(1.0), 1)])  # a row is replaced: twice as far
    with pytest.raises(DatalensError, match="add-remove event cannot be charged"):
        ledger.charge(sampled(1.0, 0.01))
    with pytest.raises(DatalensError, match="add-remove only"):
        GradientGate(ledger, schedule(), SecureNoise())
    assert len(ledger.events) == 2


def test_the_error_of_a_mix_is_that_of_its_steps_and_one_more() -> None:
    prv, mix = Accountant(name="prv"), charges_of((0.3, 0.4), (0.5, 0.2, 30))
    rough = priced("rdp-improved", mix)
    assert prv.tolerance_of(mix, DELTA) == 2 * tables.prv_error(31, DELTA, rough)
    nothing = [*mix[2:], (gaussian(0.0), 9)]
    assert prv.tolerance_of(nothing, DELTA) == prv.tolerance_of(mix[2:], DELTA)
    steps = [(sampled(0.001, 0.2, 1000), 1)]  # so quiet that the count decides the error
    both = [(gaussian(30.0), 1), *steps]
    assert prv.tolerance_of([(gaussian(1e-9), 1), *steps], 1e-9) >= prv.tolerance_of(steps, 1e-9)
    assert priced("prv", both) == priced("rdp-improved", both)  # past what tables hold


def test_no_number_of_steps_makes_room_for_a_price_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """10¹² steps of mu = 1e-4 at rate 0.01 cost ε = 4.4; PRV's error for them is 3.4, so it answers 6.6."""
    monkeypatch.setattr(tables, "prv_composed", lambda *_: 6.6)  # it takes a minute
    steps = [(sampled(1e-4, 0.01, 10**12), 1)]
    error = tables.prv_error(10**12, DELTA, priced("rdp-improved", steps))
    assert 2 * error > 4.4 > 0.02 == Accountant(name="prv").tolerance_of(steps, DELTA)


# --- charges that name their part ---------------------------------------------------------------------------------

ALL = [
    gaussian(1.0, diameter=2.0, sigma=40.0, step=0),
    discrete(40.0, 1.0, diameter=2.0, step=1),
    sampled(1.0, 0.01, 5, sigma=4.0, step=2),
    one_of_many(40.0, step=3),
    laplace(90.0, step=4),
]


def test_lines_without_a_part_are_byte_for_byte_those_of_before(tmp_path: Path) -> None:
    """The SHA-256 of this ledger, and of its last line, as the version before parts wrote them."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, Budget(epsilon=5.0, delta=DELTA, relation="add-remove", accountant="rdp-improved"))
    for event in ALL:
        ledger.charge(event)
    ledger.close()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "e4385b02f5385eeb273c483f714ad2990c7c2485bef0507adfc00b679c608dda"
    assert ledger.chain(5) == "6a08a10ec3b046837d6304c12784923da2a6c79ac3a799382899c84d714e17ed"
    assert read_ledger(path)[1] == tuple(ALL)


@pytest.mark.parametrize("name", ["moments", "sgd"])
def test_ledgers_of_old_releases_are_written_as_they_were_read(name: str) -> None:
    path = Path(__file__).parent.parent / "fixtures" / "release-0.1.0" / name / "ledger.jsonl"
    _, events = read_ledger(path)
    assert events and all(event.part == "" for event in of_part(events, ""))
    for line, event in zip(path.read_bytes().splitlines()[1:], of_part(events, ""), strict=True):
        assert json.loads(line)["event"] == event.as_dict()


@pytest.mark.parametrize("event", ALL, ids=lambda event: event.kind)
def test_a_part_is_written_read_and_costs_nothing(event: Charge, tmp_path: Path) -> None:
    named = parse_event(event.as_dict() | {"part": "second-stage"})
    assert not isinstance(named, UnknownEvent) and named.part == "second-stage"
    assert named.as_dict() == event.as_dict() | {"part": "second-stage"} and "part" not in event.as_dict()
    assert named != event and named.mu == event.mu
    for name in ("rdp-improved", "pld"):
        assert priced(name, [(named, 1)]) == priced(name, [(event, 1)])  # type: ignore[arg-type]
    budget = Budget(epsilon=5.0, delta=DELTA, relation="add-remove", accountant="rdp-improved")
    ledger = Ledger.create(tmp_path / "ledger.jsonl", budget)
    ledger.charge(named)
    ledger.close()
    assert read_ledger(tmp_path / "ledger.jsonl")[1] == (named,)


@pytest.mark.parametrize("name", ["a" * 41, "two words", "a_b", "a.b", "é", "a\n", "/", None, 3, ["a"], "", True])
def test_what_is_no_name_of_a_part(name: Any) -> None:
    for event in ALL:
        with pytest.raises(TamperedError, match="part"):
            parse_event(event.as_dict() | {"part": name})
    if name != "":
        with pytest.raises(TamperedError, match="40 letters, digits and hyphens"):
            Schedule(sigma=2.0, rate=0.01, steps=25, unit=1.0, l2_bound=1.0, part=name)


def test_names_of_parts_and_other_fields() -> None:
    for name in ("a" * 40, "Stage-2", "0", "-"):
        event = parse_event(ALL[0].as_dict() | {"part": name})
        assert isinstance(event, GaussianEvent) and event.part == name
    for other in ({"parts": "a"}, {"part": "a", "sensitivity": 1e-9}):
        with pytest.raises(TamperedError, match="must have the fields"):
            parse_event(ALL[0].as_dict() | other)
    with pytest.raises(TamperedError, match="must have the fields"):
        parse_event({k: v for k, v in ALL[0].as_dict().items() if k != "step"} | {"part": "a"})


def test_events_of_a_part_in_their_order() -> None:
    first, second = gaussian(0.1, part="a", step=1), gaussian(0.2, part="a", step=0)
    events = [first, gaussian(0.3), UnknownEvent(kind="new"), second, gaussian(0.4, part="b")]
    assert of_part(events, "a") == [first, second]
    assert [event.l2_bound for event in of_part(events, "") if isinstance(event, GaussianEvent)] == [0.3]
    assert of_part(events, "c") == []


# --- gates -------------------------------------------------------------------------------------------------------

COMPRESS = NormTopK(clip=1.0)
PRIVATE = Budget(epsilon=4.0, delta=DELTA, relation="add-remove", accountant="prv")


def schedule(**other: Any) -> Schedule:
    facts: dict[str, Any] = {"sigma": 1.5, "rate": 0.05, "steps": 9, "unit": 1.0, "part": "refine"}
    return Schedule(**{**facts, "l2_bound": COMPRESS.l2_bound, **other})


def rows() -> BoundedSum:
    return COMPRESS.sum([torch.ones(3, 5)])


def votes(step: int = 0, *, whole: bool = True) -> BoundedSum:
    ones = torch.ones(3, 1, 4, dtype=torch.int8 if whole else torch.float64)
    return sum_bounded([Contributions(rows=ones, l2_bound=2.0, diameter=4.0, row_unit="record")])


def test_moments_then_sampled_steps_then_an_accuracy_in_one_ledger(tmp_path: Path) -> None:
    """What no ledger took before: one budget, three kinds of release, each priced with all the others."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, PRIVATE)
    moments = make_mechanism(20.0, SecureNoise(), part="moments")
    for step in range(4):
        moments.release(votes(), ledger, step=step)
    gate = GradientGate(ledger, schedule(), SecureNoise(), blocks=3)
    taken = [gate.release(rows()) for _ in range(4)]  # a block of 3, and one of the next
    make_mechanism(30.0, SecureNoise(), part="accuracy").release(votes(), ledger, step=0)
    taken += [gate.release(rows()), gate.release(rows())]  # the rest of that block, across another part's charge
    assert [one.number for one in taken] == [4, 4, 4, 5, 5, 5]
    left = gate.hand_over()
    assert (left, gate.charged) == (0, 6)
    ledger.close()
    again = Ledger.open(path)
    assert [getattr(event, "part", None) for event in again.events] == [*["moments"] * 4, *["refine"] * 2, "accuracy"]
    gate = GradientGate(again, schedule(), SecureNoise(), blocks=3)
    assert (gate.charged, gate.left) == (6, 0)
    assert [gate.release(rows()).number for _ in range(3)] == [7, 7, 7]
    with pytest.raises(BudgetExceeded, match="all 9 steps"):
        gate.release(rows())
    counted = [(event, 1) for event in again.events]
    assert again.spent() == priced("prv", counted)
    for part in ("moments", "refine", "accuracy"):
        others = [(event, 1) for event in again.events if event not in of_part(again.events, part)]
        assert again.spent() > priced("prv", others)
    again.close()


def test_what_is_left_of_a_block_is_paid_by_its_own_charge() -> None:
    """Broken twin: the last charge of the ledger, whosever it is. It would release with another part's noise."""
    ledger = Ledger.in_memory(PRIVATE)
    gate = GradientGate(ledger, schedule(), SeededNoise(0), blocks=1)
    first = gate.release(rows())
    make_mechanism(50.0, SeededNoise(0), part="accuracy").release(votes(), ledger, step=0)
    parked = GradientGate(ledger, schedule(), SeededNoise(0), left=gate.hand_over(), blocks=1)
    again = parked.release(rows())
    assert (again.number, again.event) == (first.number, first.event) == (0, ledger.events[0])
    assert len(ledger.events) - 1 != again.number  # what the twin says


def test_a_gate_counts_its_own_part_and_holds_it_to_its_schedule() -> None:
    ledger = Ledger.in_memory(PRIVATE)
    GradientGate(ledger, schedule(part="first"), SecureNoise(), blocks=1).release(rows())
    second = GradientGate(ledger, schedule(), SecureNoise())
    assert (second.charged, second.left) == (0, 0)
    second.release(rows())
    with pytest.raises(DatalensError, match="1 steps cannot be left of 0"):
        GradientGate(ledger, schedule(part="third"), SecureNoise(), left=1)
    for other in ({"sigma": 3.0}, {"rate": 0.02}, {"row_unit": "person"}):
        with pytest.raises(DatalensError, match="another schedule"):
            GradientGate(ledger, schedule(**other), SecureNoise())
    ledger.charge(gaussian(0.01, part="refine"))  # of this part, and no step
    with pytest.raises(DatalensError, match="another schedule"):
        GradientGate(ledger, schedule(), SecureNoise())
    GradientGate(ledger, schedule(part="first"), SecureNoise())
    ledger._events.append(UnknownEvent(kind="new"))  # whose it is, nobody knows
    with pytest.raises(DatalensError, match="another schedule"):
        GradientGate(ledger, schedule(part="first"), SecureNoise())


def test_every_gate_names_its_part() -> None:
    plain = Budget(epsilon=math.inf, delta=DELTA, relation="add-remove", accountant="rdp")
    ledger = Ledger.in_memory(plain)
    for whole_numbers in (True, False):
        made = make_mechanism(50.0, SecureNoise(), part="sums").release(votes(whole=whole_numbers), ledger, step=2)
        assert made.event.part == "sums"
    integers: Any = SimpleNamespace(
        sigma=50.0, scale=9.0, origin="operating-system", integers=lambda count: np.zeros(count, np.int64)
    )
    assert DiscreteGaussianSum(noise=integers, part="exact").release(votes(), ledger, step=0).event.part == "exact"
    ballots = count_ballots(
        [Ballots(teachers=torch.arange(3), choices=torch.tensor([[0, 1], [1, 1], [2, 1]]))], answers=3
    )
    assert LaplaceVote(noise=integers, part="labels").release(ballots, ledger, step=0).event.part == "labels"
    asked = ConfidentGNMax(sigma_check=1.0, sigma=1.0, threshold=-99.0, noise=SecureNoise(), part="answers")
    before = len(ledger.events)
    assert asked.release(ballots, ledger, step=0).event.part == "answers"
    assert len(of_part(ledger.events[before:], "answers")) == 2  # the check and the answers


def test_a_third_partys_mechanism_names_no_part() -> None:
    ledger, noise = Ledger.in_memory(PRIVATE), SecureNoise()
    plain = ThirdParty(mechanism=GaussianSum(sigma=50.0, noise=noise), sigma=50.0, noise=noise)
    assert plain.release(votes(), ledger, step=0).event.part == ""
    named = ThirdParty(mechanism=GaussianSum(sigma=50.0, noise=noise, part="mine"), sigma=50.0, noise=noise)
    with pytest.raises(DatalensError, match="not used"):
        named.release(votes(), ledger, step=0)


# --- the journal -------------------------------------------------------------------------------------------------


class ForgetsAll(Journal):
    """A broken twin: a checkpoint of one part forgets the values of every part."""

    def forget_before(self, ledger: Ledger, *, step: int, part: str = "") -> None:
        for each in {event.part for event in ledger.events if not isinstance(event, UnknownEvent)}:
            super().forget_before(ledger, step=step, part=each)


class FindsAny(Journal):
    """Another: the value of any part that has this step."""

    def find(self, ledger: Ledger, *, step: int, part: str = "") -> Released | None:
        parts = dict.fromkeys(event.part for event in ledger.events if not isinstance(event, UnknownEvent))
        return next(
            (found for each in parts if (found := super(FindsAny, self).find(ledger, step=step, part=each))), None
        )


def keeps_parts_apart(kind: type[Journal], folder: Path) -> bool:
    """A second stage's checkpoint after two of its three steps: the moments are all there, and so is its third step."""
    ledger = Ledger.in_memory(PRIVATE)
    folder.mkdir()
    journal = kind(folder, ledger)
    values: dict[tuple[str, int], Released] = {}
    for part, steps in (("moments", 2), ("", 2), ("stage-2", 3)):
        for step in range(steps):
            values[part, step] = make_mechanism(50.0, SecureNoise(), part=part).release(votes(), ledger, step=step)
            journal.save(values[part, step])
    right = True
    for (part, step), value in values.items():
        found = journal.find(ledger, step=step, part=part)
        right &= found is not None and (found.number, found.event) == (value.number, value.event)
    right &= journal.find(ledger, step=2, part="moments") is None and journal.find(ledger, step=0, part="none") is None
    journal.forget_before(ledger, step=2, part="stage-2")
    there = {(part, step) for part, step in values if journal.find(ledger, step=step, part=part) is not None}
    return right and there == {("moments", 0), ("moments", 1), ("", 0), ("", 1), ("stage-2", 2)}


def test_the_journal_goes_by_part_and_twins_that_do_not_are_caught(tmp_path: Path) -> None:
    assert keeps_parts_apart(Journal, tmp_path / "journal")
    assert not keeps_parts_apart(ForgetsAll, tmp_path / "forgets")
    assert not keeps_parts_apart(FindsAny, tmp_path / "finds")


# --- a run: checkpoints, and what its charges pay for ---------------------------------------------------------------


def two_stages(run: Run, *, until: int | None = None) -> int:
    """Two releases that the journal keeps, then steps with checkpoints. Returns how often it had to charge."""
    before, student = len(run.ledger.events), whole.Counted()

    def ask(step: int, part: str) -> None:
        if run.journal.find(run.ledger, step=step, part=part) is None:
            run.journal.save(make_mechanism(5000.0, SecureNoise(), part=part).release(votes(), run.ledger, step=step))

    for step in range(2):
        ask(step, "moments")
    teachers = Alone(whole.Counted(), run.path / "checkpoints")
    for step in run.steps(whole.STEPS, student=student, teachers=teachers, part="refine"):
        ask(step, "refine")
        student.seen += 1
        run.interrupted = step + 1 == until
    return len(run.ledger.events) - before


def test_a_second_stages_checkpoint_keeps_what_the_first_has_paid_for(tmp_path: Path) -> None:
    """--resume asks for nothing twice: two moments and eight steps are charged, over any interruption."""
    run = whole.begin(tmp_path / "run")
    assert two_stages(run, until=5) == 7
    run.close()
    facts = load_tensors(tmp_path / "run" / "checkpoints" / LATEST)[1]
    assert (facts["part"], facts["step"]) == ("refine", "5")
    run = Run.resume(tmp_path / "run")
    assert two_stages(run) == 3
    run.close()
    run = Run.resume(tmp_path / "run")  # with the checkpoint lost, the journal's first values are still there
    assert two_stages(run) == 0
    with pytest.raises(DatalensError, match="of another part of this run"):
        list(run.steps(whole.STEPS, student=whole.Counted(), teachers=Alone(whole.Counted(), run.path / "checkpoints")))
    run.close()


def test_without_parts_a_checkpoint_says_what_it_said(tmp_path: Path) -> None:
    run = whole.begin(tmp_path / "run")
    whole.go_on(run, until=2)
    run.close()
    assert set(load_tensors(tmp_path / "run" / "checkpoints" / LATEST)[1]) == {"step", "teachers", "charges", "chain"}


def test_charges_of_another_part_pay_for_no_steps_of_this_one(tmp_path: Path) -> None:
    """Six charges of moments would have paid for a checkpoint of six steps, of which three were charged."""
    run = whole.begin(tmp_path / "run")
    moments = make_mechanism(5000.0, SecureNoise(), part="moments")
    for step in range(6):
        moments.release(votes(), run.ledger, step=step)
    for step in range(3):
        make_mechanism(5000.0, SecureNoise(), part="refine").release(votes(), run.ledger, step=step)
    events = run.ledger.events
    assert [run.settings.steps_paid(of_part(events, part)) for part in ("moments", "refine", "")] == [6, 3, 0]
    run.close()
    sgd = SgdSettings.__new__(SgdSettings)
    steps = [sampled(1.0, 0.01, 5, part="a"), sampled(1.0, 0.01, 3, part="b", step=5), gaussian(1.0, part="a")]
    assert [sgd.steps_paid(of_part(steps, part)) for part in ("a", "b", "")] == [5, 3, 0]


def test_a_checkpoint_that_other_parts_charges_would_pay_for_is_refused(tmp_path: Path) -> None:
    run = whole.begin(tmp_path / "run")
    two_stages(run, until=5)
    run.close()
    latest = tmp_path / "run" / "checkpoints" / LATEST
    state, facts = load_tensors(latest)
    whole.save_tensors(latest, state, facts | {"step": "6"})  # seven charges, of which five are of its part
    with pytest.raises(TamperedError, match="has learned from 6 steps, of which they pay for 5"):
        Run.open(tmp_path / "run")


def test_a_run_that_lost_its_checkpoint_goes_on_from_any_parts_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole.begin(tmp_path / "run")
    two_stages(run)
    run.close()
    folder = tmp_path / "run"
    (folder / "release").mkdir()
    (folder / "checkpoints" / LATEST).unlink()
    Run.resume(folder).close()
    with monkeypatch.context() as patch:  # what has learned is the second part, and of its steps nothing is left
        patch.setattr(type(run.settings), "stepped", "refine")
        with pytest.raises(DatalensError, match="neither a checkpoint nor a journal"):
            Run.resume(folder)
    for path in (folder / "journal").iterdir():
        path.unlink()
    with pytest.raises(DatalensError, match="neither a checkpoint nor a journal"):
        Run.resume(folder)


class Toy(StepSettings):
    """Charges two parts, of any steps."""

    stepped: ClassVar[str] = "refine"

    def schedule(self, schema: Any, budget: Any) -> tuple[Part, ...]:
        loud: dict[str, Any] = {"sensitivity": 1.0, "cells": 1, "noise_to_signal": 1.0}
        return (
            Part(name="moments", event=gaussian(0.1, part="moments"), times=3, **loud),
            Part(name="steps", event=sampled(1.0, 0.01, 4, part="refine"), times=2, **loud),
        )

    def steps_paid(self, events: Sequence[Charge]) -> int:
        return sum(getattr(event, "repeats", 0) for event in events)

    def possible(self, event: Charge, schema: Any, budget: Any) -> bool:
        return True


def claimed(settings: Any, events: Sequence[Any]) -> list[str]:
    claim: Any = SimpleNamespace(settings=settings, schema=None, budget=PRIVATE, events=tuple(events))
    return check_ledger(claim)


def test_verify_numbers_the_steps_of_each_part() -> None:
    toy = Toy(method="toy", preset="paper", seed=0, noise_seeded=False, noise="gaussian", steps=4)
    moments = [gaussian(0.1, part="moments", step=step) for step in range(3)]
    blocks = [sampled(1.0, 0.01, 5, part="refine", step=0), sampled(1.0, 0.01, 3, part="refine", step=5)]
    assert claimed(toy, [moments[0], blocks[0], moments[1], blocks[1], moments[2]]) == []
    assert any("gaps" in line for line in claimed(toy, [moments[0], *blocks, moments[2]]))
    (line,) = claimed(toy, [*moments, blocks[1]])
    assert "a block of steps does not begin where the last one ended" in line
    assert claimed(toy, [*moments, gaussian(0.1, part="other", step=1)]) != []


def test_verify_asks_for_all_of_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(method="toy", preset="paper", seed=0, noise_seeded=False, noise="gaussian", steps=8)
    moments = [gaussian(0.1, part="moments", step=step) for step in range(3)]
    blocks = [sampled(1.0, 0.01, 4, part="refine", step=step) for step in (0, 4)]
    assert claimed(toy, moments + blocks) == [] == claimed(toy, [moments[0], *moments, *blocks])  # one was lost
    for events in (blocks, moments[:2] + blocks, [moments[0], *moments[:2], *blocks]):
        assert claimed(toy, events) == [
            "the ledger lacks charges for the part moments, which comes before what was learned"
        ]
    monkeypatch.setattr(Toy, "_left_out", lambda *_: [])  # the twin
    assert claimed(toy, blocks) == []


def test_the_steps_of_weights_are_those_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(method="toy", preset="paper", seed=0, noise_seeded=False, noise="gaussian", steps=8)
    events = (gaussian(0.1, part="moments"), sampled(1.0, 0.01, 4, part="refine"))

    def said(completed: int) -> list[str]:
        weights = SimpleNamespace(completed=completed, answered=None)
        claim: Any = SimpleNamespace(settings=toy, events=events, version=3, weights=weights)
        return check_steps(claim)

    assert said(4) == []
    assert said(5) == ["the weights learned from 5 steps, the ledger has charges for 4"]
    monkeypatch.setattr(Toy, "stepped", "")  # the twin looks for charges without a name
    assert said(4) == ["the weights learned from 4 steps, the ledger has charges for 0"]


def test_verify_refuses_parts_of_methods_that_have_none(tmp_path: Path) -> None:
    run = whole.begin(tmp_path / "run")
    whole.go_on(run)
    events = list(run.ledger.events)
    run.close()

    def said(found: Sequence[Any]) -> list[str]:
        claim: Any = SimpleNamespace(
            settings=run.settings, schema=whole.SCHEMA, budget=run.ledger.budget, events=tuple(found)
        )
        return [line for line in check_ledger(claim) if "parts" in line]

    assert said(events) == []
    forged = parse_event(events[0].as_dict() | {"part": "moments"})  # type: ignore[union-attr]
    assert said([forged, *events[1:]]) == ["the ledger was charged for parts that this method does not have"]


# --- what a run of several parts sets aside --------------------------------------------------------------------------


def taken(parts: Sequence[tuple[Charge, int]], order: Sequence[int], own: Budget) -> list[Charge]:
    """What a ledger ends up with if these parts are charged, in this order, each until it is refused."""
    found: list[Charge] = []
    for which in order:
        event, _ = parts[which]
        while own.pricing().epsilon([*found, event], own.delta) <= own.epsilon:
            found.append(event)
    return found


MIX = [(gaussian(0.25, part="moments"), 4), (sampled(1.0, 0.05, 10, part="refine"), 3)]


def covers(reserved: Sequence[tuple[Charge, int]], charged: Sequence[Charge]) -> bool:
    """Whether it is as much, kind by kind: mu² of Gaussian noise, and the number of each other event."""
    room = sum(event.mu**2 * times for event, times in reserved if isinstance(event, GaussianEvent))
    used = sum(event.mu**2 for event in charged if isinstance(event, GaussianEvent))
    others = [event for event in charged if not isinstance(event, GaussianEvent)]
    counts = {id(event): others.count(event) <= dict(reserved).get(event, 0) for event in others}
    return used <= room * (1 + 1e-9) and all(counts.values())


@pytest.mark.parametrize("accountant", ["rdp", "rdp-improved", "prv"])
@pytest.mark.parametrize("epsilon", [2.5, 4.0])
def test_a_mix_sets_aside_whatever_its_ledger_may_take(accountant: AccountantName, epsilon: float) -> None:
    own = Budget(epsilon=epsilon, delta=DELTA, relation="add-remove", accountant=accountant)
    if own.pricing().price(MIX, DELTA) > epsilon:
        with pytest.raises(BudgetExceeded, match="plan itself"):
            most_charged(MIX, own)
        return
    reserved = most_charged(MIX, own)
    for order in ((0, 1), (1, 0)):
        charged = taken(MIX, order, own)
        assert len(charged) > 3 and covers(reserved, charged)
    # Broken twins: the plan; each kind at what is left beside the plan of the other.
    assert not all(covers(MIX, taken(MIX, order, own)) for order in ((0, 1), (1, 0)))
    half = [reserved[0], MIX[1]]
    assert not covers(half, taken(MIX, (1, 0), own))


def test_quiet_mixes_are_priced_at_more_orders_than_gaussians_alone() -> None:
    """At a small ε a ledger with a sampled step takes more Gaussian noise than one without: that much is set aside."""
    own = Budget(epsilon=0.03, delta=DELTA, relation="add-remove", accountant="rdp-improved")
    alone = own.pricing().mu_budget(0.03, DELTA)
    parts = [(sampled(1e-4, 1e-3, part="refine"), 1), (gaussian(1e-4, part="moments"), 1)]
    more = 1.05 * alone
    assert len(SAMPLED_ORDERS) > len(PAPER_ORDERS)
    assert own.pricing().price([(gaussian(more), 1)], DELTA) > 0.03
    assert own.pricing().price([(gaussian(more), 1), parts[0]], DELTA) <= 0.03
    assert covers(most_charged(parts, own), [gaussian(more)])


def test_parts_whose_gate_charges_the_plan_set_that_aside() -> None:
    own = Budget(epsilon=4.0, delta=DELTA, relation="add-remove", accountant="rdp-improved")
    (steps, times), (sums, once) = most_charged(MIX, own, final=["refine"])
    assert (steps, times) == MIX[1] and once == 1
    assert isinstance(sums, GaussianEvent)
    assert sums.mu == pytest.approx(Accountant(name="exact").mu_budget(4.0, DELTA), rel=1e-9)
    assert most_charged(MIX, own, final=["refine", "moments"]) == (MIX[0], MIX[1])
    (_, (_, most)) = most_charged(MIX, own)
    assert most > 3


def test_discrete_noise_of_a_mix_is_set_aside_as_the_gaussian_behind_it() -> None:
    own = Budget(epsilon=4.0, delta=DELTA, relation="add-remove", accountant="rdp")
    tight = discrete(10.0, 1.0, part="moments")
    parts = [(tight, 2), (discrete(1000.0, 1.0), 1), MIX[1]]
    (sums, _), _ = most_charged(parts, own)
    charged = taken([parts[0], MIX[1]], (0, 1), own)
    assert sums.mu**2 >= sum(event.mu**2 for event in charged if isinstance(event, GaussianEvent))
    exact = Accountant(name="exact").mu_budget(4.0, DELTA)
    assert sums.mu**2 == pytest.approx(exact**2 * 100 / 96, rel=1e-9)
    with pytest.raises(DatalensError, match="cannot be reserved"):
        most_charged([(discrete(5.0, 1.0), 1), MIX[1]], own)


def test_a_coarser_price_of_one_kind_is_no_reason_to_set_less_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind alone may cost its accountant's error more than in a mix: it is set aside with that much more room."""
    own = Budget(epsilon=4.0, delta=DELTA, relation="add-remove", accountant="rdp-improved")
    _, (event, most) = most_charged(MIX, own)
    monkeypatch.setattr(Accountant, "tolerance_of", lambda self, counted, delta: 0.5)
    _, (_, more) = most_charged(MIX, own)
    assert own.pricing().price([(event, most + 1)], DELTA) > 4.0 >= own.pricing().price([(event, most)], DELTA)
    assert own.pricing().price([(event, more + 1)], DELTA) > 4.5 >= own.pricing().price([(event, more)], DELTA)


def test_a_mix_in_a_data_sets_budget(tmp_path: Path) -> None:
    own = Budget(epsilon=4.0, delta=DELTA, relation="add-remove", accountant="prv")
    with DataBudget.create(tmp_path / "b", Cap(epsilon=9.0, delta=DELTA, relation="add-remove")) as data:
        data.reserve(MIX, own, data="faces", unit="one image", final=["refine"])
        assert data.charges == most_charged(MIX, own, final=["refine"])
        spent, left = data.spent()[0], data.left()
        assert 4.0 < spent < 9.0 and 0 < left < 9.0
        after = Budget(epsilon=left, delta=DELTA, relation="add-remove", accountant="exact")
        data.reserve([(gaussian(0.1), 1)], after, data="faces", unit="one image")
        with pytest.raises(BudgetExceeded):
            data.reserve([(gaussian(0.1), 1)], PRIVATE, data="faces", unit="one image")
    with DataBudget.open(tmp_path / "b") as again:
        assert [event.part for event, _ in again.charges] == ["refine", "", ""]
    assert reserving.price(MIX, DELTA) == (priced("prv", MIX), "prv")
