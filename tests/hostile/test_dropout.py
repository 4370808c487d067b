"""Dropout with p > 0: the compiled model draws other numbers, from the same distribution."""

from __future__ import annotations

import pytest
import torch

from gemopt.testing import assert_equivalent

from ..models import CASES, select
from .common import compiled, path

N = torch.tensor([2, 5, 1])


@pytest.mark.parametrize("case", select(tag="dropout"), ids=str)
def test_distribution(case):
    model, inputs = case.make(0)
    batch = inputs(N, 5, torch.Generator().manual_seed(0))
    result = assert_equivalent(
        model, batch, compiled=compiled(model.train()), cases=("given",), dropout="distribution", runs=160
    )
    assert path(result) == "packed" and result.compared > 0


def test_forward_and_backward_use_the_same_mask():
    """The output is linear in v: out = <d out / d v, v> holds, but for one and the same draw only."""
    model, inputs = CASES["odd_attention_dropout"].make(0)
    ids, valid = inputs(N, 5, torch.Generator().manual_seed(0))
    subject = compiled(model.train())
    dim = model.items.weight.size(1)
    with torch.no_grad():
        model.qkv.bias[2 * dim :] = 0
    model.qkv.weight.grad = None
    torch.manual_seed(3)
    out = subject(ids, valid)
    out.sum().backward()
    value = (model.qkv.weight.grad[2 * dim :] * model.qkv.weight.detach()[2 * dim :]).sum()
    torch.testing.assert_close(value, out.sum().detach(), rtol=1e-4, atol=1e-4)


def test_seeds_give_the_same_draw_again():
    model, inputs = CASES["odd_dropout"].make(0)
    batch = inputs(N, 5, torch.Generator().manual_seed(0))
    subject = compiled(model.train())
    draws = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        draws.append(subject(*batch).detach())
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])
