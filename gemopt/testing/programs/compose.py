"""Positive programs: every attention can be computed on fewer rows than the padded ones, and nothing else is observed."""

from __future__ import annotations

from dataclasses import replace

import torch

from gemopt.testing.programs import blocks as b
from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.demands import DEMANDS, SEVERAL, demand
from gemopt.testing.programs.masks import STRUCTURES, Part
from gemopt.testing.programs.program import Draft, Program
from gemopt.testing.programs.tokens import Tokens, token_set

FAMILIES = {"softmax": 14, "activation": 8, "sdpa": 4, "mha": 2, "encoder": 2, "cross": 3, "cross_activation": 1, "pffn": 2,
            "pma": 2, "reshaped": 2, "several": 2, "target": 2}  # fmt: skip
PRECISIONS = {"fp32": 16, "autocast_inside": 1, "autocast_around": 1, "bf16": 1}


def compose(c: Choices, d: Draft | None = None) -> Program:
    """A program from the decisions of ``c``; ``d`` may bring hooks."""
    d = d or Draft()
    family = c.pick("family", FAMILIES)
    dim = int(c.pick("dim", {"8": 6, "12": 2, "16": 1}))
    precision = c.pick("precision", PRECISIONS)
    after, layers, sites, t = _FAMILIES.get(family, _self)(d, c, dim, family)
    if precision == "autocast_inside":
        inside = _autocast(d)
        c.axes["precision"] = "autocast_inside" if inside else "fp32"
    sizes = c.pick("sizes", {"distinct": 5, "equal": 1})
    length = dim // 2 if sizes == "equal" else 7
    if family == "reshaped":
        length = 8
    d.settings["max_len"] = length
    return Program(
        source=d.text(layers, t.x, _end(d, t) or after),
        axes=dict(c.axes),
        sites=sites,
        max_len=length,
        batch=2 if sizes == "equal" else 5,
        shortest=d.settings.get("shortest", 0),
        undefined_empty=d.settings.get("undefined_empty", False),
        margin=d.settings.get("margin", 0),
        holes=t.validity != "lengths" and not d.settings.get("no_holes", False),
        fixed=family == "reshaped",
        autocast=torch.bfloat16 if precision == "autocast_around" else None,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
    )


def _end(d: Draft, t: Tokens) -> list[str]:
    """The end that a near miss asks for."""
    return [line.replace("{m}", t.valid) for line in d.settings.get("end", [])]


def _autocast(d: Draft) -> bool:
    """Put the block's attention, where it has one, under autocast, and leave its surroundings outside."""
    last = max((i for i, line in enumerate(d.block) if line.startswith("out = ")), default=-1)
    if last < d.settings.get("start", 0):
        return False
    inside = "\n".join(d.block[d.settings["start"] : last + 1])
    text = 'with torch.autocast("cpu", dtype=torch.bfloat16):\n' + "\n".join(f"    {x}" for x in inside.splitlines())
    d.block[d.settings["start"] : last + 1] = [text, "out = out.to(x.dtype)"]
    return True


# ---------------------------------------------------------------- around the attention


def _open(d: Draft, c: Choices, dim: int) -> str:
    """Norm before the attention; returns the name it reads."""
    norm = c.pick("norm", {"pre": 4, "post": 2, "none": 1, "rms": 1})
    if norm in ("pre", "post"):
        d.block_init.append(f"self.norm = nn.LayerNorm({dim})")
    elif norm == "rms":
        d.block_init.append(f"self.norm = nn.RMSNorm({dim})")
    d.at("open")
    d.block.append("h = self.norm(x)" if norm in ("pre", "rms") else "h = x")
    d.settings["start"] = len(d.block)
    return "h"


def _close(d: Draft, c: Choices, dim: int) -> None:
    """Residual, norm after, feed-forward."""
    d.at("close")
    d.block.append(c.spell("residual", "x = x + out", "x = out + x", "x = out"))
    if c.axes["norm"] == "post":
        d.block.append("x = self.norm(x)")
    ffn = c.pick("ffn", {"none": 3, "mlp": 3, "swiglu": 1})
    if ffn == "mlp":
        act = c.spell("ffn_act", "nn.GELU()", "nn.ReLU()", "nn.SiLU()")
        d.block_init.append(
            f"self.ffn = nn.Sequential(nn.LayerNorm({dim}), nn.Linear({dim}, {2 * dim}), {act}, nn.Linear({2 * dim}, {dim}))"
        )
        d.block.append("x = x + self.ffn(x)")
    elif ffn == "swiglu":
        d.block_init += [f"self.up = nn.Linear({dim}, {4 * dim})", f"self.down = nn.Linear({2 * dim}, {dim})"]
        d.block += ["gate, up = self.up(x).chunk(2, dim=-1)", "x = x + self.down(F.silu(gate) * up)"]
    d.block.append("return x")


def _layers(c: Choices) -> int:
    return int(c.pick("layers", {"1": 4, "2": 1}))


def _parts(d: Draft, c: Choices, q: Tokens, k: Tokens, kind: str, structured: str) -> list[Part]:
    """Key or query-and-key padding and a structure."""
    lead = k.shape[:-1]
    parts = [Part(d.passing(k.valid), f"{lead}k")] if kind != "none" else []
    if kind == "both":
        parts.append(Part(d.passing(q.valid), f"{lead}q"))
    parts += b.structure(d, c, structured, q.size, k.size, "x.device")
    if d.settings.get("unmasked"):
        return []
    return parts if c.pick("part_order", ["padding_first", "structure_first"]) == "padding_first" else parts[::-1]


# ---------------------------------------------------------------- families


def _self(d: Draft, c: Choices, dim: int, family: str) -> tuple[list[str], int, int, Tokens]:
    """Self-attention over one padded set."""
    structures = {
        k: v for k, v in STRUCTURES.items() if family in ("softmax", "activation", "sdpa") or k in ("none", "causal")
    }
    structured = c.pick("structure", structures)
    softmax = family not in ("activation",)
    padding = c.pick("padding", {"key": 6} | ({"both": 2} if family in ("softmax", "activation", "sdpa") else {})
                     | ({"none": 2} if structured in ("causal", "causal_window") else {}))  # fmt: skip
    t = token_set(d, c, dim, validity={"lengths": 1} if padding == "none" else None)
    if structured == "documents":
        d.give("docs", "docs = torch.randint(0, 3, real.shape, generator=generator)")
    finite = softmax and (padding == "both" or structured in ("window", "causal_window", "blocks", "documents"))
    c.axes["need_finite"] = "yes" if finite else "no"
    if family == "sdpa" and finite:
        d.settings["margin"] = 0
    h_name = _open(d, c, dim)
    d.block.append("B, L = x.shape[:2]")
    side = b.Side(h_name, "L", Part(t.valid, "bk") if padding != "none" else None, t.lengths)
    if family == "mha":
        if side.valid:
            d.passing(t.valid)
        b.module_attention(d, c, dim, side, side, structured)
        _close(d, c, dim)
    elif family == "encoder":
        c.axes["norm"] = "none"
        del d.block[:], d.block_init[:]
        if side.valid:
            d.passing(t.valid)
        b.encoder_layer(
            d, c, dim, replace(side, x="x"), replace(side, x="x"), structured
        ) if structured == "none" else _causal_encoder(d, c, dim, side)
    else:
        flag = family == "sdpa" and structured == "causal" and padding == "none"
        parts = [] if flag else _parts(d, c, t, t, padding, structured)
        if family == "activation" and t.lengths:
            d.passing(t.lengths)
        layout = "bhld" if family == "sdpa" else c.pick("layout", b.LAYOUTS)
        heads = b.heads_for(c, dim, layout)
        b.project(d, c, heads, side, side)
        if family == "sdpa":
            b.sdpa_attention(d, c, heads, side, side, parts, flag)
        elif family == "softmax":
            b.softmax_attention(d, c, heads, layout, side, side, parts, finite)
        else:
            b.activation_attention(d, c, heads, layout, side, side, parts)
        _close(d, c, dim)
    layers = _layers(c)
    # Without a mask on keys only the lengths say which keys later queries read; labels may end anywhere.
    ends = {k: n for k, n in DEMANDS.items() if padding != "none" or k != "cross_entropy"}
    return demand(d, c, t, c.pick("demand", ends)), layers, layers, t


def _causal_encoder(d: Draft, c: Choices, dim: int, side: b.Side) -> None:
    d.block.append("L = x.shape[1]")
    b.encoder_layer(d, c, dim, replace(side, x="x"), replace(side, x="x"), "causal")


def _several(d: Draft, c: Choices, dim: int, family: str) -> tuple[list[str], int, int, Tokens]:
    """Several event sequences per sample: 5-D attention."""
    t = token_set(d, c, dim, shape="bnk")
    h = _open(d, c, dim)
    d.block.append("B, N, L = x.shape[:3]")
    structured = c.pick("structure", {"none": 3, "causal": 2})
    parts = _parts(d, c, t, t, "key", structured)
    layout = "bhld" if c.chance("headed", 2) else "bld"
    heads = replace(b.heads_for(c, dim, "bld" if layout == "bld" else "merged"), lead="bn")
    c.axes["layout"] = layout
    side = b.Side(h, "L", parts[0], None)
    b.project(d, c, heads, side, side)
    if c.pick("score_function", ["softmax", "activation"]) == "softmax":
        b.softmax_attention(d, c, heads, layout, side, side, parts, False)
    else:
        b.activation_attention(d, c, heads, layout, side, side, parts)
    _close(d, c, dim)
    return demand(d, c, t, c.pick("demand", SEVERAL)), 1, 1, t


def _reshaped(d: Draft, c: Choices, dim: int, family: str) -> tuple[list[str], int, int, Tokens]:
    """Attention inside blocks of four tokens, as ``[B, L / 4, 4, D]``."""
    t = token_set(d, c, dim)
    _open(d, c, dim)
    d.passing(t.valid)
    view = c.spell(
        "block_view", "h.reshape(B, L // 4, 4, h.shape[-1])", "h.view(B, -1, 4, h.shape[-1])", "h.unflatten(1, (-1, 4))"
    )
    d.block += [
        "B, L = x.shape[:2]",
        f"h = {view}",
        c.spell(
            "block_mask_view", f"in_block = {t.valid}.view(B, L // 4, 4)", f"in_block = {t.valid}.unflatten(1, (-1, 4))"
        ),
        "N = h.shape[1]",
    ]
    layout = "bhld" if c.chance("headed", 2) else "bld"
    heads = replace(b.heads_for(c, dim, "bld" if layout == "bld" else "merged"), lead="bn")
    c.axes["layout"] = layout
    part = Part("in_block", "bnk")
    side = b.Side("h", "4", part, None)
    b.project(d, c, heads, side, side)
    if c.pick("score_function", ["softmax", "activation"]) == "softmax":
        b.softmax_attention(d, c, heads, layout, side, side, [part], True)
    else:
        b.activation_attention(d, c, heads, layout, side, side, [part])
    d.block.append(c.spell("unblock", "out = out.reshape(B, L, -1)", "out = out.flatten(1, 2)"))
    _close(d, c, dim)
    return demand(d, c, t, c.pick("demand", DEMANDS)), 1, 1, t


def _cross(d: Draft, c: Choices, dim: int, family: str) -> tuple[list[str], int, int, Tokens]:
    """Queries of one padded set, keys and values of another with its own lengths."""
    softmax = family == "cross"
    d.settings["other_empty"] = not softmax
    t = token_set(d, c, dim)
    y = token_set(d, c, dim, "y_", longer=int(c.pick("longer", {"2": 3, "0": 1, "5": 1})))
    h = _open(d, c, dim)
    d.passing(y.x)
    d.block += [f"B, L = x.shape[:2]\n{y.size} = {y.x}.shape[1]"]
    way = c.pick("cross_as", {"written": 4, "sdpa": 1, "mha": 1, "decoder": 1}) if softmax else "written"
    padding = c.pick("padding", {"key": 4} | ({"both": 1} if way == "written" else {}))
    structured = c.pick("structure", {"none": 5} | ({"causal": 1, "causal_bottom_right": 1} if way == "written" else {}))
    q, k = b.Side(h, "L", None), b.Side(y.x, y.size, Part(y.valid, "bk"), y.lengths)
    sites = 1
    c.axes["need_finite"] = "yes" if padding == "both" else "no"
    if way == "decoder":
        c.axes["norm"] = "none"
        del d.block[:], d.block_init[:]
        d.passing(y.valid)
        d.passing(t.valid)
        b.encoder_layer(d, c, dim, b.Side("x", "L", Part(t.valid, "bk")), k, "none")
        sites = 2
    elif way == "mha":
        d.passing(y.valid)
        b.module_attention(d, c, dim, q, k, "none")
        _close(d, c, dim)
    else:
        parts = _parts(d, c, t, y, padding, structured)
        if not softmax and y.lengths:
            d.passing(y.lengths)
        layout = "bhld" if way == "sdpa" else c.pick("layout", b.LAYOUTS)
        heads = b.heads_for(c, dim, layout)
        b.project(d, c, heads, q, k)
        if way == "sdpa":
            b.sdpa_attention(d, c, heads, q, k, parts, False)
        elif softmax:
            b.softmax_attention(d, c, heads, layout, q, k, parts, padding == "both")
        else:
            b.activation_attention(d, c, heads, layout, q, k, parts)
        _close(d, c, dim)
    d.settings["no_holes"] = y.validity == "lengths" or t.validity == "lengths"
    return demand(d, c, t, c.pick("demand", DEMANDS)), 1, sites, t


def _pffn(d: Draft, c: Choices, dim: int, family: str) -> tuple[list[str], int, int, Tokens]:
    """A long padded query over few keys and values, generated for each sample."""
    t = token_set(d, c, dim)
    n = int(c.spell("generated", "3", "4", "1"))
    context = d.give("context", "context = torch.randn(batch, 5, generator=generator)")
    d.passing(context)
    h = _open(d, c, dim)
    d.block_init.append(f"self.generate = nn.Linear(5, {n * dim})")
    d.block += [
        "B, L = x.shape[:2]",
        c.spell("generate", f"memory = self.generate({context}).view(B, {n}, {dim})",
                f"memory = self.generate({context}).unflatten(-1, ({n}, {dim}))",
                f"memory = self.generate({context}).reshape(-1, {n}, {dim})"),
    ]  # fmt: skip
    q, k = b.Side(h, "L", None), b.Side("memory", str(n), None)
    layout = c.pick("layout", b.LAYOUTS)
    heads = b.heads_for(c, dim, layout)
    b.project(d, c, heads, q, k)
    if c.pick("score_function", {"activation": 3, "softmax": 1}) == "softmax":
        b.softmax_attention(d, c, heads, layout, q, k, [], False)
    else:
        b.activation_attention(d, c, heads, layout, q, k, [])
    _close(d, c, dim)
    return demand(d, c, t, c.pick("demand", DEMANDS)), 1, 1, t


def _pma(d: Draft, c: Choices, dim: int, family: str) -> tuple[list[str], int, int, Tokens]:
    """A few learned queries, shared over the batch, pool a padded set."""
    t = token_set(d, c, dim)
    n = int(c.spell("seeds", "2", "3", "1"))
    d.block_init.append(f"self.seeds = nn.Parameter(torch.randn({n}, {dim}))")
    h = _open(d, c, dim)
    d.passing(t.valid)
    d.block += ["B, L = x.shape[:2]", c.spell(
        "expand_seeds", "seeds = self.seeds.unsqueeze(0).expand(B, -1, -1)", "seeds = self.seeds.repeat(B, 1, 1)",
        f"seeds = self.seeds.expand(B, {n}, {dim})")]  # fmt: skip
    q, k = b.Side("seeds", str(n), None), b.Side(h, "L", Part(t.valid, "bk"), t.lengths)
    layout = c.pick("layout", b.LAYOUTS)
    heads = b.heads_for(c, dim, layout)
    parts = [Part(t.valid, "bk")]
    b.project(d, c, heads, q, k)
    if c.pick("score_function", {"softmax": 2, "activation": 2}) == "softmax":
        d.settings["undefined_empty"] = True  # a live query without keys
        b.softmax_attention(d, c, heads, layout, q, k, parts, False)
    else:
        if t.lengths:
            d.passing(t.lengths)
        b.activation_attention(d, c, heads, layout, q, k, parts)
    d.block.append("return out")
    d.model_init.append(f"self.head = nn.Linear({n * dim}, 2)")
    return ["return self.head(x.flatten(1))"], 1, 1, t


def _target(d: Draft, c: Choices, dim: int, family: str) -> tuple[list[str], int, int, Tokens]:
    """One candidate item per sample attends over the history: scaled dot product or DIN's small network."""
    t = token_set(d, c, dim)
    d.give("item", "item = torch.randint(1, 40, (batch,), generator=generator)")
    d.model_init.append(f"self.item = nn.Embedding(40, {dim})")
    d.model.append("wanted_item = self.item(item)")
    d.passing("wanted_item")
    d.passing(t.valid)
    _open(d, c, dim)
    way = c.pick("target", ["din", "dot", "bmm"])
    d.block.append("B, L = x.shape[:2]")
    if way == "din":
        d.block_init.append(
            f"self.net = nn.Sequential(nn.Linear({4 * dim}, 8), "
            f"{c.spell('din_act', 'nn.PReLU()', 'nn.Sigmoid()', 'nn.ReLU()')}, nn.Linear(8, 1))"
        )
        d.block += [
            "t = wanted_item.unsqueeze(1).expand(-1, L, -1)",
            "s = self.net(torch.cat([t, h, t - h, t * h], dim=-1)).squeeze(-1)",
        ]
    else:
        d.block_init.append(f"self.key = nn.Linear({dim}, {dim})")
        d.block.append("s = (self.key(h) * wanted_item.unsqueeze(1)).sum(-1)" if way == "dot"
                       else "s = torch.bmm(self.key(h), wanted_item.unsqueeze(-1)).squeeze(-1)")  # fmt: skip
    if c.pick("target_weights", ["softmax", "masked"]) == "softmax":
        d.settings["undefined_empty"] = True
        fill = c.spell("target_fill", "-1e9", 'float("-inf")', "-2.0**32 + 1")
        d.block.append(
            c.spell("target_mask", f"s = s.masked_fill(~{t.valid}, {fill})", f"s = torch.where({t.valid}, s, {fill})")
        )
        d.block.append("w = torch.softmax(s, dim=-1)")
    else:
        d.block.append(
            c.spell(
                "target_mask",
                f"w = s * {t.valid}",
                f"w = s.masked_fill(~{t.valid}, 0.0)",
                f"w = torch.where({t.valid}, s, 0.0)",
            )
        )
    d.block += [
        c.spell("target_sum", "out = (w.unsqueeze(-1) * h).sum(1)", "out = torch.bmm(w.unsqueeze(1), h).squeeze(1)"),
        "return out",
    ]
    d.model_init.append(f"self.head = nn.Linear({2 * dim}, 1)")
    return ["return self.head(torch.cat([x, wanted_item], dim=-1))"], 1, 0, t


_FAMILIES = {
    "several": _several,
    "reshaped": _reshaped,
    "cross": _cross,
    "cross_activation": _cross,
    "pffn": _pffn,
    "pma": _pma,
    "target": _target,
}
