"""Algorithm 2 against a literal reading of the paper in numpy, its sensitivity by brute force, and its edge cases."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from datalens.bounded.contributions import Contributions, Gradients, sum_bounded
from datalens.bounded.topk_sign import TopKSign, _by_partition, _by_topk, top_k_mask
from datalens.errors import DatalensError


def gradients(values: Any, *, teachers: Any = None, step: int = 0) -> Gradients:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    if tensor.dim() == 1:
        tensor = tensor.view(1, 1, -1)
    numbers = torch.arange(len(tensor)) if teachers is None else torch.as_tensor(teachers)
    return Gradients(teachers=numbers, values=tensor, step=step)


def compress(
    values: Any, *, k: int, clip: float = 1e-5, quantise: bool = True, seed: int = 0, **where: Any
) -> Contributions:
    return TopKSign(k=k, clip=clip, quantise=quantise, seed=seed)(gradients(values, **where))


def algorithm_2(g: np.ndarray, c: float, k: int) -> np.ndarray:
    """Lines 1-5 literally, and of lines 6-8 the expectation: ĝ_j on the top-k indices, 0 elsewhere."""
    h = sorted(range(len(g)), key=lambda j: (-abs(g[j]), j))[:k]  # line 2; ties: the lower index
    g = np.array([min(max(gj, -c), c) for gj in g])  # line 3
    largest = max(abs(g))
    expected = np.zeros(len(g))
    for j in h:  # lines 6-8
        expected[j] = g[j] / largest if largest > 0 else 0.0  # line 4
    return expected


vectors = st.integers(1, 7).flatmap(
    lambda d: st.tuples(
        st.lists(st.integers(-4, 4).map(lambda v: v / 4), min_size=d, max_size=d),
        st.integers(1, d),
        st.sampled_from([1e-5, 0.3, 0.5, 1.0, 1e6]),
    )
)


@given(case=vectors)
@example(case=([0.5, -0.5, 0.5, 0.5], 2, 1e-5))
@example(case=([0.0, 0.0, 1.0], 3, 1.0))
@settings(max_examples=150, deadline=None)
def test_the_top_k_set_and_the_expectation_are_algorithm_2s(case: tuple[list[float], int, float]) -> None:
    values, k, clip = case
    expected = algorithm_2(np.array(values, dtype=np.float64), clip, k)
    row = compress(values, k=k, clip=clip, quantise=False).rows[0, 0].numpy()
    np.testing.assert_allclose(row, expected, rtol=1e-6)
    signs = compress(values, k=k, clip=clip).rows[0, 0].numpy()
    np.testing.assert_array_equal(signs != 0, expected != 0)
    certain = np.abs(expected) == 1
    np.testing.assert_array_equal(signs[certain], expected[certain])


@given(
    values=st.integers(1, 6).flatmap(
        lambda d: st.lists(
            st.lists(st.lists(st.floats(width=32), min_size=d, max_size=d), min_size=2, max_size=2),
            min_size=1,
            max_size=4,
        )
    ),
    part=st.floats(0, 1),
    clip=st.floats(1e-30, 1e30),
    quantise=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_gradient_becomes_at_most_k_votes_per_image(
    values: list[Any], part: float, clip: float, quantise: bool
) -> None:
    d = len(values[0][0])
    k = 1 + round(part * (d - 1))
    made = compress(values, k=k, clip=clip, quantise=quantise)
    assert made.rows.shape == (len(values), 2, d)
    assert made.rows.dtype == (torch.int8 if quantise else torch.float32)
    if quantise:
        assert set(made.rows.unique().tolist()) <= {-1, 0, 1}
    assert bool((made.rows.abs() <= 1).all())
    assert bool((made.rows.count_nonzero(dim=-1) <= k).all())
    assert made.l2_bound == math.sqrt(k * 2)
    assert made.diameter == 2 * made.l2_bound
    assert made.row_unit == "teacher"
    assert bool((made.rows.double().flatten(1).norm(dim=1) <= made.l2_bound * (1 + 1e-12)).all())


def test_exactly_k_votes_where_there_are_k_nonzero_coordinates() -> None:
    values = torch.randn(20, 3, 50, generator=torch.Generator().manual_seed(0))
    for k in (1, 7, 49, 50):
        assert (compress(values, k=k).rows.count_nonzero(dim=-1) == k).all()


# --- edge cases -----------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lower_index() -> None:
    assert top_k_mask(torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0]), 2).tolist() == [False, True, True, False, False]
    assert top_k_mask(torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0]), 3).tolist() == [True, True, True, False, False]
    assert top_k_mask(torch.tensor([1.0, 0.0, 0.0]), 2).tolist() == [True, False, False]
    assert top_k_mask(torch.tensor([0.0, 1.0]), 2).tolist() == [False, True]
    assert compress([1.0, -1.0, 1.0, -1.0], k=2).rows.tolist() == [[[1, -1, 0, 0]]]


def test_k_equal_to_d_is_no_top_k() -> None:
    assert compress([3.0, 0.0, -1e-3], k=3).rows.tolist() == [[[1, 0, -1]]]


def test_k_beyond_d_is_an_error() -> None:
    with pytest.raises(DatalensError, match="--k at most 2"):
        compress([1.0, 2.0], k=3)


@pytest.mark.parametrize("changes", [{"k": 0}, {"k": -1}, {"clip": 0.0}, {"clip": -1.0}, {"clip": math.nan}])
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"k": 1, "clip": 1.0, "quantise": True, "seed": 0}
    with pytest.raises(DatalensError, match=next(iter(changes))):
        TopKSign(**(fields | changes))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("quantise", [True, False])
def test_a_broken_image_votes_nothing_and_leaves_the_others_alone(poison: float, quantise: bool) -> None:
    values = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    healthy = compress(values, k=3, clip=0.4, quantise=quantise).rows
    values[1, 2] = 0.0
    values[1, 2, 5] = poison
    broken = compress(values, k=3, clip=0.4, quantise=quantise).rows
    assert broken[1, 2].count_nonzero() == 0
    changed = torch.zeros(3, 4, 6, dtype=torch.bool)
    changed[1, 2] = True
    assert torch.equal(broken[~changed], healthy[~changed])


def test_one_teacher_is_enough() -> None:
    total = sum_bounded([compress([1.0, -3.0, 2.0], k=2)])
    assert total.private_total.tolist() == [[0, -1, 1]]
    assert total.l2_bound == math.sqrt(2)


# --- clipping -------------------------------------------------------------------------------------------------------


def test_a_tiny_clip_leaves_signs_only() -> None:
    values = torch.randn(5, 2, 9, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        rows = compress(values, k=9, clip=1e-8, step=step).rows
        assert torch.equal(rows, values.sign().to(torch.int8))


def test_a_huge_clip_leaves_the_gradient_over_its_largest() -> None:
    values = torch.randn(5, 2, 9, generator=torch.Generator().manual_seed(3))
    rows = compress(values, k=9, clip=1e9, quantise=False).rows
    torch.testing.assert_close(rows, values / values.abs().amax(dim=-1, keepdim=True))


# --- the stochastic sign --------------------------------------------------------------------------------------------

PROBABILITIES = np.array([-1.0, -0.6, -0.1, 0.1, 0.35, 1.0])


def unbiased(draw: Any, *, times: int = 20_000) -> bool:
    """Whether the mean vote over many teachers is ĝ on every coordinate, within five standard errors."""
    votes = draw(times)  # [times, d]
    if not np.isin(votes, (-1, 1)).all():
        return False
    error = np.sqrt(np.maximum(1 - PROBABILITIES**2, 0) / times)
    return bool((np.abs(votes.mean(axis=0) - PROBABILITIES) <= 5 * error + 1e-12).all())


def test_the_stochastic_sign_is_unbiased() -> None:
    def ours(times: int) -> np.ndarray:
        values = torch.tensor(PROBABILITIES, dtype=torch.float32).expand(times, 1, -1)
        return compress(values, k=6, clip=10.0).rows[:, 0].numpy()

    assert unbiased(ours)


def test_wrong_stochastic_signs_are_caught() -> None:
    """Broken twins: the deterministic sign; probability |g| instead of (1 + g)/2; probability g; a fair coin."""
    rng = np.random.default_rng(0)

    def coin(probability: np.ndarray) -> Any:
        return lambda times: np.where(rng.random((times, 6)) < probability, 1, -1)

    assert unbiased(coin((1 + PROBABILITIES) / 2))
    assert not unbiased(lambda times: np.tile(np.sign(PROBABILITIES), (times, 1)))
    assert not unbiased(coin(np.abs(PROBABILITIES)))
    assert not unbiased(coin(PROBABILITIES))
    assert not unbiased(coin(np.full(6, 0.5)))
    assert not unbiased(coin((1 + PROBABILITIES * 1.1) / 2))


def test_coordinates_images_and_steps_draw_independently() -> None:
    values = torch.full((400, 4, 20), 0.5)
    values[..., 0] = 1.0  # the largest: the others vote +1 with probability 3/4
    first, second = (compress(values, k=20, clip=10.0, step=step).rows[..., 1:].double() for step in (0, 1))
    votes = (first.flatten(1) - 0.5) / math.sqrt(0.75)
    correlation = (votes.T @ votes / len(votes)).fill_diagonal_(0).abs().max()
    assert float(correlation) < 7 / math.sqrt(400)
    between = (first - 0.5).mul(second - 0.5).mean() / 0.75
    assert abs(float(between)) < 6 / math.sqrt(first.numel())
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


Compressor = Callable[[Gradients], Tensor]


def shared_fates(compressor: Compressor) -> set[str]:
    """In which ways a teacher's votes depend on more than its own gradient, its number and the step."""
    values = torch.randn(12, 3, 20, generator=torch.Generator().manual_seed(4))
    whole = compressor(gradients(values, step=5))
    found = set()
    for size in (1, 5):
        parts = [
            compressor(gradients(values[at : at + size], step=5, teachers=range(at, min(at + size, 12))))
            for at in range(0, 12, size)
        ]
        if not torch.equal(torch.cat(parts), whole):
            found.add("chunks")
    others = torch.arange(12) != 3
    for other in (torch.randn(3, 20, generator=torch.Generator().manual_seed(6)) * 1e6, torch.tensor(math.nan)):
        changed = values.clone()
        changed[3] = other
        if not torch.equal(compressor(gradients(changed, step=5))[others], whole[others]):
            found.add("other teachers")
    return found


def ours(chunk: Gradients) -> Tensor:
    return TopKSign(k=8, clip=10.0, quantise=True, seed=0)(chunk).rows


def one_stream_for_all(chunk: Gradients) -> Tensor:
    """Broken twin: draws depend on a teacher's place in its chunk."""
    scaled = TopKSign(k=8, clip=10.0, quantise=False, seed=0)(chunk).rows
    draws = torch.rand(scaled.shape, generator=torch.Generator().manual_seed(chunk.step))
    return ((draws < (1 + scaled) / 2) * 2 - 1) * (scaled != 0)


def one_norm_for_all(chunk: Gradients) -> Tensor:
    """Broken twin: divides by the largest gradient of any teacher."""
    values = chunk.values / chunk.values.nan_to_num(0).abs().max().clamp(min=1e-9)
    return TopKSign(k=8, clip=0.01, quantise=True, seed=0)(
        Gradients(teachers=chunk.teachers, values=values, step=5)
    ).rows


def all_or_nothing(chunk: Gradients) -> Tensor:
    """Broken twin: one NaN, and nobody votes."""
    return ours(chunk) * bool(chunk.values.isfinite().all())


def test_a_teachers_votes_depend_on_its_own_gradient_only() -> None:
    assert shared_fates(ours) == set()


@pytest.mark.parametrize(
    ("twin", "what"),
    [(one_stream_for_all, "chunks"), (one_norm_for_all, "other teachers"), (all_or_nothing, "other teachers")],
)
def test_votes_that_depend_on_others_are_caught(twin: Compressor, what: str) -> None:
    assert what in shared_fates(twin)


# --- sensitivity ----------------------------------------------------------------------------------------------------


def all_rows(d: int, k: int, images: int, *, quantise: bool) -> Tensor:
    """Every row the compressor can make of gradients on a small grid, over a few steps of randomness."""
    grid = torch.tensor(list(itertools.product([-1.0, -0.5, 0.0, 1.0], repeat=d * images))).view(-1, images, d)
    made = [compress(grid, k=k, clip=1.0, quantise=quantise, step=step).rows for step in range(4)]
    return torch.unique(torch.cat(made).double().flatten(1), dim=0)


@pytest.mark.parametrize(("d", "k", "images"), [(2, 1, 1), (3, 1, 1), (3, 2, 1), (4, 4, 1), (2, 1, 2), (2, 2, 2)])
@pytest.mark.parametrize("quantise", [True, False])
def test_the_stored_diameter_is_the_largest_distance_of_two_rows(d: int, k: int, images: int, quantise: bool) -> None:
    rows = all_rows(d, k, images, quantise=quantise)
    stored = compress(torch.zeros(1, images, d), k=k)
    farthest = float(torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").max())
    assert farthest == pytest.approx(2 * math.sqrt(k * images), rel=1e-12)
    assert farthest <= stored.diameter * (1 + 1e-12)
    assert float(rows.norm(dim=1).max()) <= stored.l2_bound * (1 + 1e-12)
    # Broken twin: the norm of one row is not how far two rows can be apart.
    assert farthest > stored.l2_bound * (1 + 1e-12)


@pytest.mark.parametrize("k", [1, 5, 19])
def test_both_ways_to_the_kth_largest_agree(k: int) -> None:
    magnitudes = torch.randint(0, 9, (50, 3, 20), generator=torch.Generator().manual_seed(k)).to(torch.float32)
    for ours, theirs in zip(_by_partition(magnitudes, k), _by_topk(magnitudes, k), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(_by_partition(magnitudes, k)[0].squeeze(-1), magnitudes.sort(dim=-1).values[..., 20 - k])
