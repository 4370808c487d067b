"""Units: the dims of a packed tensor, as slots of the original.

A packed tensor is ``[T, *rest]`` where the rest are the original's dims with the row axes taken out. A *unit* is one factor
of one dim (a slot), or a dim of size 1; lists of units say how a tensor is laid out before merged dims are put together.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemopt.graph.slots import Access, Info

Unit = int | tuple[str, int]  # a slot, or ("one", d) for a dim of size 1


def kept_dims(info: Info, slots: Sequence[int]) -> list[int]:
    """Dims that remain when the row axes are taken out: all but those that were nothing else."""
    gone = set(slots)
    return [d for d, own in enumerate(info.dim_slots()) if not own or not set(own) <= gone]


def kept_units(info: Info, slots: Sequence[int]) -> list[Unit]:
    gone = set(slots)
    units: list[Unit] = []
    dim_slots = info.dim_slots()
    for d in kept_dims(info, slots):
        units += [s for s in dim_slots[d] if s not in gone] if dim_slots[d] else [("one", d)]
    return units


def all_units(info: Info) -> list[Unit]:
    units: list[Unit] = []
    for d, own in enumerate(info.dim_slots()):
        units += list(own) if own else [("one", d)]
    return units


def plain_slots(access: Access) -> dict[int, int]:
    """Result slot -> operand slot, where the access is a plain renaming."""
    return {e.args[0]: i for i, e in enumerate(access.exprs) if e is not None and e.op == "slot"}
