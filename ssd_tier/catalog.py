"""What is on the SSD, in RAM: one entry a block, in order of use.

The order is kept leaf-first: whoever touches a block touches its ancestors after it, so the least recently used entry
is one that nothing hangs on. Only the loop thread changes the catalog.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ssd_tier.blob import MAX_HEADER
from ssd_tier.clock import now
from ssd_tier.keys import TOKEN_BYTES, pack_ids, unpack_ids
from ssd_tier.leaf_first import leaf_first

_MOST = 2**62  # SQLite's integers end at twice that


class Entry:
    """One block on the SSD: a row of the index."""

    __slots__ = (
        "created", "file_bytes", "generation", "hits", "keep", "key", "namespace", "packed", "parent", "raw_bytes",
        "seq", "start", "tokens", "used",
    )  # fmt: skip

    def __init__(
        self,
        key: bytes,
        namespace: bytes,
        parent: bytes,
        generation: int,
        start: int,
        ids: bytes,
        file_bytes: int,
        raw_bytes: int,
        seq: int = 0,
        hits: int = 0,
        created: int = 0,
        used: int = 0,
        keep: int = 0,
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.parent = parent
        self.generation = generation
        self.start = start
        self.packed = pack_ids(ids)  # there are many blocks, and two kilobytes of ids each
        self.tokens = len(ids) // TOKEN_BYTES
        self.file_bytes = file_bytes
        self.raw_bytes = raw_bytes
        self.seq = seq
        self.hits = hits
        self.created = created  # these two in seconds since 1970
        self.used = used
        self.keep = keep  # goes after all that is not to be kept

    @property
    def ids(self) -> bytes:
        """The block's token ids, int64, little-endian."""
        return unpack_ids(self.packed, self.tokens)

    @property
    def most_bytes(self) -> int:
        """What its file can have at most: nothing is stored larger than it is."""
        return self.raw_bytes + self.tokens * TOKEN_BYTES + MAX_HEADER


class Catalog:
    """Entries by key, least recently used first. `file_bytes` and `raw_bytes` are sums over all of them."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        """`entries` in their order of use, least recent first."""
        self._entries: OrderedDict[bytes, Entry] = OrderedDict((e.key, e) for e in entries)
        self.file_bytes = sum(e.file_bytes for e in self._entries.values())
        self.raw_bytes = sum(e.raw_bytes for e in self._entries.values())
        self._changed: dict[bytes, Entry] = {}
        self._clock = max((e.seq for e in self._entries.values()), default=0)
        self._expected: dict[bytes, int] = {}  # places in the order of use that are kept for entries to come
        self._sorted = True  # entries stand in the order of their seq
        if self._clock > _MOST:  # somebody wrote there: count anew
            self._clock = 0
            self.touch(list(self._entries))
        # Of parents that are not here, too: one that comes back is no leaf.
        self._children = Counter(e.parent for e in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        """The entry, untouched."""
        return self._entries.get(key)

    def children(self, key: bytes) -> int:
        """How many entries name this one as their parent, whether it is here or not."""
        return self._children[key]

    def add(self, entry: Entry) -> None:
        """Take a new entry, in the place that was kept for it, or as the most recently used, its ancestors after it."""
        self._entries[entry.key] = entry
        self.file_bytes += entry.file_bytes
        self.raw_bytes += entry.raw_bytes
        self._children[entry.parent] += 1
        seq = self._expected.pop(entry.key, None)
        if seq is None:
            self.touch(self.chain(entry.key))
        else:
            entry.seq, entry.used = seq, now()
            self._sorted = False

    def expect(self, keys: Sequence[bytes]) -> None:
        """The order of use, least recent first, of entries and of some to come, for which their place is kept."""
        self._expected.clear()
        for key in keys:
            if key in self._entries:
                self.touch([key])
            else:
                self._clock += 1
                self._expected[key] = self._clock

    def expected(self, keys: Iterable[bytes]) -> int | None:
        """The least recent place that is kept for any of these; None where none is."""
        return min((self._expected[k] for k in keys if k in self._expected), default=None)

    def remove(self, key: bytes) -> Entry | None:
        """Forget an entry; None where it is not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._changed.pop(key, None)
        self.file_bytes -= entry.file_bytes
        self.raw_bytes -= entry.raw_bytes
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
        return entry

    def touch(self, keys: Iterable[bytes], *, hit: bool = False) -> None:
        """Mark entries as just used, in the order given: leaf first, root last. Unknown keys are passed over."""
        moment = now()
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            self._entries.move_to_end(key)
            self._clock += 1
            entry.seq = self._clock
            entry.used = moment
            entry.hits = min(entry.hits + hit, _MOST)
            self._changed[key] = entry

    def chain(self, key: bytes) -> list[bytes]:
        """The entry and its ancestors that are here, leaf first."""
        keys: dict[bytes, None] = {}
        entry = self._entries.get(key)
        while entry and entry.key not in keys:  # a row may name anything as its parent
            keys[entry.key] = None
            entry = self._entries.get(entry.parent)
        return list(keys)

    def victims(self, nbytes: int, spare: Collection[bytes] = (), before: int | None = None) -> list[Entry]:
        """Entries to remove so that `nbytes` of files go: least recently used leaves first, none of `spare`, and where
        `before` is given none that was used after it.

        Changes nothing; may fall short.
        """

        def may_go(e: Entry) -> bool:
            return e.key not in spare and (before is None or e.seq < before)

        # What is to be kept goes only where the rest is not enough.
        found = self._leaves(nbytes, lambda e: not e.keep and may_go(e))
        return found if sum(e.file_bytes for e in found) >= nbytes else self._leaves(nbytes, may_go)

    def expired(self, before: int) -> list[Entry]:
        """Entries that were not used since `before` (seconds since 1970), nor what hangs on them. Changes nothing."""
        return self._leaves(math.inf, lambda e: e.used < before)

    def _leaves(self, nbytes: float, free: Callable[[Entry], bool]) -> list[Entry]:
        if not self._sorted:
            self._entries = OrderedDict(sorted(self._entries.items(), key=lambda item: item[1].seq))
            self._sorted = True
        return leaf_first(
            self._entries.values(),
            nbytes,
            name=lambda e: e.key,
            parent=lambda e: e.parent,
            children=lambda e: self._children[e.key],
            size=lambda e: e.file_bytes,
            free=free,
        )

    def take_changed(self) -> list[Entry]:
        """Entries whose recency or hits changed since the last call."""
        changed = list(self._changed.values())
        self._changed.clear()
        return changed

    def put_changed(self, entries: Iterable[Entry]) -> None:
        """Undo `take_changed`, where the change could not be saved."""
        self._changed.update((e.key, e) for e in entries if e.key in self._entries)

    def check_integrity(self) -> None:
        """Recompute the sums and the counts of children; AssertionError where they differ."""
        assert self.file_bytes == sum(e.file_bytes for e in self), "file bytes"
        assert self.raw_bytes == sum(e.raw_bytes for e in self), "raw bytes"
        assert self._children == Counter(e.parent for e in self), "children"
