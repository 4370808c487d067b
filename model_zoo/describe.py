"""Parameters, activations and FLOPs per sample of the zoo's models: ``python -m gemopt.model_zoo.describe``.

Nothing is computed: the model and its batch are shapes on the meta device. FLOPs are those of matrix products, forward; a
training step takes three times as many. "Useful" FLOPs are those of a sample alone, padded to nothing, with the
(query, key) pairs that a window, a block or causality hides taken off, averaged over equally likely lengths from
``(2 fill - 1) max_len``, at least 0, up to what makes ``fill`` their mean (midpoints of equal parts: exact for what is
linear in the length). Activations are the tensors that autograd keeps of a padded batch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from . import zoo
from .data.schema import Schema
from .data.synthetic import SIZES, Synthetic, SyntheticConfig
from .example import example_batch
from .parts.hstu import HSTUBlock
from .parts.self_attention import SelfAttention, visible_pairs

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Description:
    """Figures of one model. Parameters are counts; ``activations`` bytes, ``gflops_*`` 10^9 FLOPs, both per sample."""

    model: str
    config: str
    embedding_parameters: int
    dense_parameters: int
    activations: float
    gflops_padded: float
    gflops_useful: float
    mean_length: float
    max_length: float


def describe(
    name: str,
    config_name: str,
    schema: Schema,
    batch_size: int = 64,
    fill: float = 0.5,
    dtype: torch.dtype = torch.bfloat16,
    samples: int = 4,
    **overrides: Any,
) -> Description:
    """Figures of ``zoo.build(name, schema, config_name, **overrides)``.

    Args:
        batch_size: of the padded batch that activations and padded FLOPs are counted on.
        fill: mean length of histories as a share of their maximum, uniformly distributed.
        dtype: of parameters and activations. samples: number of lengths that useful FLOPs are averaged over.
    Raises:
        ValueError: as ``zoo.build``; or batch_size or samples below 1, fill outside 0 to 1.
    """
    if batch_size < 1 or samples < 1:
        raise ValueError(f"batch_size and samples: got {batch_size} and {samples}; allowed: 1 or more")
    with torch.device("meta"):
        model = zoo.build(name, schema, config_name, **overrides).to(dtype)
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    sizes = [(id(p) in tables, p.numel()) for p in model.parameters()]
    activations, padded = cost_of(model, shapes(schema, batch_size, None, dtype))
    if not 0 <= fill <= 1:
        raise ValueError(f"fill: got {fill}; allowed: 0 to 1")
    low, high = max(0.0, 2 * fill - 1), min(1.0, 2 * fill)
    shares = [low + (high - low) * (i + 0.5) / samples for i in range(samples)]
    each = [{name: round(share * event.max_len) for name, event in schema.events.items()} for share in shares]
    useful = sum(useful_flops(model, shapes(schema, 1, alone, dtype)) for alone in each) / samples
    longest = [event.max_len for event in schema.events.values()]
    mean = fill * sum(longest) / max(len(longest), 1)
    return Description(
        name, config_name,
        sum(n for is_table, n in sizes if is_table), sum(n for is_table, n in sizes if not is_table),
        activations / batch_size, padded / batch_size / 1e9, useful / 1e9,
        mean, sum(longest) / max(len(longest), 1),
    )  # fmt: skip


def shapes(schema: Schema, batch_size: int, lengths: dict[str, int] | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch on the meta device, each history as long as ``lengths`` says, or as its maximum."""
    one = example_batch(schema, 1, widths=lengths)
    return {
        name: torch.empty(batch_size, *x.shape[1:], dtype=dtype if name == "dense" else x.dtype, device="meta")
        for name, x in one.items()
    }


def cost_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward pass, and FLOPs of that pass."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}  # holds the tensors, lest storages be freed and counted twice

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = (storage.nbytes(), x)
        return x

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = model(batch)
    del out
    return sum(size for size, _ in kept.values()), counter.get_total_flops()


def useful_flops(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """FLOPs of a batch whose histories are full, less those of pairs that attention hides."""
    hidden = 0

    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal hidden
        b, n, d = args[0].shape
        seen = _pairs(n, module.window, module.block, module.causal)  # type: ignore[arg-type]
        hidden += b * 4 * d * (n * n - seen)

    found = [m for m in model.modules() if isinstance(m, (SelfAttention, HSTUBlock))]
    hooks = [m.register_forward_pre_hook(count) for m in found]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    return counter.get_total_flops() - hidden


_pairs = lru_cache(maxsize=4096)(visible_pairs)


def table(rows: Sequence[Description], schema: str, fill: float) -> Table:
    data = f"Synthetic data of size {schema}, mean fill {fill:g}"
    view = Table(title=f"Parameters; activations and GFLOP (padded, useful) per sample.\n{data}")
    view.add_column("model", no_wrap=True)
    for column in ("tables", "dense", "activations", "padded", "useful", "history"):
        view.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{n / 1e6:,.2f} M" for n in (row.embedding_parameters, row.dense_parameters)]
        cells += [f"{row.activations / 2**20:,.2f} MiB", f"{row.gflops_padded:,.3f}", f"{row.gflops_useful:,.3f}"]
        cells.append(f"{row.mean_length:.0f} of {row.max_length:.0f}")
        view.add_row(f"{row.model} {row.config}", *cells)
    return view


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("describe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="gem", choices=(*zoo.MODELS, "all"))
    p.add_argument("--config", default="base", choices=(*SIZES, "all"))
    p.add_argument("--schema", choices=tuple(SIZES), help="size of the synthetic data; that of the config if not given")
    p.add_argument("--max-len", type=int, help="longest history, instead of the schema's")
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--fill", type=float, default=0.5)
    p.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    p.add_argument("--json", action="store_true", help="figures as JSON")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    names = tuple(zoo.MODELS) if options.model == "all" else (options.model,)
    for config in tuple(SIZES) if options.config == "all" else (options.config,):
        overrides = {} if options.max_len is None else {"max_len": options.max_len}
        try:
            size = options.schema or config
            schema = Synthetic(SyntheticConfig.size(size, **overrides)).schema
            dtype = DTYPES[options.dtype]
            rows = [describe(name, config, schema, options.batch_size, options.fill, dtype) for name in names]
        except ValueError as error:
            print(f"describe: error: {error}", file=sys.stderr)
            return 2
        if options.json:
            print(json.dumps([asdict(row) for row in rows], indent=1))
        else:
            Console().print(table(rows, size, options.fill))
    return 0


if __name__ == "__main__":
    sys.exit(main())
