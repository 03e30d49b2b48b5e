"""NormTopK against a literal reading of Algorithm 4, the length of every row, and a twin that keeps too much."""

import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from datalens.bounded import norm_topk
from datalens.bounded.norm_topk import (
    ROUNDING,
    NormTopK,
    Selector,
    bounded_scale,
    by_bisection,
    find_limits,
    how_many_fit,
    squares_by_torch,
)
from datalens.errors import DatalensError


def algorithm_4(g: np.ndarray, k: float) -> np.ndarray:
    """Lines 2-8: decreasing squares while their sum stays at or below the target; equals go together."""
    target, total = k * float((g**2).sum()), 0.0
    kept = np.zeros_like(g)
    for size in sorted(set(np.abs(g)), reverse=True):
        those = np.abs(g) == size
        total += float((g[those] ** 2).sum())
        if total > target:
            break
        kept[those] = g[those]
    return kept


def heavy(n: int, d: int, seed: int = 0) -> Tensor:
    """Rows as gradients are: few large coordinates, many small ones, zeros."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=random) ** 3 * (torch.rand(n, d, generator=random) > 0.3)


def contribution(compress: NormTopK, row: Tensor) -> Tensor:
    """What one record adds to the sum."""
    return compress.sum([row.unsqueeze(0)]).private_total[0]


def longest(compress: NormTopK, rows: Tensor) -> float:
    """The longest of the rows, by the bound they are paid for: at most 1 where all is well."""
    return max(float(contribution(compress, row).double().norm()) for row in rows) / compress.l2_bound


rows_of_quarters = st.integers(1, 9).flatmap(
    lambda d: st.lists(st.integers(-8, 8).map(lambda v: v / 4), min_size=d, max_size=d)
)


@given(values=rows_of_quarters, k=st.sampled_from([0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.99]))
@example(values=[1.0, 1.0, 1.0, 1.0], k=0.5)
@example(values=[2.0, 1.0, -1.0, 0.5], k=0.7)
@example(values=[0.0], k=0.5)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_algorithm_4s(values: list[float], k: float) -> None:
    g = np.array(values)
    ours = contribution(NormTopK(clip=1e6, topk=k), torch.tensor(values))
    np.testing.assert_allclose(ours.numpy(), algorithm_4(g, k), rtol=1e-6)


def kept(rows: Tensor, k: float, guess: float) -> Tensor:
    """What `find_limits` leaves of them."""
    whole = rows.double().square().sum(dim=1)
    limits, _ = find_limits(rows.abs().numpy(), whole.numpy(), k, guess)
    return torch.where(rows.abs() > torch.from_numpy(limits).unsqueeze(1), rows, 0.0)


@pytest.mark.parametrize("k", [0.2, 0.6, 0.8, 0.95])
def test_on_long_rows_too(k: float) -> None:
    rows = heavy(6, 9001)
    rows[1] = torch.linspace(1.0, 1.1, 9001)  # keeps a share of about k: more than was looked at
    rows[2, ::61] = 100.0  # of equal size
    rows[3, 100:] *= 1e-3
    rows[4] = 0.0
    expected = np.array([algorithm_4(row.double().numpy(), k) for row in rows], dtype=np.float32)
    for guess in (0.0, 0.5, 1.0, 2.0, 3.0, 50.0):  # also such that nothing is above it
        np.testing.assert_array_equal(kept(rows, k, guess).numpy(), expected)


def test_the_next_guess_is_a_little_below_what_was_found() -> None:
    rows, k = heavy(6, 9001), 0.8
    whole = rows.double().square().sum(dim=1).numpy()
    limits, guess = find_limits(rows.abs().numpy(), whole, k, 1.0)
    least = np.sqrt((1 - k) * whole / 9001)
    assert (limits > least).all() and guess == pytest.approx(0.9 * (limits / least).min()) and guess > 2
    again, _ = find_limits(rows.abs().numpy(), whole, k, guess)
    np.testing.assert_array_equal(again, limits)
    flat = np.ones((1, 100), dtype=np.float32)  # all is dropped, or nothing: the limit is next to its bound
    assert find_limits(flat, np.array([100.0]), 0.01, 5.0) == (np.array([1.0]), 1.0)


def test_a_limit_at_its_bound_is_found() -> None:
    """One size in all of a row but little: the guess must not be a hair too high."""
    row = np.ones((1, 400), dtype=np.float32)
    row[0, 0] = 1.001
    for guess in (1.0, 2.0):
        assert find_limits(row, np.square(row, dtype=np.float64).sum(axis=1), 0.004, guess)[0].tolist() == [1.0]


@pytest.mark.parametrize("m", [1, 63, 64, 65, 200])
def test_as_many_as_fit(m: int) -> None:
    """At the ends of groups too. Small whole numbers: sums are exact."""
    falling = np.sort(np.random.default_rng(m).integers(0, 9, (m + 2, m)), axis=1)[:, ::-1].astype(np.float32)
    sums = np.cumsum(np.square(falling), axis=1)
    most = np.append(sums[range(m), range(m)], [0.0, 1e9])  # row i: exactly as much as its first i + 1
    assert how_many_fit(falling, most).tolist() == (sums <= most[:, None]).sum(axis=1).tolist()


@pytest.mark.parametrize("k", [0.05, 0.5, 0.8])
def test_halving_keeps_as_much_as_fits(k: float) -> None:
    rows = torch.cat([heavy(5, 8192), torch.zeros(1, 8192)])
    rows[2] = 0.5  # of equal size
    for row, limit in zip(rows.double(), by_bisection(rows, k)[:, 0].double(), strict=True):
        whole = (row**2).sum()
        assert (row[row.abs() > limit] ** 2).sum() <= k * whole * (1 + 1e-6)
        assert (row[row.abs() >= limit] ** 2).sum() >= k * whole * (1 - 1e-6)  # no more would have fitted


@given(
    seed=st.integers(0, 2**32),
    k=st.floats(0.01, 1.0),
    clip=st.floats(1e-3, 1e3),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e12, 1e30]),
    selector=st.sampled_from(["norm", "dim", "none"]),
)
@settings(max_examples=120, deadline=None)
def test_no_row_is_longer_than_its_bound(seed: int, k: float, clip: float, scale: float, selector: Selector) -> None:
    compress = NormTopK(clip=clip, topk=k, selector=selector)
    paper = clip * (math.sqrt(k) if selector == "norm" else 1.0)
    assert compress.l2_bound == pytest.approx(paper, rel=1.1 * ROUNDING)
    assert longest(compress, heavy(3, 60, seed) * scale) <= 1.0


def one_too_many(sizes: np.ndarray, whole: np.ndarray, k: float, guess: float) -> tuple[np.ndarray, float]:
    """Keeps the largest coordinate that has to go, too."""
    limits, guess = find_limits(sizes, whole, k, guess)
    return np.array([row[row < limit].max(initial=0.0) for row, limit in zip(sizes, limits, strict=True)]), guess


def test_a_twin_that_keeps_one_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, compress = heavy(6, 60), NormTopK(clip=0.5, topk=0.6)
    monkeypatch.setattr(norm_topk, "find_limits", one_too_many)
    assert longest(compress, rows) <= 1.0  # what is kept is measured, and scaled
    trusting = lambda squares, kept, *, clip, bound: clip / (squares**0.5).clip(min=clip)  # noqa: E731
    monkeypatch.setattr(norm_topk, "bounded_scale", trusting)
    assert longest(compress, rows) > 1.01  # and where nobody measures, this finds it
    monkeypatch.setattr(norm_topk, "find_limits", find_limits)
    assert longest(compress, rows) <= 1.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_give_the_same_sum(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record once, in whichever thread and block; few rows and many."""
    compress = NormTopK(clip=1e6, topk=0.7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(norm_topk, "_CPU_BYTES", 3 * 4 * 57)  # blocks of three rows
    for count in (1, 2, 7, 20):
        rows = heavy(count, 57, count)
        expected = sum(algorithm_4(row.double().numpy(), 0.7) for row in rows)
        found = compress.sum([rows[:, :50].reshape(count, 5, 10), rows[:, 50:]]).private_total[0]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_long_flat_rows_keep_their_bound() -> None:
    """Where a norm in float32 comes out short by 4e-4, because what is added has grown too small for the sum."""
    rows = torch.tensor([[0.1], [0.2], [0.3], [0.7], [0.9]]).expand(5, 10**6).contiguous()
    assert (rows.norm(dim=1) / rows.double().norm(dim=1)).min() < 1 - 1e-5
    assert longest(NormTopK(clip=1.0), rows) <= 1.0


@pytest.mark.parametrize("selector", ["norm", "dim", "none"])
def test_rows_that_are_no_numbers_add_nothing(selector: Selector) -> None:
    compress = NormTopK(clip=1.0, topk=0.5, selector=selector)
    rows = heavy(5, 40)
    clean = compress.sum([rows[3:]]).private_total
    rows[0, 3], rows[1, 4], rows[2] = math.nan, -math.inf, 3e38
    assert torch.equal(compress.sum([rows]).private_total, clean)


@pytest.mark.parametrize("selector", ["norm", "dim", "none"])
def test_rows_too_short_to_measure_are_not_trusted(selector: Selector) -> None:
    """Their squares are zero in float32; their lengths are not. A clip norm that is shorter still is refused."""
    for size in (1e-25, 1e-18, 1e-11):
        assert longest(NormTopK(clip=1e-12, topk=0.5, selector=selector), heavy(3, 40).clamp(-9, 9) * size) <= 1.0
    with pytest.raises(DatalensError, match="at least 1e-12"):
        NormTopK(clip=1e-30, topk=0.5, selector=selector)


def test_k_1_is_opacus() -> None:
    rows = [heavy(9, 40).view(9, 8, 5), heavy(9, 7, 1)]
    norms = torch.cat([g.flatten(1) for g in rows], dim=1).norm(dim=1)
    scale = (2.0 / (norms + 1e-6)).clamp(max=1.0)  # as Opacus writes it
    expected = torch.cat([torch.einsum("i,i...", scale, g).flatten() for g in rows])
    for compress in (NormTopK(clip=2.0), NormTopK(clip=2.0, topk=0.5, selector="none")):
        torch.testing.assert_close(compress.sum(rows).private_total[0].float(), expected, rtol=1e-6, atol=1e-6)
    faint = contribution(NormTopK(clip=1e-6), torch.tensor([1e-6]))  # where their 1e-6 is as large as the row
    assert float(faint) == pytest.approx(0.5e-6, rel=1e-5)


@pytest.mark.parametrize("selector", ["none", "dim", "norm"])
def test_rows_shorter_than_the_clip_stay_as_long_as_they_are(selector: Selector) -> None:
    row = torch.tensor([0.3, 0.0, 0.2, 0.1])
    kept = {"none": row, "dim": torch.tensor([0.3, 0.0, 0.2, 0.0]), "norm": torch.tensor([0.3, 0.0, 0.0, 0.0])}
    ours = contribution(NormTopK(clip=1.0, topk=0.5 if selector == "dim" else 0.7, selector=selector), row)
    torch.testing.assert_close(ours.float(), kept[selector], rtol=1e-6, atol=0)


def test_dim_keeps_a_share_of_the_coordinates() -> None:
    row = torch.tensor([4.0, -3.0, 2.0, 1.0, 0.5])
    kept = contribution(NormTopK(clip=100.0, topk=0.4, selector="dim"), row)
    assert kept.tolist() == [4.0, -3.0, 0.0, 0.0, 0.0]


def test_parts_of_a_batch_add_up_to_the_batch() -> None:
    compress = NormTopK(clip=1.0, topk=0.7)
    rows = heavy(10, 50)
    whole = compress.sum([rows])
    parts = compress.sum([rows[4:]], onto=compress.sum([rows[:4]]))
    torch.testing.assert_close(parts.private_total, whole.private_total, rtol=1e-5, atol=1e-6)
    assert (whole.queries, whole.row_unit, whole.diameter) == (1, "record", 2 * whole.l2_bound)
    with pytest.raises(ValueError, match="agree"):
        NormTopK(clip=2.0, topk=0.7).sum([rows], onto=whole)


@pytest.mark.parametrize("k", [0.5, 1.0])
def test_nobody_in_the_batch(k: float) -> None:
    total = NormTopK(clip=1.0, topk=k).sum([torch.zeros(0, 3, 2), torch.zeros(0, 4)]).private_total
    assert total.shape == (1, 10) and not total.any()


def test_other_kinds_of_numbers() -> None:
    rows = heavy(4, 30)
    for k in (0.6, 1.0):
        single = NormTopK(clip=1.0, topk=k).sum([rows]).private_total
        for kind in (torch.float64, torch.bfloat16):
            other = NormTopK(clip=1.0, topk=k).sum([rows.to(kind)]).private_total
            torch.testing.assert_close(other, single, rtol=0.1, atol=0.1)
            assert other.dtype == torch.float64
    mixed = NormTopK(clip=1.0, topk=0.6).sum([rows[:, :10], rows[:, 10:].double()]).private_total
    torch.testing.assert_close(mixed, NormTopK(clip=1.0, topk=0.6).sum([rows]).private_total, rtol=1e-5, atol=1e-6)


def moved(compress: NormTopK, rows: Tensor) -> float:
    """How far the first of the rows moves the sum of all, by what is paid for: at most 1 where all is well."""
    apart = compress.sum([rows]).private_total - compress.sum([rows[1:]]).private_total
    return float(apart.norm()) / compress.l2_bound


@pytest.mark.parametrize(("topk", "selector"), [(1.0, "norm"), (0.5, "none"), (0.5, "dim"), (0.5, "norm")])
def test_a_record_moves_a_sum_of_many_no_farther_than_its_bound(topk: float, selector: Selector) -> None:
    """All rows point one way: a sum of them in float32 is rounded by more than rows are measured wrong."""
    rows = heavy(1, 1000).repeat(20_000, 1)
    assert moved(NormTopK(clip=1.0, topk=topk, selector=selector), rows) <= 1


def test_a_twin_that_sums_in_float32_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(scale: Tensor, rows: Tensor) -> Tensor:
        """One row after the other: a product of matrices rounds as a machine likes it."""
        total = torch.zeros(rows.shape[1], dtype=rows.dtype)
        for row in scale.to(rows.dtype).unsqueeze(1) * rows:
            total += row
        return total.double()

    monkeypatch.setattr(norm_topk, "_weighed_sum", coarse)
    assert moved(NormTopK(clip=1.0), heavy(1, 1000).repeat(20_000, 1)) > 1 + 1e-6
    assert moved(NormTopK(clip=1.0), heavy(1, 1000).repeat(1000, 1).half()) > 1.01
    assert moved(NormTopK(clip=1.0), heavy(1, 1000).repeat(50, 1).bfloat16()) > 1.01


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("topk", "selector"), [(1.0, "norm"), (0.5, "none"), (0.5, "dim"), (0.5, "norm")])
def test_rows_in_half_precision_keep_their_bound(kind: torch.dtype, topk: float, selector: Selector) -> None:
    """As autocast makes them, of parameters in float32."""
    compress = NormTopK(clip=1.0, topk=topk, selector=selector)
    rows = heavy(1000, 1500).to(kind)
    assert longest(compress, rows[:20]) <= 1
    assert moved(compress, rows[:1].repeat(1000, 1)) <= 1


def test_a_half_precision_row_is_measured_in_single() -> None:
    rows = torch.full((1, 700), 20.0, dtype=torch.float16)  # 700 · 400 is more than it can hold
    assert float(squares_by_torch(rows)) == pytest.approx(280_000, rel=1e-6)


def test_however_few_rows_fit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = heavy(6, 50)
    for selector in ("dim", "norm"):
        compress = NormTopK(clip=1.0, topk=0.5, selector=selector)  # type: ignore[arg-type]
        monkeypatch.undo()
        whole = compress.sum([rows]).private_total
        monkeypatch.setattr(norm_topk, "_CPU_BYTES", 1)
        torch.testing.assert_close(compress.sum([rows]).private_total, whole)


def test_records_must_be_the_same_in_every_parameter() -> None:
    with pytest.raises(ValueError, match="same records"):
        NormTopK(clip=1.0).sum([torch.zeros(2, 3), torch.zeros(3, 3)])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": math.inf}, "clip"),
        ({"clip": 1.0, "topk": 0.0}, "topk"),
        ({"clip": 1.0, "topk": 1.2}, "topk"),
        ({"clip": 1.0, "topk": math.nan}, "topk"),
        ({"clip": 1.0, "selector": "best"}, "selector"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(DatalensError, match=said):
        NormTopK(**asked)


def test_where_rounding_leaves_all_that_may_stay() -> None:
    """A whole that was summed too large: all is kept, and then its length is looked at."""
    limits, guess = find_limits(np.array([[1.0, 2.0]], dtype=np.float32), np.array([6.0]), 0.9, 2.0)
    assert (limits.tolist(), guess) == ([-1.0], 2.0)


def test_of_nothing_nothing_is_kept() -> None:
    """And a row of zeros does not change the guess for the next block."""
    limits, guess = find_limits(np.zeros((1, 500), dtype=np.float32), np.array([0.0]), 0.9, 3.0)
    assert (limits.tolist(), guess) == ([0.0], 3.0)


@pytest.mark.parametrize("kernel", [False, True])
def test_dense_rows_give_the_same_sum(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: by halving, and by the Triton kernel (here in its interpreter)."""
    if kernel:
        pytest.importorskip("triton")
        monkeypatch.setattr(norm_topk, "kernels_for", lambda rows: True)
    rows = torch.cat([heavy(3, 5000), torch.zeros(1, 5000)])
    rows[0, 7] = math.nan
    compress = NormTopK(clip=1.0, topk=0.7)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = torch.zeros(5000, dtype=torch.float64, device=device)
    compress._add_rows(rows.to(device, copy=True), dense)
    expected = compress.sum([rows]).private_total[0]
    torch.testing.assert_close(dense.cpu(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kernel", [False, True])
def test_whole_rows_give_the_same_sum(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, here in their interpreter, and torch: against rows clipped one by one."""
    rows = heavy(37, 90)
    rows[3, 5], rows[20, 89], rows[21, 1] = math.nan, math.inf, 1e30  # the last is too large to square
    expected = sum(
        torch.zeros(90).double() if i in (3, 20, 21) else g / max(1.0, g.norm()) for i, g in enumerate(rows.double())
    )
    if kernel:
        pytest.importorskip("triton")
        monkeypatch.setattr(norm_topk, "kernels_for", lambda rows: True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [rows[:, :70].reshape(37, 7, 10).to(device), rows[:, 70:71].to(device), rows[:, 71:].to(device)]
    total = NormTopK(clip=1.0).sum(parts).private_total[0].cpu()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "d"), [(0, 4), (3, 0), (5, 1), (1, 5000), (70, 130), (17, 64)])
def test_the_kernels_measure_and_add(n: int, d: int) -> None:
    pytest.importorskip("triton")
    from datalens.bounded.kernels import squared_norms, weighed_sum

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, weights = heavy(n, d).to(device), torch.rand(n, dtype=torch.float64, device=device)
    torch.testing.assert_close(squared_norms(rows), rows.double().square().sum(dim=1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(weighed_sum(weights, rows), weights @ rows.double(), rtol=1e-12, atol=1e-12)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from datalens.bounded import kernels

def compiled(kernel, signature, **fixed):
    signature |= dict.fromkeys(fixed, "constexpr")
    return triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=GPUTarget("cuda", 90, 32))

rows, sums = {"rows": "*fp32"}, {"out": "*fp64", "N": "i32", "D": "i32"}
found = [compiled(kernels._squared_norms, rows | {"out": "*fp64", "D": "i32"}, BD=1024)]
for cut, limits in ((True, "*fp32"), (False, "*fp64")):
    given = {"weights": "*fp64"} | rows | {"limits": limits} | sums
    found.append(compiled(kernels._weighed_sum, given, CUT=cut, BN=16, BD=64))
given = rows | {"squares": "*fp64", "kept": "*fp64", "limits": "*fp32", "k": "fp32"}
found.append(compiled(kernels._cut, given, D=26010, BD=4096))
print([len(one.asm["cubin"]) > 1000 for one in found])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there Triton brings the compiler along")
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does. (Hopper; no GPU is needed for it.)"""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str([True] * 4), done.stderr[-2000:]


def test_the_kernel_writes_nothing_beside_its_sum() -> None:
    kernels = pytest.importorskip("datalens.bounded.kernels", reason="needs Triton", exc_type=ImportError)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, weights = heavy(5, 70).to(device), torch.ones(5, dtype=torch.float64, device=device)
    out = torch.full((128,), math.nan, dtype=torch.float64, device=device)
    kernels._weighed_sum[(2,)](weights, rows, weights, out, 5, 70, False, 16, 64)
    assert out[:70].isfinite().all() and out[70:].isnan().all()


def test_the_kernels_add_rows_of_one_way_no_farther_than_they_are_long() -> None:
    """As above for float32 sums: there the last of 20,000 rows is off by more than a millionth."""
    pytest.importorskip("triton")
    from datalens.bounded.kernels import weighed_sum

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = heavy(1, 8).repeat(20_000, 1).to(device)
    ones = torch.ones(20_000, dtype=torch.float64, device=device)
    apart = weighed_sum(ones, rows) - weighed_sum(ones[1:], rows[1:])
    torch.testing.assert_close(apart.float(), rows[0], rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("k", [0.25, 0.5, 0.75])
def test_the_kernels_limit_is_exact_where_sums_are(k: float) -> None:
    """Whole numbers: their squares add up without rounding in any order, and many are equal."""
    pytest.importorskip("triton")
    from datalens.bounded.kernels import cut

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(2)
    rows = torch.randint(-8, 9, (6, 4100), generator=random).float()
    rows[1, :] = 0.0
    rows[2, :4099], rows[2, 4099] = 0.0, -5.0  # one coordinate, in the last block
    rows[3, 1:], rows[3, 0] = 0.0, 3.0
    rows[4, :] = 1.0
    squares, kept, limits = (of_rows.cpu() for of_rows in cut(rows.to(device), k))
    assert torch.equal(limits, by_bisection(rows, k).squeeze(1))
    assert torch.equal(squares, rows.double().square().sum(dim=1))
    assert torch.equal(kept, torch.where(rows.abs() > limits.unsqueeze(1), rows, 0.0).double().square().sum(dim=1))


def too_short(kernel: Any) -> Any:
    """A measure of each row that leaves out its last coordinates."""
    return lambda rows: kernel(rows[:, :-20].contiguous())


def one_less(kernel: Any) -> Any:
    return lambda weights, rows, limits=None: kernel(weights[1:], rows[1:], None if limits is None else limits[1:])


def in_float32(kernel: Any) -> Any:
    return lambda weights, rows, limits=None: kernel(weights, rows, limits).float().double()


def kept_too_short(kernel: Any) -> Any:
    def twin(rows: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
        squares, kept, limits = kernel(rows, k)
        return squares, 0.999 * kept, limits

    return twin


@pytest.mark.parametrize(
    ("name", "broken"),
    [("squared_norms", too_short), ("weighed_sum", one_less), ("weighed_sum", in_float32), ("cut", kept_too_short)],
)
def test_kernels_that_a_gpu_gets_wrong_are_not_used(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("datalens.bounded.kernels", reason="needs Triton", exc_type=ImportError)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, compress = heavy(5, 90), NormTopK(clip=1.0)
    expected = compress.sum([rows]).private_total
    monkeypatch.setattr(norm_topk, "kernels_for", lambda rows: True)
    norm_topk.kernels_agree.cache_clear()
    assert norm_topk.kernels_agree(device)
    monkeypatch.setattr(kernels, name, broken(getattr(kernels, name)))
    norm_topk.kernels_agree.cache_clear()
    assert not norm_topk.kernels_agree(device)
    torch.testing.assert_close(compress.sum([rows.to(device)]).private_total.cpu(), expected)
    norm_topk.kernels_agree.cache_clear()


@pytest.mark.filterwarnings("ignore:overflow")
def test_the_kernel_finds_the_limit() -> None:
    pytest.importorskip("triton")
    from datalens.bounded.kernels import cut, weighed_sum

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = heavy(6, 5000)
    rows[3, 4999], rows[4, 0], rows[5, 7] = math.nan, math.inf, 1e30
    squares, kept, limits = (of_rows.cpu() for of_rows in cut(rows.to(device), 0.7))
    torch.testing.assert_close(limits[:3], by_bisection(rows[:3], 0.7).squeeze(1), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(squares[:3], rows[:3].double().square().sum(dim=1), rtol=1e-6, atol=0.0)
    larger = torch.where(rows[:3].abs() > limits[:3, None], rows[:3], 0.0).double()
    torch.testing.assert_close(kept[:3], larger.square().sum(dim=1), rtol=1e-6, atol=0.0)
    assert not squares[3:].any() and not kept[3:].any() and limits[3:].isinf().all()
    ones = torch.ones(3, dtype=torch.float64)
    added = weighed_sum(ones.to(device), rows[:3].to(device), limits[:3].to(device)).cpu()
    torch.testing.assert_close(added, larger.sum(dim=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("selector", ["norm", "dim", "none"])
def test_gradients_stay_as_they_are(selector: norm_topk.Selector) -> None:
    """Rows are cut down in a copy: one parameter alone, whose gradients need not be put together, is the hard case."""
    gradients = heavy(5, 700)
    before = gradients.clone()
    NormTopK(clip=1.0, topk=0.5, selector=selector).sum([gradients])
    assert torch.equal(gradients, before)


@pytest.mark.parametrize("d", [1, 511, 512, 513, 1024, 1500])
def test_a_gpus_way_to_the_length_of_a_row(d: int) -> None:
    """No CPU takes it for float32, and all that a GPU adds up is bounded by it."""
    rows = heavy(3, d) + 0.1
    torch.testing.assert_close(squares_by_torch(rows), rows.double().square().sum(dim=1), rtol=1e-6, atol=0)


def test_a_gpus_way_over_many_coordinates() -> None:
    """One float32 norm over all of them is a thousandth off."""
    rows = torch.full((2, 10**6), 1e-3)
    rows[:, ::7] = 3e-4
    whole = rows.double().square().sum(dim=1)
    torch.testing.assert_close(squares_by_torch(rows), whole, rtol=1e-6, atol=0)
    at_once = torch.linalg.vector_norm(rows, dim=1).double().square()
    assert not torch.allclose(at_once, whole, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("topk", "selector"), [(1.0, "norm"), (0.5, "none"), (0.5, "dim"), (0.5, "norm")])
def test_a_row_goes_over_all_parameters(topk: float, selector: Selector) -> None:
    rows, compress = heavy(5, 60), NormTopK(clip=1.0, topk=topk, selector=selector)
    parts = compress.sum([rows[:, :12].reshape(5, 3, 4), rows[:, 12:24], rows[:, 24:]]).private_total
    torch.testing.assert_close(parts, compress.sum([rows]).private_total, rtol=1e-6, atol=1e-7)


def test_a_row_is_clipped_as_it_came_and_then_cut_to_its_bound() -> None:
    squares, kept = np.array([100.0, 100.0, 9.0, 9.0, 4.0]), np.array([64.0, 1.0, 9.0, 4.0, 0.0])
    expected = [math.sqrt(0.5) * 4 / 8, 0.4, math.sqrt(0.5) * 4 / 3, 1.0, 0.0]  # clip 4, and √½·4 of what is kept
    for kind in (np.asarray, torch.as_tensor):
        found = bounded_scale(kind(squares), kind(kept), clip=4.0, bound=math.sqrt(0.5) * 4)  # type: ignore[type-var]
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


def test_squares_that_fit_exactly_fit() -> None:
    row = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0]])  # half of 8 is the 4 of the first
    for limit in (by_bisection(row, 0.5)[0, 0], find_limits(row.numpy().copy(), np.array([8.0]), 0.5, 1.0)[0][0]):
        assert float(limit) == 1.0
