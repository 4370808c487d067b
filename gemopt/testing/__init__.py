"""Checks for users and for gemopt itself: is the compiled model the model?

    gemopt.testing.assert_equivalent(model, (ids, lengths))

`strategies` (needs hypothesis) draws lengths, masks and batches; `poison` shows which rows can be observed.
"""

from __future__ import annotations

from gemopt.testing.compare import Comparison, Tolerance
from gemopt.testing.equivalence import DEFAULT_CASES, assert_equivalent
from gemopt.testing.inputs import Batch
from gemopt.testing.lengths import CASES, draw_lengths
from gemopt.testing.result import CaseResult, EquivalenceError, EquivalenceResult

__all__ = [
    "CASES",
    "DEFAULT_CASES",
    "Batch",
    "CaseResult",
    "Comparison",
    "EquivalenceError",
    "EquivalenceResult",
    "Tolerance",
    "assert_equivalent",
    "draw_lengths",
]
