"""What a model reads of its tokens in the end, so that padding is dead: pooling, gathers, losses over valid items."""

from __future__ import annotations

from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.program import Draft
from gemopt.testing.programs.tokens import VOCABULARY, Tokens, counts

DEMANDS = {"mean": 5, "sum": 2, "max": 2, "last": 4, "attention": 2, "boolean": 2, "cross_entropy": 3, "bce": 2,
           "positions": 1, "masked_output": 2, "unreduced": 1, "first": 1}  # fmt: skip
SEVERAL = {"mean": 3, "sum": 2, "max": 1, "masked_output": 1}  # of tokens [B, N, L, D]


def demand(d: Draft, c: Choices, t: Tokens, kind: str) -> list[str]:
    """The lines of ``Model.forward`` after the last layer, where ``x`` holds the tokens; they return."""
    m, dim = t.valid, t.dim
    if kind in ("mean", "sum", "max", "last", "attention", "positions", "first"):
        return [*_pool(d, c, t, kind), *_head(d, c, dim)]
    if kind == "masked_output":
        d.model_init.append(f"self.head = nn.Linear({dim}, 3)")
        return [
            "y = self.head(x)",
            c.spell(
                "masking_output",
                f"return y * {m}.unsqueeze(-1)",
                f"return y.masked_fill(~{m}[..., None], 0.0)",
                f"return torch.where({m}[..., None], y, 0.0)",
            ),
        ]
    if kind == "boolean":
        d.settings["some"] = True
        d.model_init.append(f"self.head = nn.Linear({dim}, 1)")
        return [
            c.spell("boolean", f"rows = x[{m}]", f"rows = self.head(x)[{m}]"),
            "rows = rows if rows.shape[-1] == 1 else self.head(rows)",
            c.spell(
                "boolean_end", "return rows.square().mean()", "return rows.sum()", "return torch.sigmoid(rows).sum() / 4"
            ),
        ]
    if kind == "unreduced":
        d.model_init.append(f"self.head = nn.Linear({dim}, 1)")
        target = d.give("target", "target = torch.randn(batch, max_len, generator=generator)")
        return [
            f"loss = F.mse_loss(self.head(x).squeeze(-1), {target}, reduction='none')",
            c.spell("unreduced", f"return (loss * {m}).sum() / {m}.sum().clamp(min=1)", f"return (loss * {m}).sum(1)"),
        ]
    return _bce(d, c, t) if kind == "bce" else _cross_entropy(d, c, t)


def _head(d: Draft, c: Choices, dim: int) -> list[str]:
    kind = c.pick("head", ["linear", "mlp", "none"])
    if kind == "none":
        return ["return pooled"]
    head = (
        f"nn.Linear({dim}, 2)"
        if kind == "linear"
        else f"nn.Sequential(nn.Linear({dim}, {dim}), nn.ReLU(), nn.Linear({dim}, 1))"
    )
    d.model_init.append(f"self.head = {head}")
    return ["return self.head(pooled)"]


def _pool(d: Draft, c: Choices, t: Tokens, kind: str) -> list[str]:
    m, dim = t.valid, t.dim
    wide = c.spell("wide", f"{m}.unsqueeze(-1)", f"{m}[..., None]")
    if kind in ("mean", "sum"):
        total = c.spell(
            "masked_sum",
            f"(x * {wide}).sum(-2)",
            f"(x * {wide}.to(x.dtype)).sum(dim=-2)",
            f"x.masked_fill(~{wide}, 0.0).sum(-2)",
            f"torch.where({wide}, x, torch.zeros_like(x)).sum(-2)",
            f"({m}.to(x.dtype).unsqueeze(-2) @ x).squeeze(-2)",
            f'torch.einsum("...l,...ld->...d", {m}.to(x.dtype), x)',
        )
        if kind == "sum":
            return [f"pooled = {total}"]
        n = counts(d, c, t)
        divisor = c.spell(
            "mean_divisor",
            f"{n}.clamp(min=1).unsqueeze(-1)",
            f"({n}[..., None] + 1e-6)",
            f"{m}.sum(-1, keepdim=True).clamp(min=1)",
        )
        return [f"pooled = {total} / {divisor}"]
    if kind == "max":
        fill = c.spell("max_fill", "-1e9", 'float("-inf")', "torch.finfo(x.dtype).min")
        return [f"pooled = x.masked_fill(~{wide}, {fill})." + c.spell("max", "max(dim=-2).values", "amax(-2)", "max(-2)[0]")]
    if kind == "attention":
        d.settings["undefined_empty"] = True
        d.model_init += [f"self.pool = nn.Linear({dim}, {dim})", f"self.vote = nn.Linear({dim}, 1, bias=False)"]
        return [
            "votes = self.vote(torch.tanh(self.pool(x))).squeeze(-1)",
            c.spell("pool_mask", f"votes = votes.masked_fill(~{m}, -1e9)", f"votes = torch.where({m}, votes, -1e9)",
                    f"votes = votes + (1.0 - {m}.to(x.dtype)) * -1e9"),
            "votes = torch.softmax(votes, dim=1)",
            c.spell("pool_sum", "pooled = (votes.unsqueeze(1) @ x).squeeze(1)", "pooled = (votes.unsqueeze(-1) * x).sum(1)",
                    'pooled = torch.einsum("bl,bld->bd", votes, x)'),
        ]  # fmt: skip
    masked = []
    if c.chance("masked_rows", 3):  # an empty sequence has no row there, but a number
        masked = [c.spell("masked_rows_spelling", f"x = x * {wide}", f"x = x.masked_fill(~{wide}, 0.0)",
                          f"x = torch.where({wide}, x, 0.5)")]  # fmt: skip
    if kind == "first":
        d.settings["shortest"] = 0 if masked else 1
        return [*masked, c.spell("first", "pooled = x[:, 0]", "pooled = x[:, 0, :]", "pooled = x.select(1, 0)")]
    if kind == "positions":
        d.settings["shortest"] = 0 if masked else 1
        drawn = "(torch.rand(batch, 2, generator=generator) * lengths[:, None]).long()"
        at = d.give("positions", f"positions = torch.minimum({drawn}, (lengths[:, None] - 1).clamp(min=0))")
        got = c.spell(
            "gather", f"torch.gather(x, 1, {at}.unsqueeze(-1).expand(-1, -1, {dim}))", f"x[torch.arange(B)[:, None], {at}]"
        )
        return [*masked, f"pooled = {got}.sum(1)"]
    return [*masked, *_last(d, c, t, bool(masked))]


def _last(d: Draft, c: Choices, t: Tokens, masked: bool) -> list[str]:
    n, dim = counts(d, c, t), t.dim
    way = c.pick("last", ["gather", "index", "gather_clamped", "take_along", "one_hot"])
    if way in ("gather", "take_along") or (way == "index" and not masked):
        d.settings["shortest"] = 1
    at = f"{n} - 1"
    return {
        "gather": [f"pooled = x.gather(1, ({at}).view(-1, 1, 1).expand(-1, 1, {dim})).squeeze(1)"],
        "index": [f"pooled = x[torch.arange(B, device=x.device), {at}]"],
        "gather_clamped": [f"pooled = x.gather(1, ({at}).clamp(min=0)[:, None, None].expand(-1, -1, {dim})).squeeze(1)"],
        "take_along": [f"pooled = torch.take_along_dim(x, ({at})[:, None, None], dim=1).squeeze(1)"],
        "one_hot": [
            f"pick = (torch.arange({t.size}, device=x.device) == ({at})[:, None]).to(x.dtype)",
            "pooled = (x * pick.unsqueeze(-1)).sum(1)",
        ],
    }[way]


def _cross_entropy(d: Draft, c: Choices, t: Tokens) -> list[str]:
    ignore = c.spell("ignore_index", "-100", "0", "-1")
    real = "real"
    labels = d.give(
        "labels",
        f"labels = torch.randint(1, {VOCABULARY}, {real}.shape, generator=generator).masked_fill(~{real}, {ignore})",
    )
    d.settings["some"] = True
    d.model_init.append(f"self.head = nn.Linear({t.dim}, {VOCABULARY})")
    extra = "" if ignore == "-100" else f", ignore_index={ignore}"
    reduction = c.spell("reduction", "", ', reduction="sum"')
    return [
        "logits = self.head(x)",
        c.spell(
            "cross_entropy",
            f"return F.cross_entropy(logits.view(-1, {VOCABULARY}), {labels}.view(-1){extra}{reduction})",
            f"return F.cross_entropy(logits.transpose(1, 2), {labels}{extra}{reduction})",
            f"return F.cross_entropy(logits.flatten(0, 1), {labels}.flatten(){extra}{reduction})",
            f"return F.nll_loss(F.log_softmax(logits, dim=-1).flatten(0, 1), {labels}.flatten(){extra}{reduction})",
        ),
    ]


def _bce(d: Draft, c: Choices, t: Tokens) -> list[str]:
    """Positive against negative items, as sequential recommenders train."""
    d.settings["some"] = True
    for name in ("wanted", "others"):
        d.give(name, f"{name} = torch.randint(1, {VOCABULARY}, real.shape, generator=generator)")
    d.model_init.append(f"self.items = nn.Embedding({VOCABULARY}, {t.dim})")
    m = t.valid
    return [
        "positive = (x * self.items(wanted)).sum(-1)",
        "negative = (x * self.items(others)).sum(-1)",
        c.spell(
            "bce",
            f"return F.binary_cross_entropy_with_logits(positive[{m}], torch.ones_like(positive[{m}])) + "
            f"F.binary_cross_entropy_with_logits(negative[{m}], torch.zeros_like(negative[{m}]))",
            f"return -(F.logsigmoid(positive - negative) * {m}).sum() / {m}.sum()",
            f"return (F.softplus(negative - positive) * {m}.float()).sum()",
        ),
    ]
