"""Multi-domain, multi-task heads: a shared trunk, then one small tower per task and domain.

    h           = MLP_trunk(x)                                                   [B, hidden]
    logit[t, m] = w_tm · SiLU(W_tm h + b_tm) + c_tm,    m = domain of the sample

GEM describes per-domain heads on a model that learns from all domains (engineering.fb.com, 2025-11-10) without sizes; one
hidden layer per tower is our choice. All towers are computed as one batched product and each sample reads its domain's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_positive
from .mlp import MLP


class Heads(nn.Module):
    """``forward(x [B, d], domain [B])`` gives the logit [B] of every task, by name."""

    def __init__(
        self, d: int, tasks: Sequence[str], n_domains: int = 1, trunk: tuple[int, ...] = (256,), tower: int = 64
    ) -> None:
        super().__init__()
        if not tasks:
            raise ValueError("tasks: got none; allowed: one or more names")
        check_positive(d=d, n_domains=n_domains, tower=tower)
        self.tasks, self.n_domains = tuple(tasks), n_domains
        self.trunk = MLP([d, *trunk]) if trunk else nn.Identity()
        width = trunk[-1] if trunk else d
        shape = (len(self.tasks), n_domains)
        self.hidden = nn.Parameter(torch.randn(*shape, width, tower) * width**-0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(*shape, tower))
        self.last = nn.Parameter(torch.randn(*shape, tower) * 0.1 * tower**-0.5)
        self.last_bias = nn.Parameter(torch.zeros(*shape))

    def forward(self, x: Tensor, domain: Tensor) -> dict[str, Tensor]:
        h = F.silu(self.trunk(x))
        towers = F.silu(torch.einsum("bd,tmdh->btmh", h, self.hidden) + self.hidden_bias)
        logits = (towers * self.last).sum(-1) + self.last_bias
        own = logits.gather(2, domain[:, None, None].expand(-1, len(self.tasks), 1)).squeeze(2)
        return {task: own[:, i] for i, task in enumerate(self.tasks)}
