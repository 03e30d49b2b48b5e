"""Randomness for training, on which no guarantee depends: counter-based and keyed by (seed, purpose, teacher, step).

A teacher's draws depend on nothing else: not on the other teachers' shares, and not on how teachers are divided into
chunks or over machines. They are the same bits on a CPU and a GPU. Privacy noise never comes from here.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


def derive(seed: int, *parts: object) -> int:
    """Return a 63-bit number derived from a seed and a path of names and counters."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *parts: object) -> torch.Generator:
    """Return a new CPU generator for this path. Its numbers do not depend on earlier draws."""
    return torch.Generator().manual_seed(derive(seed, *parts))


def uniform(seed: int, *parts: object, teachers: Tensor, count: int) -> Tensor:
    """Return uniforms in [0, 1), float32 [len(teachers), count], on the device of `teachers`."""
    bits = _mix(_keyed_counters(derive(seed, *parts), teachers, count))
    return _to_unit(bits)


def halfwords(seed: int, *parts: object, teachers: Tensor, count: int) -> Tensor:
    """Return uniform integers from 0 to 65535, int32 [len(teachers), count]: two from each word, at half the cost."""
    bits = _mix(_keyed_counters(derive(seed, *parts), teachers, (count + 1) // 2))
    # A view of the little-endian halves of each word, lower one first; the mask makes them unsigned.
    return (bits.view(torch.int16)[:, :count].to(torch.int32)).bitwise_and_(0xFFFF)


def normal(seed: int, *parts: object, teachers: Tensor, count: int) -> Tensor:
    """Return standard normals, float32 [len(teachers), count]."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(seed, *parts, "radius", teachers=teachers, count=count)))
    return radius * torch.cos(2 * torch.pi * uniform(seed, *parts, "angle", teachers=teachers, count=count))


def _keyed_counters(key: int, teachers: Tensor, count: int) -> Tensor:
    """Return one 32-bit word per (teacher, position): the teacher's keys mixed into a counter, twice."""
    row, row_again = _row_keys(key, teachers)
    counter = torch.arange(count, dtype=torch.int32, device=teachers.device)
    return _mix(counter.unsqueeze(0) + row.unsqueeze(1)).bitwise_xor_(row_again.unsqueeze(1))


def row_keys(seed: int, *parts: object, teachers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words per teacher that `uniform` mixes with a counter, for kernels that do the mixing."""
    return _row_keys(derive(seed, *parts), teachers)


def _row_keys(key: int, teachers: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _signed32(key & 0xFFFFFFFF), _signed32(key >> 32)
    numbers = teachers.to(torch.int64)
    upper = (numbers >> 32).to(torch.int32)  # 0 for ordinary teacher numbers
    row = _mix(_mix(numbers.to(torch.int32) ^ low) + high + upper)
    return row, _mix(row + _signed32(0x9E3779B9))


def _mix(x: Tensor) -> Tensor:
    """Apply a 32-bit finaliser with low bias (Wellons 2018): xor-shifts and wrapping products, not in place."""
    x = x ^ _logical_shift(x, 16)
    x *= _signed32(0x7FEB352D)
    x ^= _logical_shift(x, 15)
    x *= _signed32(0x846CA68B)
    x ^= _logical_shift(x, 16)
    return x


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without sign: torch's >> copies the sign bit of signed integers, and a mask removes the copies."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _to_unit(bits: Tensor) -> Tensor:
    return _logical_shift(bits, 8).to(torch.float32).mul_(2.0**-24)


def _signed32(value: int) -> int:
    return int(np.uint32(value).astype(np.int32))
