"""What is kept for offsets is found again in every layer and direction, and never once the offsets may have changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from gemopt.kernels import memo
from gemopt.ops import attention, jagged_attention


def offsets(*values: int) -> Tensor:
    return torch.tensor(values)


def vouched(x: Tensor) -> Tensor:
    memo.vouch_for(x)
    return x


def sums(x: Tensor, y: Tensor, calls: list[int], key: str = "sum") -> Tensor:
    def make() -> Tensor:
        calls.append(1)
        return x + 2 * y

    return memo.remembered(x, y, key, make)


def test_kept_for_the_same_two_offsets_alone() -> None:
    x, y, z, calls = vouched(offsets(0, 3, 5)), vouched(offsets(0, 1, 4)), vouched(offsets(0, 2)), []
    pairs = [(x, y), (y, x), (x, x), (x[:2], z), (x.to(torch.int32), y)]
    for _ in range(2):
        for a, b in pairs:
            torch.testing.assert_close(sums(a, b, calls), a + 2 * b)
    assert len(calls) == len({"xy", "yx", "xx", "xz"}) + 2  # the cast is nobody's promise: made both times
    sums(x, y, calls, "another key")
    assert len(calls) == 7


def test_nothing_is_kept_of_offsets_that_nobody_vouches_for() -> None:
    x, y, calls = offsets(0, 3), vouched(offsets(0, 1)), []
    for _ in range(2):
        sums(x, y, calls)
        sums(y, x, calls)
    assert len(calls) == 4


def test_a_new_step_may_hold_other_lengths_in_the_same_memory() -> None:
    x, calls = offsets(0, 3, 5), []
    for values in ((0, 3, 5), (0, 1, 2)):
        x.copy_(offsets(*values))
        vouched(x)
        for _ in range(2):
            assert sums(x, x, calls).tolist() == [3 * v for v in values]
    assert len(calls) == 2


def test_memory_that_was_freed_and_taken_again_is_another() -> None:
    x = vouched(offsets(*range(50)))
    for i in range(50):
        y = vouched(torch.full((50,), i))
        assert sums(x, y, [])[0] == 2 * i
        del y
    gc.collect()
    vouched(x)
    assert len(memo._KEPT) == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_and_directions_share(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    calls: list[int] = []
    kernels = attention.attention_kernels

    def counting(q: Tensor) -> tuple[Any, Any]:
        forward, backward = kernels(q)

        def run(fn: Any, *args: Any) -> Any:
            spec = next(a for a in args if hasattr(a, "q_offsets"))
            sums(spec.q_offsets, spec.k_offsets, calls)
            return fn(*args)

        return lambda *args: run(forward, *args), lambda *args: run(backward, *args)

    def layers(x: Tensor, o: Tensor) -> Tensor:
        for _ in range(3):
            x = jagged_attention(x, x, x, o, o, 5, 5)
        return x

    monkeypatch.setattr(attention, "attention_kernels", counting)
    torch._dynamo.reset()
    run = torch.compile(layers, backend=backend)
    for lengths in ((0, 3, 7), (0, 0, 7)):
        run(torch.randn(7, 2, 8, requires_grad=True), vouched(offsets(*lengths))).sum().backward()
    assert len(calls) == 2
