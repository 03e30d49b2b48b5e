"""Public texture features: their shape for any image, a gradient for all of it, and nothing where there is nothing."""

import math

import pytest
import torch
from torch import Tensor

from datalens.public.texture import FINEST, LARGEST, ORIENTATIONS, SCALES, Texture

PLANES = ORIENTATIONS * len(SCALES)
SHAPES = [
    (2, 17, 13),
    (4, 12, 12),
    *((channels, side, side) for channels in (1, 3) for side in (8, 28, 32, 33, 64, 128)),
    *((1, 9, 31), (3, 31, 9), (1, 130, 70), (1, 5, 5), (1, 17, 13)),
]


def noise(shape: tuple[int, int, int], count: int = 3, *, seed: int = 0) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


def cells(shape: tuple[int, int, int]) -> tuple[int, int]:
    shrink = max(1, math.ceil(max(shape[1:]) / LARGEST))
    return tuple(max(1, min(FINEST, math.ceil(side / shrink) // 4)) for side in shape[1:])  # type: ignore[return-value]


def split(texture: Texture, shape: tuple[int, int, int], images: Tensor) -> tuple[Tensor, Tensor]:
    """Light and colour [n, channels, cells], moduli [n, scales, orientations, down, across]."""
    features, (down, across) = texture(images), cells(shape)
    light, moduli = features.split([shape[0] * down * across, PLANES * down * across], dim=1)
    return light.view(len(images), shape[0], -1), moduli.view(len(images), len(SCALES), ORIENTATIONS, down, across)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_its_features(shape: tuple[int, int, int]) -> None:
    texture = Texture(shape)
    down, across = cells(shape)
    assert texture.size == down * across * (PLANES + shape[0])
    found = texture(noise(shape))
    assert found.shape == (3, texture.size)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert len(found.unique(dim=0)) == 3
    assert texture(noise(shape, 0)).shape == (0, texture.size)


def test_a_grid_has_at_most_so_many_cells_and_at_least_one() -> None:
    assert Texture((1, 28, 28)).size == 49 * 17
    assert Texture((3, 32, 32)).size == 49 * 19
    assert Texture((3, 128, 128)).size == 49 * 19
    assert Texture((1, 8, 8)).size == 4 * 17
    assert Texture((1, 3, 3)).size == 17


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 31), (1, 28, 28), (3, 64, 64)])
def test_every_pixel_has_a_gradient(shape: tuple[int, int, int]) -> None:
    images = noise(shape).requires_grad_()
    texture = Texture(shape)
    weights = torch.linspace(1, 2, texture.size)
    (texture(images) * weights).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()
    assert (images.grad != 0).float().mean() > 0.99


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_flat_images_have_a_gradient_too(value: float) -> None:
    images = torch.full((2, 1, 12, 12), value, requires_grad=True)
    Texture((1, 12, 12))(images).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()


def test_the_gradient_is_the_slope() -> None:
    shape = (3, 5, 6)
    images = noise(shape, 1).double().requires_grad_()
    assert torch.autograd.gradcheck(Texture(shape), (images,), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_flat_light_has_no_texture_but_at_the_border(shape: tuple[int, int, int]) -> None:
    """Beyond the border it is dark: an edge, and in the cells next to it there is one."""
    texture = Texture(shape)
    light, moduli = split(texture, shape, torch.full((1, *shape), 0.7))
    assert float(moduli[..., 2:-2, 2:-2].max()) < 0.01
    assert float(moduli.max()) > 0.1
    bright = 0.7 * math.sqrt(shape[0])  # of the whole light, as an orthonormal plane has it
    assert light[0, 0].tolist() == pytest.approx([bright] * len(light[0, 0]), abs=1e-5)
    assert float(light[0, 1:].abs().sum()) < 1e-4  # grey has no colour


def test_black_images_have_nothing() -> None:
    light, moduli = split(Texture((1, 28, 28)), (1, 28, 28), torch.zeros(1, 1, 28, 28))
    assert not light.any()
    assert float(moduli.max()) <= 1.1e-3  # the root of what is under it for the gradient


def test_brightness_scales_and_whole_pixels_are_the_same() -> None:
    shape = (3, 30, 30)
    texture, whole = Texture(shape), (noise(shape) * 255).round()
    assert torch.allclose(texture(whole.double(), full=255.0), texture(whole.double() / 255), atol=1e-6)
    assert torch.allclose(texture(whole / 255), texture(whole.double() / 255).float(), atol=1e-4)


@pytest.mark.parametrize("number", range(ORIENTATIONS))
@pytest.mark.parametrize("scale", range(len(SCALES)))
def test_a_wave_answers_in_its_own_orientation_and_scale(number: int, scale: int) -> None:
    shape = (1, 32, 32)
    angle, frequency = math.pi * number / ORIENTATIONS, SCALES[scale][2]
    down, across = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    wave = 0.5 + 0.5 * torch.cos(frequency * (across * math.cos(angle) + down * math.sin(angle)))
    _, moduli = split(Texture(shape), shape, wave[None, None])
    middle = moduli[0, :, :, 2:5, 2:5].mean(dim=(-1, -2))
    strongest = int(middle.argmax())
    assert (strongest // ORIENTATIONS, strongest % ORIENTATIONS) == (scale, number)


def test_a_turned_image_has_turned_texture() -> None:
    """By a quarter: orientations move by half of all, cells turn with it."""
    shape = (1, 29, 29)  # of odd size, so that steps of two pixels fall on themselves
    images = noise(shape)
    texture = Texture(shape)
    _, moduli = split(texture, shape, images)
    _, turned = split(texture, shape, torch.rot90(images, 1, (-2, -1)))
    expected = torch.rot90(moduli, 1, (-2, -1)).roll(ORIENTATIONS // 2, dims=2)
    assert torch.allclose(turned, expected, atol=1e-4)


def test_large_images_are_averaged_first() -> None:
    small = noise((3, 32, 32))
    large = small.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    assert torch.allclose(Texture((3, 128, 128))(large), Texture((3, 32, 32))(small), atol=1e-4)


def test_colour_is_seen_as_light_and_two_differences() -> None:
    shape = (3, 28, 28)
    red = torch.zeros(1, *shape)
    red[:, 0] = 1.0
    light, _ = split(Texture(shape), shape, red)
    expected = [1 / math.sqrt(3), 1 / math.sqrt(2), 1 / math.sqrt(6)]
    assert light[0].mean(dim=1).tolist() == pytest.approx(expected, abs=1e-5)
