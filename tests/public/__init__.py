"""Public models, unmodified, as their packages install them: each compiled, compared with eager, and counted.

The cases say nothing about how gemopt works: they come from how the packages are used. Packages that are missing skip
their cases (`make setup-public` installs them). `python bench/public.py` writes the table of docs/public-models.md.
"""

from . import ctr, hf, recsys, torch_nn  # noqa: F401  (importing files the cases)
from .registry import CASES, Built, PublicCase
from .running import Outcome, run

__all__ = ["CASES", "Built", "Outcome", "PublicCase", "run"]
