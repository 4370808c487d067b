"""Where a composer of programs takes its decisions from: a seed, or Hypothesis. Every decision is kept by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Options = Mapping[str, int] | Sequence[str] | Iterable[str]


class Choices:
    """Named decisions.

    Args:
        draw: picks one element of a list; elements may repeat, which makes them likelier.
        fixed: decisions taken beforehand, by axis; an option that is not on offer is ignored.
    """

    def __init__(self, draw: Callable[[list[str]], str], fixed: Mapping[str, str] | None = None) -> None:
        self._draw = draw
        self._fixed = dict(fixed or {})
        self.axes: dict[str, str] = {}

    def pick(self, axis: str, options: Options) -> str:
        """One of ``options``, a sequence or a mapping from option to weight. The first is the plainest."""
        weights = dict(options) if isinstance(options, Mapping) else dict.fromkeys(options, 1)
        if not weights:
            raise ValueError(f"options: got none for axis {axis!r}; allowed: at least one")
        if self._fixed.get(axis) in weights:
            chosen = self._fixed[axis]
        elif len(weights) == 1:
            chosen = next(iter(weights))
        else:
            chosen = self._draw([option for option, weight in weights.items() for _ in range(weight)])
        self.axes[axis] = chosen
        return chosen

    def fix(self, decisions: Mapping[str, str]) -> None:
        """Take decisions beforehand, as ``fixed`` does."""
        self._fixed.update(decisions)

    def spell(self, axis: str, *spellings: str) -> str:
        """One of several spellings of the same thing, each equally likely; the axis keeps its number."""
        number = self.pick(axis, [str(i) for i in range(len(spellings))])
        return spellings[int(number)]

    def chance(self, axis: str, one_in: int) -> bool:
        """True once in ``one_in`` draws."""
        return self.pick(axis, {"no": one_in - 1, "yes": 1}) == "yes"


def seeded(seed: int, fixed: Mapping[str, str] | None = None) -> Choices:
    """Decisions of a pseudo-random generator: the same seed gives the same program."""
    return Choices(random.Random(seed).choice, fixed)


def hypothesis(draw: Any, fixed: Mapping[str, str] | None = None) -> Choices:
    """Decisions of Hypothesis, which shrinks a failing program towards the first option of every axis."""
    from hypothesis import strategies as st

    return Choices(lambda options: draw(st.sampled_from(options)), fixed)
