"""What an attention `Site` says, computed from its fields alone:

out = post_scale * factors * dropout(score(scale * Q K^T + biases, where mask)) V
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gemopt.graph.attention import Joined, Site
from gemopt.graph.terms import Term

from .oracle import Traced

Exprs = Sequence[Term | None]

ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}


def score_sizes(run: Traced, site: Site) -> tuple[int, ...]:
    """Numbers of the score slots."""
    return tuple(int(sympy.sympify(s).subs(dict(run.evaluator.sizes))) for s in site.sizes)


def mask_of(run: Traced, site: Site) -> Tensor:
    """Bool over the score slots, true where attention is allowed."""
    return run.evaluator.mask(site.mask, score_sizes(run, site))


def attend(run: Traced, site: Site, values: Mapping[fx.Node, Tensor]) -> Tensor:
    """The site's result in its own shape, from the tensors of `values`; queries without a visible key give 0."""
    sizes = score_sizes(run, site)
    q, k, v = (
        over_scores(run, values[n], n, e, sizes)
        for n, e in ((site.q, site.q_exprs), (site.k, site.k_exprs), (site.v, site.v_exprs))
    )
    for factor in site.q_factors:
        q = _times(q, _joined(run, values, factor, sizes).unsqueeze(-1), factor)
    scores = (q.flatten(len(sizes)) * k.flatten(len(sizes))).sum(-1) * site.scale  # features may be merged differently
    for bias in site.biases:
        scores = scores + bias.coefficient * _joined(run, values, bias, sizes)
    keep = mask_of(run, site).expand(sizes)
    scores = scores.expand(sizes)
    if site.score == "softmax":
        weights = scores.masked_fill(~keep, -math.inf).softmax(site.key)
        weights = torch.where(keep.any(site.key, keepdim=True), weights, 0.0)
    else:
        weights = torch.where(keep, ACTIVATIONS[site.score](scores), 0.0)
    weights = weights * site.post_scale
    for factor in site.factors:
        weights = _times(weights, _joined(run, values, factor, sizes), factor)
    letters = string.ascii_lowercase[: len(sizes)]
    features = string.ascii_uppercase[: v.ndim - len(sizes)]
    result = iter(features)
    named = "".join(next(result) if s is None else letters[s] for s in site.out_slots)
    v = v.expand(*sizes, *v.shape[len(sizes) :])
    missing = [s for s in range(len(sizes)) if s not in {x for e in site.v_exprs if e is not None for x in e.slots}]
    v = v[tuple(slice(0, 1) if s in missing else slice(None) for s in range(len(sizes)))]
    v = v.squeeze(tuple(missing)) if missing else v
    own = "".join(c for s, c in enumerate(letters) if s not in missing)
    return torch.einsum(f"{letters},{own}{features}->{named}", weights, v).reshape(run.values[site.out].shape)


def over_scores(run: Traced, x: Tensor, node: fx.Node, exprs: Exprs, sizes: Sequence[int]) -> Tensor:
    """``x`` at every score index, `[*score sizes, *features]`; an axis that it lacks has size 1."""
    x = x.reshape(run.slot_sizes(node))
    named = [i for i, e in enumerate(exprs) if e is not None]
    free = [i for i, e in enumerate(exprs) if e is None]
    x = x.permute(*named, *free)
    used = {s for e in exprs if e is not None for s in e.slots}
    if not named:
        return x.expand(*(1 for _ in sizes), *x.shape)
    keep = tuple(slice(None) if s in used else slice(0, 1) for s in range(len(sizes)))
    indices = [run.evaluator.everywhere(exprs[i], sizes).long()[keep] for i in named]  # type: ignore[arg-type]
    return x[tuple(indices)]


def _joined(run: Traced, values: Mapping[fx.Node, Tensor], joined: Joined, sizes: Sequence[int]) -> Tensor:
    if not isinstance(values[joined.node], Tensor):
        return torch.tensor(float(values[joined.node]), dtype=torch.float64)  # type: ignore[arg-type]
    return over_scores(run, values[joined.node], joined.node, joined.exprs, sizes)


def _times(x: Tensor, factor: Tensor, how: Joined) -> Tensor:
    return x / factor if how.divide else x * factor
