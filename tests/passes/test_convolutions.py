"""A convolution of one token becomes a linear layer; any other stays; SASRec's feed-forward then packs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from gemopt.passes.convolutions import pointwise_convolutions
from gemopt.testing import assert_equivalent

SPELLINGS = {
    "plain": nn.Conv1d(6, 4, 1),
    "no bias": nn.Conv1d(6, 4, 1, bias=False),
    "dilated": nn.Conv1d(6, 4, 1, dilation=3),
}
OTHERS = {
    "three tokens": nn.Conv1d(6, 4, 3, padding=1),
    "strided": nn.Conv1d(6, 4, 1, stride=2),
    "padded": nn.Conv1d(6, 4, 1, padding=1),
    "grouped": nn.Conv1d(6, 4, 1, groups=2),
}


def converted(layer: nn.Module, x: Tensor) -> tuple[list[str], Tensor]:
    parameters = dict(layer.named_parameters())
    run = lambda p, x: functional_call(layer, p, x)  # noqa: E731
    gm = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(parameters, x)
    pointwise_convolutions(gm)
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"], gm(parameters, x)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("shape", [(5, 6, 7), (6, 7), (1, 6, 1)])
def test_one_token_is_a_linear_layer(name: str, shape: tuple[int, ...]) -> None:
    layer, x = SPELLINGS[name].double(), torch.randn(*shape, dtype=torch.float64)
    ops, result = converted(layer, x)
    assert "aten.conv1d.default" not in ops and "aten.linear.default" in ops
    torch.testing.assert_close(result, layer(x))
    assert result.shape == layer(x).shape


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay(name: str) -> None:
    layer, x = OTHERS[name].double(), torch.randn(5, 6, 7, dtype=torch.float64)
    ops, result = converted(layer, x)
    assert "aten.conv1d.default" in ops and "aten.linear.default" not in ops
    assert torch.equal(result, layer(x))


class Block(nn.Module):
    """Masked attention and SASRec's feed-forward of two convolutions, summed over the valid positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(41, 12, padding_idx=0), nn.MultiheadAttention(12, 2, batch_first=True)
        self.first, self.second = nn.Conv1d(12, 20, 1), nn.Conv1d(20, 12, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.attention(x, x, x, key_padding_mask=ids == 0, need_weights=False)[0]
        x = x + self.second(torch.relu(self.first(x.transpose(-1, -2)))).transpose(-1, -2)
        return (x * (ids != 0)[..., None]).sum(1)


def test_feed_forward_of_convolutions_packs() -> None:
    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        ids = torch.randint(1, 41, (len(lengths), max_len), generator=g)
        return (ids * (torch.arange(max_len) < lengths[:, None]),)

    result = assert_equivalent(Block(), inputs, cases=("skewed", "given"))
    assert all(case.path == "packed" for case in result.cases)
    (region,) = [r for r in result.report.rewrites if r.rule == "unpad region"]
    assert "linear" in region.before and "conv1d" not in region.before
