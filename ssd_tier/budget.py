"""How many bytes the SSD tier may hold: the budget counts every file, the floor what the disk must keep free."""

from __future__ import annotations

from typing import NamedTuple

from ssd_tier.files import Directory

INDEX_SLACK = 2 << 20  # bytes by which index and journal may grow before they are measured again


class Budget(NamedTuple):
    """`limit`: most bytes of blobs, index and temporary files. `min_free`: bytes the disk keeps free. Both in bytes."""

    limit: int
    min_free: int

    def excess(self, directory: Directory, blob_bytes: int, coming: int) -> int:
        """Bytes of blobs that must go before `coming` more may be written; 0 or less: none. Raises OSError."""
        over = blob_bytes + coming + directory.index_bytes() + INDEX_SLACK - self.limit
        lacking = self.min_free + coming + INDEX_SLACK - directory.free_bytes()
        return max(over, lacking)
