"""HSP, hierarchical seed pooling: many seeds attend to the history, a Kronecker map compresses them to few tokens.

    H_seed = MHA(Norm(E), S, S),        E [n_seeds, d] learned, n_seeds > n_tokens        [B, n_seeds, d]
    Y      = Σ_{i=1..k} Z_iᵀ H_seed W_i,    Z_i [n_seeds, n_tokens], W_i [d, d]           [B, n_tokens, d]

"Kunlun" (arXiv:2602.10016). A full linear map from n_seeds · d to n_tokens · d numbers would have n_seeds · n_tokens · d²
parameters; SumKronLinear, a sum of k Kronecker products, has k (n_seeds · n_tokens + d²).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import check_positive
from .pooling import PMA


class SumKronLinear(nn.Module):
    """``Y_b = Σ_i Z_iᵀ X_b W_i``: [B, n_in, d] to [B, n_out, d]. Starts with the variance of its input kept."""

    def __init__(self, n_in: int, n_out: int, d: int, rank: int = 8) -> None:
        super().__init__()
        check_positive(n_in=n_in, n_out=n_out, d=d, rank=rank)
        self.z = nn.Parameter(torch.randn(rank, n_in, n_out) * n_in**-0.5)
        self.w = nn.Parameter(torch.randn(rank, d, d) * (rank * d) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("bsd,kst->bktd", x, self.z)  # tokens first: n_out < n_in makes what follows small
        return torch.einsum("bktd,kde->bte", mixed, self.w)


class SeedPooling(nn.Module):
    """``forward(s [B, L, d], mask [B, L])`` gives [B, n_tokens, d]; an empty history gives 0."""

    def __init__(self, d: int, n_heads: int, n_seeds: int, n_tokens: int, rank: int = 8) -> None:
        super().__init__()
        if n_seeds < n_tokens:
            raise ValueError(f"n_seeds: got {n_seeds}; allowed: at least n_tokens = {n_tokens}")
        self.attend = PMA(n_seeds, d, n_heads, norm=True)
        self.compress = SumKronLinear(n_seeds, n_tokens, d, rank)

    def forward(self, s: Tensor, mask: Tensor) -> Tensor:
        return self.compress(self.attend(s, mask))
