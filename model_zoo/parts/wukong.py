"""Wukong: stacked factorisation machines over feature tokens.

    X' = LN( [FMB(X) ‖ LCB(X)] + Res(X) )
    FMB(X) = reshape( Lin(MLP(LN(flatten( X Xᵀ Y )))) ),  Y [n, k] learned     n_F tokens, computed as X (Xᵀ Y)
    LCB(X) = W_L X                                                             n_L tokens
    Res: identity, or a linear map over tokens where n_F + n_L ≠ n

Wukong (arXiv:2403.02545); layer i holds interactions of order up to 2^i.

Ours: a layer that reads context beside its own tokens starts with a Res that passes those on and leaves the context out.
Drawn at random, Res drowns a few tokens in much context: after six layers little is left of the features, and less of their
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import check_positive
from .mlp import MLP, TokenMix


class FMB(nn.Module):
    """Factorisation machine block, [B, n, d] to [B, n_out, d]."""

    def __init__(self, n: int, n_out: int, d: int, rank: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.n_out, self.d = n_out, d
        self.project = nn.Parameter(torch.randn(n, rank) * n**-0.5)
        self.norm = nn.LayerNorm(n * rank)
        self.mlp = MLP([n * rank, *hidden, n_out * d], "relu")

    def forward(self, x: Tensor) -> Tensor:
        interactions = x @ (x.transpose(1, 2) @ self.project)  # [B, n, rank]
        return self.mlp(self.norm(interactions.flatten(1))).unflatten(1, (self.n_out, self.d))


class WukongLayer(nn.Module):
    """``forward(x [B, n, d])`` gives [B, n_out, d].

    Args:
        n_out: tokens of the result, None for n; half of them (rounded up) come from the FMB, the others from the LCB.
        rank: k. hidden: widths of the FMB's MLP.
        context: whether tokens behind the first n_out are context.
    """

    def __init__(
        self,
        n: int,
        d: int,
        n_out: int | None = None,
        rank: int = 8,
        hidden: tuple[int, ...] = (512,),
        context: bool = False,
    ) -> None:
        super().__init__()
        n_out = n if n_out is None else n_out
        check_positive(n=n, d=d, n_out=n_out - 1, rank=rank)
        n_fm = (n_out + 1) // 2
        self.fmb, self.lcb = FMB(n, n_fm, d, rank, hidden), TokenMix(n, n_out - n_fm)
        self.residual = nn.Identity() if n == n_out else TokenMix(n, n_out)
        if context and isinstance(self.residual, TokenMix):
            nn.init.eye_(self.residual.linear.weight)
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([self.fmb(x), self.lcb(x)], dim=1) + self.residual(x))
