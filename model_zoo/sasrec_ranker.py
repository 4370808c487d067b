"""SASRec (ICDM 2018) as a ranking model: the candidate is scored against the last state of every history.

    S_h     = causal transformer over the event embeddings of history h + positions (sasrec.py)
    logit_t = Σ_h a_th <last event of S_h, candidate_h> / √d + b_t,domain

The candidate is embedded like an event (parts/target.py). Nothing else of the request is used, as in the paper; a baseline
for models that do. Scores of several histories are added with a learned weight each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .data.schema import Schema
from .parts.embeddings import EmbeddingTables, real
from .parts.interformer import recent
from .parts.self_attention import visible
from .parts.target import has_target, target_features
from .sasrec import Block, SASRecConfig


@dataclass(frozen=True)
class SASRecRankerConfig:
    """``d_inner``: hidden width of the transformer's feed-forward layers."""

    d: int = 64
    n_heads: int = 2
    n_layers: int = 2
    d_inner: int = 256
    dropout: float = 0.0
    embeddings: str = "torch"

    def block(self) -> SASRecConfig:
        return SASRecConfig(1, 1, self.d, self.n_layers, self.n_heads, self.d_inner, self.dropout, attention="sdpa")


class SASRecRanker(nn.Module):
    """``forward(batch)``, a batch as in data/schema.py, gives the logit [B] of every task.

    Raises ValueError for a schema in which no history shares a table with a single-valued feature.
    """

    def __init__(self, schema: Schema, config: SASRecRankerConfig) -> None:
        super().__init__()
        self.config, self.tasks = config, schema.tasks
        self.targets = {event: target_features(schema, event) for event in schema.events if has_target(schema, event)}
        if not self.targets:
            raise ValueError("schema: no history shares a table with a single-valued feature; allowed: at least one")
        names = list(self.targets)
        used = {name for fields in self.targets.values() for name in fields.values()}
        read = replace(
            schema,
            sparse={name: feature for name, feature in schema.sparse.items() if name in used},
            events={e: schema.events[e] for e in names},
        )
        self.tables = EmbeddingTables(read, config.d, config.embeddings)
        self.positions: Any = nn.ModuleDict({e: nn.Embedding(schema.events[e].max_len, config.d) for e in names})
        self.stacks: Any = nn.ModuleDict(
            {e: nn.ModuleList(Block(config.block()) for _ in range(config.n_layers)) for e in names}
        )
        self.norm = nn.LayerNorm(config.d)
        self.weight = nn.Parameter(torch.ones(len(names), len(self.tasks)))
        self.bias = nn.Parameter(torch.zeros(schema.n_domains, len(self.tasks)))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        embedded = self.tables(batch)
        scores = []
        for event, fields in self.targets.items():
            s = sum(embedded.events[event][field] for field in fields)
            last = self.last(event, s, batch[f"{event}_length"])  # type: ignore[arg-type]
            candidate = sum(embedded.features[name] for name in fields.values() if name)
            scores.append((last * candidate).sum(-1) / self.config.d**0.5)
        logits = torch.stack(scores, dim=1) @ self.weight + self.bias[batch["domain"]]
        return {task: logits[:, i] for i, task in enumerate(self.tasks)}

    def last(self, event: str, s: Tensor, length: Tensor) -> Tensor:
        """State of the last event of a history, [B, d]; 0 if it has none."""
        mask = real(length, s)
        allowed = visible(mask, causal=True)
        s = self.norm(s + self.positions[event].weight[: s.shape[1]])
        for block in self.stacks[event]:
            s = block(s, allowed)
        return recent(s, mask, length, 1).squeeze(1)
