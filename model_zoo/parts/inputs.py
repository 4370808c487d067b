"""From a batch to what every model starts with: feature tokens and event sequences.

X = LN([dense token ‖ one token per sparse feature ‖ domain token])      [B, n, d]
S_h = MaskNet(fields of history h)                                       [B, L, d_h], one width per history
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data.schema import Schema
from .dense_tokens import DenseTokens
from .embeddings import Embedded, EmbeddingTables, real
from .masknet import MaskNet


class History(NamedTuple):
    """One history: ``s`` [B, L, d], ``mask`` [B, L] bool, ``length`` [B] int64, ``age`` [B, L] seconds."""

    s: Tensor
    mask: Tensor
    length: Tensor
    age: Tensor


class Inputs(nn.Module):
    """``forward(batch)`` gives the feature tokens [B, n_tokens, d] and the histories, by name. A model that needs the
    embeddings themselves calls ``tables(batch)`` and passes the result on.

    Args:
        d: width of the tokens. d_events: width of each history, d where it is not named.
        d_embedding: width of the embedding tables, None for d; tokens are then projected, with one map for all.
    """

    def __init__(
        self,
        schema: Schema,
        d: int,
        d_events: dict[str, int] | None = None,
        d_embedding: int | None = None,
        embeddings: str = "torch",
        pooling: str = "mean",
    ) -> None:
        super().__init__()
        self.schema, d_embedding = schema, d_embedding or d
        self.tables = EmbeddingTables(schema, d_embedding, embeddings, pooling)
        self.project = nn.Identity() if d_embedding == d else nn.Linear(d_embedding, d, bias=False)
        self.dense = DenseTokens(schema.n_dense, d) if schema.n_dense else None
        self.domain = nn.Embedding(schema.n_domains, d) if schema.n_domains > 1 else None
        widths = {name: (d_events or {}).get(name, d) for name in schema.events}
        self.merge = nn.ModuleDict(
            {name: MaskNet(len(e.fields), d_embedding, widths[name]) for name, e in schema.events.items()}
        )
        self.norm = nn.LayerNorm(d)  # embeddings start much smaller than projected dense features
        self.n_tokens = bool(schema.n_dense) + len(schema.sparse) + (schema.n_domains > 1)
        if self.n_tokens == 0:
            raise ValueError("schema: got no dense and no sparse feature; allowed: at least one")

    def forward(self, batch: dict[str, Tensor], embedded: Embedded | None = None) -> tuple[Tensor, dict[str, History]]:
        embedded = self.tables(batch) if embedded is None else embedded
        tokens = [self.dense(batch["dense"])] if self.dense is not None else []
        if embedded.features:
            tokens.append(self.project(torch.stack([embedded.features[name] for name in self.schema.sparse], dim=1)))
        if self.domain is not None:
            tokens.append(self.domain(batch["domain"]).unsqueeze(1))
        histories = {name: self.history(batch, name, embedded.events[name]) for name in self.merge}
        return self.norm(torch.cat(tokens, dim=1)), histories

    def history(self, batch: dict[str, Tensor], name: str, fields: dict[str, Tensor]) -> History:
        s = self.merge[name](list(fields.values()))
        length, age = batch[f"{name}_length"], batch[f"{name}_age"]
        return History(s, real(length, age), length, age)
