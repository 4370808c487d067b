"""A small draw of generated programs through the rewriter; ``python -m gemopt.testing.programs`` runs thousands.

Positive programs must come out equal; near misses too, whatever is done with them.
"""

from __future__ import annotations

import pytest

from gemopt.testing.programs import run, sample, sample_near_miss
from tests.hostile.common import sweep

CASES = ("given", "holes", "zeros")
SEEDS = [*range(10_000, 10_005), *(pytest.param(seed, marks=sweep) for seed in range(10_005, 10_008))]


@pytest.mark.parametrize("seed", SEEDS)
def test_positive_programs_are_right(seed: int) -> None:
    outcome = run(sample(seed), cases=CASES)
    assert outcome.right, str(outcome)


@pytest.mark.parametrize("seed", SEEDS)
def test_near_misses_are_right(seed: int) -> None:
    outcome = run(sample_near_miss(seed), cases=CASES)
    assert outcome.right or outcome.verdict == "invalid", str(outcome)


def test_plain_spellings_are_rewritten() -> None:
    """The commonest forms of every family that has one."""
    plain = {
        "structure": "none",
        "padding": "key",
        "validity": "lengths",
        "demand": "mean",
        "precision": "fp32",
        "bias": "none",
    }
    plain |= {"layers": "1", "layout": "bhld", "kv_heads": "all", "qk": "matmul", "softmax": "F.softmax"}
    for family in ("softmax", "sdpa", "mha", "encoder"):
        fixed = {**plain, "family": family}
        outcome = run(sample(1, fixed), cases=("given",))
        assert outcome.verdict == "rewritten", str(outcome)


@pytest.mark.parametrize("seed", [20_000])
def test_programs_through_torch_compile(seed: int) -> None:
    for program in (sample(seed), sample_near_miss(seed)):
        outcome = run(program, inner="aot_eager", cases=("given", "other"))
        assert outcome.right, str(outcome)


@pytest.mark.parametrize(
    "axes",
    [
        {"family": "softmax", "layout": "bhld", "kv_heads": "half", "qk": "flat_bmm"},  # [B, 4] beside [B, 2, 2]
        {"family": "pffn", "generated": "0", "layout": "bhld", "score_function": "activation", "act": "identity"},
        {"family": "pffn", "generated": "2", "layout": "merged", "score_function": "softmax"},
    ],
    ids=["key heads repeated and merged", "a memory without a score function", "one key"],
)
def test_spellings_that_were_refused_once(axes: dict[str, str]) -> None:
    outcome = run(sample(1, {"demand": "mean", "precision": "fp32", **axes}), cases=("given", "zeros"))
    assert outcome.verdict == "rewritten", str(outcome)
