"""InterFormer's cross arch: gates and summaries through which features and histories inform each other.

    Gate(X)  = σ( X ⊙ MLP(X) )                            MLP over features, token by token
    X_sum    = Gate( W X )                                W over tokens, n to n_sum << n
    S_sum    = Gate( [S_CLS ‖ S_PMA ‖ S_recent] )         leading tokens, pooled tokens, the last K events

InterFormer (arXiv:2411.09852, section 4.3). The paper does not name σ there; its public configuration uses Swish
throughout, and so do we. Ours: the gate's MLP starts near 1, as MaskNet's does, so that it passes its input on; an MLP that
starts near 0 squares what is small already, and hands on a twentieth of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_positive
from .mlp import MLP, TokenMix
from .pooling import PMA


class Gate(nn.Module):
    """``silu(x ⊙ MLP(x))`` on [.., d]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mlp = MLP([d, d, d])
        nn.init.ones_(self.mlp.layers[-1].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x * self.mlp(x))


class FeatureSummary(nn.Module):
    """X_sum: [B, n, d] to [B, n_sum, d]."""

    def __init__(self, n: int, n_sum: int, d: int) -> None:
        super().__init__()
        check_positive(n=n, n_sum=n_sum, d=d)
        self.mix, self.gate = TokenMix(n, n_sum), Gate(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.mix(x))


def recent(s: Tensor, mask: Tensor, length: Tensor, k: int) -> Tensor:
    """The last k rows of every sequence, newest first: [B, L, d] to [B, k, d], 0 where there are fewer than k."""
    s = s * mask.unsqueeze(-1)
    index = length[:, None] - 1 - torch.arange(k, device=s.device)
    rows = s.gather(1, index.clamp(min=0)[:, :, None].expand(-1, -1, s.shape[2]))
    return rows * (index >= 0).unsqueeze(-1)


class SequenceSummary(nn.Module):
    """S_sum: ``forward(s [B, L, d], length [B], mask [B, L])`` gives [B, n_cls + n_pma + n_recent, d].

    Args:
        n_cls: leading rows of s that are CLS tokens; ``length`` and ``mask`` count them.
    """

    def __init__(self, d: int, n_heads: int, n_cls: int = 0, n_pma: int = 2, n_recent: int = 2) -> None:
        super().__init__()
        check_positive(n_pma=n_pma, n_recent=n_recent)
        self.n_cls, self.n_recent, self.n_tokens = n_cls, n_recent, n_cls + n_pma + n_recent
        self.pma, self.gate = PMA(n_pma, d, n_heads), Gate(d)

    def forward(self, s: Tensor, length: Tensor, mask: Tensor) -> Tensor:
        s = s * mask.unsqueeze(-1)
        parts = [s[:, : self.n_cls]] if self.n_cls else []
        return self.gate(torch.cat([*parts, self.pma(s, mask), recent(s, mask, length, self.n_recent)], dim=1))
