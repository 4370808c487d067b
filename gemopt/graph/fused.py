"""Fused inference ops of torch.nn, spelled out.

In eval mode without gradients ``nn.TransformerEncoderLayer`` calls one operator that hides the whole layer. Capture runs
these functions in its place, so that the analyses see linears, norms and an attention. The formulas are those of the
module's own slow path (torch/nn/modules/transformer.py), which the fused operator is documented to equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Meaning of the fused operators' mask_type argument.
_SOURCE_MASK, _PADDING_MASK, _BOTH = 0, 1, 2


def encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """``torch._transformer_encoder_layer_fwd`` on ``src [B, L, D]``."""

    def attend(x: Tensor) -> Tensor:
        out, _ = attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )
        return out

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm1(src))
        return x + feed_forward(norm2(x))
    x = norm1(src + attend(src))
    return norm2(x + feed_forward(x))


def attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``torch._native_multi_head_attention`` on ``[B, L, D]`` operands."""
    weights = qkv_weight.chunk(3)
    biases = qkv_bias.chunk(3)
    batch, length, _ = query.shape
    heads = []
    for x, w, b in zip((query, key, value), weights, biases, strict=True):
        heads.append(F.linear(x, w, b).view(batch, x.shape[1], num_head, embed_dim // num_head).transpose(1, 2))
    q, k, v = heads
    scores = q @ k.transpose(-1, -2) * (embed_dim // num_head) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(_aligned(mask, mask_type), -float("inf"))
    p = scores.softmax(-1)
    out = (p @ v).transpose(1, 2).reshape(batch, length, embed_dim)
    shown = (p.mean(1) if average_attn_weights else p) if need_weights else None
    return F.linear(out, proj_weight, proj_bias), shown


def _aligned(mask: Tensor, mask_type: int | None) -> Tensor:
    """The mask (True: not allowed) as it broadcasts to ``[B, H, L, L]``."""
    mask = mask.to(torch.bool)
    if mask_type == _PADDING_MASK:
        return mask[:, None, None, :]
    if mask_type in (_SOURCE_MASK, None):
        return mask
    assert mask_type == _BOTH
    return mask if mask.ndim == 4 else mask[:, None]


FUSED: dict[Any, Callable[..., Any]] = {
    torch._transformer_encoder_layer_fwd: encoder_layer,
    torch._native_multi_head_attention: attention,
}
