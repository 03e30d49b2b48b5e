"""Fréchet distance against closed forms, its features, and the file that Inception-v3 comes in."""

import hashlib
import io
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

from datalens.cli import main
from datalens.data.named import sources, weights
from datalens.data.named.fetch import File, SourceFailedError
from datalens.errors import DatalensError
from datalens.evaluate import cache, inception_v3
from datalens.evaluate.features import Features, inception, pixels, prepared
from datalens.evaluate.fid import fid


def as_they_are(size: int) -> Features:
    return Features(name="themselves", fingerprint=f"test {size}", size=size, batch=1000, extract=lambda x: x)


def gaussian(count: int, size: int, *, mean: float = 0.0, spread: float = 1.0, seed: int = 0) -> np.ndarray:
    return mean + spread * np.random.default_rng(seed).standard_normal((count, size))


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (0.5, 1.0), (0.0, 2.0), (-1.0, 0.5)])
def test_shifted_and_scaled_gaussians(mean: float, spread: float) -> None:
    """d·(μ² + (1 − σ)²)."""
    found = fid(gaussian(20_000, 6, mean=mean, spread=spread, seed=1), gaussian(20_000, 6), as_they_are(6))
    assert found.fid == pytest.approx(6 * (mean**2 + (1 - spread) ** 2), rel=0.03, abs=0.01)
    assert (found.features, found.synthetic, found.real, found.fid_real) == ("themselves", 20_000, 20_000, None)
    assert found.enough


def test_correlated_features() -> None:
    """Against the formula, with a matrix root by another library."""
    random = np.random.default_rng(3)
    one, other = (random.standard_normal((300, 5)) @ random.standard_normal((5, 5)) for _ in range(2))
    a, b = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = scipy.linalg.sqrtm(a @ b).real
    expected = np.square(one.mean(axis=0) - other.mean(axis=0)).sum() + np.trace(a + b - 2 * root)
    assert fid(one, other, as_they_are(5)).fid == pytest.approx(expected, rel=1e-6)
    assert fid(other, one, as_they_are(5)).fid == pytest.approx(expected, rel=1e-6)


def test_a_set_has_no_distance_from_itself() -> None:
    images = np.random.default_rng(0).integers(0, 256, (400, 4, 4, 1), dtype=np.uint8)
    found = fid(images, images, pixels(16), held_out=images[::-1].copy())
    assert found.fid == pytest.approx(0, abs=1e-6) and found.fid_real == pytest.approx(0, abs=1e-6)
    assert found.features == "pixels: 16 values"
    assert not fid(images[:16], images, pixels(16)).enough
    with pytest.raises(DatalensError, match="at least two"):
        fid(images[:1], images, pixels(16))


def test_features_of_real_images_are_kept_for_the_owner_alone() -> None:
    seen: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x

    how = replace(as_they_are(4), extract=counted, fingerprint="counted")
    real, one, two = (gaussian(500, 4, seed=seed) for seed in (1, 2, 3))
    first = fid(one, real, how)
    assert seen == [500, 500]
    assert fid(one, real, how) == first and seen == [500] * 3  # the synthetic ones only
    assert fid(two, real, how) != first and seen == [500] * 4
    fid(one, real, how, fresh=True)
    assert seen == [500] * 6
    files = list(cache.folder().glob("moments-*"))
    assert files and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


# --- Inception-v3 ---------------------------------------------------------------------------------------------------


def test_images_are_shown_as_the_weights_expect_them() -> None:
    grey = np.full((2, 28, 28, 1), 255, np.uint8)
    grey[1] = 0
    shown = prepared(torch.tensor(grey))
    assert shown.shape == (2, 3, 299, 299)
    assert torch.allclose(shown[0], torch.tensor(127 / 128)) and torch.allclose(shown[1], torch.tensor(-1.0))
    colours = torch.randint(0, 256, (1, 32, 32, 4), dtype=torch.uint8)
    assert torch.equal(prepared(colours), prepared(colours[..., :3]))  # without alpha
    assert torch.equal(prepared(colours[..., :2]), prepared(colours[..., :1]))
    assert not torch.equal(prepared(colours), prepared(colours, "bicubic"))
    bicubic = prepared(torch.randint(0, 2, (1, 8, 8, 3), dtype=torch.uint8) * 255, "bicubic")
    assert bicubic.min() >= -1 and bicubic.max() <= 127 / 128  # it overshoots
    fine = torch.zeros((1, 598, 598, 3), dtype=torch.uint8)
    fine[:, ::2, ::2] = 255
    assert prepared(fine)[..., 10:-10, 10:-10].std() < 0.1  # smoothed, not sampled


@dataclass(frozen=True)
class Given:
    data: bytes | None

    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        if self.data is None:
            raise SourceFailedError("not reachable")
        yield wanted[0], self.data


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """Stands for the file: what is in it does not matter to whoever fetches it."""
    data = b"weights of a network"
    file = File(name="default_1.pt", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path))
    monkeypatch.setitem(
        weights.WEIGHTS, "inception", replace(weights.WEIGHTS["inception"], file=file, source=Given(data))
    )
    return data


def test_weights_are_fetched_checked_and_kept(tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not weights.cached("inception")
    here = weights.get("inception")
    assert here == sources.folder("extractors") / "inception"
    assert weights.cached("inception") and weights.read("inception") == tiny
    known = weights.WEIGHTS["inception"]
    monkeypatch.setitem(weights.WEIGHTS, "inception", replace(known, source=Given(None)))
    assert weights.get("inception") == here  # without asking anybody
    (here / known.file.name).write_bytes(tiny[:-1] + b"x")
    assert not weights.cached("inception")
    for bad in (None, b"", tiny[:-1]):
        monkeypatch.setitem(weights.WEIGHTS, "inception", replace(known, source=Given(bad)))
        with pytest.raises(DatalensError, match=r"put its default_1.pt into .*--features own"):
            weights.read("inception")
    monkeypatch.setitem(weights.WEIGHTS, "inception", known)
    assert weights.read("inception") == tiny  # fetched again


def test_the_command_brings_the_weights(tiny: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in (
        ("list", "download it: datalens data get inception"),
        ("get", "inception"),
        ("list", "for FID\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            main.main(["data", command, *(["inception"] if command == "get" else [])])
        assert not ended.value.code
        assert words in capsys.readouterr().out
    assert weights.cached("inception")


class Colours(torch.nn.Module):
    """Means of the three colours, over and over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(2, 3)).repeat(1, 683)[:, :2048]


def test_features_by_the_file(tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def load(data: bytes) -> torch.nn.Module:
        read.append(data)
        return Colours()

    monkeypatch.setattr(inception_v3, "load", load)
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
    how = inception("cpu")
    assert read == [tiny]
    assert "Inception-v3" in how.name and "bilinear" in how.name
    found = how.of(images, "test")
    assert found.shape == (60, 2048) and found.dtype == torch.float32
    assert found[:, 0].numpy() == pytest.approx(images.mean(axis=(1, 2, 3)) / 128 - 1, abs=0.2)


def test_arrays_are_read_in_the_networks_order() -> None:
    """Number by number, as the file has them; whether that is right, the published file says (below)."""
    net = inception_v3.network()
    state = net.state_dict()
    assert len(state) == 376 and sum(value.numel() for value in state.values()) == 21_802_784
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number, value in enumerate(state.values()):
            archive.writestr(f"out_jit_module/data/{number}", torch.full_like(value, number + 1.0).numpy().tobytes())
    loaded = inception_v3.load(out.getvalue())
    assert [value.flatten()[-1].item() for value in loaded.state_dict().values()] == list(range(1, 377))
    with torch.inference_mode():
        assert net(torch.zeros(1, 3, 299, 299)).shape == (1, 2048)


@pytest.mark.slow
def test_the_published_file() -> None:
    """Needs the file, or the network. Our features are those of the program in the file.

    Whether it is the network that FID is defined by: see benchmarks.fid_check.
    """
    images = torch.tensor(sources.load("cifar10", "test").images[:4])
    theirs = torch.jit.load(io.BytesIO(weights.read("inception"))).eval()
    with torch.inference_mode():
        expected = theirs(prepared(images))
        assert torch.allclose(inception("cpu").extract(images), expected, atol=1e-4)
    assert expected.shape == (4, 2048) and expected.std() > 0.1
