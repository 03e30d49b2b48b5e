"""Checks whether Triton kernels can be used: for float32 or int8 tensors on a GPU, if Triton is installed."""

import importlib.util
from functools import cache

import torch
from torch import Tensor


def kernels_for(x: Tensor) -> bool:
    """Return whether the Triton kernels can take this tensor."""
    return x.is_cuda and x.dtype in (torch.float32, torch.int8) and has_triton()


@cache
def has_triton() -> bool:
    """Return whether Triton is installed. torch with CUDA installs it, except on Windows."""
    return importlib.util.find_spec("triton") is not None
