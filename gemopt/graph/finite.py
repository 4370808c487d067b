"""Dead rows stay finite, or what makes them is not packed.

A padded op that reads a packed tensor finds zeros, or the tensor's fact, in its dead rows: numbers that eager does not have
there. Nobody wants what the op makes of them, and its gradient there is 0. But 0 times infinity is NaN, and a gradient that
is summed over rows (of a weight, of values that queries share) would carry it to rows that live. So from a packed tensor
only ops that keep finite numbers finite, forward and backward, may follow in dead rows; one that might not (a division by
them, an exponential) sends the tensors behind it back to where they come from, to be computed padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from gemopt.graph import terms as t
from gemopt.graph.slots import argument, op_name

if TYPE_CHECKING:
    from gemopt.graph.layout import Layout

_FINITE_KINDS = frozenset(
    ["view", "expand", "select", "slice", "cat", "stack", "gather", "index", "embedding", "linear", "contraction"]
    + ["triangle", "boolean_index", "source"]
)
_NAMES = """
    gather index_select take_along_dim index select slice narrow cat concat stack repeat repeat_interleave roll expand
    view reshape permute transpose flatten unflatten squeeze unsqueeze embedding linear matmul mm bmm baddbmm addmm einsum
    add sub rsub neg mul square abs sign lerp addcmul clone contiguous detach alias to _to_copy type_as lift_fresh_copy
    dropout bernoulli rand_like randn_like zeros_like ones_like full_like where masked_fill nan_to_num tril triu flip
    clamp clamp_min clamp_max clip minimum maximum relu relu6 leaky_relu elu selu celu gelu silu mish softplus hardtanh
    hardsigmoid hardswish sigmoid log_sigmoid logsigmoid tanh sin cos atan floor ceil round trunc
    eq ne lt le gt ge isfinite isnan isinf logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__
    sum nansum mean var amax amin any all logsumexp argmax argmin count_nonzero cumsum
    softmax _softmax special_softmax log_softmax _log_softmax special_log_softmax layer_norm rms_norm
    scaled_dot_product_attention cross_entropy_loss nll_loss_nd nll_loss binary_cross_entropy_with_logits
    binary_cross_entropy mse_loss l1_loss smooth_l1_loss huber_loss
"""
_FINITE = frozenset(f"aten.{name}" for name in _NAMES.split())


def overflowing(layout: Layout) -> set[fx.Node]:
    """Packed nodes whose dead rows may become infinite, or NaN, in some padded op."""
    gone = {n for out, site in layout.sites.items() if layout.attended(out) for n in site.interior}
    # What is unlike eager in dead rows, and the packed nodes behind it.
    unlike: dict[fx.Node, set[fx.Node]] = {n: {n} for n in layout.packed if not _filled_as_in_eager(n, layout)}
    found: set[fx.Node] = set()
    for node in layout.known.infos:  # in graph order
        if node in layout.packed or node in gone or layout.live.need(node) == t.TRUE:
            continue
        behind = {o: unlike[o] for o in layout.operands(node) if o in unlike}
        if not behind:
            continue
        if keeps_finite(node, set(behind), layout):
            unlike[node] = set().union(*behind.values())
        else:
            found.update(*behind.values())
    return found


def _filled_as_in_eager(node: fx.Node, layout: Layout) -> bool:
    """Whether the tensor's fact, with which its dead rows are filled, holds of all of them."""
    fact = layout.known.facts.get(node)
    return fact is not None and t.implies(t.not_(layout.live.need(node)), fact.where)


def keeps_finite(node: fx.Node, unlike: set[fx.Node], layout: Layout) -> bool:
    """Whether an op makes finite numbers, and finite derivatives, of finite ones in its operands ``unlike``."""
    name = op_name(node)
    if name in ("aten.layer_norm", "aten.rms_norm"):
        return argument(node, "eps") is None or argument(node, "eps") > 0
    if name in _FINITE or node in layout.sites or layout.known.info(node).kind in _FINITE_KINDS:
        return True
    if name in ("aten.div", "aten.floor_divide", "aten.remainder", "aten.fmod"):
        return node.args[1] not in unlike
    if name == "aten.pow":
        power = argument(node, "exponent")
        return isinstance(power, int | float) and power >= 1 and float(power).is_integer()
    return False
