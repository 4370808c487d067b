"""Data sets and batching for the model zoo."""

from .batches import BatchIterator, SampleSet
from .movielens import MovieLens, load_movielens

__all__ = ["BatchIterator", "MovieLens", "SampleSet", "load_movielens"]
