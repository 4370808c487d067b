"""What twelve draws may excuse: the rounding error of one draw, and nothing else."""

from __future__ import annotations

import pytest
import torch

from gemopt.report import Report
from gemopt.testing.compare import Comparison
from gemopt.testing.programs import Program, run, runner, sample
from gemopt.testing.programs.runner import settle
from gemopt.testing.result import CaseResult

ROUNDING = "RMS error 1, allowed 0.1 (eager's is 0.05)"


def draw(rms: float, bound: float, problem: str = "", case_problem: str = "") -> list[CaseResult]:
    comparison = Comparison("output", problem, compared=1, rms=rms, bound=bound)
    return [CaseResult("given", "", problem=case_problem, comparisons=[comparison])]


def failures(draws: list[list[CaseResult]]) -> list[str]:
    return [c.problem or case.problem for case in settle(draws) if not case.ok for c in case.comparisons]


def test_one_lucky_bound_is_settled():
    assert failures([draw(1.0, 0.1, ROUNDING), *(draw(0.9, 1.5) for _ in range(11))]) == []


@pytest.mark.parametrize("lucky", [0, 5])
def test_errors_of_every_draw_stay(lucky):
    draws = [draw(1.0, 0.1, ROUNDING) for _ in range(12)]
    draws[lucky] = draw(0.01, 0.1)
    (problem,) = failures(draws)
    assert problem.startswith("RMS error")


def test_one_large_error_stays():
    """A mistake that only some batches meet is far above what rounding makes of any batch."""
    assert failures([*(draw(0.9, 1.0) for _ in range(11)), draw(50.0, 1.0, ROUNDING)])


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("problem", ["shape (2, 3) for eager's (3, 2)", "4 of 9 values differ", "1 values are not finite"])
def test_what_is_no_rounding_stays_in_whatever_draw(number, problem):
    draws = [draw(1.0, 0.1, ROUNDING), *(draw(0.9, 1.5) for _ in range(11))]
    draws[number] = draw(0.0, 0.0, problem)
    assert problem in failures(draws)


def test_a_case_that_raises_in_a_later_draw_stays():
    draws = [draw(1.0, 0.1, ROUNDING), *(draw(0.9, 1.5) for _ in range(10)), draw(0.0, 0.0, "", "the compiled model raises")]
    assert failures(draws) == ["the compiled model raises"]


def test_an_error_that_is_not_a_number_stays():
    assert failures([draw(float("nan"), 1.0, ROUNDING), *(draw(0.9, 1.5) for _ in range(11))])


# ---------------------------------------------------------------- beyond twelve draws


def verdict(monkeypatch: pytest.MonkeyPatch, low: list[float], exact: float = 0.0) -> runner.Outcome:
    """What becomes of a program whose draws have these errors under a bound of 1, and this one in fp64."""
    errors = iter(low)

    def compare(program: Program, inner: str, cases: tuple[str, ...], seed: int) -> tuple[list[CaseResult], Report]:
        rms, bound = (exact, 1e-15) if program.dtype == torch.float64 else (next(errors), 1.0)
        problem = f"RMS error {rms}" if rms > bound else ""
        made = Comparison("output", problem, compared=1, rms=rms, bound=bound, size=1.0)
        report = Report("made up")
        report.new_graph(mode="train").rewrite("a", "unpad attention")
        return [CaseResult("given", "", path="packed", comparisons=[made])], report

    monkeypatch.setattr(runner, "_compare", compare)
    return run(sample(0), cases=("given",))


def test_more_draws_settle_rounding(monkeypatch):
    outcome = verdict(monkeypatch, [*[1.5] * 12, *[0.5] * 36])
    assert outcome.verdict == "rewritten" and "within the bound over 48 draws" in outcome.notes[0]


def test_less_exact_by_rounding_alone_is_told(monkeypatch):
    outcome = verdict(monkeypatch, [2.5] * 48)
    assert outcome.verdict == "rewritten" and "less exact than eager" in outcome.notes[0]


def test_errors_far_above_the_bound_are_wrong_whatever_fp64_says(monkeypatch):
    assert verdict(monkeypatch, [3.5] * 48).verdict == "wrong"


def test_flips_of_a_few_draws_are_told(monkeypatch):
    """A ReLU or a maximum that one rounding flips moves a whole gradient: in few draws, and as often in eager."""
    outcome = verdict(monkeypatch, [*[50.0] * 6, *[0.5] * 42])
    assert outcome.verdict == "rewritten" and "flips in some draws" in outcome.notes[0]


@pytest.mark.parametrize("exact", [0.0, 1e-8])
def test_flips_of_many_draws_or_in_fp64_are_wrong(monkeypatch, exact):
    many = 7 if exact == 0 else 2
    assert verdict(monkeypatch, [*[50.0] * many, *[0.5] * (48 - many)], exact).verdict == "wrong"


@pytest.mark.parametrize("exact", [1e-8, float("nan")])
def test_what_differs_in_fp64_is_wrong_at_once(monkeypatch, exact):
    outcome = verdict(monkeypatch, [1.5] * 12, exact)
    assert outcome.verdict == "wrong" and any("in fp64" in p for p in outcome.problems)


def test_a_program_in_fp64_rounds_nowhere():
    for precision in ("bf16", "autocast_inside", "autocast_around"):
        program = sample(1, {"precision": precision, "family": "softmax", "softmax": "dtype"})
        exact = program.exact()
        assert exact.dtype == torch.float64 and exact.autocast is None
        assert "bfloat16" not in exact.source and "float32" not in exact.source
