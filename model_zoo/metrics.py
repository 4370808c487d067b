"""Metrics of click prediction, in float64 and exact.

Normalised entropy: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014:
the mean log loss over that of always predicting the mean click rate. Below 1 is better than knowing the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """``ne``: lower is better. ``auc``: higher. ``calibration``: predicted clicks over clicks, 1 is right."""

    ne: float
    auc: float
    calibration: float
    log_loss: float  # nats per sample
    samples: int


def evaluate(logits: ArrayLike, labels: ArrayLike) -> Metrics:
    """All metrics of ``logits`` [N] against ``labels`` [N], each 0 or 1."""
    x, y = _checked(logits, labels)
    return Metrics(
        ne=normalised_entropy(x, y),
        auc=auc(x, y),
        calibration=calibration(x, y),
        log_loss=log_loss(x, y),
        samples=len(y),
    )


def log_loss(logits: ArrayLike, labels: ArrayLike) -> float:
    """Mean binary cross-entropy, from logits so that a sure prediction does not become log(0)."""
    x, y = _checked(logits, labels)
    return float(np.mean(np.logaddexp(0.0, x) - y * x))


def normalised_entropy(logits: ArrayLike, labels: ArrayLike) -> float:
    """Log loss over the entropy of the mean click rate; NaN where all labels are equal (entropy 0)."""
    x, y = _checked(logits, labels)
    rate = y.mean()
    if rate in (0.0, 1.0):
        return float("nan")
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return log_loss(x, y) / float(entropy)


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Probability that a click scores above a non-click, ties counting half; NaN if all labels are equal.

    The Mann-Whitney statistic from average ranks, exact, in O(N log N).
    """
    x, y = _checked(scores, labels)
    clicks = y.sum()
    others = len(y) - clicks
    if clicks == 0 or others == 0:
        return float("nan")
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    above = np.cumsum(counts)
    average_rank = above - (counts - 1) / 2  # ranks start at 1
    rank_sum = average_rank[place] @ y
    return float((rank_sum - clicks * (clicks + 1) / 2) / (clicks * others))


def calibration(logits: ArrayLike, labels: ArrayLike) -> float:
    """Sum of predicted probabilities over the number of clicks; infinite if there are none."""
    x, y = _checked(logits, labels)
    predicted = np.exp(-np.logaddexp(0.0, -x)).sum()
    return float(predicted / y.sum()) if y.sum() else float("inf")


def _checked(scores: ArrayLike, labels: ArrayLike) -> tuple[Floats, Floats]:
    x, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or len(x) == 0:
        raise ValueError(f"scores and labels must be equally long 1-D arrays, got shapes {x.shape} and {y.shape}")
    if not np.isin(y, (0.0, 1.0)).all():
        raise ValueError("labels must be 0 or 1")
    if np.isnan(x).any():
        raise ValueError(f"scores holds {int(np.isnan(x).sum())} NaN")
    return x, y
