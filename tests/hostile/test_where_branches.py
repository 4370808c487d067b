"""Branches of `where` are packed on fewer rows than what reads them: no row gets another's value or gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .common import sweep
from .programs import Program, equal, pooled, valid

CONDITIONS = {
    "content": lambda ids, n: ids > 8,
    "first positions": lambda ids, n: (torch.arange(ids.shape[1]) < 3).expand_as(ids),
    "last item": lambda ids, n: torch.arange(ids.shape[1]) == n[:, None] - 1,
    "sequences": lambda ids, n: (n % 2 == 0)[:, None].expand_as(ids),
    "content of items": lambda ids, n: valid(ids, n) & (ids % 3 == 0),
    "padding too": lambda ids, n: ~valid(ids, n) | (ids > 8),
    "never": lambda ids, n: ids < 0,
}


def attended(m: Program, h: Tensor, v: Tensor) -> Tensor:
    return h + (m.q(h) @ h.mT).masked_fill(~v[:, None], -1e9).softmax(-1) @ m.v(h)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=sweep)])
def test_two_computed_branches(condition, inner):
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        chosen = CONDITIONS[condition](ids, n)[..., None]
        h = torch.where(chosen, m.encoded(ids), m.k(m.items(ids)).tanh())
        return pooled(m.q(h).relu(), valid(ids, n))

    equal(program, inner)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_mask_token_and_attention(condition):
    """As in BERT4Rec: some items become a trained token before the encoder."""

    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        v, chosen = valid(ids, n), CONDITIONS[condition](ids, n)
        h = attended(m, torch.where(chosen[..., None], m.token, m.encoded(ids)), v)
        return pooled(m.k(h).relu(), v)

    equal(program)


def test_a_loss_over_rows_of_two_branches():
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        v = valid(ids, n)
        h = attended(m, torch.where((ids > 8)[..., None], m.encoded(ids), m.items(ids)), v)
        loss = F.cross_entropy(m.k(h).transpose(1, 2), ids % 8, reduction="none")
        return (loss * v).sum() / v.sum().clamp(min=1)

    equal(program)


def test_a_branch_inside_a_branch():
    def program(m: Program, ids: Tensor, n: Tensor) -> Tensor:
        inner = torch.where((ids > 12)[..., None], m.encoded(ids), m.q(m.items(ids)).tanh())
        h = torch.where((ids > 5)[..., None], inner, m.k(m.items(ids)).sigmoid())
        return pooled(m.v(h).relu(), valid(ids, n))

    equal(program)
