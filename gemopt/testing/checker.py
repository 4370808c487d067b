"""Eager, fp64 eager and the compiled model on one batch, and the comparison of everything they show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemopt.testing.compare import Comparison, Tolerance, compare, rms, ulp
from gemopt.testing.inputs import Batch
from gemopt.testing.result import CaseResult, describe
from gemopt.testing.runs import Objective, Observed, State, observe, observe_double

_NOISE_RUNS = 8
_VANISHING = 1e-9  # a gradient this much smaller than the largest one is zero in exact arithmetic
_BLIND = 0.25  # eager error over RMS from which on a comparison says nothing
_FEW = 64  # elements below which an RMS is itself a noisy estimate


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
            return self.errors(case, eager, new)
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

    def errors(self, case: CaseResult, eager: Observed, new: Observed) -> CaseResult:
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
