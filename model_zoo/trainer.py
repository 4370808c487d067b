"""The training loop: schedule, evaluation, checkpoints. A resumed run goes on exactly where it stopped.

All that decides the next step is in the checkpoint: parameters, optimizers, schedule, the iterator's place and the random
state. On a CPU, n steps, a stop and m more steps give the same bits as n + m steps.
"""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import tasks
from .data.batches import Batch
from .evaluation import Evaluation
from .optim import Optimizers
from .speed import Speed

# A resumed run may differ from the saved one in these: they do not touch the trajectory.
FREE_ON_RESUME = (
    "mode", "row_slack", "cuda_graphs", "out", "eval_every", "save_every", "log_every", "mfu", "tensorboard", "eval_samples",
    "workers",
)  # fmt: skip
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class TrainConfig:
    """``steps`` overrules ``epochs``. Lengths in events, times in steps; None leaves a choice to the model or the data.

    ``row_slack`` (mode gemopt) gives packed tensors a fixed size with this share of spare rows, ``gemopt.Recipe.row_slack``;
    ``cuda_graphs`` (on a GPU, with ``row_slack``) replays the step's graphs.
    """

    model: str = "gem_small"
    config: str | None = None
    data: str = "movielens"
    samples: int | None = None
    mode: str = "eager"
    row_slack: float | None = None
    cuda_graphs: bool = False
    precision: str = "fp32"
    max_len: int | None = None
    batch_size: int = 128
    steps: int | None = None
    epochs: float = 1.0
    lr: float = 1e-3
    table_lr: float = 0.05
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    dropout: float | None = None
    pooling: str = "mean"
    seed: int = 0
    workers: int = 0
    device: str = "cpu"
    out: str = "runs/train"
    eval_every: int = 200
    eval_samples: int | None = None
    save_every: int = 200
    log_every: int = 10
    mfu: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        tasks.check_name("model", self.model, tasks.all_models())
        tasks.check_name("mode", self.mode, tasks.MODES)
        tasks.check_name("precision", self.precision, PRECISIONS)
        for name in ("batch_size", "max_len", "steps", "samples", "eval_every", "eval_samples", "save_every", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._check_compilation()
        if self.workers < 0:
            raise ValueError(f"workers must not be negative, got {self.workers}")
        for name in ("epochs", "clip"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def _check_compilation(self) -> None:
        slack = self.row_slack
        if slack is not None and not 0 <= slack < math.inf:
            raise ValueError(f"row_slack must be a number from 0, or None, got {slack}")
        if slack is not None and self.mode != "gemopt":
            raise ValueError(f"row_slack={slack} needs mode 'gemopt', got {self.mode!r}")
        if self.cuda_graphs and slack is None:
            raise ValueError("cuda_graphs needs row_slack, which gives packed tensors fixed sizes; got row_slack=None")
        if self.cuda_graphs and not self.device.startswith("cuda"):
            raise ValueError(f"cuda_graphs needs a device of CUDA, got {self.device!r}")

    def compile_options(self) -> dict[str, Any]:
        """What `tasks.compiled` is given beside the mode."""
        if self.row_slack is None:
            return {}
        graphs = {"mode": "reduce-overhead"} if self.cuda_graphs else {}
        return {"dynamic": False, "recipe": {"row_slack": self.row_slack}, **graphs}


class Trainer:
    """Builds everything from a config; ``run`` trains to ``total_steps``."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        self.work = tasks.make_workload(
            config.model, config.data, config.config, config.max_len, config.samples, config.seed,
            config.dropout, config.pooling,
        )  # fmt: skip
        self.model: nn.Module = self.work.module.to(config.device)
        self.compiled = tasks.compiled(self.model, config.mode, **config.compile_options())
        self.batches = self.work.source.train(config.batch_size, config.seed, workers=config.workers)
        per_epoch = self.work.source.steps_per_epoch(config.batch_size)
        self.total_steps = config.steps or max(1, round(config.epochs * per_epoch))
        self.optimizers = Optimizers(
            self.model, lr=config.lr, table_lr=config.table_lr, weight_decay=config.weight_decay, clip=config.clip,
            warmup=config.warmup, total=self.total_steps,
        )  # fmt: skip
        self.speed = Speed(self.work, config.device, config.precision) if config.mfu else None
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.stop_requested = False

    # -- one step ----------------------------------------------------------------------------------
    def train_step(self, batch: Batch) -> torch.Tensor:
        """Forward, backward and update; the loss, detached and still on the device."""
        self.model.train()
        self.optimizers.zero_grad()
        kind = torch.device(self.config.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.config.precision == "bf16"):
            logits = self.work.logits(self.compiled, batch)
        loss = self.work.loss(logits, batch)
        loss.backward()
        self.optimizers.step()
        self.step += 1
        return loss.detach()

    def evaluate(self, split: str = "valid", limit: int | None = None) -> Evaluation:
        """Metrics on a split (its first ``limit`` samples)."""
        return self.work.evaluate(split, self.config.device, limit)

    # -- the loop ----------------------------------------------------------------------------------
    def run(self, on_step: Callable[[dict[str, float]], None] = lambda record: None) -> None:
        """Train until ``total_steps`` or until ``stop_requested``; a checkpoint is written either way.

        ``on_step`` is called every ``log_every`` steps with the means since the last call. Raises
        FloatingPointError at a loss that is not finite, naming the step; the last checkpoint stays.
        """
        config, losses, padding, began = self.config, [], [], time.perf_counter()
        stream = self.batches.endless()
        while self.step < self.total_steps and not self.stop_requested:
            batch = next(stream)
            padding.append(self.work.padding_share(batch))
            batch = {k: v.to(config.device, non_blocking=True) for k, v in batch.items()}
            losses.append(self.train_step(batch))
            last = self.step == self.total_steps
            due = self.step % config.eval_every == 0 or last
            if due or self.step % config.log_every == 0:
                loss = float(torch.stack(losses).mean())  # one device read for several steps
                if not math.isfinite(loss):
                    raise FloatingPointError(f"loss is {loss} within the {len(losses)} steps up to {self.step}")
                seconds = (time.perf_counter() - began) / len(losses)
                record: dict[str, float] = {
                    "step": self.step,
                    "epoch": self.batches.epoch,
                    "loss": loss,
                    "lr": self.optimizers.lr,
                    "samples_per_s": config.batch_size / seconds,
                    "padding": sum(padding) / len(padding),
                }
                if self.speed is not None:
                    record |= self.speed.of_step(batch, seconds)
                if due:
                    scores = self.evaluate("valid", config.eval_samples).scalars()
                    record |= {f"valid_{k}": v for k, v in scores.items()}
                self.history.append(record)
                on_step(record)
                losses, padding, began = [], [], time.perf_counter()
            if self.step % config.save_every == 0 and not last:
                self.save()
        self.save()

    # -- state -------------------------------------------------------------------------------------
    @property
    def checkpoint(self) -> Path:
        return Path(self.config.out) / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint and the metrics table; a crash in between leaves the old ones whole."""
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        cuda = self.config.device.startswith("cuda")
        state = {
            "config": asdict(self.config),
            "total_steps": self.total_steps,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "batches": self.batches.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.config.device) if cuda else None,
            "history": self.history,
        }
        draft = self.checkpoint.with_suffix(".tmp")
        torch.save(state, draft)
        os.replace(draft, self.checkpoint)
        self._write_table()

    def resume(self) -> None:
        """Go on from the checkpoint in ``out``. ValueError names a setting that differs."""
        if not self.checkpoint.exists():
            raise FileNotFoundError(f"out: there is no checkpoint at {self.checkpoint}")
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        for name, mine in asdict(self.config).items():
            saved = state["config"].get(name)
            if name not in FREE_ON_RESUME and saved != mine:
                raise ValueError(f"{name}: the saved run has {saved!r}, this one {mine!r}")
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.batches.load_state_dict(state["batches"])
        self.step, self.history = state["step"], state["history"]
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self.config.device)

    def _write_table(self) -> None:
        columns = list(dict.fromkeys(key for record in self.history for key in record))
        with open(Path(self.config.out) / "metrics.csv", "w", newline="") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(self.history)

    def write_summary(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """``metrics.json``: the config, where training stands, and the metrics on both held-out periods."""
        summary = {
            "config": asdict(self.config),
            "step": self.step,
            "total_steps": self.total_steps,
            "valid": self.evaluate("valid").to_dict(),
            "test": self.evaluate("test").to_dict(),
            **(extra or {}),
        }
        (Path(self.config.out) / "metrics.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary
