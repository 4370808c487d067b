"""A registry of small padded models, each written the way somebody would really write it.

Every entry is a `ModelCase`: `case.make(seed)` gives `(module_or_function, inputs)` with
`inputs(lengths, max_len, generator) -> args`, the form `gemopt.testing.assert_equivalent` takes. `expected`
says what the compiler owes:

- `"rewritten"`: at least one rewrite; the padded rows are not computed.
- `"refused"`: the padding is observed; at least one rejection with a reason, and no row is dropped.
- `"nothing"`: no padded attention at all; the model runs as under torch.compile and the report says so.
- `"any"`: rewriting and refusing are both right, a wrong number is not.

Nothing here imports the rewriter: the cases come from how people write models, not from what it matches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Expected = Literal["rewritten", "refused", "nothing", "any"]
Inputs = Callable[[torch.Tensor, int, torch.Generator], Any]
Make = Callable[[int], tuple[Callable[..., Any], Inputs]]

#: No two of these are equal, so that equal sizes never stand in for equal axes by luck.
DIM, HEADS, FF, VOCAB, MAX_LEN = 16, 2, 24, 53, 40


@dataclass(frozen=True)
class ModelCase:
    """One padded model and what the compiler owes it. `why` is the point of the case in one sentence."""

    name: str
    make: Make
    expected: Expected
    why: str
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


CASES: dict[str, ModelCase] = {}


def register(expected: Expected, why: str, *tags: str, name: str | None = None) -> Callable[[Make], Make]:
    """Decorator that files `make(seed)` under its name; a name may be used once only."""

    def add(make: Make) -> Make:
        key = name or make.__name__
        if key in CASES:
            raise ValueError(f"two model cases are called {key!r}")
        CASES[key] = ModelCase(key, make, expected, why, frozenset(tags))
        return make

    return add


def select(*, expected: Expected | None = None, tag: str | None = None) -> list[ModelCase]:
    """The cases with this expectation and this tag, in registration order."""
    return [
        case
        for case in CASES.values()
        if (expected is None or case.expected == expected) and (tag is None or tag in case.tags)
    ]


# --- inputs


def valid_mask(lengths: torch.Tensor, max_len: int) -> torch.Tensor:
    """Bool `[B, max_len]`, true before each length."""
    return torch.arange(max_len)[None, :] < lengths[:, None]


def ids_for(lengths: torch.Tensor, max_len: int, generator: torch.Generator) -> torch.Tensor:
    """Item ids `[B, max_len]` in 1..VOCAB-1, zero from each length on."""
    ids = torch.randint(1, VOCAB, (len(lengths), max_len), generator=generator)
    return ids * valid_mask(lengths, max_len)


def ids_and_lengths(lengths: torch.Tensor, max_len: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return ids_for(lengths, max_len, generator), lengths.clone()


def ids_only(lengths: torch.Tensor, max_len: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (ids_for(lengths, max_len, generator),)


def ids_and_mask(lengths: torch.Tensor, max_len: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return ids_for(lengths, max_len, generator), valid_mask(lengths, max_len)


def floats_and_lengths(lengths: torch.Tensor, max_len: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Float tokens `[B, max_len, DIM]` whose padding is ordinary noise, not zero."""
    return torch.randn(len(lengths), max_len, DIM, generator=generator), lengths.clone()


def floats_and_mask(lengths: torch.Tensor, max_len: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    tokens = torch.randn(len(lengths), max_len, DIM, generator=generator)
    return tokens, valid_mask(lengths, max_len)
