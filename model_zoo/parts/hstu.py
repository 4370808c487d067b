"""HSTU block: attention with a pointwise SiLU instead of the softmax, gated by the token itself.

    U, Q, K, V = SiLU(Lin(LN(x)))                           [B, L, H, d_v], [B, L, H, d_qk] twice, [B, L, H, d_v]
    A          = SiLU(α Q Kᵀ) / N ⊙ M,   α = 1/√d_qk         M: causal and inside the history
    y          = x + Lin( LN(A V) ⊙ U )

HSTU (arXiv:2402.17152) and its public code (meta-recsys/generative-recommenders). N is the longest history that the model
is built for, a constant: the padded length of a batch would make a result depend on its neighbours.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_heads, check_positive
from .rotary import Rotation, rotate
from .self_attention import visible


class HSTUBlock(nn.Module):
    """``forward(x [B, L, d], mask [B, L], rotation or None)`` gives [B, L, d].

    Args:
        max_len: N. window: keys at a distance of at most this, None for all earlier ones.
    """

    def __init__(self, d: int, n_heads: int, max_len: int, window: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(d, n_heads)
        check_positive(max_len=max_len)
        self.d, self.n_heads, self.head_dim, self.max_len, self.window = d, n_heads, d // n_heads, max_len, window
        self.block, self.causal = None, True
        self.norm, self.attended_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.uqkv, self.out = nn.Linear(d, 4 * d), nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, rotation: Rotation | None = None) -> Tensor:
        u, q, k, v = F.silu(self.uqkv(self.norm(x))).unflatten(-1, (4, self.n_heads, self.head_dim)).unbind(2)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = F.silu(q @ k.transpose(-1, -2) * self.head_dim**-0.5) / self.max_len
        attended = (scores * visible(mask, self.window, causal=True)) @ v
        attended = attended.transpose(1, 2).flatten(-2)
        return x + self.out(self.dropout(self.attended_norm(attended) * u.flatten(-2)))
