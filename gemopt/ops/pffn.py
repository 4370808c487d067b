"""pffn: the normalised personalised feed-forward block, with its norms and residuals fused around gdpa.

    ln = LayerNorm(q);   g = gdpa(ln, K, V) + ln;   out = RMSNorm(g) + q

Both norms run over all heads (PyTorch blog, "Towards free normalization", 2026); their elementwise weights are optional. On
compute capability 9.0 the addition of ln happens inside the attention kernel, where ln is the query tile, and that of dg to
its gradient likewise; each norm is one pass over its rows, with the outer residual inside.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemopt.kernels.spec import AttentionSpec
from gemopt.ops.attention_checks import check_call
from gemopt.ops.define import op
from gemopt.ops.dispatch import attention_kernels, is_hopper

OP = "pffn"
_SCHEMA = (
    "Tensor q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, str activation, float scale, float post_scale, "
    "float eps, float? rms_eps, Tensor? ln_weight, Tensor? ln_bias, Tensor? rms_weight"
)
_WEIGHTS = 9  # where the weights stand among the arguments after q, k, v


class _Norms(NamedTuple):
    """The last arguments: of LayerNorm and RMSNorm, weights as `[H·D]` in the dtype of the arithmetic, or None."""

    eps: float
    rms_eps: float
    weight: Tensor | None
    bias: Tensor | None
    rms_weight: Tensor | None


def _spec(args: tuple[Any, ...]) -> AttentionSpec:
    q_offsets, k_offsets, max_q, max_k, activation, scale, post_scale, *_ = args
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


def _norms(args: tuple[Any, ...], dtype: torch.dtype) -> _Norms:
    """torch takes the machine epsilon of the dtype it computes in where RMSNorm is given none."""
    eps, rms_eps, *weights = args[_WEIGHTS - 2 :]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if rms_eps is None:
        rms_eps = torch.finfo(wide).eps
    return _Norms(eps, rms_eps, *(None if w is None else w.reshape(-1).to(wide) for w in weights))


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


@op(
    "pffn",
    f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _pffn(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, ln, the statistics [2, T] of LayerNorm (mean, 1/deviation), g."""
    spec, norm = _spec(args), _norms(args, q.dtype)
    q = q.contiguous()
    with torch._C._DisableAutocast():
        if _fused(q, k, v, spec):
            from gemopt.kernels.gluon import attention as hopper
            from gemopt.kernels.triton import norms

            ln, stats = norms.layer_norm(q, norm.eps, norm.weight, norm.bias)
            g, _ = hopper.forward(ln, k, v, spec, add_q=True)
            return norms.rms_add(g, q, norm.rms_eps, norm.rms_weight), ln, stats, g
        x = _wide(q)
        mean = x.mean(1)
        centred = x - mean[:, None]
        rstd = (centred.square().mean(1) + norm.eps).rsqrt()
        ln = _affine(centred * rstd[:, None], norm.weight, norm.bias).to(q.dtype).view(q.shape)
        forward, _ = attention_kernels(q)
        g = forward(ln, k, v, spec)[0] + ln
        y = _wide(g)
        normed = y * (y.square().mean(1, keepdim=True) + norm.rms_eps).rsqrt()
        out = _affine(normed, norm.rms_weight, x)
        return out.to(q.dtype).view(q.shape), ln, torch.stack([mean, rstd]), g


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@_pffn.fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty((2, q.shape[0]), dtype=wide), q.new_empty(q.shape)


@op(
    "pffn_backward",
    f"(Tensor dout, Tensor? q, Tensor k, Tensor v, Tensor ln, Tensor stats, Tensor g, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _pffn_backward(
    dout: Tensor, q: Tensor | None, k: Tensor, v: Tensor, ln: Tensor, stats: Tensor, g: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradients of the three weights, empty where there is none. q is None if ln has no weights."""
    spec, norm = _spec(args), _norms(args, g.dtype)
    dout = dout.contiguous()
    with torch._C._DisableAutocast():
        if _fused(ln, k, v, spec, backward=True):
            from gemopt.kernels.gluon import attention as hopper
            from gemopt.kernels.triton import norms

            dg, d_rms = norms.rms_gradient(g, dout, norm.rms_eps, norm.rms_weight)
            dln, dk, dv = hopper.backward(dg, ln, k, v, None, None, spec, add_q=True)
            dq, dw, db = norms.layer_norm_gradient(ln if q is None else q, stats, dln, dout, norm.weight, norm.bias)
        else:
            y, dy = _wide(g), _wide(dout)
            r = (y.square().mean(1, keepdim=True) + norm.rms_eps).rsqrt()
            n = y * r
            d_rms = None if norm.rms_weight is None else (dy * n).sum(0)
            dn = _affine(dy, norm.rms_weight, None)
            dg = ((dn - n * (dn * n).mean(1, keepdim=True)) * r).to(g.dtype).view(g.shape)
            _, backward = attention_kernels(ln)
            dln, dk, dv, _ = backward(dg, ln, k, v, None, None, spec, False)
            n = _wide(ln) if q is None else (_wide(q) - stats[0][:, None]) * stats[1][:, None]
            dx = _wide(dln) + _wide(dg)
            dw = None if norm.weight is None else (dx * n).sum(0)
            db = None if norm.bias is None else dx.sum(0)
            dx = _affine(dx, norm.weight, None)
            dx = (dx - dx.mean(1, keepdim=True) - n * (dx * n).mean(1, keepdim=True)) * stats[1][:, None] + dy
            dq = dx.to(ln.dtype).view(ln.shape)
    sums = [
        ln.new_empty(0) if d is None else d.to(w.dtype).view(w.shape)
        for d, w in zip((dw, db, d_rms), args[_WEIGHTS:], strict=True)
    ]
    return dq, dk, dv, sums[0], sums[1], sums[2]


@_pffn_backward.fake
def _(
    dout: Tensor, q: Tensor | None, k: Tensor, v: Tensor, ln: Tensor, stats: Tensor, g: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    w, b, u = (ln.new_empty(0) if x is None else x.new_empty(x.shape) for x in args[_WEIGHTS:])
    return ln.new_empty(ln.shape), k.new_empty(k.shape), v.new_empty(v.shape), w, b, u


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, q_offsets, k_offsets, *rest = inputs
    _, ln, stats, g = output
    weights = rest[_WEIGHTS - 2 :]
    kept = q if weights[0] is not None or weights[1] is not None else None
    ctx.save_for_backward(kept, k, v, ln, stats, g, q_offsets, k_offsets, *weights)
    ctx.rest = rest[: _WEIGHTS - 2]
    ctx.mark_non_differentiable(ln, stats, g)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * _WEIGHTS
    if dout is None:
        return (None, None, None, *nothing, None, None, None)
    q, k, v, ln, stats, g, q_offsets, k_offsets, *weights = ctx.saved_tensors
    *grads, dw, db, d_rms = _pffn_backward(dout, q, k, v, ln, stats, g, q_offsets, k_offsets, *ctx.rest, *weights)
    given = (None if w is None else d for d, w in zip((dw, db, d_rms), weights, strict=True))
    return (*grads, *nothing, *given)


_pffn.autograd(_backward, _setup)


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
) -> Tensor:
    """RMSNorm(gdpa(ln, k, v) + ln) + q with ln = LayerNorm(q), `[Tq, H, D]`; norms over all heads.

    Args:
        q: `[Tq, H, D]`; k, v: `[Tk, Hkv, D]`; all of one dtype.
        eps: added to the variance of LayerNorm.
        rms_eps: added to the mean square of RMSNorm; None is the machine epsilon of fp32, of fp64 for fp64.
        ln_weight, ln_bias, rms_weight: elementwise weights of the norms, each `[H·D]` or `[H, D]` in the dtype of q. Their
            gradients are summed over rows in fp32 (fp64 for fp64), in a fixed order.
        the rest: as in `gemopt.ops.gdpa`.
    Raises:
        ValueError, TypeError: arguments of wrong rank, size, dtype, device or value.
    """
    added = None if rms_eps is None else float(rms_eps)
    args = (q_offsets, k_offsets, max_q, max_k, activation, float(scale), float(post_scale), float(eps), added)
    check_call(OP, q, k, v, _spec(args))
    for name, value in (("eps", eps), ("rms_eps", rms_eps)):
        if value is not None and not value > 0:
            raise ValueError(f"{OP}: {name} must be positive, got {value}")
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"{OP}: v must have the head_dim of q, {q.shape[2]}, got {v.shape[2]}")
    weights = {"ln_weight": ln_weight, "ln_bias": ln_bias, "rms_weight": rms_weight}
    for name, weight in weights.items():
        if weight is not None:
            _check_weight(name, weight, q)
    return _pffn(q, k, v, *args, *weights.values())[0]


def _check_weight(name: str, weight: Tensor, q: Tensor) -> None:
    heads, head_dim = q.shape[1:]
    if not isinstance(weight, Tensor):
        raise TypeError(f"{OP}: {name} must be a tensor or None, got {type(weight).__name__}")
    if list(weight.shape) not in ([heads * head_dim], [heads, head_dim]):
        raise ValueError(f"{OP}: {name} must be [{heads * head_dim}] or [{heads}, {head_dim}], got {list(weight.shape)}")
    if weight.dtype != q.dtype or weight.device != q.device:
        raise ValueError(f"{OP}: {name} must be {q.dtype} on {q.device} as q is, got {weight.dtype} on {weight.device}")


pffn.__module__ = "gemopt.ops"
