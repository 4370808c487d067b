"""InterFormer (arXiv:2411.09852): features and histories inform each other in every layer.

    S⁽¹⁾    = [X_sum⁽¹⁾ ‖ S]                                 the features' summary leads every history, as its CLS tokens
    X⁽ˡ⁺¹⁾  = MLP( Interaction([X⁽ˡ⁾ ‖ S_sum⁽ˡ⁾]) )
    S⁽ˡ⁺¹⁾  = MHA( PFFN(X_sum⁽ˡ⁾, S⁽ˡ⁾) )                    PFFN in the linear form, S W with W generated
    X_sum, S_sum: gated summaries (parts/interformer.py)
    logit   = heads([X_sum⁽ᴸ⁾ ‖ S_sum⁽ᴸ⁾])

Interaction is one of the paper's options: "dot" (inner products), "dcn" (DCNv2, x_0 ⊙ (W x + b) + x), "wukong" (a DHEN of
one module). Chosen where the paper is silent: every event type is a history of its own, S_sum of all of them enter the
interaction; a residual and a LayerNorm around PFFN and MHA, without which three layers do not train; MHA is bidirectional
and gated tokens of the published size, 4 CLS, 2 PMA, 2 recent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.schema import Schema
from .parts.checks import check_choice, check_heads, check_positive
from .parts.heads import Heads
from .parts.inputs import History, Inputs
from .parts.interformer import FeatureSummary, SequenceSummary
from .parts.mlp import MLP, TokenMix
from .parts.pffn import LinearPFFN
from .parts.rotary import Rotary, Rotation
from .parts.self_attention import SelfAttention
from .parts.wukong import WukongLayer

INTERACTIONS = ("dot", "dcn", "wukong")


@dataclass(frozen=True)
class InterFormerConfig:
    """``n_sum`` CLS tokens, ``n_pma`` pooled and ``n_recent`` last events summarise a history."""

    d: int = 64
    n_heads: int = 2
    n_layers: int = 3
    n_sum: int = 4
    n_pma: int = 2
    n_recent: int = 2
    interaction: str = "wukong"
    rank: int = 8
    hidden: tuple[int, ...] = (256,)
    trunk: tuple[int, ...] = (256,)
    tower: int = 64
    d_embedding: int | None = None
    embeddings: str = "torch"

    def __post_init__(self) -> None:
        check_heads(self.d, self.n_heads)
        check_choice("interaction", self.interaction, INTERACTIONS)
        check_positive(n_layers=self.n_layers, n_sum=self.n_sum, n_pma=self.n_pma, n_recent=self.n_recent)


class Interaction(nn.Module):
    """``MLP(Interaction([X ‖ S_sum]))`` with a residual: x [B, n, d], s_sum [B, m, d] to [B, n, d]."""

    def __init__(self, n: int, m: int, config: InterFormerConfig) -> None:
        super().__init__()
        self.kind, d = config.interaction, config.d
        if self.kind == "wukong":
            self.wukong = WukongLayer(n + m, d, n, config.rank, config.hidden)
        elif self.kind == "dot":
            self.dot = MLP([(n + m) * (n + m - 1) // 2, *config.hidden, n * d])
            self.register_buffer("pairs", torch.triu_indices(n + m, n + m, 1), persistent=False)
        else:
            self.cross, self.compress = nn.Linear(d * (n + m), d * (n + m)), TokenMix(n + m, n)
        self.mlp, self.norm = MLP([d, d, d]), nn.LayerNorm(d)
        self.pairs: Tensor

    def forward(self, x: Tensor, s_sum: Tensor) -> Tensor:
        joint = torch.cat([x, s_sum], dim=1)
        if self.kind == "wukong":
            out = self.wukong(joint)
        elif self.kind == "dot":
            products = (joint @ joint.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
            out = self.dot(products / joint.shape[2] ** 0.5).view_as(x)
        else:
            flat = joint.flatten(1)
            out = self.compress((flat * self.cross(flat) + flat).view_as(joint))
        return self.norm(self.mlp(out) + x)


class SequenceBlock(nn.Module):
    """``MHA(PFFN(X_sum, S))`` with residuals on one history, CLS tokens in front."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.d = config.d
        self.pffn = LinearPFFN(config.d, config.n_sum)
        self.attention = SelfAttention(config.d, config.n_heads)

    def forward(self, s: Tensor, x_sum: Tensor, mask: Tensor, rotation: Rotation) -> Tensor:
        s = s + self.pffn(F.layer_norm(s, (self.d,)), x_sum)
        return self.attention(s, mask, rotation)


def with_cls(history: History, cls: Tensor) -> History:
    """The history with ``cls`` [B, n, d] in front, always visible and of age 0; mask and length count them."""
    n = cls.shape[1]
    s = torch.cat([cls, history.s], dim=1)
    age = F.pad(history.age, (n, 0))
    length = history.length + n
    return History(s, torch.arange(s.shape[1], device=s.device) < length[:, None], length, age)


class InterFormer(nn.Module):
    """``forward(batch)``, a batch as in data/schema.py, gives the logit [B] of every task."""

    def __init__(self, schema: Schema, config: InterFormerConfig) -> None:
        super().__init__()
        self.config, self.events = config, tuple(schema.events)
        self.inputs = Inputs(schema, config.d, d_embedding=config.d_embedding, embeddings=config.embeddings)
        n, n_s = self.inputs.n_tokens, config.n_sum + config.n_pma + config.n_recent
        layers = range(config.n_layers)
        self.rotary = Rotary(config.d // config.n_heads)
        self.interactions = nn.ModuleList(Interaction(n, len(self.events) * n_s, config) for _ in layers)
        self.feature_summaries = nn.ModuleList(FeatureSummary(n, config.n_sum, config.d) for _ in range(config.n_layers + 1))
        self.blocks: Any = nn.ModuleList(nn.ModuleDict({e: SequenceBlock(config) for e in self.events}) for _ in layers)
        self.sequence_summaries: Any = nn.ModuleList(
            nn.ModuleDict({e: self._summary() for e in self.events}) for _ in range(config.n_layers + 1)
        )
        width = (config.n_sum + len(self.events) * n_s) * config.d
        self.heads = Heads(width, schema.tasks, schema.n_domains, config.trunk, config.tower)

    def _summary(self) -> SequenceSummary:
        c = self.config
        return SequenceSummary(c.d, c.n_heads, c.n_sum, c.n_pma, c.n_recent)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x, found = self.inputs(batch)
        x_sum = self.feature_summaries[0](x)
        histories = {e: with_cls(h, x_sum) for e, h in found.items()}
        rotations = {e: self.rotary(h.age) for e, h in histories.items()}
        s_sum = self.summarise(0, histories, x)
        for number, interaction in enumerate(self.interactions):
            new_x = interaction(x, s_sum)
            for e, h in histories.items():
                block = self.blocks[number][e]
                histories[e] = h._replace(s=block(h.s, x_sum, h.mask, rotations[e]))
            x = new_x
            x_sum = self.feature_summaries[number + 1](x)
            s_sum = self.summarise(number + 1, histories, x)
        return self.heads(torch.cat([x_sum, s_sum], dim=1).flatten(1), batch["domain"])

    def summarise(self, number: int, histories: dict[str, History], x: Tensor) -> Tensor:
        """S_sum of all histories, [B, tokens, d]."""
        summaries = self.sequence_summaries[number]
        found = [summaries[e](h.s, h.length, h.mask) for e, h in histories.items()]
        return torch.cat(found, dim=1) if found else x[:, :0]
