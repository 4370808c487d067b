"""MovieLens-100K as click-through samples with several event histories per user.

Source of the data: Harper and Konstan, "The MovieLens Datasets: History and Context", TiiS 2015. The files
are read from the installed ``recbole`` wheel, which carries them; the package itself is never imported, so
that its dependencies need not be there.

One sample is one rating: can the model tell, from what the user did *strictly before*, that the rating is at
least 4? The events before are split by rating into histories of different lengths (``liked``, ``neutral``,
``disliked``, and ``all`` of them). Id 0 means padding or unknown everywhere.
"""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .batches import History, SampleSet

Ints = NDArray[np.int64]

INSTALL_COMMAND = "pip install --no-deps recbole==1.2.1"
HISTORIES = ("liked", "neutral", "disliked", "all")
SPLITS = ("train", "valid", "test")
AGE_EDGES = (18, 25, 35, 45, 50, 56)  # the age groups of MovieLens-1M
N_GAPS = 24  # buckets of the time between an event and the candidate; 0 is padding


@dataclass(frozen=True)
class MovieLens:
    """The three tables, as arrays indexed by id; row 0 of users and items is the padding row.

    ``events_*`` are sorted by (user, timestamp), ties in file order; N = 100,000 events.
    """

    event_user: Ints  # [N]
    event_item: Ints  # [N]
    event_rating: Ints  # [N], 1 to 5
    event_time: Ints  # [N], Unix seconds
    user_age: Ints  # [U + 1], bucket
    user_gender: Ints  # [U + 1]
    user_occupation: Ints  # [U + 1]
    item_year: Ints  # [I + 1], bucket of five years
    item_genres: Ints  # [I + 1, G], zero-padded genre ids
    vocabulary: dict[str, int]  # size of each id space, padding included

    def time_edges(self, train: float = 0.8, valid: float = 0.1) -> tuple[int, int]:
        """Timestamps at which the validation and the test period begin (quantiles of all events)."""
        if not (0 < train < 1 and 0 <= valid < 1 and train + valid <= 1):
            raise ValueError(f"train and valid must be shares of at most 1 together, got {train} and {valid}")
        edges = np.quantile(self.event_time, [train, train + valid], method="higher")
        return int(edges[0]), int(edges[1])

    def samples(
        self,
        split: str,
        max_len: int = 200,
        histories: tuple[str, ...] = ("liked", "neutral", "disliked"),
        min_history: int = 5,
    ) -> SampleSet:
        """The samples of one period, their histories cut to the most recent ``max_len`` events.

        An event of the validation or test period may use everything before it, as in serving. An event with
        fewer than ``min_history`` earlier events of its user is no sample.
        """
        unknown = [h for h in histories if h not in HISTORIES]
        if unknown or not histories:
            raise ValueError(f"histories must be a non-empty subset of {HISTORIES}, got {histories}")
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1, got {max_len}")

        chosen, start, cut = self.candidates(split, min_history)
        user, item = self.event_user[chosen], self.event_item[chosen]
        return SampleSet(
            histories={h: self._history(h, start, cut, max_len) for h in histories},
            features={
                "user_id": user,
                "user_age": self.user_age[user],
                "user_gender": self.user_gender[user],
                "user_occupation": self.user_occupation[user],
                "item_id": item,
                "item_year": self.item_year[item],
                "item_genres": self.item_genres[item],
            },
            label=(self.event_rating[chosen] >= 4).astype(np.float32),
            time=self.event_time[chosen],
            max_len=max_len,
            n_gaps=N_GAPS,
        )

    def candidates(self, split: str, min_history: int = 5) -> tuple[Ints, Ints, Ints]:
        """The events that are samples of a period, and for each the range of events that its user had before."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        start, cut = history_bounds(self.event_user, self.event_time)
        valid_from, test_from = self.time_edges()
        period = (self.event_time >= valid_from).astype(np.int64) + (self.event_time >= test_from)
        chosen = np.flatnonzero((period == SPLITS.index(split)) & (cut - start >= min_history))
        return chosen, start[chosen], cut[chosen]

    def kept(self, history: str) -> Ints:
        """The events that a history is made of."""
        rating = self.event_rating
        chosen = {"liked": rating >= 4, "neutral": rating == 3, "disliked": rating <= 2, "all": rating > 0}
        return np.flatnonzero(chosen[history])

    def _history(self, name: str, start: Ints, cut: Ints, max_len: int) -> History:
        """Events of one kind as a flat list, and for each sample the range ``[first, last)`` of it."""
        kept = self.kept(name)
        last = np.searchsorted(kept, cut)
        first = np.maximum(np.searchsorted(kept, start), last - max_len)
        item = self.event_item[kept]
        return History(
            item=item,
            genre=self.item_genres[item, 0],
            time=self.event_time[kept],
            first=first.astype(np.int64),
            last=last.astype(np.int64),
        )


def history_bounds(user: Ints, time: Ints) -> tuple[Ints, Ints]:
    """For every event, the range of positions of the same user's events with a strictly smaller timestamp."""
    position = np.arange(len(user))
    new_user = np.r_[True, user[1:] != user[:-1]]
    new_time = new_user | np.r_[True, time[1:] != time[:-1]]
    start = np.maximum.accumulate(np.where(new_user, position, 0))
    cut = np.maximum.accumulate(np.where(new_time, position, 0))
    return start, cut


def data_folder() -> Path:
    """Where the installed recbole package keeps MovieLens-100K; FileNotFoundError says how to get it."""
    spec = importlib.util.find_spec("recbole")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "dataset_example" / "ml-100k"
        if (folder / "ml-100k.inter").exists():
            return folder
    raise FileNotFoundError(f"MovieLens-100K was not found; it comes inside a wheel: {INSTALL_COMMAND}")


def _rows(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)  # the header names columns and their types
        return list(rows)


def _vocabulary(words: list[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(sorted(set(words)), start=1)}


@lru_cache(maxsize=1)
def load_movielens(folder: Path | None = None) -> MovieLens:
    """Read the data set (under a second). FileNotFoundError names the command if it is not installed."""
    folder = folder or data_folder()
    rows = _rows(folder / "ml-100k.inter")
    events = np.array([[int(float(x)) for x in row] for row in rows], dtype=np.int64)
    events = events[np.lexsort((events[:, 3], events[:, 0]))]  # stable: ties keep the order of the file
    users = _rows(folder / "ml-100k.user")
    items = _rows(folder / "ml-100k.item")

    genders, occupations = _vocabulary([r[2] for r in users]), _vocabulary([r[3] for r in users])
    n_users, n_items = max(int(r[0]) for r in users), max(int(r[0]) for r in items)
    age, gender, occupation = (np.zeros(n_users + 1, dtype=np.int64) for _ in range(3))
    for user, years, sex, work, *_ in users:
        age[int(user)] = 1 + int(np.searchsorted(AGE_EDGES, int(years), side="right"))
        gender[int(user)], occupation[int(user)] = genders[sex], occupations[work]

    genres = _vocabulary([g for r in items for g in r[3].split()])
    per_item = max(len(r[3].split()) for r in items)
    year = np.zeros(n_items + 1, dtype=np.int64)
    item_genres = np.zeros((n_items + 1, per_item), dtype=np.int64)
    for item, _, released, names in items:
        year[int(item)] = 1 + (int(released) - 1920) // 5 if released.isdigit() else 0
        ids = [genres[g] for g in names.split()]
        item_genres[int(item), : len(ids)] = ids

    sizes = {
        "user_id": n_users, "user_age": len(AGE_EDGES) + 1, "user_gender": len(genders),
        "user_occupation": len(occupations), "item_id": n_items, "item_year": int(year.max()),
        "genre": len(genres), "gap": N_GAPS - 1,
    }  # fmt: skip
    return MovieLens(
        event_user=events[:, 0], event_item=events[:, 1], event_rating=events[:, 2], event_time=events[:, 3],
        user_age=age, user_gender=gender, user_occupation=occupation, item_year=year, item_genres=item_genres,
        vocabulary={name: size + 1 for name, size in sizes.items()},
    )  # fmt: skip
