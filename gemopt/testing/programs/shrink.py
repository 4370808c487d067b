"""The plainest program that still shows something: delta debugging over a program's decisions.

A decision that is left out falls back to the first, plainest option of its axis. (Zeller and Hildebrandt, Simplifying and
Isolating Failure-Inducing Input, 2002: halves, then quarters, down to single decisions.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.compose import compose
from gemopt.testing.programs.misses import compose_miss
from gemopt.testing.programs.program import Program


def plain(axes: Mapping[str, str], positive: bool = True) -> Program:
    """The program of these decisions, every other one the plainest."""
    choices = Choices(lambda options: options[0], axes)
    return compose(choices) if positive else compose_miss(choices)


def shrink(program: Program, shows: Callable[[Program], bool], budget: int = 60) -> Program:
    """The plainest program found for which ``shows`` is true.

    Args:
        program: one for which it is true.
        shows: asked of candidates, at most ``budget`` times; an exception in it counts as false.
    """
    axes, best = dict(program.axes), program
    tried: set[str] = {program.name}
    size = max(1, len(axes) // 2)
    while budget > 0:
        names, changed = list(axes), False
        for start in range(0, len(names), size):
            candidate = {a: v for a, v in axes.items() if a not in names[start : start + size]}
            made = _made(candidate, program.positive)
            if made is None or made.name in tried or budget <= 0:
                continue
            tried.add(made.name)
            budget -= 1
            if _holds(shows, made):
                axes, best, changed = candidate, made, True
        if size == 1 and not changed:
            break
        size = max(1, size // 2)
    return best


def _made(axes: Mapping[str, str], positive: bool) -> Program | None:
    try:
        return plain(axes, positive)
    except (KeyError, ValueError):
        return None


def _holds(shows: Callable[[Program], bool], program: Program) -> bool:
    try:
        return shows(program)
    except Exception:
        return False
