"""What rows that nobody needs overflow to stays there: 0 times infinity is NaN, and gradients sum over rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gemopt.testing import EquivalenceError, assert_equivalent

from .common import compiled, sweep

# Scores `[B, Lq, Lk]`, and the mask of those allowed, to weights; in rows of queries whose scores are made up, the maximum
# or the sum that is taken out is not theirs.
NORMALISED = {
    "exp and maximum, hidden ones on top": lambda s, ok: _exp(s.masked_fill(~ok, -1e9) * -1.0),
    "exp and maximum": lambda s, ok: _exp(s.masked_fill(~ok, -200.0)),
    "division by a norm": lambda s, ok: (s * ok) / (s * ok).square().sum(-1, keepdim=True).sqrt(),
    "logarithm": lambda s, ok: (s * ok).square().sum(-1, keepdim=True).log() + s * ok,
    "power": lambda s, ok: (s * ok).abs().sum(-1, keepdim=True).pow(-0.5) * s,
}


def _exp(scores: Tensor) -> Tensor:
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


class Model(nn.Module):
    """Two layers of attention written out, of which one row is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.project = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        valid = position < lengths[:, None]
        allowed = valid[:, None, :] & (position[:, None] >= position)
        for layer in self.project:
            q, k, v = layer(x).chunk(3, -1)
            weights = NORMALISED[self.kind](q @ k.mT, allowed)
            x = x + (weights[..., None] * v[:, None]).sum(2)
        return x[:, 0]


def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(len(lengths), max_len, 8, generator=g, dtype=torch.float64) + 2, lengths.clamp(min=1)


@pytest.mark.parametrize("kind", [*list(NORMALISED)[:1], *(pytest.param(k, marks=sweep) for k in list(NORMALISED)[1:])])
def test_gradients_stay_finite(kind: str) -> None:
    model = Model(kind).double()
    assert_equivalent(model, inputs, compiled=compiled(model), cases=("given", "skewed"))


def test_without_the_rule_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemopt.graph.layout.overflowing", lambda layout: set())
    model = Model("exp and maximum, hidden ones on top").double()
    with pytest.raises(EquivalenceError, match="not finite where eager's are"):
        assert_equivalent(model, inputs, compiled=compiled(model), cases=("given",))
