"""Near misses: programs one step away from attention over valid rows. Whatever gemopt does, they must equal eager.

A defect goes into a positive program: a line at a named point of the block (the tensors there are called ``q``, ``k``,
``v``, ``{s}``), another mask, another end. Some defects happen to mean the same as no defect in some programs; that is no
matter, since only equality with eager is asked.
"""

from __future__ import annotations

from dataclasses import replace

from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.compose import compose
from gemopt.testing.programs.program import Draft, Program

# Lines after heads are arranged. They need every size to be equal where they move axes.
EQUAL = {
    "k_untransposed": "k = k.transpose(-2, -1)",
    "v_transposed": "v = v.transpose(-2, -1)",
    "q_transposed": "q = q.transpose(-2, -1)",
    "k_heads_for_tokens": "k = k.transpose(1, 2)",
    "v_heads_for_tokens": "v = v.transpose(1, 2)",
    "q_batch_for_heads": "q = q.transpose(0, 1)",
    "k_batch_for_heads": "k = k.transpose(0, 1)",
    "v_batch_for_tokens": "v = v.transpose(0, 2)",
    "k_reread": "k = k.transpose(1, 2).reshape(k.shape)",
    "v_reread": "v = v.transpose(1, 2).reshape(v.shape)",
    "q_flipped_axes": "q = q.permute(1, 0, 2, 3)",
}
ARRANGED = {
    "k_rolled": "k = k.roll(1, dims=2)",
    "v_rolled": "v = v.roll(-1, dims=2)",
    "q_rolled": "q = q.roll(1, dims=2)",
    "k_flipped": "k = k.flip(2)",
    "v_flipped": "v = v.flip(-2)",
    "k_centred": "k = k - k.mean(2, keepdim=True)",
    "v_centred": "v = v - v.mean(dim=2, keepdim=True)",
    "k_sorted": "k = k.sort(dim=2).values",
    "v_cumulated": "v = v.cumsum(2)",
    "k_softmax_tokens": "k = k.softmax(2)",
    "k_short": "q, k = q[..., :-1], k[..., :-1]",
    "k_first_batch": "k = k[:1].expand_as(k)",
    "v_next_sample": "v = v.roll(1, dims=0)",
    "k_next_sample": "k = k[torch.arange(B - 1, -1, -1)]",
    "v_other_heads": "v = v.flip(1)",
    "k_detached": "k = k.detach()",
    "v_detached": "v = v.detach()",
    "q_no_grad": "with torch.no_grad():\n    q = q * 1.5",
    "k_normalised": "k = F.normalize(k, dim=2)",
    "k_shared_row": "k = k[:, :, :1].expand_as(k)",
    "v_last_row": "v = v[:, :, -1:] + v",
    "k_max": "k = k / (k.amax(2, keepdim=True) + 3.0)",
}
SCORES = {
    "capped": "{s} = 5.0 * torch.tanh({s} / 5.0)",
    "clamped": "{s} = {s}.clamp(-0.3, 0.3)",
    "rounded": "{s} = {s} + ({s}.round() - {s}).detach()",
    "halved": "{s} = {s}.to(torch.bfloat16).to({s}.dtype)",
    "detached": "{s} = {s}.detach() * 1.0",
    "talking_heads": "{s} = {s} + {s}.flip(1)",
    "mixed_heads": "{s} = {s} - {s}.mean(1, keepdim=True)",
    "scale_per_query": "{s} = {s} * torch.arange(1, {s}.shape[-2] + 1, device={s}.device)[:, None] / 4",
    "scale_per_key": "{s} = {s} * torch.arange(1, {s}.shape[-1] + 1, device={s}.device) / 4",
    "scale_per_head": "{s} = {s} * torch.arange(1, {s}.shape[1] + 1, device={s}.device)[:, None, None] / 2",
    "scale_per_sample": "{s} = {s} * torch.arange(1, {s}.shape[0] + 1, device={s}.device)[:, None, None, None] / 3",
    "scale_learned": "{s} = {s} * self.temperature",
    "scale_data": "{s} = {s} * x.mean()",
    "negated": "{s} = -{s}",
    "squared": "{s} = {s} * {s}",
    "bias_data": "{s} = {s} + x[:, None, :, :1]",
    "bias_keys": "{s} = {s} + x[:, None, None, :, 0]",
    "shifted": "{s} = {s} - {s}.mean(-1, keepdim=True)",
    "shifted_all": "{s} = {s} - {s}.max()",
    "shifted_wrong": "{s} = {s} - {s}.amax(-2, keepdim=True)",
    "rolled": "{s} = {s}.roll(1, dims=-1)",
    "top2": "{s} = torch.where({s} >= {s}.topk(2, dim=-1).values[..., -1:], {s}, {s} - 30.0)",
    "diagonal": "{s} = {s} + 2.0 * torch.eye({s}.shape[-2], {s}.shape[-1], device={s}.device)",
    "cumulated": "{s} = {s}.cumsum(-1)",
    "mask_of_scores": "{s} = {s}.masked_fill({s} < 0, -1e9)",
    "weak_minus_10": "{s} = {s}.masked_fill(~{valid}[:, None, None, :], -10.0)",
    "weak_minus_100": "{s} = {s}.masked_fill(~{valid}[:, None, None, :], -100.0)",
    "weak_zero": "{s} = {s} * {valid}[:, None, None, :]",
    "weak_additive": "{s} = {s} + (1.0 - {valid}[:, None, None, :].to({s}.dtype)) * -20.0",
    "mask_queries": "{s} = {s}.masked_fill(~{valid}[:, None, :, None], -1e9)",
    "plus_inf": "{s} = {s}.masked_fill(~{valid}[:, None, None, :], 1e4)",
}
# After the mask, before the softmax. A fill survives these only where it is -inf or far enough away.
MASKED = {
    "rescaled": "{s} = {s} * 0.001",
    "lifted": "{s} = {s}.clamp(min=-8.0)",
    "negative": "{s} = {s} * -1.0",
    "unmasked_first": "{s} = torch.cat([{s}[..., :1] * 0, {s}[..., 1:]], dim=-1)",
    "capped_after": "{s} = 4.0 * torch.tanh({s} / 4.0)",
    "added_after": "{s} = {s} + 1.0e4 * (1.0 - {valid}[:, None, None, :].to({s}.dtype))",
    "flip_after": "{s} = {s}.flip(-1)",
    "softmax_before": "{s} = {s}.softmax(-1)",
}
WEIGHTS = {
    "twice": "{s} = {s}.softmax(-1)",
    "not_renormalised": "{s} = {s} * {valid}[:, None, None, :]",
    "power": "{s} = {s}.square()",
    "detached_weights": "{s} = {s}.detach()",
    "no_diagonal": "{s} = {s} * (1.0 - torch.eye({s}.shape[-2], {s}.shape[-1], device={s}.device))",
    "uniform_mix": "{s} = 0.9 * {s} + 0.1 / {s}.shape[-1]",
    "rolled_weights": "{s} = {s}.roll(1, dims=-1)",
    "transposed_weights": "{s} = {s}.transpose(-2, -1)",
    "normalised_over_queries": "{s} = {s} / {s}.sum(-2, keepdim=True).clamp(min=1e-3)",
    "weights_per_key": "{s} = {s} * torch.arange(1, {s}.shape[-1] + 1, device={s}.device) / 4",
    "max_weights": "{s} = {s} / {s}.amax(-1, keepdim=True)",
    "thresholded": "{s} = {s} * ({s} > 0.1)",
    "one_minus": "{s} = 1.0 - {s}",
    "extra_value": "v = v + {s}.sum((-1, -2), keepdim=True)",
    "sparsemax_like": "{s} = ({s} - 0.05).clamp(min=0)",
    "entropy_used": "self.seen = ({s} * {s}).sum()",
}
# Before the attention, over the tokens x [B, L, D].
TOKENS = {
    "rolled": "{x} = {x} + {x}.roll(1, dims=1)",
    "flipped": "{x} = {x} + {x}.flip(1)",
    "shifted": "{x} = {x} + F.pad({x}, (0, 0, 1, 0))[:, :-1]",
    "shifted_back": "{x} = {x} + F.pad({x}, (0, 0, 0, 1))[:, 1:]",
    "cumulated": "{x} = {x}.cumsum(1)",
    "centred": "{x} = {x} - {x}.mean(1, keepdim=True)",
    "centred_batch": "{x} = {x} - {x}.mean(0, keepdim=True)",
    "centred_all": "{x} = {x} - {x}.mean()",
    "softmax_batch": "{x} = {x} + {x}.softmax(0)",
    "softmax_tokens": "{x} = {x} + {x}.softmax(dim=1)",
    "sorted": "{x} = {x}.sort(dim=1).values",
    "topk": "{x} = {x} + {x}.topk(2, dim=1).values.sum(1, keepdim=True)",
    "next_sample": "{x} = {x} + 0.5 * {x}.roll(1, dims=0)",
    "permuted_batch": "{x} = {x} + {x}[torch.arange({x}.shape[0] - 1, -1, -1)]",
    "max_tokens": "{x} = {x} + {x}.amax(1, keepdim=True)",
    "norm_tokens": "{x} = F.normalize({x}, dim=1)",
    "conv": "{x} = {x} + self.conv({x}.transpose(1, 2)).transpose(1, 2)",
    "batch_norm": "{x} = self.batch_norm({x}.transpose(1, 2)).transpose(1, 2)",
    "batch_norm_flat": "{x} = self.batch_norm({x}.reshape(-1, {x}.shape[-1])).view_as({x})",
    "instance_norm": "{x} = F.instance_norm({x}.transpose(1, 2)).transpose(1, 2)",
    "layer_norm_2d": "{x} = F.layer_norm({x}, {x}.shape[1:])",
    "gru": "{x} = {x} + self.gru({x})[0]",
    "token_mixer": "{x} = {x} + torch.einsum('bld,lm->bmd', {x}, self.mixer[:{x}.shape[1], :{x}.shape[1]])",
    "plain_attention": "{x} = {x} + torch.softmax({x} @ {x}.transpose(1, 2), -1) @ {x}",
    "gram": "{x} = {x} + {x} @ ({x}.transpose(1, 2) @ {x}) / {x}.shape[1]",
    "batch_attention": "{x} = {x} + torch.einsum('abl,bld->ald', torch.einsum('ald,bld->abl', {x}, {x}).softmax(1), {x})",
    "unfold": "{x} = {x} + F.avg_pool1d({x}.transpose(1, 2), 3, 1, 1).transpose(1, 2)",
    "first_for_all": "{x} = {x} + {x}[:, :1]",
    "last_for_all": "{x} = {x} + {x}[:, -1:]",
    "reread": "{x} = {x} + {x}.transpose(1, 2).reshape({x}.shape)",
    "flat_roll": "{x} = {x} + {x}.flatten(0, 1).roll(1, 0).view_as({x})",
    "argmax": "{x} = {x} + {x}.argmax(1, keepdim=True)",
    "quantile": "{x} = {x} - {x}.median(dim=1, keepdim=True).values",
    "logsumexp": "{x} = {x} - {x}.logsumexp(1, keepdim=True)",
    "prod": "{x} = {x} + {x}.clamp(0.5, 1.5).prod(1, keepdim=True)",
    "std": "{x} = {x} / ({x}.std(1, keepdim=True) + 1)",
    "diff": "{x} = {x} + {x}.diff(dim=1, prepend={x}[:, :1])",
    "gathered": "{x} = {x} + {x}.gather(1, ((torch.arange({x}.shape[1]) + 1) % {x}.shape[1])[None, :, None].expand_as({x}))",
    "scattered": "{x} = {x} + torch.zeros_like({x}).index_add(1, torch.arange({x}.shape[1]) // 2, {x})",
    "inplace_row": "{x} = {x}.clone()\n{x}[:, 0] = {x}[:, 1]",
    "inplace_last": "{x} = {x}.clone()\n{x}[:, -1] += 1.0",
}
# What is read of the tokens x in the end; ``valid`` is the mask.
ENDS = {
    "returned": ["return x"],
    "plain_mean": ["return x.mean(1)"],
    "plain_sum": ["return x.sum((0, 1))"],
    "plain_max": ["return x.amax(1)"],
    "both": ["return (x * {m}.unsqueeze(-1)).sum(1), x.mean()"],
    "wrong_sample": ["return (x * {m}.roll(1, 0).unsqueeze(-1)).sum(1)"],
    "wrong_order": ["return (x * {m}.flip(1).unsqueeze(-1)).sum(1)"],
    "inverted": ["return (x * ~{m}.unsqueeze(-1)).sum(1)"],
    "shifted": ["return (x * F.pad({m}, (1, 0))[:, :-1].unsqueeze(-1)).sum(1)"],
    "one_more": ["more = {m} | F.pad({m}, (1, 0))[:, :-1]", "return x.masked_fill(~more.unsqueeze(-1), 0.0).sum(1)"],
    "last_padded": ["return x[:, -1]"],
    "one_past": ["at = {m}.sum(1).clamp(max=x.shape[1] - 1)", "return x[torch.arange(B), at]"],
    "negative_index": ["at = {m}.sum(1) - 2", "return x[torch.arange(B), at]"],
    "divided_by_mask": ["return (x / ({m}.unsqueeze(-1) + 0.5)).sum(1)"],
    "soft_mask": ["return (x * ({m}.unsqueeze(-1) * 0.9 + 0.1)).sum(1)"],
    "filled_weakly": ["return x.masked_fill(~{m}.unsqueeze(-1), -1.0).amax(1)"],
    "filled_then_square": ["return (x.masked_fill(~{m}.unsqueeze(-1), 2.0) ** 2).mean(1)"],
    "softmax_unmasked": ["w = torch.softmax(x.sum(-1), 1)", "return (w.unsqueeze(-1) * x).sum(1)"],
    "softmax_then_mask": ["w = torch.softmax(x.sum(-1), 1) * {m}", "return (w.unsqueeze(-1) * x).sum(1)"],
    "mask_by_value": ["return (x * (x > 0)).sum(1)"],
    "masked_cumsum": ["return (x.cumsum(1) * {m}.unsqueeze(-1)).sum(1)"],
    "masked_conv": ["return ((x + x.roll(1, 1)) * {m}.unsqueeze(-1)).sum(1)"],
    "masked_topk": ["return x.masked_fill(~{m}.unsqueeze(-1), -1e9).topk(1, dim=1).values.squeeze(1)"],
    "masked_sort": ["return x.masked_fill(~{m}.unsqueeze(-1), 0.0).sort(dim=1).values[:, -1]"],
    "masked_var": ["return (x * {m}.unsqueeze(-1)).var(1)"],
    "masked_norm": ["return (x * {m}.unsqueeze(-1)).norm(dim=1)"],
    "masked_mean_padded": ["return (x * {m}.unsqueeze(-1)).mean(1)"],
    "exp_of_masked": ["return (x * {m}.unsqueeze(-1)).exp().sum(1)"],
    "some_rows": ["odd = (torch.arange(B) % 2 == 1)[:, None]", "return (x * ({m} ^ odd).unsqueeze(-1)).sum(1)"],
    "half_of_dims": ["return torch.cat([(x * {m}.unsqueeze(-1)).sum(1)[:, :4], x[..., 4:].sum(1)], dim=-1)"],
    "all_tokens_loss": ["return F.mse_loss(x, torch.ones_like(x))"],
    "loss_mean_of_all": ["return (F.mse_loss(x, torch.ones_like(x), reduction='none') * {m}.unsqueeze(-1)).mean()"],
    "wrong_divisor": ["return (x * {m}.unsqueeze(-1)).sum(1) / x.shape[1]"],
    "cross_sample": ["z = (x * {m}.unsqueeze(-1)).sum(1)", "return z @ z.t()"],
    "interaction": ["z = x * {m}.unsqueeze(-1)", "return torch.einsum('bld,bme->bde', z, x)"],
    "intermediate": ["z = x * {m}.unsqueeze(-1)", "return z.sum(1), x[:, 0] * 2, z.detach()"],
    "padding_only_gradient": ["return (x + (x - x.detach()) * 3 * ~{m}.unsqueeze(-1)).sum(1)"],
}
# The mask that attention sees; the ends still read the true one.
MASKS = {
    "one_less": "{m} = {m} & F.pad({m}, (0, 1))[:, 1:] | (torch.arange(L) == 0)",
    "one_more": "{m} = {m} | F.pad({m}, (1, 0))[:, :-1]",
    "some_inverted": "{m} = {m} ^ ((torch.arange(B) % 2 == 1)[:, None] & (torch.arange(L) > 0))",
    "neighbour": "{m} = {m}.roll(1, 0)",
    "reversed": "{m} = {m}.flip(1) | (torch.arange(L) == 0)",
    "all": "{m} = torch.ones_like({m})",
    "even": "{m} = {m} & (torch.arange(L) % 2 == 0)",
    "first_half": "{m} = torch.arange(L).expand(B, L) <= L // 2",
    "data": "{m} = {m} & (x[..., 0] > 0) | (torch.arange(L) == 0)",
    "longest": "{m} = {m}.any(0, keepdim=True).expand_as({m})",
    "shuffled_lengths": "{m} = torch.arange(L) < {m}.sum(1).flip(0)[:, None]",
    "shifted": "{m} = F.pad({m}, (1, 0))[:, :-1] | (torch.arange(L) == 0)",
    "float_threshold": "{m} = {m}.float().cumsum(1) > 0.5",
}
# Of parts of the heads; all sizes are equal where another axis takes the heads' place.
BY_HEAD = ["swapped", "twice", "scaled", "detached", "rolled", "filled", "another_axis", "stacked_elsewhere"]
KINDS = {"equal": 4, "arranged": 4, "scores": 6, "masked": 3, "weights": 4, "axis": 3, "tokens": 6, "after": 3, "end": 6,
         "mask": 5, "causal": 2, "none": 1, "by_head": 3}  # fmt: skip


def compose_miss(c: Choices) -> Program:
    """A near miss from the decisions of ``c``."""
    kind = c.pick("miss", KINDS)
    d = Draft()
    return _MAKERS[kind](d, c)


def _finish(d: Draft, c: Choices, **fixed: str) -> Program:
    c.fix(fixed)
    program = compose(c, d)
    finite_rows = max(1, program.shortest)  # an empty sequence has nothing to do with the defect
    return replace(program, positive=False, axes=dict(c.axes), shortest=finite_rows)


def _hooked(d: Draft, c: Choices, point: str, table: dict[str, str], **fixed: str) -> Program:
    defect = c.pick("defect", list(table))
    line = table[defect].replace("{valid}", "valid")
    if "{valid}" in table[defect]:
        d.passing("valid")
    if "self.temperature" in line:
        d.block_init.append("self.temperature = nn.Parameter(torch.tensor(0.7))")
    d.hooks[point] = [line]
    return _finish(d, c, **fixed)


_PLAIN = {"family": "softmax", "layout": "bhld", "kv_heads": "all", "k_stored_transposed": "no", "precision": "fp32"}


def _equal(d: Draft, c: Choices) -> Program:
    """Batch, heads, tokens and features all of size 4: only the axis says what is what."""
    program = _hooked(d, c, "arranged", EQUAL, **_PLAIN, dim="16", heads="4", value_dim="4")
    return replace(program, max_len=4, batch=4, fixed=True)


def _arranged(d: Draft, c: Choices) -> Program:
    return _hooked(d, c, "arranged", ARRANGED, **_PLAIN)


def _scores(d: Draft, c: Choices) -> Program:
    family = c.pick("score_family", {"softmax": 2, "activation": 1})
    return _hooked(d, c, "scores", SCORES, **{**_PLAIN, "family": family})


def _masked(d: Draft, c: Choices) -> Program:
    return _hooked(d, c, "masked", MASKED, **_PLAIN, padding="key", structure=c.pick("miss_structure", ["none", "causal"]))


def _weights(d: Draft, c: Choices) -> Program:
    family = c.pick("score_family", {"softmax": 2, "activation": 1})
    return _hooked(d, c, "weights", WEIGHTS, **{**_PLAIN, "family": family, "sizes": "distinct"})


def _axis(d: Draft, c: Choices) -> Program:
    """The softmax over queries, heads or samples."""
    d.settings["softmax_axis"] = c.pick("defect", ["q", "h", "b"])
    return _finish(d, c, **_PLAIN)


def _mixing(d: Draft, c: Choices, lines: list[str]) -> None:
    """Write a line that mixes rows, and the modules it needs (made lazily: the width is decided later)."""
    name = c.pick("defect", list(TOKENS))
    lines.append(TOKENS[name].replace("{x}", "x"))
    dim = int(c.pick("dim", {"8": 3, "12": 1}))
    c.fix({"dim": str(dim)})
    made = {
        "self.conv": f"self.conv = nn.Conv1d({dim}, {dim}, 3, padding=1)",
        "self.batch_norm": f"self.batch_norm = nn.BatchNorm1d({dim})",
        "self.gru": f"self.gru = nn.GRU({dim}, {dim}, batch_first=True)",
        "self.mixer": "self.mixer = nn.Parameter(0.2 * torch.randn(48, 48))",
    }
    d.block_init += [line for key, line in made.items() if key in lines[-1]]


def _tokens(d: Draft, c: Choices) -> Program:
    _mixing(d, c, d.hooks.setdefault("open", []))
    family = c.pick("miss_family", {"softmax": 3, "activation": 1, "sdpa": 1, "mha": 1, "pma": 1, "cross": 1})
    return _finish(d, c, family=family, precision="fp32")


def _after(d: Draft, c: Choices) -> Program:
    _mixing(d, c, d.hooks.setdefault("close", []))
    return _finish(
        d, c, family=c.pick("miss_family", {"softmax": 3, "activation": 1, "sdpa": 1, "cross": 1}), precision="fp32"
    )


def _end(d: Draft, c: Choices) -> Program:
    name = c.pick("defect", list(ENDS))
    d.settings["end"] = ENDS[name]
    family = c.pick("miss_family", {"softmax": 3, "activation": 2, "sdpa": 1, "mha": 1, "encoder": 1, "cross": 1, "pffn": 1})
    return _finish(d, c, family=family, precision="fp32")


def _mask(d: Draft, c: Choices) -> Program:
    """The attention's mask is another one than the one that is read by."""
    name = c.pick("defect", list(MASKS))
    d.hooks["open"] = [
        f"B, L = x.shape[:2]\nvalid = {MASKS[name]}".replace("valid = {m} = ", "valid = ").replace("{m}", "valid")
    ]
    d.passing("valid")
    family = c.pick("miss_family", {"softmax": 3, "activation": 2, "sdpa": 1, "mha": 1, "pma": 1})
    return _finish(d, c, family=family, precision="fp32", padding="key")


def _causal(d: Draft, c: Choices) -> Program:
    """Causality alone, and one off: a valid query sees padding."""
    d.settings["offset"] = c.pick("defect", ["1", "2", "-1", "flipped", "not"])
    family = c.pick("miss_family", {"softmax": 2, "activation": 1, "sdpa": 1})
    padding = c.pick("miss_padding", ["none", "key"])
    return _finish(d, c, family=family, structure="causal", precision="fp32", padding=padding)


def _none(d: Draft, c: Choices) -> Program:
    """No mask at all."""
    d.settings["unmasked"] = True
    return _finish(d, c, family=c.pick("miss_family", ["softmax", "activation", "sdpa"]), precision="fp32")


def _by_head(d: Draft, c: Choices) -> Program:
    """Heads with activations of their own: out of place, or unlike in more than the activation."""
    defect = d.settings["by_head"] = c.pick("defect", BY_HEAD)
    fixed = {"family": "activation", "by_head": "yes", "precision": "fp32", "padding": "key"}
    fixed |= {"layout": c.pick("miss_layout", ["bhld", "hbld", "blhd", "bqkh"]), "heads": c.pick("miss_heads", ["2", "4"])}
    if defect == "filled":
        fixed |= {"act": "sigmoid", "act_1": c.pick("miss_act", ["silu", "relu", "identity"]), "act_mask": "before_zero"}
    elif defect == "twice":
        fixed |= {"heads": "4", "head_parts": c.pick("miss_parts", ["2 2", "1 1 1 1", "1 2 1"])}
    elif defect == "another_axis":
        fixed |= {"dim": "16", "heads": "4"}
    elif defect == "stacked_elsewhere":
        way = c.pick("miss_way", ["select", "unbind"])
        fixed |= {"dim": "16", "heads": "4", "head_parts": "1 1 1 1", "taken_apart": way}
    program = _finish(d, c, **fixed)
    equal = defect in ("another_axis", "stacked_elsewhere")
    return replace(program, max_len=4, batch=4, fixed=True) if equal else program


_MAKERS = {"equal": _equal, "arranged": _arranged, "scores": _scores, "masked": _masked, "weights": _weights, "axis": _axis,
           "tokens": _tokens, "after": _after, "end": _end, "mask": _mask, "causal": _causal, "none": _none,
           "by_head": _by_head}  # fmt: skip
