"""The idx format of the MNIST family: a magic number, the dimensions, then the bytes."""

import math

import numpy as np

from datalens.errors import DatalensError

UBYTE = 8


def parse(data: bytes, ndim: int, what: str = "idx data") -> np.ndarray:
    """A writable uint8 array of exactly `ndim` dimensions.

    The header is believed only where it agrees with the length of `data`, and it is compared before anything is
    allocated, so one that lies about the size costs nothing.
    """
    header = 4 + 4 * ndim
    if len(data) < header:
        raise DatalensError(f"{what}: {len(data)} bytes is too short for an idx header of {header}")
    if data[:4] != bytes((0, 0, UBYTE, ndim)):
        expected = bytes((0, 0, UBYTE, ndim)).hex()
        raise DatalensError(f"{what}: not an idx file of unsigned bytes: starts {data[:4].hex()}, expected {expected}")
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, header, 4))
    if 0 in shape or math.prod(shape) != len(data) - header:
        said = "×".join(map(str, shape))
        raise DatalensError(f"{what}: the header says {said} bytes, but {len(data) - header} follow it")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape).copy()


def dump(array: np.ndarray) -> bytes:
    """The same backwards, from an array of unsigned bytes."""
    if array.dtype != np.uint8:
        raise ValueError(f"only unsigned bytes can be written, not {array.dtype}")
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, UBYTE, array.ndim)) + sizes + np.ascontiguousarray(array).tobytes()
