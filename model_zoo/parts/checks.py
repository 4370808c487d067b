"""Checks of sizes that several parts share; each names the argument, what was given and what is allowed."""

from __future__ import annotations


def check_heads(d: int, n_heads: int) -> None:
    if n_heads < 1 or d % n_heads:
        raise ValueError(f"n_heads: got {n_heads}; allowed: a divisor of the width {d}")


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}; allowed: 1 or more")


def check_choice(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{name}: got {given!r}; allowed: {', '.join(allowed)}")
