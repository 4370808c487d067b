"""Feature-side parts against loops in fp64: dense tokens, MaskNet, Wukong, experts, InterFormer's gates, heads, PFFN."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from gemopt.model_zoo.parts.dense_tokens import DenseTokens
from gemopt.model_zoo.parts.experts import WukongExperts, partition
from gemopt.model_zoo.parts.heads import Heads
from gemopt.model_zoo.parts.interformer import FeatureSummary, Gate
from gemopt.model_zoo.parts.masknet import MaskNet
from gemopt.model_zoo.parts.mlp import MLP, TokenMix
from gemopt.model_zoo.parts.pffn import PFFN, LinearPFFN
from gemopt.model_zoo.parts.seed_pooling import SumKronLinear
from gemopt.model_zoo.parts.wukong import WukongLayer

from .parts_common import close, f64, randn


def test_mlp_and_token_mix():
    mlp = f64(MLP([3, 5, 2], "gelu"))
    a, b = mlp.layers
    x = randn(4, 3)
    close(mlp(x), F.gelu(x @ a.weight.T + a.bias) @ b.weight.T + b.bias)
    mix = f64(TokenMix(3, 2))
    x = randn(4, 3, 5)
    close(mix(x)[1], mix.linear.weight @ x[1])
    with pytest.raises(ValueError, match="sizes"):
        MLP([3])
    with pytest.raises(ValueError, match="activation"):
        MLP([3, 2], "selu")


def test_dense_tokens():
    dense = f64(DenseTokens(3, 4, n_tokens=2))
    x, layer = randn(5, 3), dense.mlp.layers[0]
    out = dense(x)
    assert out.shape == (5, 2, 4)
    close(out[2, 1], layer.weight[4:] @ x[2] + layer.bias[4:])
    assert dense(x[:0]).shape == (0, 2, 4)


def test_masknet():
    part = f64(MaskNet(2, 3, 4))
    a, b = randn(2, 5, 3), randn(2, 5, 3, seed=2)
    out = part([a, b])
    for i in range(2):
        for t in range(5):
            s = torch.cat([a[i, t], b[i, t]])
            close(out[i, t], part.norm(part.merge(s * part.mask(s))))


@pytest.mark.parametrize("n_out", [None, 3, 7])
def test_wukong_layer(n_out):
    part = f64(WukongLayer(5, 4, n_out, rank=2, hidden=(6,)))
    x = randn(3, 5, 4)
    out = part(x)
    total = n_out or 5
    assert out.shape == (3, total, 4)
    for i in range(3):
        pairs = x[i] @ x[i].T  # the definition: all inner products, projected
        fm = part.fmb.mlp(part.fmb.norm((pairs @ part.fmb.project).flatten())).view(-1, 4)
        linear = part.lcb.linear.weight @ x[i]
        assert fm.shape[0] == math.ceil(total / 2)
        residual = x[i] if n_out is None else part.residual.linear.weight @ x[i]
        close(out[i], part.norm(torch.cat([fm, linear]) + residual))


def test_a_layer_with_context_starts_by_passing_its_own_tokens_on():
    torch.manual_seed(0)
    part, x = WukongLayer(40, 4, 3, rank=2, hidden=(6,), context=True), randn(3, 40, 4).float()
    assert torch.equal(part.residual(x), x[:, :3])
    assert not torch.equal(WukongLayer(40, 4, 3).residual(x), x[:, :3])


@given(st.integers(1, 4), st.integers(0, 9))
def test_partition(parts, extra):
    sizes = partition(2 * parts + extra, parts)
    assert sum(sizes) == 2 * parts + extra and max(sizes) - min(sizes) <= 1 and len(sizes) == parts


def test_experts_read_their_part_and_the_context():
    part = f64(WukongExperts(5, 2, 4, n_experts=2, rank=2, hidden=(6,)))
    x, context = randn(3, 5, 4), randn(3, 2, 4, seed=2)
    out = part(x, context)
    expected = [part.experts[0](torch.cat([x[:, :3], context], 1)), part.experts[1](torch.cat([x[:, 3:], context], 1))]
    close(out, torch.cat(expected, 1))
    other = x.clone()
    other[:, 4] += 1
    assert torch.equal(part(other, context)[:, :3], out[:, :3]) and not torch.equal(part(other, context)[:, 3:], out[:, 3:])
    with pytest.raises(ValueError, match="n_experts"):
        WukongExperts(3, 2, 4, n_experts=2)


def test_gate_and_feature_summary():
    gate, x = f64(Gate(4)), randn(2, 3, 4)
    z = x * gate.mlp(x)
    close(gate(x), z / (1 + torch.exp(-z)))
    torch.manual_seed(0)
    gate, small = Gate(64), 0.1 * randn(5, 7, 64).float()
    torch.testing.assert_close(gate(small), F.silu(small), rtol=0.4, atol=0.01)  # it starts open
    summary = f64(FeatureSummary(3, 2, 4))
    close(summary(x)[1], summary.gate(summary.mix.linear.weight @ x[1]))


def test_sum_kron_is_the_sum_of_kronecker_products():
    part = f64(SumKronLinear(4, 2, 3, rank=5))
    x = randn(2, 4, 3)
    full = sum(torch.kron(part.z[i].T.contiguous(), part.w[i].T.contiguous()) for i in range(5))
    close(part(x).flatten(1), x.flatten(1) @ full.T)
    assert sum(p.numel() for p in part.parameters()) == 5 * (4 * 2 + 3 * 3)
    assert gradcheck(lambda z: part(z), (x.requires_grad_(),))


@pytest.mark.parametrize(("act", "scale"), [("gelu", None), ("silu", 1.0), ("relu", 0.1)])
def test_pffn_is_a_feed_forward_layer_with_generated_weights(act, scale):
    d, heads, n_sum, d_sum, dff = 6, 2, 3, 5, 4
    part = f64(PFFN(d, heads, n_sum, d_sum, dff, act, scale))
    s, x_sum = randn(2, 7, d), randn(2, n_sum, d_sum, seed=2)
    out = part(s, x_sum)
    function = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}[act]
    factor = scale if scale is not None else (d // heads) ** -0.5
    for i in range(2):
        k = F.silu(part.key_tokens.linear.weight @ x_sum[i]) @ part.key.weight.T + part.key.bias
        v = F.silu(part.value_tokens.linear.weight @ x_sum[i]) @ part.value.weight.T + part.value.bias
        for t in range(7):
            row = s[i, t]
            ln = (row - row.mean()) / torch.sqrt(row.var(unbiased=False) + 1e-5)
            g = []
            for h in range(heads):
                part_of = slice(h * d // heads, (h + 1) * d // heads)
                g.append(function(k[:, part_of] @ ln[part_of] * factor) @ v[:, part_of])
            g = torch.cat(g) + ln
            close(out[i, t], g / torch.sqrt((g * g).mean() + 1e-5) + row)


def test_pffn_gradients_and_empty_batches():
    part = f64(PFFN(4, 2, 2, 3, 3))
    assert gradcheck(part, (randn(2, 3, 4).requires_grad_(), randn(2, 2, 3, seed=2).requires_grad_()))
    assert part(randn(0, 3, 4), randn(0, 2, 3)).shape == (0, 3, 4)
    with pytest.raises(ValueError, match="n_heads"):
        PFFN(5, 2, 2, 3, 3)


def test_linear_pffn():
    part, s, x_sum = f64(LinearPFFN(4, 3)), randn(2, 5, 4), randn(2, 3, 4, seed=2)
    for i in range(2):
        close(part(s, x_sum)[i], s[i] @ (x_sum[i].T @ part.mix))


@given(st.lists(st.integers(0, 2), max_size=6))
@settings(max_examples=20, deadline=None)
def test_heads_read_the_tower_of_the_domain(domains):
    torch.manual_seed(0)
    part = f64(Heads(4, ("ctr", "cvr"), n_domains=3, trunk=(5,), tower=2))
    x, domain = randn(len(domains), 4), torch.tensor(domains, dtype=torch.int64)
    out = part(x, domain)
    assert list(out) == ["ctr", "cvr"]
    for t, task in enumerate(out):
        assert out[task].shape == (len(domains),)
        for i, m in enumerate(domains):
            h = F.silu(part.trunk(x[i]))
            tower = F.silu(h @ part.hidden[t, m] + part.hidden_bias[t, m])
            close(out[task][i], tower @ part.last[t, m] + part.last_bias[t, m])


def test_heads_name_bad_arguments():
    with pytest.raises(ValueError, match="tasks"):
        Heads(4, ())
    with pytest.raises(ValueError, match="n_domains"):
        Heads(4, ("ctr",), n_domains=0)
