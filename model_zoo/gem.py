"""GEM: Meta's generative ads recommendation model, as far as the public record goes.

    X, S_h   = Kunlun layers (kunlun.py): Wukong experts over the features, one sequence stack per event type, each reading
               the other's summary in every layer (InterFormer's interleaving)
    S_sum    = Gate([H_h ‖ S_PMA ‖ S_recent])          of every history after the last layer
    logit_tm = tower of task t and domain m on [X_sum ‖ S_sum_1 ‖ ... ‖ S_sum_k]

Sources: engineering.fb.com 2025-11-10 (enhanced Wukong, pyramid-parallel sequence stacks, InterFormer interleaving,
multi-domain heads) and 2026-08-03 (64-token blocks in self-attention, experts in parallel); "Kunlun" (arXiv:2602.10016),
InterFormer (arXiv:2411.09852), Wukong (arXiv:2403.02545), HSTU (arXiv:2402.17152).

The record gives no layer or width table for GEM, no order of the parts and no routing of experts. Chosen:
- widths of 384 = 3 × 128 and 512 = 4 × 128 (configs.py), which public kernel benchmarks share;
- the backbone is Kunlun's with CompSkip, its self-attention in 64-token blocks; one kind of history may use HSTU's
  attention instead (``EventConfig.attention``);
- the pooled tokens H_h of the last fresh pooling take the place of InterFormer's CLS tokens in S_sum.

Plain padded PyTorch: every history is padded to its longest in the batch and every slot is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .data.schema import Schema
from .kunlun import Backbone, KunlunConfig
from .parts.heads import Heads
from .parts.inputs import History
from .parts.interformer import FeatureSummary, Gate, SequenceSummary
from .parts.kunlun import EventConfig


@dataclass(frozen=True)
class GEMConfig(KunlunConfig):
    """Kunlun's sizes, and ``n_pma`` pooled and ``n_recent`` last events of every history for the read-out."""

    n_pma: int = 2
    n_recent: int = 2


class Readout(nn.Module):
    """S_sum of one history: ``forward(history, pooled [B, n_tokens, d])`` gives [B, n_tokens + n_pma + n_recent, d]."""

    def __init__(self, event: EventConfig, d: int, n_pma: int, n_recent: int) -> None:
        super().__init__()
        self.n_tokens = event.n_tokens + n_pma + n_recent
        self.sequence = SequenceSummary(event.d, event.n_heads, n_pma=n_pma, n_recent=n_recent)
        self.project = nn.Identity() if event.d == d else nn.Linear(event.d, d, bias=False)
        self.gate = Gate(d)

    def forward(self, history: History, pooled: Tensor) -> Tensor:
        own = self.project(self.sequence(history.s, history.length, history.mask))
        return torch.cat([self.gate(pooled), own], dim=1)


class GEM(nn.Module):
    """``forward(batch)``, a batch as in data/schema.py, gives the logit [B] of every task."""

    def __init__(self, schema: Schema, config: GEMConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(schema, config)
        self.readouts = nn.ModuleDict(
            {name: Readout(event, config.d, config.n_pma, config.n_recent) for name, event in self.backbone.events.items()}
        )
        self.summary = FeatureSummary(self.backbone.inputs.n_tokens, config.n_sum, config.d)
        n_tokens = config.n_sum + sum(readout.n_tokens for readout in self.readouts.values())  # type: ignore[misc]
        self.heads = Heads(n_tokens * config.d, schema.tasks, schema.n_domains, config.trunk, config.tower)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x, histories, pooled = self.backbone(batch)
        tokens = [self.summary(x)]
        tokens += [self.readouts[name](history, pooled[name]) for name, history in histories.items()]
        return self.heads(torch.cat(tokens, dim=1).flatten(1), batch["domain"])
