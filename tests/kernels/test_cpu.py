"""The CPU kernels' own machinery: plans and workers."""

import os
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemopt.kernels.cpu import workers
from gemopt.kernels.cpu.plan import Plan, clear_cache, plan
from gemopt.ops import jagged_attention
from tests.ops.attention_cases import offsets_of

LENGTHS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make(q_lens: tuple[int, ...], k_lens: tuple[int, ...]) -> Plan:
    return plan(offsets_of(q_lens), offsets_of(k_lens), sum(q_lens), sum(k_lens))


@given(lengths=LENGTHS)
def test_every_row_with_work_is_in_one_group(lengths: list[tuple[int, int]]) -> None:
    q_lens, k_lens = tuple(q for q, _ in lengths), tuple(k for _, k in lengths)
    made = make(q_lens, k_lens)
    q_rows, k_rows = [], []
    for group in made.groups:
        for side, rows in ((group.q, q_rows), (group.k, k_rows)):
            assert side.gather.shape == side.scatter.shape == (side.n * side.length,)
            rows += side.gather[side.valid.view(-1)].tolist()
            # Padding reads a row of its own sequence.
            owner = side.gather.view(side.n, side.length)
            starts, ends = torch.tensor(side.starts), torch.tensor(side.starts) + side.lens
            assert ((owner >= starts[:, None]) & (owner < ends[:, None])).all()
            assert (side.scatter.view(side.n, side.length)[~side.valid] == side.total).all()
    for single in made.single:
        q_rows += single.q_rows.tolist()
        k_rows += single.take_k(torch.arange(sum(k_lens))).tolist()
    for seen, mine, other in ((q_rows, q_lens, k_lens), (k_rows, k_lens, q_lens)):
        bounds = pairwise(offsets_of(mine).tolist())
        want = [r for (a, b), n in zip(bounds, other, strict=True) if n for r in range(a, b)]
        assert sorted(seen) == want
    assert made.q_covered == (len(q_rows) == sum(q_lens)) and made.k_covered == (len(k_rows) == sum(k_lens))


def test_plans_are_shared_by_content() -> None:
    clear_cache()
    assert make((3, 5), (3, 5)) is make((3, 5), (3, 5))
    assert make((3, 5), (3, 5)) is not make((3, 6), (3, 6))


def test_equal_neighbours_are_a_view() -> None:
    (group,) = make((20, 20, 20), (20, 20, 20)).groups
    packed = torch.randn(60, 2, 4)
    assert group.q.strided and group.q.take(packed).data_ptr() == packed.data_ptr()


def test_padding_stays_small() -> None:
    lengths = tuple(torch.randint(20, 700, (128,)).tolist())
    groups = make(lengths, lengths).groups
    assert sum(g.q.n * g.q.length for g in groups) < 1.1 * sum(lengths)


def test_workers_run_everything(two_threads: None) -> None:
    done: list[int] = []
    workers.run([lambda i=i: done.append(i) for i in range(50)])
    assert sorted(done) == list(range(50)) and torch.get_num_threads() == 2


def test_workers_raise_the_error_of_a_piece(two_threads: None) -> None:
    def fail() -> None:
        raise KeyError("piece")

    with pytest.raises(KeyError, match="piece"):
        workers.run([lambda: None, fail, lambda: None])
    test_workers_run_everything(two_threads)


def test_workers_leave_new_threads_alone(two_threads: None) -> None:
    workers.run([lambda: None] * 4)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]


def test_workers_record_no_gradients(two_threads: None) -> None:
    x = torch.ones(3, requires_grad=True)
    seen: list[bool] = []
    with torch.no_grad():
        workers.run([lambda: seen.append((x * 2).requires_grad)] * 4)
    assert seen == [False] * 4


def test_thread_counts_agree() -> None:
    """One thread and several give the same bits."""
    q, k, v = (torch.randn(700, 2, 8) for _ in range(3))
    offsets = offsets_of((200, 31, 33, 36, 7, 193, 200))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(jagged_attention(q, k, v, offsets, offsets, 200, 200, causal=True))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork(two_threads: None) -> None:
    """Pool threads do not survive a fork; a child must make its own."""
    workers.run([lambda: None] * 4)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        workers.run([lambda: done.append(1)] * 4)
        os._exit(0 if len(done) == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
