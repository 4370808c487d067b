"""Which configuration a launch takes: a checked-in table (table.json), read row by row, first match wins.

A row holds conditions and a configuration. Conditions that a row leaves out hold always:

    kernel      "forward", "split" (the forward where keys are split among programs), "query_side", "key_side", "fused" or
                "backward" (which form of it: `form`; "owner" for many sequences, `otherwise` else; shared queries always
                start from "fused"), or "block_backward" (with a row: Gluon, else Triton)
    head_dim    list of head dims
    softmax     true for jagged_attention, false for gdpa
    band        whether a window or causal mask is set
    max_q, max_k   [low, high] bounds of a sequence's queries and of the keys that one query sees, both ends included

`measured_on` names the cell of bench/kernels.py that the row was chosen on; `bench/tune_kernels.py` measures the candidates
there and writes the winners. Nothing is tuned while a program runs, so a cold start compiles what it launches. Every
configuration in it is compiled in the tests, which fail on spills and on serialised products.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gemopt.kernels.gluon.launch import ForwardConfig, SideConfig

PATH = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Shape:
    """What a choice may depend on."""

    head_dim: int
    softmax: bool
    band: bool
    max_q: int
    max_k: int


@cache
def rows() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(PATH.read_text())["rows"])


def matches(row: dict[str, Any], shape: Shape) -> bool:
    def within(name: str, value: int) -> bool:
        low, high = row.get(name, (0, value))
        return low <= value <= high

    return (
        shape.head_dim in row.get("head_dim", (shape.head_dim,))
        and row.get("softmax", shape.softmax) == shape.softmax
        and row.get("band", shape.band) == shape.band
        and within("max_q", shape.max_q)
        and within("max_k", shape.max_k)
    )


def lookup(kernel: str, shape: Shape) -> dict[str, Any] | None:
    """The configuration of the first row for `kernel` that matches; None: the kernel is not for this shape."""
    for row in rows():
        if row["kernel"] == kernel and matches(row, shape):
            return row["config"]
    return None


def forward_config(shape: Shape, split: bool = False) -> ForwardConfig | None:
    found = lookup("split" if split else "forward", shape)
    return None if found is None else ForwardConfig(**found)


def side_config(kernel: str, shape: Shape) -> SideConfig | None:
    found = lookup(kernel, shape)
    return None if found is None else SideConfig(**found)


def backward_form(shape: Shape, deterministic: bool, balanced: bool, few: bool = False, shared: bool = False) -> str | None:
    """ "owner", "fused", "ordered" or "two"; None: no form of the backward is for this shape.

    "owner" is for batches that are `balanced` sequence by sequence; its row names the form for others as `otherwise`.
    "ordered" is "fused" where it has to be deterministic and the queries are `few`. `shared` queries take one of these, or
    "two" where neither can be.
    """
    found = lookup("backward", shape)
    if found is None:
        return None
    form = found["form"]
    if form == "owner" and not balanced:
        form = found["otherwise"]
    if shared:
        form = "fused"
    if deterministic and form == "fused":
        form = "ordered" if few else "two"
    return form  # type: ignore[no-any-return]
