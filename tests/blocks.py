"""Blocks of seeded bytes, an SSD tier that runs, and a listener that remembers, for the tests of the SSD tier."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ssd_tier import Block, Entry, SSDTier, TensorSpec, TierOptions
from ssd_tier.blob import encode_blob
from ssd_tier.buffers import Bytes
from ssd_tier.index import read_contents, read_only
from ssd_tier.keys import chain_key

NAMESPACE = sha256(b"a namespace").digest()


def block(seed: int, parent: Block | None = None, nbytes: int = 4096, tokens: int = 16, **changes: Any) -> Block:
    """Two BF16 tensors of random bits, hung under `parent`; what does not fit is in `changes`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-(2**63), 2**63 - 1, tokens).astype("<i8").tobytes()
    above = parent.key if parent else NAMESPACE
    shape = (1, 2, tokens, nbytes // (8 * tokens))
    return replace(
        Block(
            key=chain_key(NAMESPACE, above, ids),
            namespace=NAMESPACE,
            parent=above,
            tokens=ids,
            start=parent.start + len(parent.tokens) // 8 if parent else 0,
            tensors=(TensorSpec("0.keys", "BF16", shape), TensorSpec("0.values", "BF16", shape)),
            classes="KVCache",
            data=np.frombuffer(rng.bytes(nbytes), np.uint8),
            model="tiny",
        ),
        **changes,
    )


def chain(length: int, seed: int = 0, nbytes: int = 4096) -> list[Block]:
    """Blocks that follow one another, the first one first; another seed shares none of them."""
    blocks: list[Block] = []
    for i in range(length):
        blocks.append(block(1000 * seed + i, blocks[-1] if blocks else None, nbytes))
    assert all(a.key == b.parent for a, b in pairwise(blocks))
    return blocks


def with_data(tensors: Sequence[TensorSpec], data: Bytes) -> Block:
    """A block of these tensors and bytes."""
    return block(0, tensors=tuple(tensors), data=data)


def content(b: Block | None) -> tuple[object, ...] | None:
    """All that must come back, to compare."""
    if b is None:
        return None
    hints = ("replaces", "keep")  # not stored
    named = {f.name: getattr(b, f.name) for f in fields(Block) if f.name not in hints}
    return tuple((named | {"data": bytes(b.data)}).values())


def blob(b: Block, level: int | None = 1) -> bytes:
    """The bytes of its file."""
    return b"".join(bytes(part) for part in encode_blob(b, level))


def entry(b: Block, **changes: Any) -> Entry:
    """A row for the block, without a file."""
    sizes = {"file_bytes": b.nbytes + 100, "raw_bytes": b.nbytes, "generation": 1}
    return Entry(b.key, b.namespace, b.parent, start=b.start, ids=b.tokens, **(sizes | changes))


class Recorder:
    """A listener that remembers: keys stored, keys removed, and the reason of each key lost."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self.lost: dict[bytes, str] = {}
        self.came_back = 0

    def on_stored(self, entries: Sequence[Entry]) -> None:
        self.stored += [e.key for e in entries]

    def on_lost(self, blocks: Sequence[Block], reason: str) -> None:
        self.lost |= {b.key: reason for b in blocks}

    def on_removed(self, entries: Sequence[Entry]) -> None:
        self.removed += [e.key for e in entries]

    def on_back(self) -> None:
        self.came_back += 1

    def on_closed(self) -> None: ...


class Watch(Recorder):
    """Looks at the disk and the index from outside, whenever something has changed."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.peak = root, 0  # most bytes ever seen
        self.wrong: list[str] = []
        self.tier: Any = None

    def on_stored(self, entries: Sequence[Entry]) -> None:
        super().on_stored(entries)
        self.look()
        here = {e.key: e.parent for e in rows(self.root)}
        self.wrong += ["told before its row" for e in entries if e.key not in here]
        self.wrong += ["a row without its parent's" for p in here.values() if p not in here and p != NAMESPACE]

    def on_removed(self, entries: Sequence[Entry]) -> None:
        super().on_removed(entries)
        self.wrong += ["not a leaf" for e in self.tier.catalog if e.parent in keys(*entries)]

    def look(self, *_: object) -> None:
        self.peak = max(self.peak, on_disk(self.root))


def options(path: Path, **changes: Any) -> TierOptions:
    """Room enough for everything, unless `changes` say otherwise."""
    return TierOptions(path, 64 << 20, 0, 64 << 20)._replace(**changes)


@asynccontextmanager
async def running(path: Path, listener: Any = None, **changes: Any) -> AsyncIterator[SSDTier]:
    """A tier from open to close."""
    tier = SSDTier(options(path, **changes))
    try:
        await tier.start(listener or Recorder())
    except BaseException:
        tier.disown()
        raise
    try:
        yield tier
    finally:
        await tier.close()


async def spill(tier: SSDTier, *blocks: Block) -> None:
    """Hand over blocks and wait until the writer is done with all that waits."""
    for b in blocks:
        assert tier.put(b), "the queue is full"
    async with asyncio.timeout(5):
        while len(tier.queue):
            tier.writer.progress.clear()
            await tier.writer.progress.wait()


def listing(root: Path, part: str = "") -> list[str]:
    """Names of all files below `root`/`part`, sorted."""
    return sorted(name for _, _, names in os.walk(root / part) for name in names)


def on_disk(root: Path) -> int:
    """Bytes of all files below `root`, whatever they are."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # removed by the writer just now
                continue
    return total


def keys(*found: Any) -> list[bytes]:
    """Keys of blocks or entries."""
    return [f.key for f in found]


def rows(root: Path) -> list[Entry]:
    """What the index says, read beside the owner."""
    with read_only(root / "index.sqlite") as reader:
        return read_contents(reader).entries


def path_of(tier: SSDTier, b: Block) -> Path:
    """Where the block's file lies."""
    return tier._directory.blob_path(b.key, {e.key: e.generation for e in tier.catalog}[b.key])


def failing(*operations: str, at: int | None = None, name: str = "") -> Callable[[str, str], None]:
    """A hook for `Directory`: of these operations (default: all) on files of such names, call number `at` (default:
    each) fails.
    """
    count = itertools.count()

    def hook(operation: str, file: str) -> None:
        if operation in (operations or [operation]) and file.startswith(name) and at in (None, next(count)):
            raise OSError(errno.EIO, f"no {operation}")

    return hook
