"""Optimizers of a recommendation model: AdamW for the dense part, row-wise AdaGrad for embedding tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class RowWiseAdagrad(Optimizer):
    """AdaGrad with one accumulator per row of a table [N, D], as embedding tables are trained in production.

        v_r <- v_r + mean_d g_rd^2          w_r <- w_r - lr g_r / (sqrt(v_r) + eps)

    The formula is that of FBGEMM's ``EXACT_ROWWISE_ADAGRAD``; the idea is from Gupta et al., "Training recommender systems
    at scale: communication-efficient model and data parallelism", KDD 2021. A row without gradient stays as it is, so
    sparse gradients (``nn.Embedding(sparse=True)``) and dense ones give the same result.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.05, eps: float = 1e-8) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must not be negative, got {lr}")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        super().__init__(params, {"lr": lr, "eps": eps})
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim != 2:
                raise ValueError(f"params must be tables [N, D], got one of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["sum"] = torch.zeros(len(p), dtype=torch.float32, device=p.device)
                    _update(p, p.grad, state["sum"], group["lr"], group["eps"])
        return loss


def _update(p: Tensor, grad: Tensor, total: Tensor, lr: float, eps: float) -> None:
    if grad.is_sparse:
        grad = grad.coalesce()  # a row that was looked up twice has the sum of both gradients
        rows, values = grad.indices()[0], grad.values().float()
        total.index_add_(0, rows, values.square().mean(dim=1))
        step = values * (lr / (total[rows].sqrt() + eps))[:, None]
        p.index_add_(0, rows, step.to(p.dtype), alpha=-1)
    else:
        values = grad.float()
        total.add_(values.square().mean(dim=1))
        p.sub_((values * (lr / (total.sqrt() + eps))[:, None]).to(p.dtype))


def tables_and_rest(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of embedding modules (``nn.Embedding``, ``nn.EmbeddingBag``; TorchRec's collections hold these), and
    all other parameters. A table that is shared counts once."""
    found = [m.weight for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    tables = {id(p): p for p in found if isinstance(p, nn.Parameter)}
    rest = [p for p in module.parameters() if id(p) not in tables]
    return [p for p in tables.values() if p.requires_grad], [p for p in rest if p.requires_grad]


def learning_rate_factor(step: int, warmup: int, total: int) -> float:
    """Linear warm-up over ``warmup`` steps, then a half cosine down to a tenth at ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


class Optimizers:
    """AdamW for dense parameters and row-wise AdaGrad for tables, on one schedule.

    ``dense`` is always there unless the model is tables alone; ``tables`` is None without tables. Gradients are clipped to
    the norm ``clip`` over the dense parameters: AdaGrad's steps do not grow with its gradients.
    """

    def __init__(
        self, module: nn.Module, *, lr: float, table_lr: float, weight_decay: float, clip: float, warmup: int, total: int
    ) -> None:
        tables, dense = tables_and_rest(module)
        self.clip, self._clipped = clip, dense
        self.dense: Optimizer | None = None
        self.tables: Optimizer | None = None
        if dense:
            self.dense = torch.optim.AdamW(dense, lr=lr, weight_decay=weight_decay, fused=True)
        if tables:
            self.tables = RowWiseAdagrad(tables, lr=table_lr)
        self._all = {name: o for name, o in (("dense", self.dense), ("tables", self.tables)) if o is not None}
        self._schedules = {
            name: torch.optim.lr_scheduler.LambdaLR(o, lambda step: learning_rate_factor(step, warmup, total))
            for name, o in self._all.items()
        }

    @property
    def lr(self) -> float:
        """The learning rate of the dense parameters, or of the tables where there are only tables."""
        return float(next(iter(self._schedules.values())).get_last_lr()[0])

    def zero_grad(self) -> None:
        for optimizer in self._all.values():
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self._clipped, self.clip)
        for optimizer in self._all.values():
            optimizer.step()
        for schedule in self._schedules.values():
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        parts = {name: {"optimizer": o.state_dict()} for name, o in self._all.items()}
        for name, schedule in self._schedules.items():
            parts[name]["schedule"] = schedule.state_dict()
        return parts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimizer in self._all.items():
            optimizer.load_state_dict(state[name]["optimizer"])
            self._schedules[name].load_state_dict(state[name]["schedule"])
