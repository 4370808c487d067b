"""The registry: every model of the zoo that reads the batches of data/schema.py, by name and size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from . import configs
from .bst import BST
from .data.schema import Schema
from .gem import GEM
from .hstu import HSTU
from .interformer import InterFormer
from .kunlun import Kunlun
from .sasrec_ranker import SASRecRanker
from .wukong import Wukong

MODELS: dict[str, Callable[[Schema, Any], nn.Module]] = {
    "gem": GEM,
    "kunlun": Kunlun,
    "interformer": InterFormer,
    "wukong": Wukong,
    "hstu": HSTU,
    "bst": BST,
    "sasrec": SASRecRanker,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gem": configs.GEM,
    "kunlun": configs.KUNLUN,
    "interformer": configs.INTERFORMER,
    "wukong": configs.WUKONG,
    "hstu": configs.HSTU,
    "bst": configs.BST,
    "sasrec": configs.SASREC,
}


def build(name: str, schema: Schema, config_name: str = "small", **overrides: Any) -> nn.Module:
    """A new model: ``forward(batch)`` gives the logit [B] of every task, by name.

    Args:
        name: one of ``MODELS``. config_name: one of ``CONFIGS[name]``. overrides: fields of that config.
    Raises:
        ValueError: an unknown name, size or field; sizes that do not fit each other or the schema.
    """
    return MODELS[_known("name", name, MODELS)](schema, config(name, config_name, **overrides))


def config(name: str, config_name: str = "small", **overrides: Any) -> Any:
    """The config that ``build`` uses, a frozen dataclass."""
    sizes = CONFIGS[_known("name", name, CONFIGS)]
    found = sizes[_known("config_name", config_name, sizes)]
    for given in overrides:
        _known("overrides", given, found.__dataclass_fields__)
    return replace(found, **overrides)


def _known(argument: str, given: str, allowed: Any) -> str:
    if given not in allowed:
        raise ValueError(f"{argument}: got {given!r}; allowed: {', '.join(allowed)}")
    return given
