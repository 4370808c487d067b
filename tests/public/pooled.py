"""The contract over several batches, for errors near the bound of one.

A loss is one number: in one batch eager's error may be a tenth of its usual size by luck, and twice that is no bound. Over
``BATCHES`` batches the root mean square of both errors is a fair estimate, and the same rule holds for it:

    RMS(compiled - fp64) <= 2 RMS(eager - fp64) + 4 ulp(RMS(fp64))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gemopt.testing import CaseResult, Tolerance
from gemopt.testing.compare import ulp
from gemopt.testing.inputs import CallableSource
from gemopt.testing.runs import Objective, Observed, State, modules_of, observe, observe_double

from .registry import BATCH, MAX_LEN, Built

BATCHES = 16
NEAR = 3.0  # times the bound of one batch: beyond it no luck explains an error


@dataclass
class _Sums:
    eager: float = 0.0
    compiled: float = 0.0
    exact: float = 0.0
    dtype: torch.dtype = torch.float32

    def excess(self, tolerance: Tolerance) -> float:
        """Pooled error of the compiled model over its bound."""
        size = ulp((self.exact / BATCHES) ** 0.5, self.dtype)
        bound = tolerance.ratio * (self.eager / BATCHES) ** 0.5 + tolerance.ulps * size
        return (self.compiled / BATCHES) ** 0.5 / bound


def is_near(cases: Iterable[CaseResult]) -> bool:
    """Whether all that failed is rounding errors little above their bound."""
    failures = [c for case in cases for c in case.failures]
    return bool(failures) and all(c.is_rounding and c.ratio < NEAR for c in failures)


def beyond_bound(built: Built, compiled: Callable[..., Any], kinds: Iterable[str]) -> dict[str, float]:
    """Tensors whose error, pooled over batches of these kinds of lengths, is over its bound, and by what factor."""
    sums: dict[str, _Sums] = defaultdict(_Sums)
    state, source, kinds = State(modules_of(built.step)), CallableSource(built.inputs, BATCH, MAX_LEN), list(kinds)
    for module in state.modules:
        module.train(built.train)
    for seed in range(BATCHES):
        batch = source.make(kinds[seed % len(kinds)], torch.Generator().manual_seed(1000 + seed))
        objective, seen = Objective(None, seed), list[Observed]()
        for function in (built.step, None, compiled):
            state.restore()
            if function is None:
                seen.append(observe_double(built.step, batch, state, objective, seed=seed))
            else:
                seen.append(observe(function, batch, state, objective, seed=seed))
        state.restore()
        _add(sums, *seen)
    return {name: over for name, s in sums.items() if (over := s.excess(Tolerance())) > 1}


def _add(sums: dict[str, _Sums], eager: Observed, exact: Observed, compiled: Observed) -> None:
    for name, reference in exact.tensors.items():
        theirs, mine = eager.tensors.get(name), compiled.tensors.get(name)
        if reference is None or theirs is None or mine is None or not theirs.is_floating_point():
            continue
        s = sums[name]
        s.dtype = theirs.dtype
        s.eager += float((theirs.detach().double() - reference).square().mean())
        s.compiled += float((mine.detach().double() - reference).square().mean())
        s.exact += float(reference.detach().double().square().mean())
