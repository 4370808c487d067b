"""Kunlun: feature interaction and history modelling in one layer, stacked ("Kunlun", arXiv:2602.10016).

    X_sum = summary of X
    H_h   = HSP(S_h), or that of the layer before (CompSkip)              for every history h
    X'    = MoW([X ‖ X_sum ‖ H_1 ‖ ... ‖ H_k])                            mixture of Wukong experts
    S_h'  = SelfAttention(PFFN(X_sum, S_h)), or one of the two (CompSkip)

Plain padded PyTorch: every history is padded to its longest in the batch and every slot is computed. Both sides of a layer
read the same X and S, so they may run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .data.schema import Schema
from .parts.checks import check_heads, check_positive
from .parts.experts import WukongExperts
from .parts.heads import Heads
from .parts.inputs import History, Inputs
from .parts.interformer import FeatureSummary
from .parts.kunlun import EventConfig, SequenceStack
from .parts.seed_pooling import SeedPooling


@dataclass(frozen=True)
class KunlunConfig:
    """Sizes. ``event`` is the stack of every history; ``long_event``, if given, that of histories whose longest has
    ``long_from`` events or more; ``events`` names exceptions."""

    d: int = 64
    n_heads: int = 2
    n_layers: int = 2
    n_sum: int = 8
    n_experts: int = 2
    rank: int = 8
    hidden: tuple[int, ...] = (256,)
    event: EventConfig = field(default_factory=EventConfig)
    long_event: EventConfig | None = None
    long_from: int = 1024
    events: dict[str, EventConfig] = field(default_factory=dict)
    comp_skip: bool = True
    trunk: tuple[int, ...] = (256,)
    tower: int = 64
    d_embedding: int | None = None
    embeddings: str = "torch"

    def __post_init__(self) -> None:
        check_heads(self.d, self.n_heads)
        check_positive(n_layers=self.n_layers, n_sum=self.n_sum, n_experts=self.n_experts, rank=self.rank)

    def event_configs(self, schema: Schema) -> dict[str, EventConfig]:
        """The stack of every history of a schema. Raises ValueError for exceptions that it does not have."""
        unknown = sorted(set(self.events) - set(schema.events))
        if unknown:
            raise ValueError(f"events: got {', '.join(unknown)}; allowed: {', '.join(schema.events)}")
        return {name: self.events.get(name, self._default(e.max_len)) for name, e in schema.events.items()}

    def _default(self, max_len: int) -> EventConfig:
        return self.long_event if self.long_event is not None and max_len >= self.long_from else self.event


class Backbone(nn.Module):
    """Inputs and stacked layers: ``forward(batch)`` gives X [B, n, d], the histories after the last layer, and their
    pooled tokens [B, n_tokens, d]. GEM has the same backbone and another read-out."""

    def __init__(self, schema: Schema, config: KunlunConfig) -> None:
        super().__init__()
        self.events = config.event_configs(schema)
        widths = {name: event.d for name, event in self.events.items()}
        self.inputs = Inputs(schema, config.d, widths, config.d_embedding, config.embeddings)
        n, layers = self.inputs.n_tokens, config.n_layers
        n_context = config.n_sum + sum(event.n_tokens for event in self.events.values())
        self.summaries = nn.ModuleList(FeatureSummary(n, config.n_sum, config.d) for _ in range(layers))
        self.experts = nn.ModuleList(
            WukongExperts(n, n_context, config.d, config.n_experts, config.rank, config.hidden) for _ in range(layers)
        )
        self.stacks: Any = nn.ModuleDict(
            {
                name: SequenceStack(
                    event, layers, config.comp_skip, config.n_sum, config.d, config.d, schema.events[name].max_len
                )
                for name, event in self.events.items()
            }
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, History], dict[str, Tensor]]:
        x, histories = self.inputs(batch)
        rotations = {name: self.stacks[name].rotation(history) for name, history in histories.items()}
        pooled: dict[str, Tensor] = {}
        for number, (summary, experts) in enumerate(zip(self.summaries, self.experts, strict=True)):
            x_sum = summary(x)
            for name, history in histories.items():
                if number < len(self.stacks[name].layers):
                    layer = self.stacks[name].layers[number]
                    fresh = layer.pool(history)
                    pooled[name] = pooled[name] if fresh is None else fresh
                    histories[name] = layer(history, x_sum, rotations[name])
            x = experts(x, torch.cat([x_sum, *pooled.values()], dim=1))
        return x, histories, pooled


class SequenceReadout(nn.Module):
    """A last hierarchical seed pooling: ``forward(history)`` gives [B, n_tokens, d]."""

    def __init__(self, event: EventConfig, d: int) -> None:
        super().__init__()
        self.seeds = SeedPooling(event.d, event.n_heads, event.n_seeds, event.n_tokens, event.kron_rank)
        self.project = nn.Identity() if event.d == d else nn.Linear(event.d, d, bias=False)

    def forward(self, history: History) -> Tensor:
        return self.project(self.seeds(history.s, history.mask))


class Kunlun(nn.Module):
    """``forward(batch)``, a batch as in data/schema.py, gives the logit [B] of every task.

    The record does not say what the head reads: here X after the last layer and each history pooled once more.
    """

    def __init__(self, schema: Schema, config: KunlunConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(schema, config)
        last = {name: SequenceReadout(event, config.d) for name, event in self.backbone.events.items()}
        self.readout = nn.ModuleDict(last)
        self.summary = FeatureSummary(self.backbone.inputs.n_tokens, config.n_sum, config.d)
        width = (config.n_sum + sum(event.n_tokens for event in self.backbone.events.values())) * config.d
        self.heads = Heads(width, schema.tasks, schema.n_domains, config.trunk, config.tower)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x, histories, _ = self.backbone(batch)
        tokens = [self.summary(x)] + [self.readout[name](history) for name, history in histories.items()]
        return self.heads(torch.cat(tokens, dim=1).flatten(1), batch["domain"])
