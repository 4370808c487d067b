"""State and sharing: in-place ops, tied weights, BatchNorm, checkpoints, several models, threads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import gemopt

from ..models import CASES, select
from .common import batch_of, compiled, gradients, path, same, sequence_model

N = torch.tensor([3, 11, 1, 7, 5])


def example(name: str, lengths: torch.Tensor = N):
    model, inputs = CASES[name].make(0)
    return model, inputs(lengths, 11, torch.Generator().manual_seed(0))


NAMES = ["odd_inplace", "odd_inplace_rows", "odd_tied_head", "odd_shared", "odd_checkpoint", "odd_no_grad"]


@pytest.mark.parametrize("name", NAMES)
def test_oddities(name):
    model, batch = example(name)
    result = same(model, batch)
    if CASES[name].expected == "rewritten":
        assert path(result) == "packed"


@pytest.mark.parametrize("name", ["odd_batch_norm", "odd_batch_norm_flat"])
def test_batch_norm_sees_its_padding(name):
    """Running statistics are observable as well: they are those of the padded rows."""
    model, batch = example(name)
    subject = compiled(model)
    result = same(model, batch, subject)
    assert {c.name for c in result.cases[0].comparisons} >= {"buffer batch_norm.running_mean"}
    assert not any("batch_norm" in str(r.before) for r in subject.report.rewrites)
    assert any("live" in r.reason or "padding" in r.reason for r in subject.report.rejections)


def test_checkpointed_layers_still_recompute():
    """The packed graph may not keep what the user asked to recompute."""
    model, batch = example("odd_checkpoint")
    calls = []
    handle = model.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    same(model, batch, compiled(model, "aot_eager"))
    handle.remove()


def test_inputs_are_not_written():
    model, batch = example("odd_inplace")
    before = [t.clone() for t in batch]
    compiled(model)(*batch).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, batch, strict=True))


class WritesInput(nn.Module):
    """Zeroes the padding of its input in place: the caller sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, lengths):
        valid = torch.arange(x.size(1)) < lengths[:, None]
        x.masked_fill_(~valid[..., None], 0.0)
        return (self.linear(x) * valid[..., None]).sum(1)


def test_writes_to_an_input_are_seen_by_the_caller():
    torch.manual_seed(0)
    model = WritesInput()
    mine = torch.randn(5, 11, 4)
    theirs = mine.clone()
    out, expected = compiled(model)(mine, N), model(theirs, N)
    assert torch.equal(mine, theirs)
    torch.testing.assert_close(out, expected)


def test_two_models_in_one_process():
    """Each keeps its own graphs, row sets and report."""
    first, second = (
        sequence_model(0, pool="last_gather", fill="1e9"),
        sequence_model(1, pool="mean", fill="1e9"),
    )
    a, b = compiled(first), compiled(second)
    for lengths in ([3, 11, 1], [7, 2, 5, 4]):
        same(first, batch_of(lengths), a)
        same(second, batch_of(lengths, seed=1), b)
    assert a.report is not b.report and a.report.steps_packed > 0 and b.report.steps_packed > 0


def test_two_compiles_of_one_model():
    model = sequence_model(fill="1e9")
    a, b = compiled(model), compiled(model, padded_outputs="zero")
    same(model, batch_of([3, 11, 1]), a)
    same(model, batch_of([4, 2, 9, 1]), b)


def test_compile_in_threads():
    models = [sequence_model(i, pool=pool, fill="1e9") for i, pool in enumerate(("mean", "last_gather", "max"))]
    batch = batch_of([3, 11, 1, 6])
    results: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(models))

    def work(i: int) -> None:
        try:
            barrier.wait()
            subject = compiled(models[i])
            for _ in range(3):
                out = subject(*batch)
                out.sum().backward()
            results[i] = out.detach()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not errors, errors
    for i, model in enumerate(models):
        torch.testing.assert_close(results[i], model(*batch).detach(), rtol=1e-5, atol=1e-6)
        mine = gradients(model)
        model.zero_grad()
        for _ in range(3):
            model(*batch).sum().backward()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_train_eval_and_state_dict_between_steps():
    model = sequence_model(fill="1e9", dropout=0.5)
    subject = compiled(model)
    batch = batch_of([3, 11, 1, 6])
    subject.eval()
    torch.testing.assert_close(subject(*batch), model(*batch))
    subject.train()
    assert not torch.equal(subject(*batch), subject(*batch))
    state = {k: v + 0.1 for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    subject.eval()
    torch.testing.assert_close(subject(*batch), model(*batch))


def test_optimizer_steps_follow_eager():
    torch.manual_seed(0)
    model = sequence_model(fill="1e9", pool="last_gather", layers=2)
    twin = copy.deepcopy(model)
    subject = compiled(model)
    a, b = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    for step in range(6):
        batch = batch_of([(7 * i + step) % 11 + 1 for i in range(4 + step % 3)], seed=step)
        for m, optimizer in ((subject, a), (twin, b)):
            optimizer.zero_grad()
            loss = m(*batch).square().mean()
            loss.backward()
            optimizer.step()
            m.loss = float(loss)
        assert subject.loss == pytest.approx(twin.loss, rel=1e-4)


@pytest.mark.parametrize("case", select(expected="nothing"), ids=str)
def test_models_without_attention_run_as_under_torch_compile(case):
    """Bit for bit, forward and backward, and the report says that there was nothing to do."""
    model, inputs = case.make(0)
    batch = inputs(N, 11, torch.Generator().manual_seed(0))
    results = []
    for subject in (
        gemopt.compile(model, inner="aot_eager"),
        torch.compile(model, backend="aot_eager", dynamic=True),
    ):
        torch._dynamo.reset()
        model.zero_grad()
        out = subject(*batch)
        out.square().sum().backward()
        results.append((out.detach(), gradients(model)))
        if hasattr(subject, "report"):
            assert subject.report.rewrites == () and len(str(subject.report).strip()) > 20
    (mine, my_gradients), (theirs, their_gradients) = results
    assert torch.equal(mine, theirs)
    for name, gradient in their_gradients.items():
        assert torch.equal(my_gradients[name], gradient), name
