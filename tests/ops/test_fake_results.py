"""What an op's fake promises is what its CPU kernels return: shape, strides and dtype, for drawn calls of all dtypes.

A compiler reads a result by the fake's dtype: a gradient returned in another is not converted, it is misread.
"""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemopt.kernels.cpu import native
from gemopt.ops import attention
from gemopt.ops.pffn import _pffn, _pffn_backward
from gemopt.ops.pffn_mixed import _pffn_mixed_backward, pffn_mixed
from tests.ops.attention_cases import Case, draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Short and long sequences, single queries and none at all take different paths.
LENGTHS = ((3, 0, 5), (70, 2), (1, 1), (0, 0))


def like_its_fake(op: torch._ops.OpOverload, arguments: tuple) -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = op(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))
    results = op(*arguments)
    for i, (fake, real) in enumerate(zip(fakes, results, strict=True)):
        kinds = [(x.dtype, x.device, tuple(x.shape), x.stride()) for x in (fake, real)]
        assert kinds[0] == kinds[1], f"result {i}: the fake is {kinds[0]}, the op returns {kinds[1]}"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    lengths = data.draw(st.sampled_from(LENGTHS), label="lengths")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    longest, samples = max(max(lengths), 1), len(lengths)
    score = data.draw(st.sampled_from(("softmax", "gelu")), label="score")
    bias = mask = None
    if data.draw(st.booleans(), label="has bias"):
        shape = tuple(data.draw(st.sampled_from((1, n))) for n in (samples, 4, longest, longest))
        bias = torch.randn(shape, dtype=data.draw(st.sampled_from(DTYPES), label="bias dtype"))
        bias = bias.transpose(-1, -2) if shape[-1] == shape[-2] and data.draw(st.booleans()) else bias
    if data.draw(st.booleans(), label="has mask"):
        mask = torch.rand(samples, 1, longest, longest) < 0.7
    inputs = draw(Case(lengths, heads=4, kv_heads=2, d=8), dtype)
    q, k, v = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v))
    offsets, causal = inputs.kwargs["q_offsets"], data.draw(st.booleans(), label="causal")
    shared = data.draw(st.booleans(), label="shared queries")
    q = q[:longest] if shared else q
    options = (0.5, causal, False, -1, -1, None, None, 0.0, None, bias, mask, score, 1.0, 0)
    spec = (None if shared else offsets, offsets, longest, longest, *options)
    with patch.object(native, "CACHED", data.draw(st.sampled_from((native.CACHED, 0)), label="long from")):
        like_its_fake(attention._attention.overload, (q, k, v, *spec))
        out, lse = attention._attention(q, k, v, *spec)
        saved = (out, lse) if score == "softmax" else (None, None)
        backward = (torch.ones_like(out), q, k, v, *saved, bias is not None, *spec)
        like_its_fake(attention._attention_backward.overload, backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [False, True])
def test_pffn(dtype: torch.dtype, weights: bool) -> None:
    q = torch.randn(7, 2, 8, dtype=dtype)
    k, v = torch.randn(2, 6, 2, 8, dtype=dtype)
    offsets = torch.tensor([0, 4, 4, 7]), torch.tensor([0, 2, 4, 6])
    scales = [torch.randn(16, dtype=dtype) for _ in range(3)] if weights else [None] * 3
    arguments = (q, k, v, *offsets, 4, 2, "silu", 0.3, 1.0, 1e-5, 1e-6, *scales)
    like_its_fake(_pffn.overload, arguments)
    _, ln, stats, g = _pffn(*arguments)
    like_its_fake(_pffn_backward.overload, (torch.ones_like(g), q, k, v, ln, stats, g, *arguments[3:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [False, True])
def test_mixed_pffn(dtype: torch.dtype, weights: bool) -> None:
    q = torch.randn(7, 2, 8, dtype=dtype)
    k, v = torch.randn(2, 6, 2, 8, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4, 4, 7]), torch.tensor([0, 2, 4, 6])
    scales = [torch.randn(16, dtype=of) for of in (torch.float32, torch.bfloat16, torch.float32)] if weights else [None] * 3
    arguments = (q, k, v, *offsets, 4, 2, "silu", 0.3, 1.0, 1e-5, 1e-6, *scales)
    like_its_fake(pffn_mixed.overload, arguments)
    out, ln, stats, a = pffn_mixed(*arguments)
    like_its_fake(_pffn_mixed_backward.overload, (torch.ones_like(out), q, k, v, ln, stats, a, *arguments[3:]))
