"""Compile for tests: packed at every fill where anything is saved, errors of passes raised."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemopt
from gemopt.testing import EquivalenceError, EquivalenceResult, assert_equivalent

from ..models.parts import SequenceModel
from ..models.registry import ids_for

#: For long lists that look for what the quick ones miss: GEMOPT_TEST_SWEEP=1 runs them.
SWEEPING = bool(os.environ.get("GEMOPT_TEST_SWEEP"))
sweep = pytest.mark.skipif(not SWEEPING, reason="set GEMOPT_TEST_SWEEP=1")


def compiled(model: Callable[..., Any], inner: str = "eager", **recipe: Any) -> Any:
    """`gemopt.compile` with packing forced as far as the cost rule allows.

    `inner="eager"` differentiates the packed graph by eager autograd, which is quick to compile;
    `"aot_eager"` goes through AOTAutograd.
    """
    settings = {"min_saving": 0.0, "strict": True, "inner": inner, **recipe}
    return gemopt.compile(model, recipe=gemopt.Recipe(**settings))


def same(
    model: Callable[..., Any], batch: Any, subject: Any = None, *, may_raise: bool = False, **options: Any
) -> EquivalenceResult:
    """`assert_equivalent` on this one batch. `may_raise`: an exception of both models is equivalence too."""
    subject = subject if subject is not None else compiled(model)
    try:
        return assert_equivalent(model, batch, compiled=subject, cases=("given",), **options)
    except EquivalenceError as error:
        if may_raise and error.result.cases and error.result.cases[0].error:
            return error.result
        raise


def path(result: EquivalenceResult) -> str:
    return result.cases[0].path


def sequence_model(seed: int = 0, **choices: Any) -> SequenceModel:
    torch.manual_seed(seed)
    return SequenceModel(**choices)


def batch_of(lengths: list[int], max_len: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    """ids `[B, max_len]` and the lengths given; ids are cut at the lengths where these make sense."""
    n = torch.tensor(lengths, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    return ids_for(n.clamp(0, max_len), max_len, generator), n


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
