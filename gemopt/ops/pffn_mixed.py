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
from gemopt.ops.pffn_parts import (
    SCHEMA,
    WEIGHTS,
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


def _in_triton(q: Tensor) -> bool:
    if not use_triton(q):
        return False
    from gemopt.kernels.triton.norms import MAX_COLUMNS

    return q.shape[1] * q.shape[2] <= MAX_COLUMNS


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
        x = wide(q)
        normed, stats = layer_norm(x, norm)
        ln = normed.to(k.dtype).view(q.shape)
        a = forward(ln, k, v, spec)[0]
        g = wide(a) + normed
        return affine(g * rms_scale(g, norm), norm.rms_weight, x).view(q.shape), ln, stats, a


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
            dy, rstd = wide(dout), stats[1][:, None]
            n = centred(wide(q), stats[0]) * rstd
            g = wide(a) + affine(n, norm.weight, norm.bias)
            r = rms_scale(g, norm)
            m = g * r
            dm = affine(dy, norm.rms_weight, None)
            dg = (dm - m * (dm * m).mean(1, keepdim=True)) * r
            dln, dk, dv, _ = backward(dg.to(a.dtype).view(a.shape), ln, k, v, None, None, spec, False)
            dx = wide(dln) + dg
            sums = [None if w is None else x.sum(0) for x, w in zip((dx * n, dx, dy * m), args[WEIGHTS:], strict=True)]
            dq = (layer_norm_gradient(dx, n, rstd, norm) + dy).to(q.dtype).view(q.shape)
    return dq, dk, dv, *like_weights(sums, args, q)  # type: ignore[return-value]


@_pffn_mixed_backward.fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, ln: Tensor, stats: Tensor, a: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return fake_gradients(q, k, v, args)  # type: ignore[return-value]


differentiate(pffn_mixed, _pffn_mixed_backward, lambda weights: True)
