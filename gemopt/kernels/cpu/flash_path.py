"""Attention of one dense group by PyTorch's flash attention for the CPU, which takes strides, masks and any batch.

It wants as many key heads as query heads and equal head sizes; key heads shared by several query heads are served by one
call per member of the sharing, on strided views. Formulas as in `math_path`, without dropout.
"""

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q `[n, H, Lq, D]`, k and v `[n, Hkv, Lk, D]`, mask 0 or -inf, broadcastable to `[n, 1, Lq, Lk]`.

    Returns out `[n, H, Lq, D]` and lse `[n, H, Lq]`.
    """
    sharing = q.shape[1] // k.shape[1]
    if sharing == 1:
        out, lse = _forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    parts = [_forward(q[:, g::sharing], k, v, 0.0, causal, attn_mask=mask, scale=scale) for g in range(sharing)]
    out, lse = (torch.stack(x, 2).flatten(1, 2) for x in zip(*parts, strict=True))
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the shapes of q, k, v; padding queries must come with `dout` 0."""
    sharing = q.shape[1] // k.shape[1]
    if sharing == 1:
        dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return dq, dk, dv
    parts = []
    for g in range(sharing):
        mine = (x[:, g::sharing] for x in (dout, q))
        do, qg = mine
        parts.append(
            _backward(do, qg, k, v, out[:, g::sharing], lse[:, g::sharing], 0.0, causal, attn_mask=mask, scale=scale)
        )
    dqs, dks, dvs = zip(*parts, strict=True)
    return torch.stack(dqs, 2).flatten(1, 2), torch.stack(dks).sum(0), torch.stack(dvs).sum(0)
