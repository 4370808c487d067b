"""The training loop: schedule, evaluation, checkpoints. A resumed run goes on exactly where it stopped.

All that decides the next step is in the checkpoint: parameters, optimizer, schedule, the iterator's place
and the random state. On a CPU, n steps, a stop and m more steps give the same bits as n + m steps.
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
import torch.nn.functional as F
from torch import nn

from . import tasks
from .data.batches import BatchIterator, SampleSet
from .metrics import Metrics, evaluate

# A resumed run may differ from the saved one in these: they do not touch the trajectory.
FREE_ON_RESUME = ("mode", "out", "eval_every", "save_every", "log_every")


@dataclass(frozen=True)
class TrainConfig:
    """``steps`` overrules ``epochs``. Lengths in events, times in steps."""

    model: str = "gem_small"
    data: str = "movielens"
    mode: str = "eager"
    max_len: int = 200
    batch_size: int = 128
    steps: int | None = None
    epochs: float = 1.0
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    dropout: float = 0.1
    pooling: str = "mean"
    seed: int = 0
    device: str = "cpu"
    out: str = "runs/train"
    eval_every: int = 200
    save_every: int = 200
    log_every: int = 10

    def __post_init__(self) -> None:
        tasks.check_name("model", self.model, tasks.MODELS)
        tasks.check_name("data", self.data, tasks.DATA)
        tasks.check_name("mode", self.mode, tasks.MODES)
        for name in ("batch_size", "max_len", "eval_every", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.epochs <= 0:
            raise ValueError(f"epochs must be positive, got {self.epochs}")


def learning_rate_factor(step: int, warmup: int, total: int) -> float:
    """Linear warm-up over ``warmup`` steps, then a half cosine down to a tenth at ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate_model(
    name: str, module: nn.Module, samples: SampleSet, device: str = "cpu", limit: int | None = None
) -> Metrics:
    """Metrics of the model on samples (the first ``limit``), by the plain module in eager mode.

    Eager, so that the numbers of all modes come from the same arithmetic and no second graph is compiled.
    Batches are sorted by length and padded to their own maximum, which is fast and changes no result.
    """
    module.eval()
    order = samples.total_length()[:limit].argsort(kind="stable")
    logits, labels = [], []
    for start in range(0, len(order), 256):
        batch = samples.collate(order[start : start + 256], "batch")
        batch = {k: v.to(device) for k, v in batch.items()}
        logits.append(tasks.click_logits(name, module, batch).float().cpu())
        labels.append(batch["label"].cpu())
    return evaluate(torch.cat(logits).numpy(), torch.cat(labels).numpy())


class Trainer:
    """Builds everything from a config; ``run`` trains to ``total_steps``."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.samples, vocabulary = tasks.load_samples(config.data, config.model, config.max_len)
        torch.manual_seed(config.seed)
        self.model: nn.Module = tasks.build_model(
            config.model, vocabulary, config.max_len, config.dropout, config.pooling
        ).to(config.device)
        self.compiled = tasks.compiled(self.model, config.mode)
        # The last, smaller batch of an epoch is dropped: every step then has the same number of samples.
        self.batches = BatchIterator(self.samples["train"], config.batch_size, seed=config.seed, drop_last=True)
        self.total_steps = config.steps or max(1, round(config.epochs * len(self.batches)))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, config.warmup, self.total_steps)
        )
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.stop_requested = False

    # -- one step ----------------------------------------------------------------------------------
    def train_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward and update; the loss, detached and still on the device."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        logits = tasks.click_logits(self.config.model, self.compiled, batch)
        loss = F.binary_cross_entropy_with_logits(logits, batch["label"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.detach()

    def evaluate(self, split: str = "valid", limit: int | None = None) -> Metrics:
        """Metrics on a split (its first ``limit`` samples)."""
        return evaluate_model(self.config.model, self.model, self.samples[split], self.config.device, limit)

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
            padding.append(tasks.padding_share(config.model, batch))
            losses.append(self.train_step({k: v.to(config.device) for k, v in batch.items()}))
            last = self.step == self.total_steps
            due = self.step % config.eval_every == 0 or last
            if due or self.step % config.log_every == 0:
                loss = float(torch.stack(losses).mean())  # one device read for several steps
                if not math.isfinite(loss):
                    raise FloatingPointError(f"loss is {loss} within the {len(losses)} steps up to {self.step}")
                seconds = time.perf_counter() - began
                record: dict[str, float] = {
                    "step": self.step,
                    "epoch": self.batches.epoch,
                    "loss": loss,
                    "lr": float(self.schedule.get_last_lr()[0]),
                    "samples_per_s": len(losses) * config.batch_size / seconds,
                    "padding": sum(padding) / len(padding),
                }
                if due:
                    metrics = self.evaluate("valid")
                    record |= {f"valid_{k}": v for k, v in asdict(metrics).items() if k != "samples"}
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
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
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
            "valid": asdict(self.evaluate("valid")),
            "test": asdict(self.evaluate("test")),
            **(extra or {}),
        }
        (Path(self.config.out) / "metrics.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary
