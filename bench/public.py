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
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TORCH_LOGS", "-all")  # graph breaks of the cases that have some
import _harness
import torch

sys.path.insert(0, str(_harness.ROOT))  # before the `tests` that FuxiCTR's wheel installs
from tests.public import CASES, Outcome, PublicCase, run

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
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    chosen = [c for c in CASES.values() if not options.only or any(part in c.name for part in options.only)]
    missing = sorted({c.missing() for c in chosen if c.missing()})
    outcomes = [measured(c) for c in chosen if not c.missing()]
    text = page(outcomes, missing)
    if options.print:
        print(text)
    else:
        PAGE.parent.mkdir(exist_ok=True)
        Path(PAGE).write_text(text)
        print(f"wrote {PAGE.relative_to(_harness.ROOT)}")


def measured(case: PublicCase) -> Outcome:
    torch._dynamo.reset()
    outcome = run(case)
    print(f"{case.name}: {outcome.done} rewritten, {'WRONG' if outcome.wrong else 'equal'}", file=sys.stderr, flush=True)
    return outcome


def page(outcomes: Sequence[Outcome], missing: Sequence[str]) -> str:
    lines = [HEAD + summary(outcomes), ""]
    for package in dict.fromkeys(o.case.package for o in outcomes):
        mine = [o for o in outcomes if o.case.package == package]
        lines += [f"## {package} {version(package)}", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        lines += [row(cells(o)) for o in mine]
        notes = [f"- {o.case.model}: {o.case.note}" for o in mine if o.case.note]
        lines += ["", *notes, *([""] if notes else [])]
    lines += [f"Not measured: {text}." for text in missing]
    origin = f"{_harness.versions()}, commit {str(_harness.commit())[:9]}"
    lines += ["", f"Written by `{_harness.command()}` ({origin.replace('{', '').replace('}', '')})."]
    return "\n".join(lines).rstrip() + "\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    live = [o for o in outcomes if o.case.reads == "some"]
    sites = sum(o.case.sites + o.case.pools for o in live)
    done = sum(o.done for o in live)
    silent = sum(o.silent for o in outcomes)
    wrong = [o.case.name for o in outcomes if o.wrong]
    return (
        f"{len(outcomes)} cases. Of {sites} attentions and poolings whose padding nobody reads, {done} are rewritten "
        f"({done / max(1, sites):.0%}). {silent} attentions are neither rewritten nor refused. "
        f"Different from eager: {', '.join(wrong) or 'none'}."
    )


def cells(outcome: Outcome) -> list[str]:
    case = outcome.case
    kinds = [f"{case.sites}"] if case.sites else []
    kinds += [f"{case.pools} pooling"] if case.pools else []
    reasons = dict.fromkeys(r.reason for r in outcome.refused)
    left = [f"{sum(r.reason == text for r in outcome.refused)}: {text}" for text in reasons]
    left += [f"{outcome.silent}: not in any graph"] if outcome.silent else []
    saved = f"{outcome.saved:.0%}" if outcome.saved >= 0.005 else "-"
    done = min(outcome.done, case.sites + case.pools)
    return [case.model, ", ".join(kinds), str(done), "; ".join(left) or "-", "NO" if outcome.wrong else "yes", saved]


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def version(package: str) -> str:
    name = package.replace("_", "-")
    assert name in PACKAGES, f"unknown package {package!r}"
    return importlib.metadata.version(name)


if __name__ == "__main__":
    main()
