"""k-level rotation (Algorithm 5) and count sketches (Algorithm 7): bounds for any input, unbiasedness, decoding."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from datalens.bounded.contributions import Contributions, Gradients, sum_bounded
from datalens.bounded.count_sketch import CountSketch
from datalens.bounded.klevel import KLevel
from datalens.bounded.topk_sign import TopKSign
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.methods.topagg import TopAggSettings, check_settings, make_compress, make_decode
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.events import GaussianEvent
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.public.transforms import Rotation, Sketch, hadamard

SCHEMA = Schema(name="toy", height=4, width=5, channels=1, classes=("a", "b"), nominal_size=1000)


def gradients(values: Any, *, step: int = 0) -> Gradients:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    return Gradients(teachers=torch.arange(len(tensor)), values=tensor, step=step)


def klevel(size: int, *, levels: int = 4, clip: float = 1e9, seed: int = 0) -> KLevel:
    return KLevel(levels=levels, clip=clip, seed=seed, size=size)


def sketch(size: int, *, k: int, rows: int = 3, columns: int = 2, clip: float = 1e9) -> CountSketch:
    votes = TopKSign(k=k, clip=clip, quantise=True, seed=0)
    return CountSketch(votes=votes, rows=rows, columns=columns, size=size)


anything = st.integers(1, 9).flatmap(
    lambda d: st.lists(
        st.lists(st.lists(st.floats(width=32), min_size=d, max_size=d), min_size=2, max_size=2), min_size=1, max_size=4
    )
)


def check_bounded(made: Contributions, bound: float) -> None:
    assert made.l2_bound == bound
    assert made.diameter == 2 * bound
    assert made.row_unit == "teacher"
    assert bool((made.rows.double().flatten(1).norm(dim=1) <= bound * (1 + 1e-6)).all())


@given(values=anything, levels=st.integers(2, 128), clip=st.floats(1e-30, 1e30))
@settings(max_examples=100, deadline=None)
def test_any_gradient_becomes_levels_within_the_bound(values: list[Any], levels: int, clip: float) -> None:
    d = len(values[0][0])
    made = klevel(d, levels=levels, clip=clip)(gradients(values))
    padded = 1 << (d - 1).bit_length()
    assert made.rows.shape == (len(values), 2, padded)
    assert made.rows.dtype == torch.int8
    check_bounded(made, (levels - 1) * math.sqrt(padded * 2))
    allowed = {-(levels - 1) + 2 * r for r in range(levels)} | {0}
    assert set(made.rows.unique().tolist()) <= allowed


@given(values=anything, part=st.floats(0, 1), rows=st.integers(1, 4), columns=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_any_gradient_becomes_a_table_within_the_bound(values: list[Any], part: float, rows: int, columns: int) -> None:
    """One column is the worst case: all k votes may fall together."""
    d = len(values[0][0])
    k = 1 + round(part * (d - 1))
    made = sketch(d, k=k, rows=rows, columns=columns)(gradients(values))
    assert made.rows.shape == (len(values), 2, rows * columns)
    check_bounded(made, math.sqrt(rows * k * 2))
    each = made.rows.double().norm(dim=2)
    assert bool((each <= math.sqrt(rows * k) * (1 + 1e-6)).all())


def test_a_table_is_cut_where_votes_collide_and_nowhere_else() -> None:
    wide, narrow = sketch(6, k=6, rows=3, columns=100_000), sketch(6, k=6, rows=3, columns=1)
    values = gradients(narrow._sketch._signs[:1].unsqueeze(0))  # all six add up in the first row's only cell
    table, signed = wide(values).rows, narrow._sketch.forward(narrow.votes(values).rows)
    assert table.abs().sum().item() == pytest.approx(18) and int(table.count_nonzero()) == 18
    assert signed[0, 0, 0] == 6 > math.sqrt(18)
    torch.testing.assert_close(narrow(values).rows, signed * (math.sqrt(18) / signed.norm()))


@pytest.mark.parametrize("draw", [0, 65535])
def test_a_coordinate_on_a_level_stays_there_whatever_is_drawn(draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "datalens.bounded.klevel.streams.halfwords",
        lambda *key, teachers, count: torch.full((len(teachers), count), draw),
    )
    compress, levels = klevel(5, levels=5), torch.linspace(-1, 1, 5).view(1, 1, 5)
    assert compress._round(levels, gradients(levels)).flatten().tolist() == [-4, -2, 0, 2, 4]
    between = compress._round(levels + 0.25, gradients(levels)).flatten().tolist()[:4]
    assert between == ([-4, -2, 0, 2] if draw == 0 else [-2, 0, 2, 4])


def test_as_many_levels_as_a_byte_holds() -> None:
    row = klevel(64, levels=128)(gradients(torch.eye(64)[:1].unsqueeze(0))).rows
    assert row.dtype == torch.int8 and set(row.abs().unique().tolist()) == {127}
    with pytest.raises(DatalensError, match="levels must be from 2 to 128, not 129"):
        klevel(64, levels=129)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("make", [lambda: klevel(6), lambda: sketch(6, k=3)])
def test_a_broken_image_votes_nothing_and_leaves_the_others_alone(poison: float, make: Any) -> None:
    values = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    healthy = make()(gradients(values)).rows
    values[1, 2] = 0.0
    values[1, 2, 5] = poison
    broken = make()(gradients(values)).rows
    assert broken[1, 2].count_nonzero() == 0
    changed = torch.zeros(3, 4, dtype=torch.bool)
    changed[1, 2] = True
    assert torch.equal(broken[~changed], healthy[~changed])


@pytest.mark.parametrize("make", [lambda: klevel(300, levels=16), lambda: sketch(300, k=100, columns=64)])
def test_a_row_is_the_same_bits_in_any_chunk(make: Any) -> None:
    whole = gradients(torch.randn(9, 3, 300, generator=torch.Generator().manual_seed(2)))
    rows = make()(whole).rows
    for part in (slice(0, 1), slice(1, 4), slice(4, 9)):
        alone = Gradients(teachers=whole.teachers[part], values=whole.values[part], step=0)
        assert torch.equal(make()(alone).rows, rows[part])


# --- the maps -------------------------------------------------------------------------------------------------------


def test_the_rotation_is_hadamards_matrix_with_signs_and_orthonormal() -> None:
    eight = hadamard(torch.eye(8, dtype=torch.float64))
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    assert torch.equal(eight, torch.kron(two, torch.kron(two, two)))
    rotation = Rotation(5, 3)
    matrix = rotation.forward(torch.eye(5, dtype=torch.float64))
    assert matrix.shape == (5, 8)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(rotation.inverse(matrix), torch.eye(5, dtype=torch.float64))
    assert not torch.equal(matrix, Rotation(5, 4).forward(torch.eye(5, dtype=torch.float64)))  # another public seed
    assert Rotation(1, 0).padded == 1 and Rotation(784, 0).padded == 1024


def test_a_sketch_is_signed_sums_of_its_columns() -> None:
    one = Sketch(7, 4, 3, 0)
    table = one.forward(torch.eye(7))
    assert table.shape == (7, 12)
    assert (table.view(7, 4, 3).abs().sum(dim=2) == 1).all()  # each coordinate in one cell of every row
    votes = torch.tensor([[1.0, -1.0, 0, 1, 1, 0, -1]])
    assert torch.equal(one.forward(votes), votes @ table)
    np.testing.assert_allclose(
        one.estimates(one.forward(votes)).numpy()[0],
        np.median([[(votes @ table).view(4, 3)[r] @ table.view(7, 4, 3)[j, r] for j in range(7)] for r in range(4)], 0),
    )


def test_heavy_coordinates_are_found_in_a_wide_sketch() -> None:
    one = Sketch(200, 5, 100, 1)
    vector = torch.zeros(1, 200)
    vector[0, [3, 50, 120]] = torch.tensor([100.0, -80.0, 60.0])
    found = one.heaviest(one.forward(vector), 3)
    assert torch.equal(found, vector)
    assert one.heaviest(one.forward(vector), 1).count_nonzero() == 1


# --- unbiased, where the papers claim it -----------------------------------------------------------------------------


class NearestLevel(KLevel):
    """Broken on purpose: rounds to the nearest level."""

    def _round(self, normal: Tensor, gradients: Gradients) -> Tensor:
        return ((normal + 1) * (self.levels - 1) / 2).round().mul_(2).sub_(self.levels - 1).to(torch.int8)


class AsPrinted(KLevel):
    """Broken on purpose: Algorithm 5's levels b[r] = −k/2 + 2r."""

    def _round(self, normal: Tensor, gradients: Gradients) -> Tensor:
        return (super()._round(normal, gradients) + (self.levels - 1) - self.levels // 2).to(torch.int8)


def mean_of_decoded(compress: KLevel, vector: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Mean and its standard error, over as many teachers with the same gradient."""
    rows = compress(gradients(vector.expand(draws, 1, -1))).rows.squeeze(1).to(torch.float64)
    decoded = Rotation(compress.size, compress.seed).inverse(rows, scale=1 / (compress.levels - 1))
    return decoded.mean(dim=0), decoded.std(dim=0) / math.sqrt(draws)


def expected(compress: KLevel, vector: Tensor) -> Tensor:
    clipped = vector.to(torch.float64).clamp(-compress.clip, compress.clip)
    return clipped / Rotation(compress.size, compress.seed).forward(clipped).abs().amax()


@pytest.mark.parametrize("levels", [2, 5, 16])
def test_quantised_gradients_are_unbiased_and_biased_twins_are_not(levels: int) -> None:
    """Teachers' draws are fixed by the seed, so nothing here is left to chance; 5 standard errors in 13 coordinates."""
    vector = torch.randn(13, generator=torch.Generator().manual_seed(5))
    honest = klevel(13, levels=levels, clip=1.5)
    mean, error = mean_of_decoded(honest, vector, 20_000)
    assert bool(((mean - expected(honest, vector)).abs() < 5 * error).all())
    for broken in (NearestLevel, AsPrinted):
        if broken is AsPrinted and levels == 2:
            continue  # −1 and +1 are 0 and … there: b[r] = −1 + 2r, the same
        twin = broken(levels=levels, clip=1.5, seed=0, size=13)
        mean, _ = mean_of_decoded(twin, vector, 2_000)
        assert not bool(((mean - expected(twin, vector)).abs() < 5 * error * math.sqrt(10)).all())


def test_one_row_of_a_sketch_is_unbiased_over_its_hashes_and_without_signs_it_is_not() -> None:
    vector = torch.tensor([[1.0, -1.0, 1.0, 1.0, 0.0, 1.0]])
    found, unsigned = [], []
    for seed in range(4000):
        one = Sketch(6, 1, 3, seed)
        found.append(one.estimates(one.forward(vector))[0])
        one.__dict__["_signs"] = torch.ones(1, 6)  # broken on purpose
        unsigned.append(one.estimates(one.forward(vector))[0])
    error = torch.stack(found).std(dim=0) / math.sqrt(4000)
    assert bool(((torch.stack(found).mean(dim=0) - vector[0]).abs() < 5 * error).all())
    assert bool(((torch.stack(unsigned).mean(dim=0) - vector[0]).abs() > 5 * error).any())


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"levels": 1}, {"levels": 129}, {"clip": 0.0}, {"clip": math.nan}])
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DatalensError, match=next(iter(changes))):
        klevel(4, **changes)


def options(**fields: Any) -> TrainOptions:
    given: dict[str, Any] = {"data": "toy", "out": Path("nowhere"), "teachers": 100, "steps": 5, "noise": "gaussian"}
    return TrainOptions(**(given | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"compress": "klevel", "levels": 1}, "--levels must be from 2"),
        ({"compress": "klevel", "k": 3}, "leave --k out"),
        ({"compress": "topk-sign", "levels": 4}, "belongs to --compress klevel"),
        ({"compress": "klevel", "sketch_rows": 4}, "belongs to --compress sketch"),
        ({"compress": "sketch", "sketch_columns": 0}, "--sketch-columns must be from 1"),
        ({"compress": "sketch", "noise": "discrete-gaussian"}, "sums real numbers"),
    ],
)
def test_options_that_do_not_fit_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(DatalensError, match=says):
        make_plan(options(**fields), SCHEMA)


def test_settings_of_another_compressor_are_refused_and_old_ones_still_read() -> None:
    _, sign = make_plan(options(), SCHEMA)
    assert "levels" not in sign.as_dict()
    assert TopAggSettings.from_dict(sign.as_dict()) == sign
    with pytest.raises(DatalensError, match="levels does not fit"):
        TopAggSettings.from_dict(sign.as_dict() | {"levels": 4})
    _, levels = make_plan(options(compress="klevel"), SCHEMA)
    assert levels.as_dict()["levels"] == 16
    with pytest.raises(DatalensError, match="levels does not fit"):
        TopAggSettings.from_dict({name: value for name, value in levels.as_dict().items() if name != "levels"})
    with pytest.raises(DatalensError, match="--levels"):
        check_settings(levels.as_dict() | {"levels": 1000}, SCHEMA)


# --- through the gate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["topk-sign", "sign", "topk", "klevel", "sketch"])
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_a_plan_spends_its_budget_on_rows_as_long_as_they_are(compress: Any, epsilon: float) -> None:
    budget, planned = make_plan(options(compress=compress, epsilon=epsilon), SCHEMA)
    rows = make_compress(planned)(gradients(torch.randn(4, planned.batch, planned.basis_size)))
    assert rows.l2_bound == planned.l2_bound
    assert rows.rows.shape[1:] == (planned.batch, planned.cells)
    ledger = Ledger.in_memory(budget)
    gate = GaussianSum(sigma=planned.sigma, noise=SecureNoise())
    for step in range(planned.steps):
        released = gate.release(sum_bounded([rows]), ledger, step=step)
    mu_squared = planned.steps * (2 * rows.l2_bound / planned.sigma) ** 2
    assert ledger.spent() == pytest.approx(exact_epsilon(mu_squared, budget.delta), rel=1e-6)
    assert 0.999 * epsilon < ledger.spent() <= epsilon
    assert isinstance(released.event, GaussianEvent)
    assert make_decode(planned, SCHEMA)(released).value.shape == (planned.batch, 1, 4, 5)


@pytest.mark.parametrize("compress", ["klevel", "sketch"])
def test_without_noise_the_direction_is_that_of_the_teachers(compress: Any) -> None:
    """Many teachers that agree: what is decoded points where their gradient does."""
    size = 20
    asked = options(compress=compress, epsilon=math.inf, basis="dct", basis_size=size, decode="linear", clip=1e9)
    _, planned = make_plan(dataclasses.replace(asked, k=size if compress == "sketch" else None), SCHEMA)
    assert planned.sigma == 0
    gradient = torch.randn(planned.batch, size, generator=torch.Generator().manual_seed(4))
    if compress == "sketch":
        gradient = gradient.sign()
    rows = make_compress(planned)(gradients(gradient.expand(400, -1, -1)))
    free = Ledger.in_memory(Budget(epsilon=math.inf, delta=1e-5, relation="add-remove", accountant="exact"))
    released = GaussianSum(sigma=0.0, noise=SecureNoise()).release(sum_bounded([rows]), free, step=0)
    decode = make_decode(planned, SCHEMA)
    found = decode.basis.forward(decode(released).value)
    cosine = torch.cosine_similarity(found, gradient, dim=1)
    assert bool((cosine > (0.99 if compress == "klevel" else 0.6)).all())
