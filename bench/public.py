"""Public models, unmodified: attention sites, rewritten, refused with the reason, equal to eager or not, FLOPs saved.

    python bench/public.py                       every case; writes docs/public-models.md
    python bench/public.py --only bert --print   some, to the terminal

Needs the packages of `make setup-public`; the cases of packages that are missing are left out of the table. Every step
(model and loss) is compiled with inner="aot_eager" and compared with fp64 eager on four batches: sequences of length one,
full ones, one long among short ones, and lengths drawn evenly from 1 to the padded size. FLOPs are those of the last batch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_LOGS", "-all")  # graph breaks of the cases that have some
import _harness
import torch

sys.path.insert(0, str(_harness.ROOT))  # before the `tests` that FuxiCTR's wheel installs
from tests.public import CASES, run

PAGE = _harness.ROOT / "docs" / "public-models.md"
PACKAGES = ("torch", "transformers", "recbole", "torch-rechub", "fuxictr", "deepctr-torch")
HEAD = """# Public models

Models as their packages install them, at tiny sizes with dropout 0, compiled together with their loss and compared with
eager: outputs, loss and the gradients of all parameters, against fp64, by the rule of `gemopt.testing.assert_equivalent`.
An *attention* is two products around a score function; a *pooling* is a sum weighted by the scores of an MLP (DIN).

"""
COLUMNS = ("model", "attentions", "rewritten", "left alone, and why", "equal", "FLOPs saved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of case names")
    parser.add_argument("--print", action="store_true", help="print the page instead of writing it")
    parser.add_argument("--jobs", type=int, default=1, help="cases measured at the same time")
    options = parser.parse_args()
    chosen = [c for c in CASES.values() if not options.only or any(part in c.name for part in options.only)]
    missing = sorted({c.missing() for c in chosen if c.missing()})
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), _quiet) as pool:
        lines = list(pool.map(measured, [c.name for c in chosen if not c.missing()]))
    text = page(lines, missing)
    if options.print:
        print(text)
    else:
        PAGE.parent.mkdir(exist_ok=True)
        Path(PAGE).write_text(text)
        print(f"wrote {PAGE.relative_to(_harness.ROOT)}")


@dataclass(frozen=True)
class Line:
    """What one case showed, without the model. ``left`` has one entry for each reason."""

    case: str
    done: int
    left: tuple[str, ...]
    silent: int
    wrong: str
    saved: float


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def measured(name: str) -> Line:
    torch._dynamo.reset()
    outcome = run(CASES[name])
    reasons = [r.reason for r in outcome.refused]
    left = tuple(f"{reasons.count(text)}: {text}" for text in dict.fromkeys(reasons))
    case = outcome.case
    line = Line(name, min(outcome.done, case.sites + case.pools), left, outcome.silent, outcome.wrong, outcome.saved)
    print(f"{name}: {outcome.done} rewritten, {outcome.wrong or 'equal'}", file=sys.stderr, flush=True)
    return line


def page(lines: Sequence[Line], missing: Sequence[str]) -> str:
    text = [HEAD + summary(lines), ""]
    for package in dict.fromkeys(CASES[x.case].package for x in lines):
        mine = [x for x in lines if CASES[x.case].package == package]
        text += [f"## {package} {version(package)}", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        text += [row(cells(x)) for x in mine]
        notes = [f"- {CASES[x.case].model}: {CASES[x.case].note}" for x in mine if CASES[x.case].note]
        text += ["", *notes, *([""] if notes else [])]
    text += [f"Not measured: {reason}." for reason in missing]
    facts = ", ".join(f"{k} {v}" for k, v in _harness.versions().items())
    text += ["", f"Written by `{_harness.command()}` ({facts}, commit {str(_harness.commit())[:9]})."]
    return "\n".join(text).rstrip() + "\n"


def summary(lines: Sequence[Line]) -> str:
    dead = [x for x in lines if CASES[x.case].reads == "some"]
    sites = sum(CASES[x.case].sites + CASES[x.case].pools for x in dead)
    done, silent = sum(x.done for x in dead), sum(x.silent for x in lines)
    wrong = [x.case for x in lines if x.wrong]
    return (
        f"{len(lines)} cases. Of {sites} attentions and poolings whose padding nobody reads, {done} are rewritten "
        f"({done / max(1, sites):.0%}). {silent} attentions are in no graph that Dynamo hands over. "
        f"Different from eager: {', '.join(wrong) or 'none'}."
    )


def cells(line: Line) -> list[str]:
    case = CASES[line.case]
    kinds = [f"{case.sites}"] if case.sites else []
    kinds += [f"{case.pools} pooling"] if case.pools else []
    left = [*line.left, *([f"{line.silent}: not in any graph"] if line.silent else [])]
    saved = f"{line.saved:.0%}" if line.saved >= 0.005 else "-"
    return [case.model, ", ".join(kinds), str(line.done), "; ".join(left) or "-", "NO" if line.wrong else "yes", saved]


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def version(package: str) -> str:
    name = package.replace("_", "-")
    assert name in PACKAGES, f"unknown package {package!r}"
    return importlib.metadata.version(name)


if __name__ == "__main__":
    main()
