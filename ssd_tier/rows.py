"""The index's rows as entries: checked, since a damaged page can hold anything, and small, since there are many."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ssd_tier.catalog import Entry
from ssd_tier.keys import KEY_BYTES, TOKEN_BYTES, pack_ids

_AT_ONCE = 500  # rows whose token ids are packed by one call

# Both tables stand in the order of their keys: reading them side by side takes a third of the time of a join.
_ROWS = (
    "SELECT key, namespace, parent, generation, start, file_bytes, raw_bytes, seq, hits, created, used, keep "
    "FROM block ORDER BY key"
)
_IDS = "SELECT key, ids FROM block_tokens ORDER BY key"


def read_entries(connection: sqlite3.Connection) -> list[Entry]:
    """All blocks of an index, least recently used first. The caller's transaction keeps both tables at one state.

    Raises sqlite3.Error, or ValueError for what no index of ours says.
    """
    names: dict[bytes, bytes] = {}  # one object for each namespace
    rows, ids = connection.execute(_ROWS), _all_ids(connection)
    entries = []
    for row in rows:
        for key, packed, tokens in ids:
            if key == row[0]:
                entries.append(_entry(row, packed, tokens, names))
                break
        else:
            raise ValueError("a block without token ids")
    keys = {e.key: e.key for e in entries}
    for entry in entries:
        entry.parent = keys.get(entry.parent) or names.get(entry.parent, entry.parent)
    entries.sort(key=lambda e: e.seq)
    return entries


def _all_ids(connection: sqlite3.Connection) -> Iterator[tuple[bytes, bytes, int]]:
    """Keys, packed token ids and their numbers."""
    rows = connection.execute(_IDS)
    while some := rows.fetchmany(_AT_ONCE):
        if not all(type(key) is type(ids) is bytes and ids and not len(ids) % TOKEN_BYTES for key, ids in some):
            raise ValueError("token ids that are none")
        words = np.frombuffer(b"".join(ids for _, ids in some), "<i8")
        narrow = words.astype("<i4")
        if not np.array_equal(narrow, words):
            yield from ((key, pack_ids(ids), len(ids) // TOKEN_BYTES) for key, ids in some)
            continue
        packed, at = narrow.tobytes(), 0
        for key, ids in some:
            end = at + len(ids) // 2
            yield key, packed[at:end], len(ids) // TOKEN_BYTES
            at = end


def _entry(row: Sequence[Any], packed: bytes, tokens: int, names: dict[bytes, bytes]) -> Entry:
    """A row, if it is one that we could have written."""
    key, namespace, parent, generation, start, file_bytes, raw_bytes, seq, hits, created, used, keep = row
    if not type(key) is type(namespace) is type(parent) is bytes:
        raise ValueError("a key that is no bytes")
    if not len(key) == len(namespace) == len(parent) == KEY_BYTES:
        raise ValueError("a key of another length")
    if not (
        type(generation) is type(start) is type(file_bytes) is type(raw_bytes) is int
        and type(seq) is type(hits) is type(created) is type(used) is type(keep) is int
    ):
        raise ValueError("a number that is none")
    if generation < 0 or start < 0 or file_bytes <= 0 or raw_bytes <= 0 or hits < 0:
        raise ValueError("a number below what is possible")
    namespace = names.setdefault(namespace, namespace)
    entry = Entry(
        key, namespace, parent, generation, start, b"", file_bytes, raw_bytes, seq, hits, created, used, keep
    )  # fmt: skip
    entry.packed, entry.tokens = packed, tokens
    return entry
