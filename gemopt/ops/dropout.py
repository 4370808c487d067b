"""The dropout generator that every jagged attention kernel and the reference share.

    keep(seed, head, q_row, k_row)  =  hash >= round(p * 2^32)

A counter-based generator in the spirit of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011):
nothing is stored, the backward hashes the same counters again. The counter is (head, packed row of the query, row of
the key inside its sequence). Two 32-bit words `a`, `b` are hashed per (head, query row); an element needs one more
multiply-xorshift chain over `a`, `b` and its key row. The mixer is a 32-bit finaliser of the MurmurHash kind with
Wellons' low-bias constants (github.com/skeeto/hash-prospector). All arithmetic is modulo 2^32.

`gemopt/kernels/triton/dropout.py` states the same function for Triton; a test compares the two bit by bit.
"""

import torch
from torch import Tensor

M1, M2 = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9
SALT_A, SALT_B = 0x243F6A88, 0xB7E15162  # digits of pi and e
MASK32 = 0xFFFFFFFF


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


_M1, _M2, _GOLDEN = _signed(M1), _signed(M2), _signed(GOLDEN)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of an int32 tensor."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * _M1
    x = (x ^ _shift(x, 15)) * _M2
    return x ^ _shift(x, 16)


def _int32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64 tensor as int32."""
    low = x & MASK32
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def row_keys(seed: Tensor, heads: int, q_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Words `a`, `b` of the query rows (packed row numbers): int32 `[H, *q_rows.shape]` each."""
    seed = seed.reshape(()).to(torch.int64)
    low, high = _int32(seed), _int32(seed >> 32)
    head = torch.arange(heads, dtype=torch.int32, device=q_rows.device).view(heads, *([1] * q_rows.dim()))
    rows = _int32(q_rows)

    def chain(salt: int) -> Tensor:
        h = _mix(low ^ _signed(salt))
        h = _mix(h ^ high)
        h = _mix(h ^ (head * _GOLDEN))
        return _mix(h ^ rows)

    return chain(SALT_A), chain(SALT_B)


def threshold(p: float) -> int:
    """Hashes below this are dropped."""
    return min(round(p * (1 << 32)), MASK32)


def multiplier(p: float) -> float:
    """What a kept value is multiplied by: 1 / (1 - p), and 0 for p = 1."""
    return 0.0 if p >= 1.0 else 1.0 / (1.0 - p)


def element_hash(a: Tensor, b: Tensor, k_rows: Tensor) -> Tensor:
    """int32 hash (its bits are uint32) of broadcast `a`, `b` (int32) and key rows (int32)."""
    x = a ^ (k_rows * _GOLDEN)
    x ^= _shift(x, 16)
    x *= _M1
    x ^= b
    x ^= _shift(x, 15)
    x *= _M2
    x ^= _shift(x, 16)
    return x


def keep_mask(a: Tensor, b: Tensor, k_rows: Tensor, p: float) -> Tensor:
    """bool: which elements survive dropout with probability `p` of being dropped."""
    # Flipping the sign bit makes the signed comparison order the hashes as unsigned numbers.
    return element_hash(a, b, k_rows).bitwise_xor_(-(1 << 31)) >= threshold(p) - (1 << 31)
