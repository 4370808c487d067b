"""Random numbers by index: the value at a place depends on the seed and the place, never on what was drawn before.

The generator is splitmix64's output function (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014) over a key folded from seed, stream and indices. Any sample of an endless data set can so be drawn alone, by
any process, in any order.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(words: Words) -> Words:
    """splitmix64's output function, elementwise: a bijection of 64-bit words."""
    x = words + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def words(seed: int, stream: str, *indices: ArrayLike) -> Words:
    """64 random bits for every place: the indices, whole numbers, broadcast against each other and at least 1-D."""
    key = mixed(np.array([(seed ^ zlib.crc32(stream.encode()) << 32) % 2**64], dtype=np.uint64))
    for index in indices:
        key = mixed(key ^ mixed(np.atleast_1d(np.asarray(index, dtype=np.int64)).view(np.uint64)))
    return key


def uniform(seed: int, stream: str, *indices: ArrayLike) -> Floats:
    """Uniform in [0, 1), 53 bits."""
    return (words(seed, stream, *indices) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(seed: int, stream: str, *indices: ArrayLike) -> Floats:
    """Standard normal, by Box and Muller's transform of two uniforms."""
    radius = np.sqrt(-2 * np.log1p(-uniform(seed, stream + "/r", *indices)))
    return radius * np.cos(2 * np.pi * uniform(seed, stream + "/a", *indices))


def integers(seed: int, stream: str, high: ArrayLike, *indices: ArrayLike) -> Ints:
    """Uniform in [0, high)."""
    return np.floor(uniform(seed, stream, *indices) * np.asarray(high)).astype(np.int64)


def zipf(seed: int, stream: str, high: int, *indices: ArrayLike) -> Ints:
    """In [0, high), probability about proportional to 1 / (1 + k): how popular items are."""
    drawn = np.exp(uniform(seed, stream, *indices) * np.log(high + 1.0)) - 1
    return np.minimum(np.floor(drawn), high - 1).astype(np.int64)
