"""The coordinates teachers vote in: orthonormal, public, and the DCT that scipy computes."""

import numpy as np
import pytest
import torch
from scipy.fft import dctn

from datalens.public.basis import make_basis

SHAPES = [(1, 8, 8), (1, 5, 9), (3, 6, 4), (2, 1, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 10, None])
def test_rows_are_orthonormal(shape: tuple[int, int, int], size: int | None) -> None:
    basis = make_basis("dct", shape, size)
    assert basis.rows is not None
    gram = basis.rows.double() @ basis.rows.double().T
    torch.testing.assert_close(gram, torch.eye(basis.size, dtype=torch.float64), rtol=0, atol=1e-6)
    assert basis.size == (size or int(np.prod(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_full_basis_is_scipys_dct(shape: tuple[int, int, int]) -> None:
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    coordinates = make_basis("dct", shape, None).forward(images)
    theirs = dctn(images.double().numpy(), axes=(2, 3), norm="ortho")
    # The same numbers, ours by rising frequency with the channels side by side.
    np.testing.assert_allclose(np.sort(coordinates.numpy()), np.sort(theirs.reshape(4, -1)), atol=1e-5)
    order = sorted(
        ((r / shape[1]) ** 2 + (c / shape[2]) ** 2, r, c, channel)
        for channel in range(shape[0])
        for r in range(shape[1])
        for c in range(shape[2])
    )
    expected = np.stack([theirs[:, channel, r, c] for _, r, c, channel in order], axis=1)
    np.testing.assert_allclose(coordinates.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back_is_the_identity(shape: tuple[int, int, int]) -> None:
    images = torch.rand(3, 2, *shape, generator=torch.Generator().manual_seed(1))
    full = make_basis("dct", shape, None)
    torch.testing.assert_close(full.inverse(full.forward(images)), images, rtol=0, atol=1e-5)
    few = make_basis("dct", shape, 4)
    coordinates = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    assert few.inverse(coordinates).shape == (3, *shape)
    torch.testing.assert_close(few.forward(few.inverse(coordinates)), coordinates, rtol=0, atol=1e-5)
    # What lies outside the span is lost: so it is a projection, and never longer than the image.
    assert (few.forward(images).norm(dim=-1) <= images.flatten(-3).norm(dim=-1) + 1e-5).all()
    assert not torch.allclose(few.inverse(few.forward(images)), images, atol=1e-3)


def test_the_inverse_is_the_adjoint() -> None:
    basis = make_basis("dct", (1, 6, 6), 10)
    image, coordinates = torch.rand(1, 6, 6), torch.rand(10)
    left = (basis.forward(image) * coordinates).sum()
    right = (image * basis.inverse(coordinates)).sum()
    torch.testing.assert_close(left, right)


def test_pixels_are_themselves() -> None:
    basis = make_basis("pixel", (3, 4, 5), 7)  # the size belongs to the cosines: pixels come in full
    assert basis.rows is None
    assert basis.size == 60
    images = torch.rand(2, 3, 4, 5)
    assert torch.equal(basis.forward(images), images.flatten(1))
    assert torch.equal(basis.inverse(basis.forward(images)), images)


def test_lowest_frequencies_first_and_no_more_than_there_are() -> None:
    flat = torch.full((1, 4, 4), 0.5)
    coordinates = make_basis("dct", (1, 4, 4), 16).forward(flat)
    assert coordinates[0] == pytest.approx(0.5 * 4)
    assert coordinates[1:].abs().max() < 1e-6
    assert make_basis("dct", (1, 4, 4), 99).size == 16


def test_the_basis_takes_the_type_of_what_it_is_given() -> None:
    basis = make_basis("dct", (1, 4, 4), 5)
    assert basis.forward(torch.rand(1, 4, 4, dtype=torch.float64)).dtype == torch.float64
    assert basis.inverse(torch.rand(5, dtype=torch.float64)).dtype == torch.float64
