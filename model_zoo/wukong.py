"""Wukong (arXiv:2403.02545) over feature tokens, with every history pooled to one of them.

    X_0 = [features ‖ mean over events of S_h, for every history h],    X_{i+1} = WukongLayer(X_i),    logit = heads(X_l)

The paper has no event histories; a mean over their events is what the DLRM family does with multi-valued features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .data.schema import Schema
from .parts.checks import check_positive
from .parts.heads import Heads
from .parts.inputs import History, Inputs
from .parts.wukong import WukongLayer


@dataclass(frozen=True)
class WukongConfig:
    """``rank`` k and ``hidden`` widths of the factorisation machines; ``n_tokens`` after the first layer, None for as
    many as there are features and histories."""

    d: int = 64
    n_layers: int = 3
    n_tokens: int | None = None
    rank: int = 8
    hidden: tuple[int, ...] = (256,)
    trunk: tuple[int, ...] = (256,)
    tower: int = 64
    d_embedding: int | None = None
    embeddings: str = "torch"

    def __post_init__(self) -> None:
        check_positive(d=self.d, n_layers=self.n_layers, rank=self.rank)


def mean(history: History) -> Tensor:
    """Mean over the events of a history [B, d]; 0 if it has none."""
    total = (history.s * history.mask.unsqueeze(-1)).sum(1)
    return total / history.length.clamp(min=1).unsqueeze(-1)


class Wukong(nn.Module):
    """``forward(batch)``, a batch as in data/schema.py, gives the logit [B] of every task."""

    def __init__(self, schema: Schema, config: WukongConfig) -> None:
        super().__init__()
        self.config = config
        self.inputs = Inputs(schema, config.d, d_embedding=config.d_embedding, embeddings=config.embeddings)
        n = self.inputs.n_tokens + len(schema.events)
        inner = config.n_tokens or n
        sizes = [n] + [inner] * config.n_layers
        self.layers = nn.ModuleList(WukongLayer(a, config.d, inner, config.rank, config.hidden) for a in sizes[:-1])
        self.heads = Heads(inner * config.d, schema.tasks, schema.n_domains, config.trunk, config.tower)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x, histories = self.inputs(batch)
        if histories:
            x = torch.cat([x, torch.stack([mean(h) for h in histories.values()], dim=1)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.heads(x.flatten(1), batch["domain"])
