"""The idx format of the MNIST family: a magic number, the dimensions, then the bytes. One reader, one writer."""

import math
from pathlib import Path

import numpy as np

from datalens.errors import DatalensError

UBYTE = 8


def parse(data: bytes, ndim: int, what: str = "idx data") -> np.ndarray:
    """A writable uint8 array of exactly `ndim` dimensions."""
    shape, start = _header(data[: 4 + 4 * ndim], len(data), (ndim,), what)
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy()


def mapped(file: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    """The same of a file, through a memory map, so that it may be larger than memory."""
    try:
        with open(file, "rb") as opened:
            header = opened.read(4 + 4 * max(dimensions))
        shape, start = _header(header, file.stat().st_size, dimensions, str(file))
        return np.memmap(file, dtype=np.uint8, mode="r", offset=start, shape=shape)
    except FileNotFoundError:
        raise DatalensError(f"{file} does not exist") from None
    except OSError as error:
        raise DatalensError(f"{file} cannot be read ({error.strerror})") from None


def _header(data: bytes, length: int, dimensions: tuple[int, ...], what: str) -> tuple[tuple[int, ...], int]:
    """The shape, and where the bytes begin, of `length` in all.

    A header is believed only where it agrees with the length, and it is compared before anything is allocated, so one
    that lies about the size costs nothing.
    """
    magic = data[:4]
    if len(magic) < 4:
        raise DatalensError(f"{what}: {len(data)} bytes is too short for an idx header of {4 + 4 * min(dimensions)}")
    if magic[:3] != bytes((0, 0, UBYTE)) or magic[3] not in dimensions:
        expected = " or ".join(bytes((0, 0, UBYTE, number)).hex() for number in dimensions)
        unpack = "; unpack it first" if magic[:2] == bytes((31, 139)) else ""
        raise DatalensError(f"{what}: not an idx file of unsigned bytes: starts {magic.hex()}, not {expected}{unpack}")
    start = 4 + 4 * magic[3]
    if len(data) < start:
        raise DatalensError(f"{what}: {len(data)} bytes is too short for an idx header of {start}")
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    if 0 in shape or math.prod(shape) != length - start:
        said = "×".join(map(str, shape))
        raise DatalensError(f"{what}: the header says {said}, but {length - start} bytes follow it")
    return shape, start


def dump(array: np.ndarray) -> bytes:
    """The same backwards, from an array of unsigned bytes."""
    if array.dtype != np.uint8:
        raise ValueError(f"only unsigned bytes can be written, not {array.dtype}")
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, UBYTE, array.ndim)) + sizes + np.ascontiguousarray(array).tobytes()
