"""How much the SSD tier may hold, for how long, and how much it may write."""

from __future__ import annotations

from typing import NamedTuple

from ssd_tier.files import Directory

INDEX_SLACK = 2 << 20  # bytes by which index and journal may grow before they are measured again
QUARANTINE_SHARE = 64  # one part in so many is for what was found damaged


class Budget(NamedTuple):
    """`limit`: most bytes of all files. `min_free`: bytes the disk keeps free. `retention`: seconds that a block is
    kept without being used, 0 for ever. `daily`: most bytes of blobs written in a day, 0 for any."""

    limit: int
    min_free: int
    retention: float = 0
    daily: int = 0

    def excess(self, directory: Directory, blob_bytes: int, coming: int) -> int:
        """Bytes of blobs that must go before `coming` more may be written; 0 or less: none. Raises OSError.

        Blocks: it asks the file system.
        """
        over = blob_bytes + coming + directory.other_bytes() + INDEX_SLACK - self.limit
        lacking = self.min_free + coming + INDEX_SLACK - directory.free_bytes()
        return max(over, lacking)
