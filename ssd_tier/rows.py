"""The index's rows as entries: checked, since a damaged page can hold anything, and small, since there are many."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ssd_tier.catalog import Entry
from ssd_tier.keys import KEY_BYTES, TOKEN_BYTES, chain_key, pack_ids

_AT_ONCE = 1 << 20  # bytes of token ids that are packed by one call

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
    rows, all_ids = connection.execute(_ROWS), _all_ids(connection)
    entries = []
    for row in rows:
        for key, ids, packed in all_ids:
            if key == row[0]:
                entries.append(_entry(row, ids, packed, names))
                break
        else:
            raise ValueError("a block without token ids")
    keys = {e.key: e.key for e in entries}
    for entry in entries:
        entry.parent = keys.get(entry.parent) or names.get(entry.parent, entry.parent)
    entries.sort(key=lambda e: e.seq)
    return entries


def _all_ids(connection: sqlite3.Connection) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Keys and token ids, as they are and packed."""
    for some in _batches(connection.execute(_IDS)):
        words = np.frombuffer(b"".join(ids for _, ids in some), "<i8")
        narrow = words.astype("<i4")
        if not np.array_equal(narrow, words):
            yield from ((key, ids, pack_ids(ids)) for key, ids in some)
            continue
        packed, at = narrow.tobytes(), 0
        for key, ids in some:
            end = at + len(ids) // 2
            yield key, ids, packed[at:end]
            at = end


def _batches(rows: Iterable[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    """Rows by the megabyte: a checkpoint has all ids of its sequence in one."""
    some, nbytes = [], 0
    for row in rows:
        key, ids = row
        if not (type(key) is type(ids) is bytes and ids and not len(ids) % TOKEN_BYTES):
            raise ValueError("token ids that are none")
        some.append(row)
        nbytes += len(ids)
        if nbytes >= _AT_ONCE:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _entry(row: Sequence[Any], ids: bytes, packed: bytes, names: dict[bytes, bytes]) -> Entry:
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
    if chain_key(namespace, parent, ids) != key:  # else another sequence would be given this one's state
        raise ValueError("token ids that are not the key's")
    namespace = names.setdefault(namespace, namespace)
    entry = Entry(
        key, namespace, parent, generation, start, b"", file_bytes, raw_bytes, seq, hits, created, used, keep
    )  # fmt: skip
    entry.packed, entry.tokens = packed, len(ids) // TOKEN_BYTES
    return entry
