"""The table reader against the rows that were written: padding, order, shards, resuming, errors."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemopt.model_zoo.data import tables

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

MAPPING = {
    "splits": {"train": ["train*"], "valid": ["valid*"]},
    "dense": ["price"],
    "sparse": {"user": {"column": "user_id", "n_ids": 1000}, "tags": {"n_ids": 9, "max_ids": 3}},
    "events": {
        "click": {
            "max_len": 4,
            "age": "click_age",
            "fields": {"item": {"column": "items", "n_ids": 50}, "shop": {"n_ids": 7}},
        },
        "view": {"max_len": 3, "fields": {"item": {"n_ids": 50}}},
    },
    "labels": {"ctr": "clicked"},
    "domain": {"column": "app", "n_domains": 2},
    "tables": {"click_item": "item", "view_item": "item"},
}


def rows(n, start=0):
    """Row i has i % 6 clicks, whose items are i + 1, i + 2, ... modulo 49."""
    found = []
    for i in range(start, start + n):
        clicks = [1 + (i + j) % 49 for j in range(i % 6)]
        found.append(
            {
                "price": i / 4, "user_id": i + 1, "tags": [1 + (i + j) % 8 for j in range(i % 5)], "items": clicks,
                "click_shop": [1 + c % 6 for c in clicks], "click_age": [100.0 * c for c in clicks],
                "view_item": [i % 49 + 1] * (i % 3), "clicked": i % 2, "app": i % 2,
            }
        )  # fmt: skip
    return found


def write(folder, kind, counts=(23, 18), group=7):
    start = 0
    for number, n in enumerate((*counts, 5)):
        name = f"train{number}" if number < len(counts) else "valid0"
        data = rows(n, start)
        start += n
        if kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(data), folder / f"{name}.parquet", row_group_size=group)
        else:
            lines = [",".join(data[0])]
            for row in data:
                lines.append(",".join(" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in row.values()))
            (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / tables.MAPPING).write_text(json.dumps(MAPPING))
    return tables.open_tables(str(folder))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_batches_hold_the_rows(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(tables, "CSV_ROWS", 7)
    source = write(tmp_path, kind)
    assert source.schema.tasks == ("ctr",) and source.schema.events["click"].fields == {"item": 50, "shop": 7}
    assert source.rows("train") == 41 and source.steps_per_epoch(10) == 4
    got = list(source.train(10, seed=0))
    assert len(got) == 4
    for i, expected in enumerate(rows(40)):
        batch = {k: v[i % 10] for k, v in got[i // 10].items()}
        kept = expected["items"][-4:]
        assert batch["click_item"].tolist() == kept + [0] * (4 - len(kept)), "the most recent, padded on the right"
        assert batch["click_age"].tolist() == [100.0 * c for c in kept] + [0] * (4 - len(kept))
        assert batch["click_length"] == len(kept) and batch["view_length"] == len(expected["view_item"])
        assert batch["view_age"].tolist() == [0, 0, 0]
        tags = expected["tags"][:3]
        assert batch["sparse_tags"].tolist() == tags + [0] * (3 - len(tags))
        assert batch["sparse_user"] == i + 1 and batch["dense"].tolist() == [i / 4]
        assert batch["label_ctr"] == i % 2 and batch["domain"] == i % 2
    assert got[0]["label_ctr"].dtype == torch.float32 and got[0]["click_item"].dtype == torch.int64


def test_held_out_gives_every_row_once(tmp_path):
    source = write(tmp_path, "parquet")
    users = [int(u) for b in source.held_out("valid", 2) for u in b["sparse_user"]]
    assert users == list(range(42, 47))
    assert sum(len(b["domain"]) for b in source.held_out("valid", 2, limit=3)) == 3


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9))
def test_shards_and_resuming(tmp_path_factory, world, batch_size, steps):
    source = write(tmp_path_factory.mktemp("t"), "parquet")

    def users(stream, n):
        return [b["sparse_user"].tolist() for b in itertools.islice(stream.endless(), n)]

    whole = users(source.train(batch_size, 0), 41 // batch_size)
    shards = [source.train(batch_size, 0, r, world) for r in range(world)]
    per_epoch = len(shards[0])
    interleaved = [users(source.train(batch_size, 0, r, world), per_epoch) for r in range(world)]
    assert [b for group in zip(*interleaved, strict=True) for b in group] == whole[: per_epoch * world]

    first = source.train(batch_size, 0, 0, world)
    straight = users(source.train(batch_size, 0, 0, world), steps + 2)
    assert users(first, steps) == straight[:steps]
    second = source.train(batch_size, 0, 0, world)
    second.load_state_dict(first.state_dict())
    assert users(second, 2) == straight[steps:]
    with pytest.raises(ValueError, match="batch_size"):
        source.train(batch_size + 1, 0, 0, world).load_state_dict(first.state_dict())


def test_missing_values_are_padding(tmp_path):
    data = rows(4)
    data[1] |= {"items": None, "click_shop": None, "click_age": None, "price": None, "user_id": None}
    parquet.write_table(pa.Table.from_pylist(data), tmp_path / "train0.parquet")
    (tmp_path / tables.MAPPING).write_text(json.dumps(MAPPING))
    (batch,) = tables.open_tables(str(tmp_path)).train(4, 0)
    assert batch["click_length"].tolist() == [0, 0, 2, 3] and batch["click_item"][1].tolist() == [0] * 4
    assert batch["sparse_user"].tolist() == [1, 0, 3, 4] and not np.isnan(batch["dense"].numpy()).any()


def test_errors_name_what_is_wrong(tmp_path):
    def opened(data=None, **changes):
        parquet.write_table(pa.Table.from_pylist(data or rows(4)), tmp_path / "train0.parquet")
        (tmp_path / tables.MAPPING).write_text(json.dumps(MAPPING | changes))
        return tables.open_tables(str(tmp_path))

    with pytest.raises(FileNotFoundError, match="mapping"):
        tables.open_tables(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="labels"):
        opened(labels={})
    with pytest.raises(ValueError, match=r"sparse.user needs n_ids"):
        opened(sparse={"user": {}})
    with pytest.raises(ValueError, match="colour"):
        opened(colour=1)
    with pytest.raises(FileNotFoundError, match=r"splits.valid"):
        opened().files("valid")
    with pytest.raises(ValueError, match="nothing"):
        next(iter(opened(labels={"ctr": "nothing"}).train(2, 0)))
    with pytest.raises(ValueError, match="user_id: ids must be"):
        next(iter(opened(sparse={"user": {"column": "user_id", "n_ids": 3}}).train(4, 0)))
    with pytest.raises(ValueError, match="other lengths"):
        data = rows(4)
        data[3]["click_shop"] = [1]
        next(iter(opened(data).train(4, 0)))
    with pytest.raises(ValueError, match="0 and 1"):
        next(iter(opened(labels={"ctr": "user_id"}).train(4, 0)))
    with pytest.raises(ValueError, match="too few"):
        opened().train(5, 0)
