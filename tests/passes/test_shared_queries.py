"""Seeds that attend the history of every sample: where no sample has its own, the packed graph keeps one copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt
from tests.hostile.common import compiled, path, same, sweep

H, D, SEEDS = 2, 4, 3


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, D)).transpose(-3, -2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])


def _matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~mask[:, None, None, :], float("-inf")).softmax(-1) @ v


def _activated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (F.gelu(q @ k.mT) * mask[:, None, None, :]) @ v


def _expanded(m: Pool, batch: int) -> Tensor:
    return _heads(m.q(m.seeds)).expand(batch, -1, -1, -1)


def _of_size_one(m: Pool, batch: int) -> Tensor:
    return _heads(m.q(m.seeds))[None]


def _repeated(m: Pool, batch: int) -> Tensor:
    return _heads(m.q(m.seeds)).repeat(batch, 1, 1, 1)


def _copied(m: Pool, batch: int) -> Tensor:
    return _heads(m.q(m.seeds)).expand(batch, -1, -1, -1).contiguous()


def _one(m: Pool, batch: int) -> Tensor:
    return _heads(m.q(m.seeds[:1])).expand(batch, -1, -1, -1)


def _heads_later(m: Pool, batch: int) -> Tensor:
    return _heads(m.q(m.seeds).repeat(batch, 1, 1))


def _projected_later(m: Pool, batch: int) -> Tensor:
    return _heads(m.q(m.seeds.expand(batch, -1, -1)))


def _without_gradient(m: Pool, batch: int) -> Tensor:
    with torch.no_grad():
        return _heads(m.q(m.seeds)).expand(batch, -1, -1, -1)


def _written(m: Pool, batch: int) -> Tensor:
    """The seeds change after they were copied; the copy does not."""
    q = m.q(m.seeds)
    copied = _heads(q).expand(batch, -1, -1, -1).clone()
    q.mul_(2.0)
    return copied


class Pool(nn.Module):
    def __init__(self, queries: Callable[[Pool, int], Tensor], attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.queries, self.attend = queries, attend
        self.embed, self.seeds = nn.Embedding(30, H * D), nn.Parameter(torch.randn(SEEDS, H * D))
        self.q, self.k, self.v, self.out = (nn.Linear(H * D, H * D) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids != 0
        x = self.embed(ids)
        out = self.attend(self.queries(self, len(ids)), _heads(self.k(x)), _heads(self.v(x)), mask)
        return self.out(out.transpose(1, 2).flatten(2)).square().mean((1, 2))


def ids() -> Tensor:
    torch.manual_seed(0)
    lengths = torch.tensor([7, 3, 5, 1])
    return torch.randint(1, 30, (4, 7)) * (torch.arange(7) < lengths[:, None])


SHARED = {"expanded": _expanded, "of size one": _of_size_one, "repeated": _repeated, "copied": _copied, "one": _one}
SHARED["written"] = _written
# Looked through are copies of heads; with the projection behind them, each sample's seeds are computed anew.
OWN = {"heads later": _heads_later, "projected later": _projected_later, "without gradient": _without_gradient}


def is_shared(model: nn.Module) -> bool:
    """Whether the packed graph calls an attention without offsets of queries; it must call one."""
    calls = [line for line in gemopt.explain(model, ids()).graph("unpad").splitlines() if " = gemopt_ops_" in line]
    calls = [line for line in calls if "gemopt_ops_jagged_attention(" in line or "gemopt_ops_gdpa(" in line]
    assert calls
    return all(", None, rows" in line for line in calls)


ALWAYS = [("expanded", _sdpa), ("of size one", _activated)]
REST = [(name, attend) for name in SHARED for attend in (_sdpa, _matmul, _activated) if (name, attend) not in ALWAYS]
REST.remove(("of size one", _sdpa))  # scaled_dot_product_attention wants as many samples on either side


@pytest.mark.parametrize(("name", "attend"), [*ALWAYS, *(pytest.param(*case, marks=sweep) for case in REST)])
def test_seeds_are_shared(name: str, attend: Callable[..., Tensor]) -> None:
    torch.manual_seed(1)
    model = Pool(SHARED[name], attend)
    assert is_shared(model)
    assert path(same(model, (ids(),))) == "packed"


@pytest.mark.parametrize(
    "name", ["without gradient", *(pytest.param(n, marks=sweep) for n in OWN if n != "without gradient")]
)
def test_seeds_of_each_sample(name: str) -> None:
    torch.manual_seed(1)
    model = Pool(OWN[name], _sdpa)
    assert not is_shared(model)
    assert path(same(model, (ids(),))) == "packed"


def test_through_the_inner_compiler() -> None:
    """AOTAutograd differentiates the op with its shared queries."""
    torch.manual_seed(1)
    model = Pool(_expanded, _sdpa)
    assert path(same(model, (ids(),), compiled(model, "aot_eager"))) == "packed"
