"""Score functions and their derivatives, on fp32 registers.

A score function works on the raw product s = q·k and returns *units*: `unit_factor` is the number that makes units a
value, `slope_factor` the one that makes the derivative's units d(act(scale·s))/ds. The factors are applied once per
output element instead of once per score. With u odd in s,

    gelu(x) = x/2 (1 + tanh u),   units: s·tanh(u) + s,   factor scale/2

so a tanh GELU costs five arithmetic instructions and one special function a score. The exact GELU uses the same form
with u a fifth-degree odd polynomial fitted to atanh(erf(x/√2)), whose error is 3e-5 (1e-4 in the derivative), below the
2^-11 of `tanh.approx` and the rounding of the weights to bf16.
"""

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

LEAK = gl.constexpr(0.01)
# tanh(x (A + B x²)) is the usual GELU; tanh(x (P0 + P1 y + P2 y²)), y = min(x², LIMIT), is erf(x/√2).
TANH_A, TANH_B = gl.constexpr(0.7978845608028654), gl.constexpr(0.7978845608028654 * 0.044715)
ERF_0, ERF_1, ERF_2 = gl.constexpr(0.797482629), gl.constexpr(0.0369848173), gl.constexpr(-0.000346509281)
ERF_LIMIT = gl.constexpr(18.0)

CODES = {
    "identity": 1,
    "relu": 2,
    "relu_squared": 3,
    "leaky_relu": 4,
    "gelu": 5,
    "gelu_tanh": 6,
    "silu": 7,
    "hardswish": 8,
    "sigmoid": 9,
}


def unit_factor(act: int, scale: float) -> float:
    """What the units of `units` are multiplied by."""
    return {3: scale * scale, 5: scale / 2, 6: scale / 2, 7: scale / 2, 8: scale / 6, 9: 0.5}.get(act, scale)


def slope_factor(act: int, scale: float) -> float:
    """What the second result of `units_and_slope` is multiplied by, the inner derivative `scale` included."""
    return {3: 2 * scale * scale, 5: scale / 2, 6: scale / 2, 7: scale / 2, 8: scale / 6, 9: scale / 4}.get(act, scale)


@gluon.jit
def fast_tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tanh_argument(s, scale, ACT: gl.constexpr):
    """u of the tanh forms, and du/ds·s."""
    if ACT == GELU:
        square = s * s
        y = gl.minimum(square * (scale * scale), ERF_LIMIT)
        u = s * (scale * (ERF_0 + y * (ERF_1 + y * ERF_2)))
        return u, s * (scale * (ERF_0 + y * (3 * ERF_1 + y * (5 * ERF_2))))
    elif ACT == GELU_TANH:
        square = s * s
        a = scale * TANH_A
        b = scale * scale * scale * TANH_B
        return s * (square * b + a), s * (square * (3.0 * b) + a)
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
    elif ACT == GELU or ACT == GELU_TANH or ACT == SILU:
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
    elif ACT == GELU or ACT == GELU_TANH or ACT == SILU:
        u, inner = _tanh_argument(s, scale, ACT)
        t = fast_tanh(u)
        return s * t + s, (1.0 - t * t) * inner + (1.0 + t)
    else:
        gl.static_assert(ACT == IDENTITY, "unknown score function")
        return s, gl.full_like(s, 1.0)
