"""Tile lists, and rows read and written by number, against the same made in Python.

Runs on a GPU, or under the interpreter (test_interpreter.py).
"""

import importlib.util
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from gemopt.kernels.triton.tiles import TileList, sequence_list, tile_list
from gemopt.ops import pack, unpack

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("GEMOPT_FORCE_TRITON") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
LENGTHS = st.lists(st.tuples(st.sampled_from([0, 1, 5, 16, 17, 40]), st.sampled_from([0, 1, 7, 16, 33])), max_size=20)


def offsets(lengths: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, dtype)


def records(found: TileList, words: int) -> list[tuple[int, ...]]:
    return [tuple(r[:words]) for r in found.records[: int(found.count[0])].tolist()]


@settings(max_examples=15, deadline=None)
@given(LENGTHS, st.sampled_from([0, 3, 20]), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_tiles(lengths: list[tuple[int, int]], spare: int, in_order: bool, dtype: torch.dtype) -> None:
    x, y = ([pair[i] for pair in lengths] for i in (0, 1))
    x_at, y_at = offsets(x, dtype), offsets(y, dtype)
    found = records(tile_list(x_at, y_at, sum(x) + spare, 16, in_order), 6)
    sequences = list(range(len(x) + 1))
    x, y = [*x, spare], [*y, 0]
    if not in_order:
        sequences.sort(key=lambda b: -y[b])
    want = []
    for b in sequences:
        y_start = sum(y[:b])
        want += [(first, sum(x[:b]), x[b], y_start, y[b], b) for first in reversed(range(0, x[b], 16))]
    assert found == want


@settings(max_examples=15, deadline=None)
@given(LENGTHS, st.sampled_from([0, 3, 20]), st.sampled_from([0, 4]), st.sampled_from([torch.int32, torch.int64]))
def test_sequences(lengths: list[tuple[int, int]], x_spare: int, y_spare: int, dtype: torch.dtype) -> None:
    x, y = ([pair[i] for pair in lengths] for i in (0, 1))
    x_at, y_at = offsets(x, dtype), offsets(y, dtype)
    found = records(sequence_list(x_at, y_at, sum(x) + x_spare, sum(y) + y_spare), 7)
    last = len(x)
    x, y = [*x, x_spare], [*y, y_spare]
    sequences = sorted((b for b in range(last + 1) if x[b] or y[b]), key=lambda b: -x[b] * y[b])
    want = []
    for b in sequences:
        unseen = y[b] if b == last or x[b] == 0 else 0
        want.append((0, sum(x[:b]), x[b], sum(y[:b]), 0 if b == last else y[b], b, unseen))
    assert found == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("named", [[], [1, 4], [1, 4, 7, 7], [7, 7]], ids=str)
def test_rows_by_number(named: list[int], dtype: torch.dtype) -> None:
    """The number of rows names none: pack repeats the first, unpack leaves it out."""
    for width in ((), (2, 5), (1500,)):
        x = torch.randn(7, *width, generator=torch.Generator().manual_seed(0)).to(dtype)
        index = torch.tensor(named, dtype=torch.int64)
        packed = pack(x.to(DEVICE), index.to(DEVICE))
        first = x[named[0]] if named and named[0] < 7 else torch.zeros_like(x[0])
        for t, i in enumerate(named):
            assert torch.equal(packed[t].cpu(), x[i] if i < 7 else first)
        expected = torch.zeros_like(x)
        expected[index[index < 7]] = x[index[index < 7]]
        assert torch.equal(unpack(packed, index.to(DEVICE), 7).cpu(), expected)
