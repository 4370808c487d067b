"""Faults that hostile users have found, each as a whole kind: numbers are those of eager in fp64, and the report is true."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemopt
from tests.hostile.common import sweep

D = 8
Forward = Callable[["Model", Tensor, Tensor], Any]


class Model(nn.Module):
    """Tokens ids `[B, L]` and their validity, to whatever ``program`` makes of them."""

    def __init__(self, program: Forward) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Embedding(40, D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, ids: Tensor, valid: Tensor) -> Any:
        return self.program(self, ids, valid)

    def attended(self, x: Tensor, seen: Tensor, fill: float = -torch.inf) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.mT).masked_fill(~seen, fill).softmax(-1) @ v

    def encoded(self, ids: Tensor, valid: Tensor) -> Tensor:
        return self.attended(self.embed(ids), valid[:, None])


def pooled(x: Tensor, valid: Tensor) -> Tensor:
    return (x * valid[..., None]).sum(1)


def batch(size: int, length: int, seed: int, full: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + full, (size,), generator=generator)
    return torch.randint(1, 40, (size, length), generator=generator), torch.arange(length) < lengths[:, None]


def results(run: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    torch.manual_seed(3)
    outputs = run(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(o.square().sum() for o in outputs if o.requires_grad).backward()
    parameters = run.parameters() if isinstance(run, nn.Module) else ()
    return [o.detach() for o in outputs] + [p.grad for p in parameters if p.grad is not None]


def compared(program: Forward, batches: Sequence[tuple[Tensor, Tensor]], **options: Any) -> Any:
    """Compile, run every batch, compare outputs and gradients with eager, and return the report."""
    torch.manual_seed(0)
    model = Model(program).double()
    twin = copy.deepcopy(model)
    compiled = gemopt.compile(twin, **{"inner": "eager", "strict": True, "recipe": None, **options})
    for args in batches:
        model.zero_grad()
        twin.zero_grad()
        for expected, found in zip(results(model, args), results(compiled, args), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    return compiled.report


TWO = (batch(5, 9, 1), batch(4, 7, 2))


# ---------------------------------------------------------------- [B * L] in one piece beside [B, L] merged


def in_batch_negatives(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    """Every token is its own label among all tokens of the batch."""
    h, weight = m.embed(ids).flatten(0, 1), valid.flatten()
    loss = F.cross_entropy(h @ h.T, torch.arange(h.shape[0]), reduction="none")
    return (loss * weight).sum() / weight.sum()


def numbered_tokens(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    """A factor by the number of the token in the batch."""
    h, weight = m.out(m.embed(ids)).flatten(0, 1), valid.flatten()
    return (h * torch.arange(h.shape[0]).sin()[:, None] * weight[:, None]).sum()


def numbered_mask(m: Model, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
    """The same as a condition, beside the mask."""
    h, weight = m.out(m.embed(ids)).flatten(0, 1), valid.flatten()
    kept = torch.arange(h.shape[0]) % 3 != 1
    return torch.where((kept & weight)[:, None], h, 0.0).sum(0), torch.where(kept[:, None], h, 1.0)[weight].sum(0)


# ---------------------------------------------------------------- scores without a token axis


def channel_attention(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    """XCiT: channels are queries and keys, tokens are features."""
    q, k, v = m.qkv(m.embed(ids) * valid[..., None]).chunk(3, -1)
    return pooled(((q.mT @ k).softmax(-1) @ v.mT).mT, valid)


def channel_attention_by_heads(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (2, -1)).permute(0, 2, 3, 1) for x in m.qkv(m.embed(ids)).chunk(3, -1))
    q, k = (F.normalize(x * valid[:, None, None], dim=-1) for x in (q, k))
    y = F.silu(q @ k.mT) @ v
    return pooled(y.permute(0, 3, 1, 2).flatten(2), valid)


# ---------------------------------------------------------------- sizes that are data, or go by way of floats


def rows_by_nonzero(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    h = m.encoded(ids, valid)
    sequence, position = valid.nonzero(as_tuple=True)
    return torch.zeros(len(ids), D, dtype=h.dtype).index_add(0, sequence, m.out(h[sequence, position]))


def labels_by_nonzero(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    """Flat positions; the labels are gathered too."""
    h, at = m.encoded(ids, valid).flatten(0, 1), valid.flatten().nonzero().squeeze(1)
    return F.cross_entropy(m.out(h[at]), ids.flatten()[at] % D, reduction="none").sum()


def masks_of_selected_rows(m: Model, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
    """Masks and positions over the rows that a mask has selected."""
    h = m.encoded(ids, valid)[valid]
    kept = ids[valid] > 5
    return (m.out(h) * kept[:, None]).sum(0), h[kept].sum(0), h[-1], h[:1]


def positions_as_floats(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    seen = torch.arange(0, ids.shape[1], 1.0, dtype=torch.float64) < valid.sum(1)[:, None]
    return pooled(m.out(m.encoded(ids, seen)), seen)


def every_second_row(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
    """``trunc(0.5 * float(L))`` rows."""
    h = F.interpolate(m.out(m.embed(ids)).mT, scale_factor=0.5).mT
    return pooled(h, torch.arange(h.shape[1]) * 2 < valid.sum(1)[:, None])


@pytest.mark.parametrize(
    "program",
    [rows_by_nonzero, positions_as_floats, in_batch_negatives, numbered_mask, channel_attention]
    + [
        pytest.param(program, marks=sweep)
        for program in (
            labels_by_nonzero,
            masks_of_selected_rows,
            every_second_row,
            numbered_tokens,
            channel_attention_by_heads,
        )
    ],
    ids=lambda p: p.__name__,
)
def test_numbers_are_eagers(program: Forward) -> None:
    compared(program, TWO)


# ---------------------------------------------------------------- dropout of whole rows


@pytest.mark.parametrize(
    "kind",
    [nn.FeatureAlphaDropout, nn.Dropout1d]
    + [pytest.param(kind, marks=sweep) for kind in (nn.AlphaDropout, nn.Dropout2d, nn.Dropout3d)],
)
def test_dropout_of_whole_rows_draws_as_eager_does(kind: type[nn.Module]) -> None:
    """One draw decides a whole row. Packed, rows would be columns of one sample, or other rows would fall together."""
    drop = kind(0.5)
    shape = {nn.Dropout2d: (1, D), nn.Dropout3d: (1, 1, D)}.get(kind, (D,))

    def program(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
        return pooled(drop(m.out(m.embed(ids)).unflatten(-1, shape)).flatten(2), valid)

    compared(program, TWO)


# ---------------------------------------------------------------- inputs with a history, written in place

Written = Callable[[Tensor, Tensor, nn.Linear], Any]


def masked_in_place(h: Tensor, valid: Tensor, layer: nn.Linear) -> Any:
    h.mul_(valid[..., None])
    return h.sum(1), pooled(layer(h), valid)


def shifted_into_itself(h: Tensor, valid: Tensor, layer: nn.Linear) -> Any:
    """Through a view."""
    y = layer(h * 2)
    h[:, 1:].add_(y[:, :-1])
    return pooled(y, valid), pooled(h, valid)


def attended_then_written(h: Tensor, valid: Tensor, layer: nn.Linear) -> Any:
    """What ran packed read the input before it was written again."""
    x = h.add_(1.0) * 1
    y = x + (x @ x.mT).masked_fill(~valid[:, None], -1e9).softmax(-1) @ x
    h.mul_(2.0)
    return pooled(y, valid), pooled(layer(h + 0), valid)


def valid_rows_replaced(h: Tensor, valid: Tensor, layer: nn.Linear) -> Any:
    """As after a graph break: the rows of an earlier graph's result."""
    h[valid] = layer(h[valid])
    return pooled(layer(h), valid)


WRITTEN = [masked_in_place, shifted_into_itself, attended_then_written, valid_rows_replaced]


@pytest.mark.parametrize(
    ("program", "verify"),
    [
        pytest.param(p, verify, marks=() if verify == (p is attended_then_written) else sweep, id=f"{p.__name__}-{verify}")
        for p in WRITTEN
        for verify in (False, True)
    ],
)
def test_an_input_with_a_history_is_written_in_place(program: Written, verify: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(D, D).double()
    _, valid = TWO[0]
    values = torch.randn(*valid.shape, D, dtype=torch.float64)
    compiled = gemopt.compile(program, recipe=gemopt.Recipe(inner="eager", strict=True, min_saving=0.0, verify=verify))
    found = []
    for run in (program, compiled):
        leaf = torch.ones(D, dtype=torch.float64, requires_grad=True)
        h = values * leaf
        layer.zero_grad()
        outputs = run(h, valid, layer)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        (sum(o.square().sum() for o in outputs) + h.sum()).backward()
        found.append([*(o.detach() for o in outputs), h.detach(), leaf.grad, layer.weight.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- the report

SEEN = {
    "earlier keys": lambda query, key: key < query,
    "keys further on": lambda query, key: (key - query >= 2) & (key - query <= 4),
    "the others": lambda query, key: key != query,
    "all but eye": lambda query, key: ~torch.eye(key.shape[1], dtype=torch.bool),
}


@pytest.mark.parametrize("seen", ["earlier keys", "keys further on", "all but eye", pytest.param("the others", marks=sweep)])
def test_what_can_never_run_is_not_listed_as_rewritten(seen: str) -> None:
    """The first query, the last one, or one alone sees no key, and is uniform over padding."""

    def program(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        return pooled(m.attended(m.embed(ids), valid[:, None] & SEEN[seen](at[:, None], at[None]), -1e9), valid)

    report = compared(program, (batch(5, 9, 3), batch(4, 7, 4)), recipe=gemopt.Recipe(min_saving=0.0))
    if seen in ("earlier keys", "keys further on"):
        assert report.steps_packed == 2 or not report.rewrites
        assert not report.steps_padded
    assert all("only where false" not in reason for reason in report.steps_padded)
    assert any("hides its own position from every query" in r.reason for r in report.rejections)


def test_the_empty_row_set_is_named() -> None:
    """Left padding: no sequence reaches its first position, but none is empty."""

    def program(m: Model, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        seen = torch.arange(ids.shape[1]).flip(0) < valid.sum(1)[:, None]
        h = m.encoded(ids, seen)
        return pooled(h, seen), h[:, -1], h[:, 0] * seen[:, 0, None]

    report = compared(program, (*TWO, batch(6, 8, 5, full=True)), recipe=gemopt.Recipe(min_saving=0.0))
    assert report.steps_packed
    (reason,) = report.steps_padded
    assert "pos == 0" in reason and "no sequence has one" in reason


def test_an_internal_error_is_reported_in_one_line() -> None:
    def broken(captured: Any, recipe: Any, report: Any) -> None:
        torch.fx.Interpreter(captured.gm).run()  # torch adds the node, the stack, and advice

    model = Model(channel_attention)
    compiled = gemopt.compile(model, recipe=gemopt.Recipe(pipeline=broken, inner="eager"))
    with pytest.warns(RuntimeWarning, match="internal error"):
        torch.testing.assert_close(compiled(*TWO[0]), model(*TWO[0]))
    (rejection,) = compiled.report.rejections
    assert "\n" not in rejection.reason and "tlparse" not in rejection.reason and "Traceback" not in rejection.reason
    assert rejection.reason.endswith("in plan)") and "gemopt/backend.py:" in rejection.reason


# ---------------------------------------------------------------- ops that mix some dims

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "features turned": lambda h: h.flip(-1),
    "groups turned": lambda h: h.unflatten(-1, (2, -1)).flip(2, 3).flatten(2),
    "time turned": lambda h: h.flip(1),
    "time and features turned": lambda h: h.flip((1, -1)),
    "samples turned": lambda h: h.flip(0),
    "features summed up": lambda h: h.cumsum(-1),
    "time summed up": lambda h: h.cumsum(1),
    "features normalised": lambda h: h.softmax(-1),
    "time normalised": lambda h: h.softmax(1),
}


@pytest.mark.parametrize("mixed", MIXING)
def test_ops_that_mix_a_dim(mixed: str) -> None:
    """Between two layers, before the mask and behind it."""

    def program(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
        h = MIXING[mixed](m.out(m.embed(ids)))
        return pooled(m.out(h.relu()), valid) + pooled(MIXING[mixed](h * valid[..., None]), valid)

    report = compared(program, TWO, recipe=gemopt.Recipe(min_saving=0.0))
    assert bool(report.steps_packed) or not mixed.startswith("features")


def test_a_disabled_pass_does_nothing() -> None:
    """Neither a rewrite nor an error, and the same numbers."""

    def program(m: Model, ids: Tensor, valid: Tensor) -> Tensor:
        return pooled(m.encoded(ids, valid), valid)

    assert compared(program, TWO, recipe=gemopt.Recipe(min_saving=0.0)).rewrites
    report = compared(program, TWO, recipe=gemopt.Recipe(min_saving=0.0, disabled=("unpad",)))
    assert not report.rewrites and not report.steps_packed
