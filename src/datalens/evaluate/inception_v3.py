"""Inception-v3 up to its 2048 features (Szegedy et al. 2016), as published by TensorFlow in 2015: FID is defined by it.

The weights come in a TorchScript file. Only its arrays are read, in the order of the network's buffers; nothing in it
is unpickled or run.
"""

import io
import zipfile

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

_FOLDER = "out_jit_module/data"  # folder of the arrays in the TorchScript file
_Kernel = int | tuple[int, int]


class _Conv(nn.Module):
    """A convolution, batch norm without a gain, and relu."""

    def __init__(self, channels: int, out: int, kernel: _Kernel, *, stride: int = 1, padded: bool = True) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.register_buffer("weight", torch.zeros(out, channels, height, width))
        for name in ("beta", "mean", "var"):
            self.register_buffer(name, torch.zeros(out))
        self._stride = stride
        self._padding = (height // 2, width // 2) if padded else (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        values = dict(self.named_buffers())
        x = F.conv2d(x, values["weight"], stride=self._stride, padding=self._padding)
        return F.relu_(F.batch_norm(x, values["mean"], values["var"], bias=values["beta"], eps=1e-3))


class _Beside(nn.ModuleList):
    """Parallel branches with the same input, whose outputs are concatenated along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


def _mean() -> nn.Module:
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)


def _half() -> nn.Module:
    return nn.MaxPool2d(3, stride=2)


def _block_a(channels: int, pooled: int) -> nn.Module:
    return _Beside(
        [
            _Conv(channels, 64, 1),
            nn.Sequential(_Conv(channels, 48, 1), _Conv(48, 64, 5)),
            nn.Sequential(_Conv(channels, 64, 1), _Conv(64, 96, 3), _Conv(96, 96, 3)),
            nn.Sequential(_mean(), _Conv(channels, pooled, 1)),
        ]
    )


def _block_b() -> nn.Module:
    return _Beside(
        [
            _Conv(288, 384, 3, stride=2, padded=False),
            nn.Sequential(_Conv(288, 64, 1), _Conv(64, 96, 3), _Conv(96, 96, 3, stride=2, padded=False)),
            _half(),
        ]
    )


def _block_c(m: int) -> nn.Module:
    twice = (_Conv(m, m, (7, 1)), _Conv(m, m, (1, 7)), _Conv(m, m, (7, 1)), _Conv(m, 192, (1, 7)))
    return _Beside(
        [
            _Conv(768, 192, 1),
            nn.Sequential(_Conv(768, m, 1), _Conv(m, m, (1, 7)), _Conv(m, 192, (7, 1))),
            nn.Sequential(_Conv(768, m, 1), *twice),
            nn.Sequential(_mean(), _Conv(768, 192, 1)),
        ]
    )


def _block_d() -> nn.Module:
    across = (_Conv(192, 192, (1, 7)), _Conv(192, 192, (7, 1)))
    return _Beside(
        [
            nn.Sequential(_Conv(768, 192, 1), _Conv(192, 320, 3, stride=2, padded=False)),
            nn.Sequential(_Conv(768, 192, 1), *across, _Conv(192, 192, 3, stride=2, padded=False)),
            _half(),
        ]
    )


def _block_e(channels: int, pool: nn.Module) -> nn.Module:
    def cross() -> nn.Module:
        return _Beside([_Conv(384, 384, (1, 3)), _Conv(384, 384, (3, 1))])

    return _Beside(
        [
            _Conv(channels, 320, 1),
            nn.Sequential(_Conv(channels, 384, 1), cross()),
            nn.Sequential(_Conv(channels, 448, 1), _Conv(448, 384, 3), cross()),
            nn.Sequential(pool, _Conv(channels, 192, 1)),
        ]
    )


def network() -> nn.Module:
    """Return the network from [b, 3, 299, 299] to [b, 2048], with all weights zero."""
    return nn.Sequential(
        *(_Conv(3, 32, 3, stride=2, padded=False), _Conv(32, 32, 3, padded=False), _Conv(32, 64, 3), _half()),
        *(_Conv(64, 80, 1), _Conv(80, 192, 3, padded=False), _half()),
        *(_block_a(192, 32), _block_a(256, 64), _block_a(288, 64)),
        _block_b(),
        *(_block_c(128), _block_c(160), _block_c(160), _block_c(192)),
        _block_d(),
        # The last block has max pooling instead of average pooling, like the network of the published weights.
        *(_block_e(1280, _mean()), _block_e(2048, nn.MaxPool2d(3, stride=1, padding=1))),
        *(nn.AvgPool2d(8), nn.Flatten()),
    )


def load(data: bytes) -> nn.Module:
    """Return the network with the weights of a file, whose hash must have been checked."""
    net = network()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for number, value in enumerate(net.state_dict().values()):
            raw = np.frombuffer(archive.read(f"{_FOLDER}/{number}"), dtype="<f4")
            value.copy_(torch.tensor(raw).view(value.shape))
    return net.eval()
