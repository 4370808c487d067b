"""Models written as a researcher would write them: plain, padded PyTorch, with no import of gemopt."""

from .gem_small import GEMSmall, GEMSmallConfig
from .sasrec import SASRec, SASRecConfig

__all__ = ["GEMSmall", "GEMSmallConfig", "SASRec", "SASRecConfig"]
