"""Mask predicates and their spellings: which keys a query sees, and how the scores learn of it.

Dims are letters: ``b`` batch, ``n`` sequence of a sample, ``h`` head, ``g`` key-value head, ``r`` query head of a group,
``m`` batch times head, ``q`` and ``k`` tokens. A mask over ``"bk"`` reaches scores over ``"bhqk"`` by broadcasting.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.program import Draft

STRUCTURES = {"none": 8, "causal": 5, "window": 2, "causal_window": 2, "blocks": 2, "documents": 1}
CACHED = 48

# softmax: exact zeros after it. Below -1e4 in fp32 nothing is left of a masked key.
FILLS = {"-inf": 4, "finfo": 3, "-1e9": 4, "-1e4": 2, "-2**32": 1}


@dataclass(frozen=True)
class Part:
    """A bool tensor, true where the key is visible."""

    name: str
    dims: str


def structure(d: Draft, c: Choices, kind: str, lq: str, lk: str, device: str) -> list[Part]:
    """Write the structural part of a mask; ``kind`` is one of `STRUCTURES`."""
    if kind == "none":
        return []
    i, j = f"torch.arange({lq}, device={device})[:, None]", f"torch.arange({lk}, device={device})[None, :]"
    ones = f"torch.ones({lq}, {lk}, dtype=torch.bool, device={device})"
    name = d.fresh("visible")
    if kind == "documents":
        d.block.append(f"{name} = {d.passing('docs')}[:, :, None] == docs[:, None, :]")
        return [Part(name, "bqk")]
    if kind == "causal" and "offset" in d.settings:
        d.block.append(f"{name} = {_wrong_causal(d.settings['offset'], i, j)}")
        return [Part(name, "qk")]
    if kind == "causal":
        if c.chance("cached_tril", 4):
            d.block_init.append(f'self.register_buffer("tril", torch.ones({CACHED}, {CACHED}).tril(){_bool(c)})')
            got = f"self.tril[:{lq}, :{lk}]"
            d.block.append(f"{name} = {got} != 0" if not d.block_init[-1].endswith(".bool())") else f"{name} = {got}")
            return [Part(name, "qk")]
        text = c.spell(
            "causal_spelling",
            f"torch.tril({ones})",
            f"{ones}.tril()",
            f"{j} <= {i}",
            f"{i} >= {j}",
            f"torch.triu({ones}, diagonal=1) == 0",
            f"~torch.triu({ones}, 1)",
            f"torch.ones({lq}, {lk}, device={device}).tril().bool()",
            f"torch.triu(torch.ones({lq}, {lk}, device={device}), diagonal=1).eq(0)",
            f"({i} - {j}) >= 0",
            f"torch.triu(torch.ones({lk}, {lq}, device={device})).transpose(0, 1) == 1",
            f"torch.logical_not({j} > {i})",
        )
    elif kind == "causal_bottom_right":
        text = c.spell("causal_spelling", f"{ones}.tril({lk} - {lq})", f"{j} <= {i} + ({lk} - {lq})")
    elif kind == "window":
        left, right = c.spell("window", "1 1", "2 0", "2 1", "0 3", "3 2", "1 4").split()
        text = c.spell(
            "window_spelling",
            f"({i} - {j} <= {left}) & ({j} - {i} <= {right})",
            f"{ones}.tril({right}).triu(-{left})",
            f"({j} >= {i} - {left}) & ({j} <= {i} + {right})",
            f"({i} - {j}).abs() <= {left}",
            f"torch.ones({lq}, {lk}, device={device}).triu(-{left}).tril({right}) > 0",
        )
    elif kind == "causal_window":
        width = c.spell("window", "2", "1", "3", "5")
        text = c.spell(
            "window_spelling",
            f"({i} >= {j}) & ({i} - {j} < {width})",
            f"{ones}.tril() & ~{ones}.tril(-{width})",
            f"{ones}.tril() & {ones}.triu(1 - {width})",
            f"({j} <= {i}) * ({j} > {i} - {width})",
        )
    elif kind == "blocks":
        size = c.spell("block_size", "2", "3", "4")
        text = c.spell(
            "block_spelling",
            f"{i} // {size} == {j} // {size}",
            f"torch.div({i}, {size}, rounding_mode='floor') == torch.div({j}, {size}, rounding_mode='floor')",
            f"({i} // {size}).eq({j} // {size})",
        )
    else:
        raise ValueError(f"kind: got {kind!r}; allowed: {', '.join(STRUCTURES)}")
    d.block.append(f"{name} = {text}")
    return [Part(name, "qk")]


def _wrong_causal(offset: str, i: str, j: str) -> str:
    """Causality as near misses have it; every query sees the first key or the last."""
    if offset == "flipped":
        return f"{j} >= {i}"
    return f"~({j} < {i})" if offset == "not" else f"({j} <= {i} + {offset}) | ({j} == 0)"


def _bool(c: Choices) -> str:
    return c.spell("tril_dtype", ".bool()", "", ".long()")


def fill_value(c: Choices, scores: str, finite: bool = False) -> str:
    kind = c.pick("fill", {k: v for k, v in FILLS.items() if not (finite and k == "-inf")})
    return {
        "-inf": c.spell("inf_spelling", 'float("-inf")', "-torch.inf", "-math.inf"),
        "finfo": f"torch.finfo({scores}.dtype).min",
        "-1e9": "-1e9",
        "-1e4": c.spell("1e4_spelling", "-10000.0", "-1e4"),
        "-2**32": "-2.0**32 + 1",
    }[kind]


def broadcast(c: Choices, part: Part, scores: str, heads: int) -> str:
    """``part`` as an expression that broadcasts to scores over the dims ``scores``."""
    text, dims = part.name, part.dims
    if "m" in scores and "b" in dims:
        ones = ", ".join(["1"] * (len(dims) - 1))
        text = (
            f"{text}.repeat_interleave({heads}, dim=0)"
            if "cat" not in c.axes["layout"]
            else f"{text}.repeat({heads}, {ones})"
        )
        dims = dims.replace("b", "m")
    order = [x for x in scores if x in dims]
    if order != list(dims):
        text = (
            f"{text}.permute({', '.join(str(dims.index(x)) for x in order)})" if len(dims) > 2 else f"{text}.transpose(0, 1)"
        )
        dims = "".join(order)
    missing = [i for i, x in enumerate(scores) if x not in dims]
    lead = next((i for i, x in enumerate(scores) if x in dims), 0)
    if len(dims) < 3 and all(i < lead for i in missing):
        return text  # leading dims broadcast by themselves
    way = c.pick("broadcasting", {"index": 4, "unsqueeze": 2})
    if way == "unsqueeze":
        return text + "".join(f".unsqueeze({i})" for i in missing)
    return text + "[" + ", ".join(":" if x in dims else "None" for x in scores) + "]" if missing else text


def joined(d: Draft, c: Choices, parts: list[Part], scores: str, heads: int) -> str:
    """All parts as one bool expression of the scores' rank."""
    texts = [broadcast(c, p, scores, heads) for p in parts]
    if len(texts) == 1:
        return texts[0]
    way = c.pick("joining", ["and", "logical_and", "mul", "float"])
    name = d.fresh("allowed")
    if way == "logical_and":
        joined_text = texts[0]
        for t in texts[1:]:
            joined_text = f"torch.logical_and({joined_text}, {t})"
    elif way == "float":
        joined_text = "(" + " * ".join(f"{t}.float()" for t in texts) + ") > 0.5"
    else:
        joined_text = {"and": " & ", "mul": " * "}[way].join(f"({t})" for t in texts)
    d.block.append(f"{name} = {joined_text}")
    return name


def mask_scores(d: Draft, c: Choices, s: str, parts: list[Part], dims: str, heads: int, finite: bool = False) -> str:
    """Write the masking of softmax scores ``s`` over ``dims``; returns the name of the result."""
    if not parts:
        return s
    one_by_one = len(parts) > 1 and c.chance("mask_one_by_one", 3)
    groups = [[p] for p in parts] if one_by_one else [parts]
    for group in groups:
        allowed = joined(d, c, group, dims, heads)
        if not allowed.isidentifier():
            name = d.fresh("keep")
            d.block.append(f"{name} = {allowed}")
            allowed = name
        s = _apply(d, c, s, allowed, finite)
    return s


def _apply(d: Draft, c: Choices, s: str, allowed: str, finite: bool) -> str:
    way = c.pick(
        "mask_spelling",
        {"masked_fill": 5, "masked_fill_eq": 1, "where": 3, "where_tensor": 1, "additive": 3, "additive_where": 2,
         "one_minus": 3, "minus_one": 1, "inplace": 1, "log": 1, "expanded": 1, "full_like": 1},
    )  # fmt: skip
    needs_finite = finite or way in ("one_minus", "minus_one")
    if way == "log":
        if finite:
            way = "masked_fill"
        else:
            c.axes["fill"] = "-inf"
            d.block.append(f"{s} = {s} + torch.log({allowed}.to({s}.dtype))")
            return s
    fill = fill_value(c, s, needs_finite)
    lines = {
        "masked_fill": f"{s} = {s}.masked_fill(~{allowed}, {fill})",
        "masked_fill_eq": f"{s} = {s}.masked_fill({allowed} == 0, {fill})",
        "where": f"{s} = torch.where({allowed}, {s}, {fill})",
        "where_tensor": f"{s} = torch.where({allowed}, {s}, torch.tensor({fill}, dtype={s}.dtype, device={s}.device))",
        "additive": f"{s} = {s} + torch.zeros({allowed}.shape, dtype={s}.dtype, device={s}.device)"
        f".masked_fill(~{allowed}, {fill})",
        "additive_where": f"{s} = {s} + torch.where({allowed}, 0.0, {fill}).to({s}.dtype)",
        "one_minus": f"{s} = {s} + (1.0 - {allowed}.to({s}.dtype)) * ({fill})",
        "minus_one": f"{s} = {s} - ({allowed}.to({s}.dtype) - 1.0) * ({fill})",
        "inplace": f"{s}.masked_fill_(~{allowed}, {fill})",
        "expanded": f"{s} = {s}.masked_fill(~{allowed}.expand_as({s}), {fill})",
        "full_like": f"{s} = torch.where({allowed}, {s}, torch.full_like({s}, {fill}))",
    }
    d.block.append(lines[way])
    return s
