"""In-place operations: which tensors they change, and how local ones are made functional.

Storage says what aliases what: the fakes of a view and its base share one. A tensor whose storage is written by an op that
is still in the graph is *tainted*: its value depends on when it is read, so no analysis speaks of it and it is never packed.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from gemopt.graph.capture import regions
from gemopt.graph.insert import insert
from gemopt.graph.slots import is_tensor, nodes_in

aten = torch.ops.aten


def storage_of(node: fx.Node) -> int | None:
    if not is_tensor(node):
        return None
    try:
        return node.meta["val"].untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # subclasses without storage
        return None


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments that the op writes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    found = []
    for i, a in enumerate(target._schema.arguments):
        value = node.kwargs.get(a.name, node.args[i] if i < len(node.args) else None)
        if a.alias_info is not None and a.alias_info.is_write:
            found += nodes_in((value,), {})  # one tensor or a list of them
    return found


_RUNNING_STATISTICS = ("batch_norm", "instance_norm", "_batch_norm_impl_index", "native_batch_norm", "cudnn_batch_norm")


def has_side_effect(node: fx.Node) -> bool:
    """An op that writes, by its schema; one that returns nothing (an assertion, a print); or a norm that updates its running
    statistics behind it."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.is_mutable or not target._schema.returns or target._opname in _RUNNING_STATISTICS


def tainted(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose storage some op of the graph writes."""
    written = {storage_of(x) for node in graph.nodes for x in mutated_arguments(node)} - {None}
    return {n for n in graph.nodes if storage_of(n) in written} if written else set()


def functionalise(gm: fx.GraphModule) -> None:
    """Replace ``y = x.op_(..)`` by ``y = x.op(..)`` where it means the same.

    So it does if ``x`` is local and its older views are not read again, if the result has the dtype that ``x`` keeps when it
    is written (``uint8.add_(int64)``, ``float.gt_``), and if autograd sees both alike: a write under no_grad leaves the
    history of ``x`` as it was, where the result of an op has none.
    """
    graph, region = gm.graph, regions(gm)
    order = {n: i for i, n in enumerate(graph.nodes)}
    group_of: dict[fx.Node, list[fx.Node]] = {}
    by_storage: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        storage = storage_of(node)
        if storage is not None:
            by_storage[storage].append(node)
            group_of[node] = by_storage[storage]
    for node in list(graph.nodes):
        written = mutated_arguments(node)
        if len(written) != 1 or written[0] is not node.args[0]:
            continue
        x = written[0]
        functional, group = _functional(node), group_of.get(x, [])
        if functional is None or not _is_local(x, node, group, order):
            continue
        if _history_is_kept(x, node, region, [n for n in group if order[n] < order[node]]):
            continue
        if functional is aten.copy.default:
            if not _copies_plainly(node):
                continue
            order.update(dict.fromkeys(_copied(graph, node), order[node]))
        elif _keeps_dtype(functional, node):
            node.target = functional
        else:
            continue
        x.replace_all_uses_with(node, delete_user_cb=lambda u, n=node: order[u] > order[n])  # type: ignore[misc]
        fresh = [node, *(n for n in group if order[n] > order[node])]  # the result has a storage of its own now
        group_of.update(dict.fromkeys(fresh, fresh))


def _copies_plainly(node: fx.Node) -> bool:
    """Whether a ``copy_`` writes a contiguous tensor from one on its own device."""
    x, y = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    return bool(x.is_contiguous()) and x.device == y.device


def _copied(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``x.copy_(y)`` on a contiguous ``x``, as a tensor of its own: autograd has no formula for ``aten.copy``. Returns the
    nodes put before it."""
    value = node.meta["val"]
    with graph.inserting_before(node):
        cast = insert(graph, node, aten.to.dtype, node.args[1], value.dtype)
        expanded = insert(graph, node, aten.expand_as.default, cast, node.args[0])
    node.target, node.args, node.kwargs = aten.clone.default, (expanded,), {"memory_format": torch.contiguous_format}
    return cast, expanded


def _is_local(x: fx.Node, node: fx.Node, group: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether the storage of ``x`` belongs to no input, and no older alias of it is read after the write.

    ``x`` may be a view: whoever reads the written elements reads them through ``x`` or through what is made of it later.
    """
    if not group or any(n.op in ("placeholder", "get_attr") for n in group):
        return False
    older = [n for n in group if order[n] < order[node] and n is not x]
    return not any(order[u] > order[node] for n in older for u in n.users)


def _history_is_kept(x: fx.Node, node: fx.Node, region: dict[fx.Node, tuple], older: list[fx.Node]) -> bool:
    """Whether ``x``, one of ``older`` aliases, may have a gradient that a write under no_grad does not touch."""
    return not region[node][0] and x.meta["val"].dtype.is_floating_point and any(region[n][0] for n in older)


def _keeps_dtype(functional: torch._ops.OpOverload, node: fx.Node) -> bool:
    """Whether the result has dtype and shape of what is written, under autocast too, which leaves in-place ops alone."""
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    for cast in (False, True):
        try:
            with (
                x.fake_mode,
                torch.no_grad(),
                torch.autocast(x.device.type, torch.bfloat16, enabled=cast, cache_enabled=False),
            ):
                result = functional(*args, **kwargs)
        except Exception:  # the fakes cannot tell: leave it as it is
            return False
        if result.dtype != x.dtype or list(map(str, result.shape)) != list(map(str, x.shape)):
            return False
    return True


def _functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``, if it has the same arguments."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._opname
    if target.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    found = getattr(packet, target._overloadname, None) if packet is not None else None
    if found is None:
        return None
    same = [a.name for a in found._schema.arguments] == [a.name for a in target._schema.arguments]
    return found if same else None
