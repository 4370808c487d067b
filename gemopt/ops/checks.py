"""Argument checks of the public ops.

They run while Dynamo, AOTAutograd and FakeTensor trace, where a size may be a symbol nobody knows yet. So a size is
looked at only when it is a plain `int`; sizes that are symbols are checked by the kernels, on the real tensors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def check(condition: bool, message: Callable[[], str] | str) -> None:
    """Raise `ValueError(message)` unless `condition`."""
    if not condition:
        raise ValueError(message if isinstance(message, str) else message())


def check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")


def check_index(op: str, name: str, value: object, dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES) -> None:
    """A 1-D integer tensor."""
    check_tensor(op, name, value)
    assert isinstance(value, Tensor)
    allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    check(value.dim() == 1, lambda: f"{op}: {name} must be 1-D, got {value.dim()}-D")
    check(value.dtype in dtypes, lambda: f"{op}: {name} must be {allowed}, got {value.dtype}")


def same_size(a: object, b: object) -> bool:
    """Equal, as far as plain ints can tell; a symbolic size is given the benefit of the doubt."""
    return not (type(a) is int and type(b) is int) or a == b


def check_same_device(op: str, name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    check(value.device == other.device, lambda: f"{op}: {name} is on {value.device} but {other_name} is on {other.device}")
