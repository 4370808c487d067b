"""Run one public case: compare the compiled step with eager, and read the report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

import gemopt
from gemopt.report import GraphReport, Rejection, Report, Rewrite
from gemopt.testing import EquivalenceError, EquivalenceResult, assert_equivalent

from .pooled import beyond_bound, is_near
from .registry import BATCH, MAX_LEN, PublicCase

#: Rules of the report that speak of one attention.
REWRITES = ("unpad attention",)
REJECTIONS = ("attention", "unpad")


@dataclass
class Outcome:
    """What one case showed.

    Attributes:
        report: of the compiled step; its costs are those of the last batch.
        result: the comparison with eager.
        wrong: what differs from eager, empty if nothing does.
        rewritten, refused: attention sites by what the report says of them, each once however often the step recompiled.
        pooled: a region of rows is packed: for models that pool by the scores of an MLP.
        saved: share of the FLOPs of the last step that is gone.
    """

    case: PublicCase
    report: Report
    result: EquivalenceResult | None = None
    wrong: str = ""
    rewritten: list[Rewrite] = field(default_factory=list)
    refused: list[Rejection] = field(default_factory=list)
    other: list[Rejection] = field(default_factory=list)
    pooled: bool = False
    saved: float = 0.0

    @property
    def ran(self) -> dict[str, str]:
        """Case of lengths -> ``packed`` or ``padded: why``."""
        return {c.name: c.path for c in self.result.cases} if self.result else {}

    @property
    def silent(self) -> int:
        """Sites that the report does not mention."""
        return max(0, self.case.sites - len(self.rewritten) - len(self.refused))

    @property
    def done(self) -> int:
        """Attentions and poolings whose dead rows are not computed."""
        return len(self.rewritten) + (self.case.pools if self.pooled else 0)


def run(case: PublicCase, inner: str = "aot_eager") -> Outcome:
    """Compile the step of ``case``, compare over its lengths, and read the compiled step's report.

    A difference is returned as ``wrong``, not raised; an internal error of a pass is one too (the recipe is strict). Errors
    near their bound are judged over several batches.
    """
    built = case.make()
    recipe = gemopt.Recipe(min_saving=0.0, strict=True)
    compiled = gemopt.compile(built.step, recipe=recipe, inner=inner)
    outcome = Outcome(case, compiled.report)
    with grad_mode(case.grad):
        try:
            outcome.result = assert_equivalent(
                built.step, built.inputs, compiled=compiled, cases=case.lengths, batch_size=BATCH, max_len=MAX_LEN,
                train=built.train,
            )  # fmt: skip
        except EquivalenceError as error:
            outcome.result, outcome.wrong = error.result, str(error)
            if outcome.result.compared and is_near(outcome.result.cases):
                over = beyond_bound(built, compiled, case.lengths)
                outcome.wrong = f"{outcome.wrong}\nover several batches: {over}" if over else ""
    read(outcome)
    return outcome


def read(outcome: Outcome) -> None:
    """Sites, and savings at the last batch."""
    graphs = _first_of_each(outcome.report)
    outcome.rewritten = [r for g in graphs for r in g.rewrites if r.rule in REWRITES]
    outcome.refused = [r for g in graphs for r in g.rejections if r.rule in REJECTIONS]
    outcome.other = [r for g in graphs for r in g.rejections if r.rule not in REJECTIONS]
    outcome.pooled = any(r.rule not in REWRITES for g in graphs for r in g.rewrites)
    costs = [c[0] for g in graphs if (c := g.evaluate()) is not None]
    before, after = sum(c.before for c in costs), sum(c.after for c in costs)
    outcome.saved = 1 - after / before if before else 0.0


def _first_of_each(report: Report) -> list[GraphReport]:
    """The graphs without recompilations: those that speak of sites (by node and line) that no earlier one spoke of."""
    kept: list[GraphReport] = []
    seen: set[tuple[str, str]] = set()
    for graph in report:
        records: list[Rewrite | Rejection] = [*graph.rewrites, *graph.rejections]
        sites = {(r.site, r.source) for r in records if r.source}
        if not sites or not sites <= seen:
            kept.append(graph)
        seen |= sites
    return kept


@contextlib.contextmanager
def grad_mode(on: bool) -> Iterator[None]:
    with torch.set_grad_enabled(on):
        yield
