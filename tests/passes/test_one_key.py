"""Attention over one key, in its spellings: packed without a kernel, with eager's numbers and gradients in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemopt.recipe import Recipe
from gemopt.report import Rewrite
from gemopt.testing.programs.interpret import Interpreted
from gemopt.testing.programs.runner import unchecked_pipeline
from tests.hostile.common import sweep

# q [B, 2, L, 4], k [B, 2, 1, 4], v [B, 2, 1, 3], whether the key of a sample is hidden [B] -> [B, 2, L, 3]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _merged(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[2], x.shape[3])


def _bmm(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    weights = torch.bmm(_merged(q), _merged(k).mT).sigmoid()
    return torch.bmm(weights, _merged(v)).view(q.shape[0], 2, -1, 3)


def _baddbmm(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    bias = (hidden.to(q.dtype) * 0.3)[:, None].expand(-1, 2).reshape(-1, 1, 1)
    scores = torch.baddbmm(bias, _merged(q), _merged(k).mT, beta=0.5, alpha=2.0)
    return (F.gelu(scores) @ _merged(v)).unflatten(0, (-1, 2))


def _einsum(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bqkh", q, k)
    return torch.einsum("bqkh,bhkd->bhqd", F.silu(scores), v)


def _exponentials(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    e = ((q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / 2).exp()
    return ((e / e.sum(-1, keepdim=True)).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def _finite_fill(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """The only key keeps its weight where it is hidden."""
    return (q @ k.mT).masked_fill(hidden[:, None, None, None], -1e9).softmax(-1) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden[:, None, None, None])


def _fused_float(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    mask = torch.zeros_like(q[:, :, :, :1]).masked_fill(hidden[:, None, None, None], -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


SPELLINGS: dict[str, Attention] = {
    "swapped, no score function": lambda q, k, v, hidden: (k @ q.mT).mT @ v,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    "exponentials": _exponentials,
    "finite fill": _finite_fill,
    "fused, float mask": _fused_float,
}


class Model(nn.Module):
    """Several attentions over one key side by side, each summed over the valid rows."""

    def __init__(self, *attentions: Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attentions = attentions
        self.q, self.kv, self.out = nn.Linear(6, 8), nn.Linear(5, 14), nn.Linear(6, 2)

    def forward(self, x: Tensor, context: Tensor, valid: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(context).view(-1, 1, 2, 7).transpose(1, 2).split([4, 3], -1)
        rows = [self.out(attend(q, k, v, hidden).transpose(1, 2).flatten(2)) for attend in self.attentions]
        return tuple((r * valid.unsqueeze(-1)).sum(1) for r in rows)


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Holes, an empty sequence and a full one; the key of one sample with rows, and of the empty one, is hidden."""
    g = torch.Generator().manual_seed(1)
    valid = torch.rand(5, 9, generator=g) > 0.6
    valid[1], valid[2] = False, True
    x, context = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in ((5, 9, 6), (5, 5)))
    hidden = torch.tensor([False, True, False, True, False])
    return {"x": x.requires_grad_(), "context": context.requires_grad_(), "valid": valid, "hidden": hidden}


@pytest.fixture(autouse=True)
def _without_fake_cache() -> Iterator[None]:
    """As gemopt compiles: it costs time where no shape comes twice."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


def compiled(model: nn.Module) -> Interpreted:
    return Interpreted(model, unchecked_pipeline, Recipe(min_saving=0.0, strict=True))


def results(run: Callable[..., tuple[Tensor, ...]], model: nn.Module, given: dict[str, Tensor]) -> list[list[Tensor]]:
    """For every attention its result and all gradients."""
    found = []
    for out in run(**given):
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
        sources = [given["x"], given["context"], *model.parameters()]
        found.append([out, *torch.autograd.grad(out, sources, cotangent, retain_graph=True)])
    return found


def rewritten(run: Interpreted) -> list[Rewrite]:
    return [r for r in run.report.rewrites if r.rule == "unpad attention"]


def test_packed_and_right() -> None:
    model, given = Model(*SPELLINGS.values()).double(), inputs()
    run = compiled(model)
    for name, got, want in zip(SPELLINGS, results(run, model, given), results(model, model, given), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")
    assert run.report.steps_packed == 1 and not run.report.rejections
    assert len(rewritten(run)) == len(SPELLINGS)
    assert all(r.kernel is None and "one key" in r.before for r in rewritten(run))


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=sweep), True])
def test_sixteen_bits_round_as_a_product_does(autocast: bool) -> None:
    chosen = [_einsum, _baddbmm, _fused]
    model = Model(*chosen).to(torch.float32 if autocast else torch.bfloat16)
    given = inputs(torch.float32 if autocast else torch.bfloat16)
    run = compiled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got, eager = results(run, model, given), results(model, model, given)
    assert run.report.steps_packed == 1 and len(rewritten(run)) == len(chosen)
    exact_model = Model(*chosen).double()
    exact_model.load_state_dict(model.state_dict())
    wide = {n: t.detach().double().requires_grad_() if t.is_floating_point() else t for n, t in given.items()}
    exact = results(exact_model, exact_model, wide)
    for mine, theirs, true in zip(chain(*got), chain(*eager), chain(*exact), strict=True):
        assert mine.dtype == theirs.dtype
        error, allowed = ((x.double() - true).square().mean().sqrt() for x in (mine, theirs))
        assert error <= 2 * allowed + 4e-3 * true.square().mean().sqrt()


def _infinite_fill(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(hidden[:, None, None, None], -math.inf).softmax(-1) @ v


def _fused_dropout(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.5, is_causal=True)


def _dropout(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return F.dropout((q @ k.mT).softmax(-1), 0.5) @ torch.ones_like(v)


def test_infinite_fills_and_dropout() -> None:
    """A hidden only key is NaN under -inf, as in eager; a dropped weight drops all features of its head, and of one row."""
    model, given = Model(_infinite_fill, _dropout, _fused_dropout).double(), inputs()
    with torch.no_grad():
        model.out.weight.copy_(torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0]]))
        model.out.bias.zero_()
    run = compiled(model)
    torch.manual_seed(0)
    drawn = [run(**given) for _ in range(40)]
    want = model(**given)[0]
    assert want[3].isnan().all() and run.report.steps_packed == 40 and len(rewritten(run)) == 3
    alive = given["valid"].any(1)  # the rows of an empty sequence are taken to be finite
    torch.testing.assert_close(drawn[0][0][alive], want[alive], equal_nan=True)
    lengths = given["valid"].sum(1).double()
    for summed in (torch.stack([d[i] for d in drawn]) for i in (1, 2)):
        assert torch.equal(summed % 2, torch.zeros_like(summed)) and torch.equal(summed[..., 0], summed[..., 1])
        assert (summed.mean(0) - lengths[:, None]).abs().max() < 2 and bool(summed[:, 2].std() > 1)


class Narrow(Model):
    """A layer with one output and one with one input: weights, which run packed as they are."""

    def forward(self, x: Tensor, context: Tensor, valid: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        rows = (x @ self.q.weight[:1].t()) @ self.q.weight[1:2]
        return ((rows * valid.unsqueeze(-1)).sum(1),)


class Whole(Model):
    """Returns one of two attentions with its padding, in an order of axes that is not that of its memory."""

    def forward(self, x: Tensor, context: Tensor, valid: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        pooled = super().forward(x, context, valid, hidden)
        q, k = self.q(x).unflatten(-1, (2, 4)), self.kv(context)[:, None, None, :4]
        return *pooled, torch.einsum("bqkh,bkhd->hbqd", torch.einsum("bqhd,bkhd->bqkh", q, k).sigmoid(), k)


def test_layers_of_width_one_are_no_attention() -> None:
    model, given = Narrow().double(), inputs()
    run = compiled(model)
    torch.testing.assert_close(run(**given), model(**given))
    assert not rewritten(run)


def test_returned_padded_it_is_left_alone_with_eagers_strides() -> None:
    model, given = Whole(_einsum).double(), inputs()
    run = compiled(model)
    for a, b in zip(run(**given), model(**given), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    assert run.report.steps_packed == 1 and len(rewritten(run)) == 1
    (left,) = run.report.rejections
    assert "every row of the queries is live" in left.reason
