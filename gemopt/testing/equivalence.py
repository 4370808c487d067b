"""`assert_equivalent`: a compiled model against eager, outputs and all gradients, over generated lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gemopt.testing.compare import Comparison, Tolerance, compare, rms, ulp
from gemopt.testing.inputs import Batch, CallableSource, ExampleSource, LengthsDraw, as_batch
from gemopt.testing.lengths import CASES, draw_lengths
from gemopt.testing.runs import (
    Objective,
    Observed,
    State,
    modules_of,
    no_dropout,
    observe,
    observe_double,
)

DEFAULT_CASES = ("given", "zeros", "ones", "full", "skewed", "empty_batch")
_NOISE_RUNS = 8
_VANISHING = 1e-9  # a gradient this much smaller than the largest one is zero in exact arithmetic
_BLIND = 0.25  # eager error over RMS from which on a comparison says nothing
_FEW = 64  # elements below which an RMS is itself a noisy estimate


class EquivalenceError(AssertionError):
    """The compiled model is not as good as eager. `result` holds everything that was compared."""

    def __init__(self, message: str, result: EquivalenceResult) -> None:
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


def assert_equivalent(
    model: Callable[..., Any],
    inputs: Any,
    *,
    lengths: str | Sequence[str] | LengthsDraw = "auto",
    loss: Callable[[Any], Tensor] | None = None,
    recipe: Any = None,
    inner: str = "aot_eager",
    compiled: Callable[..., Any] | None = None,
    cases: Sequence[str] = DEFAULT_CASES,
    seed: int = 0,
    train: bool | None = None,
    dropout: str = "off",
    autocast: torch.dtype | None = None,
    batch_size: int = 7,
    max_len: int = 13,
    ratio: float = 2.0,
    ulps: float = 4.0,
    runs: int = 128,
) -> EquivalenceResult:
    """Compare `gemopt.compile(model)` with eager: outputs, gradients of parameters and float inputs, buffers.

    Every tensor's RMS error against an fp64 run of eager may be `ratio` times eager's own RMS error in the
    same dtype plus `ulps` units in the last place of the tensor's RMS; shape, dtype, device, stride and
    requires_grad are eager's. Values that fp64 eager leaves undefined (NaN) are counted and left out.

    Args:
        model: a module, or a function; the modules a function closes over are found.
        inputs: one example batch (a tuple of arguments or a dict of keyword arguments), or a callable
            `inputs(lengths [B], max_len, generator) -> arguments` that makes a batch.
        lengths: which arguments are lengths: `"auto"`, their names, or a callable
            `(case, batch, max_len, generator) -> lengths [B]` that replaces the built-in draws.
        loss: `loss(output) -> scalar`, what to differentiate. By default every output has a fixed random
            cotangent.
        recipe, inner: for `gemopt.compile`. Without a recipe packing is forced at every fill and errors of
            passes are raised (`Recipe(min_saving=0, strict=True)`), so that the rewritten graph is what is
            tested.
        compiled: what to compare, instead of `gemopt.compile(model)`; it shares the model's parameters.
        cases: any of `gemopt.testing.CASES`.
        seed: for lengths, contents, cotangents.
        train: mode of the model's modules during the comparison; None leaves it.
        dropout: `"off"` sets dropout modules to 0; `"distribution"` keeps them and compares means and second
            moments of every tensor over `runs` seeds by z-tests.
        autocast: ambient autocast dtype of the eager and compiled runs.
        batch_size, max_len: for batches from a callable.

    Returns:
        EquivalenceResult; `print` it for one line a case.

    Raises:
        EquivalenceError: a tensor differs, only one of the two raises, or nothing could be compared. The
            message names case, tensor, errors, the worst element with its three values, the rows that differ
            and the report.
        TypeError, ValueError: an argument is not one of the above.
    """
    _check_arguments(cases, dropout, train, runs)
    state = State(modules_of(model))
    with _mode(state.modules, train), contextlib.ExitStack() as stack:
        if dropout == "off":
            stack.enter_context(no_dropout(state.modules))
        subject = compiled if compiled is not None else _compile(model, recipe, inner)
        source = _source(inputs, model, lengths, batch_size, max_len)
        checker = Checker(model, subject, state, loss, seed, autocast, Tolerance(ratio, ulps))
        result = EquivalenceResult(notes=source.notes, report=getattr(subject, "report", None))
        try:
            for case in cases:
                generator = torch.Generator().manual_seed(seed)
                batch = source.make(case, generator)
                if dropout == "distribution":
                    result.cases.append(_distribution(checker, case, batch, runs))
                else:
                    result.cases.append(checker.check(case, batch))
        finally:
            state.restore()
    _raise_if_bad(result)
    return result


def _check_arguments(cases: Sequence[str], dropout: str, train: bool | None, runs: int) -> None:
    if isinstance(cases, str):
        raise TypeError(f"cases: got the string {cases!r}; allowed: a tuple of names")
    for case in cases:
        if case not in CASES:
            raise ValueError(f"cases: got {case!r}; allowed: {', '.join(CASES)}")
    if dropout not in ("off", "distribution"):
        raise ValueError(f"dropout: got {dropout!r}; allowed: 'off', 'distribution'")
    if train not in (None, True, False):
        raise ValueError(f"train: got {train!r}; allowed: True, False, None")
    if runs < 16:
        raise ValueError(f"runs: got {runs}; allowed: 16 or more, a z-test needs them")


def _compile(model: Callable[..., Any], recipe: Any, inner: str) -> Callable[..., Any]:
    import gemopt

    if recipe is None:
        recipe = gemopt.Recipe(min_saving=0.0, strict=True)
    return gemopt.compile(model, recipe=recipe, inner=inner)


def _source(
    inputs: Any, model: Callable[..., Any], lengths: Any, batch_size: int, max_len: int
) -> CallableSource | ExampleSource:
    draw: LengthsDraw = lengths if callable(lengths) else draw_lengths
    if callable(inputs):
        return CallableSource(inputs, batch_size, max_len, draw)
    named = isinstance(lengths, (str, list, tuple)) and all(isinstance(n, str) for n in lengths)
    if not (callable(lengths) or named):
        raise TypeError(f"lengths: got {lengths!r}; allowed: 'auto', argument names, a callable")
    names = None if callable(lengths) or lengths == "auto" else [lengths] if isinstance(lengths, str) else lengths
    return ExampleSource(as_batch(inputs), model, names, draw)


@contextlib.contextmanager
def _mode(modules: Sequence[nn.Module], train: bool | None) -> Iterator[None]:
    before = [(m, m.training) for root in modules for m in root.modules()]
    try:
        for m, was in before:
            m.training = was if train is None else train
        yield
    finally:
        for m, was in before:
            m.training = was


@dataclass
class Checker:
    """Runs eager, fp64 eager and the compiled model on a batch and compares what they show."""

    model: Callable[..., Any]
    compiled: Callable[..., Any]
    state: State
    loss: Callable[[Any], Tensor] | None
    seed: int
    autocast: torch.dtype | None
    tolerance: Tolerance

    def check(self, name: str, batch: Batch) -> CaseResult:
        case = CaseResult(name, describe(batch))
        reference, eager, objective = self.references(batch)
        new = self.run_compiled(batch, objective)
        case.path = new.path
        if eager.error or new.error:
            return self._errors(case, eager, new)
        if reference.error:
            case.problem = f"the fp64 reference raises {type(reference.error).__name__}: {reference.error}"
            return case
        if new.structure != eager.structure:
            case.problem = f"output structure {new.structure} for eager's {eager.structure}"
            return case
        self._check_determinism(batch, objective, eager)
        case.comparisons = self._compare(new, eager, reference)
        blind = _blind(eager, reference)
        if blind:
            case.problem = blind
        if case.failures:
            self._second_look(case, batch, objective, new, reference)
        return case

    def references(self, batch: Batch) -> tuple[Observed, Observed, Objective]:
        """fp64, eager, and the objective of all three: no cotangent where fp64 is not finite."""
        objective = Objective(self.loss, self.seed)
        eager = self.run_eager(batch, objective)
        reference = self._run_double(batch, objective)
        mute = {
            n: ~t.isfinite()
            for n, t in reference.tensors.items()
            if n.startswith("output") and t is not None and t.is_floating_point() and not bool(t.isfinite().all())
        }
        if mute and self.loss is None:
            objective = Objective(None, self.seed, mute)
            eager = self.run_eager(batch, objective)
            reference = self._run_double(batch, objective)
        return reference, eager, objective

    def _run_double(self, batch: Batch, objective: Objective) -> Observed:
        self.state.restore()
        return observe_double(self.model, batch, self.state, objective, seed=self.seed)

    def _autocast_for(self, batch: Batch) -> tuple[str, torch.dtype] | None:
        if self.autocast is None:
            return None
        devices = [t.device.type for t in (*batch.tensors().values(), *self.state.parameters.values())]
        return (devices[0] if devices else "cpu", self.autocast)

    def run_eager(self, batch: Batch, objective: Objective, seed: int | None = None) -> Observed:
        self.state.restore()
        seed = self.seed if seed is None else seed
        return observe(self.model, batch, self.state, objective, seed=seed, autocast=self._autocast_for(batch))

    def run_compiled(self, batch: Batch, objective: Objective, seed: int | None = None) -> Observed:
        self.state.restore()
        before = _steps(self.compiled)
        seed = self.seed if seed is None else seed
        seen = observe(self.compiled, batch, self.state, objective, seed=seed, autocast=self._autocast_for(batch))
        seen.path = _path(before, _steps(self.compiled))
        return seen

    def _errors(self, case: CaseResult, eager: Observed, new: Observed) -> CaseResult:
        if eager.error and new.error:
            case.error = f"eager {_one_line(eager.error)}; compiled {_one_line(new.error)}"
        elif eager.error:
            case.problem = f"eager raises {_one_line(eager.error)}; the compiled model returns a result"
        else:
            case.problem = f"the compiled model raises {_one_line(new.error)}; eager does not"
        return case

    def _check_determinism(self, batch: Batch, objective: Objective, eager: Observed) -> None:
        again = self.run_eager(batch, objective, seed=self.seed + 1)
        for name, tensor in eager.tensors.items():
            other = again.tensors.get(name)
            if name.startswith("output") and tensor is not None and other is not None:
                if not torch.equal(tensor.nan_to_num(), other.nan_to_num()):
                    raise ValueError(
                        f"model: {name} of eager differs between seeds: it is random beyond dropout modules; "
                        "use dropout='distribution' or eval mode"
                    )

    def _compare(self, new: Observed, eager: Observed, reference: Observed) -> list[Comparison]:
        names = dict.fromkeys((*eager.tensors, *new.tensors))
        return [
            compare(n, new.tensors.get(n), eager.tensors.get(n), reference.tensors.get(n), self.tolerance) for n in names
        ]

    def _second_look(self, case: CaseResult, batch: Batch, objective: Objective, new: Observed, reference: Observed) -> None:
        """Eager's error may be small by luck: measure it again with every float moved by one rounding."""
        doubtful = [c for c in case.failures if c.rms > c.bound and c.problem.startswith("RMS")]
        for run in range(_NOISE_RUNS if doubtful else 0):
            noisy = self._run_noisy(batch, objective, run)
            for c in doubtful:
                eager, exact = noisy.tensors.get(c.name), reference.tensors.get(c.name)
                if eager is None or exact is None:
                    continue
                finite = eager.isfinite() & exact.isfinite()
                error = rms((eager.double() - exact.double())[finite])
                size = ulp(rms(exact[finite]), eager.dtype)
                few = eager.numel() < _FEW or eager.dtype == torch.float64  # fp64 is no reference for itself
                ratio = self.tolerance.ratio * (2 if few else 1)
                c.bound = max(c.bound, ratio * error + self.tolerance.ulps * size)
        largest = max((rms(x) for n, x in reference.tensors.items() if x is not None and n.startswith("grad")), default=0.0)
        for c in doubtful:
            exact, eager = reference.tensors.get(c.name), new.tensors.get(c.name)
            if exact is not None and eager is not None and rms(exact) <= _VANISHING * largest:
                # Zero in exact arithmetic (the bias of K): what is left is the rounding of terms as large as its kin.
                c.bound = max(c.bound, float(torch.finfo(eager.dtype).eps) * largest)
            if c.rms <= c.bound:
                c.problem, c.detail, c.by_noise = "", "", True

    def _run_noisy(self, batch: Batch, objective: Objective, run: int) -> Observed:
        self.state.restore()
        generator = torch.Generator().manual_seed(1000 + run)
        with torch.no_grad():
            for parameter in self.state.parameters.values():
                parameter.copy_(_moved(parameter, generator))
        moved = batch.map(lambda t: _moved(t.detach(), generator).requires_grad_(t.requires_grad))
        return observe(self.model, moved, self.state, objective, seed=self.seed, autocast=self._autocast_for(batch))


def _blind(eager: Observed, reference: Observed) -> str:
    """Why the reference cannot judge: eager is nowhere near it, so that anything would pass."""
    for kind in ("output", "grad", "buffer"):
        pairs = [
            (n, t.detach().double(), reference.tensors[n].detach())  # type: ignore[union-attr]
            for n, t in eager.tensors.items()
            if n.startswith(kind) and t is not None and t.is_floating_point() and reference.tensors.get(n) is not None
        ]
        finite = [(n, (t - r)[r.isfinite()], r[r.isfinite()]) for n, t, r in pairs if t.shape == r.shape]
        scale = max((rms(r) for _, _, r in finite), default=0.0)
        for name, error, r in finite:
            if rms(error) > _BLIND * max(rms(r), scale / 20):
                size = f"{rms(error):.3g} of {rms(r):.3g}"
                return f"{name}: eager's RMS error against fp64 is {size}: the reference judges nothing"
    return ""


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Every float up or down by half a unit in the last place, or one, as rounding falls."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    return (tensor * (1 + sign * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)


def _one_line(error: Exception | None) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {text[:300]}"


def _steps(compiled: Callable[..., Any]) -> tuple[int, dict[str, int]] | None:
    report = getattr(compiled, "report", None)
    packed = getattr(report, "steps_packed", None)
    return None if packed is None else (packed, dict(getattr(report, "steps_padded", {})))


def _path(before: tuple[int, dict[str, int]] | None, after: tuple[int, dict[str, int]] | None) -> str:
    """How the graphs of the call ran: `"packed"`, `"padded: reason"`, both joined, or empty where no step
    chose.
    """
    if before is None or after is None:
        return ""
    parts = ["packed"] if after[0] > before[0] else []
    reasons = [r for r, n in after[1].items() if n > before[1].get(r, 0)]
    return ", ".join(parts + [f"padded: {r}" for r in reasons])


def describe(batch: Batch) -> str:
    """Shapes, and the values of short 1-D integers (lengths): `args[0] [7, 13], args[1] = [3, 0, …]`."""
    parts = []
    for name, t in batch.tensors().items():
        if t.dim() == 1 and not t.is_floating_point() and t.numel() <= 16:
            parts.append(f"{name} = {t.tolist()}")
        else:
            parts.append(f"{name} {list(t.shape)}")
    return ", ".join(parts)


def _distribution(checker: Checker, case: str, batch: Batch, runs: int) -> CaseResult:
    from gemopt.testing.distribution import compare_distributions

    return compare_distributions(checker, case, batch, runs)


def _raise_if_bad(result: EquivalenceResult) -> None:
    if not result.ok:
        reason = "the compiled model differs from eager" if result.compared else "nothing could be compared"
        raise EquivalenceError("\n".join([reason, str(result), *_report_lines(result.report)]), result)


def _report_lines(report: Any) -> Iterator[str]:
    for rewrite in getattr(report, "rewrites", ()):
        became = rewrite.kernel or rewrite.after
        yield f"rewrite: {rewrite.rule} at {rewrite.site} {rewrite.source} -> {became}"
    for rejection in getattr(report, "rejections", ()):
        yield f"left alone: {rejection.rule} at {rejection.site}: {rejection.reason}"
