"""The same model trained twice, in turns: padded under torch.compile, packed under gemopt.compile.

``python -m gemopt.model_zoo.demo`` (``make demo``) trains GEMSmall on MovieLens-100K from one initialisation
on one sequence of batches, and prints what gemopt did, the metrics of both on later data, and the time of
both per step: histories of at most 200 events, and then a few steps at 700. It leaves ``report.json``,
``report.html`` and ``step_time.png`` in ``--out``, and fails if the losses of the two part.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from . import tasks
from .data.batches import Batch, BatchIterator, SampleSet
from .metrics import Metrics
from .tasks import evaluate_model

MODEL = "gem_small"
NAMES = {"compile": "torch.compile, padded", "gemopt": "gemopt, packed"}
# Both run in float32 with different summation orders; Adam amplifies the difference from step to step.
COMPARED_STEPS, LOSS_TOLERANCE = 50, 5e-4
# On a slow or busy machine the demo times fewer steps rather than take longer than its budget.
FEWEST_STEPS, SHORT_SHARE = 5, 0.75


@dataclass
class Side:
    """One of the two runs. ``seconds`` and ``losses`` are per step; ``first`` is the step that compiled."""

    model: nn.Module
    compiled: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by maximum length
    first: dict[int, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def step(self, batch: Batch, max_len: int) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        logits = tasks.click_logits(MODEL, self.compiled, batch)
        loss = F.binary_cross_entropy_with_logits(logits, batch["label"])
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        seconds = time.perf_counter() - start
        if max_len in self.first:
            self.seconds.setdefault(max_len, []).append(seconds)
        else:
            self.first[max_len] = seconds


def make_sides(vocabulary: dict[str, int], max_len: int, options: argparse.Namespace) -> dict[str, Side]:
    """Both runs, from the same parameters. Both compile for any length at once, or each would compile twice."""
    torch.manual_seed(options.seed)
    layers = options.layers
    initial = tasks.build_model(MODEL, vocabulary, max_len, dropout=0.0, pooling="mean", n_layers=layers).train()
    sides = {}
    for mode in NAMES:
        model = copy.deepcopy(initial)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
        sides[mode] = Side(model, tasks.compiled(model, mode, dynamic=True), optimizer)
    return sides


def race(
    sides: dict[str, Side], batches: Iterable[Batch], max_len: int, steps: int, until: float, console: Console
) -> float:
    """Train both in turns: one step that may compile, then ``steps`` timed ones. Returns the mean padding share.

    Past the time ``until`` (of ``time.perf_counter``) it stops early, but not before ``FEWEST_STEPS`` timed steps.
    """
    padding, stream = [], iter(batches)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[doing]}"), console=console) as progress:
        bar = progress.add_task(f"maximum {max_len}", total=steps + 1, doing="")
        for number in range(steps + 1):
            if number > FEWEST_STEPS and time.perf_counter() > until:
                progress.console.print(f"maximum {max_len}: stopped after {number - 1} timed steps, for lack of time")
                break
            batch = next(stream)
            padding.append(tasks.padding_share(MODEL, batch))
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]  # neither always goes first
            for mode in order:
                doing = f"{NAMES[mode]}{', compiling' if number == 0 else ''}"
                progress.update(bar, doing=doing, refresh=number == 0)
                sides[mode].step(batch, max_len)
            progress.update(bar, advance=1, doing=f"loss {sides['gemopt'].losses[-1]:.4f}")
    return statistics.fmean(padding)


def speed_table(sides: dict[str, Side], padding: dict[int, float]) -> Table:
    view = Table("maximum", "padding", *NAMES.values(), "speed-up", title="Training step (median, ms)")
    for max_len, share in padding.items():
        padded, packed = (statistics.median(sides[mode].seconds[max_len]) for mode in NAMES)
        cells = [f"{x * 1e3:,.0f}" for x in (padded, packed)]
        view.add_row(str(max_len), f"{share:.0%}", *cells, f"{padded / packed:.2f}x")
    return view


def metrics_table(metrics: dict[str, Metrics], steps: int) -> Table:
    samples = next(iter(metrics.values())).samples
    view = Table("", "NE", "AUC", "calibration", title=f"After {steps} steps, on {samples:,} later ratings")
    for mode, m in metrics.items():
        view.add_row(NAMES[mode], f"{m.ne:.5f}", f"{m.auc:.5f}", f"{m.calibration:.4f}")
    return view


def loss_difference(sides: dict[str, Side]) -> float:
    """Largest difference of the two losses over the first steps; NaN if one of them is."""
    padded, packed = (torch.tensor(sides[mode].losses[:COMPARED_STEPS], dtype=torch.float64) for mode in NAMES)
    return float((padded - packed).abs().max())  # unlike Python's max, this does not skip a NaN


def summarise(
    sides: dict[str, Side],
    metrics: dict[str, Metrics],
    padding: dict[int, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Everything of the run as plain data, for ``report.json``."""
    speed = {}
    for max_len in padding:
        medians = {mode: statistics.median(side.seconds[max_len]) for mode, side in sides.items()}
        speed[str(max_len)] = {
            "median_s": medians,
            "first_s": {mode: side.first[max_len] for mode, side in sides.items()},
            "steps": len(sides["gemopt"].seconds[max_len]),
            "speedup": medians["compile"] / medians["gemopt"],
            "padding": padding[max_len],
        }
    return {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "metrics": {mode: asdict(m) for mode, m in metrics.items()},
        "speed": speed,
        "largest_loss_difference": loss_difference(sides),
        "losses": {mode: side.losses for mode, side in sides.items()},
        "report": report_of(sides).to_dict(),
    }


def report_of(sides: dict[str, Side]) -> Any:
    """What gemopt says it did."""
    return sides["gemopt"].compiled.report  # type: ignore[attr-defined]


def plot(sides: dict[str, Side], padding: dict[int, float], path: Path) -> None:
    """Left: the losses of both, step by step. Right: the time of every step, by maximum length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"compile": "#c44e52", "gemopt": "#2a7f9e"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for mode, side in sides.items():
        style: dict[str, Any] = {"lw": 4, "alpha": 0.35} if mode == "compile" else {"lw": 1.2}
        steps = 1 + len(side.seconds[next(iter(padding))])
        left.plot(range(1, steps + 1), side.losses[:steps], color=colours[mode], label=NAMES[mode], **style)
    left.set(xlabel="step", ylabel="log loss", title="Same losses")
    left.legend(frameon=False)

    ticks = []
    for place, (max_len, share) in enumerate(padding.items()):
        ticks.append(f"at most {max_len} events\n{share:.0%} padding")
        medians = {}
        for shift, (mode, side) in zip((-0.2, 0.2), sides.items(), strict=True):
            times = side.seconds[max_len]
            medians[mode] = statistics.median(times)
            label = NAMES[mode] if place == 0 else None
            right.bar(place + shift, medians[mode], 0.36, color=colours[mode], alpha=0.85, label=label)
            offsets = [place + shift + 0.24 * (i / max(len(times) - 1, 1) - 0.5) for i in range(len(times))]
            right.plot(offsets, times, ".", ms=3, color="black", alpha=0.35)
        speedup = medians["compile"] / medians["gemopt"]
        right.annotate(
            f"{speedup:.1f}x", (place + 0.2, max(times)), xytext=(0, 5), textcoords="offset points",
            ha="center", weight="bold", color=colours["gemopt"],
        )  # fmt: skip
    right.set_xticks(range(len(ticks)), ticks)
    right.set(ylabel="seconds per training step", title="Less time")
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--max-len", type=int, default=200, help="longest history while training")
    p.add_argument("--steps", type=int, default=120, help="timed training steps")
    p.add_argument("--long-max-len", type=int, default=700, help="longest history of the second measurement")
    p.add_argument("--long-steps", type=int, default=10, help="timed steps of the second measurement; 0 leaves it out")
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--layers", type=int, default=1, help="transformer layers of every history")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--budget", type=float, default=270, help="seconds after which fewer steps are timed")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=Path("runs/demo"))
    return p


def batches_of(samples: SampleSet, options: argparse.Namespace) -> Iterable[Batch]:
    return BatchIterator(samples, options.batch_size, seed=options.seed, drop_last=True).endless()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.steps < 1 or options.long_steps < 0:
        steps = f"{options.steps} and {options.long_steps}"
        print(f"demo: error: steps must be at least 1, long-steps at least 0, got {steps}", file=sys.stderr)
        return 2
    console, began = Console(), time.perf_counter()
    samples, vocabulary = tasks.load_samples("movielens", MODEL, options.max_len)
    longest = max(options.max_len, options.long_max_len if options.long_steps else 0)
    sides = make_sides(vocabulary, longest, options)
    parameters = sum(p.numel() for p in sides["gemopt"].model.parameters())
    console.print(
        f"GEMSmall, {parameters:,} parameters, on {len(samples['train']):,} ratings of MovieLens-100K; three "
        f"histories a sample; batch {options.batch_size}; float32; {torch.get_num_threads()} threads"
    )

    stream = batches_of(samples["train"], options)
    until = began + SHORT_SHARE * options.budget
    padding = {options.max_len: race(sides, stream, options.max_len, options.steps, until, console)}
    trained = len(sides["gemopt"].losses)
    metrics = {mode: evaluate_model(MODEL, side.model, samples["valid"]) for mode, side in sides.items()}
    if options.long_steps:
        long, _ = tasks.load_samples("movielens", MODEL, options.long_max_len)
        stream, until = batches_of(long["train"], options), began + options.budget
        for side in sides.values():
            side.model.train()
        share = race(sides, stream, options.long_max_len, options.long_steps, until, console)
        padding[options.long_max_len] = share

    print(report_of(sides))
    console.print(metrics_table(metrics, trained), speed_table(sides, padding))
    summary = write_files(sides, metrics, padding, options)
    difference, compared = summary["largest_loss_difference"], min(COMPARED_STEPS, trained)
    console.print(f"largest difference of the losses over {compared} steps: {difference:.1e}")
    console.print(f"written to {options.out}/: report.json, report.html, step_time.png", soft_wrap=True)
    console.print(f"{time.perf_counter() - began:.0f} s in all")
    if not difference <= LOSS_TOLERANCE:
        console.print(f"[bold red]the losses part by more than {LOSS_TOLERANCE}: please report this")
        return 1
    return 0


def write_files(
    sides: dict[str, Side], metrics: dict[str, Metrics], padding: dict[int, float], options: argparse.Namespace
) -> dict[str, Any]:
    """``report.json``, ``report.html`` and ``step_time.png`` in ``options.out``; the content of the first."""
    options.out.mkdir(parents=True, exist_ok=True)
    summary = summarise(sides, metrics, padding, options)
    (options.out / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    report_of(sides).to_html(options.out / "report.html")
    plot(sides, padding, options.out / "step_time.png")
    return summary


if __name__ == "__main__":
    sys.exit(main())
