"""From noisy moments to images: noise is taken away where it can be, and only released values are read."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from datalens.errors import DatalensError
from datalens.privacy.events import GaussianEvent
from datalens.privacy.released import Released
from datalens.public import streams
from datalens.public.texture import Texture
from datalens.public.threads import one_core_each
from datalens.released import moments
from datalens.released.drawing import draw, in_proportion
from datalens.released.release import load_generator


def released(value: np.ndarray, sigma: float = 1.0) -> Released:
    facts = {"row_unit": "record", "relation": "add-remove", "noise": "seeded", "queries": 1, "step": 0}
    event = GaussianEvent(l2_bound=1.0, diameter=2.0, sigma=sigma, **facts)  # type: ignore[arg-type]
    return Released(value=value, event=event, number=0)


def covariance(size: int, rank: int, seed: int) -> Tensor:
    factor = torch.randn(size, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return factor @ factor.mT


def wigner(size: int, scale: float, seed: int) -> Tensor:
    """Symmetric noise whose spectrum ends at ±2·scale."""
    cells = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (cells + cells.mT) / 2 * scale / math.sqrt(size / 2)


def test_shrinking_removes_what_is_noise_alone() -> None:
    noise = wigner(300, 1.0, 0)
    assert 1.8 < float(torch.linalg.eigvalsh(noise)[-1]) < 2.1  # the law the correction rests on
    assert float(moments.shrink(noise, 1.05).abs().max()) == 0.0
    assert float(moments.shrink(noise, 0.5).abs().max()) > 0.0  # with too small an idea of the noise it would stay


def test_shrinking_gives_spikes_their_height_back() -> None:
    spike = torch.zeros(300, 300, dtype=torch.float64)
    spike[0, 0] = 5.0
    noisy = spike + wigner(300, 1.0, 1)
    assert float(torch.linalg.eigvalsh(noisy)[-1]) == pytest.approx(5.2, abs=0.15)  # θ + 1/θ
    assert float(torch.linalg.eigvalsh(moments.shrink(noisy, 1.0))[-1]) == pytest.approx(5.0, abs=0.15)


def test_cleaning_brings_covariances_closer() -> None:
    common = covariance(80, 6, 0)
    truth = torch.stack([common + covariance(80, 2, number) for number in (1, 2, 3, 4)])
    noise = torch.full((4,), 6.0, dtype=torch.float64)
    noisy = truth + torch.stack([wigner(80, 6.0, 10 + number) for number in range(4)])
    cleaned = moments.clean(noisy, noise, torch.full((4,), 100.0, dtype=torch.float64))
    assert float((cleaned - truth).norm()) < 0.6 * float((noisy - truth).norm())
    assert float(torch.linalg.eigvalsh(cleaned).min()) > -1e-9
    own = torch.stack([moments.shrink(matrix, 6.0) for matrix in noisy])
    assert float((cleaned - truth).norm()) < float((own - truth).norm())  # what classes share is seen by all of them


def test_a_single_class_is_its_own_common() -> None:
    truth = covariance(40, 3, 0).unsqueeze(0)
    cleaned = moments.clean(truth, torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(cleaned, truth, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(("share", "edge"), [(0.1, 2.0), (0.5, 4.0), (0.75, 4.0), (0.76, 8.0), (1.0, 16.0)])
def test_quantiles_of_a_histogram(share: float, edge: float) -> None:
    edges = torch.tensor([0.0, 2.0, 4.0, 8.0, 16.0])
    assert moments.quantile_edge(released(np.array([[50, 100, 40, 10]])), edges, share) == edge


def test_a_histogram_of_noise_gives_some_edge() -> None:
    edges = torch.tensor([0.0, 2.0, 4.0])
    assert moments.quantile_edge(released(np.array([[-5, -3]])), edges, 0.9) in (2.0, 4.0)


def test_means_and_counts_come_back() -> None:
    grid, counted = 2**14, 2**13
    room = int((grid**2 - counted**2) ** 0.5)
    value = np.array([[room * 7 // 2, 0, 7 * counted], [0, 0, 0]])
    means, counts = moments.class_means(released(value), clip=3.0, grid=grid, counted=counted, floor=5.0)
    assert counts.tolist() == [7.0, 0.0]
    assert means[0].tolist() == pytest.approx([1.5, 0.0], rel=1e-3)
    assert means[1].tolist() == [0.0, 0.0]  # a class without records: noise by the floor, not by zero


def test_covariances_come_back_in_units_of_pixels() -> None:
    truth, grid, clip, count = covariance(5, 5, 3) / 5, 2**14, 4.0, 50.0
    value = (truth * count * grid**2 / clip**2).reshape(1, -1).numpy().round()
    counts = torch.tensor([count], dtype=torch.float64)
    found = moments.class_covariances(released(value, sigma=0.0), counts, clip=clip, grid=grid, floor=1.0)
    torch.testing.assert_close(found[0], truth, atol=1e-6, rtol=1e-6)


def test_only_released_values_are_read() -> None:
    for value in (np.zeros((1, 4)), torch.zeros(1, 4), None):
        with pytest.raises(TypeError, match="released values only"):
            moments.quantile_edge(value, torch.arange(5.0), 0.5)  # type: ignore[arg-type]


# --- the generator ------------------------------------------------------------------------------

SHAPE = (1, 12, 12)


def start(classes: int = 2, size: int = 20) -> moments.Start:
    means = torch.zeros(classes, size, dtype=torch.float64)
    means[:, 0] = torch.linspace(3.0, 8.0, classes)
    covariances = torch.stack([torch.eye(size, dtype=torch.float64) * 0.05] * classes)
    return moments.make_start(SHAPE, means, covariances)


@pytest.fixture(scope="module")
def model() -> moments.MomentModel:
    first = start()
    present = torch.arange(2)
    whitening = moments.make_whitening(first, present, seed=0)
    own = [whitening.values[whitening.labels == label] for label in (0, 1)]
    shift = torch.zeros(whitening.values.shape[1], dtype=torch.float64)
    shift[:5] = 2.0
    means = torch.stack([part.mean(dim=0) + shift for part in own])
    covariances = torch.stack([2.0 * torch.cov(part[:, :10].mT) for part in own])
    return moments.make_model(
        first,
        whitening,
        present=present,
        counts=torch.tensor([300.0, 100.0]),
        means=means,
        covariances=covariances,
        steps=30,
    )


def test_first_images_have_the_moments_that_were_asked_for() -> None:
    first = start()
    images = first.images(torch.zeros(4000, dtype=torch.int64), streams.generator(0, "x"))
    coordinates = first.basis.forward(images)
    torch.testing.assert_close(coordinates.mean(dim=0), first.means[0], atol=0.05, rtol=0.05)
    spread = torch.cov(coordinates.mT)
    assert float(spread.diagonal().mean()) == pytest.approx(0.05, rel=0.15)


def test_whitened_texture_is_white() -> None:
    whitening = moments.make_whitening(start(), torch.arange(2), seed=0)
    spread = torch.cov(whitening.values.mT)
    assert 0.5 < float(spread[0, 0]) <= 1.01
    assert float((spread - torch.diag(spread.diagonal())).abs().max()) < 1e-6


def test_texture_goes_where_it_should(model: moments.MomentModel) -> None:
    """Images end nearer to the released means than they began."""
    labels = torch.arange(200) % 2
    texture = Texture(SHAPE)

    def distance(images: Tensor) -> float:
        found = (texture(images) - model.centre) @ model.white
        return float((found[labels == 0].mean(dim=0) - model.after[0]).norm())

    before = distance(model.start.images(labels, streams.generator(1, "x")))
    after = distance(model.images(labels, streams.generator(1, "x")))
    assert after < 0.85 * before


def test_maps_carry_one_covariance_to_the_other(model: moments.MomentModel) -> None:
    values = moments.make_whitening(start(), torch.arange(2), seed=0)
    own = values.values[values.labels == 0][:, :10].to(torch.float32)
    moved = torch.cov((own @ model.maps[0].mT).mT)
    torch.testing.assert_close(moved, 2.0 * torch.cov(own.mT), atol=0.02, rtol=0.02)


def test_images_are_images(model: moments.MomentModel) -> None:
    images, labels = draw(model, count=7, seed=3, classes=2, balanced=True)
    assert images.shape == (7, 12, 12, 1)
    assert images.dtype == np.uint8
    assert labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert np.array_equal(images, draw(model, count=7, seed=3, classes=2, balanced=True)[0])


def test_images_do_not_depend_on_threads(model: moments.MomentModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of labels are cut into pieces, of which several are made side by side: of the same random numbers."""
    labels, before = torch.arange(23) % 2, torch.get_num_threads()
    monkeypatch.setattr(moments, "PIECE", 4)
    random = streams.generator(1, "x")
    expected = [model.images(part, random) for part in labels.split(10)]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found = list(model.batches(labels.split(10), streams.generator(1, "x")))
            assert [len(part) for part in found] == [10, 10, 3]
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_whitening_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "WHITENING", 3000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with one_core_each():
                found.append(moments.make_whitening(start(), torch.arange(2), seed=0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0].values, found[1].values) and torch.equal(found[0].matrix, found[1].matrix)


def test_the_steps_are_those_of_adam() -> None:
    goal = torch.linspace(-1, 1, 12).view(3, 4)

    def loss(x: Tensor) -> Tensor:
        return (x.sin() - goal).square().sum()

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found, adam = moments._descend(x.detach(), loss, 12), torch.optim.Adam([x], lr=moments.RATE)
    for _ in range(12):
        adam.zero_grad()
        loss(x).backward()
        adam.step()
    assert torch.equal(found, x.detach())


def test_classes_that_are_not_there_are_not_drawn(model: moments.MomentModel) -> None:
    only = dataclasses.replace(model, present=torch.tensor([1]), sizes=torch.ones(1))
    assert set(draw(only, count=5, seed=0, classes=2)[1].tolist()) == {1}


# --- its file -----------------------------------------------------------------------------------


def written(model: moments.MomentModel, folder: Path, **changed: Tensor) -> Path:
    import json

    described = {"moments": {"shape": SHAPE, "steps": model.steps}, "classes": ["a", "b"]}
    tensors = {name: value.contiguous() for name, value in (model.tensors() | changed).items()}
    save_file(tensors, folder / "generator.safetensors", metadata={"generator": json.dumps(described)})
    return folder


def test_a_file_gives_the_same_images(model: moments.MomentModel, tmp_path: Path) -> None:
    again, classes = load_generator(written(model, tmp_path))
    assert classes == ("a", "b")
    assert np.array_equal(draw(again, count=4, seed=0, classes=2)[0], draw(model, count=4, seed=0, classes=2)[0])
    plain = moments.without_texture(model.start, model.present, torch.tensor([3.0, 1.0]))
    again, _ = load_generator(written(plain, tmp_path))
    assert np.array_equal(draw(again, count=4, seed=0, classes=2)[0], draw(plain, count=4, seed=0, classes=2)[0])


def test_classes_come_as_often_as_they_were_counted(model: moments.MomentModel, tmp_path: Path) -> None:
    def labels(model: moments.MomentModel, **more: bool) -> list[int]:
        return np.bincount(draw(model, count=40, seed=0, classes=2, **more)[1], minlength=2).tolist()

    plain = moments.without_texture(model.start, model.present, torch.tensor([300.0, 100.0]))
    assert labels(plain) in ([29, 11], [30, 10], [31, 9])
    assert labels(plain, balanced=True) == [20, 20]
    path = written(plain, tmp_path) / "generator.safetensors"
    tensors, described = load_file(path), safe_open(path, "pt").metadata()
    tensors.pop("sizes")  # a release of the first version
    save_file(tensors, path, metadata=described)
    old, _ = load_generator(tmp_path)
    assert isinstance(old, moments.MomentModel) and labels(old) == [20, 20]


@pytest.mark.parametrize("sizes", [[1.0], [5.0, 1.0], [1e-3, 1e3, 1.0], [1.0] * 10, [600.0, 1.0, 1.0, 80.0]])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_proportions_hold_at_any_length(sizes: list[float], count: int) -> None:
    found = torch.bincount(in_proportion(torch.tensor(sizes, dtype=torch.float64), count), minlength=len(sizes))
    wanted = torch.tensor(sizes, dtype=torch.float64) / sum(sizes) * count
    assert found.sum() == count and len(found) == len(sizes)
    assert (found - wanted).abs().max() < 3.5


@pytest.mark.parametrize(
    "changed",
    [
        {"means": torch.zeros(3, 20)},
        {"factors": torch.zeros(2, 20, 21)},
        {"maps": torch.zeros(2, 500, 500)},
        {"present": torch.tensor([2])},
        {"present": torch.tensor([-1])},
        {"present": torch.zeros(0, dtype=torch.int64)},
        {"present": torch.tensor([0.0])},
        {"white": torch.zeros(3, 3)},
        {"more": torch.zeros(1)},
        {"centre": torch.zeros(1, dtype=torch.float64)},
        {"sizes": torch.ones(3)},
        {"sizes": torch.tensor([1.0, 0.0])},
        {"sizes": torch.tensor([1.0, float("nan")])},
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_is_refused(
    model: moments.MomentModel, tmp_path: Path, changed: dict[str, Tensor]
) -> None:
    with pytest.raises(DatalensError, match="not a generator of datalens"):
        load_generator(written(model, tmp_path, **changed))


def test_a_tensor_too_few_is_refused(model: moments.MomentModel, tmp_path: Path) -> None:
    path = written(model, tmp_path) / "generator.safetensors"
    tensors = load_file(path)
    tensors.pop("after")
    save_file(tensors, path, metadata={"generator": '{"moments": {"shape": [1, 12, 12], "steps": 1}, "classes": []}'})
    with pytest.raises(DatalensError, match="not a generator of datalens"):
        load_generator(tmp_path)


@pytest.mark.parametrize("shape", [[1, 2000, 2000], [5, 12, 12], [1, 0, 12], [3, 700, 700], [1, 12]])
def test_a_description_of_any_size_is_refused(model: moments.MomentModel, tmp_path: Path, shape: list[int]) -> None:
    """Before the memory for it is taken."""
    import json

    path = written(model, tmp_path) / "generator.safetensors"
    described = {"moments": {"shape": shape, "steps": 0}, "classes": ["a", "b"]}
    save_file(load_file(path), path, metadata={"generator": json.dumps(described)})
    with pytest.raises(DatalensError, match="not a generator of datalens"):
        load_generator(tmp_path)
