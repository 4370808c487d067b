"""GDPA of one dense group by explicit scores: an activation in place of the softmax, so rows do not know of each other.

    S = scale * Q K^T + bias     P = act(S) where visible, else 0     O = post r (keep P) V
    dP = post r keep (dO V^T)    dS = act'(S) * dP where visible      dbias = dS
    dQ = scale * dS K            dK = scale * dS^T Q                  dV = post r (keep P)^T dO

`keep` is the dropout mask, r = 1/(1-p), `post` the scale after the activation. Queries run in blocks as in `math_path`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gemopt.kernels.cpu import activations
from gemopt.kernels.cpu.math_path import Dropout, Mask, blocks, scores
from gemopt.kernels.cpu.tables import Table


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Table | None,
    scale: float,
    post_scale: float,
    names: Sequence[str],
    dropout: Dropout | None,
) -> Tensor:
    """q `[n, H, Lq, D]`, k `[n, H, Lk, D]`, v `[n, H, Lk, Dv]` → `[n, H, Lq, Dv]`."""
    n, heads, lq, _ = q.shape
    out = q.new_empty((n, heads, lq, v.shape[-1]))
    q = q * scale
    factor = post_scale if dropout is None else post_scale * dropout.multiplier
    for a, b in blocks(lq, n * heads * k.shape[2]):
        p = activations.value(scores(q, k, mask, bias, a, b, 0.0), names)
        keys = p.shape[-1]
        seen = mask.block(a, b, keys) if "sigmoid" in names else None  # every other activation of 0 is 0
        if seen is not None:
            p.masked_fill_(~seen, 0.0)
        if dropout is not None:
            p.mul_(dropout.keep(a, b, keys))
        torch.mul(p @ v[:, :, :keys], factor, out=out[:, :, a:b])
    return out


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Table | None,
    scale: float,
    post_scale: float,
    names: Sequence[str],
    dropout: Dropout | None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; padding queries must come with `dout` 0. Adds the gradient of the bias to `dbias`."""
    n, heads, lq, _ = q.shape
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q = q * scale
    dout = dout * (post_scale if dropout is None else post_scale * dropout.multiplier)
    for a, b in blocks(lq, n * heads * k.shape[2]):
        s = scores(q, k, mask, bias, a, b, 0.0)
        keys = s.shape[-1]
        do, seen = dout[:, :, a:b], mask.block(a, b, keys)
        weights = activations.value(s, names)
        dp = do @ v[:, :, :keys].transpose(-2, -1)
        if dropout is not None:
            keep = dropout.keep(a, b, keys)
            weights.mul_(keep)
            dp.mul_(keep)
        ds = activations.gradient(dp, s, names)
        if seen is not None:
            ds.masked_fill_(~seen, 0.0)
            weights.masked_fill_(~seen, 0.0)
        dv[:, :, :keys] += weights.transpose(-2, -1) @ do
        if bias is not None and dbias is not None:
            bias.add(dbias, a, b, ds)
        torch.mul(ds @ k[:, :, :keys], scale, out=dq[:, :, a:b])
        dk[:, :, :keys] += ds.transpose(-2, -1) @ q[:, :, a:b]
    return dq, dk, dv
