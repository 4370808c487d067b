"""The pieces of an attention: contractions, scales, biases, softmax and activations, each in its spellings."""

from __future__ import annotations

import string

from gemopt.testing.programs.choices import Choices
from gemopt.testing.programs.masks import CACHED
from gemopt.testing.programs.program import Draft

# ---------------------------------------------------------------- contractions


def einsum(c: Choices, axis: str, left: str, right: str, out: str) -> str:
    """The equation over random letters, or with an ellipsis where the leading dims agree."""
    letters = sorted(set(left + right))
    start = int(c.spell(f"{axis}_letters", "0", "7", "20"))
    alphabet = string.ascii_lowercase + string.ascii_uppercase
    names = {x: (x if start == 0 else alphabet[(start + 3 * i) % 52]) for i, x in enumerate(letters)}
    lead = len(left) - 2
    if left[:lead] == right[:lead] == out[:lead] and lead and c.chance(f"{axis}_ellipsis", 4):
        left, right, out = ("..." + x[lead:] for x in (left, right, out))
    over = lambda dims: "".join(names.get(x, x) for x in dims)  # noqa: E731
    blank = c.spell(f"{axis}_blank", "", " ")
    return f"{over(left)},{blank}{over(right)}{blank}->{blank}{over(out)}"


def contract_qk(d: Draft, c: Choices, dims: dict[str, str], scale: str | None) -> str:
    """Write ``scores = q k^T`` over ``dims["s"]`` from tensors ``q`` and ``k`` over ``dims["q"]`` and ``dims["k"]``."""
    q, k, s = dims["q"], dims["k"], dims["s"]
    name = d.fresh("scores")
    plain = q[:-2] == s[:-2] == k[:-2] and q[-1] == "d" and s[-2:] == "qk"
    ways = {"einsum": 3}
    if plain and k[-2:] == "kd":
        ways = {"matmul": 6, "einsum": 3, "mul_sum": 1, "swapped": 1}
    elif plain and k[-2:] == "dk":
        ways = {"matmul": 6, "einsum": 2}
    if plain and len(q) == 3:
        ways |= {"bmm": 5, "baddbmm": 2}
    elif plain and len(q) == 4:
        ways["flat_bmm"] = 1
    way = c.pick("qk", ways)
    if way == "einsum":
        d.block.append(f'{name} = torch.einsum("{einsum(c, "qk", q, k, s)}", q, k)')
    elif way == "mul_sum":
        last = c.spell("mul_sum_spelling", "sum(-1)", "sum(dim=-1)")
        d.block.append(f"{name} = (q.unsqueeze(-2) * k.unsqueeze(-3)).{last}")
    elif way == "swapped":
        d.block.append(f"{name} = (k @ q.transpose(-2, -1)).transpose(-2, -1)")
    else:
        kt = "k" if k[-1] == "k" else _transposed(c, "k", len(k))
        lines = {
            "matmul": lambda: c.spell("matmul_spelling", f"q @ {kt}", f"torch.matmul(q, {kt})", f"q.matmul({kt})"),
            "bmm": lambda: c.spell("bmm_spelling", f"torch.bmm(q, {kt})", f"q.bmm({kt})"),
            "baddbmm": lambda: _baddbmm(c, kt, scale),
            "flat_bmm": lambda: f"torch.bmm(q.flatten(0, 1), {kt}.flatten(0, 1)).unflatten(0, q.shape[:2])",
        }
        d.block.append(f"{name} = {lines[way]()}")
    return name


def _baddbmm(c: Choices, kt: str, scale: str | None) -> str:
    empty = c.spell("baddbmm_input", "torch.zeros", "torch.empty")
    alpha = scale if scale is not None else "1.0"
    return (
        f"torch.baddbmm({empty}(q.shape[0], q.shape[1], {kt}.shape[2], dtype=q.dtype, device=q.device), "
        f"q, {kt}, beta=0, alpha={alpha})"
    )


def _transposed(c: Choices, name: str, rank: int) -> str:
    order = [*range(rank - 2), rank - 1, rank - 2]
    return c.spell(
        "k_transpose",
        f"{name}.transpose(-2, -1)",
        f"{name}.transpose({rank - 2}, {rank - 1})",
        f"{name}.transpose(-1, -2)",
        f"{name}.mT",
        f"{name}.permute({', '.join(map(str, order))})",
        f"{name}.swapaxes(-1, -2)",
        f"{name}.movedim(-1, -2)",
        f"{name}.transpose(-2, -1).contiguous()",
    )


def contract_pv(d: Draft, c: Choices, dims: dict[str, str], weights: str) -> None:
    """Write ``out = weights v`` over ``dims["o"]``."""
    s, v, o = dims["s"], dims["v"], dims["o"]
    plain = s[:-2] == v[:-2] == o[:-2] and s[-2:] == "qk" and v[-2:] == "kd" and o[-2:] == "qd"
    ways = {"einsum": 1}
    if plain:
        ways = {"matmul": 6, "einsum": 2, "mul_sum": 1}
        if len(s) == 3:
            ways |= {"bmm": 5, "baddbmm": 1}
    way = c.pick("pv", ways)
    if way == "einsum":
        d.block.append(f'out = torch.einsum("{einsum(c, "pv", s, v, o)}", {weights}, v)')
    elif way == "mul_sum":
        d.block.append(f"out = ({weights}.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)")
    elif way == "bmm":
        d.block.append(f"out = torch.bmm({weights}, v)")
    elif way == "baddbmm":
        zeros = f"torch.zeros({weights}.shape[0], {weights}.shape[1], v.shape[2], dtype=v.dtype, device=v.device)"
        d.block.append(f"out = torch.baddbmm({zeros}, {weights}, v)")
    else:
        d.block.append(c.spell("pv_spelling", f"out = {weights} @ v", f"out = torch.matmul({weights}, v)"))


# ---------------------------------------------------------------- scales and biases

SCALES = {"scores_div": 4, "scores_mul": 4, "q": 3, "q_div": 1, "k": 1, "both": 1, "buffer": 1, "tensor": 1, "after_mask": 1,
          "none": 1}  # fmt: skip


def number(c: Choices, axis: str, head_dim: int) -> str:
    """``1 / sqrt(head_dim)`` as code."""
    return c.spell(axis, f"{head_dim} ** -0.5", f"1.0 / math.sqrt({head_dim})", "q.size(-1) ** -0.5", f"{head_dim**-0.5!r}")


def scale_operands(d: Draft, c: Choices, kind: str, head_dim: int) -> None:
    """Write the scale of ``q``, ``k`` or both, before the contraction."""
    if kind == "q":
        d.block.append(f"q = q * {number(c, 'scale_number', head_dim)}")
    elif kind == "q_div":
        d.block.append(f"q = q / math.sqrt({head_dim})")
    elif kind == "k":
        d.block.append(f"k = k * {head_dim}**-0.5")
    elif kind == "both":
        d.block += [f"q = q * {head_dim}**-0.25", f"k = k * {head_dim}**-0.25"]


def scale_scores(d: Draft, c: Choices, kind: str, s: str, head_dim: int) -> None:
    """Write the scale of the scores ``s``."""
    root = c.spell("root", f"math.sqrt({head_dim})", f"{head_dim} ** 0.5", "math.sqrt(q.size(-1))")
    if kind == "scores_div":
        d.block.append(
            c.spell("div_spelling", f"{s} = {s} / {root}", f"{s} = torch.div({s}, {root})", f"{s} = {s}.div({root})")
        )
    elif kind == "scores_mul":
        d.block.append(f"{s} = {s} * {number(c, 'scale_number', head_dim)}")
    elif kind == "buffer":
        d.block_init.append(f'self.register_buffer("scale", torch.tensor({head_dim}.0).sqrt())')
        d.block.append(f"{s} = {s} / self.scale")
    elif kind == "tensor":
        d.block.append(f"{s} = {s} / torch.sqrt(torch.tensor({head_dim}.0, dtype={s}.dtype, device={s}.device))")
    elif kind == "after_mask":
        d.block.append(f"{s} = {s} / {root}")


BIASES = {"none": 12, "dense": 2, "dense_shared": 1, "relative": 2, "alibi": 1, "relative_scalar": 1}


def add_bias(d: Draft, c: Choices, kind: str, s: str, dims: str, heads: int, lq: str, lk: str) -> None:
    """Write an additive bias of the scores, of dims ``hqk`` or ``qk``."""
    if kind == "none":
        return
    over = "qk" if kind in ("dense_shared", "relative_scalar") or "h" not in dims else "hqk"
    i, j = f"torch.arange({lq}, device={s}.device)[:, None]", f"torch.arange({lk}, device={s}.device)[None, :]"
    if kind.startswith("dense"):
        shape = f"{heads}, {CACHED}, {CACHED}" if over == "hqk" else f"{CACHED}, {CACHED}"
        d.block_init.append(f"self.bias = nn.Parameter(0.3 * torch.randn({shape}))")
        text = f"self.bias[:, :{lq}, :{lk}]" if over == "hqk" else f"self.bias[:{lq}, :{lk}]"
    elif kind.startswith("relative"):
        width = heads if over == "hqk" else 1
        d.block_init.append(f"self.relative = nn.Embedding(17, {width})")
        last = ".permute(2, 0, 1)" if over == "hqk" else ".squeeze(-1)"
        text = f"self.relative(({i} - {j}).clamp(-8, 8) + 8){last}"
    else:
        slopes = "torch.tensor([" + ", ".join(str(2.0 ** -(n + 1)) for n in range(heads)) + "])"
        d.block_init.append(f'self.register_buffer("slopes", {slopes})')
        head = "self.slopes[:, None, None]" if over == "hqk" else "self.slopes[0]"
        text = f"-{head} * ({i} - {j}).abs()"
    if over == "hqk" and dims.index("h") != len(dims) - 3:
        text = f"({text})[:, None]" if dims == "hbqk" else f"({text}).permute(1, 2, 0)"
    elif dims == "bqkh":
        text = f"({text})[..., None]"
    d.block.append(c.spell("bias_order", f"{s} = {s} + {text}", f"{s} = {text} + {s}"))


# ---------------------------------------------------------------- softmax and activations

SOFTMAXES = {"F.softmax": 5, "torch.softmax": 3, "method": 2, "module": 2, "float": 2, "dtype": 1, "log_softmax": 1,
             "logsumexp": 1, "exp_sum": 1, "exp_sum_max": 2, "exp_sum_max_detached": 1}  # fmt: skip


def softmax(d: Draft, c: Choices, s: str, dim: int, rank: int, hidden_rows: bool) -> str:
    """Write the softmax of ``s`` over ``dim`` (counted from the front); returns the weights' name.

    ``hidden_rows``: some queries see no key; without a maximum they would be 0 / 0, and their gradient would spread.
    """
    axis = c.spell("softmax_dim", str(dim - rank), str(dim))
    kind = c.pick("softmax", {k: n for k, n in SOFTMAXES.items() if not (hidden_rows and k == "exp_sum")})
    w = d.fresh("weights")
    simple = {
        "F.softmax": f"{w} = F.softmax({s}, dim={axis})",
        "torch.softmax": f"{w} = torch.softmax({s}, {axis})",
        "method": f"{w} = {s}.softmax({axis})",
        "module": f"{w} = self.softmax({s})",
        "float": f"{w} = F.softmax({s}.float(), dim={axis}).type_as(v)",
        "dtype": f"{w} = F.softmax({s}, dim={axis}, dtype=torch.float32).to(v.dtype)",
        "log_softmax": f"{w} = F.log_softmax({s}, dim={axis}).exp()",
        "logsumexp": f"{w} = ({s} - torch.logsumexp({s}, dim={axis}, keepdim=True)).exp()",
    }
    if kind == "module":
        d.block_init.append(f"self.softmax = nn.Softmax(dim={axis})")
    if kind in simple:
        d.block.append(simple[kind])
        return w
    if kind != "exp_sum":
        top = c.spell("max_spelling", f"{s}.amax({axis}, keepdim=True)", f"{s}.max(dim={axis}, keepdim=True)[0]",
                      f"torch.max({s}, {axis}, keepdim=True).values")  # fmt: skip
        d.block.append(f"{s} = {s} - {top}{'.detach()' if kind.endswith('detached') else ''}")
    e = d.fresh("e")
    d.block += [f"{e} = torch.exp({s})", f"{w} = {e} / {e}.sum({axis}, keepdim=True)"]
    return w


# act -> (spellings, value at 0, value at -inf; None where it is not 0)
ACTIVATIONS: dict[str, tuple[list[str], bool, bool]] = {
    "silu": (["F.silu({s})", "{s} * torch.sigmoid({s})", "nn.functional.silu({s})"], True, False),
    "relu": (["F.relu({s})", "torch.relu({s})", "{s}.relu()"], True, True),
    "identity": (["{s}"], True, False),
    "relu2": (["F.relu({s}) ** 2", "F.relu({s}).square()", "torch.relu({s}).pow(2)"], True, True),
    "gelu": (["F.gelu({s})"], True, False),
    "gelu_tanh": (['F.gelu({s}, approximate="tanh")'], True, False),
    "leaky_relu": (["F.leaky_relu({s}, 0.1)", "F.leaky_relu({s})"], True, False),
    "hardswish": (["F.hardswish({s})"], True, False),
    "sigmoid": (["torch.sigmoid({s})", "{s}.sigmoid()", "F.sigmoid({s})"], False, True),
}
NORMALISATIONS = {"none": 2, "N_max": 2, "padded": 2, "length": 2, "tau": 1}


def normalise(c: Choices, kind: str, w: str, lk: str, lengths: str) -> str:
    """``w`` divided as GDPA models do; ``lengths`` broadcasts over the scores."""
    return {
        "none": w,
        "N_max": c.spell("norm_spelling", f"{w} / 16", f"{w} * (1.0 / 16)"),
        "padded": f"{w} / {lk}",
        "length": f"{w} / {lengths}",
        "tau": c.spell("norm_spelling", f"{w} * 0.37", f"{w} / 2.5"),
    }[kind]
