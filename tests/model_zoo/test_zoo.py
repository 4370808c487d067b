"""Every model of the registry, at tiny size: padding and neighbours change nothing, every input and parameter counts."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gemopt.model_zoo import describe as description
from gemopt.model_zoo import zoo
from gemopt.model_zoo.data.schema import EventType, Schema, SparseFeature
from gemopt.model_zoo.example import example_batch, example_schema
from gemopt.model_zoo.parts.embeddings import torchrec_available

SCHEMA = example_schema(n_events=2, max_len=9, n_sparse=4)
LENGTHS = {"event0": [3, 0, 7, 1], "event1": [2, 0, 5, 9]}
WINDOWED = {"event1": zoo.config("kunlun", "tiny").event}


def build(name, **overrides):
    torch.manual_seed(0)
    model = zoo.build(name, SCHEMA, "tiny", **overrides).double().eval()
    with torch.no_grad():  # biases and gates that start at 0 would hide what they read
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, dtype=p.dtype))
    return model


def batch_of(**options):
    batch = example_batch(SCHEMA, **{"lengths": LENGTHS, **options})
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def assert_same(a, b, rtol=1e-9):
    assert a.keys() == b.keys() == set(SCHEMA.tasks)
    for task in a:
        torch.testing.assert_close(a[task], b[task], rtol=rtol, atol=1e-11)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_padding_and_neighbours_change_nothing(name):
    model = build(name)
    out = model(batch_of())
    assert all(x.shape == (4,) and x.dtype == torch.float64 and x.isfinite().all() for x in out.values())
    assert_same(model(batch_of(widths={"event0": 7})), out)
    batch = batch_of()
    for event in SCHEMA.events:
        dead = torch.arange(9) >= batch[f"{event}_length"][:, None]
        batch[f"{event}_item"][dead], batch[f"{event}_category"][dead], batch[f"{event}_age"][dead] = 7, 3, 1e6
    assert_same(model(batch), out)
    for i in range(4):
        alone = {key: x[i : i + 1] for key, x in batch_of().items()}
        assert_same(model(alone), {task: x[i : i + 1] for task, x in out.items()})


@pytest.mark.parametrize("name", zoo.MODELS)
def test_gradients_ignore_padding_and_reach_every_parameter(name):
    grads = []
    for widths in ({}, {"event0": 7}):
        model = build(name)
        sum(x.square().sum() for x in model(batch_of(widths=widths)).values()).backward()
        grads.append({key: p.grad for key, p in model.named_parameters()})
    for key, wide in grads[0].items():
        assert wide is not None and wide.isfinite().all() and wide.any(), key
        torch.testing.assert_close(grads[1][key], wide, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["gem", "kunlun"])
def test_depth_does_not_hide_the_features(name):
    """At the start, the loss sees features through six layers about as well as through one."""
    batch = example_batch(SCHEMA, lengths={"event0": [3, 9, 7, 5] * 8, "event1": [2, 4, 5, 9] * 8})
    seen = {1: 0.0, 6: 0.0}
    for n_layers, seed in itertools.product(seen, range(3)):
        torch.manual_seed(seed)
        model = zoo.build(name, SCHEMA, "small", n_layers=n_layers)
        sum(x.sum() for x in model(batch).values()).backward()
        seen[n_layers] += float(model.backbone.inputs.norm.weight.grad.norm())
    assert seen[6] > 0.5 * seen[1] > 0.03


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_input_counts(name):
    model, batch = build(name), batch_of(lengths={"event0": [3, 9, 7, 5], "event1": [2, 4, 5, 9]})
    out = model(batch)
    unread = {"label_ctr", "label_cvr"}
    if name == "sasrec":  # by design: the candidate and the histories alone
        unread |= {"dense", "sparse_tags", "sparse_f2", "sparse_f3", "event0_age", "event1_age"}
    if name in ("wukong", "bst"):
        unread |= {"event0_age", "event1_age"}
    for key, value in batch.items():
        changed = value.flip(0) if key == "domain" else torch.where(value > 1, value - 1, value + 1)
        if key == "domain" and torch.equal(changed, value):
            changed = 1 - value
        same = all(torch.equal(a, b) for a, b in zip(model({**batch, key: changed}).values(), out.values(), strict=True))
        assert same == (key in unread), key


@pytest.mark.parametrize("name", zoo.MODELS)
def test_histories_without_events_and_batches_without_samples(name):
    model = build(name)
    nothing = batch_of(lengths={"event0": [0, 0], "event1": [0, 0]})
    out = model(nothing)
    sum(x.sum() for x in out.values()).backward()
    assert all(x.isfinite().all() for x in out.values())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    empty = {key: x[:0] for key, x in nothing.items()}
    assert all(x.shape == (0,) for x in model(empty).values())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from(list(zoo.MODELS)))
@settings(max_examples=15, deadline=None)
def test_any_lengths(lengths, name):
    model = build(name)
    batch = batch_of(lengths={"event0": lengths, "event1": lengths[::-1]})
    widths = {e: max(int(batch[f"{e}_length"].max()), 1) for e in SCHEMA.events}
    assert_same(model(batch_of(lengths={"event0": lengths, "event1": lengths[::-1]}, widths=widths)), model(batch))


OPTIONS = [
    ("kunlun", {"comp_skip": False}),
    ("kunlun", {"n_layers": 3}),
    ("gem", {"events": WINDOWED}),
    ("gem", {"d_embedding": 6}),
    ("interformer", {"interaction": "dot"}),
    ("interformer", {"interaction": "dcn"}),
    ("wukong", {"n_tokens": 4}),
    ("hstu", {"window": 2}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_options(name, options):
    model = build(name, **options)
    out = model(batch_of())
    assert_same(model(batch_of(widths={"event0": 7})), out)
    assert all(x.isfinite().all() for x in out.values())


def test_event_stacks_of_their_own():
    """Widths, heads, attentions and depths by event type; a history whose layers are used up keeps its tokens."""
    events = dict(zip(SCHEMA.events, (zoo.config("gem", "tiny").event, zoo.config("kunlun", "tiny").event), strict=True))
    events["event0"] = replace(events["event0"], d=8, n_layers=1, n_tokens=2)
    events["event1"] = replace(events["event1"], attention="hstu", n_heads=1)
    model = build("gem", events=events, n_layers=4)
    assert [len(stack.layers) for stack in model.backbone.stacks.values()] == [1, 2]
    assert_same(model(batch_of(widths={"event0": 7})), model(batch_of()))


def test_comp_skip_halves_the_layers():
    full, skipped = (zoo.build("kunlun", SCHEMA, "tiny", n_layers=4, comp_skip=skip) for skip in (False, True))
    for model, parts in ((full, 4), (skipped, 2)):
        event = next(iter(model.backbone.events.values()))
        depth = min(4, event.n_layers)
        layers = model.backbone.stacks["event0"].layers
        assert sum(layer.attention is not None for layer in layers) == (depth if parts == 4 else depth // 2)
        assert [layer.pffn is not None for layer in layers] == [parts == 4 or i % 2 == 0 for i in range(depth)]


@pytest.mark.skipif(not torchrec_available(), reason="needs torchrec")
@pytest.mark.parametrize("name", ["gem", "sasrec"])
def test_torchrec_tables_give_the_same_logits(name):
    plain, sharded = (zoo.build(name, SCHEMA, "tiny", embeddings=kind) for kind in ("torch", "torchrec"))
    tables = [m.backbone.inputs.tables if name == "gem" else m.tables for m in (plain, sharded)]
    rest = {key: x for key, x in plain.state_dict().items() if ".lookup." not in key and "tables.lookup" not in key}
    missing = sharded.load_state_dict(rest, strict=False)
    assert not missing.unexpected_keys and all("lookup" in key for key in missing.missing_keys)
    with torch.no_grad():
        for table, weight in tables[1].weights().items():
            weight.copy_(tables[0].weights()[table])
    batch = example_batch(SCHEMA, lengths=LENGTHS)
    out, expected = sharded(batch), plain(batch)
    for task in SCHEMA.tasks:
        torch.testing.assert_close(out[task], expected[task], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", ["small", "base", "large"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_configs_build(name, config):
    with torch.device("meta"):
        model = zoo.build(name, example_schema(n_sparse=12), config)
    assert sum(p.numel() for p in model.parameters()) > 10_000
    if config in ("base", "large") and name in ("gem", "kunlun"):
        event = model.config.event
        assert event.d // event.n_heads == 128 and event.d == model.config.d == {"base": 384, "large": 512}[config]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"name: got 'dlrm'; allowed: gem"):
        zoo.build("dlrm", SCHEMA)
    with pytest.raises(ValueError, match="config_name"):
        zoo.build("gem", SCHEMA, "huge")
    with pytest.raises(ValueError, match="overrides: got 'depth'"):
        zoo.build("gem", SCHEMA, "tiny", depth=3)
    with pytest.raises(ValueError, match="events: got clicks"):
        zoo.build("gem", SCHEMA, "tiny", events={"clicks": zoo.config("gem", "tiny").event})
    with pytest.raises(ValueError, match="interaction"):
        zoo.build("interformer", SCHEMA, "tiny", interaction="fm")
    lone = Schema(2, {"user": SparseFeature(5)}, {"h": EventType({"item": 7}, 4)})
    with pytest.raises(ValueError, match="no history shares a table"):
        zoo.build("sasrec", lone, "tiny")
    with pytest.raises(ValueError, match="no dense and no sparse"):
        zoo.build("wukong", Schema(0, {}, lone.events), "tiny")


# ---------------------------------------------------------------- describe


def test_description_of_a_model():
    found = description.describe("gem", "tiny", SCHEMA, batch_size=3, fill=1.0, dtype=torch.float32)
    model = zoo.build("gem", SCHEMA, "tiny")
    tables = sum(w.numel() for w in model.backbone.inputs.tables.weights().values()) + 2 * 16  # and the domains
    assert found.embedding_parameters == tables
    assert found.dense_parameters == sum(p.numel() for p in model.parameters()) - tables
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel is not counted
        model(example_batch(SCHEMA, lengths={"event0": [9] * 3, "event1": [9] * 3}))
    assert found.gflops_padded * 3e9 == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert found.gflops_useful < found.gflops_padded and found.mean_length == found.max_length == 9


def test_useful_flops_are_linear_without_attention():
    half, full = (description.describe("wukong", "tiny", example_schema(max_len=16), 2, fill) for fill in (0.5, 1.0))
    none = description.describe("wukong", "tiny", example_schema(max_len=16), 2, 0.0)
    assert half.gflops_useful - none.gflops_useful == pytest.approx((full.gflops_useful - none.gflops_useful) / 2, rel=0.02)


def test_describe_command(capsys):
    arguments = ["--model", "hstu", "--config", "tiny", "--batch-size", "2"]
    assert description.main([*arguments, "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert figures["model"] == "hstu" and 0 < figures["gflops_useful"] < figures["gflops_padded"]
    assert description.main(arguments) == 0 and "hstu tiny" in capsys.readouterr().out
    assert description.main([*arguments, "--fill", "2"]) == 2 and "fill" in capsys.readouterr().err
