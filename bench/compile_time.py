"""What gemopt's own work adds to a cold compilation, by number of layers.

    python bench/compile_time.py                   3, 6 and 12 layers, torch.compile and gemopt
    python bench/compile_time.py --layers 12 24    other depths

A pre-norm transformer encoder over padded histories with a masked mean, forward and backward, dynamic shapes, all caches
of compiled artifacts off; 4 to 15 of 32 positions are real, so that the step runs packed and the padded graph is not
compiled. Each compilation runs once, in a process of its own: ``cold_s`` is its first step, ``own_s`` the part of it that
gemopt's capture, analyses and rewriting take (compiling the prologue is not in it). The share is ``own_s`` over the cold
step of torch.compile. Figures are merged into ``bench/results/compile-time-<machine>.json``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import time
from typing import Any
from unittest.mock import patch

import _harness
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

WIDTH, HEADS, BATCH, MAX_LEN = 64, 2, 8, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.ffn(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, valid)
        return (x * valid[..., None]).sum(1)


def cold_step(layers: int, mode: str) -> dict[str, float]:
    """Seconds of the first step, and of gemopt's own part of it. To be called once a process."""
    import gemopt
    from gemopt.backend import GemoptBackend

    torch._inductor.config.force_disable_caches = True
    torch.manual_seed(0)
    model, own = Encoder(layers), 0.0
    ids, lengths = torch.randint(1, 100, (BATCH, MAX_LEN)), torch.randint(4, MAX_LEN // 2, (BATCH,))
    plan = GemoptBackend.plan

    def timed(self: GemoptBackend, *args: Any) -> Any:
        nonlocal own
        start = time.perf_counter()
        try:
            return plan(self, *args)
        finally:
            own += time.perf_counter() - start

    with patch.object(GemoptBackend, "plan", timed):
        compiled = gemopt.compile(model) if mode == "gemopt" else torch.compile(model, dynamic=True)
        start = time.perf_counter()
        compiled(ids, lengths).sum().backward()
        return {"cold_s": time.perf_counter() - start, "own_s": own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 6, 12])
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    console, records = Console(), []
    table = Table("layers", "torch.compile, s", "gemopt, s", "of it gemopt's own, s", "share")
    for layers in options.layers:
        record: dict[str, Any] = {"config": {"layers": layers, "width": WIDTH, "batch": BATCH, "max_len": MAX_LEN}}
        for mode in ("compile", "gemopt"):
            with console.status(f"{layers} layers, {mode}"), _fresh_process() as pool:
                record[mode] = pool.submit(cold_step, layers, mode).result()
        record["share"] = record["gemopt"]["own_s"] / record["compile"]["cold_s"]
        records.append(record)
        seconds = (record["compile"]["cold_s"], record["gemopt"]["cold_s"], record["gemopt"]["own_s"])
        table.add_row(str(layers), *(f"{s:.1f}" for s in seconds), f"{record['share']:.1%}")
    console.print(table)
    if not options.no_save:
        console.print(f"written: {_harness.record_results('compile-time', records)}", soft_wrap=True)
    return 0


def _fresh_process() -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


if __name__ == "__main__":
    raise SystemExit(main())
