"""MaskNet merge: several aligned sequences become one.

    S = [S_1 ‖ ... ‖ S_k],    out = LN(MLP_lce( S ⊙ MLP_mask(S) ))    k × [B, L, d_in] to [B, L, d]

InterFormer (arXiv:2411.09852, section 3) after MaskNet (arXiv:2102.07619): the "mask" is a gate that each event
computes from all of its own fields; it has nothing to do with padding. The aligned sequences of a history are those of
its fields (item, category, ...).

Ours: MLP_mask has one hidden layer of half its width and starts near 1, so that the product passes small embeddings on
instead of squaring them; the LayerNorm gives every sequence stack rows of size 1 to begin with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .checks import check_positive
from .mlp import MLP


class MaskNet(nn.Module):
    """``forward(sequences)``, k tensors [B, L, d_in], gives [B, L, d]. Every event is treated alone."""

    def __init__(self, n_sequences: int, d_in: int, d: int) -> None:
        super().__init__()
        check_positive(n_sequences=n_sequences, d_in=d_in, d=d)
        width = n_sequences * d_in
        self.mask = MLP([width, max(width // 2, 1), width])
        nn.init.ones_(self.mask.layers[-1].bias)  # type: ignore[arg-type]
        self.merge, self.norm = MLP([width, d, d]), nn.LayerNorm(d)

    def forward(self, sequences: Sequence[Tensor]) -> Tensor:
        s = torch.cat(list(sequences), dim=-1)
        return self.norm(self.merge(s * self.mask(s)))
