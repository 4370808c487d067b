"""Metrics against closed forms and brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemopt.model_zoo import metrics

samples = st.lists(st.tuples(st.integers(-40, 40), st.booleans()), min_size=1, max_size=30)


@given(samples)
def test_against_brute_force(pairs):
    x, y = np.array([p[0] / 4 for p in pairs]), np.array([float(p[1]) for p in pairs])
    p = [1 / (1 + math.exp(-v)) for v in x]
    loss = -sum(math.log(q) if t else math.log(1 - q) for q, t in zip(p, y, strict=True)) / len(y)
    got = metrics.evaluate(x, y)
    assert got.log_loss == pytest.approx(loss, rel=1e-9)
    clicks, others = x[y == 1], x[y == 0]
    if len(clicks) == 0 or len(others) == 0:
        assert math.isnan(got.auc) and math.isnan(got.ne)
    else:
        wins = sum(float(a > b) + 0.5 * float(a == b) for a in clicks for b in others)
        assert got.auc == pytest.approx(wins / (len(clicks) * len(others)), abs=1e-12)
        rate = y.mean()
        assert got.ne == pytest.approx(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), rel=1e-9)
    expected = sum(p) / len(clicks) if len(clicks) else math.inf
    assert got.calibration == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 50), st.integers(1, 50))
def test_predicting_the_rate_has_entropy_one(clicks, others):
    rate = clicks / (clicks + others)
    labels = np.r_[np.ones(clicks), np.zeros(others)]
    got = metrics.evaluate(np.full(len(labels), math.log(rate / (1 - rate))), labels)
    assert got.ne == pytest.approx(1) and got.auc == 0.5 and got.calibration == pytest.approx(1)


def test_extremes_stay_finite():
    got = metrics.evaluate(np.array([800.0, -800.0, 1e5]), np.array([1.0, 0.0, 0.0]))
    assert got.log_loss == pytest.approx(1e5 / 3) and math.isfinite(got.ne) and got.auc == 0.5


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([1.0], [1.0, 0.0], "equally long"),
        ([], [], "equally long"),
        ([1.0], [0.5], "0 or 1"),
        ([math.nan], [1.0], "NaN"),
    ],
)
def test_bad_input(scores, labels, message):
    with pytest.raises(ValueError, match=message):
        metrics.evaluate(scores, labels)
