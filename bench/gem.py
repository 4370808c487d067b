"""Training steps of the full GEM model: eager and torch.compile on padded batches, gemopt on the same batches, in turns.

    python bench/gem.py --device cpu                                    gem small, four histories of at most 256 events
    python bench/gem.py --device cuda --config base large               ten and twelve histories, maximum 1,024 and 2,048
    python bench/gem.py --device cuda --config base --profile           and where the time of each goes, as a plot
    python bench/gem.py --device cuda --config base --apart             one contestant in memory at a time

A step is forward, backward and update (AdamW, row-wise AdaGrad for tables), bfloat16 by autocast on a GPU and float32 on a
CPU; sizes are compiled as constants, but for the numbers of rows that gemopt packs. Lengths are uniform with mean fill 0.5
(1 to the maximum). Useful FLOPs are those of the padded model's graph at the real lengths (gemopt.mfu), three times the
forward pass; all contestants are credited with the same. Peak memory is what the tensors of one contestant alone would need.

Contestants that do not fit together are timed apart, as with ``--apart``: each is compiled, warmed up, timed and freed
before the next starts; what the allocator reserved for it, pools of CUDA graphs included, is ``peak_reserved_gib``
(None for those that shared memory). A contestant that does not fit alone is recorded as such; with ``--fit`` the batch is
halved until torch.compile and gemopt fit. Results are merged into ``gem-<machine>.json`` of ``bench/results`` (or of the
folder ``--out``) as soon as they are known.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import _breakdown
import _harness
import torch
from rich.console import Console
from rich.table import Table

from gemopt import mfu
from gemopt.model_zoo import tasks, zoo
from gemopt.model_zoo.data.batches import Batch
from gemopt.model_zoo.data.schema import Schema
from gemopt.model_zoo.data.synthetic import Synthetic, SyntheticConfig
from gemopt.model_zoo.optim import Optimizers

NAMES = {
    "eager": "eager, padded",
    "compile": "torch.compile, padded",
    "compile-graphs": "torch.compile, padded, CUDA graphs",
    "gemopt": "gemopt",
    "gemopt-room": "gemopt, row_slack",
    "gemopt-graphs": "gemopt, row_slack, CUDA graphs",
}
CONTESTANTS = tuple(NAMES)
DEFAULT = ("eager", "compile", "gemopt", "gemopt-room")
COUNTED = 32  # samples at once when FLOPs are counted: the count runs the padded model
WARMUP = 3
OUT_OF_MEMORY = "out of memory"
Progress = Callable[[str, int], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Config:
    """One line of the table."""

    model: str
    config: str
    data: str
    max_len: int
    batch: int
    fill: float
    precision: str
    layers: int | None = None  # None: as the config has it

    def title(self) -> str:
        depth = "" if self.layers is None else f" with {self.layers} layers and the histories of {self.data}"
        model = f"{self.model} {self.config}{depth}"
        return f"{model}, batch {self.batch}, max {self.max_len}, fill {self.fill:g}, {self.precision}"


def random_batch(schema: Schema, size: int, fill: float, generator: torch.Generator) -> Batch:
    """Random ids, and lengths uniform in ``[1, 2 fill L]``, from fill 0.5 on in ``[(2 fill - 1) L, L]``: mean ``fill L``."""

    def ids(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(1, high, shape, generator=generator)

    out: Batch = {"dense": torch.randn(size, schema.n_dense, generator=generator)}
    out["domain"] = torch.randint(0, schema.n_domains, (size,), generator=generator)
    for name, feature in schema.sparse.items():
        out[f"sparse_{name}"] = ids(feature.n_ids, *((size,) if feature.max_ids == 1 else (size, feature.max_ids)))
    for name, event in schema.events.items():
        low = max(1, round((2 * fill - 1) * event.max_len))
        high = event.max_len if fill >= 0.5 else max(1, round(2 * fill * event.max_len))
        length = torch.randint(low, high + 1, (size,), generator=generator)
        real = torch.arange(event.max_len) < length[:, None]
        for field, n_ids in event.fields.items():
            out[f"{name}_{field}"] = ids(n_ids, size, event.max_len) * real
        gaps = 3600 * torch.rand(size, event.max_len, generator=generator)
        out[f"{name}_age"] = gaps.flip(1).cumsum(1).flip(1) * real
        out[f"{name}_length"] = length
    for task in schema.tasks:
        out[f"label_{task}"] = torch.randint(0, 2, (size,), generator=generator).float()
    return out


def settings(contestant: str, batch: int) -> dict[str, Any]:
    """What a contestant adds to `tasks.compiled`."""
    found: dict[str, Any] = {"mode": "reduce-overhead"} if contestant.endswith("-graphs") else {}
    if contestant in ("gemopt-room", "gemopt-graphs"):
        found["recipe"] = {"row_slack": 3 / math.sqrt(batch)}
    return found


class Contestant:
    """The model under one compiler; calling it with i runs the training step on batch i."""

    def __init__(self, work: tasks.Workload, mode: str, batches: list[Batch], device: str, precision: str) -> None:
        self.work, self.batches, self.device, self.bf16 = work, batches, torch.device(device), precision == "bf16"
        self.held_before = torch.cuda.memory_reserved() if self.device.type == "cuda" else 0
        self.model = copy.deepcopy(work.module).to(device).train()
        self.compiled = tasks.compiled(
            self.model, mode.split("-")[0], dynamic=False, **settings(mode, len(batches[0]["domain"]))
        )
        self.optimizers = Optimizers(
            self.model, lr=1e-3, table_lr=0.05, weight_decay=0.01, clip=1.0, warmup=10, total=1000
        )  # fmt: skip
        self.losses: list[float] = []
        self.peak = 0  # bytes that tensors need
        self.reserved = 0  # bytes that the allocator holds beyond those it held before: pools of CUDA graphs count
        self.first = 0.0  # seconds of the first step, compilation included

    def __call__(self, i: int) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        batch = self.batches[i % len(self.batches)]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.work.logits(self.compiled, batch)
        loss = self.work.loss(logits, batch)
        loss.backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.losses.append(float(loss.detach()))  # a step ends when its loss is known
        if cuda:  # what this one holds between steps counts, what the others hold does not
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before + self.static_bytes())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved() - self.held_before)

    def static_bytes(self) -> int:
        parts = (self.optimizers.dense, self.optimizers.tables)
        states = [x for o in parts if o is not None for s in o.state.values() for x in s.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *(x for x in states if isinstance(x, torch.Tensor))]
        return sum(x.numel() * x.element_size() for x in tensors)


def make_work(config: Config) -> tuple[tasks.Workload, Schema]:
    """The model on the schema of the synthetic data; batches are made by `random_batch`."""
    sizes = SyntheticConfig.size(config.data, max_len=config.max_len, lengths="uniform", fill=config.fill)
    schema = Synthetic(sizes).schema
    torch.manual_seed(0)
    changes = {} if config.layers is None else {"n_layers": config.layers}
    work = tasks.Workload(
        module=zoo.build(config.model, schema, config.config, **changes),
        source=None,  # type: ignore[arg-type]
        labels={task: f"label_{task}" for task in schema.tasks},
        histories=tuple(schema.events),
        forward=lambda function, batch: function(batch),
    )
    return work, schema


def useful_flops(module: torch.nn.Module, batches: Sequence[Batch], bf16: bool) -> tuple[float, float, list[str]]:
    """Mean useful and padded FLOPs of a training step, and the notes of the count."""
    counter, useful, padded, notes = mfu.Counter(module), 0.0, 0.0, []
    device = next(module.parameters()).device.type
    for batch in batches:
        size = len(batch["domain"])
        for start in range(0, size, COUNTED):
            part = {k: v[start : start + COUNTED].contiguous() for k, v in batch.items()}
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                found = counter(part)
            useful, padded, notes = useful + found.training, padded + 3 * found.padded, found.notes
    return useful / len(batches), padded / len(batches), notes


def measure(
    config: Config,
    steps: int,
    contestants: Sequence[str],
    device: str,
    profile: bool,
    progress: Progress,
    apart: str | None = None,
    save: Save = lambda record: None,
) -> dict[str, Any]:
    """Time all contestants in turns, or one after the other; the record that is stored.

    Args:
        apart: why contestants are timed one after the other, each freed before the next; None for in turns. Contestants that
            do not fit together are timed apart too.
        save: called with the record as it stands whenever figures were added to it.
    """
    bf16, generator = config.precision == "bf16", torch.Generator().manual_seed(0)
    work, schema = make_work(config)
    drawn = [random_batch(schema, config.batch, config.fill, generator) for _ in range(2)]
    batches = [{k: v.to(device) for k, v in batch.items()} for batch in drawn]
    record: dict[str, Any] = {"config": asdict(config), "steps": steps, "failed": {}}
    record["padding"] = sum(map(work.padding_share, batches)) / len(batches)
    record["parameters"] = sum(p.numel() for p in work.module.parameters())
    losses: dict[str, list[float]] = {}
    groups = [[name] for name in contestants] if apart else [list(contestants)]
    while groups:
        session = Session(work, batches, device, config.precision, progress)
        rows = session.timed(groups.pop(0), steps, profile)
        session.end()
        if session.crowded:  # only a group of several can be: the same contestants again, alone
            apart, groups = session.crowded, [[name] for name in contestants]
            record["failed"] = {}
            continue
        record["failed"] |= session.failed
        losses |= session.losses
        if rows:
            for row in rows.values():
                row["samples_per_s"] = config.batch / row["median_s"]
            record["timing"] = record.get("timing", {}) | rows
            record |= {"timed": "apart" if apart else "in turns", "apart_because": apart}
            record["largest_loss_difference"] = loss_difference(losses)
            save(record)
            if "useful_flops" not in record:
                progress("counting", 0)
                record |= peaks_and_flops(work, batches, device, bf16)
            for row in rows.values():
                useful = record["useful_flops"]
                row["useful_tflops"] = useful / row["median_s"] / 1e12
                row["mfu"] = {k: useful / row["median_s"] / p for k, p in record["peak_flops"].items() if p}
        save(record)
    return record


def peaks_and_flops(work: tasks.Workload, batches: list[Batch], device: str, bf16: bool) -> dict[str, Any]:
    """What rates are computed from, counted while no contestant is in memory."""
    model = copy.deepcopy(work.module).to(device).train()
    useful, padded, notes = useful_flops(model, batches, bf16)
    del model
    release()
    dtype = torch.bfloat16 if bf16 else torch.float32
    peaks = {"datasheet": mfu.datasheet_peak(device, dtype), "matmul": mfu.matmul_ceiling(device, dtype)}
    return {"useful_flops": useful, "padded_flops": padded, "notes": notes, "peak_flops": peaks}


class Session:
    """Contestants that are in memory together: compiled, warmed up, timed in turns, freed.

    ``failed`` has those that do not fit even alone. ``crowded`` says, where memory ran out with several of them alive, in
    whose turn; nothing is timed then.
    """

    def __init__(self, work: Any, batches: list[Batch], device: str, precision: str, progress: Progress) -> None:
        self.work, self.batches, self.device, self.precision, self.progress = work, batches, device, precision, progress
        self.runs: dict[str, Contestant] = {}
        self.failed: dict[str, str] = {}
        self.losses: dict[str, list[float]] = {}
        self.crowded: str | None = None

    def timed(self, names: Sequence[str], steps: int, profile: bool) -> dict[str, dict[str, Any]]:
        """The figures of every contestant that ran, none if they are crowded. Holds none of their tensors."""
        for name in names:
            if not self.fits(name, partial(self.start, name)) and self.crowded:
                return {}
        rows: dict[str, dict[str, Any]] = {}

        def take_turns() -> None:
            rows.update(_harness.interleave(self.runs, steps, 0, self.device, self.progress))
            for name, run in self.runs.items():
                rows[name] |= self.describe(name, run, len(self.runs) == 1)
                if profile:
                    self.progress(f"{name}, profile", 0)
                    rows[name]["breakdown_s"] = _breakdown.of_step(partial(run, 0), self.device)

        names = list(self.runs)
        if names and not self.fits(names[-1], take_turns):
            return {}
        self.losses = {name: run.losses for name, run in self.runs.items()}
        return rows

    def fits(self, name: str, action: Callable[[], None]) -> bool:
        """Whether ``action`` had the memory it needs; if not, ``crowded`` or ``failed`` says so."""
        others = len(self.runs) - (name in self.runs)
        try:
            action()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if others:
                self.crowded = f"{name} ran out of memory beside others"
            else:
                self.failed[name] = OUT_OF_MEMORY
        else:
            return True
        self.end()  # not before the exception is gone, whose traceback holds tensors
        return False

    def start(self, name: str) -> None:
        """Compile and warm up."""
        run = Contestant(self.work, name, self.batches, self.device, self.precision)
        begin = time.perf_counter()
        for i in range(WARMUP):
            self.progress(f"{name}, warm-up", i)
            run(i)
            if i == 0:
                run.first = time.perf_counter() - begin
                if run.device.type == "cuda":
                    torch.cuda.empty_cache()  # compilation may need more than the steps do
        run.peak = run.reserved = 0
        self.runs[name] = run

    def describe(self, name: str, run: Contestant, alone: bool) -> dict[str, Any]:
        """Memory, seconds of the first step, and what gemopt reports (None for others)."""
        graphs = name.endswith("-graphs")  # whose memory is the pool's: only what is reserved counts it
        found: dict[str, Any] = {
            "peak_memory_gib": round(run.peak / 2**30, 3) if run.peak and not graphs else None,
            "peak_reserved_gib": round(run.reserved / 2**30, 3) if run.reserved and alone else None,
            "first_step_s": run.first,
        }
        if name.startswith("gemopt"):
            report = run.compiled.report  # type: ignore[attr-defined]
            found |= {"rewrites": len(report.rewrites), "rejections": len(report.rejections)}
            found |= {"packed": report.steps_packed, "padded": report.steps_padded}
        return found

    def end(self) -> None:
        """Free all contestants: models, optimizer states, compiled graphs and the pools of CUDA graphs."""
        self.runs = {}
        release()


def release() -> None:
    """Give back what nobody holds any more, and what torch's compilers hold: compiled graphs, CUDA graphs, their pools."""
    torch._dynamo.reset()  # CUDA-graph trees too
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that the device has no memory left. Compilers wrap the
    allocator's own exception, and the driver has another."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def loss_difference(losses: dict[str, list[float]]) -> float | None:
    """Largest difference between a gemopt's losses and any other's over the steps."""
    pairs = [(a, b) for name, a in losses.items() if name.startswith("gemopt") for b in losses.values()]
    return max((abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=False)), default=None)


def table(records: Sequence[dict[str, Any]]) -> Table:
    view = Table(
        "", "contestant", "ms", "samples/s", "peak GiB", "reserved GiB", "useful TFLOP/s", "of datasheet", "of matmul"
    )
    for record in records:
        title = Config(**record["config"]).title()
        for name in CONTESTANTS:
            if name in record["failed"]:
                view.add_row(title, NAMES[name], record["failed"][name])
            elif name in record.get("timing", {}):
                row = record["timing"][name]
                share = {k: f"{x:.1%}" for k, x in row["mfu"].items()}
                gib = ["-" if row[k] is None else f"{row[k]:.1f}" for k in ("peak_memory_gib", "peak_reserved_gib")]
                speed = (f"{row['median_s'] * 1e3:,.0f}", f"{row['samples_per_s']:,.0f}", *gib)
                view.add_row(
                    title, NAMES[name], *speed, f"{row['useful_tflops']:.3g}", share.get("datasheet", "-"), share["matmul"]
                )
    return view


def grid(options: argparse.Namespace) -> list[Config]:
    cuda = options.device.startswith("cuda")
    sizes = options.config or (["base", "large"] if cuda else ["small"])
    lengths = options.max_len or ([1024, 2048] if cuda else [256])
    precision = options.precision or ("bf16" if cuda else "fp32")
    batch = options.batch or (1024 if cuda else 32)
    return [
        Config(options.model, size, options.data or size, length, batch, options.fill, precision, options.layers)
        for size, length in itertools.product(sizes, lengths)
    ]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cpu")
    p.add_argument("--model", default="gem", choices=tuple(zoo.MODELS))
    p.add_argument("--config", nargs="+", help="default: small on a CPU, base and large on a GPU")
    p.add_argument("--data", help="size of the synthetic data whose features and events are used (default: the config's)")
    p.add_argument("--layers", type=int, help="fewer layers than the config has: compiles in minutes, at its widths")
    p.add_argument("--max-len", nargs="+", type=int, help="default: 256 on a CPU, 1024 and 2048 on a GPU")
    p.add_argument("--batch", type=int, help="samples a step (default: 32 on a CPU, 1024 on a GPU)")
    p.add_argument("--fit", action="store_true", help="halve the batch until torch.compile and gemopt fit")
    p.add_argument("--fill", type=float, default=0.5)
    p.add_argument("--precision", choices=("fp32", "bf16"))
    p.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=DEFAULT)
    p.add_argument("--steps", type=int, default=7, help="timed steps of each contestant")
    p.add_argument("--profile", action="store_true", help="record and plot where the time goes, by kernel family")
    p.add_argument("--out", type=Path, help="folder for the results instead of bench/results")
    p.add_argument("--apart", action="store_true", help="one contestant in memory at a time, timed one after the other")
    p.add_argument("--no-save", action="store_true", help="print only")
    return p


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        _harness.RESULTS = options.out
    console, records = Console(), []
    paths: list[Path] = []

    def save(record: dict[str, Any]) -> None:  # whenever there is more: an interrupted run keeps what it has
        if not options.no_save:
            paths[:] = [_harness.record_results("gem", [record], options.device)]

    for config in grid(options):
        while True:
            release()
            with console.status(config.title()) as status:

                def show(name: str, i: int, status: Any = status, title: str = config.title()) -> None:
                    status.update(f"{title}: {name}, step {i}")

                record = measure(
                    config, options.steps, options.contestants, options.device, options.profile, show,
                    "asked for" if options.apart else None, save,
                )  # fmt: skip
            records.append(record)
            brief = {name: row["median_s"] for name, row in record.get("timing", {}).items()}
            together = f" ({record['timed']})" if "timed" in record else ""
            console.print(f"{config.title()}: {json.dumps(brief)}{together} {record['failed']}", highlight=False)
            if options.fit and {"compile", "gemopt"} & set(record["failed"]) and config.batch > 1:
                config = replace(config, batch=config.batch // 2)
                continue
            break
    console.print(table(records))
    for path in paths:
        console.print(f"written: {path}", soft_wrap=True)
        if options.profile:
            console.print(f"written: {_breakdown.plot(records, NAMES, path.with_suffix('.png'))}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
