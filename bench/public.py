"""Public models, unmodified: attention sites, rewritten, refused with the reason, equal to eager or not, FLOPs saved.

    python bench/public.py                       every case, then the page
    python bench/public.py --only bert gpt2      some cases; the page keeps the others as they were measured before
    python bench/public.py --page                the page alone

Figures are merged into ``bench/results/public-<machine>.json``, case by case; the page, docs/public-models.md, is made of
that file. Needs the packages of `make setup-public`; the cases of packages that are missing are left out. Every step
(model and loss) is compiled with inner="aot_eager" and compared with fp64 eager on four batches: sequences of length one,
full ones, one long among short ones, and lengths drawn evenly from 1 to the padded size. FLOPs are those of the last batch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("TORCH_LOGS", "-all")  # graph breaks of the cases that have some
import _harness
import torch

sys.path.insert(0, str(_harness.ROOT))  # before the `tests` that FuxiCTR's wheel installs
from tests.public import CASES, Outcome, PublicCase, run

PAGE = _harness.ROOT / "docs" / "public-models.md"
HEAD = """# Public models

Models as their packages install them, at tiny sizes with dropout 0, compiled together with their loss and compared with
eager: outputs, loss and the gradients of all parameters, against fp64, by the rule of `gemopt.testing.assert_equivalent`;
errors near their bound are judged over 16 batches. An *attention* is two products around a score function; a *pooling* is
a sum weighted by the scores of an MLP (DIN).

"""
COLUMNS = ("model", "attentions", "rewritten", "left alone, and why", "equal", "FLOPs saved")


@dataclass(frozen=True)
class Line:
    """What one case showed, without the model. ``left`` has one entry for each reason."""

    config: str
    package: str
    done: int
    left: tuple[str, ...]
    silent: int
    wrong: str
    saved: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of case names")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--jobs", type=int, default=1, help="cases measured at the same time")
    options = parser.parse_args()
    chosen = [c for c in CASES.values() if not options.only or any(part in c.name for part in options.only)]
    names = [c.name for c in chosen if not options.page and not c.missing()]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), _quiet) as pool:
        for future in as_completed([pool.submit(measured, name) for name in names]):
            line = future.result()
            print(f"{line.config}: {line.done} rewritten, {line.wrong or 'equal'}", flush=True)
            _harness.record_results("public", [asdict(line)])
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(stored()))
    print(f"wrote {PAGE.relative_to(_harness.ROOT)}")


def stored() -> dict[str, dict[str, Any]]:
    """Case -> its record on this machine, in the order of the cases."""
    path = _harness.RESULTS / f"public-{_harness.machine_slug(_harness.machine())}.json"
    records = json.loads(path.read_text())["records"] if path.exists() else []
    found = {r["config"]: r for r in records}
    return {name: found[name] for name in CASES if name in found}


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def measured(name: str) -> Line:
    torch._dynamo.reset()
    outcome = run(CASES[name])
    case, reasons = outcome.case, [without_roots(r.reason) for r in outcome.refused]
    left = tuple(f"{reasons.count(text)}: {text}" for text in dict.fromkeys(reasons))
    done = min(outcome.done, case.sites + case.pools)
    package = f"{case.package} {importlib.metadata.version(case.package.replace('_', '-'))}"
    return Line(name, package, done, left, outcome.silent, differences(outcome), outcome.saved)


def without_roots(text: str) -> str:
    """``text`` with the paths in it as Python imports them: what is committed names no folder of one machine."""
    for root in sorted({p for p in map(os.path.abspath, sys.path) if p != os.sep}, key=len, reverse=True):
        text = text.replace(root.rstrip(os.sep) + os.sep, "")
    return text


def differences(outcome: Outcome) -> str:
    if not outcome.wrong or outcome.result is None:
        return outcome.wrong
    found = [f"{k.name}, {c.name}: {c.problem}" for k in outcome.result.cases for c in k.failures]
    return "; ".join(found + [f"{k.name}: {k.problem}" for k in outcome.result.cases if k.problem])


def page(records: dict[str, dict[str, Any]]) -> str:
    text = [HEAD + summary(records), ""]
    for package in dict.fromkeys(r["package"] for r in records.values()):
        mine = {n: r for n, r in records.items() if r["package"] == package}
        text += [f"## {package}", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        text += [row(cells(CASES[n], r)) for n, r in mine.items()]
        notes = [f"- {CASES[n].model}: {CASES[n].note}." for n in mine if CASES[n].note]
        text += ["", *notes, *([""] if notes else [])]
    absent = sorted({CASES[n].package for n in CASES if n not in records})
    text += [f"Not measured yet, in part or as a whole: {', '.join(absent)}.", ""] if absent else []
    versions = {json.dumps(r["versions"], sort_keys=True) for r in records.values()}
    commits = sorted({str(r["commit"])[:9] for r in records.values()})
    facts = "; ".join(", ".join(f"{k} {v}" for k, v in json.loads(x).items()) for x in sorted(versions))
    text += [f"Written by `python bench/public.py` ({facts}; commit {', '.join(commits)})."]
    return "\n".join(text).rstrip() + "\n"


def summary(records: dict[str, dict[str, Any]]) -> str:
    dead = [n for n in records if CASES[n].reads == "some"]
    sites = sum(CASES[n].sites + CASES[n].pools for n in dead)
    done, silent = sum(records[n]["done"] for n in dead), sum(r["silent"] for r in records.values())
    wrong = [n for n, r in records.items() if r["wrong"]]
    return (
        f"{len(records)} cases. Of {sites} attentions and poolings whose padding nobody reads, {done} are rewritten "
        f"({done / max(1, sites):.0%}). {silent} attentions are in no graph that Dynamo hands over. "
        f"Different from eager: {', '.join(wrong) or 'none'}."
    )


def cells(case: PublicCase, record: dict[str, Any]) -> list[str]:
    kinds = [f"{case.sites}"] if case.sites else []
    kinds += [f"{case.pools} pooling"] if case.pools else []
    left = [*record["left"], *([f"{record['silent']}: not in any graph"] if record["silent"] else [])]
    saved = f"{record['saved']:.0%}" if record["saved"] >= 0.005 else "-"
    equal = "NO" if record["wrong"] else "yes"
    return [case.model, ", ".join(kinds), str(record["done"]), "; ".join(left) or "-", equal, saved]


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


if __name__ == "__main__":
    main()
