"""Which rows can be observed? Write NaN, infinities and large numbers into them and see what changes.

Two uses. `poison` puts them into the padding of float inputs of a model and compares what the compiled model
shows. `poison_intermediates` interprets a padded graph node by node and overwrites rows of its intermediate
tensors: the rows that change no output are dead, whatever a rewriter thinks. This file shares no code with
the rewriter, on purpose.

The interpreter knows a token axis by its size only, so call it with sizes of batch and sequence that nothing
else in the graph has (`suggest_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import Tensor

from gemopt.testing.checker import Checker
from gemopt.testing.compare import Tolerance
from gemopt.testing.equivalence import compile_for_test
from gemopt.testing.inputs import Batch, as_batch
from gemopt.testing.result import EquivalenceError
from gemopt.testing.runs import Objective, Observed, State, modules_of, no_dropout

VALUES = (math.nan, math.inf, -math.inf, 1e30)


@dataclass
class PoisonResult:
    """What changed: `(argument, value, tensor)` for each observable tensor that is not bitwise as before.

    `eager` lists the same for eager, where a masked mean by multiplication lets NaN through: `compiled` must
    not be worse, and is what the contract is about.
    """

    compiled: list[tuple[str, float, str]] = field(default_factory=list)
    eager: list[tuple[str, float, str]] = field(default_factory=list)
    tried: int = 0
    paths: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No change in the compiled model that eager does not show as well."""
        return self.tried > 0 and not set(self.compiled) - set(self.eager)

    @property
    def clean(self) -> bool:
        """No change in the compiled model at all."""
        return self.tried > 0 and not self.compiled

    def __str__(self) -> str:
        lines = [f"{self.tried} runs, {len(self.compiled)} changes compiled, {len(self.eager)} eager"]
        for name, value, tensor in self.compiled:
            lines.append(f"  {tensor} changes with {value} in the padding of {name}")
        return "\n".join(lines)


def poison(
    model: Callable[..., Any],
    inputs: Any,
    mask: Tensor | Mapping[str, Tensor],
    *,
    values: Sequence[float] = VALUES,
    compiled: Callable[..., Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    recipe: Any = None,
    inner: str = "aot_eager",
    rtol: float = 0.0,
    strict: bool = False,
) -> PoisonResult:
    """Put `values` into the invalid rows of the model's float inputs and compare what it shows with before.

    Args:
        inputs: a tuple or dict of arguments. mask: `[B, L]` bool, true where valid: for every float input
        `[B, L, …]`; or one mask for each input by its
            path (`"args[0]"`, `"kwargs['x']"`).
        compiled, recipe, inner, loss: as for `assert_equivalent`.
        rtol: allowed change relative to the tensor's maximum; 0 is bitwise.
        strict: raise EquivalenceError unless the compiled model shows no change at all.

    Raises:
        ValueError: no float input has a padded row, so nothing would be tried.
        EquivalenceError: under `strict`.
    """
    batch, state = as_batch(inputs), State(modules_of(model))
    rows = dict(_dead_rows(batch, mask))
    if not rows:
        raise ValueError("mask: no float input has rows outside it; allowed: a mask with false entries")
    with no_dropout(state.modules):
        subject = compiled if compiled is not None else compile_for_test(model, recipe, inner)
        checker = Checker(model, subject, state, loss, 0, None, Tolerance())
        result = PoisonResult()
        runs = (("eager", checker.run_eager), ("compiled", checker.run_compiled))
        objective = Objective(loss, 0)
        before = {kind: run(batch, objective) for kind, run in runs}
        for name, dead in rows.items():
            for value in values:
                poisoned = _overwrite(batch, name, dead, value)
                result.tried += 1
                for kind, run in runs:
                    seen = run(poisoned, objective)
                    result.paths += [seen.path] if kind == "compiled" else []
                    changes = [(name, value, tensor) for tensor in _changed(before[kind], seen, rtol)]
                    getattr(result, kind).extend(changes)
    state.restore()
    if strict and not result.clean:
        raise EquivalenceError(f"padding is observed\n{result}", result)
    return result


def _dead_rows(batch: Batch, mask: Tensor | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    tensors = batch.tensors()
    if isinstance(mask, Mapping):
        unknown = [name for name in mask if name not in tensors]
        if unknown:
            raise ValueError(f"mask: got {unknown[0]!r}; allowed: {', '.join(tensors)}")
    for name, tensor in tensors.items():
        valid = mask.get(name) if isinstance(mask, Mapping) else mask
        if valid is not None and tensor.is_floating_point() and tensor.shape[:2] == valid.shape:
            if not bool(valid.all()):
                yield name, ~valid


def _overwrite(batch: Batch, name: str, dead: Tensor, value: float) -> Batch:
    target = batch.tensors()[name]

    def change(tensor: Tensor) -> Tensor:
        if tensor is not target:
            return tensor
        wide = dead.reshape(*dead.shape, *(1,) * (tensor.dim() - 2))
        return torch.where(wide, _representable(value, tensor.dtype), tensor.detach()).requires_grad_(tensor.requires_grad)

    return batch.map(change)


def _representable(value: float, dtype: torch.dtype) -> Tensor:
    limit = float(torch.finfo(dtype).max)
    return torch.tensor(value if not math.isfinite(value) else max(-limit, min(limit, value)), dtype=dtype)


def _changed(before: Observed, after: Observed, rtol: float) -> list[str]:
    if (before.error is None) != (after.error is None):
        return [f"raises {after.error or before.error!r}"]
    pairs = ((n, before.tensors.get(n), after.tensors.get(n)) for n in before.tensors)
    return [n for n, a, b in pairs if not _same(a, b, rtol)]


def _same(a: Tensor | None, b: Tensor | None, rtol: float) -> bool:
    """Equal, NaN at the same places; up to `rtol` of the largest finite value."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    if rtol == 0 or not a.is_floating_point():
        return bool(torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()))
    scale = float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 1.0
    return bool(torch.allclose(a, b, rtol=rtol, atol=rtol * scale, equal_nan=True))


# --- intermediates


def suggest_sizes(taken: Sequence[int]) -> tuple[int, int]:
    """Batch and sequence sizes that neither equal, divide nor multiply to any size in `taken`."""
    primes = [p for p in range(5, 200) if all(p % d for d in range(2, p))]
    free = [p for p in primes if not any(t % p == 0 for t in taken if t > 0)]
    for batch in free:
        for length in free:
            if batch < length and batch * length not in taken:
                return batch, length
    raise ValueError(f"taken: no pair of primes below 200 is free of {sorted(set(taken))}")


def row_view(tensor: Tensor, batch: int, length: int) -> tuple[int, ...] | None:
    """Shape in which `overwrite_rows` finds batch and token axes, or None where the tensor has no such rows.

    Known layouts: `[B, L, …]`, `[L, B, …]`, `[B, H, L, …]`, `[B·H, L, …]` and `[B·L, …]`; `[L·B, …]` is taken
    for the last, so graphs that merge in this order are not for it.
    """
    shape = tensor.shape
    if len(shape) >= 2 and shape[:2] in ((batch, length), (length, batch)):
        return shape
    if len(shape) >= 3 and shape[0] == batch and shape[2] == length:
        return shape
    if shape and shape[0] == batch * length:
        return (batch, length, *shape[1:])
    if len(shape) >= 2 and shape[1] == length and shape[0] % batch == 0 and shape[0] > 0:
        return (batch, shape[0] // batch, *shape[1:])
    return None


def overwrite_rows(tensor: Tensor, rows: Tensor, value: float) -> Tensor | None:
    """A copy of `tensor` with `value` where `rows [B, L]` is true; None where it has no token rows."""
    batch, length = rows.shape
    shape = row_view(tensor, batch, length)
    if shape is None or not tensor.is_floating_point():
        return None
    view = tensor.detach().clone().reshape(shape)
    if tuple(view.shape[:2]) == (batch, length):
        where = rows
    elif tuple(view.shape[:2]) == (length, batch):
        where = rows.t()
    else:  # [B, H, L, …]
        where = rows[:, None, :].expand(batch, view.size(1), length)
    where = where.reshape(*where.shape, *(1,) * (view.dim() - where.dim()))
    return torch.where(where, _representable(value, view.dtype), view).reshape(tensor.shape)


@dataclass
class NodePoison:
    """One intermediate tensor: did an output change when its rows were overwritten?"""

    node: str
    target: str
    shape: tuple[int, ...]
    observed: bool
    outputs: tuple[int, ...] = ()


class _Poisoner(fx.Interpreter):
    """Interprets a graph and overwrites rows of the nodes in `where`."""

    def __init__(self, gm: fx.GraphModule, where: Mapping[str, Tensor], value: float) -> None:
        super().__init__(gm)
        self.where, self.value, self.done = where, value, set[str]()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.where and isinstance(result, Tensor):
            changed = overwrite_rows(result, self.where[n.name], self.value)
            if changed is not None:
                self.done.add(n.name)
                return changed
        return result


def poison_intermediates(
    gm: fx.GraphModule,
    args: Sequence[Any],
    rows: Tensor | Mapping[str, Tensor],
    *,
    value: float = 1e30,
    nodes: Sequence[str] | None = None,
    at_once: bool = False,
    rtol: float = 0.0,
) -> list[NodePoison]:
    """Overwrite rows of float intermediates of a padded graph, node by node, and compare the outputs.

    Args:
        gm: the graph (ATen, functional), called as `gm(*args)`; sizes B and L must not occur otherwise.
        rows: `[B, L]` bool, true for the rows to overwrite (`~mask`), or one for each node by name.
        value: what is written. NaN shows every way out, 1e30 those that remain for finite padding.
        nodes: node names to try; all by default.
        at_once: overwrite all of them in one run, as a rewriter that drops all these rows does; gives one
            result named `"*"`.
        rtol: allowed change relative to the output's maximum; 0 is bitwise.

    Returns:
        One `NodePoison` for each node that has token rows. `observed=False` means its rows are dead.
    """
    kinds = ("call_function", "call_method", "call_module", "placeholder")
    names = [n.name for n in gm.graph.nodes if n.op in kinds and (nodes is None or n.name in nodes)]
    table = {n: rows[n] if isinstance(rows, Mapping) else rows for n in names if _has_rows(n, rows)}
    before = _flat(fx.Interpreter(gm).run(*_copies(args)))
    targets = {n.name: str(n.target) for n in gm.graph.nodes}
    if at_once:
        changed, done = _try(gm, args, table, value, before, rtol)
        return [NodePoison("*", f"{len(done)} nodes", (), bool(changed), changed)]
    found = []
    for name in table:
        changed, done = _try(gm, args, {name: table[name]}, value, before, rtol)
        if done:
            shape = _shape(gm, name)
            found.append(NodePoison(name, targets[name], shape, bool(changed), changed))
    return found


def _has_rows(name: str, rows: Tensor | Mapping[str, Tensor]) -> bool:
    return not isinstance(rows, Mapping) or name in rows


def _try(
    gm: fx.GraphModule,
    args: Sequence[Any],
    where: Mapping[str, Tensor],
    value: float,
    before: list[Any],
    rtol: float,
) -> tuple[tuple[int, ...], set[str]]:
    interpreter = _Poisoner(gm, where, value)
    after = _flat(interpreter.run(*_copies(args)))
    changed = tuple(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not _same(a, b, rtol))
    return changed, interpreter.done


def _copies(args: Sequence[Any]) -> list[Any]:
    return [a.detach().clone() if isinstance(a, Tensor) else a for a in args]


def _flat(output: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _shape(gm: fx.GraphModule, name: str) -> tuple[int, ...]:
    value = next(n for n in gm.graph.nodes if n.name == name).meta.get("val")
    return tuple(int(size) for size in value.shape) if isinstance(value, Tensor) else ()
