"""Self-attention inside a history: full, in a sliding window, or in blocks of 64 tokens.

    out = S + W_O MHA(Norm(S)),     head: softmax(Q Kᵀ / √head_dim where key j is visible to query i) V

    full      j is an event                                  causal: j ≤ i as well
    window w  and |i − j| ≤ w, in both directions            "Kunlun" (arXiv:2602.10016)
    block n   and ⌊i/n⌋ = ⌊j/n⌋, counted from the first      PyTorch blog "TLX block attention" (2026-05-26), n = 64

Queries and keys, in the block form values too, are turned by the rotary angles (parts/rotary.py). Norms are LayerNorms
before the attention, without affine weights, as in production (PyTorch blog "Towards free normalization", 2026-07-10).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_heads, check_positive
from .rotary import Rotation, rotate


def visible(mask: Tensor, window: int | None = None, block: int | None = None, causal: bool = False) -> Tensor:
    """[B, 1, L, L] bool, True where the query of a row sees the key of a column; ``mask`` [B, L] is True at events."""
    position = torch.arange(mask.shape[1], device=mask.device)
    i, j = position[:, None], position[None, :]
    allowed = mask[:, None, None, :]
    if window is not None:
        allowed = allowed & ((i - j).abs() <= window)
    if block is not None:
        allowed = allowed & (i // block == j // block)
    if causal:
        allowed = allowed & (j <= i)
    return allowed


def visible_pairs(n: int, window: int | None = None, block: int | None = None, causal: bool = False) -> int:
    """How many (query, key) pairs of ``visible`` a history of n events has; what attention has to compute."""
    total = 0
    for i in range(n):
        first, last = (0, n - 1) if window is None else (max(i - window, 0), min(i + window, n - 1))
        if block is not None:
            first, last = max(first, i // block * block), min(last, i // block * block + block - 1)
        total += (min(last, i) if causal else last) - first + 1
    return total


class SelfAttention(nn.Module):
    """``forward(s [B, L, d], mask [B, L], rotation or None)`` gives [B, L, d].

    Args:
        window: keys at a distance of at most this. block: size of the blocks. None: no such limit.
        rotate_values: whether values are turned too.
    """

    def __init__(
        self,
        d: int,
        n_heads: int,
        window: int | None = None,
        block: int | None = None,
        causal: bool = False,
        rotate_values: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_heads(d, n_heads)
        if window is not None and window < 0:
            raise ValueError(f"window: got {window}; allowed: 0 or more, or None")
        if block is not None:
            check_positive(block=block)
        self.d, self.n_heads, self.p = d, n_heads, dropout
        self.window, self.block, self.causal, self.rotate_values = window, block, causal, rotate_values
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, s: Tensor, mask: Tensor, rotation: Rotation | None = None) -> Tensor:
        x = F.layer_norm(s, (self.d,))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, self.d // self.n_heads)).unbind(2)  # [B, L, H, head_dim]
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
            v = rotate(v, rotation) if self.rotate_values else v
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        allowed = visible(mask, self.window, self.block, self.causal)
        p = self.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=p)
        return s + self.out(h.transpose(1, 2).flatten(-2))
