"""The poisoner finds what is observable: in whole models, and node by node."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from gemopt.testing import EquivalenceError
from gemopt.testing.poison import overwrite_rows, poison, poison_intermediates, row_view, suggest_sizes

B, L, D = 5, 11, 6


class Pool(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.how = nn.Linear(D, D), how

    def forward(self, x, mask):
        y = self.linear(x)
        if self.how == "where":
            return torch.where(mask[..., None], y, 0.0).sum(1)
        if self.how == "times":
            return (y * mask[..., None]).sum(1)
        return y.mean(1)


def batch():
    g = torch.Generator().manual_seed(0)
    n = torch.tensor([3, 11, 0, 1, 7])
    return torch.randn(B, L, D, generator=g).requires_grad_(), torch.arange(L) < n[:, None]


def test_where_hides_all_padding_from_outputs():
    """The weight gradient of a Linear multiplies zero by the padding: NaN comes back there in eager."""
    model = Pool("where")
    x, mask = batch()
    result = poison(model, (x, mask), mask, compiled=model)
    assert result.tried == 4
    assert {tensor for _, _, tensor in result.eager} == {"grad linear.weight"}
    assert {value for _, value, _ in result.eager if math.isfinite(value)} == set()
    assert result.ok and not result.clean


def test_a_compiled_model_without_padding_is_clean():
    model = Pool("times")
    x, mask = batch()

    def packed(x, mask):
        rows = model.linear(x[mask])
        out = torch.zeros(B, D).index_add(0, mask.nonzero()[:, 0], rows)
        return out

    result = poison(model, (x, mask), mask, compiled=packed, strict=True)
    assert result.clean and result.eager
    with pytest.raises(EquivalenceError, match="padding is observed"):
        poison(model, (x, mask), mask, compiled=model, strict=True)


def test_a_compiled_model_that_leaks_is_not_ok():
    model = Pool("where")
    x, mask = batch()
    result = poison(model, (x, mask), mask, compiled=Pool("mean"))
    assert not result.ok and ("args[0]", 1e30, "output") in result.compiled


def test_poison_needs_padding():
    model = Pool("where")
    x, _ = batch()
    with pytest.raises(ValueError, match="no float input has rows outside it"):
        poison(model, (x, torch.ones(B, L, dtype=torch.bool)), torch.ones(B, L, dtype=torch.bool), compiled=model)
    with pytest.raises(ValueError, match="mask: got 'x'; allowed: args"):
        poison(model, batch(), {"x": torch.ones(B, L, dtype=torch.bool)}, compiled=model)


def attention(x, mask, w):
    q, k, v = (x @ w).chunk(3, -1)
    scores = (q @ k.transpose(1, 2)).masked_fill(~mask[:, None, :], -math.inf)
    y = torch.relu(scores.softmax(-1) @ v)
    return torch.where(mask[..., None], y, 0.0).sum(1)


def traced(function, *args):
    return make_fx(function)(*args)


def test_intermediates_of_masked_attention_are_dead_outside_the_mask():
    x, mask = batch()
    args = (x.detach(), mask, torch.randn(D, 3 * D))
    gm = traced(attention, *args)
    rows = ~mask
    found = {r.node: r for r in poison_intermediates(gm, args, rows, value=1e30)}
    live_nodes = {name for name, r in found.items() if r.observed}
    assert "mm" in found and "softmax" in str(found) and len(found) > 8
    # only the selected sum's own operand shows its rows; everything before is dead
    assert live_nodes == {name for name in found if name.startswith("where")}
    dead = sorted(set(found) - live_nodes)
    together = poison_intermediates(gm, args, rows, value=1e30, nodes=dead, at_once=True)
    assert not together[0].observed and together[0].target == f"{len(dead)} nodes"


def test_valid_rows_are_observed():
    x, mask = batch()
    args = (x.detach(), mask, torch.randn(D, 3 * D))
    gm = traced(attention, *args)
    found = poison_intermediates(gm, args, mask, value=1e30)
    assert all(r.observed for r in found if r.target != "masked_fill" and "arg" not in r.node) and found


def test_a_plain_mean_observes_padding():
    x, mask = batch()
    gm = traced(lambda x: torch.relu(x).mean(1), x.detach())
    assert all(r.observed for r in poison_intermediates(gm, (x.detach(),), ~mask))


def test_rows_by_node():
    """A predicate for each node: the last item keeps one row of the last layer alive."""
    x, mask = batch()
    index = (mask.sum(1) - 1).clamp(min=0)

    def last(x):
        return torch.relu(x + 1)[torch.arange(B), index]

    gm = traced(last, x.detach())
    name = next(n.name for n in gm.graph.nodes if "relu" in str(n.target))
    others = torch.arange(L) != index[:, None]
    assert not poison_intermediates(gm, (x.detach(),), {name: others})[0].observed
    assert poison_intermediates(gm, (x.detach(),), {name: torch.arange(L) == index[:, None]})[0].observed


@pytest.mark.parametrize("shape", [(B, L), (B, L, 3), (L, B, 3), (B, 2, L, 3), (B * L, 3), (B * 2, L, 3), (B, 2, L, L)])
def test_overwrite_rows_knows_the_layouts(shape):
    rows = torch.zeros(B, L, dtype=torch.bool)
    rows[2, 4] = True
    new = overwrite_rows(torch.zeros(shape), rows, 9.0)
    changed = (new == 9).nonzero()
    places = {
        (B, L): (2, 4), (B, L, 3): (2, 4), (L, B, 3): (4, 2), (B, 2, L, 3): (2, slice(None), 4),
        (B * L, 3): (2 * L + 4,), (B * 2, L, 3): (slice(4, 6), 4), (B, 2, L, L): (2, slice(None), 4),
    }  # fmt: skip
    expected = torch.zeros(shape)
    expected[places[shape]] = 9.0
    assert torch.equal(new, expected) and len(changed)


def test_shapes_without_token_rows():
    for shape in [(B, 7), (3, 4), (), (L, L), (B, D, 3)]:
        assert row_view(torch.zeros(shape), B, L) is None


def test_suggested_sizes_are_free():
    batch_size, length = suggest_sizes([16, 24, 50, 35, 11])
    assert (batch_size, length) == (13, 17)
    with pytest.raises(ValueError, match="no pair"):
        suggest_sizes([math.prod(p for p in range(2, 200) if all(p % d for d in range(2, p)))])
