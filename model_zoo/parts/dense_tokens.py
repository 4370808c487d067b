"""Real-valued features as tokens.

    X_dense = reshape(W x + b)        [B, n_dense] to [B, n_tokens, d]

All dense features of a sample are concatenated and projected together (InterFormer, arXiv:2411.09852, section 3: one
token; DLRM's bottom MLP, arXiv:1906.00091, is the same with a hidden layer).
"""

from __future__ import annotations

from torch import Tensor, nn

from .checks import check_positive
from .mlp import MLP


class DenseTokens(nn.Module):
    """``forward(x [B, n_dense])`` gives [B, n_tokens, d]. ``hidden``: width of a hidden layer, None for none."""

    def __init__(self, n_dense: int, d: int, n_tokens: int = 1, hidden: int | None = None) -> None:
        super().__init__()
        check_positive(n_dense=n_dense, d=d, n_tokens=n_tokens)
        self.n_tokens, self.d = n_tokens, d
        sizes = [n_dense, n_tokens * d] if hidden is None else [n_dense, hidden, n_tokens * d]
        self.mlp: nn.Module = MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).unflatten(1, (self.n_tokens, self.d))
