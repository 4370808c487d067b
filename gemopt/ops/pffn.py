"""pffn: the normalised personalised feed-forward block, with its norms and residuals fused around gdpa.

    ln = LayerNorm(q);   g = gdpa(ln, K, V) + ln;   out = RMSNorm(g) + q

Both norms run over all heads and have no elementwise weights (PyTorch blog, "Towards free normalization", 2026). On
compute capability 9.0 the addition of ln happens inside the attention kernel, where ln is the query tile, and that of dg to
its gradient likewise; each norm is one pass over its rows, with the outer residual inside.
"""

from typing import Any

import torch
from torch import Tensor

from gemopt.kernels.spec import AttentionSpec
from gemopt.ops.attention_checks import check_call
from gemopt.ops.dispatch import attention_kernels, is_hopper
from gemopt.ops.naming import op_name

OP = "pffn"
_SCHEMA = (
    "Tensor q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, "
    "str activation, float scale, float post_scale, float eps, float? rms_eps"
)


def _spec(args: tuple[Any, ...]) -> AttentionSpec:
    q_offsets, k_offsets, max_q, max_k, activation, scale, post_scale, _, _ = args
    names = tuple(activation.split(","))
    return AttentionSpec(
        q_offsets,
        k_offsets,
        max_q,
        max_k,
        scale,
        False,
        False,
        (-1, -1),
        None,
        None,
        0.0,
        None,
        None,
        None,
        names,
        post_scale,
    )


def _fused(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, backward: bool = False) -> bool:
    if not is_hopper(q):
        return False
    from gemopt.kernels.gluon import attention as hopper
    from gemopt.kernels.triton.norms import MAX_COLUMNS

    return hopper.refusal(q, k, v, spec, backward) is None and q.shape[1] * q.shape[2] <= MAX_COLUMNS


def _epsilons(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[float, float]:
    """eps of LayerNorm and RMSNorm; torch takes the machine epsilon of the dtype it computes in where none is given."""
    eps, rms_eps = args[-2:]
    if rms_eps is None:
        rms_eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return eps, rms_eps


def _wide(x: Tensor) -> Tensor:
    """`[T, H·D]` in fp32, or fp64 if x is."""
    return x.reshape(x.shape[0], -1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


@torch.library.custom_op(
    op_name("pffn"),
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _pffn(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec, (eps, rms_eps) = _spec(args), _epsilons(args, q.dtype)
    q = q.contiguous()
    with torch._C._DisableAutocast():
        if _fused(q, k, v, spec):
            from gemopt.kernels.gluon import attention as hopper
            from gemopt.kernels.triton import norms

            ln, rstd = norms.layer_norm(q, eps)
            g, _ = hopper.forward(ln, k, v, spec, add_q=True)
            return norms.rms_add(g, q, rms_eps), ln, rstd, g
        x = _wide(q)
        centred = x - x.mean(1, keepdim=True)
        rstd = (centred.square().mean(1) + eps).rsqrt()
        ln = (centred * rstd[:, None]).to(q.dtype).view(q.shape)
        forward, _ = attention_kernels(q)
        g = forward(ln, k, v, spec)[0] + ln
        y = _wide(g)
        out = y * (y.square().mean(1, keepdim=True) + rms_eps).rsqrt() + x
        return out.to(q.dtype).view(q.shape), ln, rstd, g


@_pffn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape[:1], dtype=wide), q.new_empty(q.shape)


@torch.library.custom_op(
    op_name("pffn_backward"),
    mutates_args=(),
    schema=f"(Tensor dout, Tensor k, Tensor v, Tensor ln, Tensor rstd, Tensor g, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _pffn_backward(
    dout: Tensor, k: Tensor, v: Tensor, ln: Tensor, rstd: Tensor, g: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    spec, (_, rms_eps) = _spec(args), _epsilons(args, g.dtype)
    dout = dout.contiguous()
    with torch._C._DisableAutocast():
        if _fused(ln, k, v, spec, backward=True):
            from gemopt.kernels.gluon import attention as hopper
            from gemopt.kernels.triton import norms

            dg = norms.rms_gradient(g, dout, rms_eps)
            dln, dk, dv = hopper.backward(dg, ln, k, v, None, None, spec, add_q=True)
            return norms.layer_norm_gradient(ln, rstd, dln, dout), dk, dv
        y, dy = _wide(g), _wide(dout)
        r = (y.square().mean(1, keepdim=True) + rms_eps).rsqrt()
        n = y * r
        dg = ((dy - n * (dy * n).mean(1, keepdim=True)) * r).to(g.dtype).view(g.shape)
        _, backward = attention_kernels(ln)
        dln, dk, dv, _ = backward(dg, ln, k, v, None, None, spec, False)
        x, dx = _wide(ln), _wide(dln) + _wide(dg)
        dx = (dx - dx.mean(1, keepdim=True) - x * (dx * x).mean(1, keepdim=True)) * rstd[:, None] + dy
        return dx.to(ln.dtype).view(ln.shape), dk, dv


@_pffn_backward.register_fake
def _(dout: Tensor, k: Tensor, v: Tensor, ln: Tensor, rstd: Tensor, g: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return ln.new_empty(ln.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, k, v, q_offsets, k_offsets, *rest = inputs
    _, ln, rstd, g = output
    ctx.save_for_backward(k, v, ln, rstd, g, q_offsets, k_offsets)
    ctx.rest = rest
    ctx.mark_non_differentiable(ln, rstd, g)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * (2 + len(ctx.rest))
    if dout is None:
        return (None, None, None, *nothing)
    k, v, ln, rstd, g, q_offsets, k_offsets = ctx.saved_tensors
    return (*_pffn_backward(dout, k, v, ln, rstd, g, q_offsets, k_offsets, *ctx.rest), *nothing)


_pffn.register_autograd(_backward, setup_context=_setup)


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
) -> Tensor:
    """RMSNorm(gdpa(ln, k, v) + ln) + q with ln = LayerNorm(q), `[Tq, H, D]`; norms over all heads, without weights.

    Args:
        q: `[Tq, H, D]`; k, v: `[Tk, Hkv, D]`; all of one dtype.
        eps: added to the variance of LayerNorm.
        rms_eps: added to the mean square of RMSNorm; None is the machine epsilon of fp32, of fp64 for fp64.
        the rest: as in `gemopt.ops.gdpa`.
    Raises:
        ValueError, TypeError: arguments of wrong rank, size, dtype, device or value.
    """
    args = (q_offsets, k_offsets, max_q, max_k, activation, float(scale), float(post_scale), float(eps))
    added = None if rms_eps is None else float(rms_eps)
    check_call(OP, q, k, v, _spec((*args, added)))
    for name, value in (("eps", eps), ("rms_eps", rms_eps)):
        if value is not None and not value > 0:
            raise ValueError(f"{OP}: {name} must be positive, got {value}")
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"{OP}: v must have the head_dim of q, {q.shape[2]}, got {v.shape[2]}")
    return _pffn(q, k, v, *args, added)[0]


pffn.__module__ = "gemopt.ops"
