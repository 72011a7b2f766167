"""Replays of request traces: what a cache of given sizes would have reused, written and read.

The tree, the ledger, eviction in both tiers and admission are the engine's own; there are no arrays, no files, no time.
A trace names blocks of tokens by ids; here each block is one node of the tree, whatever its number of tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ssd_tier import Block, Entry
from ssd_tier.admission import Admission, Policy
from ssd_tier.catalog import Catalog
from tiered_cache.block_pool import BlockPool
from tiered_cache.prefix_tree import Node, anywhere, in_ram

NAMESPACE = sha256(b"simulation").digest()


BLOCK_TOKENS = 512  # that an id of a trace stands for; the last one of a prompt for what is left


class Request(NamedTuple):
    """One look-up and what is stored after it. `blocks`: ids of the prompt's blocks, first one first."""

    tokens: int
    blocks: Sequence[int]

    def covered(self, blocks: int) -> int:
        """Tokens in so many leading blocks."""
        return min(self.tokens, blocks * BLOCK_TOKENS)


class TraceError(ValueError):
    """A line of a trace that is not what it should be."""


def read_trace(path: Path) -> Iterator[Request]:
    """Requests of a JSONL file: `input_length` in tokens and `hash_ids`, one id a block, in each line.

    Raises `TraceError` and OSError.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield Request(int(row["input_length"]), [int(i) for i in row["hash_ids"]])
            except (ValueError, KeyError, TypeError) as e:
                raise TraceError(
                    f"{path}, line {number}: not a request ({type(e).__name__}: {e}); each line must be a JSON object "
                    'with "input_length" and "hash_ids"'
                ) from e


@dataclass
class Outcome:
    """What a replay came to. Tokens, and blocks of the trace."""

    requests: int = 0
    tokens: int = 0
    ram_tokens: int = 0
    ssd_tokens: int = 0
    ceiling_tokens: int = 0  # what an infinite cache gives
    written: int = 0  # blocks
    read: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the tokens asked for, those that were reused."""
        return (self.ram_tokens + self.ssd_tokens) / self.tokens if self.tokens else 0.0


class Disk:
    """The SSD tier's catalog, budget and admission, without files. What is put is written once the request is over."""

    def __init__(self, pool: BlockPool, budget: int, policy: Policy) -> None:
        self.catalog = Catalog()
        self.admission = Admission(policy)
        self.written = 0
        self._pool = pool
        self._budget = budget
        self._waiting: dict[bytes, Block] = {}

    def put(self, block: Block) -> bool:
        self._waiting[block.key] = block
        return True

    def cancel(self, key: bytes) -> bool:
        return self._waiting.pop(key, None) is not None

    def touch(self, keys: Sequence[bytes], *, hit: bool = False) -> None:
        self.catalog.touch(keys, hit=hit)

    def discard(self, keys: Sequence[bytes]) -> None:
        self._pool.on_removed([e for k in keys if (e := self.catalog.remove(k))])

    def admits(self, key: bytes) -> bool:
        return self.admission.admits(key)

    def saw(self, key: bytes) -> None:
        self.admission.saw(key)

    def write(self) -> None:
        """Write what waits, making room as the budget asks for it."""
        while self._waiting:
            blocks, self._waiting = list(self._waiting.values()), {}
            stored = [entry for block in blocks if (entry := self._write(block))]
            self.written += len(stored)
            self._pool.on_lost([b for b in blocks if b.key not in self.catalog], "no_room")
            self._pool.on_stored([e for e in stored if e.key in self.catalog])

    def _write(self, block: Block) -> Entry | None:
        catalog, size = self.catalog, block.nbytes
        short = catalog.file_bytes + size - self._budget
        victims = []
        if short > 0:
            self.admission.fill(len(catalog))
            victims = catalog.victims(short, set(catalog.chain(block.parent)))
        orphan = block.parent != block.namespace and block.parent not in catalog
        if orphan or sum(v.file_bytes for v in victims) < short:
            return None
        for victim in victims:
            catalog.remove(victim.key)
        self._pool.on_removed(victims)
        entry = Entry(block.key, block.namespace, block.parent, 0, block.start, block.tokens, size, size)
        catalog.add(entry)
        self.admission.wrote(entry.key)
        return entry


class Simulation:
    """A cache of `ram` and `ssd` bytes (0: none) for blocks of `block_bytes` each."""

    def __init__(self, ram: int, ssd: int, block_bytes: int, policy: Policy = "second-touch") -> None:
        self.outcome = Outcome()
        self._pool = BlockPool(ram, 1)
        self._root = self._pool.tree.root(NAMESPACE)
        self._disk = Disk(self._pool, ssd, policy)
        if ssd:
            self._pool.attach(self._disk)
        self._block_bytes = block_bytes
        self._data: Any = np.broadcast_to(np.zeros(1, np.uint8), block_bytes)  # takes no memory
        self._ever: set[bytes] = set()  # keys of all blocks that there ever were

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Replay requests, one after the other."""
        for request in requests:
            self.step(request)
        self.outcome.written = self._disk.written
        self.outcome.counters = dict(self._pool.counters)
        return self.outcome

    def step(self, request: Request) -> None:
        """Look a prompt up in both tiers, bring back what the SSD has, store all of it."""
        out, pool = self.outcome, self._pool
        ids = array("q", request.blocks).tobytes()
        with pool.lock:
            here = pool.match(self._root, ids, in_ram, len(request.blocks)).tokens
            path = pool.match(self._root, ids, anywhere, len(request.blocks)).nodes
            pool.pin(path)
            reach = self._promote(path)
            pool.use(path[:reach], hit=True)
            pool.unpin(path)
            stored = self._store(ids)
        known = next((i for i, key in enumerate(stored) if key not in self._ever), len(stored))
        self._ever.update(stored)
        out.requests += 1
        out.tokens += request.tokens
        out.ram_tokens += request.covered(min(here, reach))
        out.ssd_tokens += request.covered(reach) - request.covered(min(here, reach))
        out.ceiling_tokens += request.covered(known)
        self._disk.write()

    def _promote(self, path: list[Node]) -> int:
        """Bring blocks back as far as RAM has room; how many of the path are there then."""
        for i, node in enumerate(path):
            if node.block is None:
                if not self._pool.reserve(self._block_bytes):
                    return i
                self.outcome.read += 1
                self._pool.admit(node, self._block(node), promoted=True)
        return len(path)

    def _store(self, ids: bytes) -> list[bytes]:
        """Put what is new into RAM, if all of it fits; the keys of the whole."""
        pool, node = self._pool, self._root
        known = pool.tree.walk(self._root, ids)
        pool.pin(known)
        missing = len(ids) // 8 - sum(n.block is not None for n in known)
        fits = pool.reserve(missing * self._block_bytes)
        path = []
        for chunk in pool.tree.chunks(ids):
            node = pool.tree.insert(node, chunk)
            path.append(node)
            if fits and node.block is None:
                pool.admit(node, self._block(node))
        if fits:
            pool.use(path, asked=False)
        pool.unpin(known)
        pool.feed()
        keys = [n.key for n in path]
        if not fits and path:
            pool.tree.prune(path[-1])
        return keys

    def _block(self, node: Node) -> Block:
        assert node.parent
        return Block(node.key, NAMESPACE, node.parent.key, node.ids, node.start, (), "", self._data)
