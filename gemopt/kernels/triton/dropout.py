"""The dropout generator of `gemopt.ops.dropout` for Triton, bit for bit."""

import triton
import triton.language as tl

from gemopt.ops import dropout as host

M1 = tl.constexpr(host.M1)
M2 = tl.constexpr(host.M2)
GOLDEN = tl.constexpr(host.GOLDEN)
SALT_A = tl.constexpr(host.SALT_A)
SALT_B = tl.constexpr(host.SALT_B)


@triton.jit
def _chain(salt: tl.constexpr, low, high, by_head, rows):
    """Hash the words of the counter one after the other, starting from `salt`."""
    words = (low, high, by_head, rows)
    # A bare literal above 2^31 would be a 64-bit number and widen everything it meets, hence tl.full.
    h = tl.full((), salt, tl.uint32)
    for i in tl.static_range(4):
        h = h ^ words[i]
        h = (h ^ (h >> 16)) * tl.full((), M1, tl.uint32)
        h = (h ^ (h >> 15)) * tl.full((), M2, tl.uint32)
        h = h ^ (h >> 16)
    return h


@triton.jit
def row_keys(seed_ptr, head, q_rows):
    """Two uint32 words for each packed query row."""
    seed = tl.load(seed_ptr)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    by_head = head.to(tl.uint32) * tl.full((), GOLDEN, tl.uint32)
    rows = q_rows.to(tl.uint32)
    return _chain(SALT_A, low, high, by_head, rows), _chain(SALT_B, low, high, by_head, rows)


@triton.jit
def keep_mask(a, b, k_rows, threshold):
    """Whether each element survives; `a`, `b` and `k_rows` broadcast against each other, `threshold` is uint32."""
    x = a ^ (k_rows.to(tl.uint32) * tl.full((), GOLDEN, tl.uint32))
    x = (x ^ (x >> 16)) * tl.full((), M1, tl.uint32)
    x = x ^ b
    x = (x ^ (x >> 15)) * tl.full((), M2, tl.uint32)
    x = x ^ (x >> 16)
    return x >= threshold
