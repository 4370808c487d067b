"""The zoo's models under gemopt: the losses of eager, one graph for all shapes, everything rewritten."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import gemopt
from gemopt.model_zoo import tasks
from gemopt.model_zoo.data import BatchIterator, movielens
from tests.hostile.common import sweep

try:
    movielens.data_folder()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "pooling", "steps"),
    [
        ("sasrec", "last", 20),
        pytest.param("gem_small", "mean", 50, marks=sweep),
        pytest.param("gem_small", "last", 12, marks=sweep),
        pytest.param("sasrec", "mean", 12, marks=sweep),
    ],
)
def test_losses_equal_eager(model, pooling, steps):
    """Adam steps on batches of changing sizes and padded lengths, each side from its own parameters."""
    samples, vocabulary = tasks.load_samples("movielens", model, 64)
    torch.manual_seed(0)
    eager = tasks.build_model(model, vocabulary, 64, 0.0, pooling)
    packed = copy.deepcopy(eager)
    compiled = gemopt.compile(packed, inner="aot_eager", strict=True)
    sides = [(m, f, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m, f in ((eager, eager), (packed, compiled))]
    stream = BatchIterator(samples["train"], 12, seed=1).endless()
    torch._dynamo.utils.counters.clear()
    for number, batch in enumerate(itertools.islice(stream, steps)):
        size = 12 - 2 * (number % 5)
        batch = {name: value[:size].clone() for name, value in batch.items()}  # views would be guarded apart
        if number % 3 == 2:
            batch = shorter(model, batch, 45)
        losses = []
        for module, function, optimizer in sides:
            optimizer.zero_grad(set_to_none=True)
            logits = tasks.click_logits(model, function, batch)
            loss = F.binary_cross_entropy_with_logits(logits, batch["label"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
        assert losses[1] == pytest.approx(losses[0], rel=2e-5, abs=2e-6), f"step {number}"
    report = compiled.report
    padded = bool(sum(report.steps_padded.values()))  # the padded graph is compiled when a step first needs it
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + padded
    assert report.steps_packed >= steps // 2, report.steps_padded
    assert len(report) == 1 and not report.rejections
    attention = [r for r in report.rewrites if r.kernel == "jagged_attention"]
    assert len(attention) == 2 * len(tasks.histories(model)), "two layers of every history"


def shorter(model, batch, width):
    """The batch padded to fewer slots, lengths cut accordingly."""
    out = dict(batch)
    for name in tasks.histories(model):
        for kind in ("item", "genre", "gap"):
            out[f"{name}_{kind}"] = batch[f"{name}_{kind}"][:, :width].contiguous()
        out[f"{name}_length"] = batch[f"{name}_length"].clamp(max=width)
    return out


@sweep
@pytest.mark.parametrize("name", ["sasrec", "gem_small"])
def test_evaluation_equals_eager(name):
    samples, vocabulary = tasks.load_samples("movielens", name, 24)
    torch.manual_seed(0)
    model = tasks.build_model(name, vocabulary, 24, 0.3, "mean").eval()
    compiled = gemopt.compile(model, inner="aot_eager", strict=True)
    with torch.no_grad():
        for size in (40, 7):
            batch = samples["valid"].collate(range(0, 100 * size, 100))
            found, expected = (tasks.click_logits(name, f, batch) for f in (compiled, model))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert any(r.kernel == "jagged_attention" for r in compiled.report.rewrites)
