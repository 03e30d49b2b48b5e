"""The idx format of the MNIST family: a magic number, the dimensions, then the bytes."""

import math
from pathlib import Path

import numpy as np

from datalens.errors import DatalensError

UBYTE = 8


def parse(data: bytes, ndim: int, what: str = "idx data") -> np.ndarray:
    """Return idx data as a writable uint8 array of exactly `ndim` dimensions.

    Args:
        what: the data's name, for messages.

    Raises:
        DatalensError: it is not such data.
    """
    shape, start = _header(data[: 4 + 4 * ndim], len(data), (ndim,), what)
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy()


def mapped(file: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    """Return the array of an idx file as a memory map, so that it may be larger than memory. Only the header is read.

    Args:
        dimensions: the numbers of dimensions that are accepted.

    Raises:
        DatalensError: there is no such file, or it is not in this format.
    """
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
    """Return the shape, and the offset of the array in data of `length` bytes.

    The header must agree with the length. This is checked before anything is allocated, so a header that lies about the
    size costs no memory.
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
        claimed = "×".join(map(str, shape))
        raise DatalensError(f"{what}: the header says {claimed}, but {length - start} bytes follow it")
    return shape, start


def dump(array: np.ndarray) -> bytes:
    """Return an array of unsigned bytes in the idx format."""
    if array.dtype != np.uint8:
        raise ValueError(f"only unsigned bytes can be written, not {array.dtype}")
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, UBYTE, array.ndim)) + sizes + np.ascontiguousarray(array).tobytes()
