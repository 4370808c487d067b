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
def _const(value: tl.constexpr):
    # A bare literal above 2^31 would be a 64-bit number and widen everything it meets.
    return tl.full((), value, tl.uint32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _const(M1)
    x = (x ^ (x >> 15)) * _const(M2)
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed_ptr, head, q_rows):
    """Two uint32 words for each packed query row."""
    seed = tl.load(seed_ptr)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    by_head = head.to(tl.uint32) * _const(GOLDEN)
    rows = q_rows.to(tl.uint32)
    a = _mix(_mix(_mix(_mix(low ^ _const(SALT_A)) ^ high) ^ by_head) ^ rows)
    b = _mix(_mix(_mix(_mix(low ^ _const(SALT_B)) ^ high) ^ by_head) ^ rows)
    return a, b


@triton.jit
def keep_mask(a, b, k_rows, threshold):
    """Whether each element survives; `a`, `b` and `k_rows` broadcast against each other, `threshold` is uint32."""
    x = a ^ (k_rows.to(tl.uint32) * _const(GOLDEN))
    x = (x ^ (x >> 16)) * _const(M1)
    x = x ^ b
    x = (x ^ (x >> 15)) * _const(M2)
    x = x ^ (x >> 16)
    return x >= threshold
