"""Recipe(verify=True) passes right rewrites and throws out wrong ones, of whichever part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemopt
from gemopt.graph import attend, emit


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(ids)
        valid = torch.arange(ids.shape[1])[None] < lengths[:, None]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        p = scores.masked_fill(~valid[:, None, :], float("-inf")).softmax(-1)
        return ((p @ self.v(x) + x) * valid[..., None]).sum(1)


def compiled(**options: Any) -> tuple[Model, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    inputs = (torch.randint(1, 30, (4, 9)), torch.tensor([3, 9, 1, 5]))
    return model, gemopt.compile(model, inner="eager", strict=True, verify=True, **options), inputs


def test_right_rewrites_are_marked_verified() -> None:
    model, fast, inputs = compiled()
    torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert fast.report.rewrites and all(r.verified for r in fast.report.rewrites)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda o: o | {"scale": o["scale"] * 1.01},
        lambda o: o | {"causal": True},
        lambda o: o | {"window": (1, 1)},
    ],
)
def test_a_wrong_attention_is_thrown_out(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = attend._Attention._options
    monkeypatch.setattr(attend._Attention, "_options", lambda *a: wrong(options(*a)))
    model, fast, inputs = compiled()
    torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert not [r for r in fast.report.rewrites if r.kernel]
    assert [r for r in fast.report.rejections if r.rule == "verify"]


def test_a_wrong_region_is_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = emit.Emitter._packed_linear

    def shifted(self: Any, node: Any, info: Any, rows: Any) -> Any:
        return self.call(torch.ops.aten.mul.Tensor, linear(self, node, info, rows), 1.001)

    monkeypatch.setattr(emit.Emitter, "_packed_linear", shifted)
    model, fast, inputs = compiled()
    torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert not fast.report.rewrites
    assert [r for r in fast.report.rejections if r.rule == "verify"]
