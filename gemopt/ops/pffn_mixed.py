"""pffn as autocast runs it: norms, residuals and sums in fp32, the attention alone in bf16 or fp16.

    ln = LayerNorm(q);   a = gdpa(low(ln), K, V);   g = a + ln;   out = RMSNorm(g) + q        all but a and low(ln) in fp32

Here ln may not be added inside the attention kernel, whose query tile holds it rounded: the rounding is of ln, however small
the attention is beside it (20 times eager's error where the attention is 30 times smaller than ln). So the pass of RMSNorm
makes ln anew from q and its two statistics, which costs no memory traffic: it reads q for the outer residual anyway. Neither
ln, g nor dg is ever stored in fp32. Bytes for every element of a row, q in fp32:

    forward     q -> low(ln)  6,   attention  4,   (a, q) -> out  10
    backward    (a, q, dout) -> da  12,   attention  6,   (a, q, dout, dlow) -> dq  16;   12 more for gradients of weights
"""

from typing import Any

import torch
from torch import Tensor

from gemopt.kernels.tiers import use_triton
from gemopt.ops.define import op
from gemopt.ops.dispatch import attention_kernels
from gemopt.ops.pffn_parts import SCHEMA, WEIGHTS, affine, norms_of, spec_of


def _in_triton(q: Tensor) -> bool:
    if not use_triton(q):
        return False
    from gemopt.kernels.triton.norms import MAX_COLUMNS

    return q.shape[1] * q.shape[2] <= MAX_COLUMNS


def _wide(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1).float()


@op("pffn_mixed", f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)")
def pffn_mixed(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out in fp32, low(ln), the statistics [2, T] of LayerNorm (mean, 1/deviation), a."""
    spec, norm = spec_of(args), norms_of(args, torch.float32)
    q = q.contiguous()
    forward, _ = attention_kernels(k)
    with torch._C._DisableAutocast():
        if _in_triton(q):
            from gemopt.kernels.triton import mixed_norms, norms

            ln, stats = norms.layer_norm(q, norm.eps, norm.weight, norm.bias, k.dtype)
            a = forward(ln, k, v, spec)[0]
            return mixed_norms.rms_add(mixed_norms.Rows(a, q, stats, norm)), ln, stats, a
        x = _wide(q)
        mean = x.mean(1)
        centred = x - mean[:, None]
        rstd = (centred.square().mean(1) + norm.eps).rsqrt()
        wide = affine(centred * rstd[:, None], norm.weight, norm.bias)
        ln = wide.to(k.dtype).view(q.shape)
        a = forward(ln, k, v, spec)[0]
        g = _wide(a) + wide
        normed = g * (g.square().mean(1, keepdim=True) + norm.rms_eps).rsqrt()
        return affine(normed, norm.rms_weight, x).view(q.shape), ln, torch.stack([mean, rstd]), a


@pffn_mixed.fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low = k.new_empty(q.shape)
    return low.new_empty(q.shape, dtype=torch.float32), low, low.new_empty((2, q.shape[0]), dtype=torch.float32), low.clone()


@op(
    "pffn_mixed_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor ln, Tensor stats, Tensor a, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _pffn_mixed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, ln: Tensor, stats: Tensor, a: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradients of the three weights, empty where there is none."""
    spec, norm = spec_of(args), norms_of(args, torch.float32)
    q, dout = q.contiguous(), dout.contiguous()
    _, backward = attention_kernels(k)
    with torch._C._DisableAutocast():
        if _in_triton(q):
            from gemopt.kernels.triton import mixed_norms

            rows = mixed_norms.Rows(a, q, stats, norm)
            da, rms_stats = mixed_norms.rms_gradient(rows, dout)
            dln, dk, dv, _ = backward(da, ln, k, v, None, None, spec, False)
            dq, *sums = mixed_norms.layer_norm_gradient(rows, rms_stats, dout, dln)
        else:
            dy, rstd = _wide(dout), stats[1][:, None]
            n = (_wide(q) - stats[0][:, None]) * rstd
            g = _wide(a) + affine(n, norm.weight, norm.bias)
            r = (g.square().mean(1, keepdim=True) + norm.rms_eps).rsqrt()
            m = g * r
            dm = affine(dy, norm.rms_weight, None)
            dg = (dm - m * (dm * m).mean(1, keepdim=True)) * r
            dln, dk, dv, _ = backward(dg.to(a.dtype).view(a.shape), ln, k, v, None, None, spec, False)
            dx = _wide(dln) + dg
            sums = [None if w is None else x.sum(0) for x, w in zip((dx * n, dx, dy * m), args[WEIGHTS:], strict=True)]
            dn = affine(dx, norm.weight, None)
            dx = (dn - dn.mean(1, keepdim=True) - n * (dn * n).mean(1, keepdim=True)) * rstd + dy
            dq = dx.to(q.dtype).view(q.shape)
    found = [q.new_empty(0) if d is None else d.to(w.dtype).view(w.shape) for d, w in zip(sums, args[WEIGHTS:], strict=True)]
    return dq, dk, dv, found[0], found[1], found[2]


@_pffn_mixed_backward.fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, ln: Tensor, stats: Tensor, a: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    w, b, u = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in args[WEIGHTS:])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), w, b, u


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, q_offsets, k_offsets, *rest = inputs
    _, ln, stats, a = output
    ctx.save_for_backward(q, k, v, ln, stats, a, q_offsets, k_offsets, *rest[WEIGHTS - 2 :])
    ctx.rest = rest[: WEIGHTS - 2]
    ctx.mark_non_differentiable(ln, stats, a)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * WEIGHTS
    if dout is None:
        return (None, None, None, *nothing, None, None, None)
    q, k, v, ln, stats, a, q_offsets, k_offsets, *weights = ctx.saved_tensors
    *grads, dw, db, du = _pffn_mixed_backward(dout, q, k, v, ln, stats, a, q_offsets, k_offsets, *ctx.rest, *weights)
    given = (None if w is None else d for d, w in zip((dw, db, du), weights, strict=True))
    return (*grads, *nothing, *given)


pffn_mixed.autograd(_backward, _setup)
