"""Whether the Triton kernels can take a tensor: on a GPU, in float32 or as votes, where Triton is installed."""

import importlib.util
from functools import cache

import torch
from torch import Tensor


def kernels_for(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float32, torch.int8) and has_triton()


@cache
def has_triton() -> bool:
    """torch brings Triton along wherever it brings CUDA, but for Windows."""
    return importlib.util.find_spec("triton") is not None
