"""What a comparison of a compiled model with eager found, and the error that tells it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gemopt.testing.compare import Comparison
from gemopt.testing.inputs import Batch


class EquivalenceError(AssertionError):
    """The compiled model is not as good as eager. `result` (an EquivalenceResult, or a PoisonResult) holds all that
    was compared."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


@dataclass
class CaseResult:
    """One batch: what it was, how the compiled model ran it, and every tensor compared."""

    name: str
    inputs: str
    path: str = ""
    error: str = ""
    problem: str = ""
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return sum(c.compared for c in self.comparisons)

    @property
    def skipped(self) -> int:
        return sum(c.skipped for c in self.comparisons)

    @property
    def failures(self) -> list[Comparison]:
        return [c for c in self.comparisons if c.problem]

    @property
    def ok(self) -> bool:
        return not self.problem and not self.failures


@dataclass
class EquivalenceResult:
    """All cases. `report` is the compiled model's own report, where it has one."""

    cases: list[CaseResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    report: Any = None

    @property
    def ok(self) -> bool:
        return all(case.ok for case in self.cases) and self.compared > 0

    @property
    def compared(self) -> int:
        return sum(case.compared for case in self.cases)

    @property
    def skipped(self) -> int:
        return sum(case.skipped for case in self.cases)

    @property
    def worst(self) -> Comparison | None:
        """The comparison nearest to its bound, or farthest beyond it."""
        return max((c for case in self.cases for c in case.comparisons), key=lambda c: c.ratio, default=None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for case in self.cases:
            worst = max(case.comparisons, key=lambda c: c.ratio, default=None)
            figures = f"{len(case.comparisons)} tensors, {case.compared} values compared, {case.skipped} skipped"
            margin = f", worst {worst.name} at {worst.ratio:.2f} of its bound" if worst and worst.compared else ""
            state = "ok" if case.ok else "FAILED"
            ran = f", ran {case.path}" if case.path else ""
            yield f"{case.name} ({case.inputs}): {state}, {figures}{margin}{ran}"
            if case.error:
                yield f"  both raise: {case.error}"
            if case.problem:
                yield f"  {case.problem}"
            for c in case.failures:
                yield f"  {c.name}: {c.problem}"
                yield from (f"    {line}" for line in c.detail.splitlines())
        yield from (f"note: {note}" for note in self.notes)


def describe(batch: Batch) -> str:
    """Shapes, and the values of short 1-D integers (lengths): `args[0] [7, 13], args[1] = [3, 0, …]`."""
    parts = []
    for name, t in batch.tensors().items():
        if t.dim() == 1 and not t.is_floating_point() and t.numel() <= 16:
            parts.append(f"{name} = {t.tolist()}")
        else:
            parts.append(f"{name} {list(t.shape)}")
    return ", ".join(parts)


def raise_if_bad(result: EquivalenceResult) -> None:
    if not result.ok:
        reason = "the compiled model differs from eager" if result.compared else "nothing could be compared"
        raise EquivalenceError("\n".join([reason, str(result), *_report_lines(result.report)]), result)


def _report_lines(report: Any) -> Iterator[str]:
    for rewrite in getattr(report, "rewrites", ()):
        became = rewrite.kernel or rewrite.after
        yield f"rewrite: {rewrite.rule} at {rewrite.site} {rewrite.source} -> {became}"
    for rejection in getattr(report, "rejections", ()):
        yield f"left alone: {rejection.rule} at {rejection.site}: {rejection.reason}"
