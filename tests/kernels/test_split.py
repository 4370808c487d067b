"""Keys split among programs: the choice, and the portable kernels (on a GPU, or by way of test_interpreter.py)."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from gemopt.kernels.triton import jagged_attention as launch
from gemopt.kernels.triton import split
from gemopt.kernels.triton.tiles import tile_list
from gemopt.ops import jagged_attention, reference
from tests.ops.attention_cases import Case, assert_close, check, draw, run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GEMOPT_FORCE_TRITON") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu

CASES = {
    "softmax": Case((3, 0, 1, 5), (150, 70, 0, 64), spare=2),
    "shared, GQA": Case((2,) * 3, (150, 0, 20), heads=4, kv_heads=2, dv=8, shared=True),
    "causal by positions": Case((3, 1), (150, 20), positions="both", kwargs={"causal": True}),
    "bias, mask, dropout": Case((3, 2), (150, 20), bias="HK", mask="BK", kwargs={"dropout_p": 0.3}),
    "gdpa": Case((3, 0, 1), (150, 70, 0), op="gdpa", kwargs={"activation": "sigmoid"}),
    "gdpa, per head, shared": Case(
        (3,) * 2, (150, 0), op="gdpa", shared=True, kwargs={"activation": ["gelu", "silu"], "post_scale": 0.3}
    ),
}  # fmt: skip


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Always three parts of 64 keys; how often they were put together."""
    combined: list[int] = []
    combine = launch.combine
    monkeypatch.setenv("GEMOPT_TIER", "portable")
    monkeypatch.setattr(launch, "key_parts", lambda *_: (3, 64))
    monkeypatch.setattr(launch, "combine", lambda partial, *rest: (combined.append(len(partial)), combine(partial, *rest)))
    return combined


@runs
@pytest.mark.parametrize("name", CASES)
def test_portable_kernel(name: str, parts: list[int]) -> None:
    check(CASES[name], torch.float32, DEVICE)
    assert parts == [3]


@runs
def test_half(parts: list[int]) -> None:
    check(CASES["softmax"], torch.float16, DEVICE)
    assert parts == [3]


@runs
def test_a_sequence_longer_than_its_bound(parts: list[int]) -> None:
    """The last part has whatever is left."""
    inputs = draw(Case((3, 1), (250, 20)), torch.float32)
    exact, eager = (run(reference.jagged_attention, inputs, dtype) for dtype in (torch.float64, torch.float32))
    inputs.kwargs.update(max_k=100)
    got, again = (run(jagged_attention, inputs, torch.float32, DEVICE) for _ in range(2))
    assert_close(got, eager, exact, torch.float32)
    assert torch.equal(got["out"], again["out"]) and parts == [3, 3]


@runs
def test_tiles_in_parts() -> None:
    x, y = torch.tensor([0, 20, 20, 25]), torch.tensor([0, 100, 140, 143])
    x, y = x.to(DEVICE), y.to(DEVICE)
    whole, found = tile_list(x, y, 30, 16), tile_list(x, y, 30, 16, split=(3, 32))
    want = []
    for first, x_start, x_len, y_start, y_len, b, *_ in whole.records[: int(whole.count[0])].tolist():
        for part, passed in enumerate(min(n, y_len) for n in (0, 32, 64)):
            rest = y_len - passed
            want.append([first, x_start, x_len, y_start + passed, rest if part == 2 else min(rest, 32), b, part])
    assert [r[:7] for r in found.records[: int(found.count[0])].tolist()] == want


@runs
def test_tiles_of_shared_rows() -> None:
    y = torch.tensor([0, 9, 9, 40], device=DEVICE)
    same = torch.tensor([0, 20, 40, 60], device=DEVICE)
    for a, b in (
        (tile_list(20, y, 60, 16), tile_list(same, y, 60, 16)),
        (tile_list(y, 20, 41, 16), tile_list(y, same, 41, 16)),
    ):
        assert torch.equal(a.count, b.count)
        assert torch.equal(a.records[: int(a.count[0]), :6], b.records[: int(b.count[0]), :6])


@pytest.mark.parametrize(
    ("tiles", "keys", "want"),
    [
        (32, 16384, (4, 4096)),  # 128 tiles on 132 multiprocessors
        (8, 16384, (16, 1024)),
        (1, 16384, (64, 256)),
        (131, 16384, (1, 0)),
        (132, 16384, (1, 0)),
        (8, 511, (1, 0)),
        (0, 16384, (1, 0)),
    ],
)
def test_choice(tiles: int, keys: int, want: tuple[int, int]) -> None:
    assert split.key_parts(tiles, keys, 132, 64) == want


def test_every_choice_covers_the_keys() -> None:
    for tiles in (1, 3, 40, 100, 131):
        for keys in (512, 513, 1000, 5000, 100_000):
            parts, step = split.key_parts(tiles, keys, 132, 128)
            assert parts == 1 or (step % 128 == 0 and (parts - 1) * step < keys <= parts * step and step >= split.SHORTEST)
