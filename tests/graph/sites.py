"""What an attention `Site` says, computed from its fields alone: dropout(softmax(scale * Q K^T + mask)) V."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

import torch
from torch import Tensor

from gemopt.graph.attention import Site
from gemopt.graph.terms import Term

from .oracle import Traced

Exprs = Sequence[Term | None]


def score_sizes(run: Traced, site: Site) -> tuple[int, ...]:
    """Numbers of the score slots, from the operands that have them."""
    sizes: dict[int, int] = {}
    for node, exprs in ((site.q, site.q_exprs), (site.k, site.k_exprs), (site.v, site.v_exprs)):
        for expr, n in zip(exprs, run.slot_sizes(node), strict=True):
            if expr is not None:
                assert expr.op == "slot" and sizes.setdefault(expr.args[0], n) == n, (site, exprs)
    assert sorted(sizes) == list(range(len(sizes))), sizes
    return tuple(sizes[i] for i in range(len(sizes)))


def mask_of(run: Traced, site: Site) -> Tensor:
    """Bool over the score slots, true where attention is allowed."""
    return run.evaluator.mask(site.mask, score_sizes(run, site))


def attend(run: Traced, site: Site, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The site's result in its own shape; queries without a visible key give 0."""
    sizes = score_sizes(run, site)
    letters = string.ascii_lowercase
    left, right = (_featured(run, x, n, e) for x, n, e in ((q, site.q, site.q_exprs), (k, site.k, site.k_exprs)))
    subscripts = [
        "".join(letters[e.args[0]] for e in exprs if e is not None) + "z" for exprs in (site.q_exprs, site.k_exprs)
    ]
    everything = letters[: len(sizes)]
    scores = torch.einsum(f"{subscripts[0]},{subscripts[1]}->{everything}", left, right) * site.scale
    keep = mask_of(run, site)
    weights = scores.masked_fill(~keep, -math.inf).softmax(site.key)
    weights = torch.where(keep.any(site.key, keepdim=True), weights, 0.0)
    features = iter(string.ascii_uppercase)
    values = "".join(next(features) if e is None else letters[e.args[0]] for e in site.v_exprs)
    features = iter(string.ascii_uppercase)
    result = "".join(next(features) if s is None else letters[s] for s in site.out_slots)
    v = v.reshape(run.slot_sizes(site.v))
    return torch.einsum(f"{everything},{values}->{result}", weights, v).reshape(run.values[site.out].shape)


def _featured(run: Traced, x: Tensor, node: object, exprs: Exprs) -> Tensor:
    """Slots that are score slots in their order, then all feature slots flattened into one."""
    x = x.reshape(run.slot_sizes(node))  # type: ignore[arg-type]
    named = [i for i, e in enumerate(exprs) if e is not None]
    free = [i for i, e in enumerate(exprs) if e is None]
    return x.permute(*named, *free).flatten(len(named)) if free else x.permute(*named).unsqueeze(-1)
