"""How well models learn: gem on synthetic data against the best normalised entropy there is, and against baselines on
MovieLens-100K.

    python bench/quality.py                                  both parts, three seeds, eager
    python bench/quality.py --modes eager gemopt             the same runs packed: equal within the noise of seeds
    python bench/quality.py --part synthetic --device cuda   tiny, small and base
    python bench/quality.py --first-seed 1 --seeds 1         one seed, for several processes (each with its own --out)

- ``synthetic``: gem of several sizes on the same stream (three histories, planted signal, 5 % of labels flipped); the best
  reachable NE is the expected NE of the true probabilities.
- ``movielens``: gem small against SASRec and a fit of user, item and global bias, split by time; figures of the last tenth.

Every run is `Trainer` on a fixed number of steps; the figures are those of the last step, nothing is picked. Results are
merged into ``bench/results/quality-<machine>.json`` (or ``--out``), with a plot beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _harness
import torch
from rich.console import Console
from rich.table import Table

from gemopt.model_zoo.data.synthetic import SyntheticSamples
from gemopt.model_zoo.trainer import TrainConfig, Trainer

PARTS = ("synthetic", "movielens")
SYNTHETIC = TrainConfig(
    model="gem", data="synthetic:tiny", batch_size=256, table_lr=0.3, log_every=50, eval_samples=4096,
)  # fmt: skip
# What changes with the size of gem on synthetic data: the wider and deeper, the smaller the rate and the longer its warm-up.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 3e-3, "warmup": 50},
    "small": {"lr": 1e-3, "warmup": 50},
    "base": {"lr": 3e-4, "warmup": 200},
    "large": {"lr": 1e-4, "warmup": 400},
}
MOVIELENS = TrainConfig(data="movielens", batch_size=256, warmup=30, log_every=50, eval_samples=4096)
# What is compared on MovieLens, with the rates that suit each.
RIVALS: dict[str, dict[str, Any]] = {
    "bias": {"model": "bias", "lr": 0.1, "table_lr": 0.6, "epochs": 2},
    "sasrec": {"model": "sasrec", "lr": 1e-3, "table_lr": 0.05},
    "gem small": {"model": "gem", "config": "small", "lr": 1e-3, "table_lr": 0.02, "dropout": None},
}
# On a CPU and on a GPU: the whole bench takes about half an hour of one core, and minutes on a GPU.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "config": (["tiny", "small"], ["tiny", "small", "base"]),
    "steps": (300, 4000),
    "movielens_steps": (200, 300),
    "max_len": (20, 200),
}


def run(config: TrainConfig, label: str) -> dict[str, Any]:
    """Train once; the record that is stored. Its ``config`` says everything that decides the result."""
    torch._dynamo.reset()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(replace(config, out=folder))
        trainer.run()
        test = trainer.evaluate("test").to_dict()
    samples = getattr(trainer.work.source, "samples", {}).get("test")
    best = samples.best_ne() if isinstance(samples, SyntheticSamples) else None
    keep = ("model", "config", "data", "mode", "precision", "max_len", "batch_size", "lr", "table_lr", "warmup", "seed")
    return {
        "config": {"label": label, "steps": trainer.total_steps, **{k: getattr(config, k) for k in keep}},
        "test": test,
        "best_ne": best,
        "curve": [{k: r[k] for k in ("step", "valid_ne", "valid_auc")} for r in trainer.history if "valid_ne" in r],
        "losses": [r["loss"] for r in trainer.history],
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def plans(options: argparse.Namespace) -> list[tuple[TrainConfig, str]]:
    """Every run, with what it is called in the table."""
    found = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for mode in options.modes:
            base: dict[str, Any] = {"seed": seed, "mode": mode, "device": options.device, "precision": options.precision}
            base["workers"] = 8 if options.device.startswith("cuda") else 0
            if "synthetic" in options.part:
                every = max(options.steps // 8, 1)
                for size in options.config:
                    rates = SIZES[size]
                    config = replace(SYNTHETIC, config=size, steps=options.steps, eval_every=every, **rates, **base)
                    found.append((config, f"gem {size}"))
            if "movielens" in options.part:
                for label, changes in RIVALS.items():
                    if mode == "eager" or label == "gem small":
                        changes = dict(changes)
                        steps = options.movielens_steps * changes.pop("epochs", 1)  # the tuned length of each
                        config = replace(MOVIELENS, steps=steps, eval_every=max(steps // 6, 1), **base, **changes)
                        config = replace(config, max_len=options.max_len)
                        found.append((config, label))
    return found


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per data set, model and mode: mean and spread over seeds of the first task's NE and AUC."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        c = record["config"]
        groups.setdefault((c["data"], c["label"], c["mode"]), []).append(record)
    found = []
    for (data, label, mode), runs in groups.items():
        row: dict[str, Any] = {"data": data, "label": label, "mode": mode, "seeds": len(runs), "best_ne": runs[0]["best_ne"]}
        for metric in ("ne", "auc", "calibration"):
            values = [r["test"][metric] for r in runs]
            row[metric] = statistics.fmean(values)
            row[f"{metric}_std"] = statistics.stdev(values) if len(values) > 1 else None
        found.append(row)
    return found


def table(records: Sequence[dict[str, Any]]) -> Table:
    view = Table("data", "model", "mode", "NE", "± seeds", "best NE", "AUC", "± seeds", "calibration", "seeds")
    for row in summary(records):
        spread = {k: "-" if row[k] is None else f"{row[k]:.4f}" for k in ("ne_std", "auc_std")}
        best = "-" if row["best_ne"] is None else f"{next(iter(row['best_ne'].values())):.4f}"
        view.add_row(
            row["data"], row["label"], row["mode"], f"{row['ne']:.4f}", spread["ne_std"], best, f"{row['auc']:.4f}",
            spread["auc_std"], f"{row['calibration']:.3f}", str(row["seeds"]),
        )  # fmt: skip
    return view


def plot(records: Sequence[dict[str, Any]], path: Path) -> Path:
    """Left: NE over steps on synthetic data, with the best there is. Right: NE of the models on MovieLens, a dot a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    synthetic = [r for r in records if r["config"]["data"] != "movielens"]
    movielens = [r for r in records if r["config"]["data"] == "movielens"]
    labels = list(dict.fromkeys(r["config"]["label"] for r in synthetic))
    seen: set[str] = set()
    for record in synthetic:
        label, mode = record["config"]["label"], record["config"]["mode"]
        name = f"{label}, {mode}"
        xs, ys = zip(*((p["step"], p["valid_ne"]) for p in record["curve"]), strict=True)
        style = {"color": f"C{labels.index(label)}", "linestyle": "--" if mode == "gemopt" else "-"}
        left.plot(xs, ys, lw=1.2, label=None if name in seen else name, **style)
        seen.add(name)
    if synthetic:
        best = next(iter(synthetic[0]["best_ne"].values()))
        left.axhline(best, color="black", lw=0.8)
        left.annotate("best there is", (0.02, best + 0.002), xycoords=("axes fraction", "data"), fontsize=8)
        left.legend(frameon=False)
    left.set(xlabel="step", ylabel="NE on later samples", title="Synthetic data")
    names = list(dict.fromkeys((r["config"]["label"], r["config"]["mode"]) for r in movielens))
    for place, group in enumerate(names):
        values = [r["test"]["ne"] for r in movielens if (r["config"]["label"], r["config"]["mode"]) == group]
        right.plot([place] * len(values), values, "o", color="#2a7f9e", alpha=0.6)
        right.plot([place - 0.2, place + 0.2], [statistics.fmean(values)] * 2, color="black", lw=1)
    right.set_xticks(range(len(names)), [f"{label}\n{mode}" for label, mode in names])
    right.set(ylabel="NE on the last tenth", title="MovieLens-100K, a dot per seed")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    p.add_argument(
        "--config",
        nargs="+",
        choices=tuple(SIZES),
        help="sizes of gem on synthetic data (default: tiny and small, on a GPU base too)",
    )
    p.add_argument("--modes", nargs="+", choices=("eager", "gemopt"), default=("eager",))
    p.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    p.add_argument("--first-seed", type=int, default=0, help="the first of them (default: 0)")
    p.add_argument("--steps", type=int, help="of 256 synthetic samples (default: 300, on a GPU 4000)")
    p.add_argument("--movielens-steps", type=int, help="of 256 ratings, an epoch has 295 (default: 200, on a GPU 300)")
    p.add_argument("--max-len", type=int, help="longest history of MovieLens (default: 20, on a GPU 200)")
    p.add_argument("--device", default="cpu")
    p.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    p.add_argument("--out", type=Path, help="folder for the results instead of bench/results")
    p.add_argument("--no-save", action="store_true", help="print only")
    return p


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.first_seed < 0:
        parser().error(f"--first-seed must not be negative, got {options.first_seed}")
    for name, (small, large) in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, large if options.device.startswith("cuda") else small)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        _harness.RESULTS = options.out
    console, records = Console(), []
    for config, label in plans(options):
        record = run(config, label)
        records.append(record)
        title = f"{config.data}, {label}, {config.mode}, seed {config.seed}"
        console.print(
            f"{title}: NE {record['test']['ne']:.4f} AUC {record['test']['auc']:.4f} ({record['seconds']:.0f} s)",
            highlight=False,
        )
        if not options.no_save:  # after each: an interrupted run keeps what it has
            path = _harness.record_results("quality", [record], options.device)
    console.print(table(records))
    if not options.no_save and records:
        console.print(f"written: {path} and {plot(records, path.with_suffix('.png'))}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
