"""The synthetic data: reproducible by index, of the stated shape, and with the best NE that is claimed."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemopt.model_zoo.data import hashing
from gemopt.model_zoo.data.batches import BatchIterator
from gemopt.model_zoo.data.sources import open_source
from gemopt.model_zoo.data.synthetic import SIZES, Synthetic, SyntheticConfig, entropy
from gemopt.model_zoo.metrics import normalised_entropy

TINY = SyntheticConfig.size("tiny")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------- random numbers by index


def test_hashing_is_splitmix64():
    """The published sequence from state 0 is the output function at multiples of the golden gamma."""
    state = (np.arange(3, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hashing.mixed(state).tolist() == expected


def test_numbers_have_their_distributions():
    u = hashing.uniform(1, "u", np.arange(200_000))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.004
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01
    z = hashing.normal(1, "z", np.arange(200_000))
    assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01 and abs((z**4).mean() - 3) < 0.1
    k = hashing.zipf(1, "k", 100, np.arange(200_000))
    assert k.min() == 0 and k.max() == 99
    assert (k == 0).mean() == pytest.approx(np.log(2) / np.log(101), rel=0.02)
    assert not np.array_equal(hashing.words(1, "a", np.arange(9)), hashing.words(1, "b", np.arange(9)))
    assert not np.array_equal(hashing.words(1, "a", np.arange(9)), hashing.words(2, "a", np.arange(9)))


# ---------------------------------------------------------------- samples


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=6), st.integers(0, 5), st.sampled_from(["max", "batch", 7]))
def test_a_sample_does_not_depend_on_its_batch(index, seed, pad_to):
    source = Synthetic(TINY, seed)
    together = source.batch(np.array(index), pad_to)
    for row, i in enumerate(index):
        alone = source.batch(np.array([i]), "max" if pad_to == "batch" else pad_to)
        for key, value in together.items():
            width = value.shape[1:] and value.shape[1]
            mine = alone[key][0, :width] if width else alone[key][0]
            assert torch.equal(value[row], mine), key


def test_batches_follow_the_schema():
    for name in ("tiny", "small", "base"):
        source = Synthetic(SyntheticConfig.size(name, max_len=40))
        schema, batch = source.schema, source.batch(np.arange(64))
        assert batch["dense"].shape == (64, schema.n_dense) and batch["dense"].dtype == torch.float32
        for feature, size in schema.sparse.items():
            ids = batch[f"sparse_{feature}"]
            assert ids.shape == ((64,) if size.max_ids == 1 else (64, size.max_ids)) and ids.dtype == torch.int64
            assert ids.max() < size.n_ids and (ids.min() >= 1 if size.max_ids == 1 else ids[:, 0].min() >= 1)
        for event, kind in schema.events.items():
            length = batch[f"{event}_length"]
            real = torch.arange(kind.max_len) < length[:, None]
            for field, n_ids in kind.fields.items():
                ids = batch[f"{event}_{field}"]
                assert torch.equal(ids > 0, real) and ids.max() < n_ids
            age = batch[f"{event}_age"]
            assert (age[~real] == 0).all() and (age[real] > 0).all()
            assert (age[:, :-1] >= age[:, 1:])[real[:, 1:]].all(), "oldest first"
        assert set(batch["domain"].tolist()) <= set(range(schema.n_domains))
        assert all(set(batch[f"label_{t}"].tolist()) <= {0.0, 1.0} for t in schema.tasks)
        assert (batch["label_cvr"] <= batch["label_ctr"]).all(), "a conversion is a click first"
        known = {k for f in schema.sparse for k in [f]} | {f"{e}_{f}" for e, k in schema.events.items() for f in k.fields}
        assert set(schema.tables) <= known


def test_published_shape():
    large = SIZES["large"]
    assert large.n_events >= 10 and large.max_len >= 2000 and large.n_sparse >= 300
    assert len(Synthetic(large).schema.sparse) == 300
    lengths = Synthetic(large).lengths(np.arange(4000))["event0"]
    assert (lengths == 0).mean() == pytest.approx(0.1, abs=0.02) and lengths.max() == 2048
    assert np.median(lengths) < 0.7 * lengths.mean(), "heavy-tailed"


@pytest.mark.parametrize("fill", [0.1, 0.5, 0.7, 1.0])
def test_uniform_lengths_have_the_fill(fill):
    config = SyntheticConfig.size("tiny", max_len=200, lengths="uniform", fill=fill)
    assert Synthetic(config).lengths(np.arange(5000))["event1"].mean() == pytest.approx(200 * fill, rel=0.03)


# ---------------------------------------------------------------- what is best


def test_labels_have_the_probabilities():
    source, index = Synthetic(TINY), np.arange(20_000)
    p, y = source.probabilities(index), source.labels(index)
    for task in ("ctr", "cvr"):
        z = (y[task] - p[task]).sum() / np.sqrt((p[task] * (1 - p[task])).sum())
        assert abs(z) < 4
        assert 0.05 < y[task].mean() < 0.6
    assert p["ctr"].min() >= TINY.noise and p["ctr"].max() <= 1 - TINY.noise


def test_best_ne_is_reached_by_the_truth_and_by_nothing_else():
    samples = Synthetic(TINY).split("test", 20_000)
    index = samples.start + np.arange(len(samples))
    p, y = samples.source.probabilities(index)["ctr"], samples.source.labels(index)["ctr"]
    logit = np.log(p / (1 - p))
    best = samples.best_ne()["ctr"]
    assert normalised_entropy(logit, y) == pytest.approx(best, abs=0.01)
    assert 0.7 < best < 0.9
    for worse in (1.3 * logit, 0.7 * logit, logit + 0.3, np.roll(logit, 1)):
        assert normalised_entropy(worse, y) > normalised_entropy(logit, y)
    assert samples.source.best_ne(index) == pytest.approx(samples.best_ne())


def test_noise_costs_entropy():
    best = [Synthetic(SyntheticConfig.size("tiny", noise=n)).split("test", 4000).best_ne()["ctr"] for n in (0.0, 0.1, 0.4)]
    assert best[0] < best[1] < best[2] and best[2] > 0.97
    assert entropy([0.0, 0.5, 1.0]).tolist() == pytest.approx([0, np.log(2), 0])


def test_every_part_of_the_signal_matters():
    """Histories, user features, candidate and dense features each move the truth."""
    source, index = Synthetic(TINY), np.arange(3000)
    drawn = source._draw(index)
    whole = source._probabilities(drawn)["ctr"]
    drawn.lengths[0][:] = 0
    without_history = source._probabilities(drawn)["ctr"]
    assert np.abs(whole - without_history).mean() > 0.01
    drawn = source._draw(index)
    drawn.context.dense[:] = 0
    assert np.abs(whole - source._probabilities(drawn)["ctr"]).mean() > 0.05


# ---------------------------------------------------------------- streams


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(0, 7), st.sampled_from(["file", "shuffled", "by_length"]))
def test_shards_and_resuming(world, steps, order):
    samples = Synthetic(TINY).split("train", 41)

    def stream(rank=0, of=world):
        return BatchIterator(samples, 5, order=order, seed=3, drop_last=True, rank=rank, world_size=of)

    whole = list(stream(of=1))
    shards = [list(stream(r)) for r in range(world)]
    assert len({len(s) for s in shards}) == 1
    together = [b for group in zip(*shards, strict=True) for b in group]
    assert all(map(same, together, whole))
    straight = list(itertools.islice(stream().endless(), steps + 2))
    first = stream()
    list(itertools.islice(first.endless(), steps))
    second = stream()
    second.load_state_dict(first.state_dict())
    assert all(map(same, itertools.islice(second.endless(), 2), straight[steps:]))
    with pytest.raises(ValueError, match="world_size"):
        stream(0, world + 1).load_state_dict(first.state_dict())


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(workers):
    def stream(workers):
        return BatchIterator(Synthetic(TINY).split("train", 40), 4, seed=3, workers=workers)

    straight = list(itertools.islice(stream(0).endless(), 14))
    ahead = stream(workers)
    got = list(itertools.islice(ahead.endless(), 7))
    assert ahead.state_dict()["position"] == 7, "made ahead is not given"
    resumed = stream(workers)
    resumed.load_state_dict(ahead.state_dict())
    got += itertools.islice(resumed.endless(), 7)
    assert all(map(same, got, straight))


def test_bad_arguments_are_named():
    for name, value in (
        ("n_events", 0),
        ("fill", 0.0),
        ("noise", 0.5),
        ("lengths", "long"),
        ("n_sparse", 3),
        ("n_items", 1),
    ):
        with pytest.raises(ValueError, match=name):
            SyntheticConfig(**{name: value})
    with pytest.raises(ValueError, match="size"):
        SyntheticConfig.size("huge")
    with pytest.raises(ValueError, match="split"):
        Synthetic(TINY).split("dev", 3)
    with pytest.raises(ValueError, match="rank"):
        BatchIterator(Synthetic(TINY).split("train", 9), 2, rank=1)
    for name in ("synthetic:huge", "nowhere", "movielens:1m"):
        with pytest.raises(ValueError, match="must be"):
            open_source(name)
