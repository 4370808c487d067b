"""embedding: the gradient of `aten.embedding`, summed by an op of its own."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from gemopt.ops.embedding import embedding

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding_idx", [-1, 0, 6])
def test_gradient(dtype: torch.dtype, padding_idx: int) -> None:
    weight = torch.randn(7, 3, dtype=dtype, requires_grad=True)
    for index in (torch.tensor([[1, 2, 1], [0, 6, 0]]), torch.tensor([5, 5]), torch.zeros(0, dtype=torch.int64)):
        out, want = embedding(weight, index, padding_idx), aten.embedding(weight, index, padding_idx)
        assert torch.equal(out, want)
        dout = torch.randn_like(out)
        grads = [torch.autograd.grad(x, weight, dout)[0] for x in (out, want)]
        torch.testing.assert_close(*grads)
        assert padding_idx < 0 or (grads[0][padding_idx] == 0).all()


def test_differentiable_twice() -> None:
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[1, 2, 1], [0, 6, 0]])
    assert torch.autograd.gradgradcheck(lambda w: embedding(w, index, 6).square(), (weight,))


def test_compiled_graphs_see_the_operator_they_can_fuse() -> None:
    seen = []

    def compiler(gm: torch.fx.GraphModule, inputs: object) -> Any:
        seen.append({str(n.target) for n in gm.graph.nodes})
        return make_boxed_func(gm.forward)

    weight, index = torch.randn(7, 3, requires_grad=True), torch.tensor([1, 2, 1])
    compiled = torch.compile(lambda w: embedding(w, index, 0).sum(), backend=aot_autograd(fw_compiler=compiler))
    compiled(weight).backward()
    assert "aten.embedding.default" in seen[0]
    assert any("embedding_gradient" in name for name in seen[1]) and weight.grad is not None
    assert weight.grad[:, 0].tolist() == [0, 2, 1, 0, 0, 0, 0]
