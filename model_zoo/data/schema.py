"""What a batch of a multi-event, multi-task click model holds: the one contract between data and models.

A batch is a flat dict of tensors, right-padded, B samples:

=========================  =================  ====================================================================
key                        shape, dtype       meaning
=========================  =================  ====================================================================
``dense``                  [B, n_dense] f32   real-valued features, about standardised
``sparse_<feature>``       [B] int64          one id of a single-valued feature
``sparse_<feature>``       [B, max_ids] int64 ids of a multi-valued feature, 0 is padding
``<event>_<field>``        [B, L] int64       one id per event of that history, oldest first, 0 is padding
``<event>_age``            [B, L] f32         seconds from the event to the request; 0 in padding
``<event>_length``         [B] int64          events of the history, at most L
``domain``                 [B] int64          where the request was made, in ``[0, n_domains)``
``label_<task>``           [B] f32            0 or 1
=========================  =================  ====================================================================

Id 0 is padding everywhere; real ids start at 1. L may differ between histories and between batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SparseFeature:
    """``n_ids``: ids with the padding id 0; ``max_ids``: values per sample, 1 for a single-valued feature."""

    n_ids: int
    max_ids: int = 1


@dataclass(frozen=True)
class EventType:
    """``fields`` maps each field of an event (``item``, ``category``, ...) to its number of ids, the padding id
    included; ``max_len`` is the longest history."""

    fields: dict[str, int]
    max_len: int


@dataclass(frozen=True)
class Schema:
    """Sizes of everything in a batch. ``tables`` names features that share an embedding table (feature or
    ``<event>_<field>`` to table name); what is not named has a table of its own."""

    n_dense: int
    sparse: dict[str, SparseFeature]
    events: dict[str, EventType]
    tasks: tuple[str, ...] = ("ctr",)
    n_domains: int = 1
    tables: dict[str, str] = field(default_factory=dict)
