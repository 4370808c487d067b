"""Row sets with a capacity: spare rows change no output and no gradient, and a batch without room runs padded."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt
from gemopt import ops
from gemopt.graph.spare import capacity
from gemopt.testing.programs import run, sample, sample_near_miss
from tests.hostile.common import sweep

BATCH, LENGTH, WIDTH = 6, 40, 8


class Model(nn.Module):
    """A layer of attention, and what the subclass makes of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = ids != 0
        x = self.table(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        h = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, :] if mask.dim() == 2 else mask)
        return self.read(self.between(h), mask, labels)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def read(self, h: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError


class SumOfAll(Model):
    """A sum over all rows: spare rows must not count."""

    def read(self, h: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return (self.head(h).sigmoid().sum(-1) * mask).sum()


class PerSequence(Model):
    def read(self, h: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return (self.head(h).tanh() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class TokenLoss(Model):
    def read(self, h: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h).transpose(1, 2), labels.masked_fill(~mask, -100))


class Last(Model):
    def read(self, h: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        last = (mask.sum(1) - 1).clamp(min=0)
        return self.head(h[torch.arange(len(h), device=h.device), last]) * (mask.sum(1) > 0)[:, None]


class Logarithm(PerSequence):
    """log of what an attention gives is infinite in rows of zeros."""

    def between(self, h: Tensor) -> Tensor:
        return (h - h.detach()).exp() + (h * h).log() * 1e-3


def batch(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 30, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, 5, (BATCH, LENGTH), generator=generator)
    return ids * (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]), labels


def gradients(model: nn.Module, function: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    out = function(*inputs)
    (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return out.detach(), [p.grad for p in model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("kind", [SumOfAll, PerSequence, TokenLoss, Last])
@pytest.mark.parametrize("inner", ["eager", *(pytest.param(n, marks=sweep) for n in ("aot_eager", "inductor"))])
def test_spare_rows_change_nothing(kind: type[Model], inner: str) -> None:
    torch.manual_seed(0)
    model = kind()
    exact = copy.deepcopy(model).double()
    compiled = gemopt.compile(
        model, recipe={"row_slack": 0.4, "min_saving": 0.0}, inner=inner, strict=True, dynamic=False
    )  # fmt: skip
    for i, lengths in enumerate([[15, 1, 25, 0, 10, 20], [20, 10, 25, 1, 10, 20], [1, 0, 0, 0, 0, 0], [9, 9, 9, 9, 9, 9]]):
        inputs = batch(lengths, i)
        out, grads = gradients(model, compiled, inputs)
        expected, expected_grads = gradients(exact, exact, inputs)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        for g, e in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-5)
    report = compiled.report
    assert report.steps_packed == 4 and not report.steps_padded, str(report)
    assert "; room for 128" in str(report)


def test_a_batch_without_room_or_without_rows_runs_padded() -> None:
    torch.manual_seed(0)
    model = PerSequence()
    recipe = {"row_slack": 0.0, "min_saving": 0.0}
    compiled = gemopt.compile(model, recipe=recipe, inner="eager", strict=True, dynamic=False)
    for lengths in ([10] * 6, [40] * 6, [0] * 6, [5, 0, 15, 0, 5, 5]):
        inputs = batch(lengths, 1)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)
    report = compiled.report
    assert (report.steps_packed, sum(report.steps_padded.values())) == (2, 2), str(report)
    assert "240 rows where" in str(report) and "room for 64" in str(report)


def test_an_op_that_may_be_infinite_behind_an_attention() -> None:
    model = Logarithm()
    recipe = {"row_slack": 0.4, "min_saving": 0.0}
    compiled = gemopt.compile(model, recipe=recipe, inner="eager", strict=True, dynamic=False)
    inputs = batch([15, 1, 25, 1, 10, 20], 0)
    _, grads = gradients(model, compiled, inputs)
    _, expected = gradients(model, model, inputs)
    assert any("may be infinite in spare rows" in r.reason for r in compiled.report.rejections), str(compiled.report)
    for g, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-4)


def test_symbolic_sizes_have_no_room() -> None:
    compiled = gemopt.compile(PerSequence(), recipe={"row_slack": 0.4, "min_saving": 0.0}, inner="eager", strict=True)
    compiled(*batch([15, 1, 25, 0, 10, 20], 0))
    assert any("dynamic=False" in r.reason for r in compiled.report.rejections)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(i, marks=sweep) for i in range(2, 60))])
def test_generated_programs(seed: int) -> None:
    for program in (sample(31_000 + seed), sample_near_miss(31_000 + seed)):
        outcome = run(program, "spare")
        assert outcome.verdict in ("rewritten", "refused", "invalid"), str(outcome)


@pytest.mark.parametrize("count, total, slack, expected", [(0, 640, 0.5, 64), (100, 640, 0.0, 128), (600, 640, 9.0, 640)])
def test_capacity(count: int, total: int, slack: float, expected: int) -> None:
    assert capacity(count, total, slack) == expected


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "much", True])
def test_a_wrong_slack(value: object) -> None:
    with pytest.raises(ValueError, match="row_slack: got"):
        gemopt.Recipe(row_slack=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.bool])
def test_pack_and_unpack_of_rows_that_are_none(named: int, dtype: torch.dtype) -> None:
    x = torch.arange(1, 13).view(6, 2).to(dtype)
    index = torch.tensor([1, 2, 4][:named] + [6] * 2)
    packed = ops.pack(x, index)
    assert torch.equal(packed[:named], x[index[:named]])
    assert torch.equal(packed[named:], (x[1] if named else torch.zeros_like(x[1])).expand(2, 2))
    back = ops.unpack(packed, index, 6)
    expected = torch.zeros_like(x)
    expected[index[:named]] = x[index[:named]]
    assert torch.equal(back, expected)


def test_their_gradients() -> None:
    x = torch.randn(6, 2, requires_grad=True)
    index = torch.tensor([1, 4, 6, 6])
    ops.pack(x, index).backward(torch.full((4, 2), 3.0))
    expected = torch.zeros(6, 2)
    expected[[1, 4]] = 3.0
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    values = torch.randn(4, 2, requires_grad=True)
    ops.unpack(values, index, 6).backward(torch.full((6, 2), 3.0))
    assert torch.equal(values.grad, torch.tensor([[3.0, 3.0], [3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]))  # type: ignore[arg-type]
    offsets, sequence = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 2])
    values = torch.randn(4, 2, requires_grad=True)
    ops.segment_sum(values, offsets, sequence).backward(torch.full((2, 2), 3.0))
    assert torch.equal(values.grad, torch.tensor([[3.0, 3.0], [3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]))  # type: ignore[arg-type]
