"""What unpadding saves: whole training steps, padded and packed, in turns.

    python bench/unpad.py                                     the full table (long: see --quick)
    python bench/unpad.py --model sasrec --pool last --max-len 200 --dropout 0

Batch 128, d=64, 2 layers, forward + backward + AdamW, on the history lengths of MovieLens-100K. Contestants:

- ``padded``: torch.compile, every batch padded to the maximum length;
- ``sorted``: torch.compile, samples sorted by length, each batch padded to its own maximum. Its steps differ
  in size, so its figure is the *mean* over batches spread evenly over the sorted order: an epoch's cost;
- ``gemopt``: gemopt.compile, the same batches as ``padded``.

``--fill 1`` replaces the histories by full ones of random events, where nothing can be saved. Results are
printed and merged into ``bench/results/unpad-<machine>.json``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import _harness
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from gemopt.model_zoo import tasks
from gemopt.model_zoo.data.batches import Batch, BatchIterator, SampleSet

BATCH = 128
CONTESTANTS = ("padded", "sorted", "gemopt")


@dataclass(frozen=True)
class Config:
    """One line of the table. ``fill`` is ``data`` (the data's own lengths) or ``1`` (all at the maximum)."""

    model: str
    pool: str
    max_len: int
    dropout: float
    fill: str

    def title(self) -> str:
        return f"{self.model} {self.pool}, max {self.max_len}, dropout {self.dropout:g}, fill {self.fill}"


class Contestant:
    """A model under one compiler, with its batches; calling it with i runs the training step on batch i."""

    def __init__(self, config: Config, module: torch.nn.Module, mode: str, batches: list[Batch]) -> None:
        self.config, self.batches, self.losses = config, batches, list[float]()
        self.model = copy.deepcopy(module).train()  # same initial parameters for everyone
        self.compiled = tasks.compiled(self.model, mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def __call__(self, i: int) -> None:
        batch = self.batches[i % len(self.batches)]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))  # a step ends when its loss is known

    def loss(self, batch: Batch) -> torch.Tensor:
        if self.config.model == "sasrec":  # next-item prediction, over all items
            return F.cross_entropy(self.compiled(batch["all_item"], batch["all_length"]), batch["item_id"])
        return F.binary_cross_entropy_with_logits(self.compiled(batch), batch["label"])


def measure(
    config: Config,
    steps: int,
    contestants: tuple[str, ...],
    device: str,
    progress: Callable[[str, int], None],
) -> dict[str, Any]:
    """Time every contestant on ``steps`` batches; returns the record that is stored."""
    splits, vocabulary = tasks.load_samples("movielens", config.model, config.max_len)
    samples = splits["train"]
    torch.manual_seed(0)
    module = tasks.build_model(config.model, vocabulary, config.max_len, config.dropout, config.pool)
    padded = draw(samples, steps, "shuffled")
    if config.fill == "1":
        padded = [filled(batch, vocabulary) for batch in padded]
        contestants = tuple(name for name in contestants if name != "sorted")  # would be the same as padded
    runs: dict[str, Contestant] = {}
    for name in contestants:
        batches = draw(samples, steps, "by_length") if name == "sorted" else padded
        batches = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
        mode = "gemopt" if name == "gemopt" else "compile"
        runs[name] = Contestant(config, module.to(device), mode, batches)

    # Sorted batches have many shapes; all are met before timing, so that no compilation is timed.
    warmup = {name: steps if name == "sorted" else 2 for name in runs}
    timing = _harness.interleave(runs, steps, warmup, device, progress)
    record: dict[str, Any] = {
        "config": asdict(config),
        "padding": sum(tasks.padding_share(config.model, batch) for batch in padded) / len(padded),
        "batch": BATCH,
        "steps": steps,
        "timing": timing,
    }
    record["speedup"] = speedups(timing)
    if "gemopt" in runs and "padded" in runs and config.dropout == 0:
        pairs = zip(runs["padded"].losses, runs["gemopt"].losses, strict=True)
        record["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
    if "gemopt" in runs:
        report = runs["gemopt"].compiled.report  # type: ignore[attr-defined]
        record["rewrites"], record["rejections"] = len(report.rewrites), len(report.rejections)
    return record


def speedups(timing: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Times of the baselines over gemopt's: medians against ``padded``, means against ``sorted``."""
    if "gemopt" not in timing:
        return {}
    ours = timing["gemopt"]
    which = {"padded": "median_s", "sorted": "mean_s"}
    return {name: timing[name][key] / ours[key] for name, key in which.items() if name in timing}


def draw(samples: SampleSet, steps: int, order: Any) -> list[Batch]:
    """``steps`` batches: the first of a shuffled epoch, or spread evenly over the epoch sorted by length."""
    if order == "shuffled":
        stream = BatchIterator(samples, BATCH, seed=0, drop_last=True).endless()
        return list(itertools.islice(stream, steps))
    ranks = np.argsort(samples.total_length(), kind="stable")
    whole = len(ranks) // BATCH
    chosen = ((np.arange(steps) + 0.5) * whole / steps).astype(int)
    chosen = np.random.default_rng(0).permutation(chosen)
    return [samples.collate(ranks[i * BATCH : (i + 1) * BATCH], "batch") for i in chosen]


def filled(batch: Batch, vocabulary: dict[str, int]) -> Batch:
    """The batch with every history at full length, of random events."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"item": vocabulary["item_id"], "genre": vocabulary["genre"], "gap": vocabulary["gap"]}
    out = dict(batch)
    for name, value in batch.items():
        history, _, kind = name.rpartition("_")
        if f"{history}_length" not in batch:
            continue  # a feature of the user or the candidate
        if kind == "length":
            out[name] = torch.full_like(value, batch[f"{history}_item"].shape[1])
        else:
            out[name] = torch.randint(1, sizes[kind], value.shape, generator=generator)
    return out


def grid(arguments: argparse.Namespace) -> list[Config]:
    """The configurations asked for; fill 1 is measured without dropout only, unless asked for alone."""
    variants = [("sasrec", "mean"), ("sasrec", "last"), ("gem_small", "mean"), ("gem_small", "last")]
    chosen = []
    for (model, pool), max_len, dropout, fill in itertools.product(
        variants,
        arguments.max_len or [200, 700],
        arguments.dropout or [0.0, 0.2],
        arguments.fill or ["data", "1"],
    ):
        if arguments.model and model not in arguments.model:
            continue
        if (pool not in arguments.pool) if arguments.pool else (model, pool) == ("gem_small", "last"):
            continue
        if fill == "1" and dropout and not arguments.fill:
            continue
        chosen.append(Config(model, pool, max_len, dropout, fill))
    return chosen


def table(records: list[dict[str, Any]]) -> Table:
    view = Table("model", "max", "dropout", "padding", "padded ms", "sorted ms", "gemopt ms", "x padded", "x sorted")
    for record in records:
        config, timing, gain = record["config"], record["timing"], record["speedup"]

        def milliseconds(name: str, key: str = "median_s", timing: Any = timing) -> str:
            return f"{timing[name][key] * 1e3:,.0f}" if name in timing else "-"

        view.add_row(
            f"{config['model']} {config['pool']}",
            str(config["max_len"]),
            f"{config['dropout']:g}",
            f"{record['padding']:.0%}",
            milliseconds("padded"),
            milliseconds("sorted", "mean_s"),
            milliseconds("gemopt"),
            f"{gain['padded']:.2f}" if "padded" in gain else "-",
            f"{gain['sorted']:.2f}" if "sorted" in gain else "-",
        )
    return view


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", nargs="+", choices=tasks.MODELS, help="default: all")
    p.add_argument("--pool", nargs="+", choices=("mean", "last"), help="default: both for sasrec, mean for gem_small")
    p.add_argument("--max-len", nargs="+", type=int, help="default: 200 700")
    p.add_argument("--dropout", nargs="+", type=float, help="default: 0 0.2")
    p.add_argument("--fill", nargs="+", choices=("data", "1"), help="default: both, 1 without dropout only")
    p.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    p.add_argument("--steps", type=int, help="timed steps of each contestant (default: 20; 5 beyond 300 events)")
    p.add_argument("--quick", action="store_true", help="max 200, no dropout, own lengths, 7 steps")
    p.add_argument("--device", default="cpu")
    p.add_argument("--no-save", action="store_true", help="print only")
    return p


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.quick:
        options.max_len, options.dropout, options.fill = [200], [0.0], ["data"]
        options.steps = options.steps or 7
    console = Console()
    records = []
    for config in grid(options):
        torch._dynamo.reset()  # every configuration starts from nothing
        steps = options.steps or (20 if config.max_len <= 300 else 5)
        with console.status(config.title()) as status:

            def show(name: str, i: int, status: Any = status, title: str = config.title()) -> None:
                status.update(f"{title}: {name}, step {i}")

            records.append(measure(config, steps, tuple(options.contestants), options.device, show))
        console.print(f"{config.title()}: " + json.dumps(records[-1]["speedup"]), highlight=False)
        if not options.no_save:  # after each: an interrupted run keeps what it has
            path = _harness.record_results("unpad", records[-1:], options.device)
    console.print(table(records))
    if not options.no_save and records:
        console.print(f"written: {path.relative_to(_harness.ROOT)}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
