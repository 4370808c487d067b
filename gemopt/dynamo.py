"""The seam to Dynamo: settings that hold while Dynamo compiles *our* frames, and nowhere else.

gemopt's contract is one graph for all batch sizes and lengths of at least 2. These settings stand in its way:

- duck shaping gives equal sizes one symbol, so a first batch with B == L would be a graph for square batches;
- Python floats (an attention scale, a dropout probability) become 0-d tensor inputs plus ``aten.item`` under
  dynamic shapes, which hides constants from the analyses and compiles twice;
- ``x[mask]`` breaks the graph, and the padded ``x`` becomes an output of its first half;
- sizes count as static until they change.

The last is ``dynamic=True``. The first three are global settings, and so is the cache of fake tensors: under dynamic shapes
it costs more than it saves, but for large graphs (`share_fakes`). They are read only while a frame is being
compiled, and every compilation goes through one callback, which Dynamo's C code calls on a cache miss.
Wrapping that callback scopes the settings exactly: nothing to pay on a cache hit, no guard on them, and no
other user of torch.compile sees them.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._dynamo
import torch._dynamo.config
import torch.fx.experimental._config
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import _optimize
from torch._guards import TracingContext

# A float that changes from call to call (a temperature passed to the step) costs a compilation each time it
# is a constant. From the fifth compilation of one frame on, floats are left dynamic.
_MAX_FLOAT_COMPILATIONS = 4

# From how many nodes on the fakes of one call serve all that look like it: a graph so large repeats its layers.
_REPEATS = 500


# Compilations of a code object by all callbacks. Two gemopt backends are never equal, so the models of one
# class do not share entries, as they do under torch.compile; what other models compiled must not count
# against this one's limit.
_all_compilations: WeakKeyDictionary[CodeType, int] = WeakKeyDictionary()


class ScopedCallback:
    """Dynamo's frame callback, called with gemopt's settings in force.

    The lock is Dynamo's own (re-entrant) compile lock: while the settings are patched, no other thread
    compiles. ``static``: no size is a symbol.
    """

    def __init__(self, callback: Any, static: bool = False) -> None:
        self._static = static
        self._torchdynamo_orig_backend = callback  # the chain that Dynamo follows to tell backends apart
        self._compilations: WeakKeyDictionary[CodeType, int] = WeakKeyDictionary()

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(compile_lock)
            mine = self._compilations.get(frame.f_code, 0)
            all_ = _all_compilations.get(frame.f_code, 0)
            self._compilations[frame.f_code], _all_compilations[frame.f_code] = mine + 1, all_ + 1
            stack.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))
            stack.enter_context(
                torch._dynamo.config.patch(
                    specialize_float=mine < _MAX_FLOAT_COMPILATIONS,
                    capture_dynamic_output_shape_ops=True,
                    fake_tensor_cache_enabled=self._static,
                    recompile_limit=torch._dynamo.config.recompile_limit + all_ - mine,
                    accumulated_recompile_limit=torch._dynamo.config.accumulated_recompile_limit + all_ - mine,
                )
            )
            return self._torchdynamo_orig_backend(frame, *args, **kwargs)


def share_fakes(gm: torch.fx.GraphModule) -> None:
    """From here on, use the cache of fake tensors in this compilation if the graph is large.

    GEM small (1,633 nodes, dynamic shapes, 2-core EPYC, torch 2.11): Dynamo, gemopt and AOTAutograd take 113 s with it and
    132 s without; tests of one or two layers take a fifth longer with it.
    """
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is not None and len(gm.graph.nodes) >= _REPEATS and not mode.propagate_real_tensors:
        mode.cache_enabled = True


def supports(option: str) -> bool:
    """Whether this torch's ``torch.compile`` has the option."""
    return option in inspect.signature(_optimize).parameters


def default_stance() -> AbstractContextManager[Any]:
    """``torch.compiler.set_stance("default")``, at no cost where no other is in force."""
    if torch._dynamo.eval_frame._stance.stance == "default":
        return nullcontext()
    return torch.compiler.set_stance("default")


def optimize(fn: Any, backend: Any, **options: Any) -> Any:
    """``torch._dynamo.optimize(backend, **options)(fn)`` with gemopt's settings.

    Raises:
        TypeError: an option is set that this torch does not have.
    """
    for name in [name for name in options if not supports(name)]:
        if options[name]:
            raise TypeError(f"{name}: got {options[name]!r}; torch {torch.__version__} has no such option")
        del options[name]
    context = torch._dynamo.optimize(backend=backend, **options)
    if callable(getattr(context, "callback", None)):  # not so where Dynamo is disabled
        context.callback = ScopedCallback(context.callback, static=options.get("dynamic") is False)
    return context(fn)
