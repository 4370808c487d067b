"""The bench harness and the unpad bench, on steps that cost nothing."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def harness(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("_harness")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


@pytest.fixture
def unpad(harness):
    return importlib.import_module("unpad")


def test_contestants_take_turns(harness):
    calls = []
    contestants = {name: lambda i, name=name: calls.append((name, i)) for name in "abc"}
    result = harness.interleave(contestants, steps=4, warmup={"a": 1, "b": 0, "c": 2})
    assert calls[:3] == [("a", 0), ("c", 0), ("c", 1)]
    rounds = [calls[3 + 3 * r : 6 + 3 * r] for r in range(4)]
    assert all(sorted(names) == [("a", r), ("b", r), ("c", r)] for r, names in enumerate(rounds))
    assert [names[0][0] for names in rounds] == ["a", "b", "c", "a"], "the first place goes round"
    assert result["b"]["first_s"] is None and result["a"]["first_s"] >= 0
    assert all(len(r["times_s"]) == 4 for r in result.values())
    with pytest.raises(ValueError, match="steps"):
        harness.interleave(contestants, steps=0)


def test_summary(harness):
    got = harness.summary([3.0, 1.0, 2.0, 10.0])
    assert got["median_s"] == 2.5 and got["mean_s"] == 4.0 and got["quartiles_s"] == [1.75, 4.75]
    assert harness.summary([2.0])["quartiles_s"] == [2.0, 2.0]


def test_records_are_merged_by_config(harness):
    harness.record_results("x", [{"config": {"n": 1}, "value": 1}, {"config": {"n": 2}, "value": 2}])
    path = harness.record_results("x", [{"config": {"n": 2}, "value": 3}])
    records = json.loads(path.read_text())["records"]
    assert [(r["config"]["n"], r["value"]) for r in records] == [(1, 1), (2, 3)]
    for record in records:
        assert record["machine"]["cores"] >= 1 and record["versions"]["torch"] == torch.__version__
        assert record["command"].startswith("python ") and "commit" in record
    assert path.name.startswith("x-") and path.name == path.name.lower()


def test_grid_covers_the_claims(unpad):
    def titles(*arguments):
        return [c.title() for c in unpad.grid(unpad.parser().parse_args(arguments))]

    full = titles()
    assert len(full) == len(set(full)) == 3 * 2 * 3
    assert "gem_small mean, max 700, dropout 0, fill 1" in full
    only = titles("--model", "sasrec", "--pool", "last", "--max-len", "50", "--dropout", "0.2", "--fill", "1")
    assert only == ["sasrec last, max 50, dropout 0.2, fill 1"]


@pytest.fixture
def eager_contestants(unpad, monkeypatch):
    """The bench itself without waiting for a compiler."""

    class Report:
        rewrites = rejections = ()

    def compiled(module, mode, dynamic=None):
        module.report = Report()
        return module

    monkeypatch.setattr(unpad.tasks, "compiled", compiled)
    monkeypatch.setattr(unpad, "BATCH", 4)


@pytest.mark.parametrize("model", ["sasrec", "gem_small"])
@pytest.mark.parametrize("fill", ["data", "1"])
def test_measure(unpad, eager_contestants, model, fill):
    config = unpad.Config(model, "mean", 40, 0.0, fill)
    record = unpad.measure(config, 2, unpad.CONTESTANTS, "cpu", lambda name, i: None)
    assert set(record["timing"]) == ({"padded", "gemopt"} if fill == "1" else {"padded", "sorted", "gemopt"})
    assert record["largest_loss_difference"] == 0.0, "same parameters and batches, so the same losses"
    assert (record["padding"] == 0) == (fill == "1")
    assert record["speedup"]["padded"] > 0
    json.dumps(record)


def test_sorted_batches_spread_over_all_lengths(unpad):
    samples = unpad.tasks.load_samples("movielens", "sasrec", 200)[0]["train"]
    widths = [batch["all_item"].shape[1] for batch in unpad.draw(samples, 8, "by_length")]
    assert min(widths) < 40 and max(widths) == 200
    mean = np.mean([int(b["all_length"].sum()) for b in unpad.draw(samples, 40, "by_length")]) / unpad.BATCH
    assert mean == pytest.approx(samples.total_length().mean(), rel=0.03), "an unbiased picture of an epoch"


def test_command_saves_and_prints(unpad, eager_contestants, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(BENCH / "unpad.py"), "--max-len", "5"])
    arguments = ["--model", "sasrec", "--pool", "last", "--max-len", "5", "--steps", "1", "--dropout", "0"]
    monkeypatch.setattr(unpad._harness, "ROOT", tmp_path)
    assert unpad.main([*arguments, "--fill", "data"]) == 0
    (path,) = tmp_path.glob("unpad-*.json")
    assert json.loads(path.read_text())["records"][0]["config"]["max_len"] == 5
    assert "sasrec last, max 5" in capsys.readouterr().out
