"""gemopt: a torch.compile backend that trains padded recommendation transformers packed.

The public names are loaded on first use, so that ``import gemopt`` costs nothing and tools that only need the
version, the report or the command line never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> (module, attribute); an attribute of None exports the module itself
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "compile": ("gemopt.api", "compile"),
    "explain": ("gemopt.api", "explain"),
    "Recipe": ("gemopt.recipe", "Recipe"),
    "Report": ("gemopt.report", "Report"),
    "ops": ("gemopt.ops", None),
    "testing": ("gemopt.testing", None),
}

__all__ = ["Recipe", "Report", "__version__", "compile", "explain", "ops", "testing"]

if TYPE_CHECKING:
    from gemopt import ops, testing
    from gemopt.api import compile, explain
    from gemopt.recipe import Recipe
    from gemopt.report import Report


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module 'gemopt' has no attribute {name!r}") from None
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_EXPORTS))
