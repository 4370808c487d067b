"""Runs independent pieces of a kernel side by side, each on one thread.

PyTorch's own parallelism forks and joins inside every operator. A jagged batch is a few dozen small pieces of a dozen
operators each, so joins would dominate; here the pieces are shared out among a few worker threads whose operators run
serially, and there is one join per kernel. Pieces must write to disjoint rows.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

MAX_WORKERS = 8  # more would wait for the interpreter lock


@lru_cache(maxsize=4)
def _pool(pid: int, threads: int, workers: int) -> ThreadPoolExecutor:
    """Workers for this process (a fork keeps no threads) and thread count."""

    def start() -> None:
        torch.get_num_threads()  # lets PyTorch initialise this thread before it is told otherwise
        torch.set_num_threads(max(1, threads // workers))

    return ThreadPoolExecutor(workers, thread_name_prefix="gemopt-cpu", initializer=start)


def _drain(pieces: list[Callable[[], None]], inference: bool) -> None:
    # Grad and inference mode belong to the thread: a new one records gradients, which a kernel must not, and may not
    # write to tensors that its caller made in inference mode.
    with torch.inference_mode(inference), torch.no_grad():
        while pieces:
            try:
                piece = pieces.pop()
            except IndexError:  # another worker took the last one
                return
            piece()


def run(pieces: Sequence[Callable[[], None]], limit: int = MAX_WORKERS) -> None:
    """Run all pieces, the first ones first; the first exception is raised after all workers stopped.

    limit: no more workers than this; pieces that do not need the interpreter lock can do with many.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(pieces) < 2:
        for piece in pieces:
            piece()
        return
    waiting = list(reversed(pieces))
    workers = min(threads, limit)
    pool = _pool(os.getpid(), threads, workers)
    futures = [pool.submit(_drain, waiting, torch.is_inference_mode_enabled()) for _ in range(min(workers, len(pieces)))]
    errors = [future.exception() for future in futures]
    # A worker that sets its thread count also sets the default of threads yet to be born; this undoes that.
    torch.set_num_threads(threads)
    for error in errors:
        if error is not None:
            raise error
