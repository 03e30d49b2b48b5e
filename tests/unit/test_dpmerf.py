"""Random features of whole numbers, their class sums, and what is read from a noisy release of them."""

import math

import numpy as np
import pytest
import torch

from datalens.data.records import Dataset
from datalens.data.schema import Schema
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.private.embedding import embed
from datalens.private.pool import Pool
from datalens.public.fourier import Fourier, bandwidth
from datalens.released.embedding import fit, read_embedding
from datalens.released.generator import Architecture, Generator

SHAPE, GRID, COUNTED = (1, 8, 8), 2**16, 2**15
SCHEMA = Schema(name="own", height=8, width=8, channels=1, classes=("a", "b", "none"), nominal_size=300)
LUCK = np.random.default_rng(0)
IMAGES = LUCK.integers(0, 256, (300, 8, 8, 1), dtype=np.uint8)
LABELS = np.arange(300) % 2


def pool(images: np.ndarray = IMAGES, labels: np.ndarray = LABELS) -> Pool:
    return Pool.gather(Dataset(schema=SCHEMA, images=images, labels=labels), device=torch.device("cpu"))


def exactly(records: Pool, fourier: Fourier) -> np.ndarray:
    """The sums themselves, through a gate without noise."""
    return released(records, fourier, sigma=0.0).value


def released(records: Pool, fourier: Fourier, *, sigma: float):
    ledger = Ledger.in_memory(Budget(epsilon=math.inf, delta=0.5, relation="add-remove", accountant="exact"))
    sums = embed(records, fourier, classes=3, grid=GRID, counted=COUNTED)
    return GaussianSum(sigma=sigma, noise=SecureNoise()).release(sums, ledger, step=0)


def test_inner_products_are_a_gaussian_kernel() -> None:
    fourier = Fourier(SHAPE, 20_000, seed=0)
    images = torch.from_numpy(IMAGES[:6]).permute(0, 3, 1, 2).to(torch.float64) / 255
    found = fourier.features(images)
    distance = torch.cdist(images.flatten(1), images.flatten(1)).square()
    squared = bandwidth(SHAPE) ** 2
    assert squared == pytest.approx(64 / 6 / 4)
    torch.testing.assert_close(found @ found.T, torch.exp(-distance / (2 * squared)), atol=0.03, rtol=0)
    assert not torch.allclose(found @ found.T, torch.exp(-distance / squared), atol=0.03)


def test_whole_features_are_the_features() -> None:
    fourier = Fourier(SHAPE, 500, seed=0)
    images = torch.from_numpy(IMAGES[:50]).permute(0, 3, 1, 2)
    whole = fourier.whole(images, grid=GRID)
    assert torch.equal(whole, whole.round())
    torch.testing.assert_close(
        whole / GRID, fourier.features(images.to(torch.float64) / 255), atol=2e-3 / math.sqrt(500), rtol=0
    )


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_no_row_is_longer_than_the_grid(count: int) -> None:
    extremes = torch.stack([torch.zeros(1, 8, 8), torch.full((1, 8, 8), 255.0)]).to(torch.uint8)
    for images in (extremes, torch.from_numpy(IMAGES).permute(0, 3, 1, 2)):
        norms = Fourier(SHAPE, count, seed=1).whole(images, grid=100).norm(dim=1)
        assert float(norms.max()) <= 100
        assert count == 1000 or float(norms.min()) > 90  # nothing is given away, either


def test_a_record_moves_its_own_class_by_its_own_row() -> None:
    """Whatever the others are, and however many: to the last bit."""
    fourier = Fourier(SHAPE, 300, seed=0)
    whole = exactly(pool(), fourier)
    for gone in (0, 7, 299):
        less = exactly(pool(np.delete(IMAGES, gone, 0), np.delete(LABELS, gone)), fourier)
        alone = exactly(pool(IMAGES[gone : gone + 1], LABELS[gone : gone + 1]), fourier)
        assert np.array_equal(whole - less, alone)
        assert 0.9 * GRID < np.linalg.norm(alone) <= GRID
        assert set(np.nonzero(alone.any(axis=1))[0]) == {LABELS[gone]}


def test_the_sum_knows_whose_rows_it_has() -> None:
    sums = embed(pool(), Fourier(SHAPE, 10, seed=0), classes=3, grid=GRID, counted=COUNTED)
    assert (sums.row_unit, sums.l2_bound, sums.diameter, sums.queries) == ("record", GRID, 2 * GRID, 3)


def test_means_are_read_back_and_an_empty_class_is_not_invented() -> None:
    fourier = Fourier(SHAPE, 300, seed=0)
    found = read_embedding(released(pool(), fourier, sigma=GRID / 100), grid=GRID, counted=COUNTED)
    assert found.present.tolist() == [True, True, False]
    images = torch.from_numpy(IMAGES).permute(0, 3, 1, 2).to(torch.float64) / 255
    own = fourier.features(images)[torch.from_numpy(LABELS) == 0].mean(dim=0)
    assert float((found.means[0] - own).norm()) < 0.02
    assert not found.means[2].any()
    with pytest.raises(TypeError, match="released values only"):
        read_embedding(found.means, grid=GRID, counted=COUNTED)  # type: ignore[arg-type]


def test_the_generator_comes_to_match() -> None:
    """Bright images of one class, dark ones of the other: after training, so are the generator's."""
    images = np.where((LABELS == 0)[:, None, None, None], 230, 25).astype(np.uint8) + IMAGES // 32
    fourier = Fourier(SHAPE, 200, seed=0)
    target = read_embedding(released(pool(images), fourier, sigma=10.0), grid=GRID, counted=COUNTED)
    shape = Architecture(shape=SHAPE, classes=3, latent=4, latent_law="normal", dense=16, widths=(8, 8))
    torch.manual_seed(0)  # the first weights; the noise is nobody's to choose
    made = fit(Generator(shape), target, fourier, steps=150, batch=8, rate=0.02, seed=0).eval()
    with torch.no_grad():
        drawn = made.images(torch.tensor([0] * 10 + [1] * 10), torch.Generator().manual_seed(0))
    assert float(drawn[:10].mean()) > 0.75
    assert float(drawn[10:].mean()) < 0.25
