"""The generator itself: distinct programs that run by themselves, whose padding is dead, and whose near misses run too."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from gemopt.testing.lengths import draw_lengths
from gemopt.testing.programs import Program, near_misses, positive, run, sample, sample_near_miss

SEEDS = range(400)


def _call(program: Program, change: bool = False) -> tuple[torch.Tensor, ...]:
    """The outputs on a batch; ``change`` moves every float input and every id that the true mask calls padding."""
    model, make = program.build()
    generator = torch.Generator().manual_seed(3)
    lengths = draw_lengths("given", program.batch, program.max_len, generator)
    lengths = lengths.clamp(max(program.shortest, 1), program.max_len - program.margin)
    given_ = make(lengths, program.max_len, torch.Generator().manual_seed(4))
    if change:
        _move_padding(program, given_, lengths)
    context = torch.autocast("cpu", program.autocast) if program.autocast else contextlib.nullcontext()
    with context, torch.no_grad():
        out = model(**given_)
    return out if isinstance(out, tuple) else (out,)


def _move_padding(program: Program, inputs: dict[str, torch.Tensor], lengths: torch.Tensor) -> None:
    padding = torch.arange(program.max_len) >= lengths[:, None]
    for name in ("tokens", "target"):
        if name in inputs and inputs[name].shape[:2] == padding.shape:
            x = inputs[name]
            at = padding.view(*padding.shape, *[1] * (x.dim() - 2))
            inputs[name] = torch.where(at, x.detach() * 3 + 5, x.detach())
    if "ids" in inputs and program.axes["validity"] != "ids" and inputs["ids"].shape == padding.shape:
        inputs["ids"] = torch.where(padding, (inputs["ids"] * 7 + 3) % 40, inputs["ids"])


def test_seeds_give_distinct_programs_and_the_same_one_again() -> None:
    names = [sample(seed).name for seed in SEEDS] + [sample_near_miss(seed).name for seed in SEEDS]
    assert len(set(names)) >= 0.98 * len(names)
    assert sample(11).source == sample(11).source


def test_every_axis_shows_most_of_its_values() -> None:
    seen: dict[str, set[str]] = {}
    for seed in SEEDS:
        for axis, value in sample(seed).axes.items():
            seen.setdefault(axis, set()).add(value)
    counts = {"family": 12, "layout": 8, "qk": 7, "scale": 9, "mask_spelling": 11, "softmax": 11, "act": 9}
    counts |= {"fill": 5, "structure": 6, "demand": 12, "validity": 5, "bias": 5, "normalisation": 5}
    for axis, count in counts.items():
        assert len(seen[axis]) >= count, (axis, seen[axis])


@pytest.mark.parametrize("seed", range(0, 200, 2))
def test_padding_of_a_positive_is_dead(seed: int) -> None:
    program = sample(seed)
    before, after = _call(program), _call(program, change=True)
    tolerance = 3e-2 if program.dtype == torch.bfloat16 or "autocast" in program.axes["precision"] else 1e-4
    for x, y in zip(before, after, strict=True):
        assert x.isfinite().all(), program
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m: f"{m}\n{program}")


def test_padding_of_some_near_misses_is_alive() -> None:
    """Otherwise the test above could not fail."""
    alive = 0
    for seed in range(60):
        program = sample_near_miss(seed, {"miss": "end"})
        pairs = zip(_call(program), _call(program, change=True), strict=True)
        alive += any(not torch.allclose(x, y, atol=1e-3) for x, y in pairs)
    assert alive >= 10


@settings(max_examples=25, deadline=None)
@given(near_misses())
def test_near_misses_run(program: Program) -> None:
    assert not program.positive
    _call(program)


@settings(max_examples=10, deadline=None)
@given(positive({"family": "softmax", "layout": "merged"}))
def test_axes_can_be_fixed(program: Program) -> None:
    assert (program.axes["family"], program.axes["layout"]) == ("softmax", "merged")


def test_source_runs_by_itself() -> None:
    done = subprocess.run([sys.executable, "-c", sample(5).source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "tensor" in done.stdout, done.stderr


def test_runner_sees_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose packed graph is off by a little is called wrong."""
    from gemopt.testing.programs import runner

    class Off(runner.ForcedPlan):
        def packed(self, *args: object) -> list[torch.Tensor]:
            return [x * 1.001 for x in self._plan.packed(*args)]

    monkeypatch.setattr(runner, "ForcedPlan", Off)
    plain = {"family": "mha", "padding": "key", "demand": "mean", "precision": "fp32"}
    outcome = run(sample(0, plain), cases=("given",), confirm=False)
    assert outcome.verdict == "wrong", str(outcome)


def test_runner_refuses_unknown_cases() -> None:
    with pytest.raises(ValueError, match="cases"):
        run(sample(0), cases=("nothing",))
