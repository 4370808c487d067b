"""Attention programs, composed: thousands of spellings that mean attention over padded sequences, and near misses.

    program = sample(7)              # or a Hypothesis strategy: positive(), near_misses()
    print(program)                   # its decisions and its source, which runs by itself
    outcome = run(program)           # through gemopt, against fp64 eager, forward and backward

``python -m gemopt.testing.programs`` runs many and prints a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemopt.testing.programs import choices
from gemopt.testing.programs.compose import compose
from gemopt.testing.programs.misses import compose_miss
from gemopt.testing.programs.program import Program
from gemopt.testing.programs.runner import Outcome, run

__all__ = ["Outcome", "Program", "near_misses", "positive", "run", "sample", "sample_near_miss"]


def sample(seed: int, fixed: Mapping[str, str] | None = None) -> Program:
    """The positive program of a seed. ``fixed`` decides some axes beforehand: ``{"family": "sdpa"}``."""
    return compose(choices.seeded(seed, fixed))


def positive(fixed: Mapping[str, str] | None = None) -> Any:
    """A Hypothesis strategy of positive programs: every attention can run on fewer rows than the padded ones."""
    from hypothesis import strategies as st

    return st.composite(lambda draw: compose(choices.hypothesis(draw, fixed)))()


def sample_near_miss(seed: int, fixed: Mapping[str, str] | None = None) -> Program:
    """The near miss of a seed."""
    return compose_miss(choices.seeded(seed, fixed))


def near_misses(fixed: Mapping[str, str] | None = None) -> Any:
    """A Hypothesis strategy of near misses: whatever is done with them, they equal eager."""
    from hypothesis import strategies as st

    return st.composite(lambda draw: compose_miss(choices.hypothesis(draw, fixed)))()
