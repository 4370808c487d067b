"""BST, the Behavior Sequence Transformer (arXiv:1905.06874): the candidate joins the history as its last event.

    e_t  = [fields of event t] + position;       time positions count back from the candidate
    S    = Transformer([e_1, ..., e_L, candidate])      post-norm: LN(x + MHA(x)), LN(x + FFN(x)), LeakyReLU
    logit = heads([features ‖ S_candidate ‖ mean of S])

The paper feeds all L + 1 outputs to the MLP, for a fixed L; here the candidate's and the mean of all, for any L. Histories
are right-padded, so that the candidate stands in front: attention without a causal mask does not care, and positions are
those of time. The paper buckets positions by age; here: index from the candidate, newest = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.schema import Schema
from .parts.checks import check_heads, check_positive
from .parts.embeddings import Embedded
from .parts.heads import Heads
from .parts.inputs import History, Inputs
from .parts.target import target_features


@dataclass(frozen=True)
class BSTConfig:
    """``d_ffn``: hidden width of the transformer's feed-forward layers."""

    d: int = 64
    n_heads: int = 2
    n_layers: int = 1
    d_ffn: int = 256
    dropout: float = 0.0
    trunk: tuple[int, ...] = (256,)
    tower: int = 64
    embeddings: str = "torch"

    def __post_init__(self) -> None:
        check_heads(self.d, self.n_heads)
        check_positive(n_layers=self.n_layers, d_ffn=self.d_ffn)


class TransformerLayer(nn.Module):
    """Post-norm layer on ``x`` [B, L, d]; ``mask`` [B, L] is True at what may be attended to."""

    def __init__(self, config: BSTConfig) -> None:
        super().__init__()
        d = config.d
        self.n_heads, self.p = config.n_heads, config.dropout
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.inner, self.outer = nn.Linear(d, config.d_ffn), nn.Linear(config.d_ffn, d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = self.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], dropout_p=p)
        x = self.norm1(x + self.dropout(self.out(h.transpose(1, 2).flatten(-2))))
        return self.norm2(x + self.dropout(self.outer(F.leaky_relu(self.inner(x)))))


class BST(nn.Module):
    """``forward(batch)``, a batch as in data/schema.py, gives the logit [B] of every task.

    The candidate of a history is made of the sparse features that share its fields' tables (parts/target.py).
    """

    def __init__(self, schema: Schema, config: BSTConfig) -> None:
        super().__init__()
        self.config, d = config, config.d
        self.targets = {event: target_features(schema, event) for event in schema.events}
        self.inputs = Inputs(schema, d, embeddings=config.embeddings)
        self.positions: Any = nn.ModuleDict({name: nn.Embedding(e.max_len + 1, d) for name, e in schema.events.items()})
        self.stacks: Any = nn.ModuleDict(
            {name: nn.ModuleList(TransformerLayer(config) for _ in range(config.n_layers)) for name in schema.events}
        )
        n_tokens = self.inputs.n_tokens + 2 * len(schema.events)
        self.heads = Heads(n_tokens * d, schema.tasks, schema.n_domains, config.trunk, config.tower)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        embedded = self.inputs.tables(batch)
        x, histories = self.inputs(batch, embedded)
        read = [self.read(name, h, self.candidate(name, embedded)) for name, h in histories.items()]
        return self.heads(torch.cat([x.flatten(1), *read], dim=1), batch["domain"])

    def candidate(self, event: str, embedded: Embedded) -> Tensor:
        """The candidate as an event of a history, [B, 1, d]; fields that no feature shares are 0."""
        zero = torch.zeros_like(next(iter(embedded.features.values())))
        parts = [embedded.features[name] if name else zero for name in self.targets[event].values()]
        return self.inputs.merge[event]([part.unsqueeze(1) for part in parts])

    def read(self, name: str, history: History, candidate: Tensor) -> Tensor:
        """Candidate and mean of one history after its transformer, [B, 2 d]."""
        back = history.length[:, None] - torch.arange(history.s.shape[1], device=history.s.device)  # newest: 1
        position = self.positions[name](back.clamp(min=0))
        s = torch.cat([candidate + self.positions[name].weight[0], history.s + position], dim=1)
        mask = torch.arange(s.shape[1], device=s.device) <= history.length[:, None]
        for layer in self.stacks[name]:
            s = layer(s, mask)
        s = s * mask.unsqueeze(-1)
        return torch.cat([s[:, 0], s.sum(1) / (history.length + 1).unsqueeze(-1)], dim=1)
