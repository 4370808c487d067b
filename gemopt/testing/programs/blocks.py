"""The classes of attention: written out, SDPA, modules of torch.nn, pooling by seeds, generated keys, reshaped blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from gemopt.testing.programs import scores as sc
from gemopt.testing.programs.by_head import activation, fillings, pick_acts
from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.masks import Part, broadcast, joined, mask_scores, structure
from gemopt.testing.programs.program import Draft


@dataclass
class Side:
    """What attention reads: a name, its tokens' size, its mask (None: all rows count), the expression of its lengths."""

    x: str
    size: str
    valid: Part | None
    lengths: str | None = None


@dataclass
class Heads:
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    lead: str = "b"  # "bn" for several sequences per sample
    parts: list[Part] = field(default_factory=list)


LAYOUTS = {"bhld": 6, "bld": 3, "merged": 2, "cat_heads": 1, "hbld": 1, "blhd": 3, "bqkh": 1, "transposed": 1}


def heads_for(c: Choices, dim: int, layout: str) -> Heads:
    if layout == "bld":
        value = int(c.pick("value_dim", {str(dim): 4, "6": 1}))
        return Heads(dim, 1, 1, dim, value)
    heads = int(c.pick("heads", {"2": 5, "4": 3, "1": 1}))
    grouping = c.pick("kv_heads", {"all": 6, "half": 1, "one": 1}) if layout == "bhld" and heads > 1 else "all"
    groups = {"all": heads, "half": heads // 2, "one": 1}[grouping]
    head_dim = dim // heads
    value = int(c.pick("value_dim", {str(head_dim): 5, "3": 1}))
    return Heads(dim, heads, groups, head_dim, value)


def project(d: Draft, c: Choices, h: Heads, q: Side, k: Side) -> None:
    """Write flat ``q``, ``k``, ``v``: ``[B, L, heads * dim]``."""
    sizes = (h.heads * h.head_dim, h.kv_heads * h.head_dim, h.kv_heads * h.value_dim)
    same = q.x == k.x
    ways = {"separate": 5} | ({"fused": 3} if same else {"fused_kv": 2}) | {"functional": 1}
    way = c.pick("projection", ways)
    bias = c.spell("projection_bias", "", ", bias=False")
    if way == "functional":
        for name, side, n in zip("qkv", (q, k, k), sizes, strict=True):
            d.block_init.append(f"self.w_{name} = nn.Parameter(torch.randn({n}, {h.dim}) * {h.dim}**-0.5)")
            d.block.append(
                c.spell(
                    "functional", f"{name} = F.linear({side.x}, self.w_{name})", f"{name} = {side.x} @ self.w_{name}.t()"
                )
            )
    elif way == "separate":
        for name, side, n in zip("qkv", (q, k, k), sizes, strict=True):
            d.block_init.append(f"self.to_{name} = nn.Linear({h.dim}, {n}{bias})")
            d.block.append(f"{name} = self.to_{name}({side.x})")
    else:
        fused = sizes if way == "fused" else sizes[1:]
        names = "qkv" if way == "fused" else "kv"
        if way == "fused_kv":
            d.block_init.append(f"self.to_q = nn.Linear({h.dim}, {sizes[0]}{bias})")
            d.block.append(f"q = self.to_q({q.x})")
        d.block_init.append(f"self.to_{names} = nn.Linear({h.dim}, {sum(fused)}{bias})")
        d.block.append(_split(c, f"self.to_{names}({k.x})", names, fused))
    if c.chance("frozen", 8):
        d.block_init.append("self.requires_grad_(False)")


def _split(c: Choices, fused: str, names: str, sizes: tuple[int, ...]) -> str:
    left = ", ".join(names)
    ways = {"split": 2, "slices": 1} | ({"chunk": 3, "unflatten": 1} if len(set(sizes)) == 1 else {})
    way = c.pick("split", ways)
    if way == "chunk":
        return f"{left} = {fused}.chunk({len(sizes)}, dim=-1)"
    if way == "split":
        return f"{left} = torch.split({fused}, {list(sizes)}, dim=-1)"
    if way == "unflatten":
        return f"{left} = {fused}.unflatten(-1, ({len(sizes)}, {sizes[0]})).unbind(-2)"
    ends = list(itertools.accumulate(sizes))
    parts = ", ".join(f"qkv[..., {e - n}:{e}]" for e, n in zip(ends, sizes, strict=True))
    return f"qkv = {fused}\n{left} = {parts}"


def arrange(d: Draft, c: Choices, h: Heads, layout: str, q: Side, k: Side) -> dict[str, str]:
    """Write heads into ``q``, ``k``, ``v``; returns the dims of ``q``, ``k``, ``v``, scores ``s``, output ``o``."""
    if layout == "bld":
        return {"q": f"{h.lead}qd", "k": f"{h.lead}kd", "v": f"{h.lead}kd", "s": f"{h.lead}qk", "o": f"{h.lead}qd"}
    batch = "B, N" if h.lead == "bn" else "B"
    for name, side, n, e in (
        ("q", q, h.heads, h.head_dim),
        ("k", k, h.kv_heads, h.head_dim),
        ("v", k, h.kv_heads, h.value_dim),
    ):
        d.block.append(_headed(c, name, batch, side.size, n, e))
    b = h.lead
    if layout in ("blhd", "bqkh"):
        s = f"{b}hqk" if layout == "blhd" else f"{b}qkh"
        return {"q": f"{b}qhd", "k": f"{b}khd", "v": f"{b}khd", "s": s, "o": f"{b}qhd"}
    if layout == "hbld":
        d.block += [f"{n} = {n}.permute(2, 0, 1, 3)" for n in "qkv"]
        return {"q": "hbqd", "k": "hbkd", "v": "hbkd", "s": "hbqk", "o": "hbqd"}
    kt = layout == "bhld" and h.kv_heads == h.heads and b == "b" and c.chance("k_stored_transposed", 5)
    for name in "qkv":
        if name == "k" and kt:
            d.block.append("k = k.permute(0, 2, 3, 1)")
        else:
            d.block.append(_heads_first(c, name, b))
    if layout in ("merged", "cat_heads"):
        for name, e in zip("qkv", (h.head_dim, h.head_dim, h.value_dim), strict=True):
            size = q.size if name == "q" else k.size
            if layout == "merged":
                join = c.spell(
                    "merge", f"{name} = {name}.reshape(B * {h.heads}, {size}, {e})", f"{name} = {name}.flatten(0, 1)"
                )
            else:
                join = f"{name} = torch.cat({name}.unbind(1), dim=0)"
            d.block.append(join)
        return {"q": "mqd", "k": "mkd", "v": "mkd", "s": "mqk", "o": "mqd"}
    if h.kv_heads != h.heads:
        _repeat_heads(d, c, h)
    s = f"{b}hkq" if layout == "transposed" else f"{b}hqk"
    return {"q": f"{b}hqd", "k": f"{b}hdk" if kt else f"{b}hkd", "v": f"{b}hkd", "s": s, "o": f"{b}hqd"}


def _headed(c: Choices, name: str, batch: str, size: str, heads: int, dim: int) -> str:
    return c.spell(
        "split_heads",
        f"{name} = {name}.view({batch}, {size}, {heads}, {dim})",
        f"{name} = {name}.reshape({batch}, {size}, {heads}, {dim})",
        f"{name} = {name}.unflatten(-1, ({heads}, {dim}))",
        f"{name} = {name}.view({batch}, -1, {heads}, {dim})",
    ).replace("view(", "reshape(" if c.axes.get("projection", "").startswith("fused") else "view(")


def _heads_first(c: Choices, name: str, lead: str) -> str:
    if lead == "bn":
        return c.spell("heads_first", f"{name} = {name}.transpose(2, 3)", f"{name} = {name}.permute(0, 1, 3, 2, 4)")
    return c.spell(
        "heads_first",
        f"{name} = {name}.transpose(1, 2)",
        f"{name} = {name}.permute(0, 2, 1, 3)",
        f"{name} = {name}.transpose(-3, -2).contiguous()",
        f"{name} = {name}.movedim(2, 1)",
    )


def _repeat_heads(d: Draft, c: Choices, h: Heads) -> None:
    times = h.heads // h.kv_heads
    for name in "kv":
        d.block.append(c.spell(
            "repeat_kv",
            f"{name} = {name}.repeat_interleave({times}, dim=1)",
            f"{name} = {name}[:, :, None].expand(-1, -1, {times}, -1, -1).reshape(B, {h.heads}, -1, {name}.shape[-1])",
            f"{name} = {name}.unsqueeze(2).expand(B, {h.kv_heads}, {times}, {name}.shape[2], {name}.shape[3]).flatten(1, 2)",
        ))  # fmt: skip


def collect(d: Draft, c: Choices, h: Heads, layout: str, q: Side) -> None:
    """Write ``out`` back to ``[B, L, heads * value_dim]`` and project it to the model's width."""
    flat = h.heads * h.value_dim
    if layout in ("merged", "cat_heads"):
        if layout == "merged":
            d.block.append(
                f"out = out.reshape(B, {h.heads}, {q.size}, {h.value_dim}).transpose(1, 2).reshape(B, {q.size}, {flat})"
            )
        else:
            d.block.append(f"out = torch.cat(out.chunk({h.heads}, dim=0), dim=-1)")
    elif layout == "hbld":
        d.block.append(f"out = out.permute(1, 2, 0, 3).reshape(B, {q.size}, {flat})")
    elif layout in ("blhd", "bqkh"):
        d.block.append(c.spell("merge_heads", "out = out.flatten(-2)", f"out = out.reshape(*out.shape[:-2], {flat})"))
    elif layout != "bld":
        swap = "2, 3" if h.lead == "bn" else "1, 2"
        d.block.append(c.spell(
            "merge_heads",
            f"out = out.transpose({swap}).flatten(-2)",
            f"out = out.transpose({swap}).contiguous().view({'B, N' if h.lead == 'bn' else 'B'}, -1, {flat})",
            f"out = out.transpose({swap}).reshape({'B, N' if h.lead == 'bn' else 'B'}, {q.size}, {flat})",
        ))  # fmt: skip
    d.block_init.append(f"self.to_out = nn.Linear({flat}, {h.dim})")
    d.block.append("out = self.to_out(out)")


# ---------------------------------------------------------------- written out


def softmax_attention(
    d: Draft, c: Choices, h: Heads, layout: str, q: Side, k: Side, parts: list[Part], finite: bool
) -> None:
    """Softmax attention from contractions; the mask is the product of ``parts``."""
    dims = arrange(d, c, h, layout, q, k)
    d.at("arranged")
    scale = c.pick("scale", sc.SCALES)
    sc.scale_operands(d, c, scale, h.head_dim)
    alpha = f"{h.head_dim}**-0.5" if scale == "scores_mul" else None
    s = sc.contract_qk(d, c, dims, alpha)
    if not (c.axes["qk"] == "baddbmm" and alpha) and scale != "after_mask":
        sc.scale_scores(d, c, scale, s, h.head_dim)
    if dims["s"] in ("bhqk", "bqk", "hbqk", "bnhqk", "bqkh"):
        sc.add_bias(d, c, c.pick("bias", sc.BIASES), s, dims["s"], h.heads, q.size, k.size)
    d.at("scores", s)
    s = mask_scores(d, c, s, parts, dims["s"], h.heads, finite or scale == "after_mask")
    if scale == "after_mask":
        sc.scale_scores(d, c, scale, s, h.head_dim)
    d.at("masked", s)
    axis = d.settings.get("softmax_axis", "k")
    w = sc.softmax(d, c, s, dims["s"].index(axis if axis in dims["s"] else "q"), len(dims["s"]), finite)
    d.at("weights", w)
    sc.contract_pv(d, c, dims, w)
    d.at("out")
    collect(d, c, h, layout, q)


def activation_attention(d: Draft, c: Choices, h: Heads, layout: str, q: Side, k: Side, parts: list[Part]) -> None:
    """Generalised dot-product attention: an activation in place of the softmax."""
    dims = arrange(d, c, h, layout, q, k)
    d.at("arranged")
    scale = c.pick("scale", {n: w for n, w in sc.SCALES.items() if n != "after_mask"})
    sc.scale_operands(d, c, scale, h.head_dim)
    alpha = f"{h.head_dim}**-0.5" if scale == "scores_mul" else None
    s = sc.contract_qk(d, c, dims, alpha)
    if not (c.axes["qk"] == "baddbmm" and alpha):
        sc.scale_scores(d, c, scale, s, h.head_dim)
    if dims["s"] in ("bhqk", "bqk", "hbqk", "bnhqk", "bqkh"):
        sc.add_bias(d, c, c.pick("bias", sc.BIASES), s, dims["s"], h.heads, q.size, k.size)
    d.at("scores", s)
    acts = pick_acts(c, h.heads if "h" in dims["s"] else 1)
    allowed = joined(d, c, parts, dims["s"], h.heads) if parts else ""
    places = {"mul": 4, "fill": 2, "where": 1} | dict.fromkeys(fillings(d, acts), 1)
    place = c.pick("act_mask", places) if parts else "none"
    if place.startswith("before"):
        d.block.append(f"{s} = {s}.masked_fill(~({allowed}), {'0.0' if place == 'before_zero' else '-math.inf'})")
    text = activation(d, c, s, acts, dims["s"])
    w = d.fresh("weights")
    d.block.append(f"{w} = {text}")
    if place in ("mul", "fill", "where"):
        d.block.append({
            "mul": f"{w} = {w} * ({allowed})",
            "fill": f"{w} = {w}.masked_fill(~({allowed}), 0.0)",
            "where": f"{w} = torch.where({allowed}, {w}, 0.0)",
        }[place])  # fmt: skip
    norm = c.pick(
        "normalisation",
        {n: x for n, x in sc.NORMALISATIONS.items() if n != "length" or (k.lengths and "m" not in dims["s"])},
    )
    late = norm != "length" and c.chance("normalise_output", 3)
    lengths = ""
    if norm == "length":
        lengths = broadcast(c, Part(k.lengths or "", h.lead), dims["s"], h.heads)
        if lengths == k.lengths:
            lengths = f"{lengths}[:, None, None]"
    if not late:
        d.block.append(f"{w} = {sc.normalise(c, norm, w, k.size, lengths)}")
    d.at("weights", w)
    sc.contract_pv(d, c, dims, w)
    d.at("out")
    if late:
        d.block.append(f"out = {sc.normalise(c, norm, 'out', k.size, lengths)}")
    collect(d, c, h, layout, q)
    if c.chance("gate", 4) and h.value_dim * h.heads:
        d.block_init.append(f"self.gate = nn.Linear({h.dim}, {h.dim})")
        d.block.append(f"out = out * F.silu(self.gate({q.x}))")


# ---------------------------------------------------------------- operators and modules of torch


def sdpa_attention(d: Draft, c: Choices, h: Heads, q: Side, k: Side, parts: list[Part], causal_flag: bool) -> None:
    """``F.scaled_dot_product_attention`` with its arguments."""
    batch = "B, N" if h.lead == "bn" else "B"
    for name, side, n, e in (
        ("q", q, h.heads, h.head_dim),
        ("k", k, h.kv_heads, h.head_dim),
        ("v", k, h.kv_heads, h.value_dim),
    ):
        d.block += [_headed(c, name, batch, side.size, n, e), _heads_first(c, name, h.lead)]
    arguments = []
    s = f"{h.lead}hqk"
    if h.kv_heads != h.heads:
        if c.chance("enable_gqa", 2):
            arguments.append("enable_gqa=True")
        else:
            _repeat_heads(d, c, h)
    if causal_flag:
        arguments.append("is_causal=True")
    elif parts:
        allowed = joined(d, c, parts, s, h.heads)
        kind = c.pick("sdpa_mask", {"bool": 4, "float": 3})
        if kind == "float":
            name = d.fresh("additive")
            fill = c.spell("sdpa_fill", 'float("-inf")', "torch.finfo(q.dtype).min", "-1e9", "-10000.0")
            if c.axes.get("need_finite") == "yes" and "inf" in fill and "finfo" not in fill:
                fill = "-1e9"
            d.block.append(c.spell(
                "sdpa_additive",
                f"{name} = torch.zeros(({allowed}).shape, dtype=q.dtype, device=q.device).masked_fill(~({allowed}), {fill})",
                f"{name} = torch.where({allowed}, 0.0, {fill}).to(q.dtype)",
            ))  # fmt: skip
            allowed = name
        arguments.append(f"attn_mask={allowed}")
    if c.chance("sdpa_scale", 3):
        arguments.append(c.spell("sdpa_scale_value", "scale=0.3", f"scale={h.head_dim}**-0.5", "scale=1.0"))
    if c.chance("sdpa_dropout", 4):
        arguments.append("dropout_p=0.0")
    call = f"F.scaled_dot_product_attention({', '.join(['q', 'k', 'v', *arguments])})"
    d.block.append(f"out = {call}")
    collect(d, c, h, "bhld", q)


def module_attention(d: Draft, c: Choices, dim: int, q: Side, k: Side, kind: str) -> str:
    """``nn.MultiheadAttention``; returns the expression of its arguments' masks."""
    heads = c.pick("heads", {"2": 3, "4": 2, "1": 1})
    first = c.chance("batch_first", 2) is False
    d.block_init.append(
        f"self.attention = nn.MultiheadAttention({dim}, {heads}, dropout=0.0, batch_first={first}"
        f"{c.spell('mha_bias', '', ', bias=False')})"
    )
    arguments = module_masks(d, c, q, k, kind)
    if c.chance("need_weights_false", 2):
        arguments.append("need_weights=False")
    side = lambda x: x if first else f"{x}.transpose(0, 1)"  # noqa: E731
    d.block.append(f"out = self.attention({', '.join([side(q.x), side(k.x), side(k.x), *arguments])})[0]")
    if not first:
        d.block.append("out = out.transpose(0, 1)")
    return ""


def module_masks(
    d: Draft, c: Choices, q: Side, k: Side, kind: str, names: tuple[str, str] = ("key_padding_mask", "attn_mask")
) -> list[str]:
    """Arguments of the masks of a module of torch.nn."""
    arguments = []
    float_masks = c.chance("float_module_masks", 4)
    if k.valid is not None:
        text = f"~{k.valid.name}"
        if float_masks:
            d.block.append(
                f"padding = torch.zeros_like({k.valid.name}, dtype=x.dtype).masked_fill(~{k.valid.name}, float('-inf'))"
            )
            text = "padding"
        arguments.append(f"{names[0]}={text}")
    if kind == "causal":
        ones = f"torch.ones({q.size}, {k.size}, dtype=torch.bool, device=x.device)"
        text = f"{ones}.triu(1)"
        if float_masks:
            text = c.spell(
                "module_causal",
                f"nn.Transformer.generate_square_subsequent_mask({q.size}, device=x.device, dtype=x.dtype)",
                f"torch.full(({q.size}, {k.size}), float('-inf'), device=x.device, dtype=x.dtype).triu(1)",
            )
        arguments.append(f"{names[1]}={text}")
    return arguments


def encoder_layer(d: Draft, c: Choices, dim: int, q: Side, k: Side, kind: str) -> None:
    """``nn.TransformerEncoderLayer``, or ``nn.TransformerDecoderLayer`` where the keys are of another set."""
    heads = c.pick("heads", {"2": 3, "4": 2, "1": 1})
    act = c.spell("encoder_activation", '"relu"', '"gelu"')
    settings = (
        f"{dim}, {heads}, {2 * dim}, dropout=0.0, activation={act}, batch_first=True, norm_first={c.chance('norm_first', 2)}"
    )
    if k.x == q.x:
        d.block_init.append(f"self.encoder = nn.TransformerEncoderLayer({settings})")
        masks = module_masks(d, c, q, k, kind, ("src_key_padding_mask", "src_mask"))
        d.block.append(f"return self.encoder({', '.join([q.x, *masks])})")
        return
    d.block_init.append(f"self.decoder = nn.TransformerDecoderLayer({settings})")
    masks = module_masks(d, c, q, q, kind, ("tgt_key_padding_mask", "tgt_mask"))
    memory = f"memory_key_padding_mask=~{k.valid.name}" if k.valid else ""
    d.block.append(f"return self.decoder({', '.join([q.x, k.x, *masks, memory])})")


__all__ = [
    "LAYOUTS", "Heads", "Side", "activation_attention", "encoder_layer", "heads_for", "module_attention", "project",
    "sdpa_attention", "softmax_attention", "structure",
]  # fmt: skip
