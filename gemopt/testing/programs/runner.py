"""Run a program through gemopt and compare outputs and gradients with fp64 eager on several batches."""

from __future__ import annotations

import math
import statistics
import time
import traceback
import unittest.mock
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gemopt.testing.checker import Checker
from gemopt.testing.compare import Tolerance
from gemopt.testing.inputs import Batch
from gemopt.testing.lengths import draw_lengths
from gemopt.testing.programs.interpret import Interpreted
from gemopt.testing.programs.program import Program
from gemopt.testing.result import CaseResult
from gemopt.testing.runs import Objective, Observed, State

_DRAWS = 12
_MOST_DRAWS = 48
_LESS_EXACT = 3.0
_ROOM = 1e9  # slack with which every row set has room for all padded rows
_FLIPS = 0.125  # share of the draws that a flipped step may put over their bounds
Errors = list[tuple[float, float]]  # RMS error and bound of one tensor, an entry for each draw
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


def roomy_pipeline(captured: Any, recipe: Any, report: Any) -> Any:
    """As `unchecked_pipeline`, with capacities whether they pay or not."""
    from gemopt.passes import unpad

    with unittest.mock.patch.object(unpad, "_cost_rule", lambda *args: lambda counts, totals: True):
        return unchecked_pipeline(captured, recipe, report)


@dataclass
class Outcome:
    """What became of one program.

    Attributes:
        verdict: ``"wrong"``, ``"error"`` (only the compiled one raises), ``"invalid"`` (nothing to compare with),
            ``"rewritten"`` (every attention, and it ran packed) or ``"refused"``.
        problems: what differs, one line a tensor.
        reasons: the rejections of the report, or why the packed graph did not run.
        notes: what was over the bound of one draw or of `_DRAWS` and was settled as rounding (`_settled`).
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
    notes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.verdict in ("rewritten", "refused")

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.sites} of {self.program.sites} attentions rewritten, {self.packed} batches packed"]
        return "\n".join([*lines, *self.problems, *self.reasons, *self.notes, str(self.program)])


def run(
    program: Program, inner: str = "interpreter", cases: tuple[str, ...] = CASES, seed: int = 0, confirm: bool = True
) -> Outcome:
    """Compile, run and compare one program.

    Args:
        program: what to run.
        inner: ``"interpreter"`` traces and interprets without Dynamo; ``"spare"`` does so with constant sizes and room
            for every padded row in packed tensors (`Recipe.row_slack`); ``"eager"``, ``"aot_eager"`` and ``"inductor"`` are
            those of ``gemopt.compile``.
        cases: names of `CASES`; those that the program's mask rules out are left out.
        seed: of parameters, batches and cotangents.
        confirm: where rounding errors are above their bound, decide by more draws (`_settled`).
    """
    unknown = [c for c in cases if c not in CASES]
    if unknown:
        raise ValueError(f"cases: got {unknown}; allowed: {', '.join(CASES)}")
    start = time.perf_counter()
    try:
        results, report = _compare(program, inner, cases, seed)
        outcome = judge(program, results, report)
        if confirm and outcome.verdict == "wrong" and _only_rounding(results):
            outcome = _settled(program, inner, cases, seed, results, report)
    except Exception:
        last = traceback.format_exc().strip().splitlines()[-1]
        outcome = Outcome(program, "invalid", [last])
    outcome.seconds = time.perf_counter() - start
    return outcome


def _only_rounding(results: list[CaseResult]) -> bool:
    return not any(r.problem and "reference" not in r.problem for r in results) and all(
        c.is_rounding for r in results for c in r.failures
    )


def _settled(
    program: Program, inner: str, cases: tuple[str, ...], seed: int, first: list[CaseResult], report: Any
) -> Outcome:
    """Rounding, or a fault? The verdict on a program whose first draw has errors above their bounds and no other problem.

    1. By the root mean square over `_DRAWS` draws of parameters and inputs, as `settle` does it. Within the bound: rounding.
    2. Else the same program in fp64, in three draws, must be rewritten in the same way, run packed where it did, and agree
       with eager to nine digits, to six where it ran padded. A wrong row, mask, index, sign or gradient is as wrong there.
       If it does not: wrong.
    3. Else up to `_MOST_DRAWS` draws of the cases in doubt. A bf16 step that flips a ReLU moves a whole row, so that a few
       draws make up the sum, on either side. Within the bound: rounding.
    4. Else by the usual draw (`_usually_over`): median within the median bound, few draws over theirs. Within: flips.
    5. Else the errors are really larger than twice eager's, and not by the logic: another order of sums cancels less. Up to
       `_LESS_EXACT` times the bound that is told as a note. Above, it is wrong: an operation of that dtype is at fault.
    """
    draws = [first, *(_compare(program, inner, cases, seed + i)[0] for i in range(1, _DRAWS))]
    outcome = judge(program, settle(draws), report)
    doubtful = tuple(r.name for r in draws[0] if r.failures)
    if outcome.verdict != "wrong" or not _only_rounding(draws[0]) or any(not _only_rounding(d) for d in draws[1:]):
        return outcome
    differs = _differs_in_fp64(program, inner, cases, seed, first, report)
    if differs:
        outcome.problems.append(f"in fp64: {differs}")
        return outcome
    draws += [_compare(program, inner, doubtful, seed + i)[0] for i in range(_DRAWS, _MOST_DRAWS)]
    outcome = judge(program, settle(draws), report)
    note = f"within the bound over {_MOST_DRAWS} draws of {', '.join(doubtful)}"
    if outcome.verdict == "wrong":
        worst = f"{len(outcome.problems)} tensors: {outcome.problems[0]}"
        outcome, note = judge(program, settle(draws, _usually_over), report), f"a step flips in some draws, {worst}"
    if outcome.verdict == "wrong":
        outcome, note = judge(program, settle(draws, _far_over), report), f"less exact than eager, {worst}"
    if outcome.verdict != "wrong":
        outcome.notes = [f"in fp64 equal to nine digits; {note}"]
    return outcome


def _differs_in_fp64(
    program: Program, inner: str, cases: tuple[str, ...], seed: int, first: list[CaseResult], report: Any
) -> str:
    """How the rewritten program differs from eager when both run in fp64; empty if it does not."""
    paths = {r.name: r.path for r in first}
    kinds = sorted(r.rule for r in report.rewrites)
    for i in range(3):
        results, exact_report = _compare(program.exact(), inner, cases, seed + i)
        if sorted(r.rule for r in exact_report.rewrites) != kinds:
            return "it is not rewritten in the same way"
        for case in results:
            if case.problem:
                return f"{case.name}: {case.problem}"
            if i == 0 and case.path != paths[case.name]:
                return f"{case.name}: it runs {case.path}, not {paths[case.name]}"
            digits = 1e-9 if case.path == "packed" else 1e-6  # a fill of -2^32 leaves the scores of a hidden row six
            largest = max((c.size for c in case.comparisons if c.name.startswith("grad")), default=0.0)
            for c in case.comparisons:
                if (c.problem and not c.is_rounding) or not c.rms <= digits * c.size + 1e-13 * largest:
                    return f"{case.name}: {c.name}: {c.problem or f'RMS error {c.rms:.3g} of {c.size:.3g}'}"
    return ""


def _compare(program: Program, inner: str, cases: tuple[str, ...], seed: int) -> tuple[list[CaseResult], Any]:
    """The comparisons of all cases with one seed, and the report."""
    import gemopt

    model, make = program.build(seed)
    recipe = gemopt.Recipe(min_saving=0.0, strict=True, pipeline=forced_pipeline)
    compiled: Any
    if inner == "interpreter":
        compiled = Interpreted(model, unchecked_pipeline, recipe)
    elif inner == "spare":
        compiled = Interpreted(model, roomy_pipeline, replace(recipe, row_slack=_ROOM), static=True)
    else:
        compiled = gemopt.compile(model, recipe=recipe, inner=inner)
    checker = _Checker(model, compiled, State([model]), None, seed, program.autocast, Tolerance())
    results: list[CaseResult] = []
    try:
        for name, lengths, batch in _batches(program, make, cases, seed):
            checker.undefined = lengths == 0 if program.undefined_empty else None
            results.append(checker.check(name, batch))
    finally:
        if inner not in ("interpreter", "spare"):
            torch._dynamo.reset()
    return results, compiled.report


def _over(errors: Errors, slack: float = 1.0) -> str:
    """The problem of errors whose root mean square is above ``slack`` times that of their bounds; empty if it is not."""
    mine, bound = (math.sqrt(statistics.fmean(x**2 for x in column)) for column in zip(*errors, strict=True))
    if mine <= slack * bound:  # written so that NaN is a problem
        return ""
    return f"RMS error {mine:.3g} over {len(errors)} draws, allowed {bound:.3g}"


def _far_over(errors: Errors) -> str:
    return _over(errors, _LESS_EXACT)


def _usually_over(errors: Errors) -> str:
    """The problem of errors that are over their bounds in the middle draw or in more than `_FLIPS` of the draws."""
    mine, bound = (statistics.median(column) for column in zip(*errors, strict=True))
    over = sum(not e <= b for e, b in errors)  # so that NaN is
    if mine <= bound and over <= _FLIPS * len(errors):
        return ""
    return f"RMS error {mine:.3g} in the median of {len(errors)} draws, allowed {bound:.3g}; {over} over their bound"


def settle(draws: list[list[CaseResult]], problem_of: Callable[[Errors], str] = _over) -> list[CaseResult]:
    """The results of the first draw, with rounding errors judged over all draws by ``problem_of``; what else is wrong
    in any draw stays so.

    In one draw eager's error of a loss may be a hundredth of its usual size by luck, and twice that is no bound. A wrong
    rewrite is wrong in every draw: its root mean square stays far above the bound's.
    """
    errors: dict[tuple[str, str], Errors] = defaultdict(list)
    for case in (case for results in draws for case in results):
        for c in case.comparisons:
            errors[case.name, c.name].append((c.rms, c.bound))
    settled = []
    for number, results in enumerate(draws):
        for case in results:
            for c in case.comparisons:
                if c.is_rounding or not c.problem:
                    c.problem = problem_of(errors[case.name, c.name]) if number == 0 else ""
            if number == 0 or not case.ok:
                settled.append(case)
    return settled


class _Checker(Checker):
    """Leaves out samples whose sequence is empty, where ``undefined`` marks them (bool ``[B]``).

    A row whose keys are all masked is uniform over padding in eager where the fill is finite, and 0 in a rewrite. Such
    samples get no cotangent and are not compared, but have to be finite where eager's are.
    """

    undefined: Tensor | None = None
    finite = True

    def references(self, batch: Batch) -> tuple[Observed, Observed, Objective]:
        reference, eager, objective = super().references(batch)
        if self.undefined is None:
            return reference, eager, objective
        self.finite = all(bool(t.isfinite().all()) for _, t in self._outputs(eager))
        if not bool(self.undefined.any()):
            return reference, eager, objective
        mute = {n: self._rows(t) | objective.mute.get(n, torch.tensor(False)) for n, t in self._outputs(reference)}
        objective = Objective(None, self.seed, mute)
        eager, reference = self.run_eager(batch, objective), self._run_double(batch, objective)
        for name, tensor in self._outputs(reference):
            reference.tensors[name] = tensor.detach().masked_fill(mute[name], torch.nan)
        return reference, eager, objective

    def run_compiled(self, batch: Batch, objective: Objective, seed: int | None = None) -> Observed:
        seen = super().run_compiled(batch, objective, seed)
        if self.undefined is not None and self.finite and not all(bool(t.isfinite().all()) for _, t in self._outputs(seen)):
            seen.error = seen.error or ArithmeticError("the result of an empty sequence is not finite")
        return seen

    def _outputs(self, seen: Observed) -> list[tuple[str, Tensor]]:
        assert self.undefined is not None
        named = [
            (n, t) for n, t in seen.tensors.items() if n.startswith("output") and t is not None and t.is_floating_point()
        ]
        return [(n, t) for n, t in named if t.shape[:1] == self.undefined.shape]

    def _rows(self, tensor: Tensor) -> Tensor:
        assert self.undefined is not None
        return self.undefined.view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor)


def _batches(program: Program, make: Any, cases: tuple[str, ...], seed: int) -> Iterator[tuple[str, Tensor, Batch]]:
    for number, case in enumerate(cases):
        if (case == "zeros" and program.shortest > 0) or (case == "holes" and not program.holes):
            continue
        if case == "other" and program.fixed:
            continue
        size, length = (program.batch + 2, program.max_len + 4) if case == "other" else (program.batch, program.max_len)
        generator = torch.Generator().manual_seed(1000 * seed + number)
        lengths = draw_lengths("given" if case in ("other", "holes") else case, size, length, generator)
        lengths = lengths.clamp(program.shortest, length - program.margin)
        yield case, lengths, Batch((), make(lengths, length, generator, holes=case == "holes"))


def judge(program: Program, results: list[CaseResult], report: Any) -> Outcome:
    """The verdict on the comparisons of one program."""
    judged = [r for r in results if "reference" not in r.problem]  # fp32 may be far from fp64 where no key is visible
    if not judged:
        return Outcome(program, "invalid", [f"{r.name}: {r.problem}" for r in results])
    results = judged
    problems = [f"{r.name}: {r.problem}" for r in results if r.problem]
    problems += [
        f"{r.name}: {c.name}: {c.problem}; {' | '.join(c.detail.splitlines())}" for r in results for c in r.failures
    ]
    reasons = list(dict.fromkeys(f"{r.rule}: {r.reason}" for r in report.rejections))
    reasons += list(dict.fromkeys(r.path for r in results if r.path and r.path != "packed"))
    sites = sum(r.rule == "unpad attention" for r in report.rewrites)
    outcome = Outcome(program, "refused", problems, reasons, sites)
    outcome.compared = sum(r.compared for r in results)
    outcome.packed = sum(r.path == "packed" for r in results)
    if any("compiled model raises" in p for p in problems):
        outcome.verdict = "error"
    elif not (outcome.compared or problems):
        outcome.verdict = "invalid"
    elif problems:
        outcome.verdict = "wrong"
    elif sites >= program.sites and report.rewrites and outcome.packed:
        outcome.verdict = "rewritten"
    return outcome
