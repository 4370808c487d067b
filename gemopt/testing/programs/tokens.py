"""Padded token sets: what the tokens are, where their validity comes from, and how code spells it."""

from __future__ import annotations

from dataclasses import dataclass

from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.program import Draft

VOCABULARY = 40

VALIDITY = {"lengths": 5, "ids": 4, "bool": 2, "int_mask": 1, "blocked": 1}


@dataclass(frozen=True)
class Tokens:
    """Names in ``Model.forward``: tokens ``[B, L, D]`` (or ``[B, N, L, D]``), validity, lengths if known, sizes."""

    x: str
    valid: str
    lengths: str | None
    size: str
    dim: int
    validity: str
    shape: str  # "bk" or "bnk"


def token_set(
    d: Draft, c: Choices, dim: int, prefix: str = "", *, shape: str = "bk", longer: int = 0,
    validity: dict[str, int] | None = None, content: dict[str, int] | None = None,
) -> Tokens:  # fmt: skip
    """Write inputs, embedding and mask of a padded set of tokens; ``longer`` is added to its padded size."""
    source = c.pick(f"{prefix}validity", validity or VALIDITY)
    kind = "ids" if source == "ids" else c.pick(f"{prefix}content", content or {"ids": 2, "floats": 2})
    ids, lengths, valid, x = (f"{prefix}{n}" for n in ("ids", "lengths", "valid", "tokens"))
    made = _make(d, prefix, shape, longer)
    if kind == "ids":
        real = source == "ids" or c.chance(f"{prefix}padding_is_zero", 2)
        d.give(
            ids,
            f"{ids} = torch.randint(1, {VOCABULARY}, {made}.shape, generator=generator)" + (f" * {made}" if real else ""),
        )
        padding = ", padding_idx=0" if c.chance(f"{prefix}padding_idx", 3) else ""
        d.model_init.append(f"self.{prefix}embed = nn.Embedding({VOCABULARY}, {dim}{padding})")
        d.model.append(f"{x} = self.{prefix}embed({ids})")
    else:
        grad = c.spell(f"{prefix}input_grad", "", ".requires_grad_()")
        d.give(x, f"{x} = torch.randn(*{made}.shape, {dim}, generator=generator){grad}")
    sizes = {"bk": f"B, {prefix}L", "bnk": f"B, N, {prefix}L"}[shape]
    d.model.append(f"{sizes} = {x}.shape[:{len(shape)}]")
    known = _validity(d, c, source, prefix, shape, made)
    if kind == "ids" and shape == "bk" and c.chance(f"{prefix}positions", 3):
        d.model_init.append(f"self.{prefix}position = nn.Embedding(64, {dim})")
        d.model.append(f"{x} = {x} + self.{prefix}position(torch.arange({prefix}L, device={x}.device))")
    return Tokens(x, valid, lengths if known else None, f"{prefix}L", dim, source, shape)


def _make(d: Draft, prefix: str, shape: str, longer: int) -> str:
    """Lines of ``inputs`` that make the true mask; returns its name."""
    real, n, size = f"{prefix}real", f"{prefix}lengths", f"max_len + {longer}" if longer else "max_len"
    if prefix:
        low = "(lengths > 0).long()" if d.settings.get("other_empty") else "1"
        d.make += [
            f"{prefix}max_len = {size}",
            f"{n} = torch.randint(0, {prefix}max_len + 1, (batch,), generator=generator)",
            f"{n} = torch.maximum({n}, torch.as_tensor({low}))",
        ]
        size = f"{prefix}max_len"
    if shape == "bnk":
        d.make.append(f"{n} = torch.stack([{n}, {n}.flip(0), torch.full_like({n}, {size})], 1)")
    d.make += [
        f"{real} = torch.arange({size}) < {n}[..., None]",
        f"kept = torch.rand({real}.shape, generator=generator) < 0.75",
        f"{real} = {real} & (kept | (torch.arange({size}) == 0)) if holes else {real}",
    ]
    return real


def _validity(d: Draft, c: Choices, source: str, prefix: str, shape: str, made: str) -> bool:
    """Write the line that computes the mask. Returns whether lengths are an input."""
    ids, lengths, valid, size = (f"{prefix}{n}" for n in ("ids", "lengths", "valid", "L"))
    where = f"{ids if source == 'ids' else lengths}"
    axis = f"{prefix}validity_spelling"
    if source == "lengths":
        d.give(lengths)
        pos = f"torch.arange({size}, device={lengths}.device)"
        wide = f"{where}[..., None]"
        lines = c.spell(
            axis,
            f"{valid} = {pos} < {wide}",
            f"{valid} = {wide} > {pos}",
            f"{valid} = ~({pos} >= {wide})",
            f"{valid} = {pos} <= {wide} - 1",
            f"{valid} = torch.lt({pos}, {where}.unsqueeze(-1))",
            f"{valid} = torch.logical_not(torch.ge({pos}, {wide}))",
            f"{valid} = ({wide} - {pos}) > 0",
            f"{valid} = {pos}.expand(*{where}.shape, {size}) < {where}.unsqueeze(-1).expand(*{where}.shape, {size})",
        )
    elif source == "ids":
        lines = c.spell(
            axis,
            f"{valid} = {ids} != 0",
            f"{valid} = {ids} > 0",
            f"{valid} = {ids}.bool()",
            f"{valid} = ~{ids}.eq(0)",
            f"{valid} = torch.logical_not({ids} == 0)",
            f"{valid} = torch.ne({ids}, 0)",
            f"{valid} = {ids}.ne(0)",
            f"{valid} = {ids}.gt(0).bool()",
            f"{valid} = ({ids} != 0).float() > 0.5",
            f"{valid} = torch.where({ids} == 0, 0, 1).bool()",
        )
    elif source == "bool":
        d.give(valid, f"{valid} = {made}")
        return False
    elif source == "blocked":
        d.give(f"{prefix}blocked", f"{prefix}blocked = ~{made}")
        lines = c.spell(axis, f"{valid} = ~{prefix}blocked", f"{valid} = torch.logical_not({prefix}blocked)")
    else:
        d.give(f"{prefix}mask", f"{prefix}mask = {made}.long()")
        lines = c.spell(
            axis, f"{valid} = {prefix}mask.bool()", f"{valid} = {prefix}mask != 0", f"{valid} = {prefix}mask == 1"
        )
    d.model.append(lines)
    return source == "lengths"


def counts(d: Draft, c: Choices, t: Tokens) -> str:
    """The lengths of ``t`` as an expression: the input, or counted from the mask."""
    if t.lengths:
        return t.lengths
    return c.spell(
        "counts", f"{t.valid}.sum(-1)", f"{t.valid}.long().sum(dim=-1)", f"torch.count_nonzero({t.valid}, dim=-1)"
    )
