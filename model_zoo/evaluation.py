"""Metrics of a model on held-out data, for every task and domain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .data.batches import Batch
from .metrics import Metrics, evaluate


@dataclass(frozen=True)
class Evaluation:
    """``tasks``: over all samples. ``domains``: for each task, by domain; empty where the data has one domain."""

    tasks: dict[str, Metrics]
    domains: dict[str, dict[int, Metrics]]

    @property
    def first(self) -> Metrics:
        """Of the first task, the one that the others help."""
        return next(iter(self.tasks.values()))

    ne = property(lambda self: self.first.ne)
    auc = property(lambda self: self.first.auc)
    samples = property(lambda self: self.first.samples)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the figures of the first task, then everything under ``tasks``."""
        nested = {
            task: {**asdict(m), "domains": {str(d): asdict(x) for d, x in self.domains.get(task, {}).items()}}
            for task, m in self.tasks.items()
        }
        return {**asdict(self.first), "tasks": nested}

    def scalars(self) -> dict[str, float]:
        """``ne``, ``auc``, ``calibration``, ``log_loss`` of the first task, and of others as ``<task>_ne``."""
        flat: dict[str, float] = {}
        for number, (task, metrics) in enumerate(self.tasks.items()):
            prefix = f"{task}_" if number else ""
            flat |= {prefix + k: v for k, v in asdict(metrics).items() if k != "samples"}
        return flat


@torch.no_grad()
def evaluate_batches(
    logits_of: Callable[[Batch], Mapping[str, Tensor]],
    batches: Iterable[Batch],
    labels: Mapping[str, str],
    device: str = "cpu",
) -> Evaluation:
    """Metrics over ``batches``. ``labels`` names the label's key of every task; domains come from ``domain`` if it is there.

    Raises:
        ValueError: there are no batches.
    """
    logits: dict[str, list[Tensor]] = {task: [] for task in labels}
    truth: dict[str, list[Tensor]] = {task: [] for task in labels}
    domain: list[Tensor] = []
    for batch in batches:
        out = logits_of({k: v.to(device) for k, v in batch.items()})
        for task, key in labels.items():
            logits[task].append(out[task].float().cpu())
            truth[task].append(batch[key])
        domain.append(batch["domain"] if "domain" in batch else torch.zeros(len(truth[task][-1]), dtype=torch.int64))
    if not domain:
        raise ValueError("batches: there are none to evaluate on")
    where = torch.cat(domain).numpy()
    joined = {task: (torch.cat(logits[task]).numpy(), torch.cat(truth[task]).numpy()) for task in labels}
    present = sorted(set(where.tolist()))
    by_domain = {
        task: {d: evaluate(x[where == d], y[where == d]) for d in present} if len(present) > 1 else {}
        for task, (x, y) in joined.items()
    }
    return Evaluation({task: evaluate(x, y) for task, (x, y) in joined.items()}, by_domain)
