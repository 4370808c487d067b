"""Many programs in one run, and a table: ``python -m gemopt.testing.programs --positive 2000 --near 2000 --json out.json``.

Exit status 1 if a program came out wrong or only the compiled one raised.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemopt.testing.programs.batch import run_all


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    jobs = [("positive", options.seed + i, options.inner) for i in range(options.positive)]
    jobs += [("near miss", options.seed + i, options.inner) for i in range(options.near)]
    start = time.time()
    records = []
    with open(options.log, "w") if options.log else open(os.devnull, "w") as log:
        for record in _progress(run_all(jobs, options.jobs), len(jobs)):
            records.append(record)
            log.write(json.dumps(record) + "\n")
            log.flush()
            if record["verdict"] in ("wrong", "error") and options.verbose:
                print(f"\n{record['kind']} {record['seed']}: {record['verdict']}: {record['problems'][:1]}", flush=True)
    result = {**summary(records), "seconds": round(time.time() - start, 1), "inner": options.inner, **_where()}
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps({**result, "failures": _failures(records)}, indent=1) + "\n")
    return int(any(r["verdict"] in ("wrong", "error") for r in records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gemopt.testing.programs", description=__doc__)
    parser.add_argument("--positive", type=int, default=2000, help="positive programs (default 2000)")
    parser.add_argument("--near", type=int, default=2000, help="near misses (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    inners = ("interpreter", "spare", "eager", "aot_eager", "inductor")
    parser.add_argument("--inner", default="interpreter", choices=inners)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes")
    parser.add_argument("--json", help="write the summary and every failing program there")
    parser.add_argument("--log", help="write one JSON line a program there, as it is done")
    parser.add_argument("--verbose", action="store_true", help="name failures as they come")
    return parser


_ALL_LIVE = "unpad: every row of"


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by kind and verdict, the share of positives rewritten, refused positives by reason.

    The second share leaves out the programs that were refused because every row of an attention is live. That is what the
    rewriter says of them, and it may be short of what a reader sees: the first share counts them.
    """
    result: dict[str, Any] = {}
    for kind in ("positive", "near miss"):
        mine = [r for r in records if r["kind"] == kind]
        verdicts = Counter(r["verdict"] for r in mine)
        result[kind] = {"programs": len(mine), "distinct": len({r["name"] for r in mine}), **verdicts}
    positives = [r for r in records if r["kind"] == "positive" and r["verdict"] in ("rewritten", "refused")]
    done = sum(r["verdict"] == "rewritten" for r in positives)
    live = sum(r["verdict"] == "refused" and any(_ALL_LIVE in x for x in r["reasons"]) for r in positives)
    result["rewritten share"] = round(done / len(positives), 4) if positives else None
    result["all rows live"] = live
    result["rewritten share of those with fewer live rows"] = round(done / (len(positives) - live), 4) if done else None
    result["settled as rounding"] = [f"{r['kind']} {r['seed']}: {r['notes'][0]}" for r in records if r["notes"]]
    reasons = Counter(reason_of(r) for r in positives if r["verdict"] == "refused")
    result["refused positives"] = dict(reasons.most_common())
    return result


def reason_of(record: dict[str, Any]) -> str:
    """The first rejection, names of nodes and numbers left out."""
    import re

    reasons = record["reasons"] or ["no candidate seen"]
    return re.sub(r"\d+", "N", reasons[0])[:160]


def table(result: dict[str, Any]) -> str:
    verdicts = ("rewritten", "refused", "wrong", "error", "invalid")
    lines = ["", f"{'':12}{'programs':>10}{'distinct':>10}" + "".join(f"{v:>11}" for v in verdicts)]
    for kind in ("positive", "near miss"):
        row = result[kind]
        lines.append(
            f"{kind:12}{row['programs']:>10}{row['distinct']:>10}" + "".join(f"{row.get(v, 0):>11}" for v in verdicts)
        )
    if result["rewritten share"] is not None:
        lines.append(f"positives rewritten: {100 * result['rewritten share']:.1f} %")
    fewer = result["rewritten share of those with fewer live rows"]
    if fewer is not None and result["all rows live"]:
        lines.append(
            f"of the positives whose live rows are fewer than all: {100 * fewer:.1f} %"
            f" ({result['all rows live']} refused because gemopt sees every row live)"
        )
    lines += [f"  {count:5d}  {reason}" for reason, count in result["refused positives"].items()]
    lines += [f"settled as rounding: {note}" for note in result["settled as rounding"]]
    return "\n".join([*lines, f"{result['seconds']} s, inner={result['inner']}, torch {result['torch']}"])


def _failures(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if r["verdict"] not in ("rewritten", "refused")]


def _where() -> dict[str, str]:
    import torch

    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}


def _progress(records: Iterable[dict[str, Any]], total: int) -> Iterable[dict[str, Any]]:
    try:
        from rich.progress import track
    except ImportError:
        yield from records
        return
    yield from track(records, "programs", total, disable=not sys.stdout.isatty())


if __name__ == "__main__":
    sys.exit(main())
