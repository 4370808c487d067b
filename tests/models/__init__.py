"""Small padded models in many spellings, for tests of anything that claims to rewrite models."""

from . import losses, modules, oddities, published, spelled, towers  # noqa: F401  (importing registers the cases)
from .registry import CASES, ModelCase, select

__all__ = ["CASES", "ModelCase", "select"]
