"""A model that runs a function of itself, over ids and lengths: what most hostile tests need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gemopt.testing import assert_equivalent

from .common import compiled

D, IDS, MAX_LEN = 8, 20, 7
CASES = ("zeros", "ones", "full", "skewed")


class Program(nn.Module):
    """``program(self, ids, lengths)`` with an embedding, linear layers and some parameters to compute with."""

    def __init__(self, program: Callable[..., Any], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.items = nn.Embedding(IDS, D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.conv, self.score = nn.Conv1d(D, D, 1), nn.Linear(D, 1)
        self.token, self.number = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(()))
        self.to(dtype)

    def forward(self, ids: Tensor, lengths: Tensor) -> Any:
        return self.program(self, ids, lengths)

    def encoded(self, ids: Tensor) -> Tensor:
        """``[B, L, D]``, two layers behind the embedding."""
        return self.out(self.items(ids)).relu()


def valid(ids: Tensor, lengths: Tensor) -> Tensor:
    """``[B, L]``: where there is an item."""
    return torch.arange(ids.shape[1]) < lengths[:, None]


def pooled(h: Tensor, v: Tensor) -> Tensor:
    return (h * v[..., None]).sum(1)


def inputs(lengths: Tensor, max_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(1, IDS, (len(lengths), max_len), generator=generator), lengths


def equal(program: Callable[..., Any], inner: str = "eager", dtype: torch.dtype = torch.float64, packed: bool = True) -> Any:
    """Outputs, their strides and dtypes and all gradients as in eager; returns the compiled model. ``packed``: whether some
    step has to have run so."""
    model = Program(program, dtype)
    subject = compiled(model, inner)
    assert_equivalent(model, inputs, max_len=MAX_LEN, cases=CASES, compiled=subject)
    assert bool(subject.report.steps_packed) == packed, subject.report
    return subject
