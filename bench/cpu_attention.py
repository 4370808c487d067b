"""Jagged attention against padded SDPA on the CPU, forward plus backward.

    python bench/cpu_attention.py [--json artifacts/cpu_attention.json]

Batch 128, 2 heads, head_dim 32, fp32. Lengths follow the histories of MovieLens-100K: at least 20, median near 65, a heavy
tail, cut at the padded length. `padded` is `F.scaled_dot_product_attention` over the padded batch with the key mask and
the causal mask as one bool mask, as a padded model has to call it; `full` rows have every sequence at the padded length.
Steps of the two alternate in one process; times are medians in milliseconds.
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from gemopt.kernels.cpu.plan import clear_cache
from gemopt.ops import jagged_attention

BATCH, HEADS, HEAD_DIM = 128, 2, 32


def history_lengths(batch: int, longest: int, generator: torch.Generator) -> Tensor:
    """Lengths of a log-normal shape: minimum 20, median 65."""
    draw = torch.exp(math.log(65) + torch.randn(batch, generator=generator))
    return draw.round().clamp(20, longest).to(torch.int64)


def padded_step(lengths: Tensor, longest: int, dtype: torch.dtype, last: bool) -> Callable[[], None]:
    n = lengths.shape[0]
    rows = 1 if last else longest
    q = torch.randn(n, rows, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(n, longest, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(2))
    keys = (torch.arange(longest) < lengths[:, None])[:, None, None]
    mask = keys if last else keys & torch.ones(longest, longest, dtype=torch.bool).tril()
    dout = torch.randn(n, HEADS, rows, HEAD_DIM, dtype=dtype)

    def step() -> None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.autograd.grad(out, (q, k, v), dout)

    return step


def jagged_step(lengths: Tensor, longest: int, dtype: torch.dtype, last: bool, cold: bool) -> Callable[[], None]:
    offsets = pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    rows = len(lengths) if last else total
    q = torch.randn(rows, HEADS, HEAD_DIM, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(total, HEADS, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(2))
    q_offsets = torch.arange(len(lengths) + 1) if last else offsets
    positions = {"q_positions": lengths - 1} if last else {}
    dout = torch.randn(rows, HEADS, HEAD_DIM, dtype=dtype)

    def step() -> None:
        if cold:  # new lengths every step: the plan is made once per step
            clear_cache()
        out = jagged_attention(q, k, v, q_offsets, offsets, 1 if last else longest, longest, causal=True, **positions)
        torch.autograd.grad(out, (q, k, v), dout)

    return step


def race(steps: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each step, run in turns."""
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="time per row")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    parser.add_argument("--longest", type=int, nargs="*", default=[200, 700])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    rows = []
    print(" lengths   max  queries  fill  padded ms  jagged ms  with plan  speedup")
    for longest in args.longest:
        for shape in ("history", "full", "last"):
            generator = torch.Generator().manual_seed(0)
            lengths = history_lengths(BATCH, longest, generator)
            if shape == "full":
                lengths = torch.full_like(lengths, longest)
            last = shape == "last"
            ms = race(
                {
                    "padded": padded_step(lengths, longest, dtype, last),
                    "jagged": jagged_step(lengths, longest, dtype, last, cold=False),
                    "cold": jagged_step(lengths, longest, dtype, last, cold=True),
                },
                args.seconds,
            )
            row = {
                "lengths": "full" if shape == "full" else "history",
                "max": longest,
                "queries": "last" if last else "all",
                "fill": float(lengths.float().mean() / longest),
                **{f"{name}_ms": value for name, value in ms.items()},
                "speedup": ms["padded"] / ms["cold"],
            }
            rows.append(row)
            print(
                f"{row['lengths']:>8} {longest:>5} {row['queries']:>8} {row['fill']:>5.2f} {ms['padded']:>10.2f} "
                f"{ms['jagged']:>10.2f} {ms['cold']:>10.2f} {row['speedup']:>7.2f}x",
                flush=True,
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps(
                {
                    "benchmark": "cpu_attention",
                    "batch": BATCH,
                    "heads": HEADS,
                    "head_dim": HEAD_DIM,
                    "dtype": args.dtype,
                    "threads": args.threads,
                    "torch": torch.__version__,
                    "machine": platform.processor() or platform.machine(),
                    "rows": rows,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
