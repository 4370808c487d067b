"""The data set: no leakage, and padded batches equal to a loop over the events."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemopt.model_zoo.data import BatchIterator, MovieLens, load_movielens
from gemopt.model_zoo.data import movielens as source
from gemopt.model_zoo.data.batches import time_gap_bucket

try:
    source.data_folder()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

KINDS = {"liked": (4, 5), "neutral": (3,), "disliked": (1, 2), "all": (1, 2, 3, 4, 5)}
HISTORIES = tuple(KINDS)


@pytest.fixture(scope="module")
def movielens() -> MovieLens:
    return load_movielens()


@pytest.fixture(scope="module")
def lines() -> list[tuple[int, int, int, int]]:
    """(user, item, rating, time) straight from the file, parsed independently."""
    with open(source.data_folder() / "ml-100k.inter") as file:
        next(file)
        return [tuple(int(float(x)) for x in line.split("\t")) for line in file]


def test_tables(movielens, lines):
    assert len(movielens.event_user) == 100_000 and len(movielens.user_age) == 944
    assert len(movielens.item_year) == 1683
    mine = zip(movielens.event_user, movielens.event_item, movielens.event_rating, movielens.event_time, strict=True)
    assert sorted(tuple(map(int, row)) for row in mine) == sorted(lines)
    for name, array in (("item_year", movielens.item_year), ("genre", movielens.item_genres)):
        assert array.min() == 0 and array.max() == movielens.vocabulary[name] - 1
    # user 1 is a 24-year-old man, a technician; item 1 is Toy Story, 1995, with three genres
    assert movielens.user_age[1] == 2 and (movielens.item_genres[1] > 0).sum() == 3
    assert movielens.item_year[1] == 1 + (1995 - 1920) // 5


def test_split_by_time_does_not_leak(movielens):
    sets = {split: movielens.samples(split, max_len=50, histories=HISTORIES) for split in source.SPLITS}
    assert sets["train"].time.max() < sets["valid"].time.min()
    assert sets["valid"].time.max() < sets["test"].time.min()
    assert all(0.4 < s.label.mean() < 0.7 and len(s) > 5_000 for s in sets.values())
    for samples in sets.values():
        for history in samples.histories.values():
            some = history.length > 0
            newest = history.time[history.last[some] - 1]
            assert (newest < samples.time[some]).all(), "a history must end strictly before its candidate"


@pytest.mark.parametrize(("max_len", "pad_to"), [(7, "max"), (200, "batch"), (700, 31)])
def test_collate_against_a_loop(movielens, lines, max_len, pad_to):
    samples = movielens.samples("valid", max_len=max_len, histories=HISTORIES)
    index = np.random.default_rng(0).integers(0, len(samples), 40)
    batch = samples.collate(index, pad_to)
    by_user: dict[int, list] = {}
    for user, item, rating, time in lines:
        by_user.setdefault(user, []).append((time, item, rating))
    for row, sample in enumerate(index):
        user, item, now = int(batch["user_id"][row]), int(batch["item_id"][row]), int(samples.time[sample])
        (rating,) = [r for t, i, r in by_user[user] if i == item and t == now]
        assert batch["label"][row] == float(rating >= 4)
        assert (batch["item_genres"][row].numpy() == movielens.item_genres[item]).all()
        for name, levels in KINDS.items():
            # the file's order breaks ties, so compare multisets of (time bucket, item)
            before = sorted(((t, i) for t, i, r in by_user[user] if t < now and r in levels), key=lambda e: e[0])
            length, width = int(batch[f"{name}_length"][row]), batch[f"{name}_item"].shape[1]
            limit = min(max_len, pad_to) if isinstance(pad_to, int) else max_len
            assert length == min(len(before), limit) <= width
            items, gaps = batch[f"{name}_item"][row].tolist(), batch[f"{name}_gap"][row].tolist()
            assert not any(items[length:]) and not any(gaps[length:])
            recent = before[len(before) - length :]
            assert gaps[:length] == [min(1 + int(np.log2(1 + now - t)), 23) for t, _ in recent]
            tied_at_cut = len(before) > length > 0 and before[-length - 1][0] == recent[0][0]
            if not tied_at_cut:
                assert sorted(items[:length]) == sorted(i for _, i in recent)
            genres = batch[f"{name}_genre"][row, :length].numpy()
            assert (genres == movielens.item_genres[items[:length], 0]).all()


@pytest.mark.parametrize("pad_to", ["max", "batch", 3])
def test_collate_of_nothing(movielens, pad_to):
    batch = movielens.samples("valid", max_len=9).collate(np.array([], dtype=np.int64), pad_to)
    assert all(value.shape[0] == 0 for value in batch.values())
    assert batch["liked_item"].shape == (0, {"max": 9, "batch": 1, 3: 3}[pad_to])


@given(st.integers(0, 2**40))
def test_gap_bucket(seconds):
    bucket = int(time_gap_bucket(np.array([seconds]), 24)[0])
    assert bucket == min((1 + seconds).bit_length(), 23)


@pytest.mark.parametrize("order", ["file", "shuffled", "by_length"])
def test_an_epoch_is_a_permutation(movielens, order):
    samples = movielens.samples("valid", max_len=5)
    batches = BatchIterator(samples, 1000, order=order, seed=3)
    first = torch.cat([b["item_id"] * 1000 + b["user_id"] for b in batches])
    second = torch.cat([b["item_id"] * 1000 + b["user_id"] for b in batches])
    everything = torch.from_numpy(samples.features["item_id"] * 1000 + samples.features["user_id"])
    assert torch.equal(first.sort()[0], everything.sort()[0]) and torch.equal(second.sort()[0], first.sort()[0])
    assert torch.equal(first, second) == (order == "file")
    assert batches.epoch == 2 and len(batches) == -(-len(samples) // 1000)


def test_sorting_by_length_saves_padding(movielens):
    samples = movielens.samples("valid", max_len=200, histories=("all",))
    width = {
        order: np.mean([b["all_item"].shape[1] for b in BatchIterator(samples, 64, order=order, pad_to="batch")])
        for order in ("shuffled", "by_length")
    }
    assert width["by_length"] < 0.7 * width["shuffled"]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 45), st.sampled_from(["shuffled", "by_length"]), st.booleans())
def test_resume_continues_at_the_next_batch(movielens, steps, order, drop_last):
    samples = movielens.samples("valid", max_len=3)

    def make(seed: int = 5) -> BatchIterator:
        return BatchIterator(samples, 500, order=order, seed=seed, drop_last=drop_last)

    straight = list(itertools.islice(make().endless(), steps + 3))
    first = make()
    list(itertools.islice(first.endless(), steps))
    second = make()
    second.load_state_dict(first.state_dict())
    for expected, got in zip(straight[steps:], itertools.islice(second.endless(), 3), strict=True):
        assert all(torch.equal(expected[k], got[k]) for k in expected)
    with pytest.raises(ValueError, match="seed"):
        make(seed=6).load_state_dict(first.state_dict())


def test_bad_arguments_are_named(movielens):
    samples = movielens.samples("valid", max_len=3)
    with pytest.raises(ValueError, match="split"):
        movielens.samples("future")
    with pytest.raises(ValueError, match="histories"):
        movielens.samples("train", histories=("loved",))
    with pytest.raises(ValueError, match="max_len"):
        movielens.samples("train", max_len=0)
    with pytest.raises(ValueError, match="batch_size"):
        BatchIterator(samples, 0)
    with pytest.raises(ValueError, match="order"):
        BatchIterator(samples, 2, order="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few"):
        BatchIterator(samples, 10**6, drop_last=True)


def test_missing_data_names_the_command(monkeypatch):
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps recbole"):
        source.data_folder()
