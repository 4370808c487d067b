"""Counted FLOPs against sums written out by hand over the real lengths."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemopt import mfu

B, L, D, H = 4, 24, 16, 2
LENGTHS = (24, 5, 0, 11)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(lengths=LENGTHS, width=L):
    return torch.randn(len(lengths), width, D), torch.tensor(lengths)


class Attention(nn.Module):
    """Self attention, summed over the real events; ``visible(q, k)`` decides beyond the key mask."""

    def __init__(self, spelling="sdpa", visible=None, score="softmax"):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.spelling, self.visible, self.score = spelling, visible, score

    def forward(self, x, lengths):
        q, k, v = (f(x).unflatten(-1, (H, D // H)).transpose(1, 2) for f in (self.q, self.k, self.v))
        position = torch.arange(x.shape[1])
        mask = (position < lengths[:, None])[:, None, None, :]
        if self.visible is not None:
            mask = mask & self.visible(position[:, None], position)
        if self.spelling == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            scores = (q @ k.transpose(-1, -2)) * (D // H) ** -0.5
            if self.score == "softmax":
                weights = scores.masked_fill(~mask, -1e9 if self.spelling == "finite" else float("-inf")).softmax(-1)
            else:
                weights = F.silu(scores) * mask
            out = weights @ v
        out = self.o(out.transpose(1, 2).flatten(-2))
        return (out * (position < lengths[:, None])[..., None]).sum(1)


VISIBLE = {
    "all": (None, lambda q, k: True),
    "causal": (lambda q, k: q >= k, lambda q, k: q >= k),
    "window": (lambda q, k: (q - k).abs() <= 3, lambda q, k: abs(q - k) <= 3),
    "block": (lambda q, k: q // 8 == k // 8, lambda q, k: q // 8 == k // 8),
}


def pairs(lengths, allowed):
    return sum(allowed(q, k) for n in lengths for q, k in itertools.product(range(n), repeat=2))


@pytest.mark.parametrize("kind", VISIBLE)
@pytest.mark.parametrize("spelling", ["sdpa", "matmul", "finite", "silu"])
def test_attention_by_real_pairs(kind, spelling):
    visible, allowed = VISIBLE[kind]
    score = "silu" if spelling == "silu" else "softmax"
    model = Attention(spelling, visible, score)
    got = mfu.count(model, *batch())
    linear = 2 * D * D * sum(LENGTHS)
    expected = 4 * linear + 2 * H * 2 * (D // H) * pairs(LENGTHS, allowed)
    assert got.flops == expected and not got.notes
    assert got.padded == 4 * 2 * B * L * D * D + 2 * H * 2 * (D // H) * B * L * L
    assert got.layers["q"] == linear and got.within("") == got.flops
    assert got.training == 3 * expected and 0 < got.useful_share < 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=5), st.integers(2, 40))
def test_every_length(lengths, width):
    """One counter, captured once, is right for all batches; histories longer than the padded size are cut."""
    lengths = [min(n, width) for n in lengths]
    got = counter()(*batch(lengths, width))
    expected = 4 * 2 * D * D * sum(lengths) + 4 * D * pairs(lengths, lambda q, k: q >= k)
    assert got.flops == expected


def counter(made=[]):  # noqa: B006 - one for all examples
    if not made:
        torch.manual_seed(0)
        made.append(mfu.Counter(Attention("sdpa", VISIBLE["causal"][0])))
    return made[0]


def test_last_event_needs_one_query_row():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(D, 3 * D)

        def forward(self, x, lengths):
            q, k, v = self.inner(x).chunk(3, -1)
            mask = torch.arange(x.shape[1]) < lengths[:, None]
            out = F.scaled_dot_product_attention(q, k, v, mask[:, None, :])
            return out[torch.arange(len(x)), lengths - 1]

    lengths = (24, 5, 1, 11)
    got = mfu.count(Last(), *batch(lengths))
    assert got.flops == 2 * D * 3 * D * sum(lengths) + 4 * D * sum(lengths), "one query row per sequence"


def test_what_is_read_counts():
    """Padding that is observed is no waste; the dense part counts in full."""
    layer = nn.Linear(D, 7)
    x, lengths = batch()
    assert mfu.count(lambda x: layer(x).sum(), x).flops == 2 * B * L * D * 7
    masked = mfu.count(lambda x, n: (layer(x) * (torch.arange(L) < n[:, None])[..., None]).sum(), x, lengths)
    assert masked.flops == 2 * sum(LENGTHS) * D * 7
    pooled = mfu.count(lambda x, n: torch.einsum("bl,bld->bd", (torch.arange(L) < n[:, None]).float(), layer(x)), x, lengths)
    assert pooled.flops == 2 * sum(LENGTHS) * D * 7 + 2 * sum(LENGTHS) * 7


def test_sizes_that_are_not_rows():
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    assert mfu.count(torch.matmul, a, b).flops == 2 * 3 * 5 * 7
    assert mfu.count(lambda a, b: torch.einsum("ij,jk->ik", a, b), a, b).flops == 2 * 3 * 5 * 7
    assert mfu.count(lambda a: a + 1, a).flops == 0
    graph = torch.fx.symbolic_trace(nn.Linear(5, 2))
    assert mfu.count(graph, a).flops == 2 * 3 * 5 * 2
    with pytest.raises(TypeError, match="model"):
        mfu.count(3)  # type: ignore[arg-type]


def test_layers_by_depth():
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), nn.Linear(3, 2))
    got = mfu.count(model, torch.randn(6, 5))
    assert got.by_depth(1) == {"0": 6 * 2 * 32, "1": 6 * 2 * 6}
    assert got.within("0.1") == 6 * 2 * 12


def test_a_graph_break_adds_up():
    first, second = nn.Linear(5, 4), nn.Linear(4, 3)

    def model(x):
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    assert mfu.count(model, torch.randn(6, 5)).flops == 6 * 2 * 32


@pytest.mark.parametrize("kind", ["all", "causal", "window", "block"])
def test_own_ops_by_their_offsets(kind):
    """A model that is packed already: pairs come from the offsets it holds."""
    import gemopt.ops as ops

    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    x = torch.randn(sum(LENGTHS), D)
    project = nn.Linear(D, 3 * D)

    def model(x, offsets):
        q, k, v = project(x).unflatten(-1, (3, H, D // H)).unbind(1)
        if kind == "block":
            return ops.block_attention(q, k, v, offsets, L, block_size=8)
        options = {"all": {}, "causal": {"causal": True}, "window": {"window": (3, 3)}}[kind]
        return ops.jagged_attention(q, k, v, offsets, offsets, L, L, **options)

    got = mfu.count(model, x, offsets)
    assert got.flops == 2 * sum(LENGTHS) * D * 3 * D + 4 * D * pairs(LENGTHS, VISIBLE[kind][1])
    assert not got.notes


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.booleans(), st.booleans(), st.integers(-1, 4), st.integers(-1, 4),
)  # fmt: skip
def test_pairs_of_own_ops(lengths, causal, bottom_right, left, right):
    """Against the definition, pair by pair."""
    from gemopt.kernels.spec import AttentionSpec
    from gemopt.mfu.jagged import visible_pairs

    offsets = [torch.tensor([0, *itertools.accumulate(n[i] for n in lengths)]) for i in (0, 1)]
    spec = AttentionSpec(*offsets, 9, 9, 1.0, causal, bottom_right, (left, right), None, None, 0.0, None)
    expected = 0
    for n, m in lengths:
        for i, j in itertools.product(range(n), range(m)):
            distance = j - i - (m - n if bottom_right else 0)
            seen = (not causal or distance <= 0) and (left < 0 or distance >= -left) and (right < 0 or distance <= right)
            expected += seen
    assert visible_pairs(spec) == expected
