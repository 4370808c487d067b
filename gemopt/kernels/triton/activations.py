"""The activations of GDPA and their derivatives on fp32 scores; formulas in `gemopt/kernels/cpu/activations.py`.

Every activation has a code, its place in `gemopt.kernels.spec.ACTIVATIONS`. A kernel gets the set of codes in use as bits
(`ACTS`, 0 for a softmax) and, where heads differ, the codes of all heads packed four bits each (`CODES`). Both are known at
compile time; with one code in the set there is nothing to choose at run time. With several, all of them are evaluated and
one is selected: a branch around tensors inside a pipelined loop trips an assertion of Triton's compiler (3.7).
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from gemopt.kernels.cpu.activations import LEAK as HOST_LEAK
from gemopt.kernels.spec import ACTIVATIONS

IDENTITY = tl.constexpr(ACTIVATIONS.index("identity"))
RELU = tl.constexpr(ACTIVATIONS.index("relu"))
RELU2 = tl.constexpr(ACTIVATIONS.index("relu2"))
LEAKY_RELU = tl.constexpr(ACTIVATIONS.index("leaky_relu"))
GELU = tl.constexpr(ACTIVATIONS.index("gelu"))
GELU_TANH = tl.constexpr(ACTIVATIONS.index("gelu_tanh"))
SILU = tl.constexpr(ACTIVATIONS.index("silu"))
HARDSWISH = tl.constexpr(ACTIVATIONS.index("hardswish"))
COUNT = tl.constexpr(len(ACTIVATIONS))
LEAK = tl.constexpr(HOST_LEAK)
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
CUBE = tl.constexpr(0.044715)


def encode(names: Sequence[str], heads: int) -> tuple[int, int, int]:
    """ACTS, CODES and the number of heads that CODES speaks of (1 if they all do the same)."""
    codes = [ACTIVATIONS.index(name) for name in names]
    acts = 0
    for code in codes:
        acts |= 1 << code
    if len(set(codes)) == 1:
        return acts, codes[0], 1
    return acts, sum(code << (4 * head) for head, code in enumerate(codes)), heads


@triton.jit
def code_of(head, CODES: tl.constexpr, HEADS: tl.constexpr):
    """The activation code of a head, a scalar."""
    code = tl.full((), 0, tl.int32)
    for h in tl.static_range(HEADS):
        code = tl.where(head == h, (CODES >> (4 * h)) & 15, code)
    return code


@triton.jit
def _sigmoid(s):
    return 1.0 / (1.0 + tl.exp(-s))


@triton.jit
def _tanh_of_gelu(s):
    """tanh(√(2/π) (s + 0.044715 s³)) by one exponential; right at both infinities."""
    return 1.0 - 2.0 / (tl.exp((s + s * CUBE * s * s) * SQRT_2_OVER_PI * 2.0) + 1.0)


@triton.jit
def _value(s, ACT: tl.constexpr):
    if ACT == IDENTITY:
        return s
    elif ACT == RELU:
        return tl.where(s > 0.0, s, 0.0)
    elif ACT == RELU2:
        return tl.where(s > 0.0, s * s, 0.0)
    elif ACT == LEAKY_RELU:
        return tl.where(s > 0.0, s, s * LEAK)
    elif ACT == GELU:
        return s * (0.5 + 0.5 * tl.erf(s * SQRT_HALF))
    elif ACT == GELU_TANH:
        return 0.5 * s * (1.0 + _tanh_of_gelu(s))
    elif ACT == SILU:
        return s * _sigmoid(s)
    elif ACT == HARDSWISH:
        return s * tl.minimum(tl.maximum(s + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        return _sigmoid(s)


@triton.jit
def _derivative(s, ACT: tl.constexpr):
    if ACT == IDENTITY:
        return tl.full(s.shape, 1.0, tl.float32)
    elif ACT == RELU:
        return tl.where(s > 0.0, 1.0, 0.0)
    elif ACT == RELU2:
        return tl.where(s > 0.0, 2.0 * s, 0.0)
    elif ACT == LEAKY_RELU:
        return tl.where(s > 0.0, 1.0, LEAK)
    elif ACT == GELU:
        return 0.5 + 0.5 * tl.erf(s * SQRT_HALF) + s * INV_SQRT_2PI * tl.exp(s * s * -0.5)
    elif ACT == GELU_TANH:
        t = _tanh_of_gelu(s)
        return 0.5 * (1.0 + t) + 0.5 * s * (1.0 - t * t) * (1.0 + s * CUBE * s * 3.0) * SQRT_2_OVER_PI
    elif ACT == SILU:
        sigmoid = _sigmoid(s)
        return sigmoid * (1.0 + s * (1.0 - sigmoid))
    elif ACT == HARDSWISH:
        return tl.where(s <= -3.0, 0.0, tl.where(s < 3.0, s * (1.0 / 3.0) + 0.5, 1.0))
    else:
        sigmoid = _sigmoid(s)
        return sigmoid * (1.0 - sigmoid)


@triton.jit
def activate(s, code, ACTS: tl.constexpr):
    """The activation of the scores; `code` chooses where ACTS holds more than one."""
    out = s
    for act in tl.static_range(COUNT):
        if ACTS == (1 << act):
            out = _value(s, act)
        elif (ACTS >> act) & 1:
            out = tl.where(code == act, _value(s, act), out)
    return out


@triton.jit
def derivative(s, code, ACTS: tl.constexpr):
    """The derivative of `activate` with respect to the scores."""
    out = s
    for act in tl.static_range(COUNT):
        if ACTS == (1 << act):
            out = _derivative(s, act)
        elif (ACTS >> act) & 1:
            out = tl.where(code == act, _derivative(s, act), out)
    return out
