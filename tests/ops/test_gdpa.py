"""gdpa and block_attention on the CPU; the matrix of cases is in test_jagged_attention.py."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gemopt.kernels.spec import ACTIVATIONS, block_offsets
from gemopt.ops import block_attention, gdpa, jagged_attention, reference
from tests.ops.attention_cases import Case, check, draw, offsets_of, run

EAGER = {
    "identity": lambda s: s,
    "relu": F.relu,
    "relu2": lambda s: F.relu(s).square(),
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda s: F.gelu(s, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_reference_activations_are_pytorchs(name: str) -> None:
    """Values and gradients of the oracle, kinks and far ends included."""
    s = torch.cat([torch.linspace(-40, 40, 4001, dtype=torch.float64), torch.tensor([0.0, -3.0, 3.0], dtype=torch.float64)])
    results = []
    for function in (EAGER[name], lambda s: reference.activated(s, name)):
        x = s.clone().requires_grad_()
        y = function(x)
        results.append((y.detach(), torch.autograd.grad(y.sum(), x)[0]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-13)
    kinks = (s.abs() == 3) if name == "hardswish" else torch.zeros_like(s, dtype=torch.bool)
    torch.testing.assert_close(results[0][1][~kinks], results[1][1][~kinks], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(name: str, dtype: torch.dtype) -> None:
    kwargs = {"activation": name, "scale": 0.7, "post_scale": 0.3}
    check(Case((5, 0, 1, 20), (9, 3, 0, 17), heads=4, kv_heads=2, op="gdpa", kwargs=kwargs), dtype)


def test_one_name_for_every_head_is_a_list_of_equal_names() -> None:
    inputs = draw(Case((5, 9), op="gdpa", kwargs={"activation": "silu"}), torch.float32)
    one = run(gdpa, inputs, torch.float32)
    inputs.kwargs["activation"] = ["silu", "silu"]
    for name, want in run(gdpa, inputs, torch.float32).items():
        assert torch.equal(one[name], want), name


def test_a_hidden_key_adds_nothing() -> None:
    """sigmoid(0) is a half: a hidden or padding key must not leave that behind."""
    inputs = draw(Case((3, 20), (40, 2), mask="BHQK", op="gdpa", kwargs={"activation": "sigmoid"}), torch.float64)
    inputs.kwargs["mask"] = torch.zeros_like(inputs.kwargs["mask"])
    assert all((x == 0).all() for x in run(gdpa, inputs, torch.float64).values())


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        ("softmax", ValueError, "activation must be one of identity, relu.*got 'softmax'"),
        (["gelu", "tanh"], ValueError, "got 'tanh'"),
        (["gelu", "relu", "silu"], ValueError, "got 3 names for 2 heads"),
        ([], ValueError, "got none"),
        ([1, 2], TypeError, "must be a name or a sequence of names, got int"),
    ],
)
def test_bad_activations(activation: object, error: type[Exception], message: str) -> None:
    q, offsets = torch.zeros(5, 2, 8), offsets_of((2, 3))
    with pytest.raises(error, match=message):
        gdpa(q, q, q, offsets, offsets, 3, 3, activation=activation)  # type: ignore[arg-type]


def test_errors_speak_of_the_function_that_was_called() -> None:
    q, offsets = torch.zeros(5, 2, 8), offsets_of((2, 3))
    with pytest.raises(ValueError, match=r"^gdpa: k has 5 rows but v has 4"):
        gdpa(q, q, q[:4], offsets, offsets, 3, 3, activation="gelu")
    with pytest.raises(ValueError, match=r"^block_attention: block_size must be an int of at least 1, got 0"):
        block_attention(q, q, q, offsets, 3, 0)


@given(lens=st.lists(st.integers(0, 12), max_size=8), block=st.integers(1, 14), spare=st.integers(0, 9))
def test_block_offsets(lens: list[int], block: int, spare: int) -> None:
    """Every row in one block, blocks in order, restarting at each sequence; what does not exist is empty."""
    rows = sum(lens) + spare
    got = block_offsets(offsets_of(tuple(lens)), block, rows)
    assert got.shape[0] <= rows // block + len(lens) + 1
    starts, row = [], 0
    for n in lens:
        starts += list(range(row, row + n, block))
        row += n
    assert got.tolist()[: len(starts)] == starts
    assert (got[len(starts) :] == row).all() and got[-1] == row


@given(lens=st.lists(st.integers(0, 40), max_size=5), block=st.integers(1, 50), causal=st.booleans())
def test_block_attention_any_lengths(lens: list[int], block: int, causal: bool) -> None:
    kwargs = {"block_size": block, "causal": causal}
    check(Case(tuple(lens), d=8, spare=1, op="block_attention", kwargs=kwargs), torch.float32)


def test_one_block_is_jagged_attention() -> None:
    q, offsets = torch.randn(12, 2, 8), offsets_of((5, 7))
    assert torch.equal(block_attention(q, q, q, offsets, 7, 100), jagged_attention(q, q, q, offsets, offsets, 7, 7))


def test_compiles_with_unknown_rows() -> None:
    """One graph for all lengths, rows known only at run time."""

    def step(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        packed = x[keep]
        offsets = F.pad(keep.sum(1).cumsum(0), (1, 0))
        out = block_attention(packed, packed, packed, offsets, x.shape[1], 3)
        return gdpa(out, packed, packed, offsets, offsets, x.shape[1], x.shape[1], activation="gelu").sum()

    graphs: list[torch.fx.GraphModule] = []

    def count(gm: torch.fx.GraphModule, example_inputs: list) -> object:
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, specialize_float=True):
        compiled = torch.compile(step, backend=count, dynamic=True, fullgraph=True)
        for batch, length in ((3, 7), (5, 20), (4, 2)):
            x = torch.randn(batch, length, 2, 8, requires_grad=True)
            keep = torch.rand(batch, length) > 0.3
            grads = [torch.autograd.grad(f(x, keep), x)[0] for f in (step, compiled)]
            torch.testing.assert_close(grads[0], grads[1])
    assert len(graphs) == 1
