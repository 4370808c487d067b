"""The seam to Dynamo: settings that hold while Dynamo compiles *our* frames, and nowhere else.

gemopt's contract is one graph for all batch sizes and lengths of at least 2. Three settings of Dynamo stand
in its way:

- duck shaping gives equal sizes one symbol, so a first batch with B == L would be a graph for square batches
  only;
- Python floats (an attention scale, a dropout probability) become 0-d tensor inputs plus ``aten.item`` under
  dynamic shapes, which hides constants from the analyses and compiles twice;
- sizes count as static until they change.

The last is ``dynamic=True``. The first two are global settings. They are read only while a frame is being
compiled, and every compilation goes through one callback, which Dynamo's C code calls on a cache miss.
Wrapping that callback scopes the settings exactly: nothing to pay on a cache hit, no guard on them, no other
user of torch.compile sees them.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
import torch.fx.experimental._config
from torch._dynamo.convert_frame import compile_lock


class ScopedCallback:
    """Dynamo's frame callback, called with gemopt's settings in force.

    The lock is Dynamo's own (re-entrant) compile lock: while the settings are patched, no other thread
    compiles.
    """

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback  # the chain that Dynamo follows to tell backends apart

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(compile_lock)
            stack.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))
            stack.enter_context(torch._dynamo.config.patch(specialize_float=True))
            return self._torchdynamo_orig_backend(*args, **kwargs)


def optimize(fn: Any, backend: Any, **options: Any) -> Any:
    """``torch._dynamo.optimize(backend, **options)(fn)`` with gemopt's settings.

    Options this torch does not know are dropped if they are None or False, and refused otherwise.
    """
    known = inspect.signature(torch._dynamo.eval_frame._optimize).parameters
    for name, value in list(options.items()):
        if name not in known:
            if value:
                raise TypeError(f"{name}: got {value!r}; torch {torch.__version__} has no such option")
            del options[name]
    context = torch._dynamo.optimize(backend=backend, **options)
    if callable(getattr(context, "callback", None)):  # not so where Dynamo is disabled
        context.callback = ScopedCallback(context.callback)
    return context(fn)
