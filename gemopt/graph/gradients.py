"""Inputs that eager gives a gradient of zeros get one from the packed graph too, not None.

What is rewritten may lose an input whose gradient is 0 whatever the batch: a bias that a softmax cancels, a tensor that is
overwritten. Optimisers tell zeros from None (AdamW decays the weight or does not), and so does DDP's reducer. Each such
input is added to the outputs it was part of, as the sum of none of its elements. Complex outputs are left
alone, and those that are expanded or have gaps: a sum would have other strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from gemopt.graph.capture import Captured, outputs_of, reached
from gemopt.graph.emit import is_dense

aten = torch.ops.aten


def keep_gradients(captured: Captured, packed: fx.GraphModule, fakes: Mapping[fx.Node, Any]) -> None:
    """Add the inputs that ``packed`` lost to its outputs, in place. ``fakes``: the values of its nodes."""
    if not captured.is_training_graph:
        return
    before = captured.trained_by_output
    after = reached(packed, captured.example_inputs, fakes)
    output, originals = packed.graph.output_node(), outputs_of(packed.graph)
    inputs = packed.graph.find_nodes(op="placeholder")
    missing = [
        (i, x)
        for i, (result, was, still) in enumerate(zip(originals, before, after, strict=True))
        if was & ~still and isinstance(result, fx.Node) and _can_be_added_to(fakes[result])
        for j, x in enumerate(inputs)
        if (was & ~still) >> j & 1
    ]
    if not missing:
        return
    results = list(originals)
    with packed.graph.inserting_before(output):
        for i, x in missing:
            results[i] = _with_nothing_of(packed.graph, results[i], x, fakes[originals[i]], fakes[x])
    output.args = (type(output.args[0])(results) if isinstance(output.args[0], list | tuple) else results[0],)
    packed.recompile()


def _can_be_added_to(value: Any) -> bool:
    """Adding 0 keeps the strides of a dense tensor only."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and is_dense(value)


def _with_nothing_of(graph: fx.Graph, result: Any, x: fx.Node, value: torch.Tensor, lost: torch.Tensor) -> fx.Node:
    """``result`` plus 0, with a gradient of zeros for ``x``: no element is read, so none is NaN."""
    none = graph.call_function(aten.slice.Tensor, (graph.call_function(aten.reshape.default, (x, [-1])), 0, 0, 0))
    zero = graph.call_function(aten.sum.default, (none,))
    if (lost.dtype, lost.device) != (value.dtype, value.device):
        zero = graph.call_function(aten._to_copy.default, (zero,), {"dtype": value.dtype, "device": value.device})
    return graph.call_function(aten.add.Tensor, (result, zero))
