"""Choose the configurations of the Gluon kernels' selection table (gemopt/kernels/gluon/table.json) on this GPU.

    python bench/tune_kernels.py             # measure, print
    python bench/tune_kernels.py --write     # and write the winners into the table

A row is measured on the cell of bench/kernels.py that it names, candidates in turns, as there. A candidate must give the
same result as the current configuration to within rounding; it wins if it is at least 2 % faster. Afterwards run
tests/kernels/test_gluon_aot.py, which holds the limits on spills.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.kernels import Data, draw, graphed, grid, timed
from gemopt.kernels.gluon import attention, table

CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "forward": [
        {"parts": 2, "keys": 64, "stages": 4},
        {"parts": 2, "keys": 64, "stages": 4, "q_registers": True},
        {"parts": 2, "keys": 128, "stages": 2},
        {"parts": 2, "keys": 128, "stages": 2, "q_registers": True},
        {"parts": 2, "keys": 128, "stages": 2, "early_wait": False},
        {"parts": 3, "keys": 64, "stages": 3, "registers": 160},
        {"parts": 2, "keys": 64, "stages": 4, "ordered": True},
        {"parts": 2, "keys": 64, "stages": 4, "q_registers": True, "group": 2},
        {"parts": 3, "keys": 64, "stages": 4, "registers": 160, "group": 4},
    ],
    "query_side": [{"rows": 64, "stages": 2, "x_stages": x, "early_wait": early} for x in (1, 2) for early in (True, False)],
    "key_side": [{"rows": 64, "stages": s, "early_wait": early} for s in (2, 3) for early in (True, False)],
    "fused": [{"rows": 64, "stages": 2, "early_wait": early} for early in (True, False)],
    "backward": [{"form": "two"}, {"form": "fused"}, *({"form": "owner", "otherwise": x} for x in ("two", "fused"))],
}
FORM_OF = {"query_side": "two", "key_side": "two", "fused": "fused"}


def with_config(row: dict[str, Any], config: dict[str, Any], run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` under a table whose first rows are this one with another configuration, and the form it belongs to."""
    first = [{"kernel": row["kernel"], "config": config}]
    if row["kernel"] in FORM_OF:
        first.append({"kernel": "backward", "config": {"form": FORM_OF[row["kernel"]]}})
    rows = (*first, *table.rows())

    def changed() -> Any:
        original, table.rows = table.rows, lambda: rows
        try:
            return run()
        finally:
            table.rows = original

    return changed


def task(row: dict[str, Any], data: Data) -> Callable[[], tuple[Tensor, ...]]:
    if row["kernel"] == "forward":
        return lambda: attention.forward(data.q, data.k, data.v, data.spec)[:1]
    out, lse = attention.forward(data.q, data.k, data.v, data.spec)
    return lambda: attention.backward(data.dout, data.q, data.k, data.v, out, lse, data.spec)


def distance(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    return max(((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(a, b, strict=True))


def tune(row: dict[str, Any], milliseconds: float) -> dict[str, Any]:
    """The winning configuration of a row."""
    data = draw(grid()[row["measured_on"]])
    run = task(row, data)
    expected = with_config(row, row["config"], run)()
    ready = {}
    for config in [row["config"], *(c for c in CANDIDATES[row["kernel"]] if c != row["config"])]:
        candidate = with_config(row, config, run)
        try:
            found = candidate()
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory, for example: not a candidate here
            print(f"    {config}: {type(error).__name__}")
            continue
        if not distance(found, expected) < 5e-3:
            raise RuntimeError(f"{row['kernel']} {config} differs from the current configuration on {row['measured_on']}")
        ready[json.dumps(config)] = graphed(candidate)[0]
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(3):
        for name, replay in ready.items():
            times[name].append(timed(replay, milliseconds))
    middle = {name: statistics.median(t) for name, t in times.items()}
    for name, ms in sorted(middle.items(), key=lambda item: item[1]):
        print(f"    {ms:9.3f} ms  {name}")
    best = min(middle, key=middle.__getitem__)
    current = json.dumps(row["config"])
    return json.loads(best) if middle[best] < 0.98 * middle[current] else row["config"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the winners into the table")
    parser.add_argument("--milliseconds", type=float, default=100.0)
    options = parser.parse_args()
    rows = [dict(row) for row in table.rows()]
    for row in rows:
        if "measured_on" in row:
            print(row["kernel"], {k: v for k, v in row.items() if k not in ("kernel", "config")})
            row["config"] = tune(row, options.milliseconds)
            torch.cuda.empty_cache()
    if options.write:
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        table.PATH.write_text('{\n "rows": [\n' + lines + "\n ]\n}\n")


if __name__ == "__main__":
    main()
