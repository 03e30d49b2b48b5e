"""The data set's own budget: what runs reserve, what that costs together, and twins that must be caught."""

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from datalens.errors import BudgetExceeded, DatalensError, TamperedError
from datalens.privacy import budget as module
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.budget import FILE, Cap, DataBudget, most_charged, price
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.events import (
    Charge,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    Relation,
    SubsampledGaussianEvent,
)
from datalens.privacy.ledger import Budget
from datalens.privacy.reserve import may_follow

DELTA = 1e-5


def budget(epsilon: float, accountant: AccountantName = "exact", relation: Relation = "add-remove") -> Budget:
    return Budget(epsilon=epsilon, delta=DELTA, relation=relation, accountant=accountant)


def gaussian(sigma: float, *, relation: Relation = "add-remove", noise: Any = "operating-system") -> GaussianEvent:
    bounds = {"l2_bound": 1.0, "diameter": 2.0, "sigma": sigma}
    return GaussianEvent(row_unit="record", relation=relation, queries=1, step=0, noise=noise, **bounds)


def discrete(sigma: float, bound: float) -> DiscreteGaussianEvent:
    facts: dict[str, Any] = {"row_unit": "record", "relation": "add-remove", "noise": "operating-system"}
    facts |= {"l2_bound": bound, "diameter": bound, "sigma": sigma, "queries": 1, "step": 0, "coordinates": 10}
    return DiscreteGaussianEvent(**facts)


def sampled(sigma: float, repeats: int) -> SubsampledGaussianEvent:
    facts: dict[str, Any] = {"row_unit": "record", "relation": "add-remove", "noise": "operating-system"}
    return SubsampledGaussianEvent(l2_bound=1.0, rate=0.02, sigma=sigma, queries=1, step=0, repeats=repeats, **facts)


def laplace(scale: float) -> LaplaceEvent:
    facts: dict[str, Any] = {"row_unit": "teacher", "relation": "add-remove", "noise": "operating-system"}
    return LaplaceEvent(moved=2, scale=scale, queries=1, step=0, **facts)


PLAIN = [(gaussian(100.0), 1)]  # a plan of which little matters but that it is Gaussian


def opened(tmp_path: Path, epsilon: float, relation: Relation = "add-remove") -> DataBudget:
    return DataBudget.create(tmp_path / "b", Cap(epsilon=epsilon, delta=DELTA, relation=relation))


def reserve(data: DataBudget, epsilon: float, parts: Sequence[tuple[Charge, int]] = PLAIN, **more: Any) -> str:
    return data.reserve(parts, budget(epsilon, **more), data="faces", unit="one image")


# --- the price of several runs ---------------------------------------------------------------------


def mu_of(epsilon: float) -> float:
    return Accountant(name="exact").mu_budget(epsilon, DELTA)


def test_runs_compose_as_gaussian_mechanisms_at_one_delta(tmp_path: Path) -> None:
    with opened(tmp_path, 3.0) as data:
        for _ in range(3):
            reserve(data, 1.0)
        spent, accountant = data.spent()
    assert accountant == "exact"
    assert spent == pytest.approx(exact_epsilon(3 * mu_of(1.0) ** 2, DELTA), rel=1e-9)
    assert 1.5 < spent < 2.0  # and not 3: nor is it 1


def rule_of_sums(charges: Sequence[tuple[Charge, int]], delta: float) -> float:
    """A broken twin: ε's at the same δ, added."""
    return sum(times * price([(event, 1)], delta)[0] for event, times in charges)


def rule_that_forgets(charges: Sequence[tuple[Charge, int]], delta: float) -> float:
    """Another: the first run is forgotten."""
    return price(charges[1:], delta)[0]


def is_the_price(rule: Callable[[Sequence[tuple[Charge, int]], float], float]) -> bool:
    """Whether a rule prices two equal Gaussian runs as the one Gaussian they are together, and that from above."""
    one = most_charged(PLAIN, budget(1.0))
    truth = exact_epsilon(2 * mu_of(1.0) ** 2, DELTA)
    return truth * (1 - 1e-9) <= rule([*one, *one], DELTA) <= truth * (1 + 1e-6)


def test_the_price_is_right_and_its_twins_are_caught() -> None:
    assert is_the_price(lambda charges, delta: price(charges, delta)[0])
    assert not is_the_price(rule_of_sums)
    assert not is_the_price(rule_that_forgets)


def test_a_sum_of_epsilons_is_no_bound_at_the_same_delta() -> None:
    """Why the total has one δ: nearly pure losses add up, and their δ's too."""
    loud = [(gaussian(0.1), 1)]  # at δ = 1/2 each; of 20 together, nothing is left
    assert rule_of_sums(loud * 20, 0.999) < price(loud * 20, 0.999)[0]


def test_a_mix_is_priced_by_an_accountant_that_knows_all_of_it() -> None:
    mix = [(gaussian(5.0), 1), (sampled(1.0, 100), 1)]
    spent, accountant = price(mix, DELTA)
    assert accountant == "prv"
    assert spent == Accountant(name="prv").price(mix, DELTA) < Accountant(name="rdp-improved").price(mix, DELTA)
    more = [*mix, (laplace(20.0), 1)]  # which prv refuses
    assert price(more, DELTA) == (Accountant(name="rdp-improved").price(more, DELTA), "rdp-improved")
    assert spent > max(price([part], DELTA)[0] for part in mix)
    alone, by = price([(sampled(1.0, 100), 1)], DELTA)
    assert by == "prv" and alone < Accountant(name="rdp-improved").price([(sampled(1.0, 100), 1)], DELTA)
    coarse = [(discrete(5.0, 1.0), 1), (gaussian(5.0), 1)]  # which the exact accountant refuses
    assert price(coarse, DELTA) == (Accountant(name="rdp-improved").price(coarse, DELTA), "rdp-improved")
    assert price([], DELTA) == (0.0, "exact")


# --- what a run may charge at most -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact", "rdp", "rdp-improved", "pld"])
def test_what_is_reserved_is_as_loud_by_either_measure(name: AccountantName) -> None:
    """Beside sampled runs Gaussian noise is priced by rho: no smaller than what its ledger may add up to by mu."""
    ((event, _),) = most_charged(PLAIN, budget(1.0, name))
    assert isinstance(event, GaussianEvent)
    assert event.mu**2 / 2 == event.rho


def test_only_one_kind_of_noise_may_follow_what_was_seen() -> None:
    smooth, coarse = discrete(20.0, 1.0), discrete(3.0, 1.0)
    assert may_follow([(smooth, 1), (gaussian(3.0), 2)]) and may_follow([(coarse, 3)]) and may_follow([])
    assert not may_follow([(smooth, 1), (coarse, 1)]) and not may_follow([(smooth, 1), (laplace(3.0), 1)])


@pytest.mark.parametrize("name", ["exact", "rdp", "rdp-improved", "pld"])
def test_gaussian_runs_reserve_all_their_budget_holds(name: AccountantName) -> None:
    """Whatever releases are lost and charged again: the run's own ledger stops at that mu²."""
    ((event, times),) = most_charged(PLAIN, budget(1.0, name))
    assert times == 1
    assert event.mu == pytest.approx(Accountant(name=name).mu_budget(1.0, DELTA), rel=1e-9 if name != "pld" else 1e-3)


def test_a_loud_run_reserves_more_than_one_mu() -> None:
    ((event, _),) = most_charged(PLAIN, budget(20.0))
    assert event.mu == pytest.approx(mu_of(20.0), rel=1e-9) and event.mu > 2


def test_by_rdp_discrete_noise_is_reserved_as_the_gaussian_behind_it() -> None:
    tight = discrete(10.0, 1.0)
    own = budget(1.0, "rdp")
    ((event, _),) = most_charged([(tight, 1)], own)
    most = 1
    while own.pricing().price([(tight, most + 1)], DELTA) <= 1.0:
        most += 1
    assert event.mu**2 >= most * tight.mu**2
    assert event.mu**2 == pytest.approx(most * tight.mu**2, rel=0.1)
    assert most_charged([(discrete(1000.0, 1.0), 5), (tight, 1)], own) == ((event, 1),)  # the worst of them counts


@pytest.mark.parametrize("event", [laplace(20.0), discrete(5.0, 0.5), sampled(2.0, 1)], ids=lambda event: event.kind)
def test_other_runs_reserve_as_many_events_as_their_ledger_would_take(event: Charge) -> None:
    own = budget(2.0, "rdp-improved")
    ((same, times),) = most_charged([(event, 3)], own)
    assert same == event and times >= 3
    assert own.pricing().price([(event, times)], DELTA) <= 2.0 < own.pricing().price([(event, times + 1)], DELTA)


def test_a_plan_that_costs_its_budget_to_the_last_bit_is_reserved() -> None:
    """The ledger takes it, so no less may be reserved."""
    cost = Accountant(name="rdp-improved").price([(laplace(20.0), 3)], budget(1.0).delta)
    assert most_charged([(laplace(20.0), 3)], budget(cost, "rdp-improved")) == ((laplace(20.0), 3),)


def test_what_cannot_be_reserved() -> None:
    with pytest.raises(DatalensError, match="discrete noise below sigma 10 together with other releases"):
        most_charged([(discrete(5.0, 0.1), 1), (sampled(2.0, 1), 1)], budget(2.0, "rdp-improved"))
    with pytest.raises(BudgetExceeded, match="plan itself"):
        most_charged([(laplace(0.1), 1)], budget(0.1, "rdp-improved"))
    ((event, _),) = most_charged(PLAIN, budget(math.inf))
    assert math.isinf(event.mu)


# --- the cap ---------------------------------------------------------------------------------------


def test_one_run_may_have_all_of_it_and_nothing_follows(tmp_path: Path) -> None:
    with opened(tmp_path, 1.0) as data:
        reserve(data, 1.0)
        assert data.left() < 1e-3
        with pytest.raises(BudgetExceeded, match="nothing more fits"):
            reserve(data, 0.5)
        assert len(data.reservations) == 1


def test_what_the_refusal_says_fits_and_no_more(tmp_path: Path) -> None:
    with opened(tmp_path, 2.0) as data:
        reserve(data, 1.0)
        with pytest.raises(BudgetExceeded, match="--epsilon 2 does not fit") as error:
            reserve(data, 2.0)
        assert "ε = 1 (δ = 1e-05, add-remove, exact accountant) is reserved" in str(error.value)
        said = float(str(error.value).split("fits is --epsilon ")[1].split()[0])
        with pytest.raises(BudgetExceeded):
            reserve(data, said + 0.02)
        reserve(data, said)
        assert data.spent()[0] <= 2.0


def test_refusals_of_other_kinds_say_what_fits_too(tmp_path: Path) -> None:
    with opened(tmp_path, 1.0) as data:
        for event in (laplace(5.0), sampled(0.5, 5)):
            with pytest.raises(BudgetExceeded, match=r"fits is --epsilon [0-9.]+ \(at --delta 1e-05, rdp") as error:
                reserve(data, 50.0, [(event, 1)], accountant="rdp-improved")
            said = float(str(error.value).split("fits is --epsilon ")[1].split()[0])
            most = 1.0 if isinstance(event, LaplaceEvent) else 1.2  # rdp's own price, and its price of what prv takes
            assert 0.9 < said <= most
        with pytest.raises(BudgetExceeded, match="--epsilon inf does not fit beside it; the largest that fits"):
            reserve(data, math.inf)
        assert not data.reservations and data.names == ()


def test_a_plan_that_is_final_reserves_itself(tmp_path: Path) -> None:
    with opened(tmp_path, 3.0) as data:
        parts = [(sampled(2.0, 10), 1)]
        run = data.reserve(parts, budget(3.0, "prv"), data="faces", unit="one image", final=True)
        assert data.charges == tuple(parts)
        assert data.turn(run) and data.turn("another") is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"relation": "replace-one"}, "use --relation add-remove"),
        ({"parts": [(gaussian(9.0, noise="seeded"), 1)]}, "--noise-seed is not private"),
        ({"data": "cars"}, "is the budget of faces, not of cars"),
        ({"unit": "one person"}, "protects one image, this run one person: use the same --record-id"),
    ],
)
def test_runs_that_do_not_belong(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with opened(tmp_path, 3.0) as data:
        reserve(data, 1.0)
        asked = {"relation": "add-remove", "parts": PLAIN, "data": "faces", "unit": "one image"} | change
        with pytest.raises(DatalensError, match=why):
            data.reserve(
                asked["parts"], budget(1.0, relation=asked["relation"]), data=asked["data"], unit=asked["unit"]
            )
        assert len(data.reservations) == 1


def test_another_name_of_the_same_records_can_be_allowed(tmp_path: Path) -> None:
    cap = Cap(epsilon=3.0, delta=DELTA, relation="add-remove")
    with DataBudget.create(tmp_path / "b", cap, data="faces") as data:
        data.allow("faces.npz")
        data.allow("faces")
        data.reserve(PLAIN, budget(1.0), data="faces.npz", unit="one image")
    with DataBudget.open(tmp_path / "b") as data:
        assert data.names == ("faces", "faces.npz")


@pytest.mark.parametrize("cap", [(0.0, 0.1), (math.inf, 0.1), (1.0, 0.0), (1.0, 1.0), (math.nan, 0.1)])
def test_caps_that_are_none(cap: tuple[float, float]) -> None:
    with pytest.raises(DatalensError, match=r"--epsilon of a budget|--delta must lie"):
        Cap(epsilon=cap[0], delta=cap[1], relation="add-remove")
    with pytest.raises(DatalensError, match="--relation"):
        Cap(epsilon=1.0, delta=0.1, relation="other")  # type: ignore[arg-type]


# --- the file --------------------------------------------------------------------------------------


def test_it_is_read_back_and_set_once(tmp_path: Path) -> None:
    with opened(tmp_path, 3.0) as data:
        run = reserve(data, 1.0)
    with DataBudget.open(tmp_path / "b") as again:
        assert (again.cap, again.reservations, again.spent()) == (data.cap, data.reservations, data.spent())
        assert again.turn(run) == data.turn(run)
        reserve(again, 1.0)
        again.next_turn(run, "second")
        assert again.turn(run) == "second"
    with DataBudget.open(tmp_path / "b") as later:
        assert later.turn(run) == "second" and len(later.reservations) == 2
    assert (tmp_path / "b" / FILE).stat().st_mode & 0o777 == 0o600
    with pytest.raises(DatalensError, match="a cap is set once"):
        opened(tmp_path, 9.0)
    assert os.listdir(tmp_path / "b") == [FILE]
    with pytest.raises(DatalensError, match="datalens budget"):
        DataBudget.open(tmp_path / "nowhere")


def test_a_torn_line_was_never_acknowledged(tmp_path: Path) -> None:
    with opened(tmp_path, 3.0) as data:
        reserve(data, 1.0)
    path = tmp_path / "b" / FILE
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:50])
    with DataBudget.open(tmp_path / "b") as data:
        assert len(data.reservations) == 1
        reserve(data, 1.0)
    with DataBudget.open(tmp_path / "b") as data:
        assert len(data.reservations) == 2


def rewritten(lines: list[dict[str, Any]]) -> bytes:
    """Of somebody who hashes anew."""
    content, previous = b"", module._GENESIS
    for fields in lines:
        bare = {name: value for name, value in fields.items() if name not in ("hash", "previous")}
        line, previous = module._line(bare, previous)
        content += line
    return content


def test_damage_is_found(tmp_path: Path) -> None:
    with opened(tmp_path, 3.0) as data:
        reserve(data, 1.0)
    path = tmp_path / "b" / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    fields = [json.loads(line) for line in lines]
    cheaper = json.loads(lines[2])
    cheaper["charges"][0]["event"]["sigma"] *= 100
    none = json.loads(lines[2])
    none["charges"][0]["times"] = 0
    for content in (
        b"",
        lines[1],
        lines[0] + lines[2],  # a line left out
        lines[0] + lines[1] + lines[2].replace(b"faces", b"faced"),
        b"[]\n",
        lines[0] + lines[0],
        lines[0] + lines[1] + json.dumps(cheaper).encode() + b"\n",
        rewritten([fields[0], fields[1], none]),
        rewritten([*fields, {"type": "turn", "run": "another", "turn": "a"}]),
        rewritten([{**fields[0], "epsilon": "three"}]),
    ):
        path.write_bytes(content)
        with pytest.raises(TamperedError):
            DataBudget.open(tmp_path / "b")


def test_a_full_disk_begins_no_run(tmp_path: Path) -> None:
    with opened(tmp_path, 3.0) as data:
        reserve(data, 1.0)
        before = data.path.read_bytes()
        real, data._file = data._file, _Full(data._file)  # type: ignore[assignment]
        with pytest.raises(DatalensError, match="no run was begun"):
            reserve(data, 1.0)
        data._file = real
        assert len(data.reservations) == 1
        reserve(data, 1.0)
    assert before == data.path.read_bytes()[: len(before)]
    with DataBudget.open(tmp_path / "b") as again:
        assert len(again.reservations) == 2


class _Full:
    """Takes half a line."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, line: bytes) -> int:
        return self._file.write(line[: len(line) // 2])


def _one_run(folder: Path) -> None:
    with DataBudget.open(folder) as data:
        reserve(data, 1.0)


def test_two_runs_at_once_do_not_both_get_the_last_of_it(tmp_path: Path) -> None:
    opened(tmp_path, 1.2).close()
    spawn = multiprocessing.get_context("fork")
    both = [spawn.Process(target=_one_run, args=(tmp_path / "b",)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert sorted(process.exitcode == 0 for process in both) == [False, True]
    with DataBudget.open(tmp_path / "b") as data:
        assert len(data.reservations) == 1
