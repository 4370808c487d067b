"""Attention kernels on a GPU, against each other and against cuBLAS, in one process.

    python bench/kernels.py                      # the whole grid
    python bench/kernels.py --cells gdpa-jagged,block --rounds 1
    python bench/kernels.py --peer my_peer.py    # with contestants(cell, data) -> {name: {"forward": f, "backward": g}}
    python bench/kernels.py --plot-only          # docs/kernels.png and docs/roofline.png from bench/results; no GPU needed

Protocol: matrix kernels of this kind run into the board's power limit, and the clock falls as they warm the chip. So all
contestants of a cell, a cuBLAS product of 8192³ and a copy of 1 GiB take turns in one process, each for at least
--milliseconds at a time, --rounds times, after a warm-up; what counts is the ratio of medians within a cell. Launches are
replayed as CUDA graphs where a contestant can be captured: host time is not measured here. Clock and power are read after
every round.

A contestant that fails in a cell is left out there, with the reason in the record; if it is one of gemopt's own, the command
ends with exit code 1 after all cells.

FLOPs are those the result needs: 4·H·D·Σ visible pairs forward, 2.5 times that backward. Bytes count every tensor once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import _harness, _kernel_plots
from bench._kernel_plots import COPY, CUBLAS
from gemopt.kernels.spec import AttentionSpec
from gemopt.ops import pffn
from gemopt.ops.dispatch import attention_kernels

Run = Callable[[], object]
BATCH = 1152
SCALE = 0.09
OURS = "gemopt"


@dataclass(frozen=True)
class Cell:
    """One row of the grid. Lengths: an int is every sequence's, ("U", n) draws from 1..n."""

    q: Any
    k: Any = None  # None: the queries' lengths
    act: str = "softmax"
    window: tuple[int, int] = (-1, -1)
    causal: bool = False
    block: int = 0
    heads: int = 4
    dim: int = 128
    batch: int = BATCH
    op: str = "attention"
    shared: bool = False  # one set of queries for all sequences


def grid() -> dict[str, Cell]:
    cells = {
        "gdpa-jagged": Cell(("U", 2048), act="gelu"),
        "gdpa-dense": Cell(2048, act="gelu"),
        "gdpa-short": Cell(("U", 256), act="gelu"),
        "gdpa-pffn": Cell(2048, 256, act="gelu"),
        "pma": Cell(192, ("U", 2048)),
        "pma-shared": Cell(192, ("U", 2048), shared=True),
        "pma-long": Cell(32, 16384, batch=8, shared=True),
        "softmax-jagged": Cell(("U", 2048)),
        "softmax-dense": Cell(2048),
        "softmax-short": Cell(("U", 256)),
        "window": Cell(2048, window=(50, 50), batch=256),
        "full-for-window": Cell(2048, batch=256),
        "block": Cell(("U", 2048), block=64),
        "hstu": Cell(2048, act="silu", causal=True, batch=256),
        "pffn-block": Cell(2048, 128, act="gelu", op="pffn"),
        "pffn-block-mixed": Cell(2048, 128, act="gelu", op="pffn-mixed", batch=576),
    }
    narrow = {"gdpa-jagged", "gdpa-short", "gdpa-pffn", "softmax-jagged", "block", "pma"}
    for name in sorted(narrow):
        cells[f"{name}-64"] = Cell(**{**vars(cells[name]), "heads": 3, "dim": 64})
    return cells


@dataclass
class Data:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    spec: AttentionSpec
    q_lens: list[int]
    k_lens: list[int]


def draw(cell: Cell, seed: int = 0) -> Data:
    gen = torch.Generator().manual_seed(seed)

    def lengths(what: Any) -> list[int]:
        return (
            torch.randint(1, what[1] + 1, (cell.batch,), generator=gen).tolist()
            if isinstance(what, tuple)
            else [what] * cell.batch
        )

    q_lens = lengths(cell.q)
    k_lens = q_lens if cell.k is None else lengths(cell.k)
    values = torch.Generator("cuda").manual_seed(seed)

    def normal(lens: list[int]) -> Tensor:
        return torch.randn(sum(lens), cell.heads, cell.dim, device="cuda", dtype=torch.bfloat16, generator=values)

    offsets: list[Any] = [torch.tensor([0, *x]).cumsum(0).cuda() for x in (q_lens, k_lens)]
    if cell.shared:
        offsets[0] = None
    spec = AttentionSpec(
        *offsets, max(q_lens), max(k_lens), SCALE, cell.causal, False, cell.window, None, None, 0.0, None,
        activations=(cell.act,), block_size=cell.block,
    )  # fmt: skip
    q = normal(q_lens[:1] if cell.shared else q_lens)
    return Data(q, normal(k_lens), normal(k_lens), normal(q_lens), spec, q_lens, k_lens)


def pairs(cell: Cell, data: Data) -> int:
    """Visible (query, key) pairs of one head."""
    if cell.block:
        return sum(min(cell.block, n - c) ** 2 for n in data.q_lens for c in range(0, n, cell.block))
    if cell.causal:
        return sum(n * (n + 1) // 2 for n in data.q_lens)
    left, right = cell.window
    if left >= 0:
        counts = {n: sum(min(i + right, n - 1) - max(i - left, 0) + 1 for i in range(n)) for n in set(data.q_lens)}
        return sum(counts[n] for n in data.q_lens)
    return sum(a * b for a, b in zip(data.q_lens, data.k_lens, strict=True))


def ours(cell: Cell, data: Data) -> dict[str, dict[str, Run]]:
    if cell.op != "attention":
        return _pffn(data, mixed=cell.op == "pffn-mixed")
    forward, backward = attention_kernels(data.q)
    out, lse = forward(data.q, data.k, data.v, data.spec)

    def deterministic() -> object:
        torch.use_deterministic_algorithms(True)
        try:
            return backward(data.dout, data.q, data.k, data.v, out, lse, data.spec, False)
        finally:
            torch.use_deterministic_algorithms(False)

    found = {
        "gemopt": {
            "forward": lambda: forward(data.q, data.k, data.v, data.spec),
            "backward": lambda: backward(data.dout, data.q, data.k, data.v, out, lse, data.spec, False),
        }
    }
    if not cell.block:
        found["gemopt-deterministic"] = {"backward": deterministic}
    if cell.shared:
        found |= _copied(data) | _unsplit(found["gemopt"])
    return found


def _copied(data: Data) -> dict[str, dict[str, Run]]:
    """A copy of shared queries for every sequence, made and summed beside the same kernels, as a model's `expand` has it."""
    forward, backward = attention_kernels(data.q)

    def run() -> tuple[Tensor, Tensor]:
        q, spec = data.spec.spread(data.q)
        return forward(q, data.k, data.v, spec)

    out, lse = run()
    q, spec = data.spec.spread(data.q)

    def gradients() -> object:
        dq, *others = backward(data.dout, q, data.k, data.v, out, lse, spec, False)
        return data.spec.gathered(dq, data.q), *others

    return {"gemopt-copied": {"forward": run, "backward": gradients}}


def _unsplit(ours: dict[str, Run]) -> dict[str, dict[str, Run]]:
    """The forward without splitting keys; left out where it does not split them, or the kernels are the portable ones."""
    from gemopt.kernels.gluon import attention as hopper

    split, taken = hopper.split_of, []

    def with_choice(choice: Callable[..., Any]) -> object:
        hopper.split_of = choice
        try:
            return ours["forward"]()
        finally:
            hopper.split_of = split

    with_choice(lambda *call: taken.append(split(*call)) or taken[-1])
    return {"gemopt-unsplit": {"forward": lambda: with_choice(lambda *_: None)}} if any(taken) else {}


def _pffn(data: Data, mixed: bool) -> dict[str, dict[str, Run]]:
    """The fused block against the same kernels composed with torch's norms. mixed: as autocast has it, q in fp32."""
    spec, stream = data.spec, torch.float32 if mixed else data.q.dtype
    q, k, v = (x.clone().requires_grad_() for x in (data.q.to(stream), data.k, data.v))
    width, dout = list(q.shape[1:]), data.dout.to(stream)
    offsets = (spec.q_offsets, spec.k_offsets, spec.max_q, spec.max_k)

    def fused() -> Tensor:
        return pffn(q, k, v, *offsets, activation="gelu", scale=SCALE)

    def unfused() -> Tensor:
        from gemopt.ops import gdpa

        ln = torch.nn.functional.layer_norm(q, width)
        g = gdpa(ln.to(k.dtype), k, v, *offsets, activation="gelu", scale=SCALE) + ln
        return torch.nn.functional.rms_norm(g, width, eps=1e-5) + q

    compiled = torch.compile(unfused)
    found: dict[str, dict[str, Run]] = {}
    for name, function in (("gemopt", fused), ("gemopt-unfused", unfused), ("gemopt-unfused-compiled", compiled)):
        out = function()
        found[name] = {
            "forward": function,
            "backward": lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        }
    return found


def flash(cell: Cell, data: Data) -> dict[str, dict[str, Run]]:
    """torch's varlen attention (FlashAttention 2). Always softmax: for gdpa cells it computes something else."""
    (q, spec), k, v = data.spec.spread(data.q), data.k, data.v
    if cell.op != "attention":
        return {}
    if cell.block:
        spec = spec.split_blocks(q.shape[0])
    qo, ko = spec.q_offsets.int(), spec.k_offsets.int()
    sides = {} if cell.window[0] < 0 else {"window_size_left": cell.window[0], "window_size_right": cell.window[1]}
    forward = torch.ops.aten._flash_attention_forward

    def run() -> tuple[Tensor, ...]:
        return forward(q, k, v, qo, ko, spec.max_q, spec.max_k, 0.0, cell.causal, False, scale=SCALE, **sides)

    out, lse, state, unused, _ = run()
    backward = torch.ops.aten._flash_attention_backward
    return {
        "flash-2-varlen": {
            "forward": run,
            "backward": lambda: backward(
                data.dout,
                q,
                k,
                v,
                out,
                lse,
                qo,
                ko,
                spec.max_q,
                spec.max_k,
                0.0,
                cell.causal,
                state,
                unused,
                scale=SCALE,
                **sides,
            ),
        }
    }


def padded(cell: Cell, data: Data) -> dict[str, dict[str, Run]]:
    """SDPA on padded tensors: memory-efficient with a key mask, cuDNN where no mask is needed."""
    if cell.block or cell.op != "attention" or cell.window[0] >= 0 or cell.act != "softmax":
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    longest_q, longest_k = data.spec.max_q, data.spec.max_k
    dense = min(data.q_lens) == longest_q and min(data.k_lens) == longest_k
    index = torch.arange(longest_k, device="cuda")
    mask = None if dense else (index < torch.tensor(data.k_lens, device="cuda")[:, None])[:, None, None, :]
    if mask is not None:
        mask = mask.expand(-1, cell.heads, longest_q, -1)
    q, dout = (
        torch.randn(cell.batch, cell.heads, longest_q, cell.dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    k, v = (torch.randn(cell.batch, cell.heads, longest_k, cell.dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    backend, name = (
        (SDPBackend.CUDNN_ATTENTION, "sdpa-cudnn") if dense else (SDPBackend.EFFICIENT_ATTENTION, "sdpa-efficient")
    )

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=cell.causal, scale=SCALE)

    out = run()
    return {name: {"forward": run, "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)}}


def flex(cell: Cell, data: Data) -> dict[str, dict[str, Run]]:
    """FlexAttention over the packed rows with a document mask (softmax)."""
    if cell.block or cell.op != "attention" or cell.act != "softmax" or sum(data.q_lens) > 1_500_000:
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    owner = [
        torch.repeat_interleave(torch.arange(cell.batch), torch.tensor(lens)).cuda() for lens in (data.q_lens, data.k_lens)
    ]

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return owner[0][i] == owner[1][j]

    mask = torch.compile(create_block_mask)(same, None, None, len(owner[0]), len(owner[1]), device="cuda")
    copied, _ = data.spec.spread(data.q)
    q, k, v = (x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (copied, data.k, data.v))
    dout = data.dout.transpose(0, 1)[None].contiguous()
    compiled = torch.compile(flex_attention)
    out = compiled(q, k, v, block_mask=mask, scale=SCALE)
    return {
        "flex-document-mask": {
            "forward": lambda: compiled(q, k, v, block_mask=mask, scale=SCALE),
            "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        }
    }


def eager_gelu(cell: Cell, data: Data) -> dict[str, dict[str, Run]]:
    """Compiled padded GELU attention, as a model writes it; its scores must fit in memory."""
    if (
        cell.act == "softmax"
        or cell.op != "attention"
        or cell.causal
        or cell.batch * data.spec.max_q * data.spec.max_k > 2**28
    ):
        return {}
    shape = (cell.batch, cell.heads)
    q, dout = (torch.randn(*shape, data.spec.max_q, cell.dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(*shape, data.spec.max_k, cell.dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    keep = (torch.arange(data.spec.max_k, device="cuda") < torch.tensor(data.k_lens, device="cuda")[:, None])[
        :, None, None, :
    ]
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    compiled = torch.compile(lambda q, k, v: (torch.nn.functional.gelu(q @ k.transpose(-1, -2) * SCALE) * keep) @ v)
    out = compiled(q, k, v)
    return {
        "padded-compiled": {
            "forward": lambda: compiled(q, k, v),
            "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        }
    }


def graphed(run: Run) -> tuple[Run, bool]:
    """`run` as a CUDA graph's replay, if it can be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run, False
    return graph.replay, True


def timed(run: Run, milliseconds: float) -> float:
    """Mean milliseconds of a run, over at least `milliseconds`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    count = max(2, int(milliseconds / max(start.elapsed_time(end), 1e-3)) + 1)
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def board() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def is_ours(who: str) -> bool:
    return who == OURS or who.startswith(f"{OURS}-")


def attempt(who: str, action: Callable[[], Any], failed: dict[str, str]) -> Any:
    """What ``action`` returns; None if it fails, with the reason in ``failed``. One contestant must not end a run."""
    try:
        return action()
    except Exception as error:
        if who in (CUBLAS, COPY):  # without which there is nothing to compare with
            raise
        lines = str(error).splitlines() or [""]
        failed[who] = f"{type(error).__name__}: {lines[0]}"[:300]
        print(f"    {who}: failed ({failed[who][:100]})", file=sys.stderr)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None


def measure(
    runs: dict[str, Run], milliseconds: float, rounds: int, plain: bool, failed: dict[str, str]
) -> tuple[dict[str, list[float]], list[str], list[str]]:
    """Times of each contestant by round, clock and power after each round, and who ran as a graph.

    Contestants that raise are left out; ``failed`` gets the reason.
    """
    ready, captured = {}, []
    for name, run in runs.items():
        # Autograd's backward runs on its forward's stream, which a capture on another would not see.
        takes_graph = plain and (name.startswith("gemopt") or name == "flash-2-varlen")
        got = attempt(name, partial(graphed, run), failed) if takes_graph else (run, False)
        if got is not None and attempt(name, partial(timed, got[0], milliseconds / 4), failed) is not None:
            ready[name] = got[0]
            captured += [name] * got[1]
    times: dict[str, list[float]] = {name: [] for name in ready}
    boards = []
    for _ in range(rounds):
        for name, run in list(ready.items()):
            took = attempt(name, partial(timed, run, milliseconds), failed)
            if took is None:
                del ready[name], times[name]
                captured = [who for who in captured if who != name]
            else:
                times[name].append(took)
        boards.append(board())
    return times, boards, captured


def contestants(cell: Cell, data: Data, peers: list[Any], failed: dict[str, str]) -> dict[str, dict[str, Run]]:
    found: dict[str, dict[str, Run]] = {}
    for source in [ours, flash, *peers]:
        who = OURS if source is ours else source.__name__
        who = source.__module__ if who == "contestants" else who  # of a file
        found |= attempt(who, partial(source, cell, data), failed) or {}
    return found


def run_cell(name: str, cell: Cell, peers: list[Any], milliseconds: float, rounds: int) -> list[dict[str, Any]]:
    data = draw(cell)
    flops = 4 * cell.heads * cell.dim * pairs(cell, data)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copied = torch.zeros(2, 2**30, device="cuda", dtype=torch.uint8)
    absent: dict[str, str] = {}
    found = contestants(cell, data, peers, absent)
    records = []
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        runs = {CUBLAS: lambda: square @ square} | {who: way[direction] for who, way in found.items() if direction in way}
        runs[COPY] = lambda: copied[1].copy_(copied[0])
        failed = dict(absent)
        times, boards, captured = measure(runs, milliseconds, rounds, cell.op == "attention", failed)
        middle = {who: statistics.median(t) for who, t in times.items()}
        copy_rate = 2 * 2**30 / middle.pop(COPY) / 1e9
        rate = {who: factor * flops / ms / 1e9 for who, ms in middle.items()}
        rate[CUBLAS] = 2 * 8192**3 / middle[CUBLAS] / 1e9
        width = 4 if cell.op == "pffn-mixed" else 2
        queries, outputs, keys = data.q.numel() * width, data.dout.numel() * width, data.k.numel() * 2
        bytes_ = queries + outputs + 2 * keys if direction == "forward" else 2 * queries + outputs + 4 * keys
        for who, ms in middle.items():
            speed = f"{ms:9.3f} ms {rate[who]:7.1f} TFLOP/s {rate[who] / rate[CUBLAS]:5.2f} of cuBLAS"
            print(f"{name:20} {direction:9} {who:28} {speed} {bytes_ / ms / 1e9:5.2f} TB/s", flush=True)
        records.append({
            "config": {"cell": name, "direction": direction},
            "shape": dict(vars(cell)),
            "protocol": {"milliseconds": milliseconds, "rounds": rounds, "graphs": captured},
            "flops": factor * flops,
            "bytes": bytes_,
            "milliseconds": {k: [round(x, 5) for x in v] for k, v in times.items()},
            "tflops": {k: round(v, 1) for k, v in rate.items()},
            "terabytes_per_second": {COPY: round(copy_rate, 3)},
            "board": boards,
            "failed": failed,
        })  # fmt: skip
    return records


def load_peer(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"bench/kernels.py: --peer must be a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.contestants


def plot(results: Path, folder: Path) -> None:
    """The pictures of a file of records; without matplotlib a line that says so."""
    try:
        paths = _kernel_plots.write(json.loads(results.read_text())["records"], folder)
    except ImportError as error:
        print(f"no pictures ({error}); later: python bench/kernels.py --plot-only {results}", file=sys.stderr)
    else:
        print(*paths)


def stored() -> Path:
    """The one file of results, if there is one only."""
    found = sorted(_harness.RESULTS.glob("kernels-*.json"))
    if len(found) != 1:
        raise SystemExit(f"bench/kernels.py: --plot-only needs a path, {len(found)} files are in {_harness.RESULTS}")
    return found[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", help="comma-separated names, default all: " + ", ".join(grid()))
    parser.add_argument("--peers", default="padded,flex,eager_gelu", help="built-in peers besides flash, or none")
    parser.add_argument("--peer", action="append", default=[], help="Python file with another contestant")
    parser.add_argument("--milliseconds", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="do not write bench/results and pictures")
    parser.add_argument("--plots", type=Path, default=_harness.ROOT / "docs", help="folder of the pictures, default docs")
    parser.add_argument(
        "--plot-only", nargs="?", const="", metavar="JSON", help="pictures only, of this file or of the one in bench/results"
    )
    options = parser.parse_args(arguments)
    if options.plot_only is not None:
        plot(Path(options.plot_only) if options.plot_only else stored(), options.plots)
        return 0
    cells = grid()
    names = options.cells.split(",") if options.cells else list(cells)
    unknown = [n for n in names if n not in cells]
    if unknown:
        parser.error(f"--cells must be among {', '.join(cells)}, got {', '.join(unknown)}")
    builtin = {"padded": padded, "flex": flex, "eager_gelu": eager_gelu}
    peers = [builtin[n] for n in options.peers.split(",") if n in builtin] + [load_peer(p) for p in options.peer]
    results, broken = None, []
    # Backward passes are timed again and again on one graph, whose buffers a compiled backward must not take for itself.
    with functorch_config.patch(donated_buffer=False):
        for name in names:
            records = run_cell(name, cells[name], peers, options.milliseconds, options.rounds)
            broken += [f"{name} {r['config']['direction']}: {who}" for r in records for who in r["failed"] if is_ours(who)]
            torch.cuda.empty_cache()
            if not options.dry_run:
                results = _harness.record_results("kernels", records, "cuda")
                print(results)
    if results is not None:
        plot(results, options.plots)
    if broken:
        print("bench/kernels.py: failed: " + "; ".join(broken), file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
