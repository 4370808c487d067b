"""Training: resumed equals uninterrupted bit for bit, Ctrl-C keeps the run, bad settings are named."""

import csv
import json
import os
import signal

import pytest
import torch

from gemopt.model_zoo import tasks, train
from gemopt.model_zoo.data import movielens
from gemopt.model_zoo.optim import learning_rate_factor
from gemopt.model_zoo.trainer import TrainConfig, Trainer

try:
    movielens.data_folder()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

TINY = {"max_len": 4, "batch_size": 8, "warmup": 3, "dropout": 0.3, "log_every": 1, "steps": 7}


@pytest.fixture(autouse=True)
def few_evaluation_samples(monkeypatch):
    full = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda self, split="valid", limit=64: full(self, split, limit))


@pytest.mark.parametrize("model", tasks.MODELS)
def test_resume_equals_uninterrupted_bit_for_bit(model, tmp_path):
    straight = Trainer(TrainConfig(**TINY, model=model, out=str(tmp_path / "a"), eval_every=2))
    straight.run()

    config = TrainConfig(**TINY, model=model, out=str(tmp_path / "b"), save_every=2)
    first = Trainer(config)

    def stop_at_three(record):
        first.stop_requested = record["step"] == 3

    first.run(stop_at_three)
    assert first.step == 3
    torch.manual_seed(1234)  # whatever else drew random numbers in between
    second = Trainer(config)
    second.resume()
    second.run()
    assert second.step == straight.step == 7
    expected = straight.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.model.state_dict().items())
    assert [r["loss"] for r in second.history] == [r["loss"] for r in straight.history]
    moments = zip(second.optimizers.dense.state.values(), straight.optimizers.dense.state.values(), strict=True)
    assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in moments)
    sums = zip(second.optimizers.tables.state.values(), straight.optimizers.tables.state.values(), strict=True)
    assert all(torch.equal(a["sum"], b["sum"]) for a, b in sums)


def test_training_learns(tmp_path):
    config = TrainConfig(max_len=5, batch_size=128, steps=40, warmup=5, lr=3e-3, dropout=0.0, out=str(tmp_path))
    trainer = Trainer(config)
    before = trainer.evaluate("valid", limit=2000)
    trainer.run()
    after = trainer.evaluate("valid", limit=2000)
    assert after.ne < min(before.ne, 0.99) and after.auc > 0.6


def test_command_writes_metrics(tmp_path, capsys):
    arguments = [
        "--max-len",
        "3",
        "--batch-size",
        "8",
        "--steps",
        "3",
        "--eval-every",
        "2",
        "--log-every",
        "1",
    ]
    assert train.main([*arguments, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "metrics.json").read_text())
    assert summary["step"] == 3 and summary["valid"]["samples"] == 64 and summary["config"]["seed"] == 0
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert rows[0]["valid_ne"] == "" and float(rows[1]["valid_ne"]) > 0
    assert "calibration" in capsys.readouterr().out
    assert train.main([*arguments, "--out", str(tmp_path), "--resume"]) == 0  # nothing left to do


def test_interrupt_saves_and_resume_goes_on(tmp_path, monkeypatch):
    step = Trainer.train_step

    def interrupted(self, batch):
        loss = step(self, batch)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    arguments = ["--max-len", "3", "--batch-size", "8", "--steps", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(Trainer, "train_step", interrupted)
    assert train.main(arguments) == train.INTERRUPTED
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2
    assert train.main([*arguments, "--resume"]) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["step"] == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    trainer = Trainer(TrainConfig(**TINY, out=str(tmp_path)))
    with torch.no_grad():
        trainer.model.head[-1].bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="up to 1"):
        trainer.run()


def test_bad_settings(tmp_path, capsys):
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    assert "checkpoint" in capsys.readouterr().err
    assert train.main(["--batch-size", "0"]) == 2
    assert "batch_size" in capsys.readouterr().err
    arguments = ["--max-len", "3", "--batch-size", "8", "--steps", "1", "--out", str(tmp_path)]
    assert train.main(arguments) == 0
    assert train.main([*arguments, "--resume", "--lr", "1"]) == 2
    assert "lr: the saved run has 0.001" in capsys.readouterr().err
    with pytest.raises(ValueError, match="mode"):
        TrainConfig(mode="fast")


def test_schedule():
    factors = [learning_rate_factor(step, 4, 20) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[4] == 1.0
    assert factors[20:] == [pytest.approx(0.1)] * 5
    assert factors[4:] == sorted(factors[4:], reverse=True)


@pytest.mark.parametrize("model", tasks.MODELS)
def test_padding_share(model):
    samples, _ = tasks.load_samples("movielens", model, 10)
    batch = samples["valid"].collate([0, 5, 900], "max")
    names = tasks.histories(model)
    padding = sum(int((batch[f"{n}_item"] == 0).sum()) for n in names) / (30 * len(names))
    assert tasks.padding_share(model, batch) == pytest.approx(padding)
