"""Train a model of the zoo: ``python -m gemopt.model_zoo.train --help``.

Ctrl-C finishes the step, writes a checkpoint and stops; ``--resume`` goes on from there.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import tasks
from .trainer import PRECISIONS, TrainConfig, Trainer
from .writers import Scalars

INTERRUPTED = 130  # the shell's code for a process ended by Ctrl-C


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("gemopt train", description="Train a model of the zoo.")
    defaults = {f.name: f.default for f in fields(TrainConfig)}

    def add(name: str, help: str, kind: Any = str, **options: Any) -> None:
        flag, default = "--" + name.replace("_", "-"), defaults[name]
        p.add_argument(flag, type=kind, default=default, help=f"{help} (default: {default})", **options)

    add("model", "which model", choices=tasks.all_models())
    add("config", "size of the model: tiny, small, base, large; none for the models of the demo, gem_small and sasrec")
    add("data", "movielens, synthetic, synthetic:SIZE (tiny, small, base, large), or the path of tables")
    add("samples", "samples of the synthetic training period", int)
    add("mode", "how the model runs", choices=tasks.MODES)
    p.add_argument("--gemopt", dest="mode", action="store_const", const="gemopt", help="short for --mode gemopt")
    add("row_slack", "with --gemopt: fixed packed sizes, this share above the first batch's rows. None: exact sizes", float)
    p.add_argument("--cuda-graphs", action="store_true", help="with --row-slack on a GPU: replay the step as CUDA graphs")
    add("precision", "fp32, or bf16 by autocast", choices=PRECISIONS)
    add("max_len", "longest history; all are padded to it. None: the data's own", int)
    add("batch_size", "samples per step", int)
    add("steps", "steps to train; overrules --epochs", int)
    add("epochs", "passes over the training period", float)
    add("lr", "peak learning rate of the dense parameters, by AdamW", float)
    add("table_lr", "peak learning rate of embedding tables, by row-wise AdaGrad", float)
    add("weight_decay", "AdamW's weight decay", float)
    add("warmup", "steps of linear warm-up", int)
    add("clip", "largest gradient norm of the dense parameters", float)
    add("dropout", "dropout in the transformers. None: the model's own", float)
    add("pooling", "how a history of gem_small and sasrec becomes one vector", choices=("mean", "last"))
    add("seed", "of initialisation, dropout and data order", int)
    add("workers", "threads that make batches ahead of time", int)
    add("device", "cpu or cuda")
    add("out", "folder for checkpoint, metrics.csv and metrics.json")
    add("eval_every", "steps between evaluations", int)
    add("eval_samples", "samples of these evaluations. None: all", int)
    add("save_every", "steps between checkpoints", int)
    add("log_every", "steps between log lines", int)
    p.add_argument("--mfu", action="store_true", help="count useful FLOP/s and MFU at every log line")
    p.add_argument("--tensorboard", action="store_true", help="write TensorBoard logs to --out (needs tensorboard)")
    p.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(parser().parse_args(arguments))
    resume = options.pop("resume")
    console = Console()
    try:
        trainer = Trainer(TrainConfig(**options))
        if resume:
            trainer.resume()
            console.print(f"resumed at step {trainer.step} of {trainer.total_steps}")
        opened = Scalars.open(trainer.config)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"gemopt train: error: {error}", file=sys.stderr)
        return 2

    console.print(trainer.work.source.describe())
    parameters = sum(p.numel() for p in trainer.model.parameters())
    console.print(f"{trainer.config.model}: {parameters:,} parameters; {trainer.total_steps:,} steps")
    if trainer.speed is not None:
        console.print(trainer.speed.describe())
    with stop_on_interrupt(trainer), opened as scalars:
        train_with_progress(trainer, console, scalars)
    if trainer.stop_requested:
        console.print(f"stopped at step {trainer.step}; {trainer.checkpoint} written, --resume goes on", soft_wrap=True)
        return INTERRUPTED

    report = getattr(trainer.compiled, "report", None)
    if trainer.config.mode == "gemopt" and report is not None:
        print(report)
    summary = trainer.write_summary({"report": report.to_dict()} if report is not None else None)
    console.print(metrics_table(summary))
    console.print(f"written: {Path(trainer.config.out) / 'metrics.json'}", soft_wrap=True)
    return 0


def train_with_progress(trainer: Trainer, console: Console, scalars: Scalars) -> None:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=trainer.total_steps, completed=trainer.step, status="compiling")

        def show(record: dict[str, float]) -> None:
            status = "loss {loss:.4f}  {samples_per_s:,.0f} samples/s  padding {padding:.0%}".format(**record)
            if "useful_tflops" in record:
                status += "  {useful_tflops:.3g} TFLOP/s".format(**record)
            progress.update(bar, completed=record["step"], status=status)
            scalars.write(record)
            if "valid_ne" in record:
                line = "step {step:>6}  loss {loss:.4f}  valid NE {valid_ne:.4f}  AUC {valid_auc:.4f}  "
                progress.console.print((line + "calibration {valid_calibration:.3f}").format(**record))

        trainer.run(show)


@contextmanager
def stop_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C asks the trainer to stop after its step, the second interrupts at once."""

    def handle(*_: Any) -> None:
        trainer.stop_requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def metrics_table(summary: dict[str, Any]) -> Table:
    table = Table("period", "task", "domain", "NE", "AUC", "calibration", "samples")
    for split in ("valid", "test"):
        for task, overall in summary[split]["tasks"].items():
            for domain, m in {"all": overall, **overall["domains"]}.items():
                row = (f"{m['ne']:.4f}", f"{m['auc']:.4f}", f"{m['calibration']:.3f}", f"{m['samples']:,}")
                table.add_row(split, task, domain, *row)
    return table


if __name__ == "__main__":
    sys.exit(main())
