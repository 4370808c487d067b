"""Values against brute force: the term of a tensor, evaluated at every index, is the tensor that eager computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemopt.graph import terms as t

from .oracle import Traced, same, trace

B, L = 3, 5
LENGTHS = torch.tensor([0, 5, 3])
IDS = torch.tensor([[4, 0, 2, 7, 0], [1, 1, 1, 1, 1], [0, 0, 9, 3, -1]])
FLAGS = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
FLOATS = torch.tensor([[0.5, math.nan, -1.0, math.inf, 0.0]] * 3, dtype=torch.float64)


def check(run: Traced, *, follow: bool = False) -> None:
    """Every tensor that has a term equals it. `follow`: the result must have one."""
    ev = run.evaluator
    for node in run.tensors():
        term = run.known.value(node)
        if term is None:
            continue
        expected = run.slotted(node)
        found = ev.everywhere(term, run.slot_sizes(node))
        assert bool(same(found, expected).all()), (
            f"{node.format_node()}\n  term  {t.render(term)}\n  gives {found.tolist()}\n  eager {expected.tolist()}"
        )
        if term.integer:
            assert not expected.dtype.is_floating_point
        if t.is_predicate(term):
            assert bool(((expected == 0) | (expected == 1)).all())
    if follow:
        (result,) = (n for n in run.graph.find_nodes(op="output")[0].all_input_nodes)
        assert run.known.value(result) is not None, run.gm.code


def valid(n: Tensor, length: int = L) -> Tensor:
    return torch.arange(length)[None, :] < n[:, None]


FOLLOWED: dict[str, Callable[..., Any]] = {
    # lengths, ids, flags
    "lt": lambda n, ids, m: valid(n),
    "gt": lambda n, ids, m: n[:, None] > torch.arange(ids.shape[1]),
    "le_minus_one": lambda n, ids, m: torch.arange(ids.shape[1]) <= (n - 1).unsqueeze(1),
    "not_ge": lambda n, ids, m: ~(torch.arange(ids.shape[1]) >= n.view(-1, 1)),
    "int32": lambda n, ids, m: torch.arange(ids.shape[1], dtype=torch.int32) < n.int()[:, None],
    "arange_from": lambda n, ids, m: torch.arange(1, ids.shape[1] + 1) <= n[:, None],
    "arange_step": lambda n, ids, m: torch.arange(0, 10, 2) < n[:, None],
    "arange_down": lambda n, ids, m: torch.arange(4, -1, -1) < n[:, None],
    "arange_of_one": lambda n, ids, m: torch.arange(2, 3) < n[:, None],
    "expanded": lambda n, ids, m: torch.arange(ids.shape[1]).expand(ids.shape[0], -1) < n[:, None].expand_as(ids),
    "permuted": lambda n, ids, m: (torch.arange(ids.shape[1])[:, None] < n).t(),
    "ids": lambda n, ids, m: ids != 0,
    "ids_gt": lambda n, ids, m: (ids > 0) & torch.lt(torch.zeros_like(ids), ids),
    "ids_bool": lambda n, ids, m: ids.bool() | ids.to(torch.bool),
    "ids_not_eq": lambda n, ids, m: torch.logical_not(ids.eq(0)),
    "logic": lambda n, ids, m: (m & valid(n)) | ~(m ^ (ids != 0)),
    "logical_of_ids": lambda n, ids, m: torch.logical_and(ids, n[:, None]) | torch.logical_xor(ids, m),
    "bool_product": lambda n, ids, m: (m * valid(n)) + (ids == 1),
    "mask_eq_zero": lambda n, ids, m: (m == 0) & (valid(n) != False) | (m == True),  # noqa: E712
    "mask_eq_mask": lambda n, ids, m: (m == valid(n)) & (m != (ids == 0)),
    "mask_compared": lambda n, ids, m: (m > 0) & (valid(n) >= 1) | (m < 1),
    "float_mask": lambda n, ids, m: m.float(),
    "additive": lambda n, ids, m: (1.0 - valid(n).float()) * -1e9,
    "additive_negative": lambda n, ids, m: (m.double() - 1) * 1e4,
    "additive_twice": lambda n, ids, m: (1.0 - m.float()) * -1e9 + (~valid(n)).float() * -1e9,
    "additive_fill": lambda n, ids, m: torch.zeros(ids.shape).masked_fill(~m, -math.inf),
    "additive_where": lambda n, ids, m: torch.where(m, 0.0, -1e9),
    "float_above": lambda n, ids, m: m.double() > 0.5,
    "float_equal": lambda n, ids, m: (m.float() == 1.0) & (m.to(torch.float64) != 0),
    "float_to_bool": lambda n, ids, m: (1 - m.float()).bool(),
    "float_to_int": lambda n, ids, m: (m.float() * 2.5).long(),
    "infinite_to_bool": lambda n, ids, m: torch.where(m, 0.0, -math.inf).bool(),
    "neg": lambda n, ids, m: -m.long() + -ids,
    "rsub": lambda n, ids, m: 1 - m.long(),
    "sum_of_int_masks": lambda n, ids, m: m.long() + valid(n).long() > 1,
    "distance": lambda n, ids, m: (torch.arange(L)[:, None] - torch.arange(L)).clamp(-2, 2),
    "clamp": lambda n, ids, m: n.clamp(min=1) - n.clamp(max=3) + n.clamp_min(2) + torch.clip(n, 0, 4),
    "clamp_empty_range": lambda n, ids, m: n.clamp(3, 1),
    "tril": lambda n, ids, m: torch.ones(L, L, dtype=torch.bool).tril(),
    "triu": lambda n, ids, m: torch.triu(torch.ones(L, L), diagonal=1).bool(),
    "triu_eq": lambda n, ids, m: torch.triu(torch.ones(L, L), 1) == 0,
    "band": lambda n, ids, m: torch.ones(L, L).tril(1).triu(-2),
    "tril_fill": lambda n, ids, m: torch.full((L, L), -math.inf).triu(1),
    "tril_of_mask": lambda n, ids, m: (m[:, None, :] & m[:, :, None]).tril(-1),
    "causal_and_valid": lambda n, ids, m: valid(n)[:, None, :] & torch.ones(L, L, dtype=torch.bool).tril(),
    "slice": lambda n, ids, m: (ids[:, 1:] != 0) & valid(n)[:, :-1],
    "select": lambda n, ids, m: ids[:, 0] + ids[:, -1] + ids.select(1, 2),
    "gather": lambda n, ids, m: ids.gather(1, (n - 1).clamp(min=0)[:, None]).squeeze(1) == 1,
    "index": lambda n, ids, m: ids[torch.arange(3), n - 1],
    "index_negative": lambda n, ids, m: ids[torch.arange(3), n - 5] != m[torch.arange(3), n - 1],
    "index_select": lambda n, ids, m: ids.index_select(1, torch.arange(4, -1, -1)) > 1,
    "view": lambda n, ids, m: (ids != 0).view(-1) & m.reshape(-1),
    "view_back": lambda n, ids, m: (ids != 0).view(-1).view(3, 5) & m,
    "repeat": lambda n, ids, m: m.repeat(2, 1) & valid(n).repeat(2, 1),
    "repeat_heads": lambda n, ids, m: m.repeat_interleave(2, dim=0),
    "heads": lambda n, ids, m: m[:, None, None, :].expand(-1, 2, 5, -1).reshape(6, 5, 5),
    "where_ints": lambda n, ids, m: torch.where(m, ids, -100),
    "fill_ints": lambda n, ids, m: ids.masked_fill(~m, -100) == -100,
    "count": lambda n, ids, m: m.sum(1) - 1,
    "cumsum": lambda n, ids, m: m.cumsum(1) - 1 == 2,
    "argmax": lambda n, ids, m: m.long().argmax(1),
    "any": lambda n, ids, m: m.any(1, keepdim=True) & m,
    "flip": lambda n, ids, m: ids.flip(1) == 0,
    "remainder": lambda n, ids, m: ids % 3 == 1,
    "bitwise": lambda n, ids, m: (ids & 3) | (ids ^ 1) == 2,
    "clone": lambda n, ids, m: ids.clone().detach().contiguous().long(),
    "like": lambda n, ids, m: torch.ones_like(ids) + torch.zeros_like(ids) * 3 + torch.full_like(ids, 7),
    "new": lambda n, ids, m: ids.new_ones(3, 5) - ids.new_zeros(5),
    "isin": lambda n, ids, m: torch.isin(ids, torch.arange(1, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_spellings(name):
    check(trace(FOLLOWED[name], LENGTHS, IDS, FLAGS), follow=True)


TRAPS: dict[str, Callable[..., Any]] = {
    "uint8_wraps_down": lambda n, ids, m: (m.to(torch.uint8) - 1) > 5,
    "uint8_wraps_up": lambda n, ids, m: m.to(torch.uint8) * 200 + 100,
    "uint8_negative": lambda n, ids, m: -m.to(torch.uint8),
    "uint8_of_negative": lambda n, ids, m: torch.where(m, -1, 3).to(torch.uint8),
    "uint8_ids": lambda n, ids, m: (ids.to(torch.uint8) - 3) > 2,
    "uint8_compare": lambda n, ids, m: ids.to(torch.uint8) < n.to(torch.uint8)[:, None],
    "int8_of_large": lambda n, ids, m: torch.where(m, 300, 0).to(torch.int8),
    "int16": lambda n, ids, m: (ids.short() + 32767) > 0,
    "int_of_infinity": lambda n, ids, m: torch.where(m, 0.0, -math.inf).to(torch.int64),
    "int_of_nan": lambda n, ids, m: (torch.where(m, 0.0, math.nan)).int(),
    "half_overflows": lambda n, ids, m: torch.where(m, 0.0, -1e9).half(),
    "bfloat16_rounds": lambda n, ids, m: torch.where(m, 1.0, 1.001).bfloat16() == 1,
    "float_rounds": lambda n, ids, m: torch.where(m, 0.1, 0.0).float().double() == 0.1,
    "alpha_add": lambda n, ids, m: torch.add(ids, n[:, None], alpha=3),
    "alpha_sub": lambda n, ids, m: torch.sub(ids, 2, alpha=2) + torch.sub(m.long(), 1, alpha=5),
    "alpha_rsub": lambda n, ids, m: torch.rsub(ids, 1, alpha=2) + torch.rsub(ids, n[:, None], alpha=2),
    "alpha_rsub_constants": lambda n, ids, m: torch.rsub(m.long(), 1, alpha=2),
    "div_floor": lambda n, ids, m: torch.div(n, 2, rounding_mode="floor"),
    "div_modes": lambda n, ids, m: torch.div(ids - 4, 2, rounding_mode="floor")
    == torch.div(ids - 4, 2, rounding_mode="trunc"),
    "div_of_constants": lambda n, ids, m: torch.div(torch.where(m, 7, 3), 2, rounding_mode="floor"),
    "div_of_negative_constants": lambda n, ids, m: torch.div(torch.where(m, -7, 3), 2, rounding_mode="trunc"),
    "true_div": lambda n, ids, m: (ids / 2 == 0.5) & (n[:, None] / 2 < 2),
    "true_div_of_constants": lambda n, ids, m: torch.where(m, 7, 0) / 2,
    "div_by_zero": lambda n, ids, m: torch.where(m, 1.0, -1.0) / 0,
    "floordiv": lambda n, ids, m: n // 2 < 2,
    "float_compare_nan": lambda n, ids, m: ~(FLOATS < 0.5) | (FLOATS != FLOATS),
    "int_below_half": lambda n, ids, m: (ids < 0.5) & (ids >= -0.5) | (ids == 1.5),
    "int_against_float": lambda n, ids, m: ids.double() <= n.double()[:, None],
    "view_dtype": lambda n, ids, m: ids.view(torch.float64) == 0,
    "view_dtype_bool": lambda n, ids, m: m.view(torch.uint8) + 1,
    "view_dtype_int8": lambda n, ids, m: m.view(torch.int8) - m.to(torch.int8) * 2,
    "fill_truncates": lambda n, ids, m: torch.full((3, 5), 2.7, dtype=torch.int64) + ids,
    "fill_masked_truncates": lambda n, ids, m: torch.zeros_like(ids).masked_fill(m, 2.7),
    "where_mixes": lambda n, ids, m: torch.where(m, 1, 0.5),
    "where_of_bools": lambda n, ids, m: torch.where(m, ids != 0, True),
    "where_bool_and_int": lambda n, ids, m: torch.where(m, ids == 1, 3),
    "bool_minus": lambda n, ids, m: m.long() - (ids == 1).long() == -1,
    "bool_plus_bool": lambda n, ids, m: m + m,
    "bool_plus_int": lambda n, ids, m: m + 1 + m * 3,
    "bool_times_float": lambda n, ids, m: m * 2.5 + m * -math.inf,
    "zero_times_infinity": lambda n, ids, m: (~m).double() * -math.inf,
    "two_infinities": lambda n, ids, m: torch.where(m, 0.0, -math.inf) + torch.where(ids != 0, 0.0, math.inf),
    "infinity_minus_infinity": lambda n, ids, m: torch.where(m, 0.0, -math.inf) - torch.where(m, 0.0, -math.inf),
    "tril_of_infinity": lambda n, ids, m: torch.full((5, 5), -math.inf).tril() * 0,
    "bitwise_not_of_int": lambda n, ids, m: ~ids == -1,
    "not_of_int": lambda n, ids, m: torch.logical_not(ids),
    "pow": lambda n, ids, m: ids**2 - m.long() ** 2,
    "abs_sign": lambda n, ids, m: ids.abs() + ids.sign() - ids.relu(),
    "max_min": lambda n, ids, m: torch.maximum(ids, n[:, None]) - torch.minimum(ids, n[:, None]),
    "clamp_by_tensor": lambda n, ids, m: torch.clamp(ids, max=n[:, None]),
    "clamp_float_bound": lambda n, ids, m: torch.clamp(ids, min=0.5) > 0.6,
    "cumsum_dtype": lambda n, ids, m: m.cumsum(1, dtype=torch.uint8) * 100,
    "sum_of_bools": lambda n, ids, m: m.sum(0) * m.sum(1)[:, None],
    "scalar_tensor": lambda n, ids, m: torch.scalar_tensor(3) + ids,
    "long_chain": lambda n, ids, m: _chain(ids),
    "int32_mix": lambda n, ids, m: n.int()[:, None] * 2 - ids,
    "complement_twice": lambda n, ids, m: ~(~m) == m,
    "sum_over_mask_key": lambda n, ids, m: (m.float().sum(1) > 2.5)[:, None] & m,
    "inplace_view": lambda n, ids, m: _inplace_view(m),
    "inplace_same": lambda n, ids, m: _inplace_same(m),
    "inplace_alias": lambda n, ids, m: _inplace_alias(ids),
}  # fmt: skip


def _chain(x: Tensor) -> Tensor:
    """A hash: every step reads the one before twice."""
    for _ in range(20):
        x = x ^ (x << 1)
    return x != 0


def _inplace_view(m: Tensor) -> Tensor:
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[:, 0] = True
    return mask | m


def _inplace_same(m: Tensor) -> Tensor:
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask.masked_fill_(m, False)
    mask.logical_or_(m.flip(1))
    return mask


def _inplace_alias(ids: Tensor) -> Tensor:
    x = ids * 1
    first = x[:, 1:3]
    x.add_(5)
    return first > 5


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name):
    """No term is better than a wrong one."""
    check(trace(TRAPS[name], LENGTHS, IDS, FLAGS))


# ---------------------------------------------------------------- random programs


class Draw:
    """Random programs over a small pool of tensors, in shapes that broadcast to [B, L]."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def pick(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def constant(self, *, small: bool = False) -> int:
        return self.data.draw(st.integers(0, 3) if small else st.integers(-3, 6))


def _leafs(n: Tensor, ids: Tensor, m: Tensor) -> list[Tensor]:
    return [n[:, None], ids, torch.arange(L), torch.arange(L) - n.unsqueeze(1), m.long()]


def program(draw: list[tuple[int, int, int, int]]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Interprets a list of (operation, operand, operand, constant) as code on ints and bools."""
    arithmetic = [
        operator.add, operator.sub, lambda a, b: a - 2 * b, lambda a, b: torch.where(a > b, a, b),
        lambda a, b: a.masked_fill(b > 1, -1), lambda a, b: torch.maximum(a, b), lambda a, b: -a + b.clamp(0, 3),
        lambda a, b: a * (b != 0), lambda a, b: (a + b).to(torch.int32).long(), lambda a, b: 1 - a,
    ]  # fmt: skip
    compare = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
    logic = [
        operator.and_, operator.or_, operator.xor, lambda p, q: ~p, lambda p, q: p & ~q, lambda p, q: p == q,
        lambda p, q: torch.where(p, q, ~q), lambda p, q: p.masked_fill(q, True), lambda p, q: (p.float() - 1) * -3 > 1,
        lambda p, q: (p.long() + q.long()) == 1, lambda p, q: (p * q).flip(-1).flip(-1), lambda p, q: (p != 0) | q,
    ]  # fmt: skip

    def run(n: Tensor, ids: Tensor, m: Tensor) -> Tensor:
        ints, bools = _leafs(n, ids, m), [m, ids != 0, torch.arange(L) < n[:, None]]
        for kind, a, b, c in draw:
            x, y = ints[a % len(ints)], ints[b % len(ints)]
            p, q = bools[a % len(bools)], bools[b % len(bools)]
            if kind < 5:
                ints.append(arithmetic[c % len(arithmetic)](x, y))
            elif kind < 8:
                bools.append(compare[c % len(compare)](x, y if b % 3 else c - 2))
            else:
                bools.append(logic[c % len(logic)](p, q))
        return bools[-1] & (ints[-1] > 0)

    return run


steps = st.tuples(st.integers(0, 13), st.integers(0, 30), st.integers(0, 30), st.integers(0, 11))


@settings(max_examples=12)
@given(st.lists(steps, min_size=3, max_size=10), st.integers(0, 2**31))
def test_random_programs(draw, seed):
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(0, L + 1, (B,), generator=g)
    ids = torch.randint(-1, 4, (B, L), generator=g)
    check(trace(program(draw), n, ids, torch.rand(B, L, generator=g) > 0.5))


def test_equal_tensors_have_equal_terms_and_different_ones_do_not():
    def fn(n, ids, m):
        return (
            (ids % 3 == 1, ids % 3 == 1),
            (torch.div(ids, 2, rounding_mode="floor") < 1, torch.div(ids, 2, rounding_mode="trunc") < 1),
            (ids.sum(1), ids.sum(1, dtype=torch.int64)),
        )

    run = trace(fn, LENGTHS, IDS, FLAGS)
    (out,) = run.graph.find_nodes(op="output")
    pairs = [[run.known.value(x) for x in pair] for pair in out.args[0]]
    assert pairs[0][0] == pairs[0][1] and pairs[0][0] is not None
    assert pairs[1][0] != pairs[1][1] or pairs[1][0] is None


def test_random_numbers_are_no_leaves():
    """Two draws are not one value, and the prologue must not draw again."""
    run = trace(lambda n: (torch.rand(3) > 0.5) & torch.randint(0, 2, (3,)).bool() & (n > 0), LENGTHS)
    (out,) = run.graph.find_nodes(op="output")
    assert run.known.value(out.all_input_nodes[0]) is None


LOOKUP_PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gaps": (lambda m, i, j: m[i, :, j], lambda m, i, j: m[:, i, j]),
    "ends": (lambda m, i, j: m[i], lambda m, i, j: m[:, i]),
    "order": (lambda m, i, j: m[i, j], lambda m, i, j: m[j, i]),
    "first": (lambda m, i, j: m[i, 0], lambda m, i, j: m[0, i]),
}


@pytest.mark.parametrize("name", LOOKUP_PAIRS)
def test_other_lookups_are_other_leaves(name):
    """Two tensors share a leaf only if they are one: the same op on the same operands, in the same places."""

    def both(m: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(look(m, i, j) for look in LOOKUP_PAIRS[name])  # type: ignore[return-value]

    cube = torch.arange(64).remainder(3).view(4, 4, 4) == 0
    run = trace(both, *(cube, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])))
    check(run)
    a, b = run.graph.find_nodes(op="output")[0].all_input_nodes
    term = run.known.value(a)
    assert term is None or term != run.known.value(b)
