"""The candidate as an event: what a history and the request have in common.

Target-aware models (DIN arXiv:1706.06978, BST arXiv:1905.06874) put the candidate into the same space as the events. A field
of a history is given by the sparse feature that shares its embedding table (candidate item, candidate category); a field
that no feature shares is the zero vector, and a history without any such field has no candidate.
"""

from __future__ import annotations

from ..data.schema import Schema
from .embeddings import table_of


def target_features(schema: Schema, event: str) -> dict[str, str | None]:
    """Field of ``event`` to the first single-valued sparse feature of its table, or None."""
    singles = [name for name, feature in schema.sparse.items() if feature.max_ids == 1]
    found: dict[str, str | None] = {}
    for field in schema.events[event].fields:
        table = table_of(schema, f"{event}_{field}")
        found[field] = next((name for name in singles if table_of(schema, name) == table), None)
    return found


def has_target(schema: Schema, event: str) -> bool:
    return any(feature is not None for feature in target_features(schema, event).values())
