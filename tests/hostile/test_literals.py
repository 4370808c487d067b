"""Literals in the user's code are buffers of the retraced graph; AOTAutograd wants to know where each comes from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gemopt.testing import assert_equivalent

from .common import sweep


class Literal(nn.Module):
    """Masked attention and mean; `kind` says where a tensor literal stands."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.project = kind, nn.Embedding(31, 12, padding_idx=0), nn.Linear(12, 12)

    def forward(self, ids: Tensor) -> Tensor:
        valid = ids != 0
        x = self.table(ids)
        scores = self.project(x) @ x.transpose(1, 2) / 12**0.5
        x = torch.softmax(scores.masked_fill(~valid[:, None, :], -1e9), -1) @ x
        pooled = (x * valid[..., None]).sum(1)
        if self.kind == "tensor":
            return pooled * torch.tensor(2.0) + torch.tensor([1.0] * 12)
        weight = torch.zeros(ids.shape[0], 3)
        weight[torch.arange(ids.shape[0]), ids[:, 0] % 3] = 1
        return pooled[:, :3] * weight


@pytest.mark.parametrize("kind", ["tensor", "index_put"])
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=sweep)])
def test_literals_do_not_stop_the_packed_graph(kind: str, inner: str) -> None:
    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        ids = torch.randint(1, 31, (len(lengths), max_len), generator=g)
        return (ids * (torch.arange(max_len) < lengths[:, None]),)

    result = assert_equivalent(Literal(kind), inputs, inner=inner, cases=("skewed", "given"))
    assert all(case.path == "packed" for case in result.cases)
