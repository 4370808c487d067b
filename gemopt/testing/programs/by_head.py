"""Activations as score functions: one for all heads, or heads taken apart, each part with its own, and joined again.

``Draft.settings["by_head"]`` names a defect of the parts, for near misses.
"""

from __future__ import annotations

import itertools

from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.program import Draft
from gemopt.testing.programs.scores import ACTIVATIONS

Acts = list[tuple[str, int]]  # activations, and how many heads have each


def pick_acts(c: Choices, heads: int) -> Acts:
    """The activations of ``heads`` heads; 1 where the scores have no axis of heads."""
    options = list(ACTIVATIONS)
    if heads == 1 or not c.chance("by_head", 6):
        return [(c.pick("act", options), heads)]
    cuts = [[0, *x, heads] for n in range(1, heads) for x in itertools.combinations(range(1, heads), n)]
    sizes = {" ".join(str(b - a) for a, b in itertools.pairwise(x)): 3 if len(x) > heads else 1 for x in cuts}
    parts = c.pick("head_parts", sizes).split()
    return [(c.pick(f"act_{i}" if i else "act", options), int(n)) for i, n in enumerate(parts)]


def fillings(d: Draft, acts: Acts) -> list[str]:
    """Fills before the activation that it turns into 0, in every part."""
    enough = any if d.settings.get("by_head") == "filled" else all
    return [
        place for place, at in (("before_zero", 1), ("before_inf", 2)) if enough(ACTIVATIONS[act][at] for act, _ in acts)
    ]


def activation(d: Draft, c: Choices, s: str, acts: Acts, dims: str) -> str:
    """The expression of the activated scores ``s`` over ``dims``; lines before it may take them apart."""
    if len(acts) == 1:
        return c.spell("act_spelling", *ACTIVATIONS[acts[0][0]][0]).format(s=s)
    defect = d.settings.get("by_head", "")
    read = join = dims.index("h")
    if defect in ("another_axis", "stacked_elsewhere"):
        join = dims.index(c.pick("elsewhere", [x for x in dims if x != "h"]))
        read = join if defect == "another_axis" else read
    parts = _parts(d, c, s, [n for _, n in acts], read, len(dims))
    if defect == "swapped":
        parts.reverse()
    elif defect == "twice":
        parts[-1] = parts[0]
    texts = [
        c.spell(f"act_spelling_{i}", *ACTIVATIONS[act][0]).format(s=part)
        for i, ((act, _), part) in enumerate(zip(acts, parts, strict=True))
    ]
    changed = {"scaled": "0.5 * ({})", "detached": "({}).detach()", "rolled": "({}).roll(1, -1)"}
    texts[-1] = changed.get(defect, "{}").format(texts[-1])
    axis = c.spell("join_axis", str(join), str(join - len(dims)))
    way = "cat"
    if c.axes["taken_apart"] in ("select", "unbind"):
        way = c.pick("joined_by", {"stack": 2, "cat": 1})
        texts = [f"({x}).unsqueeze({axis})" for x in texts] if way == "cat" else texts
    return f"torch.{way}([{', '.join(texts)}], {c.spell('join_spelling', 'dim=', '')}{axis})"


def _parts(d: Draft, c: Choices, s: str, sizes: list[int], at: int, rank: int) -> list[str]:
    """``s`` taken apart along axis ``at``: expressions, or names that a line makes."""
    ways = {"slices": 3, "narrow": 1, "split": 2} | ({"chunk": 2} if len(set(sizes)) == 1 else {})
    way = c.pick("taken_apart", ways | ({"select": 2, "unbind": 2} if set(sizes) == {1} else {}))
    axis = c.spell("part_axis", str(at), str(at - rank))
    method = c.chance("part_method", 2)
    call = lambda name, rest: f"{s}.{name}({rest})" if method else f"torch.{name}({s}, {rest})"  # noqa: E731
    if way in ("slices", "narrow", "select"):
        starts = [0, *itertools.accumulate(sizes)][:-1]
        index = c.spell("part_index", ":, " * at + "{}", "..., {}" + ", :" * (rank - at - 1))
        text = {
            "slices": lambda i, n: f"{s}[{index.format(f'{i}:{i + n}')}]",
            "narrow": lambda i, n: call("narrow", f"{axis}, {i}, {n}"),
            "select": lambda i, n: call("select", f"{axis}, {i}") if method else f"{s}[{index.format(i)}]",
        }[way]
        return [text(i, n) for i, n in zip(starts, sizes, strict=True)]
    names = [d.fresh("part") for _ in sizes]
    rest = {"split": f"{sizes}, dim={axis}", "chunk": f"{len(sizes)}, dim={axis}", "unbind": axis}[way]
    d.block.append(f"{', '.join(names)} = {call(way, rest)}")
    return names
