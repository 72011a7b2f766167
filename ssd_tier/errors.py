"""What can be wrong with a cache directory before any block is read: each error is one sentence for a person."""

from __future__ import annotations


class TierError(Exception):
    """The SSD tier cannot be used as configured. The message names the thing, its value and what to do."""


class DirectoryUnusable(TierError):
    """The configured path cannot serve as a cache directory (a file, not writable, somebody else's)."""


class DirectoryInUse(TierError):
    """Another running process owns the directory."""


class IndexUnusable(TierError):
    """The index is not ours, not SQLite, damaged, or of a newer version. It is left as it is."""


class BlobDamaged(Exception):
    """A blob's content is not what its name and the index promise. Never leaves the tier: a miss with this reason."""
