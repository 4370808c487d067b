"""HSTU (arXiv:2402.17152) as a ranking model: one causal stack per event type, the candidate scored from its last events.

    S_h⁽ˡ⁺¹⁾ = HSTUBlock(S_h⁽ˡ⁾),    r_h = [last event of S_h⁽ᴸ⁾ ‖ mean of S_h⁽ᴸ⁾],    logit = heads([features ‖ r_1 ‖ ...])

The paper interleaves items and actions of one sequence; with several event types one stack per type, as ULTRA-HSTU's
mixture of transducers (arXiv:2602.16986) does. Relative position and time biases of the paper are given by rotary angles
of position and age. The candidate is among the features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .data.schema import Schema
from .parts.checks import check_heads, check_positive
from .parts.heads import Heads
from .parts.hstu import HSTUBlock
from .parts.inputs import History, Inputs
from .parts.interformer import recent
from .parts.rotary import Rotary
from .wukong import mean


@dataclass(frozen=True)
class HSTUConfig:
    """``window``: earlier events at a distance of at most this, None for all."""

    d: int = 64
    n_heads: int = 2
    n_layers: int = 3
    window: int | None = None
    dropout: float = 0.0
    trunk: tuple[int, ...] = (256,)
    tower: int = 64
    d_embedding: int | None = None
    embeddings: str = "torch"

    def __post_init__(self) -> None:
        check_heads(self.d, self.n_heads)
        check_positive(n_layers=self.n_layers)


class HSTU(nn.Module):
    """``forward(batch)``, a batch as in data/schema.py, gives the logit [B] of every task."""

    def __init__(self, schema: Schema, config: HSTUConfig) -> None:
        super().__init__()
        self.config, d = config, config.d
        self.inputs = Inputs(schema, d, d_embedding=config.d_embedding, embeddings=config.embeddings)
        self.rotary = Rotary(d // config.n_heads)
        self.stacks: Any = nn.ModuleDict(
            {
                name: nn.ModuleList(
                    HSTUBlock(d, config.n_heads, event.max_len, config.window, config.dropout)
                    for _ in range(config.n_layers)
                )
                for name, event in schema.events.items()
            }
        )
        self.norm = nn.LayerNorm(d)
        n_tokens = self.inputs.n_tokens + 2 * len(schema.events)
        self.heads = Heads(n_tokens * d, schema.tasks, schema.n_domains, config.trunk, config.tower)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x, histories = self.inputs(batch)
        tokens = [x.flatten(1)] + [self.read(name, history) for name, history in histories.items()]
        return self.heads(torch.cat(tokens, dim=1), batch["domain"])

    def read(self, name: str, history: History) -> Tensor:
        """Last event and mean of one history after its stack, [B, 2 d]."""
        s, rotation = history.s, self.rotary(history.age)
        for block in self.stacks[name]:
            s = block(s, history.mask, rotation)
        history = history._replace(s=self.norm(s))
        return torch.cat([recent(history.s, history.mask, history.length, 1).flatten(1), mean(history)], dim=1)
