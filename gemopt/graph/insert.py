"""Writing calls into a captured graph."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._dispatch.python import enable_python_dispatcher


def insert(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call with its fake value, at the graph's insertion point and described as ``like`` (source line, mode)."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta", "example_value")}
    fakes, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with like.meta["val"].fake_mode, enable_python_dispatcher():
        node.meta["val"] = target(*fakes, **named)
    return node
