"""Row-wise AdaGrad against its formula, which parameters are tables, and the schedule of both optimizers."""

import pytest
import torch
from torch import nn

from gemopt.model_zoo.optim import Optimizers, RowWiseAdagrad, tables_and_rest


@pytest.mark.parametrize("sparse", [False, True])
def test_formula(sparse):
    """Three steps on a table, written out in float64."""
    torch.manual_seed(0)
    table = nn.Embedding(6, 4, sparse=sparse)
    w = table.weight.detach().double()
    v = torch.zeros(6, dtype=torch.float64)
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.1, eps=1e-8)
    for ids in ([0, 1, 1, 5], [1, 2, 2, 2], [3, 3, 0, 1]):
        out = table(torch.tensor(ids))
        target = torch.arange(4.0) + torch.tensor(ids)[:, None]
        optimizer.zero_grad()
        (out * target).sum().backward()
        optimizer.step()
        g = torch.zeros(6, 4, dtype=torch.float64).index_add_(0, torch.tensor(ids), target.double())
        v += g.square().mean(1)
        w -= torch.where(g.abs().sum(1, keepdim=True) > 0, 0.1 * g / (v.sqrt()[:, None] + 1e-8), 0.0)
    torch.testing.assert_close(table.weight.detach().double(), w, rtol=1e-6, atol=1e-6)
    assert torch.equal(table.weight[4].double(), w[4]), "a row that was never looked up"
    torch.testing.assert_close(optimizer.state[table.weight]["sum"].double(), v)


def test_scale_of_the_loss_does_not_matter():
    tables = []
    for scale in (1.0, 1000.0):
        torch.manual_seed(0)
        table = nn.Embedding(3, 4)
        optimizer = RowWiseAdagrad(table.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            (scale * table(torch.tensor([0, 2])).square().sum()).backward()
            optimizer.step()
        tables.append(table.weight.detach())
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-5, atol=1e-6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.bag = nn.Embedding(5, 4), nn.Embedding(5, 4), nn.EmbeddingBag(3, 4)
        self.b.weight = self.a.weight  # a shared table
        self.linear, self.norm = nn.Linear(4, 1), nn.LayerNorm(4)

    def forward(self, ids):
        return self.linear(self.norm(self.a(ids) + self.b(ids) + self.bag(ids[:, None] % 3)))


def test_tables_and_rest():
    model = Model()
    tables, rest = tables_and_rest(model)
    assert [tuple(p.shape) for p in tables] == [(5, 4), (3, 4)]
    assert {id(p) for p in [*tables, *rest]} == {id(p) for p in model.parameters()}
    assert len(rest) == 4


def test_both_follow_the_schedule_and_resume():
    def make():
        torch.manual_seed(0)
        model = Model()
        return model, Optimizers(model, lr=0.1, table_lr=0.2, weight_decay=0.0, clip=1.0, warmup=2, total=10)

    def run(model, optimizers, steps):
        rates = []
        for _ in range(steps):
            rates.append((optimizers.dense.param_groups[0]["lr"], optimizers.tables.param_groups[0]["lr"]))
            optimizers.zero_grad()
            model(torch.tensor([0, 1, 4])).square().sum().backward()
            optimizers.step()
        return rates

    straight, all_ = make()
    rates = run(straight, all_, 5)
    assert rates[0] == pytest.approx((0.05, 0.1)) and rates[1] == pytest.approx((0.1, 0.2))
    assert rates[4][1] == pytest.approx(2 * rates[4][0]) and rates[4][0] < 0.1 and all_.lr < rates[4][0]
    first, optimizers = make()
    run(first, optimizers, 3)
    second, others = make()
    second.load_state_dict(first.state_dict())
    others.load_state_dict(optimizers.state_dict())
    run(second, others, 2)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), straight.parameters(), strict=True))


def test_tables_alone_and_dense_alone():
    table = nn.Embedding(3, 2)
    only = Optimizers(table, lr=0.1, table_lr=0.2, weight_decay=0.0, clip=1.0, warmup=0, total=4)
    assert only.dense is None and only.lr == pytest.approx(0.2)
    assert Optimizers(nn.Linear(2, 1), lr=0.1, table_lr=1, weight_decay=0, clip=1, warmup=0, total=4).tables is None


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="lr"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2, 2))], lr=-1)
    with pytest.raises(ValueError, match="eps"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2, 2))], eps=0)
    with pytest.raises(ValueError, match="tables"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2))])
