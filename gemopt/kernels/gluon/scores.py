"""Score functions and their derivatives, on fp32 registers.

A score function works on the raw product s = q·k and returns *units*: `unit_factor` is the number that makes units a
value, `slope_factor` the one that makes the derivative's units d(act(scale·s))/ds. The factors are applied once per
output element instead of once per score. With u odd in s,

    gelu(x) = x/2 (1 + tanh u),   units: s·tanh(u) + s,   factor scale/2

so a tanh GELU costs four arithmetic instructions and one special function a score. The exact GELU uses the same form
with u a polynomial fitted to atanh(erf(x/√2)). GELU takes the fifth degree: error 3e-5 (1e-4 in the derivative), below
the 2^-11 of `tanh.approx`. GELU_COARSE takes the third, at the cost of the tanh GELU: 3e-4 (7e-4), a quarter of the
rounding of weights and scores to bf16, for which it is used.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Codes of the kernels' ACT argument. SOFTMAX is the attention of jagged_attention, the others are those of gdpa.
SOFTMAX = gl.constexpr(0)
IDENTITY = gl.constexpr(1)
RELU = gl.constexpr(2)
RELU_SQUARED = gl.constexpr(3)
LEAKY_RELU = gl.constexpr(4)
GELU = gl.constexpr(5)
GELU_TANH = gl.constexpr(6)
SILU = gl.constexpr(7)
HARDSWISH = gl.constexpr(8)
SIGMOID = gl.constexpr(9)
GELU_COARSE = gl.constexpr(10)

LEAK = gl.constexpr(0.01)
# tanh(x (A + B x²)) is the usual GELU, with A and B of FIT erf(x/√2) coarsely; tanh(x (P0 + P1 y + P2 y²)), y = min(x², LIMIT), is erf(x/√2).
TANH_A, TANH_B = gl.constexpr(0.7978845608028654), gl.constexpr(0.7978845608028654 * 0.044715)
FIT_A, FIT_B = gl.constexpr(0.79975), gl.constexpr(0.0349)
ERF_0, ERF_1, ERF_2 = gl.constexpr(0.797482629), gl.constexpr(0.0369848173), gl.constexpr(-0.000346509281)
ERF_LIMIT = gl.constexpr(18.0)

FAR = gl.constexpr(-100.0)  # of a scaled score: tanh is -1 there to the last bit

CODES = {
    "softmax": 0,
    "identity": 1,
    "relu": 2,
    "relu2": 3,
    "leaky_relu": 4,
    "gelu": 5,
    "gelu_tanh": 6,
    "silu": 7,
    "hardswish": 8,
    "sigmoid": 9,
}


def code(name: str, dtype: torch.dtype) -> int:
    """ACT for a score function of `gemopt.ops` on operands of `dtype`."""
    return 10 if name == "gelu" and dtype == torch.bfloat16 else CODES[name]


def unit_factor(act: int, scale: float) -> float:
    """What the units of `units` are multiplied by."""
    return {3: scale * scale, 5: scale / 2, 6: scale / 2, 7: scale / 2, 8: scale / 6, 9: 0.5, 10: scale / 2}.get(act, scale)


def slope_factor(act: int, scale: float) -> float:
    """What the second result of `units_and_slope` is multiplied by, the inner derivative `scale` included."""
    return {3: 2 * scale * scale, 5: scale / 2, 6: scale / 2, 7: scale / 2, 8: scale / 6, 9: scale / 4, 10: scale / 2}.get(
        act, scale
    )


@gluon.constexpr_function
def vanishes(act):
    """Whether value and slope are 0 at FAR: then a mask need only replace the score, which costs no registers."""
    return act not in (1, 4)


@gluon.jit
def fast_tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _scaled(scale, C0: gl.constexpr, C1: gl.constexpr, C2: gl.constexpr):
    """Coefficients of an odd polynomial in scale·s, as those of one in s."""
    square = scale * scale
    return scale * C0, scale * square * C1, scale * square * square * C2


@gluon.jit
def _tanh_argument(s, scale, ACT: gl.constexpr):
    """u of the tanh forms, and du/ds·s."""
    if ACT == GELU:
        y = gl.minimum(s * s, ERF_LIMIT / (scale * scale))
        c0, c1, c2 = _scaled(scale, ERF_0, ERF_1, ERF_2)
        return s * (y * (y * c2 + c1) + c0), s * (y * (y * (5.0 * c2) + 3.0 * c1) + c0)
    elif ACT == GELU_TANH or ACT == GELU_COARSE:
        if ACT == GELU_TANH:
            c0, c1, _ = _scaled(scale, TANH_A, TANH_B, 0.0)
        else:
            c0, c1, _ = _scaled(scale, FIT_A, FIT_B, 0.0)
        y = s * s
        return s * (y * c1 + c0), s * (y * (3.0 * c1) + c0)
    else:
        u = s * (scale * 0.5)
        return u, u


@gluon.jit
def units(s, scale, ACT: gl.constexpr):
    """The score function of `scale * s`, in units."""
    if ACT == RELU:
        return gl.maximum(s, 0.0)
    elif ACT == RELU_SQUARED:
        r = gl.maximum(s, 0.0)
        return r * r
    elif ACT == LEAKY_RELU:
        return gl.maximum(s, s * LEAK)
    elif ACT == HARDSWISH:
        return s * gl.minimum(gl.maximum(s * scale + 3.0, 0.0), 6.0)
    elif ACT == SIGMOID:
        return fast_tanh(s * (scale * 0.5)) + 1.0
    elif ACT == GELU or ACT == GELU_TANH or ACT == GELU_COARSE or ACT == SILU:
        u, _ = _tanh_argument(s, scale, ACT)
        return s * fast_tanh(u) + s
    else:
        gl.static_assert(ACT == IDENTITY, "unknown score function")
        return s


@gluon.jit
def units_and_slope(s, scale, ACT: gl.constexpr):
    """The score function and its derivative, each in its units; at a kink the derivative is torch's."""
    if ACT == RELU:
        return gl.maximum(s, 0.0), gl.where(s > 0.0, 1.0, 0.0)
    elif ACT == RELU_SQUARED:
        r = gl.maximum(s, 0.0)
        return r * r, r
    elif ACT == LEAKY_RELU:
        return gl.maximum(s, s * LEAK), gl.where(s > 0.0, 1.0, LEAK)
    elif ACT == HARDSWISH:
        x = s * scale
        slope = gl.where(x > -3.0, gl.where(x < 3.0, 2.0 * x + 3.0, 6.0), 0.0)
        return s * gl.minimum(gl.maximum(x + 3.0, 0.0), 6.0), slope
    elif ACT == SIGMOID:
        t = fast_tanh(s * (scale * 0.5))
        return t + 1.0, 1.0 - t * t
    elif ACT == GELU or ACT == GELU_TANH or ACT == GELU_COARSE or ACT == SILU:
        u, inner = _tanh_argument(s, scale, ACT)
        t = fast_tanh(u)
        return s * t + s, (1.0 - t * t) * inner + (1.0 + t)
    else:
        gl.static_assert(ACT == IDENTITY, "unknown score function")
        return s, gl.full_like(s, 1.0)
