"""Looking into a cache directory from outside, beside a running owner.

Nothing is changed, locked or repaired; SQLite may leave its empty journal beside the index.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ssd_tier.blob import BlobInfo, read_info
from ssd_tier.catalog import Entry
from ssd_tier.claim import check_usable
from ssd_tier.errors import BlobDamaged, IndexUnusable
from ssd_tier.files import Directory
from ssd_tier.index import read_contents, read_only


class Sequence(NamedTuple):
    """A stored sequence: a block that nothing hangs on, with all before it. Blocks may be shared with other
    sequences."""

    blocks: list[Entry]  # first block first
    model: str

    @property
    def key(self) -> str:
        """Its last block's chain key, in hex: it names the whole sequence."""
        return self.blocks[-1].key.hex()

    @property
    def tokens(self) -> int:
        """How many tokens it covers."""
        last = self.blocks[-1]
        return last.start + last.tokens

    @property
    def file_bytes(self) -> int:
        """Bytes of its files."""
        return sum(b.file_bytes for b in self.blocks)

    @property
    def raw_bytes(self) -> int:
        """Bytes of its state in RAM."""
        return sum(b.raw_bytes for b in self.blocks)


class Inspection:
    """One reading of an index. `damaged`, `missing` and the like are found by reading blobs, not here."""

    def __init__(self, root: Path) -> None:
        """Raises `DirectoryUnusable` or `IndexUnusable`."""
        check_usable(root, writable=False)
        self.root = root
        self._directory = Directory(root)
        with read_only(self._directory.index_path) as connection:
            contents = read_contents(connection)
        self.entries, self.models = contents.entries, contents.models
        self.counters, self.written = contents.counters, contents.written
        self._by_key = {e.key: e for e in self.entries}

    def sequences(self) -> list[Sequence]:
        """Stored sequences, most recently used first. Blocks that lack an ancestor are left out."""
        parents = {e.parent for e in self.entries}
        found = [self._sequence(e) for e in reversed(self.entries) if e.key not in parents]
        return [s for s in found if s.blocks[0].start == 0]

    def find(self, key: str) -> Sequence:
        """The sequence that ends with the block whose key begins with these hex digits. Raises `LookupError`."""
        return self._sequence(self._by_key[bytes.fromhex(one_of([e.key.hex() for e in self.entries], key))])

    def blob(self, entry: Entry) -> BlobInfo:
        """What a block's file says of itself, verified. Raises `IndexUnusable` where it is damaged or gone."""
        path = self._directory.blob_path(entry.key, entry.generation)
        try:
            return read_info(self._directory.read(entry.key, entry.generation, entry.file_bytes))
        except (BlobDamaged, OSError) as e:
            raise IndexUnusable(f"{path} cannot be read ({e}); the cache counts it as a miss when it meets it") from e

    def index_bytes(self) -> int:
        """Size of the index with its journal, in bytes."""
        return self._directory.index_bytes()

    def path(self, entry: Entry) -> Path:
        """Where the block's file lies."""
        return self._directory.blob_path(entry.key, entry.generation)

    def _sequence(self, last: Entry) -> Sequence:
        blocks = {last.key: last}
        entry = last
        while (parent := self._by_key.get(entry.parent)) and parent.key not in blocks:  # a row may name anything
            blocks[parent.key] = entry = parent
        return Sequence(list(blocks.values())[::-1], self.models.get(last.namespace, "?"))


def one_of(keys: Iterable[str], start: str) -> str:
    """The one key, in hex, that begins with these digits. Raises `LookupError`."""
    found = [k for k in keys if k.startswith(start.lower())]
    if not start or not found:
        raise LookupError(f"no stored block has a key that begins with {start!r}; `tiered-cache ls` lists the keys")
    if len(found) > 1:
        raise LookupError(f"{len(found)} blocks have keys that begin with {start!r}; give more digits")
    return found[0]
