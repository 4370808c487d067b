"""Programs run by several processes. A module of its own: a spawned process cannot import ``__main__`` of ``python -m``."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

Job = tuple[str, int, str]


def run_all(jobs: list[Job], processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1:
        prepare()
        yield from map(run_one, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(processes, initializer=prepare, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(run_one, jobs)


def prepare() -> None:
    import torch
    import torch._dynamo.config

    torch.set_num_threads(1)
    # Every program has shapes of its own: filling the cache of fake tensors takes half of the time.
    torch._dynamo.config.fake_tensor_cache_enabled = False


def run_one(job: Job) -> dict[str, Any]:
    """One program's record."""
    from gemopt.testing.programs import run, sample, sample_near_miss

    kind, seed, inner = job
    program = sample(seed) if kind == "positive" else sample_near_miss(seed)
    outcome = run(program, inner)
    record = {
        "kind": kind, "seed": seed, "name": program.name, "verdict": outcome.verdict, "sites": program.sites,
        "rewritten": outcome.sites, "packed": outcome.packed, "compared": outcome.compared, "problems": outcome.problems,
        "reasons": outcome.reasons, "notes": outcome.notes, "axes": dict(program.axes), "seconds": round(outcome.seconds, 2),
    }  # fmt: skip
    if outcome.verdict not in ("rewritten", "refused") or (kind == "positive" and outcome.verdict != "rewritten"):
        record["source"] = program.source
    return record
