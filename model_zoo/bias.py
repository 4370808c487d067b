"""The baseline of popularity and bias: a logistic fit of a global, an item and a user bias, for every task and domain.

logit = b_task,domain + b_task[item] + b_task[user]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .data.schema import Schema

FEATURES = ("user", "item")


class Bias(nn.Module):
    """``forward(batch)`` gives the logit [B] of every task. Biases start at 0; ids that training never met stay there."""

    def __init__(self, schema: Schema, features: tuple[str, ...] = FEATURES) -> None:
        super().__init__()
        missing = [name for name in features if name not in schema.sparse]
        if missing:
            raise ValueError(f"features: got {missing}; allowed: sparse features of the schema, {sorted(schema.sparse)}")
        self.tasks, self.features = schema.tasks, features
        self.domain = nn.Parameter(torch.zeros(schema.n_domains, len(schema.tasks)))
        self.biases = nn.ModuleDict({f: nn.Embedding(schema.sparse[f].n_ids, len(schema.tasks)) for f in features})
        for table in self.biases.values():
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.domain[batch["domain"]]
        for feature, table in self.biases.items():
            logits = logits + table(batch[f"sparse_{feature}"])
        return dict(zip(self.tasks, logits.unbind(1), strict=True))
