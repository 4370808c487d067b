"""Training of the zoo's models on batches of the schema: resuming, metrics by task and domain, MFU, logs, baselines."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from gemopt import mfu
from gemopt.model_zoo import tasks, train
from gemopt.model_zoo.bias import Bias
from gemopt.model_zoo.data import movielens
from gemopt.model_zoo.data.sources import open_source
from gemopt.model_zoo.data.synthetic import Synthetic, SyntheticConfig
from gemopt.model_zoo.evaluation import evaluate_batches
from gemopt.model_zoo.metrics import evaluate
from gemopt.model_zoo.trainer import TrainConfig, Trainer
from tests.hostile.common import sweep

QUICK_AND_GEM = pytest.mark.parametrize("model", ["sasrec", pytest.param("gem", marks=sweep)])

TINY = {
    "model": "gem", "config": "tiny", "data": "synthetic:tiny", "max_len": 6, "samples": 100, "batch_size": 8, "steps": 6,
    "warmup": 2, "log_every": 1, "eval_samples": 100,
}  # fmt: skip


def config(tmp_path, **changes):
    return TrainConfig(**TINY | {"out": str(tmp_path)} | changes)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_equals_uninterrupted_bit_for_bit(precision, tmp_path):
    straight = Trainer(config(tmp_path / "a", precision=precision))
    straight.run()
    first = Trainer(config(tmp_path / "b", precision=precision))

    def stop_at_three(record):
        first.stop_requested = record["step"] == 3

    first.run(stop_at_three)
    torch.manual_seed(99)
    second = Trainer(config(tmp_path / "b", precision=precision))
    second.resume()
    second.run()
    expected = straight.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.model.state_dict().items())
    assert [r["loss"] for r in second.history] == [r["loss"] for r in straight.history]


def test_training_learns_what_is_planted(tmp_path):
    """Far from the best within a minute of CPU, but NE falls and stays above the known best."""
    trainer = Trainer(config(tmp_path, max_len=None, samples=None, batch_size=64, steps=120, lr=5e-3, table_lr=0.3))
    before = trainer.evaluate("valid", 1500)
    trainer.run()
    after = trainer.evaluate("valid", 1500)
    best = trainer.work.source.samples["valid"].best_ne()
    assert after.ne < min(before.ne, 0.985)
    for task, metrics in after.tasks.items():
        assert metrics.ne > best[task] - 0.01


@pytest.mark.slow
def test_command_reports_tasks_domains_and_mfu(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboard")
    held_out = tasks.Workload.evaluate
    monkeypatch.setattr(
        tasks.Workload, "evaluate", lambda self, split, device, limit=None: held_out(self, split, device, 300)
    )
    arguments = []
    for name, value in (TINY | {"steps": 2, "out": tmp_path}).items():
        arguments += ["--" + name.replace("_", "-"), str(value)]
    assert train.main([*arguments, "--mfu", "--tensorboard"]) == 0
    summary = json.loads((tmp_path / "metrics.json").read_text())
    assert set(summary["test"]["tasks"]) == {"ctr", "cvr"}
    by_domain = summary["test"]["tasks"]["cvr"]["domains"]
    assert sum(m["samples"] for m in by_domain.values()) == 300 and len(by_domain) == 3
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    row = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert float(row["useful_tflops"]) > 0 and float(row["mfu_of_matmul"]) > 0 and float(row["valid_cvr_ne"]) > 0
    assert list((tmp_path / "tensorboard").iterdir())
    assert "cvr" in capsys.readouterr().out


@sweep
@QUICK_AND_GEM
def test_useful_flops_follow_the_lengths(model):
    """Twice the events at the same padded size: more useful FLOPs, the same padded ones."""
    torch.manual_seed(0)
    work = tasks.make_workload(model, "synthetic:tiny", "tiny", max_len=8)
    batch = Synthetic(SyntheticConfig.size("tiny", max_len=8, lengths="uniform", fill=1.0)).batch(np.arange(16))
    counter = mfu.Counter(work.module)
    full = counter(batch)
    short = dict(batch)
    for name in work.histories:
        short[f"{name}_length"] = batch[f"{name}_length"] // 2
        real = torch.arange(8) < short[f"{name}_length"][:, None]
        for key in batch:
            if key.startswith(f"{name}_") and batch[key].ndim == 2:
                short[key] = batch[key] * real
    half = counter(short)
    assert half.padded == full.padded and half.flops < full.flops <= full.padded
    assert not full.notes


@pytest.mark.slow
@QUICK_AND_GEM
def test_same_losses_under_gemopt(model, tmp_path):
    """The packed model trains like the padded one, step by step, in float32."""
    import gemopt

    losses = {}
    for mode in ("eager", "gemopt"):
        trainer = Trainer(config(tmp_path / mode, model=model, steps=4))
        if mode == "gemopt":
            trainer.compiled = gemopt.compile(trainer.model, inner="eager", strict=True)
        trainer.run()
        losses[mode] = [r["loss"] for r in trainer.history]
    assert losses["gemopt"] == pytest.approx(losses["eager"], rel=1e-4)


def test_row_slack(tmp_path, monkeypatch):
    """Fixed packed sizes train like the padded model, resume, and take batches with more rows or fewer samples."""
    import gemopt

    monkeypatch.setattr(gemopt, "compile", partial(gemopt.compile, inner="eager", strict=True))
    small = {"model": "sasrec", "max_len": 24, "steps": 4, "batch_size": 16, "eval_samples": 50}
    straight = Trainer(config(tmp_path / "eager", **small))
    straight.run()
    first = Trainer(config(tmp_path / "slack", **small, mode="gemopt", row_slack=0.1))

    def stop_at_two(record):
        first.stop_requested = record["step"] == 2

    first.run(stop_at_two)
    second = Trainer(config(tmp_path / "slack", **small, mode="gemopt", row_slack=0.0))  # free to differ
    second.resume()
    second.run()
    assert [r["loss"] for r in second.history] == pytest.approx([r["loss"] for r in straight.history], rel=1e-4)
    report = second.compiled.report
    assert report.steps_packed > 0

    samples = second.work.source.samples["train"]
    order = np.argsort(samples.total_length(), kind="stable")
    second.model.train()
    for index, packed in ((order[-16:], False), (order[:5], True)):  # more rows than fit; fewer samples
        batch, before = samples.collate(index), report.steps_packed
        got, expected = second.work.logits(second.compiled, batch), second.work.logits(second.model, batch)
        for task, logits in expected.items():
            torch.testing.assert_close(got[task], logits, rtol=1e-4, atol=1e-5)
        assert (report.steps_packed > before) == packed


def test_bad_row_slack(tmp_path, capsys):
    cases = [
        ({"row_slack": 0.1}, "row_slack=0.1 needs mode"), ({"row_slack": -0.1, "mode": "gemopt"}, "row_slack must be"),
        ({"row_slack": float("nan"), "mode": "gemopt"}, "row_slack must be"),
        ({"mode": "gemopt", "cuda_graphs": True}, "cuda_graphs needs row_slack"),
        ({"mode": "gemopt", "row_slack": 0.1, "cuda_graphs": True}, "cuda_graphs needs a device"),
    ]  # fmt: skip
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **changes)
    options = config(tmp_path, mode="gemopt", row_slack=0.1, cuda_graphs=True, device="cuda").compile_options()
    assert options == {"dynamic": False, "recipe": {"row_slack": 0.1}, "mode": "reduce-overhead"}
    assert train.main(["--row-slack", "0.1"]) == 2 and "row_slack" in capsys.readouterr().err


def test_evaluation_by_domain():
    torch.manual_seed(0)
    batches = []
    for _ in range(3):
        labels = torch.randint(0, 2, (2, 40)).float()
        batches.append(
            {"x": torch.randn(40), "domain": torch.randint(0, 2, (40,)), "label_a": labels[0], "label_b": labels[1]}
        )
    got = evaluate_batches(lambda b: {"a": b["x"], "b": -b["x"]}, batches, {"a": "label_a", "b": "label_b"})
    x, y, d = (torch.cat([b[k] for b in batches]).numpy() for k in ("x", "label_a", "domain"))
    assert got.ne == evaluate(x, y).ne and got.tasks["a"].samples == 120
    assert got.domains["a"][1] == evaluate(x[d == 1], y[d == 1])
    assert got.scalars()["b_auc"] == got.tasks["b"].auc and "auc" in got.scalars()
    with pytest.raises(ValueError, match="none"):
        evaluate_batches(lambda b: {}, [], {"a": "label_a"})


def test_bias_is_the_logistic_sum():
    schema = Synthetic(SyntheticConfig.size("tiny")).schema
    model = Bias(schema)
    with torch.no_grad():
        model.domain[1, 0], model.biases["item"].weight[7, 0], model.biases["user"].weight[3, 0] = 0.5, 2.0, -1.0
    batch = {"domain": torch.tensor([1, 0]), "sparse_item": torch.tensor([7, 7]), "sparse_user": torch.tensor([3, 4])}
    assert model(batch)["ctr"].tolist() == [1.5, 2.0] and model(batch)["cvr"].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="sparse features"):
        Bias(schema, ("nobody",))


def test_movielens_views_agree():
    """Both views have the same samples; the histories of one are those of the other."""
    try:
        movielens.data_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    many = open_source("movielens", max_len=6)
    single, _ = tasks.load_samples("movielens", "gem_small", 6)
    for split, samples in single.items():
        assert len(samples) == len(many.samples[split])
        index = np.arange(0, len(samples), 977)
        a, b = samples.collate(index), many.samples[split].collate(index)
        assert torch.equal(a["label"], b["label_ctr"]) and torch.equal(a["item_id"], b["sparse_item"])
        for name in ("liked", "neutral", "disliked"):
            assert torch.equal(a[f"{name}_item"], b[f"{name}_item"]) and torch.equal(
                a[f"{name}_length"], b[f"{name}_length"]
            )
            real = torch.arange(6) < b[f"{name}_length"][:, None]
            assert (b[f"{name}_age"][real] > 0).all() and (b[f"{name}_age"][~real] == 0).all()
        ratings = {"liked": {4, 5}, "neutral": {3}, "disliked": {1, 2}}
        for name, allowed in ratings.items():
            assert set(b[f"{name}_rating"].unique().tolist()) - {0} <= allowed
    dense = many.samples["train"].dense
    assert np.abs(dense.mean(0)).max() < 1e-3 and np.abs(dense.std(0) - 1).max() < 1e-3


def test_dense_features_look_strictly_back():
    """Counts and shares of one event by a loop over everything that happened before it."""
    from gemopt.model_zoo.data.movielens_events import dense_features

    try:
        source = movielens.load_movielens()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    dense = dense_features(source)
    user, item, time, liked = source.event_user, source.event_item, source.event_time, source.event_rating >= 4
    for i in range(0, len(time), 9973):
        for column, same in ((0, user == user[i]), (2, item == item[i])):
            before = same & (time < time[i])
            n, likes = before.sum(), (before & liked).sum()
            assert dense[i, column] == pytest.approx(np.log1p(n)) and dense[i, column + 1] == pytest.approx(
                (likes + 2.5) / (n + 5)
            )


def test_bad_settings(tmp_path):
    for name, value in (("model", "none"), ("precision", "fp8"), ("clip", 0.0), ("eval_samples", 0), ("max_len", 0)):
        with pytest.raises(ValueError, match=name):
            config(tmp_path, **{name: value})
    with pytest.raises(ValueError, match="config_name"):
        Trainer(config(tmp_path, config="gigantic"))
    with pytest.raises(ValueError, match="data"):
        Trainer(config(tmp_path, data="nowhere"))
    assert train.main(["--model", "gem", "--config", "tiny", "--data", str(tmp_path)]) == 2
