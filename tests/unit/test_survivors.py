"""Tests that mutation testing asked for: each kills a change to `privacy/` or `bounded/` that no other test noticed.

See tools/mutate.py and docs/mutation.md.
"""

import hashlib
import io
import itertools
import json
import math
import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded import contributions, topk_sign
from datalens.bounded.contributions import BoundedSum, Contributions, Gradients, sum_bounded
from datalens.bounded.outer import Outer, sum_outer
from datalens.bounded.topk_sign import TopKSign
from datalens.errors import BudgetExceeded, DatalensError, TamperedError, UnpriceableEvent
from datalens.privacy import accountant, audit, calibration, curves, exact, ledger, noise, tables
from datalens.privacy.accountant import Accountant
from datalens.privacy.bounds import (
    ORDERS,
    Analysis,
    Combined,
    analyse,
    combined_epsilon,
    data_dependent_rdp,
    log_disagreement,
    log_outcomes,
    theorem4,
    topagg_rdp,
)
from datalens.privacy.events import DiscreteGaussianEvent, GaussianEvent, SubsampledGaussianEvent
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.privacy.mechanisms import DiscreteGaussianSum, GaussianSum
from datalens.privacy.noise import DrawnAhead, ExactNoise
from datalens.privacy.released import Released
from datalens.public.streams import row_keys

SECRET = 7654.25
BUDGET = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")


def test_private_numbers_are_in_no_message() -> None:
    """A traceback or a log shows what `repr` gives."""
    tensor = torch.full((1, 1, 2), SECRET)
    units = torch.tensor([7654])
    facts: dict[str, Any] = {"l2_bound": 1.0, "diameter": 2.0, "row_unit": "teacher"}
    total = BoundedSum(private_total=tensor[0], units=units, queries=1, **facts)
    for thing in (
        Gradients(teachers=torch.tensor([3]), values=tensor, step=0),
        Contributions(rows=tensor, units=units, **facts),
        Outer(slots=units, left=tensor[0], right=tensor[0]),
        total,
    ):
        assert "7654" not in repr(thing)
    assert total.cells == 2  # how many there are may be said


# --- the way through the kernels, in Triton's interpreter -------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a GPU, kernels are taken for votes and for float32. The names of those that were called."""
    pytest.importorskip("triton")
    from datalens.bounded import kernels as module

    called: list[str] = []
    for name in ("sum_votes", "top_k_sign"):
        original = getattr(module, name)

        def spy(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    for module_ in (contributions, topk_sign):
        monkeypatch.setattr(module_, "kernels_for", lambda x: x.dtype in (torch.int8, torch.float32))
    return called


def rows_of(kind: torch.dtype) -> Contributions:
    rows = torch.randint(-1, 2, (5, 2, 6), generator=torch.Generator().manual_seed(0)).to(kind)
    rows[2] = 9  # far past the bound
    return Contributions(rows=rows, l2_bound=math.sqrt(12), diameter=2 * math.sqrt(12), row_unit="teacher")


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.float32, torch.float64])
def test_sums_are_the_same_through_the_kernels(kind: torch.dtype, kernels: list[str]) -> None:
    one = rows_of(kind)
    total = sum_bounded([one]).private_total
    assert kernels == (["sum_votes"] if kind == torch.int8 else [])
    expected = contributions.enforce(one.rows, one.l2_bound).sum(dim=0)
    assert torch.equal(total.to(torch.float64), expected.to(torch.float64))
    assert not total.equal(one.rows.sum(dim=0))


@pytest.mark.parametrize("quantise", [True, False])
def test_votes_are_the_same_through_the_kernels(
    quantise: bool, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(1))
    gradients = Gradients(teachers=torch.tensor([4, 0, 9]), values=values, step=5)
    compress = TopKSign(k=7, clip=2.0, quantise=quantise, seed=3)
    through = compress(gradients)
    assert kernels == (["top_k_sign"] if quantise else [])
    monkeypatch.setattr(topk_sign, "kernels_for", lambda x: False)
    plain = compress(gradients)
    assert torch.equal(through.rows, plain.rows)
    assert quantise == bool((plain.rows * values < 0).any())  # some votes were decided by chance
    assert (through.l2_bound, through.diameter) == (plain.l2_bound, plain.diameter)


def test_kernels_stay_within_what_they_were_given() -> None:
    """Around every tensor lies something that must not be read, or not be written."""
    pytest.importorskip("triton")
    from datalens.bounded import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    n, m, d = 2, 3, 5
    values = torch.full((n * m * d + 8,), 1e9, device=device)
    values[: n * m * d] = torch.randn(n * m * d, generator=torch.Generator().manual_seed(0))
    votes = torch.full((n * m * d + 8,), 77, dtype=torch.int8, device=device)
    keys, again = row_keys(4, "sign", 9, teachers=torch.arange(n, device=device))
    kernels._top_k_sign[(n * m,)](values, keys, again, votes, 1.0, m, d, 2, 8, num_warps=1)
    given = values[: n * m * d].view(n, m, d)
    assert torch.equal(votes[: n * m * d].view(n, m, d), kernels.top_k_sign(given, keys, again, k=2, clip=1.0))
    assert bool((votes[: n * m * d].view(-1, d) != 0).sum(dim=1).eq(2).all())
    assert bool((votes[n * m * d :] == 77).all())

    rows = torch.full((n * m + 1, d), 100, dtype=torch.int8, device=device)
    rows[: n * m] = torch.arange(n * m * d, device=device).view(n * m, d)
    for wide in (8, 4):  # at once, and in two parts
        squares = torch.full((n * m + 2,), -7, device=device)
        kernels._squares[(n * m,)](rows, squares, d, wide, num_warps=1)
        assert squares.tolist() == [*rows[: n * m].to(torch.int64).square().sum(dim=1).tolist(), -7, -7]
    fits = torch.ones(n * m + 1, dtype=torch.int8, device=device)
    for grid, part, tall, wide in ((1, 16, 8, 8), (4, 4, 2, 4)):  # by one program, and by two times two
        total = torch.full((d + 3,), -9, dtype=torch.int32, device=device)
        total[:d] = 0
        kernels._add[(grid,)](rows, fits, total, n * m, d, part, tall, wide, num_warps=1)
        assert total.tolist() == [*rows[: n * m].to(torch.int32).sum(dim=0).tolist(), -9, -9, -9]


def test_a_search_may_end_at_the_kth_largest_itself() -> None:
    """Halved once, between the smallest number and 2: 0x20000001."""
    pytest.importorskip("triton")
    from datalens.bounded import kernels

    bits = torch.tensor([0x10000000, 0x40000000, 0, 0x20000001, 7], dtype=torch.int32)
    values = bits.view(torch.float32).view(1, 1, 5).to("cuda" if torch.cuda.is_available() else "cpu")
    keys, again = row_keys(4, "sign", 9, teachers=torch.arange(1, device=values.device))
    votes = kernels.top_k_sign(values, keys, again, k=2, clip=9.0)
    assert (votes != 0).flatten().tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("quantise", [True, False])
def test_where_all_gradients_are_infinite_nobody_votes(quantise: bool) -> None:
    values = torch.full((2, 3, 8), math.inf)
    votes = TopKSign(k=2, clip=1.0, quantise=quantise, seed=0)(
        Gradients(teachers=torch.arange(2), values=values, step=0)
    )
    assert not votes.rows.any()


# --- sums of outer products -------------------------------------------------------------------


@pytest.mark.parametrize("slots", [[-1, 0], [0, -1], [0, 3], [3, 0], [-1, 3], [1, -1, 2]])
def test_one_row_out_of_range_among_others_is_an_error(slots: list[int]) -> None:
    """A slot of -1 would be the last class's: two rows there, and one of them nobody's."""
    ones = torch.ones(len(slots), 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="none of the 3 slots"):
        sum_outer([Outer(slots=torch.tensor(slots), left=ones, right=ones)], slots=3, left_bound=1, right_bound=1)


# --- events -----------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {
    **{"row_unit": "record", "l2_bound": 3.0, "rate": 0.5, "relation": "add-remove", "sigma": 2.0},
    **{"queries": 1, "step": 0, "noise": "operating-system"},
}


@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize(("rate", "mu"), [(0.0, 0.0), (0.01, 1.5), (0.5, 1.5), (1.0, 1.5)])
def test_a_sampled_unit_costs_its_whole_row(unit: str, rate: float, mu: float) -> None:
    """What sampling saves is for the accountant to say; and it holds for a unit's own row alone."""
    assert SubsampledGaussianEvent(**SAMPLED | {"row_unit": unit, "rate": rate}).mu == mu


@pytest.mark.parametrize("change", [{"row_unit": "teacher"}, {"relation": "replace-one"}, {"rate": 1.01}], ids=str)
def test_what_sampling_does_not_cover(change: dict[str, Any]) -> None:
    with pytest.raises(TamperedError):
        SubsampledGaussianEvent(**SAMPLED | change)


DISCRETE: dict[str, Any] = {
    **{"row_unit": "teacher", "l2_bound": 0.25, "diameter": 0.5, "relation": "add-remove", "sigma": 20.0},
    **{"queries": 1, "step": 0, "noise": "operating-system", "coordinates": 1},
}


@pytest.mark.parametrize(
    "change",
    [{"diameter": 0.1}, {"diameter": 0.6}, {"sigma": -20.0}, {"sigma": math.nan}, {"l2_bound": "1"}, {"queries": -1}],
    ids=str,
)
def test_a_discrete_event_is_checked_as_any_other(change: dict[str, Any]) -> None:
    DiscreteGaussianEvent(**DISCRETE)
    with pytest.raises(TamperedError):
        DiscreteGaussianEvent(**DISCRETE | change)


def test_coarse_noise_costs_everything_however_small_the_sensitivity() -> None:
    assert DiscreteGaussianEvent(**DISCRETE | {"sigma": 9.99}).mu == math.inf


# --- noise ------------------------------------------------------------------------------------


def test_the_tail_ends_where_it_is_said_to_end() -> None:
    """The smallest uniform is 2^-64: √(2·64·log 2) = 9.42 standard deviations. The largest is 1: none."""
    assert noise._box_muller(bytes(16), 2) == pytest.approx([math.sqrt(128 * math.log(2)), 0.0], abs=1e-9)
    quarter = bytes(8) + (2**62).to_bytes(8, sys.byteorder)
    assert noise._box_muller(quarter, 2) == pytest.approx([0.0, math.sqrt(128 * math.log(2))], abs=1e-9)
    assert noise._box_muller(b"\xff" * 16, 2) == pytest.approx([0.0, 0.0], abs=1e-9)


def test_where_noise_says_it_comes_from() -> None:
    with DrawnAhead(100.0) as ahead:
        secure = (noise.SecureNoise(), ExactNoise(100.0), ahead)
        assert {source.origin for source in secure} == {"operating-system"}
    assert noise.SeededNoise(0).origin == "seeded"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], DrawnAhead]:
    """`DrawnAhead` with another program at the other end of its pipe."""

    def start(program: str) -> DrawnAhead:
        path = tmp_path / "program.py"
        path.write_text(f"import os, sys, time\n{program}\n")
        monkeypatch.setattr(noise.exact, "__file__", str(path))
        return DrawnAhead(100.0)

    return start


COUNTING = "os.write(1, b''.join(i.to_bytes(8, sys.byteorder) for i in range(100)))\n"


def test_not_a_byte_more_is_read_than_was_asked_for(
    script: Callable[[str], DrawnAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the bytes come: draws are whole, in order, and what was not asked for stays in the pipe."""
    read = os.read
    with script(COUNTING + "time.sleep(60)") as source:
        monkeypatch.setattr(noise.os, "read", lambda pipe, most: read(pipe, min(most, 5)))
        assert source.integers(7).tolist() == list(range(7))
        monkeypatch.setattr(noise.os, "read", read)
        assert source.integers(3).tolist() == [7, 8, 9]
        process = source._process
    assert process.returncode is not None  # ended, and waited for


def test_draws_that_were_made_before_the_process_ended_are_used(script: Callable[[str], DrawnAhead]) -> None:
    with script(COUNTING) as source:
        source._process.wait()
        source.check()
        assert source.integers(100).tolist() == list(range(100))
        with pytest.raises(DatalensError, match=r"exit code 0\)"):
            source.check()


def test_the_last_line_says_why_there_is_no_noise(script: Callable[[str], DrawnAhead]) -> None:
    program = "os.write(2, b'one\\ntwo\\nthe \\xff third\\n\\n')"
    with script(program) as source, pytest.raises(DatalensError, match="\\(the \ufffd third\\)"):
        source.check()


def test_what_is_wrong_with_opendp_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.measurements", None)
    with pytest.raises(DatalensError, match=r"\((ModuleNotFound|Import)Error: .*opendp"):
        ExactNoise(5.0)


def test_every_draw_goes_into_the_pipe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, none left out and none twice: noise that is used twice hides nothing. A full pipe is waited for."""
    out, into = os.pipe()
    made = itertools.count()
    pieces = iter(range(7 * 2048 * 8 // exact.PIECE))
    write = os.write

    def watched(descriptor: int, content: bytes) -> int:
        if next(pieces, None) is None:
            raise BrokenPipeError  # nobody reads any more
        assert len(content) == exact.PIECE
        return write(descriptor, content)

    monkeypatch.setattr(exact.os, "write", watched)
    found = bytearray()

    def read() -> None:
        time.sleep(0.1)
        while piece := os.read(out, 8192):
            found.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    exact.feed(into, lambda count: [next(made) for _ in range(count)], parent=os.getppid(), patience_ms=5)
    os.close(into)
    reader.join()
    os.close(out)
    assert np.frombuffer(bytes(found), dtype=np.int64).tolist() == list(range(7 * 2048))


# --- the gate ---------------------------------------------------------------------------------


def test_noise_from_nearly_none_to_the_most_that_a_machine_adds_faithfully() -> None:
    most = 2.0**40
    widths = SimpleNamespace(check=None, integers=None, origin="seeded")
    for sigma in (1e-3, 1.0, most):
        GaussianSum(sigma=sigma, noise=noise.SecureNoise())
        widths.sigma = sigma
        DiscreteGaussianSum(noise=widths)
        goal: dict[str, Any] = {"sensitivity": sigma, "epsilon": 5.0, "delta": 1e-5, "accountant": EXACT}
        assert calibration.calibrate_steps(sigma=sigma, **goal) == 1
    goal = {"epsilon": 5.0, "delta": 1e-5, "accountant": EXACT, "steps": 1}
    width = calibration.calibrate_sigma(sensitivity=1.0, **goal)
    assert calibration.calibrate_sigma(sensitivity=0.99 * most / width, **goal) == pytest.approx(0.99 * most)
    with pytest.raises(BudgetExceeded):
        calibration.calibrate_sigma(sensitivity=1.01 * most / width, **goal)
    widths.sigma = math.nextafter(most, math.inf)
    with pytest.raises(DatalensError):
        GaussianSum(sigma=widths.sigma, noise=noise.SecureNoise())
    with pytest.raises(DatalensError):
        DiscreteGaussianSum(noise=widths)
    with pytest.raises(DatalensError):
        calibration.calibrate_steps(sensitivity=most, sigma=widths.sigma, epsilon=5.0, delta=1e-5, accountant=EXACT)


# --- the accountants --------------------------------------------------------------------------

EXACT, RDP, IMPROVED, PLD = (Accountant(name=name) for name in accountant.ACCOUNTANTS[:4])


def gaussian(mu: float) -> GaussianEvent:
    return calibration.topagg_event(sensitivity=mu, sigma=1.0, law="gaussian")


def sampled(mu: float, rate: float) -> SubsampledGaussianEvent:
    return SubsampledGaussianEvent(**SAMPLED | {"l2_bound": mu, "sigma": 1.0, "rate": rate})


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("sigma", [1e-154, 1e-155, 1e-200, 0.0])
@pytest.mark.parametrize("rate", [1e-25, 0.5, 1.0])
def test_next_to_no_noise_is_not_cheap_for_being_sampled(sigma: float, rate: float) -> None:
    """0 times infinity is no number, and no number was once taken for a price of 0."""
    event = SubsampledGaussianEvent(**SAMPLED | {"l2_bound": 1.0, "sigma": sigma, "rate": rate})
    for pricing in (RDP, IMPROVED, PLD):
        assert pricing.price([(event, 1)], 1e-30) > 1e300


def test_one_is_a_number_like_any_other() -> None:
    """A mu of exactly 1, and of exactly 0."""
    assert curves.gaussian_delta(1.0, 0.0) == pytest.approx(math.erf(1 / math.sqrt(8)))
    for curve in (
        *(curves.exact_epsilon, curves.rdp_epsilon, curves.moments_epsilon),
        *(curves.improved_epsilon, curves.zcdp_epsilon),
        lambda mu_squared, delta: curves.subsampled_rdp(math.sqrt(mu_squared), 0.5, 2.0),
    ):
        assert curve(0.0, 1e-5) == 0.0
        assert 0 < curve(0.98, 1e-5) < curve(1.0, 1e-5) < curve(1.02, 1e-5)


@pytest.mark.parametrize("mu_squared", [1e-9, 1e-4, 0.01, 0.3, 1.0, 9.0, 400.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
def test_moments_of_plain_noise_are_those_of_2016(mu_squared: float, delta: float) -> None:
    """Abadi et al., Theorem 2: α(λ) = λ(λ + 1)·mu²/2 for λ = 1 … 32, and δ = min over λ of exp(α(λ) − λε)."""
    found = curves.moments_epsilon(mu_squared, delta)
    tails = [lam * (lam + 1) * mu_squared / 2 - lam * found for lam in range(1, 33)]
    assert min(tails) == pytest.approx(math.log(delta), rel=1e-9)
    assert found >= curves.exact_epsilon(mu_squared, delta)  # a bound, never below the truth
    assert curves.moments_epsilon(0.0, delta) == 0.0


def test_sampled_units_have_orders_for_a_small_epsilon() -> None:
    """Up to 2262, each at most a fourth root of 2 above the one before: see what the module says."""
    more = curves.SAMPLED_ORDERS[len(curves.PAPER_ORDERS) :]
    assert curves.SAMPLED_ORDERS[: len(curves.PAPER_ORDERS)] == curves.PAPER_ORDERS
    assert (more[0], more[-1], len(more)) == (200.0, 2262.0, 15)
    assert all(1 < b / a < 1.2 for a, b in itertools.pairwise(more))


def test_a_mu_below_which_rounding_begins_is_taken_for_it() -> None:
    def many(mu: float, epsilon: float) -> float:
        return float(curves._gaussian_deltas(mu, np.array([epsilon]))[0])

    for delta in (curves.gaussian_delta, many):
        assert delta(1e-30, 0.0) == delta(1e-12, 0.0) == delta(1e-10, 0.0) < delta(1.4e-10, 0.0)
    assert many(1.0, math.inf) == 0.0


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 7.0])
def test_the_reported_epsilon_keeps_delta_to_the_last_bit(mu: float) -> None:
    """Of two neighbouring numbers the upper one; and by every accountant a budget's mu is the lower one."""
    for delta in (1e-12, 1e-5, 1e-2):
        assert curves.gaussian_delta(mu, curves.exact_epsilon(mu * mu, delta)) <= delta
    for pricing in (EXACT, RDP, IMPROVED):
        mu = pricing.mu_budget(1.7, 1e-5)
        assert pricing.epsilon_at(mu * mu, 1e-5) <= 1.7 < pricing.epsilon_at((mu * (1 + 1e-13)) ** 2, 1e-5)


def test_a_search_ends_at_two_neighbours() -> None:
    assert curves.bisect(lambda x: True) == (0.0, 0.0)
    for place in (1e-9, 0.3, 1.0, 3.0, 1e12):
        assert curves.bisect(lambda x, place=place: x >= place) == (math.nextafter(place, 0.0), place)  # type: ignore[misc]


def test_sampled_and_plain_noise_add_up_order_by_order() -> None:
    counted: list[tuple[Any, int]] = [(gaussian(0.3), 3), (sampled(0.5, 0.1), 4), (sampled(2.0, 0.02), 1)]
    curve = {
        order: order * 3 * 0.3**2 / 2
        + 4 * curves.subsampled_rdp(0.5, 0.1, float(order))
        + curves.subsampled_rdp(2.0, 0.02, float(order))
        for order in range(2, 200)
    }
    printed = min(cost + math.log(1e5) / (order - 1) for order, cost in curve.items())
    assert RDP.price(counted, 1e-5) == pytest.approx(printed, rel=1e-12)
    improved = min(
        cost + math.log1p(-1 / order) + (math.log(1e5) - math.log(order)) / (order - 1) for order, cost in curve.items()
    )
    assert IMPROVED.price(counted, 1e-5) == pytest.approx(improved, rel=1e-12)
    for pricing in (RDP, IMPROVED):  # who is never sampled makes nobody else cheaper
        assert pricing.price([*counted, (sampled(1.0, 0.0), 1)], 1e-5) == pricing.price(counted, 1e-5)
        assert pricing.price([(sampled(1.0, 0.0), 1), counted[0]], 1e-5) == pricing.price(counted[:1], 1e-5)


def test_the_slack_of_every_release_counts(losses: "Losses") -> None:
    """(ε, δ) becomes (ε + 2·slack, e^slack·δ)."""
    discrete = calibration.topagg_event(sensitivity=2.0, sigma=20.0, law="discrete-gaussian", coordinates=10**33)
    assert discrete.slack == pytest.approx(0.2)
    counted = [(discrete, 2), (gaussian(0.1), 3)]
    mu_squared = 2 * 4 / 396 + 3 * 0.01
    expected = curves.exact_epsilon(mu_squared, 1e-5 * math.exp(-0.4)) + 0.8
    assert EXACT.price(counted, 1e-5) == pytest.approx(expected, rel=1e-12)
    assert PLD.price(counted, 1e-5) == pytest.approx(losses.answer + 0.8, rel=1e-12)
    assert losses.delta == pytest.approx(1e-5 * math.exp(-0.4), rel=1e-12)


# --- what dp-accounting is asked --------------------------------------------------------------

Parts = dict[tuple[float, float], int]


class Losses:
    """In place of dp-accounting's distributions: how often which Gaussian (mu, rate) is in it."""

    answer = 0.25
    asked: Parts
    delta: float
    cells: set[float]

    def __init__(self) -> None:
        self.cells = set()

    def one(
        self, sigma: float, *, sensitivity: float, sampling_prob: float, value_discretization_interval: float
    ) -> Any:
        self.cells.add(value_discretization_interval)
        return self.made({(round(sensitivity / sigma, 9), sampling_prob): 1})

    def made(self, parts: Parts) -> Any:
        def composed(other: Any) -> Any:
            return self.made(dict(Counter(parts) + Counter(other.parts)))

        def epsilon(delta: float) -> float:
            self.asked, self.delta = parts, delta
            return self.answer

        return SimpleNamespace(
            parts=parts,
            self_compose=lambda count: self.made({part: n * count for part, n in parts.items()}),
            compose=composed,
            get_epsilon_for_delta=epsilon,
        )

    def of(self, *counted: tuple[Any, int]) -> Parts:
        tables.pld_composed.cache_clear()
        self.asked = {}
        assert PLD.price(counted, 1e-5) == self.answer
        return self.asked


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    from dp_accounting.pld import privacy_loss_distribution

    made = Losses()
    monkeypatch.setattr(privacy_loss_distribution, "from_gaussian_mechanism", made.one)
    tables.pld_composed.cache_clear()
    yield made
    tables.pld_composed.cache_clear()


def test_pld_composes_every_event_as_often_as_it_happened(losses: Losses) -> None:
    counted = [(gaussian(0.5), 1), (gaussian(0.25), 2), (sampled(2.0, 0.1), 3), (sampled(2.0, 0.0), 5)]
    assert losses.of(*counted) == {(0.5, 1.0): 1, (0.25, 1.0): 2, (2.0, 0.1): 3}
    assert losses.of((gaussian(0.5), 1), (gaussian(0.5), 1), (gaussian(0.0), 1)) == {(0.5, 1.0): 2}
    assert tables.pld_epsilon(0.49, 1e-5) == losses.answer
    assert losses.asked == {(0.7, 1.0): 1}
    # A crowd of equal Gaussians is one; a crowd of sampled ones is not.
    assert losses.of((gaussian(0.01), 10_000)) == {(0.01, 1.0): 10_000}
    assert losses.of((gaussian(0.01), 10_001)) == {(round(0.01 * math.sqrt(10_001), 9), 1.0): 1}
    assert losses.of((sampled(0.1, 0.01), 10_001)) == {(0.1, 0.01): 10_001}


def test_pld_makes_one_of_many_gaussians_and_leaves_sampled_ones_alone(losses: Losses) -> None:
    def plain(count: int) -> list[tuple[Any, int]]:
        return [(gaussian(0.001 * (1 + i)), 2) for i in range(count)]

    def various(count: int) -> list[tuple[Any, int]]:
        return [(sampled(0.001 * (1 + i), 0.5), 3) for i in range(count)]

    assert len(losses.of(*plain(200))) == len(losses.of(*various(200))) == 200
    for count, others in ((201, 0), (150, 60), (2, 199)):
        whole = round(math.sqrt(sum(2 * (0.001 * (1 + i)) ** 2 for i in range(count))), 9)
        expected = {(whole, 1.0): 1} | {(round(0.001 * (1 + i), 9), 0.5): 3 for i in range(others)}
        assert losses.of(*plain(count), *various(others)) == expected
    for too_many in (various(201), plain(1) + various(200)):
        with pytest.raises(UnpriceableEvent):
            losses.of(*too_many)


def test_where_pld_says_that_nothing_is_left_to_protect(losses: Losses) -> None:
    for quiet in ((gaussian(30.0), 1), (gaussian(14.0), 4), (sampled(1e4, 1e-25), 1)):
        assert losses.of(quiet)
    for loud in ((gaussian(30.1), 1), (gaussian(16.0), 4), (sampled(1.01e4, 1e-25), 1), (sampled(45.0, 0.5), 1)):
        assert PLD.price([loud], 1e-5) == PLD.price([(gaussian(1e-3), 1), loud], 1e-5) == math.inf
    losses.answer = -0.5
    assert PLD.price([(gaussian(0.123), 1)], 1e-5) == 0.0
    assert tables._loudness(0.5, 1.0) == 0.25
    assert tables._loudness(0.5, 0.1) == pytest.approx(0.01 * math.expm1(0.25))
    assert tables._loudness(20.0, 0.5) == 200.0
    assert tables._loudness(20.0, 1e-25) == pytest.approx(1e-25 * 400)
    assert tables._loudness(20.0, 1e-60) == pytest.approx(1e-120 * math.expm1(100.0))


def test_how_finely_pld_looks(losses: Losses) -> None:
    losses.of((gaussian(1.2), 1), (gaussian(0.8), 4))
    assert list(losses.cells) == pytest.approx([2.0 / 2000])
    losses.cells.clear()
    losses.of((gaussian(1e-3), 1), (sampled(100.0, 1e-25), 1))
    assert list(losses.cells) == pytest.approx([(5000 + 1000) / 1e6])


def test_the_budget_of_pld_is_kept_by_pld() -> None:
    mu = PLD.mu_budget(1.0, 1e-5)
    assert PLD.epsilon_at(mu * mu, 1e-5) <= 1.0
    assert 0.999 < mu / EXACT.mu_budget(1.0, 1e-5) <= 1
    assert PLD.mu_budget(math.inf, 1e-5) == math.inf


# --- audits -----------------------------------------------------------------------------------


def test_an_audit_counts_every_trial_once() -> None:
    plan = audit.Plan(epsilon=1.0, delta=1e-5, trials=600, releases=2)
    ticks: list[int] = []
    subject = audit.honest(plan, lambda sigma: GaussianSum(sigma=sigma, noise=noise.SeededNoise(1)))
    found = audit.audit(subject, plan, ticks.append)
    assert ticks == [250, 250, 100] * 2
    assert (found.name, found.trials) == ("as it is", 1200)
    assert found.claimed == pytest.approx(1.0) and 0 <= found.verdict_bound < found.lower_bound < 1.0


@pytest.mark.parametrize(("name", "least"), [("trials", 100), ("releases", 1), ("k", 1), ("images", 4)])
def test_the_smallest_audit(name: str, least: int) -> None:
    goal: dict[str, Any] = {"epsilon": 1e-3, "delta": 1e-5}
    audit.Plan(**goal | {name: least})
    with pytest.raises(DatalensError, match=f"--{name} must be at least {least} "):
        audit.Plan(**goal | {name: least - 1})


@pytest.mark.parametrize(("canaries", "guesses", "right"), [(9, 9, 10), (9, 8, 9), (8, 9, 9), (9, 9, -1)])
def test_counts_that_cannot_be(canaries: int, guesses: int, right: int) -> None:
    count = {"canaries": canaries, "guesses": guesses, "right": right}
    with pytest.raises(ValueError, match="is impossible"):
        audit.one_run_epsilon(**count, delta=0.0, level=0.05)
    assert audit.one_run_epsilon(canaries=9, guesses=9, right=0, delta=0.0, level=0.05) == 0.0


def test_a_p_value_is_no_more_than_1_and_levels_are_what_the_docs_state() -> None:
    assert audit.one_run_p_value(canaries=100, guesses=10, right=5, epsilon=0.0, delta=0.5) == 1.0
    assert (audit.REPORT_LEVEL, audit.VERDICT_LEVEL) == (0.05, 1e-4)


def test_guesses_may_rule_out_less_than_1() -> None:
    facts: dict[str, Any] = {"canaries": 1000, "guesses": 1000, "right": 560, "delta": 0.0}
    found = audit.one_run_epsilon(**facts, level=0.05)
    assert 0.1 < found < 0.3
    assert audit.one_run_p_value(**facts, epsilon=found) == pytest.approx(0.05, abs=1e-9)


def test_peeking_shows_the_first_image() -> None:
    votes = BoundedSum(
        private_total=torch.tensor([[3, 4], [5, 6]]), l2_bound=2.0, diameter=4.0, row_unit="teacher", queries=2
    )
    books = Ledger.in_memory(Budget(epsilon=math.inf, delta=1e-5, relation="add-remove", accountant="exact"))
    peeking = audit.Peeking(mechanism=GaussianSum(sigma=1000.0, noise=noise.SecureNoise()))
    assert peeking.release(votes, books, step=0).value[0].tolist() == [3, 4]


# --- the data-dependent analysis ----------------------------------------------------------------


def bound4(log_q: float, *, mu2: float, c: float, order: float = 3.0, mu1: float = 7.0) -> float:
    return float(theorem4(np.array(order), log_q, mu1=np.array(mu1), mu2=np.array(mu2), rdp_per_order=c))


def test_where_a_would_be_infinite_there_is_no_bound() -> None:
    """q̃·e^ε2 = 1, the condition that is not printed; every other condition holds."""
    assert math.isnan(bound4(-2.0, mu2=4.0, c=0.5))
    assert math.isnan(bound4(-1.5, mu2=4.0, c=0.5))
    assert bound4(math.nextafter(-2.0, -3.0), mu2=4.0, c=0.5) > 0


def test_the_largest_q_that_theorem_4_allows() -> None:
    mu1, mu2, c = 7.0, 5.0, 0.02
    most = (mu2 - 1) * (mu2 * c) - mu2 * float(np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1)))
    assert bound4(most, mu2=mu2, c=c) > 0
    assert math.isnan(bound4(math.nextafter(most, 0.0), mu2=mu2, c=c))


@pytest.mark.parametrize("mu2", [1.25, 1.5, 2.0])
def test_theorem_4_with_the_second_order_near_1(mu2: float) -> None:
    q, order, mu1, c = 1e-5, 3.0, 7.0, 0.02
    a = (1 - q) / (1 - (q * math.exp(mu2 * c)) ** ((mu2 - 1) / mu2))
    b = math.exp(mu1 * c) / q ** (1 / (mu1 - 1))
    expected = math.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)
    assert bound4(math.log(q), mu2=mu2, c=c) == pytest.approx(expected, rel=1e-9)


def test_a_disagreement_below_the_smallest_number_is_not_taken_for_none() -> None:
    """Where log Pr[M = ḡ*] comes out as 0, q may be as large as the smallest number there is, e^-744."""
    smallest = math.log(math.ulp(0.0))
    assert smallest < -740
    assert (log_disagreement(np.array([0.0, -math.ulp(0.0)])) > smallest + 50).all()


@pytest.mark.parametrize("log_q", [0.5, 1.0, 3.0, math.inf])
def test_what_is_no_probability_has_no_bound(log_q: float) -> None:
    assert np.isnan(data_dependent_rdp(log_q, rdp_per_order=1e-3)).all()


def test_with_little_room_for_the_second_order_theorem_4_is_still_found() -> None:
    """It must lie between 1 and log(1/q̃)/c = 1.5."""
    found = data_dependent_rdp(-15.0, rdp_per_order=10.0, orders=np.array([1.5, 2.0]))
    searched = [bound4(-15.0, mu2=mu2, c=10.0, order=2.0, mu1=mu1) for mu2 in (1.2, 1.3, 1.4) for mu1 in (2.0, 2.2)]
    assert np.isfinite(found).all()
    assert float(found[1]) <= np.nanmin(searched) * (1 + 1e-9)


def test_hardly_any_room_between_the_thresholds_is_none() -> None:
    """log Φ is not monotone to the last bit: the larger of two neighbours may come out as the smaller."""
    votes = np.random.default_rng(0).uniform(0.8, 1.0, 100_000)
    found = log_outcomes(votes, threshold=1e-16, sigma=1.0)
    assert not np.isnan(found).any()
    assert (found[:, 1] < -30).all()


def test_what_an_analysis_says_it_may_be_used_for_cannot_be_left_out() -> None:
    none = np.zeros(0)
    facts: dict[str, Any] = {
        "epsilon": 1.0,
        "order": 2.0,
        "used_dependent": 0,
        "used_independent": 0,
        "inapplicable": 0,
    }
    with pytest.raises(TypeError, match="warning"):
        Analysis(warning="", log_agree=none, dependent=none, independent=none)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="warning"):
        Combined(warning="", **facts)  # type: ignore[call-arg]


def test_an_analysis_has_the_price_of_theorem_3_beside_it() -> None:
    votes = BoundedSum(
        private_total=torch.tensor([[9, 0]]), l2_bound=1.0, diameter=2.0, row_unit="teacher", queries=1, units=None
    )
    found = analyse(votes, k=3, threshold=4.0, sigma=5.0)
    np.testing.assert_allclose(found.independent, topagg_rdp(ORDERS, k=3, sigma=5.0), rtol=1e-12)


def test_queries_are_counted_at_the_order_that_gave_epsilon() -> None:
    """Theorem 4 applies to the second query at that order alone, and is no smaller for the third."""
    independent = ORDERS * 0.01
    nowhere = np.full(ORDERS.shape, np.nan)
    best = combined_epsilon(np.stack([ORDERS * 0.001, nowhere, independent]), independent, delta=1e-5)
    assert (best.used_dependent, best.used_independent, best.inapplicable) == (1, 2, 1)
    assert best.order != ORDERS[0]
    there = np.where(best.order == ORDERS, independent / 2, np.nan)
    found = combined_epsilon(np.stack([ORDERS * 0.001, there, independent]), independent, delta=1e-5)
    assert found.order == best.order
    assert (found.used_dependent, found.used_independent, found.inapplicable) == (2, 1, 0)


# --- the ledger -------------------------------------------------------------------------------


def test_a_line_that_is_no_json_is_refused_however_well_it_is_chained(tmp_path: Path) -> None:
    """Python reads and writes NaN, other readers of JSON do not: nobody must see another ledger than we do."""
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, BUDGET).close()
    body = json.loads(path.read_text())
    for value in (0.5, math.nan, math.inf):
        line = {name: item for name, item in body.items() if name != "hash"} | {"delta": value}
        text = json.dumps(line, sort_keys=True, separators=(",", ":"))
        signed = line | {"hash": hashlib.sha256(text.encode()).hexdigest()}
        path.write_text(json.dumps(signed, sort_keys=True, separators=(",", ":")) + "\n")
        if math.isfinite(value):
            read_ledger(path)  # so it is the value that is refused below, not how it was signed
        else:
            with pytest.raises(TamperedError):
                read_ledger(path)


def test_a_torn_line_is_off_the_disk_before_the_ledger_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, BUDGET).close()
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"torn')
    synced: list[int] = []
    monkeypatch.setattr(ledger.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    Ledger.open(path).close()
    assert synced == [whole]


# --- the journal ------------------------------------------------------------------------------


def released(value: np.ndarray) -> Released:
    event = GaussianEvent(
        **{"row_unit": "teacher", "l2_bound": 1.0, "diameter": 2.0, "relation": "add-remove", "sigma": 9.0},  # type: ignore[arg-type]
        **{"queries": 1, "step": 0, "noise": "operating-system"},  # type: ignore[arg-type]
    )
    return Released(value=value, event=event, number=0)


def test_the_journal_pickles_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Object arrays"):
        Journal(tmp_path).save(released(np.array([{"a": 1}], dtype=object)))


def test_the_journal_unpickles_nothing(tmp_path: Path) -> None:
    """Whoever can write there could hash it too: it must not be run for that."""
    content = io.BytesIO()
    np.lib.format.write_array(content, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    path = tmp_path / "00000000.release"
    path.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    with pytest.raises(TamperedError, match="damaged"):
        Journal._load(path)


@pytest.mark.parametrize("count", [3, 1000])
def test_a_journaled_value_is_durable_when_it_has_its_name(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First all of the file reaches the disk, then it gets its name, then the name reaches the disk."""
    from datalens.privacy import journal

    happened: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        folder = stat.S_ISDIR(facts.st_mode)
        happened.append(("folder", len(list(tmp_path.glob("*.release")))) if folder else ("file", facts.st_size))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        happened.append(("name", os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(journal.os, "fsync", watched_fsync)
    monkeypatch.setattr(journal.os, "replace", watched_replace)
    Journal(tmp_path).save(released(np.arange(count)))
    size = (tmp_path / "00000000.release").stat().st_size
    assert size > 8 * count
    assert happened == [("file", size), ("name", size), ("folder", 1)]


def test_a_journaled_value_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Journal(tmp_path).save(released(np.arange(3)))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "00000000.release").stat().st_mode) == 0o600
