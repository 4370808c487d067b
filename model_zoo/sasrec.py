"""SASRec: next-item prediction by a causal transformer (Kang and McAuley, "Self-Attentive Sequential
Recommendation", ICDM 2018), in the post-norm, GELU form of today's re-implementations.

Plain padded PyTorch: the batch is padded to a common length and every layer computes every slot of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class SASRecConfig:
    """Sizes; ``n_items`` includes the padding id 0."""

    n_items: int
    max_len: int = 200
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 2
    d_inner: int = 256
    dropout: float = 0.0
    pooling: Literal["last", "mean"] = "last"
    attention: Literal["softmax", "sdpa"] = "softmax"

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {self.d_model} and {self.n_heads}")
        if self.pooling not in ("last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', got {self.pooling!r}")
        if self.attention not in ("softmax", "sdpa"):
            raise ValueError(f"attention must be 'softmax' or 'sdpa', got {self.attention!r}")


class SelfAttention(nn.Module):
    """Multi-head attention on ``x`` [B, L, d]; ``allowed`` [B, 1, L, L] is True where a query sees a key."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.n_heads, self.spelling, self.p = config.n_heads, config.attention, config.dropout
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        b, n, d = x.shape
        shape = (b, n, self.n_heads, d // self.n_heads)
        q = self.query(x).view(shape).transpose(1, 2)
        k = self.key(x).view(shape).transpose(1, 2)
        v = self.value(x).view(shape).transpose(1, 2)
        if self.spelling == "sdpa":
            h = F.scaled_dot_product_attention(q, k, v, allowed, dropout_p=self.p if self.training else 0.0)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.n_heads)
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            h = self.dropout(scores.softmax(-1)) @ v
        return self.out(h.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    """Post-norm transformer block."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.norm1 = nn.LayerNorm(config.d_model)
        self.inner = nn.Linear(config.d_model, config.d_inner)
        self.outer = nn.Linear(config.d_inner, config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, allowed)))
        return self.norm2(x + self.dropout(self.outer(F.gelu(self.inner(x)))))


class SASRec(nn.Module):
    """``forward(items [B, L], lengths [B])``, both int64, gives the next item's logits [B, n_items]."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.config = config
        self.item = nn.Embedding(config.n_items, config.d_model, padding_idx=0)
        self.position = nn.Embedding(config.max_len, config.d_model)
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.apply(_init)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(items.shape[1], device=items.device)
        mask = positions[None, :] < lengths[:, None]
        causal = positions[None, :] <= positions[:, None]
        allowed = causal[None, None] & mask[:, None, None, :]

        x = self.dropout(self.norm(self.item(items) + self.position(positions)))
        for block in self.blocks:
            x = block(x, allowed)

        if self.config.pooling == "last":
            last = (lengths - 1).clamp(min=0)
            pooled = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)
            pooled = pooled * (lengths > 0)[:, None]
        else:
            pooled = (x * mask[..., None]).sum(1) / lengths.clamp(min=1)[:, None]
        return pooled @ self.item.weight.T


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()
