"""Jagged inputs: the padded form in plain ATen, one term for lengths and offsets, and steps that run before their read."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import gemopt
from gemopt import backend
from gemopt.passes.jagged import jagged_inputs

aten = torch.ops.aten
HAS_FBGEMM = importlib.util.find_spec("fbgemm_gpu") is not None
if HAS_FBGEMM:
    import fbgemm_gpu  # noqa: F401  (registers the ops)
KIND = "fbgemm" if HAS_FBGEMM else "aten"


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def by_loops(values: Tensor, offsets: Tensor, length: int, fill: float) -> Tensor:
    """The definition, one element at a time."""
    bounds = offsets.tolist()
    filler = torch.full_like(values[:1].sum(0), fill)
    rows = [
        torch.stack([values[a + p] if p < b - a else filler for p in range(length)]) for a, b in itertools.pairwise(bounds)
    ]
    return torch.stack(rows)


def padded_by(kind: str, values: Tensor, offsets: Tensor, length: int, fill: float) -> Tensor:
    if kind == "loops":
        return by_loops(values, offsets, length, fill)
    if kind == "aten":  # has no derivative
        return aten._jagged_to_padded_dense_forward(values.detach(), [offsets], [length], fill)
    if kind == "fbgemm":
        return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [length], fill)
    if kind == "2d":
        return torch.ops.fbgemm.jagged_2d_to_dense(values, offsets, length)
    return torch.ops.fbgemm.jagged_1d_to_dense(values, offsets, length, int(fill))


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


# ---------------------------------------------------------------- the padded form


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["aten", "fbgemm", "2d", "1d"] if HAS_FBGEMM else ["aten"]),
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=5).filter(sum),
    length=st.sampled_from([2, 3, 8]),
    dtype=st.sampled_from([torch.float32, torch.int64]),
    index=st.sampled_from([torch.int32, torch.int64]),
    fill=st.sampled_from([0.0, -1.0, 7.0]),
    extra=st.integers(0, 2),
)
def test_the_padded_form_is_the_definition(
    kind: str, lengths: list[int], length: int, dtype: torch.dtype, index: torch.dtype, fill: float, extra: int
) -> None:
    fill = 0.0 if kind == "2d" else fill
    dtype = torch.int64 if kind == "1d" else dtype
    if dtype == torch.int64 and kind in ("aten", "2d"):
        return  # not a form these ops have
    shape = (sum(lengths) + extra,) if kind == "1d" else (sum(lengths) + extra, 3)
    values = (torch.randn(shape) * 10).to(dtype)
    offsets = offsets_of(lengths, index)
    run = lambda v, o: padded_by(kind, v, o, length, fill)  # noqa: E731
    gm = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(values, offsets)
    before = [name for name in targets(gm) if "jagged" in name]
    jagged_inputs(gm)
    assert len(before) == 1 and before[0] not in targets(gm) and "aten.masked_fill.Scalar" in targets(gm)
    expected = by_loops(values, offsets, length, fill)
    assert torch.equal(gm(values, offsets), expected)
    if dtype.is_floating_point and kind != "aten":
        weight = torch.randn_like(expected)
        x, y = values.clone().requires_grad_(), values.clone().requires_grad_()
        (gm(x, offsets) * weight).sum().backward()
        (by_loops(y, offsets, length, fill) * weight).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


SUMMED: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda n: torch.cat([torch.zeros(1, dtype=torch.long), n.cumsum(0)]),
    "cat, new_zeros": lambda n: torch.cat([n.new_zeros(1), torch.cumsum(n, 0)]),
    "pad": lambda n: nn.functional.pad(n.cumsum(0), (1, 0)),
}
if HAS_FBGEMM:
    SUMMED["fbgemm"] = lambda n: torch.ops.fbgemm.asynchronous_complete_cumsum(n)
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "starts with 1": lambda n: torch.cat([torch.ones(1, dtype=torch.long), n.cumsum(0)]),
    "no zero": lambda n: n.cumsum(0),
    "padded by 1": lambda n: nn.functional.pad(n.cumsum(0), (1, 0), value=1),
    "padded behind": lambda n: nn.functional.pad(n.cumsum(0), (0, 1)),
    "product": lambda n: torch.cat([n.new_zeros(1), n.cumprod(0)]),
}
DIFFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "diff": lambda o: o.diff(),
    "slices": lambda o: o[1:] - o[:-1],
    "int32": lambda o: o.to(torch.int32).diff(),
}


@pytest.mark.parametrize(
    ("spelling", "difference"),
    [*((s, "slices") for s in [*SUMMED, *OTHERS]), ("cat", "diff"), ("pad", "int32"), ("no zero", "diff")],
)
def test_differences_of_a_sum_are_the_lengths(spelling: str, difference: str) -> None:
    n = torch.tensor([3, 0, 2, 5])
    offsets = {**SUMMED, **OTHERS}[spelling]
    run = lambda n: DIFFERENCES[difference](offsets(n))  # noqa: E731
    gm = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(n)
    jagged_inputs(gm)
    gm.graph.eliminate_dead_code()
    assert torch.equal(gm(n), run(n)) and gm(n).dtype == run(n).dtype
    assert ("aten.sub.Tensor" not in targets(gm)) == (spelling in SUMMED), targets(gm)
    assert "aten.diff.default" not in targets(gm)


@pytest.mark.parametrize(
    "run",
    [
        lambda o: o[1:] - o[1:],
        lambda o: o[:-1] - o[1:],
        lambda o: o[2:] - o[:-2],
        lambda o: torch.sub(o[1:], o[:-1], alpha=2),
        lambda o: o.diff(n=2),
        lambda o: o.diff(prepend=o[:1]),
    ],
)
def test_other_differences_stay(run: Callable[[Tensor], Tensor]) -> None:
    n = torch.tensor([3, 0, 2, 5])
    gm = make_fx(lambda n: run(SUMMED["cat"](n)), pre_dispatch=True, tracing_mode="symbolic")(n)
    jagged_inputs(gm)
    assert torch.equal(gm(n), run(SUMMED["cat"](n)))


# ---------------------------------------------------------------- models


class Reader(nn.Module):
    """Embeds jagged ids, pads them to ``length``, attends under the mask and pools (mean, or the last item)."""

    def __init__(self, length: int = 8, pooling: str = "mean", kind: str = KIND, fill: float = 0.0, p: float = 0.0) -> None:
        super().__init__()
        self.length, self.pooling, self.kind, self.fill = length, pooling, kind, fill
        self.table, self.qkv, self.out = nn.Embedding(50, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.table.requires_grad_(kind != "aten")
        self.dropout, self.head = nn.Dropout(p), nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        x = padded_by(self.kind, self.table(ids), offsets, self.length, self.fill)
        return self.read(x, offsets[1:] - offsets[:-1])

    def read(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(self.length, device=x.device) < lengths[:, None]
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])
        y = self.out(self.dropout(y.transpose(1, 2).flatten(2))).relu()
        if self.pooling == "last":
            return self.head(y[torch.arange(len(lengths)), lengths - 1])
        return self.head((y * mask[..., None]).sum(1) / lengths.clamp(min=1)[:, None])


class FromLengths(Reader):
    """The offsets are made inside, as a KeyedJaggedTensor makes them."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = padded_by(self.kind, self.table(ids), SUMMED["cat"](lengths), self.length, self.fill)
        return self.read(x, lengths)


class JaggedIds(Reader):
    """Ids are padded first, with an id of their own, and embedded then."""

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.read(self.table(padded_by(self.kind, ids, offsets, self.length, 0)), offsets.diff())


class Towers(nn.Module):
    """Two histories, one read from offsets, one from lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Reader(8), FromLengths(12)

    def forward(self, ids: Tensor, offsets: Tensor, others: Tensor, lengths: Tensor) -> Tensor:
        return self.a(ids, offsets) + self.b(others, lengths)


def ids_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed))


def batch(lengths: list[int], model: nn.Module | None = None, extra: int = 0) -> tuple[Tensor, ...]:
    ids = ids_of(sum(lengths) + extra, len(lengths))
    if isinstance(model, Towers):
        others = [n + 1 for n in lengths]
        return ids, offsets_of(lengths), ids_of(sum(others)), torch.tensor(others)
    return ids, torch.tensor(lengths) if isinstance(model, FromLengths) else offsets_of(lengths)


LENGTHS = {
    "skewed": [1, 0, 8, 3, 1],
    "zeros": [0, 0, 4, 0],
    "none": [0, 0, 0],
    "full": [8, 8],
    "too long": [3, 11, 2, 0, 9],
    "ones": [1, 1, 1],
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "offsets": Reader,
    "aten": lambda: Reader(kind="aten"),
    "lengths": lambda: FromLengths(fill=3.0),
    "2d": lambda: Reader(kind="2d"),
    "ids": lambda: JaggedIds(kind="1d"),
    "towers": Towers,
}
NEED_FBGEMM = ("2d", "ids")


class Recorded(backend.Host):
    """A host that keeps itself for the test to look at."""

    made: list[Recorded] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    monkeypatch.setattr(backend, "Host", Recorded)
    Recorded.made = []
    yield Recorded.made
    torch._dynamo.reset()


@pytest.fixture
def ahead(hosts: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Steps run before their read wherever the plan allows it, as they do on an accelerator."""
    monkeypatch.setattr(Recorded, "ahead", True)
    return hosts


def compiled(model: nn.Module, **recipe: Any) -> Any:
    settings = {"min_saving": 0.0, "strict": True, "inner": "eager", **recipe}
    return gemopt.compile(model, recipe=gemopt.Recipe(**settings), dynamic=True)


def step(run: Any, model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    model.zero_grad()
    out = run(*inputs)
    out.square().sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return [out.detach().double(), *(g.double() for g in grads)]


class Pair:
    """A compiled model, and the definition in fp64."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.exact = model, copy.deepcopy(model).double()
        for part in self.exact.modules():
            if isinstance(part, Reader):
                part.kind = "loops"
        self.fast = compiled(model)

    def check(self, *inputs: Tensor) -> None:
        """Output and all gradients."""
        ours, theirs = step(self.fast, self.model, inputs), step(self.exact, self.exact, inputs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def pair(make: Callable[[], nn.Module]) -> Pair:
    torch.manual_seed(0)
    return Pair(make())


@pytest.mark.parametrize("name", MODELS)
def test_models_are_equal_and_packed(name: str, hosts: list[Recorded]) -> None:
    if name in NEED_FBGEMM and not HAS_FBGEMM:
        pytest.skip("needs fbgemm")
    both = pair(MODELS[name])
    for lengths in LENGTHS.values():
        both.check(*batch(lengths, both.model))
    report = both.fast.report
    assert len(hosts) == 1 and len(report.graphs) <= 2, str(report)  # one more where an input is empty
    assert report.steps_packed >= 3, str(report)
    assert "expected to be the rows of" in str(report)


@pytest.mark.parametrize("name", ["offsets", "towers"])
def test_steps_before_their_read(name: str, ahead: list[Recorded]) -> None:
    """True lengths need no read; cut or inconsistent ones are found out, and the step is decided again."""
    both = pair(MODELS[name])
    for lengths, confirmed in ((LENGTHS["skewed"], 1), (LENGTHS["too long"], 0), ([2, 3], 1), ([8, 8, 1], 1)):
        if ahead:
            ahead[0]._reads_due, ahead[0].unread_steps = 0, 0
        both.check(*batch(lengths, both.model))
        assert len(ahead) == 1 and ahead[0].unread_steps == confirmed, lengths
        assert (ahead[0]._reads_due > 0) == (not confirmed)


def test_inconsistent_offsets(ahead: list[Recorded]) -> None:
    """No wrong expectation shows, and none reads out of range."""
    both = pair(Reader)
    both.check(*batch([5, 4, 7]))
    assert ahead[0].unread_steps == 1
    for offsets in ([2, 5, 9, 16], [0, 5, 9, 12], [0, 9, 9, 16], [0, 5, 3, 16], [7, 7, 7, 7]):
        ahead[0]._reads_due = 0
        both.check(ids_of(16), torch.tensor(offsets))
        assert ahead[0].unread_steps == 1 and ahead[0]._reads_due > 0, offsets
    both.check(*batch([5, 4, 7]))
    assert ahead[0].unread_steps == 1  # reads for a while now

    @settings(max_examples=20, deadline=None)
    @given(bounds=st.lists(st.integers(0, 24), min_size=3, max_size=5), rows=st.integers(1, 24))
    def any_offsets_inside_the_values(bounds: list[int], rows: int) -> None:
        ahead[0]._reads_due = 0
        both.check(ids_of(rows), torch.tensor(bounds).clamp(max=rows))

    any_offsets_inside_the_values()


def test_the_last_item_is_one_row_for_each_sequence(ahead: list[Recorded]) -> None:
    both = pair(lambda: Reader(pooling="last"))
    for lengths, unread in (([3, 1, 8], 1), ([8, 8, 2, 1], 2)):
        both.check(*batch(lengths))
        assert ahead[0].unread_steps == unread, str(both.fast.report)


def test_dropout_before_the_read(ahead: list[Recorded]) -> None:
    """A step thrown away and decided again draws another mask: the distribution is the same."""
    torch.manual_seed(0)
    model = Reader(p=0.5)
    fast = compiled(model)
    short, cut = batch([4] * 400), batch([9] + [4] * 399)
    for inputs in (short, cut):
        ours = torch.stack([fast(*inputs).detach() for _ in range(20)])
        theirs = torch.stack([model(*inputs).detach() for _ in range(20)])
        spread = theirs.std(0).mean() / (20 * 400) ** 0.5
        assert (ours.mean() - theirs.mean()).abs() < 6 * spread
        assert abs(ours.std(0).mean() / theirs.std(0).mean() - 1) < 0.1
    assert ahead[0].unread_steps == 20 and ahead[0]._reads_due > 0


class Norm(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def read(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().read(x, lengths) + self.norm(x.sum(1)).sum(-1, keepdim=True)


def test_a_graph_that_writes_buffers_reads_first(ahead: list[Recorded]) -> None:
    both = pair(Norm)
    for _ in range(2):
        both.check(*batch([5, 4, 7]))
    ours, theirs = both.model.state_dict(), both.exact.state_dict()
    torch.testing.assert_close(ours["norm.running_var"].double(), theirs["norm.running_var"])
    assert both.fast.report.steps_packed == 2 and ahead[0].unread_steps == 0


def test_an_error_of_the_packed_graph_is_raised_if_the_sizes_were_right(ahead: list[Recorded]) -> None:
    fast = compiled(Reader())
    fast(*batch([5, 4, 7]))

    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    ahead[0]._packed = broken
    with pytest.raises(RuntimeError, match="broken"):
        fast(*batch([5, 4, 7]))
    ahead[0]._padded = lambda *args: (torch.ones(3, 1),)
    ahead[0]._plan._pays = lambda counts, totals: counts == {"rows0": 16}
    assert torch.equal(fast(*batch([5, 2, 9])), torch.ones(3, 1))  # 15 rows: expected 16, not confirmed, padded


def test_the_keys_of_a_keyed_jagged_tensor(hosts: list[Recorded]) -> None:
    torchrec = pytest.importorskip("torchrec")

    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def forward(self, features: Any) -> Tensor:
            history = features["history"]
            x = torchrec.JaggedTensor(values=self.reader.table(history.values()), lengths=history.lengths())
            return self.reader.read(x.to_padded_dense(8), history.lengths())

    torch.manual_seed(0)
    model = Keyed()
    other = copy.deepcopy(model)
    fast = compiled(other)
    for lengths in ([5, 0, 8, 2], [1, 2, 3]):
        users = torch.ones(len(lengths), dtype=torch.int64)
        values = torch.cat([ids_of(len(lengths)), ids_of(sum(lengths))])
        features = torchrec.KeyedJaggedTensor(
            keys=["user", "history"], values=values, lengths=torch.cat([users, torch.tensor(lengths)])
        )
        ours, theirs = step(fast, other, (features,)), step(model, model, (features,))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(hosts) == 1 and hosts[0]._plan.expected, str(fast.report)
    assert fast.report.steps_packed == 2
