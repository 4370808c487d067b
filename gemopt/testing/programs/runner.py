"""Run a program through gemopt and compare outputs and gradients with fp64 eager on several batches."""

from __future__ import annotations

import time
import traceback
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gemopt.testing.checker import Checker
from gemopt.testing.compare import Tolerance
from gemopt.testing.inputs import Batch
from gemopt.testing.lengths import draw_lengths
from gemopt.testing.programs.interpret import Interpreted
from gemopt.testing.programs.program import Program
from gemopt.testing.result import CaseResult
from gemopt.testing.runs import State

_NEAR = 4.0
CASES = ("given", "zeros", "ones", "full", "other", "holes")


class ForcedPlan:
    """A plan that runs packed whenever its assumptions hold, whether that pays or not."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def admit(self, stats: Any, tensors: Any) -> Any:
        return self._plan.fill_if_sound(stats, tensors)


def forced_pipeline(captured: Any, recipe: Any, report: Any) -> Any:
    """The default pipeline, its plan forced."""
    from gemopt.passes import default_pipeline

    plan = default_pipeline(captured, recipe, report)
    return None if plan is None else ForcedPlan(plan)


def unchecked_pipeline(captured: Any, recipe: Any, report: Any) -> Any:
    """As `forced_pipeline`, without the pass's own run of the packed graph on fakes: the interpreter runs it on tensors,
    and the fakes would take a third of the time."""
    from gemopt.passes import unpad

    with unittest.mock.patch.object(unpad, "check_outputs", lambda *args: None):
        return forced_pipeline(captured, recipe, report)


@dataclass
class Outcome:
    """What became of one program.

    Attributes:
        verdict: ``"wrong"``, ``"error"`` (only the compiled one raises), ``"invalid"`` (nothing to compare with),
            ``"rewritten"`` (every attention, and it ran packed) or ``"refused"``.
        problems: what differs, one line a tensor.
        reasons: the rejections of the report, or why the packed graph did not run.
        compared: values compared. packed: batches that ran packed. seconds: time of the whole comparison.
    """

    program: Program
    verdict: str
    problems: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    sites: int = 0
    compared: int = 0
    packed: int = 0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.verdict in ("rewritten", "refused")

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.sites} of {self.program.sites} attentions rewritten, {self.packed} batches packed"]
        return "\n".join([*lines, *self.problems, *self.reasons, str(self.program)])


def run(
    program: Program, inner: str = "interpreter", cases: tuple[str, ...] = CASES, seed: int = 0, confirm: bool = True
) -> Outcome:
    """Compile, run and compare one program.

    Args:
        program: what to run.
        inner: ``"interpreter"`` traces and interprets without Dynamo; ``"eager"``, ``"aot_eager"`` and ``"inductor"`` are
            those of ``gemopt.compile``.
        cases: names of `CASES`; those that the program's mask rules out are left out.
        seed: of parameters, batches and cotangents.
        confirm: where errors are only a little above their bound, which of thousands of tensors some are by chance (a
            gradient with one element that is not zero, in bf16), decide by two other seeds.
    """
    import gemopt

    unknown = [c for c in cases if c not in CASES]
    if unknown:
        raise ValueError(f"cases: got {unknown}; allowed: {', '.join(CASES)}")
    start = time.perf_counter()
    model, make = program.build(seed)
    recipe = gemopt.Recipe(min_saving=0.0, strict=True, pipeline=forced_pipeline)
    compiled: Any = (
        Interpreted(model, unchecked_pipeline, recipe)
        if inner == "interpreter"
        else gemopt.compile(model, recipe=recipe, inner=inner)
    )
    checker = Checker(model, compiled, State([model]), None, seed, program.autocast, Tolerance())
    results: list[CaseResult] = []
    try:
        for name, batch in _batches(program, make, cases, seed):
            results.append(checker.check(name, batch))
    except Exception:
        last = traceback.format_exc().strip().splitlines()[-1]
        return Outcome(program, "invalid", [last], seconds=time.perf_counter() - start)
    finally:
        if inner != "interpreter":
            torch._dynamo.reset()
    outcome = judge(program, results, compiled.report)
    if outcome.verdict == "wrong" and confirm and _near_bound(results):
        again = [run(program, inner, cases, seed + i, confirm=False) for i in (1, 2)]
        outcome = next((o for o in again if o.verdict == "wrong"), again[0])
    outcome.seconds = time.perf_counter() - start
    return outcome


def _near_bound(results: list[CaseResult]) -> bool:
    """Whether all that differs is an RMS error a little above its bound, as some must be among so many tensors."""
    failures = [c for r in results for c in r.failures]
    return bool(failures) and all(c.rms <= _NEAR * c.bound for c in failures) and not any(r.problem for r in results)


def _batches(program: Program, make: Any, cases: tuple[str, ...], seed: int) -> Iterator[tuple[str, Batch]]:
    for number, case in enumerate(cases):
        if (case == "zeros" and program.shortest > 0) or (case == "holes" and not program.holes):
            continue
        if case == "other" and program.fixed:
            continue
        size, length = (program.batch + 2, program.max_len + 4) if case == "other" else (program.batch, program.max_len)
        generator = torch.Generator().manual_seed(1000 * seed + number)
        lengths = draw_lengths("given" if case in ("other", "holes") else case, size, length, generator)
        lengths = lengths.clamp(program.shortest, length - program.margin)
        yield case, Batch((), make(lengths, length, generator, holes=case == "holes"))


def judge(program: Program, results: list[CaseResult], report: Any) -> Outcome:
    """The verdict on the comparisons of one program."""
    problems = [f"{r.name}: {r.problem}" for r in results if r.problem]
    problems += [
        f"{r.name}: {c.name}: {c.problem}; {' | '.join(c.detail.splitlines())}" for r in results for c in r.failures
    ]
    reasons = list(dict.fromkeys(f"{r.rule}: {r.reason}" for r in report.rejections))
    reasons += list(dict.fromkeys(r.path for r in results if r.path and r.path != "packed"))
    sites = sum(r.kernel is not None for r in report.rewrites)
    outcome = Outcome(program, "refused", problems, reasons, sites)
    outcome.compared = sum(r.compared for r in results)
    outcome.packed = sum(r.path == "packed" for r in results)
    if any("compiled model raises" in p for p in problems):
        outcome.verdict = "error"
    elif any("reference" in r.problem for r in results) or not (outcome.compared or problems):
        outcome.verdict = "invalid"
    elif problems:
        outcome.verdict = "wrong"
    elif sites >= program.sites and report.rewrites and outcome.packed:
        outcome.verdict = "rewritten"
    return outcome
