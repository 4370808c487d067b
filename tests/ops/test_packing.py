"""pack, unpack and segment_sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemopt.ops import pack, reference, segment_sum, unpack
from tests.ops.attention_cases import offsets_of

MASKS = st.lists(st.booleans(), max_size=12)
TAILS = st.sampled_from([(), (3,), (2, 3), (0,)])
LENGTHS = st.lists(st.integers(0, 9), max_size=6)


@given(mask=MASKS, tail=TAILS, fill=st.sampled_from([0.0, 1.5, float("-inf")]))
def test_pack_and_unpack(mask: list[bool], tail: tuple[int, ...], fill: float) -> None:
    rows, index = len(mask), torch.tensor(mask, dtype=torch.bool).nonzero().view(-1)
    x = torch.randn(rows, *tail, dtype=torch.float64, requires_grad=True)
    packed = pack(x, index)
    torch.testing.assert_close(packed, reference.pack(x, index), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(packed.sum() + (3 * packed).sum(), x)
    assert torch.equal(grad, torch.tensor(mask).double().view(-1, *(1 for _ in tail)).expand_as(x) * 4)

    values = torch.randn(len(index), *tail, dtype=torch.float64, requires_grad=True)
    padded = unpack(values, index, rows, fill)
    torch.testing.assert_close(padded, reference.unpack(values, index, rows, fill), rtol=0, atol=0)
    weight = torch.randn_like(padded)
    (grad,) = torch.autograd.grad(padded, values, weight)
    assert torch.equal(grad, weight[index])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (6, 2)).to(dtype)
    index = torch.tensor([1, 2, 5])
    assert torch.equal(pack(x, index), x[index])
    back = unpack(pack(x, index), index, 6, 1)
    assert back.dtype == dtype and torch.equal(back[index], x[index]) and (back[[0, 3, 4]] == 1).all()


def test_non_contiguous() -> None:
    x = torch.randn(4, 6).t()
    index = torch.tensor([0, 4])
    assert torch.equal(pack(x, index), x[index]) and pack(x, index).is_contiguous()
    assert torch.equal(unpack(x[:2], index, 5)[index], x[:2])


def test_dead_rows_do_not_leak() -> None:
    x = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    index = torch.tensor([0, 2])
    (grad,) = torch.autograd.grad(pack(x, index).square().sum(), x)
    assert grad.tolist() == [2.0, 0.0, 4.0]


def test_second_derivatives() -> None:
    index, offsets, owner = torch.tensor([0, 2, 3]), offsets_of((1, 0, 2)), torch.tensor([0, 2, 2])

    def f(x: torch.Tensor) -> torch.Tensor:
        return segment_sum(unpack(pack(x, index) ** 3, torch.tensor([0, 1, 2]), 3), offsets, owner)

    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(f, (x,)) and torch.autograd.gradgradcheck(f, (x,))


@given(
    lengths=LENGTHS,
    tail=TAILS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    narrow=st.booleans(),
)
def test_segment_sum(lengths: list[int], tail: tuple[int, ...], dtype: torch.dtype, narrow: bool) -> None:
    offsets = offsets_of(tuple(lengths), torch.int32 if narrow else torch.int64)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    x = torch.randn(sum(lengths), *tail, dtype=torch.float64).to(dtype).requires_grad_()
    out = segment_sum(x, offsets, owner)
    exact = reference.segment_sum(x.detach().double(), offsets)
    assert out.shape == exact.shape and out.dtype == dtype
    # One rounding to dtype at the end, on top of fp32 sums of a few terms.
    torch.testing.assert_close(
        out.double(),
        exact,
        rtol=torch.finfo(dtype).eps,
        atol=4 * torch.finfo(torch.float32).eps if dtype != torch.float64 else 1e-14,
    )
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, weight)
    assert torch.equal(grad, weight[owner])


def test_segment_sum_accumulates_in_fp32() -> None:
    x = torch.full((4096, 2), 1.0, dtype=torch.bfloat16)
    out = segment_sum(x, torch.tensor([0, 4096]), torch.zeros(4096, dtype=torch.int64))
    assert (out == 4096).all()  # bf16 would stop at 256


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_segment_sum_ignores_rows_of_nobody(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0], [2.0], [float("nan")]], dtype=dtype)
    assert segment_sum(x, torch.tensor([0, 0, 2]), torch.tensor([1, 1, 1])).tolist() == [[0.0], [3.0]]


INDEX = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([1.0], INDEX), "x must be a Tensor"),
        (lambda: pack(torch.zeros(()), INDEX), "at least one dim"),
        (lambda: pack(torch.zeros(3), INDEX.int()), "index must be int64, got torch.int32"),
        (lambda: pack(torch.zeros(3), INDEX[None]), "index must be 1-D, got 2-D"),
        (lambda: pack(torch.zeros(3, device="meta"), INDEX), "index is on cpu but x is on meta"),
        (lambda: unpack(torch.zeros(3), INDEX, 4), "values has 3 rows but index has 2"),
        (lambda: unpack(torch.zeros(2), INDEX, -1), "rows must be at least 0"),
        (lambda: unpack(torch.zeros(2).int(), INDEX, 4, float("-inf")), "fill must be finite"),
        (lambda: segment_sum(torch.zeros(2).int(), torch.tensor([0, 2]), INDEX), "values must be floating"),
        (lambda: segment_sum(torch.zeros(3), torch.tensor([0, 3]), INDEX), "values has 3 rows but row_to_seq has 2"),
        (lambda: segment_sum(torch.zeros(2), INDEX[:0], INDEX), "at least one element"),
        (lambda: segment_sum(torch.zeros(2), torch.tensor([0.0, 2.0]), INDEX), "offsets must be int32 or int64"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("bad", [[0, 4], [-1, 0], [-1, 3]])
def test_index_out_of_range(bad: list[int]) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        pack(torch.zeros(3, 2), torch.tensor(bad))
    with pytest.raises((IndexError, RuntimeError)):
        unpack(torch.zeros(2, 2), torch.tensor(bad), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    index, offsets, owner = torch.tensor([0, 2, 3, 7]), offsets_of((3, 0, 1)), torch.tensor([0, 0, 0, 2])

    def everything(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(8, 5).to(dtype).to(device).requires_grad_()
        packed = pack(x, index.to(device))
        padded = unpack(packed, index.to(device), 8, -1.0)
        sums = segment_sum(packed, offsets.to(device), owner.to(device))
        (grad,) = torch.autograd.grad((padded.float().square().sum() + sums.float().square().sum()), x)
        return [y.detach().cpu() for y in (packed, padded, sums, grad)]

    for got, want in zip(everything("cuda"), everything("cpu"), strict=True):
        torch.testing.assert_close(got, want)
