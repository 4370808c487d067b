"""What depends on offsets alone is worked out once for a batch, not once for a layer and direction.

Only for offsets that somebody vouches for: whether memory still holds what it held cannot be seen from outside, since
compiled code writes to memory it reuses without leaving a trace on any tensor. The packed graph's own inputs are vouched
for by `gemopt.graph.plan`, anew each step: nothing writes to them while the step lasts, its backward included (autograd
checks the versions of what it saved). AOTAutograd wraps them in other tensor objects for the backward; so storages are
what is recognised. What is kept dies with the storage, or when a step vouches for it again.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")
# By the address of the storage, which nothing else can have while the weak reference lives: results by what they are of,
# each with the storage of the other offsets.
_KEPT: dict[int, tuple[StorageWeakRef, dict[Hashable, tuple[StorageWeakRef, Any]]]] = {}


def vouch_for(*offsets: Tensor) -> None:
    """Vouch that nobody writes to the memory of these offsets until the step that begins now is over."""
    for address in [a for a, (storage, _) in list(_KEPT.items()) if storage.expired()]:
        _KEPT.pop(address, None)
    for x in offsets:
        storage = StorageWeakRef(x.untyped_storage())
        _KEPT[storage.cdata] = (storage, {})


def remembered(x: Tensor, y: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or its earlier result for the same two offsets and key if both are vouched for."""
    mine, other = (_KEPT.get(offsets.untyped_storage()._cdata) for offsets in (x, y))
    if mine is None or other is None or mine[0].expired() or other[0].expired():
        return make()
    known, (storage, _) = mine[1], other
    key = (key, storage.cdata, *(_place(offsets) for offsets in (x, y)))
    found = known.get(key)
    if found is None or found[0].expired():
        found = known[key] = (storage, make())
    return found[1]  # type: ignore[no-any-return]


def _place(x: Tensor) -> tuple[Hashable, ...]:
    return x.storage_offset(), *x.shape, *x.stride(), x.dtype
