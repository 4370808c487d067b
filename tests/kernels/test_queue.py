"""Tiles that programs draw (gemopt/kernels/gluon/queue.py): on threads of the CPU in random orders of events.

Programs run one after the other there, so the first draws nearly everything; what their roles do is interleaved.
"""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs compiled triton", allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemopt.kernels.gluon.queue import new_queue
from tests.kernels import gluon_threads


@gluon.jit
def produce(queue, drawn_by):
    t = queue.first()
    i = 0
    while t >= 0:
        gl.store(drawn_by + t, gl.program_id(0))
        t = queue.draw(i, t)
        i += 1


@gluon.jit
def consume(queue, seen, WORDS: gl.constexpr):
    """Counts each item, and writes down what its tile says."""
    t = queue.first()
    i = 0
    while t >= 0:
        head, first, x_start, x_len, y_start, y_len = queue.tile(t)
        gl.store(seen + t * WORDS, gl.load(seen + t * WORDS) + 1)
        gl.store(seen + t * WORDS + 1, head)
        gl.store(seen + t * WORDS + 2, first + x_start + x_len + y_start + y_len + queue.seventh(t))
        t = queue.take(i)
        i += 1


@gluon.jit
def hand_out(tiles, count, heads, drawn_by, seen, other_seen, FIXED: gl.constexpr, WORDS: gl.constexpr):
    queue = new_queue(tiles, count, heads, 2, FIXED)
    roles = [(consume, (queue, seen, WORDS)), (consume, (queue, other_seen, WORDS)), (produce, (queue, drawn_by))]
    gl.warp_specialize(roles, [4, 1], [240, 24])


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("tiles", "heads", "programs"), [(9, 2, 3), (2, 1, 5), (5, 3, 1), (0, 2, 2), (1, 1, 1), (7, 1, 7)])
def test_every_item_is_handed_to_every_consumer_once(tiles: int, heads: int, programs: int, fixed: bool) -> None:
    run = gluon_threads.Plain(_barrier=lambda: None, uniform=lambda x: gluon_threads.Scalar(int(x)))(hand_out)
    records = torch.randint(0, 99, (tiles + 1, 8), dtype=torch.int32)
    count = torch.tensor([tiles, 0], dtype=torch.int32)
    items = tiles * heads
    want = [[1, t % heads, int(records[t // heads, :5].sum() + records[t // heads, 6])] for t in range(items)]
    for seed in range(6):  # the same list again and again: the counter sets itself back
        drawn_by = torch.full((items + 1,), -1, dtype=torch.int32)
        seen = [torch.zeros(items + 1, 3, dtype=torch.int32) for _ in range(2)]
        arguments = {"tiles": records, "count": count, "heads": heads, "drawn_by": drawn_by}
        arguments |= {"seen": seen[0], "other_seen": seen[1], "FIXED": fixed, "WORDS": 3}
        gluon_threads.launch(run, arguments, programs, seed)
        assert count.tolist() == [tiles, 0]
        assert seen[0][:items].tolist() == want == seen[1][:items].tolist()
        assert drawn_by[items] == -1 and seen[0][items].tolist() == [0, 0, 0]
        firsts = min(programs, items)
        assert drawn_by[:firsts].tolist() == list(range(firsts))
        if fixed:
            assert drawn_by[:items].tolist() == [t % programs for t in range(items)]
