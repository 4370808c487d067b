"""pffn: the normalised personalised feed-forward block, with its norms and residuals fused around gdpa.

    ln = LayerNorm(q);   g = gdpa(ln, K, V) + ln;   out = RMSNorm(g) + q

Both norms run over all heads (PyTorch blog, "Towards free normalization", 2026); their elementwise weights are optional. On
compute capability 9.0 the addition of ln happens inside the attention kernel, where ln is the query tile, and that of dg to
its gradient likewise; each norm is one pass over its rows, with the outer residual inside. `pffn_mixed` is the form that
autocast runs.
"""

from typing import Any

import torch
from torch import Tensor

from gemopt.kernels.cpu import native_pffn
from gemopt.kernels.spec import AttentionSpec
from gemopt.kernels.tiers import is_hopper
from gemopt.ops.attention_checks import check_call
from gemopt.ops.checks import check_tensor
from gemopt.ops.define import op
from gemopt.ops.dispatch import attention_kernels
from gemopt.ops.pffn_mixed import pffn_mixed
from gemopt.ops.pffn_parts import (
    SCHEMA,
    affine,
    centred,
    differentiate,
    fake_gradients,
    layer_norm,
    layer_norm_gradient,
    like_weights,
    norms_of,
    rms_scale,
    spec_of,
    wide,
)

OP = "pffn"
_LOW = (torch.bfloat16, torch.float16)


def _fused(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, backward: bool = False) -> bool:
    if not is_hopper(q):
        return False
    from gemopt.kernels.gluon import attention as hopper
    from gemopt.kernels.triton.norms import MAX_COLUMNS

    return hopper.refusal(q, k, v, spec, backward) is None and q.shape[1] * q.shape[2] <= MAX_COLUMNS


@op(
    "pffn",
    f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _pffn(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, ln, the statistics [2, T] of LayerNorm (mean, 1/deviation), g."""
    spec, norm = spec_of(args), norms_of(args, q.dtype)
    q = q.contiguous()
    with torch._C._DisableAutocast():
        if _fused(q, k, v, spec):
            from gemopt.kernels.gluon import attention as hopper
            from gemopt.kernels.triton import norms

            ln, stats = norms.layer_norm(q, norm.eps, norm.weight, norm.bias)
            g, _ = hopper.forward(ln, k, v, spec, add_q=True)
            return norms.rms_add(g, q, norm.rms_eps, norm.rms_weight), ln, stats, g
        if native_pffn.serves(q, k, v, spec):
            return native_pffn.forward(q, k, v, spec, norm.eps, norm.rms_eps, (norm.weight, norm.bias, norm.rms_weight))
        x = wide(q)
        normed, stats = layer_norm(x, norm)
        ln = normed.to(q.dtype).view(q.shape)
        forward, _ = attention_kernels(q)
        g = forward(ln, k, v, spec)[0] + ln
        y = wide(g)
        out = affine(y * rms_scale(y, norm), norm.rms_weight, x)
        return out.to(q.dtype).view(q.shape), ln, stats, g


@_pffn.fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty((2, q.shape[0]), dtype=wide), q.new_empty(q.shape)


@op(
    "pffn_backward",
    f"(Tensor dout, Tensor? q, Tensor k, Tensor v, Tensor ln, Tensor stats, Tensor g, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _pffn_backward(
    dout: Tensor, q: Tensor | None, k: Tensor, v: Tensor, ln: Tensor, stats: Tensor, g: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradients of the three weights, empty where there is none. q is None if ln has no weights."""
    spec, norm = spec_of(args), norms_of(args, g.dtype)
    dout = dout.contiguous()
    with torch._C._DisableAutocast():
        if _fused(ln, k, v, spec, backward=True):
            from gemopt.kernels.gluon import attention as hopper
            from gemopt.kernels.triton import norms

            dg, d_rms = norms.rms_gradient(g, dout, norm.rms_eps, norm.rms_weight)
            dln, dk, dv = hopper.backward(dg, ln, k, v, None, None, spec, add_q=True)
            dq, dw, db = norms.layer_norm_gradient(ln if q is None else q, stats, dln, dout, norm.weight, norm.bias)
        elif native_pffn.serves(ln, k, v, spec):
            weights = (norm.weight, norm.bias, norm.rms_weight)
            dq, dk, dv, (dw, db, d_rms) = native_pffn.backward(
                dout, q, k, v, (ln, stats, g), spec, norm.eps, norm.rms_eps, weights
            )
        else:
            y, dy = wide(g), wide(dout)
            r = rms_scale(y, norm)
            n = y * r
            d_rms = None if norm.rms_weight is None else (dy * n).sum(0)
            dn = affine(dy, norm.rms_weight, None)
            dg = ((dn - n * (dn * n).mean(1, keepdim=True)) * r).to(g.dtype).view(g.shape)
            _, backward = attention_kernels(ln)
            dln, dk, dv, _ = backward(dg, ln, k, v, None, None, spec, False)
            rstd = stats[1][:, None]
            n = wide(ln) if q is None else centred(wide(q), stats[0]) * rstd
            dx = wide(dln) + wide(dg)
            dw = None if norm.weight is None else (dx * n).sum(0)
            db = None if norm.bias is None else dx.sum(0)
            dq = (layer_norm_gradient(dx, n, rstd, norm) + dy).to(ln.dtype).view(ln.shape)
    return dq, dk, dv, *like_weights((dw, db, d_rms), args, ln)  # type: ignore[return-value]


@_pffn_backward.fake
def _(
    dout: Tensor, q: Tensor | None, k: Tensor, v: Tensor, ln: Tensor, stats: Tensor, g: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return fake_gradients(ln, k, v, args)  # type: ignore[return-value]


# Without weights n is ln, and q is not needed.
differentiate(_pffn, _pffn_backward, lambda weights: weights[0] is not None or weights[1] is not None)


def pffn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    activation: str = "gelu",
    scale: float = 1.0,
    post_scale: float = 1.0,
    eps: float = 1e-5,
    rms_eps: float | None = 1e-5,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    rms_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """RMSNorm(gdpa(ln, k, v) + ln) + q with ln = LayerNorm(q), `[Tq, H, D]`; norms over all heads.

    Of one dtype, or as autocast has it: norms, sums and the result in fp32, gdpa alone, on a rounded copy of ln, in 16 bits.

    Args:
        q: `[Tq, H, D]`; k, v: `[Tk, Hkv, D]`; all of one dtype, or k and v in bf16 or fp16 and q in fp32.
        eps: added to the variance of LayerNorm.
        rms_eps: added to the mean square of RMSNorm; None is the machine epsilon of fp32, of fp64 for fp64.
        ln_weight, ln_bias, rms_weight: elementwise weights of the norms, each `[H·D]` or `[H, D]`, in the dtype of q or k,
            or in fp32 beside 16 bits. Their gradients are summed over rows in fp32 (fp64 for fp64), in a fixed order.
        dtype: of ln and the result; None is that of q. fp32 beside q, k and v in bf16 or fp16 is the mixed form.
        the rest: as in `gemopt.ops.gdpa`.
    Raises:
        ValueError, TypeError: arguments of wrong rank, size, dtype, device or value.
    """
    for name, offsets in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        check_tensor(OP, name, offsets)
    added = None if rms_eps is None else float(rms_eps)
    args = (q_offsets, k_offsets, max_q, max_k, activation, float(scale), float(post_scale), float(eps), added)
    mixed = _is_mixed(q, k, dtype)
    check_call(OP, q, k, v, spec_of(args), mixed=mixed and q.dtype == torch.float32)
    for name, value in (("eps", eps), ("rms_eps", rms_eps)):
        if value is not None and not value > 0:
            raise ValueError(f"{OP}: {name} must be positive, got {value}")
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"{OP}: v must have the head_dim of q, {q.shape[2]}, got {v.shape[2]}")
    weights = {"ln_weight": ln_weight, "ln_bias": ln_bias, "rms_weight": rms_weight}
    for name, weight in weights.items():
        if weight is not None:
            _check_weight(name, weight, q, k)
    return (pffn_mixed if mixed else _pffn)(q, k, v, *args, *weights.values())[0]  # type: ignore[no-any-return]


def _is_mixed(q: Tensor, k: Tensor, dtype: torch.dtype | None) -> bool:
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):
        return False  # `check_call` has the error
    if dtype not in (None, q.dtype) and not (dtype == torch.float32 and q.dtype in _LOW):
        beside = " or torch.float32" if q.dtype in _LOW else ""
        raise ValueError(f"{OP}: dtype must be None, {q.dtype}{beside} where q is {q.dtype}, got {dtype}")
    return (dtype or q.dtype) == torch.float32 and k.dtype in _LOW


def _check_weight(name: str, weight: Tensor, q: Tensor, k: Tensor) -> None:
    heads, head_dim = q.shape[1:]
    if not isinstance(weight, Tensor):
        raise TypeError(f"{OP}: {name} must be a tensor or None, got {type(weight).__name__}")
    if list(weight.shape) not in ([heads * head_dim], [heads, head_dim]):
        raise ValueError(f"{OP}: {name} must be [{heads * head_dim}] or [{heads}, {head_dim}], got {list(weight.shape)}")
    allowed = list(dict.fromkeys([q.dtype, k.dtype, *[torch.float32] * (k.dtype in _LOW)]))
    if weight.dtype not in allowed or weight.device != q.device:
        given = f"got {weight.dtype} on {weight.device}"
        raise ValueError(f"{OP}: {name} must be {' or '.join(map(str, allowed))} on {q.device} beside this q and k, {given}")


pffn.__module__ = "gemopt.ops"
