"""What every bench shares: interleaved timing, facts about the machine, one JSON file of records.

Contestants take turns within one process (A B C A B C ...), so that a change of clock speed or load meets all
of them alike. Medians are quoted; the quartiles and every single time are kept.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
Step = Callable[[int], None]  # runs the i-th step


def interleave(
    contestants: Mapping[str, Step],
    steps: int,
    warmup: int | Mapping[str, int] = 2,
    device: str = "cpu",
    progress: Callable[[str, int], None] = lambda name, step: None,
) -> dict[str, dict[str, Any]]:
    """Time ``steps`` steps of each contestant in turns.

    ``warmup`` untimed steps run first (0, 1, ... in order; a mapping gives them per contestant). Step numbers
    of the timed part start at 0 again. Returns for each name ``median_s``, ``quartiles_s``, ``mean_s``,
    ``first_s`` (the first untimed step, compilation included; None without one) and ``times_s``.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    first: dict[str, float | None] = {}
    for name, step in contestants.items():
        count = warmup if isinstance(warmup, int) else warmup[name]
        spent = [_timed(step, i, device, progress, f"{name}, warm-up") for i in range(count)]
        first[name] = spent[0] if spent else None
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(steps):
        # who goes first changes every round: nobody always follows the same neighbour's cache contents
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(_timed(contestants[name], i, device, progress, name))
    return {name: {**summary(values), "first_s": first[name]} for name, values in times.items()}


def _timed(step: Step, i: int, device: str, progress: Callable[[str, int], None], label: str) -> float:
    progress(label, i)
    synchronize(device)
    start = time.perf_counter()
    step(i)
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def summary(times: list[float]) -> dict[str, Any]:
    """Median, quartiles and mean of times in seconds."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {
        "median_s": statistics.median(times),
        "quartiles_s": [low, high],
        "mean_s": statistics.fmean(times),
        "times_s": [round(t, 6) for t in times],
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores this process may use, accelerator, threads."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "load_1min_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def versions() -> dict[str, str | None]:
    """Versions of what decides the figures."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {"torch": torch.__version__, "triton": triton_version, "python": platform.python_version()}


def commit() -> str | None:
    """The commit of this checkout, with ``+`` if tracked sources differ from it; None outside git."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", "gemopt", "passes", "model_zoo", "bench/*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def command() -> str:
    """The command line that was run, as one would type it at the top of the checkout."""
    script = Path(sys.argv[0])
    if script.is_absolute() and script.is_relative_to(ROOT):
        script = script.relative_to(ROOT)
    return " ".join(["python", str(script), *sys.argv[1:]])


def machine_slug(facts: Mapping[str, Any]) -> str:
    """A name for result files: processor and cores, or the accelerator."""
    name = str(facts.get("gpu") or f"{facts['cpu']}-{facts['cores']}c")
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def record_results(bench: str, records: list[dict[str, Any]], device: str = "cpu") -> Path:
    """Write records to ``bench/results/<bench>-<machine>.json``; each has a ``config``.

    Older records of other configs stay, those of the same config are replaced. Every record carries the
    machine, the versions, the commit and the command, since a file may collect several runs.
    """
    facts = machine(device)
    path = RESULTS / f"{bench}-{machine_slug(facts)}.json"
    origin = {"machine": facts, "versions": versions(), "commit": commit(), "command": command()}
    old = json.loads(path.read_text())["records"] if path.exists() else []
    fresh = [record["config"] for record in records]
    kept = [record for record in old if record["config"] not in fresh]
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = kept + [{**record, **origin} for record in records]
    path.write_text(json.dumps({"bench": bench, "records": everything}, indent=1) + "\n")
    return path


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
