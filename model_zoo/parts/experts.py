"""MoW, mixture of Wukong experts over a partition of the feature tokens.

    X = [X_1 ‖ ... ‖ X_M],     X'_m = Wukong_m([X_m ‖ C]),     X' = [X'_1 ‖ ... ‖ X'_M]

"Kunlun" (arXiv:2602.10016): M experts, each on a part of the features, run in parallel on different devices and their
outputs are concatenated. There is no router. The paper's input is [X_sum ‖ H], without saying how it is divided; here
every expert reads its own part of X and all of the context C = [X_sum ‖ H], so that features of different parts interact
through X_sum, and every expert sees the histories.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import check_positive
from .wukong import WukongLayer


def partition(n: int, parts: int) -> list[int]:
    """Sizes of ``parts`` contiguous parts of n tokens, as equal as possible."""
    return [n // parts + (i < n % parts) for i in range(parts)]


class WukongExperts(nn.Module):
    """``forward(x [B, n, d], context [B, c, d])`` gives [B, n, d]."""

    def __init__(
        self, n: int, n_context: int, d: int, n_experts: int = 2, rank: int = 8, hidden: tuple[int, ...] = (512,)
    ) -> None:
        super().__init__()
        check_positive(n_experts=n_experts)
        if n < 2 * n_experts:
            raise ValueError(f"n_experts: got {n_experts}; allowed: at most half of the {n} feature tokens")
        self.sizes = partition(n, n_experts)
        self.experts = nn.ModuleList(WukongLayer(m + n_context, d, m, rank, hidden, context=True) for m in self.sizes)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = x.split(self.sizes, dim=1)
        outs = [expert(torch.cat([part, context], dim=1)) for expert, part in zip(self.experts, parts, strict=True)]
        return torch.cat(outs, dim=1)
