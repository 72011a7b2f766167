"""Cache directories made directly, to measure with many blocks: a true index, and files of one byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.result import ram_only
from ssd_tier.catalog import Entry
from ssd_tier.files import Directory
from ssd_tier.index import Contents, prepare
from ssd_tier.keys import chain_key
from tiered_cache import TieredCache
from tiered_cache.prefix_tree import token_bytes

BLOCK = 256 * 8  # bytes of the token ids of a block


class Chain(NamedTuple):
    """One sequence on the SSD."""

    tokens: list[int]


def namespace_of(model: Any) -> bytes:
    """The namespace in which a cache for this model looks its states up."""
    with TieredCache.open(ram_only("100MiB"), model=model) as cache:
        return cache.ram._chains(None)[0].root.key


def fill(root: Path, namespace: bytes, chains: Iterable[Chain]) -> int:
    """Make the directory of a cache that holds these sequences; how many blocks it has."""
    entries: dict[bytes, Entry] = {}
    for chain in chains:
        ids = token_bytes(chain.tokens)
        parent = namespace
        for at in range(0, len(ids), BLOCK):
            part = ids[at : at + BLOCK]
            key = chain_key(namespace, parent, part)
            if key not in entries:
                start = at // 8
                entries[key] = Entry(key, namespace, parent, 0, start, part, 1, 1024, len(entries) + 1)
            parent = key
    directory = Directory.own(root)
    try:
        for entry in entries.values():
            path = directory.blob_path(entry.key, 0)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"\0")
        prepare(directory.index_path, lambda: Contents(list(entries.values()), {namespace: "bench"}))
    finally:
        directory.close()
    return len(entries)
