"""Pooling by multi-head attention: a few queries summarise a history.

    PMA(S) = MHA(Q, S, S),   Q [n_queries, d] learned          [B, L, d] to [B, n_queries, d]

PMA comes from the Set Transformer (arXiv:1810.00825); InterFormer (arXiv:2411.09852) pools histories with it. Empty
histories give 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_heads, check_positive


class PMA(nn.Module):
    """``forward(s [B, L, d], mask [B, L])`` gives [B, n_queries, d].

    Args:
        norm: whether the queries pass a LayerNorm first, as Kunlun's seeds do.
    """

    def __init__(self, n_queries: int, d: int, n_heads: int, norm: bool = False) -> None:
        super().__init__()
        check_heads(d, n_heads)
        check_positive(n_queries=n_queries)
        self.n_heads, self.head_dim = n_heads, d // n_heads
        self.queries = nn.Parameter(torch.randn(n_queries, d) * d**-0.5)
        self.norm = nn.LayerNorm(d) if norm else nn.Identity()
        self.q, self.k, self.v, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, s: Tensor, mask: Tensor) -> Tensor:
        shape = (self.n_heads, self.head_dim)
        q = self.q(self.norm(self.queries)).unflatten(-1, shape).transpose(0, 1)  # [H, n_queries, head_dim]
        k = self.k(s).unflatten(-1, shape).transpose(1, 2)
        v = self.v(s).unflatten(-1, shape).transpose(1, 2)
        q = q.expand(s.shape[0], -1, -1, -1)
        pooled = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        pooled = self.out(pooled.transpose(1, 2).flatten(-2))
        return pooled * mask.any(1)[:, None, None]  # what attention over nothing gives differs between kernels
