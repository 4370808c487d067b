"""Example inputs of a padded model, and others like them.

From one example batch this module finds what each tensor is (lengths, ids, mask, float tokens, per-sample
features)
and draws new batches that are consistent: lengths from a named case, ids and masks cut at the new lengths,
    tokens where the example had padding taken from its other tokens. A user who wants full control passes a
    callable instead.

    lengths   1-D integers, one a sequence, by name or because ids or a mask have as many valid positions
    history   a lengths vector (given, or implied by ids or a mask) with the padded tensors `[B, L, ...]` it
    governs
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from gemopt.testing.lengths import draw_lengths

LengthsDraw = Callable[[str, int, int, torch.Generator], Tensor]
_LENGTH_NAME = re.compile(r"(^|_)(len|lens|length|lengths|num|n|count|counts|seqlen|seqlens|size)(_|$)|lengths?$", re.I)
_HOLE_RATE = 0.25


@dataclass(frozen=True)
class Batch:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor argument by its path, e.g. `args[0]`, `kwargs['ids']`."""
        leaves = pytree.tree_leaves_with_path((self.args, self.kwargs))
        return {_path(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}

    def map(self, f: Callable[[Tensor], Any]) -> Batch:
        """The batch with `f` applied to every tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, f, (self.args, self.kwargs))
        return Batch(args, kwargs)

    def fresh(self) -> Batch:
        """Detached copies with the same strides that require gradients where the originals do."""
        return self.map(lambda t: clone(t).requires_grad_(t.requires_grad))


def clone(tensor: Tensor) -> Tensor:
    """A detached copy that keeps strides, overlapping ones (`expand`) as far as clone can."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.detach().clone()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.detach().clone()
    return copy.copy_(tensor.detach())


def _path(path: tuple[Any, ...]) -> str:
    head, *rest = path
    return ("args" if getattr(head, "idx", None) == 0 else "kwargs") + pytree.keystr(tuple(rest))


def as_batch(inputs: Any) -> Batch:
    """A tuple or list as positional, a dict as keyword arguments, a single tensor as the one argument."""
    if isinstance(inputs, Batch):
        return inputs
    if isinstance(inputs, Mapping):
        return Batch((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Batch(tuple(inputs), {})
    if isinstance(inputs, Tensor):
        return Batch((inputs,), {})
    raise TypeError(
        f"inputs: got {type(inputs).__name__}; allowed: a tuple of arguments, a dict of keyword arguments, a "
        "tensor, or a callable (lengths, max_len, generator) -> arguments"
    )


# --- sources of batches


@dataclass
class CallableSource:
    """Batches from the user's `inputs(lengths, max_len, generator)`."""

    function: Callable[[Tensor, int, torch.Generator], Any]
    batch: int
    max_len: int
    draw: LengthsDraw = draw_lengths
    notes: list[str] = field(default_factory=list)

    def make(self, case: str, generator: torch.Generator) -> Batch:
        lengths = self.draw(case, self.batch, self.max_len, generator)
        batch = as_batch(self.function(lengths, self.max_len, generator))
        if case == "holes":
            batch = batch.map(lambda t: _punch(t, lengths, generator))
        return batch


@dataclass
class History:
    """Tensors that share one padding. `lengths` is the leaf that says it, or None where ids or a mask imply
    it.
    """

    lengths: int | None
    max_len: int
    left: bool = False
    members: dict[int, str] = field(default_factory=dict)  # leaf -> "ids" | "mask" | "inverse_mask" | "tokens"


class ExampleSource:
    """Batches like one example. `names` restricts which arguments count as lengths."""

    def __init__(self, example: Batch, model: Callable[..., Any], names: Sequence[str] | None, draw: LengthsDraw) -> None:
        self.example, self.draw = example, draw
        self.leaves, self.spec = pytree.tree_flatten((example.args, example.kwargs))
        self.names = _leaf_names(example, model)
        self.notes: list[str] = []
        self.batch = self._batch_size()
        self.histories = self._histories(self._lengths_leaves(names))

    # finding out

    def _batch_size(self) -> int:
        sizes = [leaf.size(0) for leaf in self._tensors().values() if leaf.dim() > 0]
        if not sizes:
            raise ValueError("inputs: no tensor with a batch axis, so no cases can be generated; pass cases=('given',)")
        return max(set(sizes), key=sizes.count)

    def _tensors(self) -> dict[int, Tensor]:
        return {i: leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}

    def _lengths_leaves(self, names: Sequence[str] | None) -> list[int]:
        vectors = {
            i: t
            for i, t in self._tensors().items()
            if t.dim() == 1 and t.size(0) == self.batch and not t.is_floating_point() and t.dtype != torch.bool
        }
        if names is not None:
            unknown = [name for name in names if name not in self.names]
            if unknown:
                raise ValueError(f"lengths: got {unknown[0]!r}; allowed: argument names {self.names}")
            return [i for i, t in self._tensors().items() if self.names[i] in names]
        found = [i for i, t in vectors.items() if self._is_lengths(i, t)]
        for i in vectors.keys() - set(found):
            self.notes.append(f"{self.names[i]} is taken as a feature of each sample; lengths have to be named in lengths=")
        return found

    def _is_lengths(self, index: int, vector: Tensor) -> bool:
        longest = max((t.size(1) for t in self._tensors().values() if t.dim() >= 2), default=0)
        if vector.numel() and (int(vector.min()) < 0 or int(vector.max()) > longest):
            return False
        if _LENGTH_NAME.search(self.names[index]):
            return True
        return any(_counts_match(t, vector) for t in self._tensors().values())

    def _histories(self, lengths: list[int]) -> list[History]:
        histories = [History(i, self._padded_size(i)) for i in lengths]
        for i, tensor in self._tensors().items():
            if tensor.dim() < 2 or tensor.size(0) != self.batch:
                continue
            history = self._history_of(i, tensor, histories)
            if history is not None:
                history.members[i] = _kind(tensor, self._counts(history), self.names[i])
        implied = self._implied([i for h in histories for i in h.members])
        return [h for h in histories if h.members] + implied

    def _padded_size(self, index: int) -> int:
        vector = self.leaves[index]
        sizes = sorted({_tokens(t) for t in self._tensors().values() if t.dim() >= 2})
        matching = [_tokens(t) for t in self._tensors().values() if _counts_match(t, vector)]
        stem = _stem(self.names[index])
        named = [_tokens(t) for i, t in self._tensors().items() if t.dim() >= 2 and stem and stem in self.names[i]]
        longest = int(vector.max()) if vector.numel() else 0
        return next(iter(matching + named + [s for s in sizes if s >= longest] + [longest]))

    def _history_of(self, index: int, tensor: Tensor, histories: list[History]) -> History | None:
        for history in histories:
            if _counts_match(tensor, self.leaves[history.lengths or 0]):
                return history
        same = [h for h in histories if _tokens(tensor) == h.max_len]
        named = [h for h in same if (s := _stem(self.names[h.lengths or 0])) and s in self.names[index]]
        return next(iter(named + same), None)

    def _counts(self, history: History) -> Tensor | None:
        return None if history.lengths is None else self.leaves[history.lengths]

    def _implied(self, taken: list[int]) -> list[History]:
        """Histories that no lengths vector governs, one for each padded size that shows padding."""
        free = {i: t for i, t in self._tensors().items() if i not in taken and t.dim() >= 2 and t.size(0) == self.batch}
        histories: list[History] = []
        for size in sorted({_tokens(t) for t in free.values()}):
            members = {i: t for i, t in free.items() if _tokens(t) == size}
            evidence = next((v for t in members.values() if (v := _validity(t, None)) is not None), None)
            if evidence is None:
                continue
            left = bool((evidence[:, -1].sum() > evidence[:, 0].sum()).item())
            kinds = {i: _kind(t, evidence.sum(1), self.names[i]) for i, t in members.items()}
            histories.append(History(None, size, left, kinds))
        return histories

    # drawing

    def make(self, case: str, generator: torch.Generator) -> Batch:
        """A batch for `case`; `"given"` is the example itself."""
        if case == "given":
            return self.example
        rows = self._rows(case)
        leaves = [self._select(leaf, rows) for leaf in self.leaves]
        for history in self.histories:
            self._redraw(history, case, leaves, rows, generator)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return Batch(args, kwargs)

    def _rows(self, case: str) -> Tensor:
        count = {"empty_batch": 0, "one_sequence": 1}.get(case, self.batch)
        return torch.arange(count)

    def _select(self, leaf: Any, rows: Tensor) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.size(0) != self.batch:
            return leaf
        if len(rows) == self.batch:
            return clone(leaf).requires_grad_(leaf.requires_grad)
        return leaf.detach()[: len(rows)].clone().requires_grad_(leaf.requires_grad)

    def _redraw(self, history: History, case: str, leaves: list[Any], rows: Tensor, generator: torch.Generator) -> None:
        lengths = self.draw(case, len(rows), history.max_len, generator)[: len(rows)]
        valid = torch.arange(history.max_len)[None, :] < lengths[:, None]
        if case == "holes":
            valid &= torch.rand(valid.shape, generator=generator) >= _HOLE_RATE
        valid = valid.flip(1) if history.left else valid
        if history.lengths is not None:
            given = leaves[history.lengths]
            leaves[history.lengths] = lengths.to(given.dtype).to(given.device)
        for i, kind in history.members.items():
            leaves[i] = _refill(leaves[i], kind, valid.to(leaves[i].device), self.leaves[i], generator)


# --- what one tensor says


def _leaf_names(example: Batch, model: Callable[..., Any]) -> list[str]:
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = []
    names = []
    for path, _ in pytree.tree_leaves_with_path((example.args, example.kwargs)):
        _, first, *rest = path
        position = getattr(first, "idx", None)
        name = parameters[position] if position is not None and position < len(parameters) else ""
        name = name or (f"args[{position}]" if position is not None else str(getattr(first, "key", "")))
        names.append(name + "".join(f"_{getattr(k, 'key', getattr(k, 'idx', k))}" for k in rest))
    return names


def _stem(name: str) -> str:
    """`click_lengths` -> `click`: what a history's tensors have in their names."""
    return _LENGTH_NAME.sub("_", name).strip("_").rstrip("s")


def _tokens(tensor: Tensor) -> int:
    """Size of the axis that holds the tokens: the last of a broadcast mask `[B, 1, 1, L]`, else the
    second.
    """
    if tensor.dim() > 2 and all(size == 1 for size in tensor.shape[1:-1]) and _is_mask(tensor):
        return tensor.size(-1)
    return tensor.size(1)


def _is_mask(tensor: Tensor) -> bool:
    """Bool, or floats that are 0 or 1 and both occur."""
    if tensor.dtype == torch.bool:
        return True
    if not tensor.is_floating_point() or tensor.requires_grad or tensor.numel() == 0:
        return False
    return bool(((tensor == 0) | (tensor == 1)).all() and tensor.any() and not tensor.all())


def _validity(tensor: Tensor, counts: Tensor | None) -> Tensor | None:
    """Bool `[B, L]` of the positions that look valid, or None where the tensor does not show padding."""
    flat = tensor.detach().reshape(tensor.size(0), _tokens(tensor), -1) if tensor.numel() else None
    if flat is None or flat.size(2) != 1:
        return None
    values = flat[:, :, 0]
    if _is_mask(tensor):
        valid = values != 0
        inverse = counts is not None and not torch.equal(valid.sum(1), counts.long()) and _same_counts(~valid, counts)
        return ~valid if inverse else valid
    if tensor.is_floating_point():
        return None
    valid = values != 0
    tails = valid.long().cummin(1).values.bool()
    heads = valid.flip(1).long().cummin(1).values.bool().flip(1)
    shows = not bool(valid.all()) and (torch.equal(valid, tails) or torch.equal(valid, heads))
    return valid if shows or counts is not None else None


def _same_counts(valid: Tensor, counts: Tensor) -> bool:
    return bool(torch.equal(valid.sum(1), counts.to(valid.device).long()))


def _counts_match(tensor: Tensor, vector: Tensor) -> bool:
    """Whether the tensor (or its complement, for a mask) has exactly `vector` valid positions a row."""
    if tensor.dim() < 2 or tensor.size(0) != vector.size(0) or tensor.size(0) == 0:
        return False
    valid = _validity(tensor, vector)
    return valid is not None and not bool(valid.all()) and _same_counts(valid, vector)


def _kind(tensor: Tensor, counts: Tensor | None, name: str) -> str:
    if _is_mask(tensor):
        raw = tensor.detach().reshape(tensor.size(0), _tokens(tensor), -1)[:, :, 0] != 0
        if counts is not None and not _same_counts(raw, counts) and _same_counts(~raw, counts):
            return "inverse_mask"
        ambiguous = counts is None or not _same_counts(raw, counts)
        return "inverse_mask" if ambiguous and "pad" in name.lower() else "mask"
    return "tokens" if tensor.is_floating_point() else "ids"


# --- new contents


def _refill(now: Tensor, kind: str, valid: Tensor, example: Tensor, generator: torch.Generator) -> Tensor:
    """`now` with its padding where `valid` is false and ordinary contents where it is true."""
    if kind in ("mask", "inverse_mask"):
        new = valid if kind == "mask" else ~valid
        return new.to(now.dtype).view(now.shape)
    shown = example.detach().reshape(-1, *example.shape[2:])
    width = (...,) + (None,) * (now.dim() - 2)
    if kind == "ids":
        pool = shown[shown != 0]
        if not pool.numel():
            return now
        drawn = pool[torch.randint(len(pool), tuple(now.shape), generator=generator).to(pool.device)]
        return torch.where(now != 0, now, drawn) * valid[width].to(now.dtype)
    empty = (shown == 0).reshape(len(shown), math.prod(shown.shape[1:])).all(1)
    if not bool(empty.any()) or bool(empty.all()):
        return now  # the padding of the example is not zero: any contents will do
    pool = shown[~empty]
    drawn = pool[torch.randint(len(pool), (now.size(0) * now.size(1),), generator=generator).to(pool.device)]
    blank = (now.detach() == 0).reshape(*now.shape[:2], math.prod(now.shape[2:])).all(2)
    filled = torch.where(blank[width], drawn.view(now.shape), now.detach())
    return torch.where(valid[width], filled, torch.zeros_like(filled)).requires_grad_(now.requires_grad)


def _punch(tensor: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Holes in ids and masks of a batch made by a callable: valid positions become zero here and there."""
    if tensor.dim() != 2 or tensor.size(0) != len(lengths) or tensor.is_floating_point():
        return tensor
    keep = torch.rand(tensor.shape, generator=generator) >= _HOLE_RATE
    if tensor.dtype == torch.bool and not _same_counts(tensor, lengths):
        return tensor | ~keep if _same_counts(~tensor, lengths) else tensor
    return tensor * keep
