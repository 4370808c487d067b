"""The ops under fakes, functionalisation and compilation, and across processes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import gemopt.ops
from gemopt.ops import attention, jagged_attention, naming, pack, packing, segment_sum, segments, unpack
from tests.hostile.common import sweep
from tests.ops.attention_cases import Case, draw

REPO = Path(gemopt.ops.__file__).resolve().parents[2]


def attention_arguments(grad: bool, dtype: torch.dtype = torch.float32, **changes) -> tuple:
    inputs = draw(Case((3, 0, 5), heads=4, kv_heads=2, d=8, dv=changes.pop("dv", 8)), torch.float32)
    q, k, v = (x.to(dtype).requires_grad_(grad) for x in (inputs.q, inputs.k, inputs.v))
    offsets = inputs.kwargs["q_offsets"]
    rest = {
        "scale": 0.5,
        "causal": True,
        "bottom_right": False,
        "left": -1,
        "right": -1,
        "q_pos": None,
        "k_pos": None,
        "p": 0.0,
        "seed": None,
        "bias": None,
        "mask": None,
        "activations": "softmax",
        "post_scale": 1.0,
        "block_size": 0,
    } | {name: value for name, value in changes.items() if name != "shared"}
    q_offsets = offsets
    if changes.get("shared"):
        q, q_offsets = q[:5].detach().requires_grad_(grad), None
    return (q, k, v, q_offsets, offsets, 5, 5, *rest.values())


POSITIONS = torch.arange(8)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dv": 4},
        {"p": 0.2, "seed": torch.tensor([3])},
        {"left": 2, "q_pos": POSITIONS, "k_pos": POSITIONS},
        {"bias": torch.randn(1, 4, 5, 5), "mask": torch.ones(3, 1, 5, 5, dtype=torch.bool)},
        {"activations": "gelu"},
        {"activations": "gelu,relu,silu,gelu", "post_scale": 0.3, "bias": torch.randn(3, 1, 5, 5)},
        {"block_size": 2},
        {"shared": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_opcheck_attention(grad: bool, changes: dict) -> None:
    changes = {n: x.clone().requires_grad_(grad) if n == "bias" else x for n, x in changes.items()}
    arguments = attention_arguments(grad, **changes)
    torch.library.opcheck(attention._attention.overload, arguments)
    if not grad:
        q, k, v, *spec = arguments
        out, lse = attention._attention(*arguments)
        saved = (out, lse) if lse.shape[0] else (None, None)
        backward = (torch.ones_like(out), q, k, v, *saved, "bias" in changes, *spec)
        torch.library.opcheck(attention._attention_backward.overload, backward)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_rows(grad: bool) -> None:
    x, index = torch.randn(5, 3, requires_grad=grad), torch.tensor([1, 4])
    offsets, owner = torch.tensor([0, 0, 2, 5]), torch.tensor([1, 1, 2, 2, 2])
    for repeat in (True, False):
        torch.library.opcheck(packing._pack.overload, (x, index, repeat))
    torch.library.opcheck(packing._unpack.overload, (x[:2].detach().requires_grad_(grad), index, 6, -1.0))
    torch.library.opcheck(segments._segment_sum.overload, (x, offsets, owner))
    torch.library.opcheck(segments._segment_spread.overload, (x[:3].detach().requires_grad_(grad), offsets, owner))


def model(x: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs inside, so T is a size that only run time knows."""
    batch, length, _ = x.shape
    index = (torch.arange(length) < lengths[:, None]).view(-1).nonzero().view(-1)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    q, k, v = (y.unflatten(1, (2, 8)) for y in (pack(x.flatten(0, 1), index) @ weight).chunk(3, 1))
    out = jagged_attention(q, k, v, offsets, offsets, length, length, causal=True, dropout_p=0.1, seed=torch.tensor(1))
    owner = torch.div(index, length, rounding_mode="floor")
    return segment_sum(out.flatten(1), offsets, owner), unpack(out.flatten(1), index, batch * length)


def test_one_graph_over_many_lengths() -> None:
    graphs = []

    def count(gm: torch.fx.GraphModule, example_inputs: list) -> object:
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, specialize_float=True):
        compiled = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
        for batch, length in ((4, 9), (7, 20), (3, 33), (5, 12)):
            x = torch.randn(batch, length, 6, requires_grad=True)
            weight = torch.randn(6, 48, requires_grad=True)
            lengths = torch.randint(0, length + 1, (batch,))
            results = []
            for f in (model, compiled):
                pooled, padded = f(x, lengths, weight)
                results.append((pooled, padded, *torch.autograd.grad(pooled.sum() + padded.square().sum(), (x, weight))))
            for want, got in zip(*results, strict=True):
                torch.testing.assert_close(got, want)
    assert len(graphs) == 1


def test_fake_with_unbacked_rows() -> None:
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        rows = mode.shape_env.create_unbacked_symint()
        torch._check(rows >= 0)
        q, k = torch.empty(rows, 4, 8), torch.empty(rows, 2, 8)
        v, offsets = torch.empty(rows, 2, 16), torch.empty(5, dtype=torch.int64)
        out = jagged_attention(q, k, v, offsets, offsets, 9, 9, causal=True)
        assert out.shape[0] is rows or str(out.shape[0]) == str(rows)
        assert out.shape[1:] == (4, 16) and out.stride() == (64, 16, 1)
        assert str(unpack(out, torch.empty(rows, dtype=torch.int64), rows * 2).shape[0]) == f"2*{rows}"


def test_graph_has_one_node_per_direction() -> None:
    inputs = draw(Case((3, 4)), torch.float32)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = jagged_attention(q, k, v, **inputs.kwargs)
        return torch.autograd.grad(out.sum(), (q, k, v))

    q, k, v = (x.float().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    names = [str(n.target) for n in make_fx(step)(q, k, v).graph.nodes if "gemopt" in str(n.target)]
    assert [n.split("_" + naming.source_hash())[0] for n in names] == [
        "gemopt.jagged_attention_kernel",
        "gemopt.jagged_attention_backward_kernel",
    ]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_autocast_does_not_reach_inside(dropout_p: float) -> None:
    arguments = attention_arguments(True, p=dropout_p, seed=torch.tensor(1) if dropout_p else None)
    plain = attention._attention(*arguments)[0]
    with torch.autocast("cpu", torch.bfloat16):
        cast = attention._attention(*arguments)[0]
    assert cast.dtype == torch.float32 and torch.equal(cast, plain)


def test_public_names_are_importable() -> None:
    """Printed graphs name a function by module and name."""
    for name in gemopt.ops.__all__:
        assert torch.fx.node._get_qualified_name(getattr(gemopt.ops, name)) == f"gemopt.ops.{name}"


SCRIPT = """
import sys
import torch
import gemopt.ops as ops
assert ops.__file__.startswith(sys.argv[1]), ops.__file__
x = torch.ones(4, 2, requires_grad=True)
step = torch.compile(lambda x: ops.segment_sum(x, torch.tensor([0, 2, 4]), torch.tensor([0, 0, 1, 1])), backend="inductor")
step(x).sum().backward()
hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
print(x.grad.unique().item(), hits, ops.naming.source_hash())
"""


@pytest.mark.parametrize("edited", ["ops/segments.py", "kernels/cpu/attention.py", "kernels/cpu/*.cpp", "ops/new.py"])
def test_an_edited_source_renames_the_ops(edited: str, tmp_path: Path) -> None:
    copy = tmp_path / "gemopt"
    for part in ("ops", "kernels"):
        shutil.copytree(REPO / "gemopt" / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))

    def source_hash() -> str:
        spec = importlib.util.spec_from_file_location("naming_of_the_copy", copy / "ops" / "naming.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.source_hash()

    assert source_hash() == naming.source_hash()
    for path in list(copy.glob(edited)) or [copy / edited]:
        with path.open("a") as source:
            source.write("\n")
    assert source_hash() != naming.source_hash()


@pytest.mark.slow
@sweep  # what it rests on is tested above, and across processes, for a user's op, in tests/hostile/test_stale_cache
def test_changed_source_meets_no_stale_artifact(tmp_path: Path) -> None:
    """AOTAutograd's cache must see an edited backward: run, run again (a hit), edit, run."""
    copy = tmp_path / "copy"
    for part in ("ops", "kernels"):
        shutil.copytree(REPO / "gemopt" / part, copy / "gemopt" / part, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "gemopt" / "__init__.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, str(script), str(copy)], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.split()

    first, again = run(), run()
    assert first[0] == again[0] == "1.0" and first[2] == again[2]
    assert (first[1], again[1]) == ("0", "1"), "the second process must hit the cache, or this test shows nothing"
    source = copy / "gemopt" / "ops" / "segments.py"
    text = source.read_text()
    edited = text.replace(
        "return _segment_spread(grad, *ctx.saved_tensors), None, None",
        "return 3 * _segment_spread(grad, *ctx.saved_tensors), None, None",
    )
    assert edited != text
    source.write_text(edited)
    changed = run()
    assert changed[0] == "3.0" and changed[2] != first[2]
