"""Dropout: two models that draw different random numbers are compared by their means and second moments.

Over n seeds each model gives samples of every output and gradient. For every element, and for a few random
projections of the whole tensor (which gather small differences that all elements share), Welch's statistic

    z = (m1 - m2) / sqrt(v1 / n + v2 / n)

must stay below a bound that holds for all elements of a tensor at once with probability 1 - 1e-6, taken from
Student's t with n - 1 degrees of freedom. x and x² are tested: x² sees a wrong p whose mean was rescaled
right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gemopt.testing.checker import Checker
from gemopt.testing.compare import Comparison
from gemopt.testing.inputs import Batch
from gemopt.testing.result import CaseResult, describe

_FALSE_ALARM = 1e-6
_PROJECTIONS = 16


class Moments:
    """Running mean and variance of x, x² and projections of x (Welford)."""

    def __init__(self) -> None:
        self.n = 0
        self.mean: Tensor = torch.zeros(())
        self.m2: Tensor = torch.zeros(())

    def add(self, sample: Tensor) -> None:
        flat = sample.detach().double().flatten()
        generator = torch.Generator().manual_seed(flat.numel())
        signs = torch.randint(0, 2, (_PROJECTIONS, flat.numel()), generator=generator).double() * 2 - 1
        features = torch.cat([flat, flat.square(), signs.to(flat.device) @ flat])
        self.n += 1
        delta = features - self.mean
        self.mean = self.mean + delta / self.n
        self.m2 = self.m2 + delta * (features - self.mean)

    @property
    def variance_of_mean(self) -> Tensor:
        return self.m2 / (self.n - 1) / self.n


def bound(elements: int, runs: int) -> float:
    """|z| that `elements` statistics at once pass with probability 1e-6 or less, t-distributed with runs - 1
    d.o.f.
    """
    p = _FALSE_ALARM / (2 * max(elements, 1))
    z = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - p, dtype=torch.float64)))
    d = runs - 1  # Student's t from the normal quantile, Hill (1970): exact enough for d >= 15
    return math.sqrt(d * (math.exp((z * z) / d * (1 - 3 / (4 * d)) ** -1) - 1)) if d > 0 else math.inf


def compare_distributions(checker: Checker, name: str, batch: Batch, runs: int) -> CaseResult:
    """Run both models `runs` times with different seeds and compare every tensor they show."""
    case = CaseResult(name, describe(batch))
    _, eager, objective = checker.references(batch)
    first = checker.run_compiled(batch, objective)
    case.path = first.path
    if eager.error or first.error:
        return checker.errors(case, eager, first)
    theirs: dict[str, Moments] = {}
    mine: dict[str, Moments] = {}
    for run in range(runs):
        seeds = (10_000 + 2 * run, 10_001 + 2 * run)
        for table, seen in (
            (theirs, checker.run_eager(batch, objective, seeds[0])),
            (mine, checker.run_compiled(batch, objective, seeds[1])),
        ):
            for key, tensor in seen.tensors.items():
                if tensor is not None and tensor.is_floating_point():
                    table.setdefault(key, Moments()).add(tensor)
    for key in dict.fromkeys((*theirs, *mine)):
        case.comparisons.append(_compare(key, theirs.get(key), mine.get(key), runs))
    return case


def _compare(key: str, theirs: Moments | None, mine: Moments | None, runs: int) -> Comparison:
    if theirs is None or mine is None or theirs.mean.shape != mine.mean.shape:
        return Comparison(key, "present in one of the two models only, or of another shape")
    scale = theirs.mean.abs().max() if theirs.mean.numel() else torch.tensor(0.0)
    floor = (scale * 1e-6).square().clamp(min=1e-30)
    z = (theirs.mean - mine.mean) / (theirs.variance_of_mean + mine.variance_of_mean + floor).sqrt()
    usable = z.isfinite()
    out = Comparison(key, compared=int(usable.sum()), skipped=int((~usable).sum()))
    out.bound = bound(z.numel(), runs)
    out.rms = out.maximum = float(z[usable].abs().max()) if out.compared else 0.0
    if out.rms > out.bound:
        at = int(torch.where(usable, z.abs(), 0.0).argmax())
        kinds = (theirs.mean.numel() - _PROJECTIONS) // 2
        what = f"mean of element {at}" if at < kinds else f"second moment of element {at - kinds}"
        what = "a projection of the tensor" if at >= 2 * kinds else what
        out.problem = (
            f"|z| = {out.rms:.1f} for the {what}, allowed {out.bound:.1f} over {runs} runs: gemopt "
            f"{float(mine.mean[at]):.6g}, eager {float(theirs.mean[at]):.6g}"
        )
    return out
