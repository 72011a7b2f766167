"""Folders below the cache's directory, reached through no symbolic link, and how many bytes lie in them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ssd_tier.claim import INDEX_NAME

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def default_hook(operation: str, name: str) -> None:
    """Called before each operation on a file; tests replace `Directory.hook` to inject faults, and to die there.

    Operations: open, write, fsync, rename, read, unlink on files; begin, commit, committed, migrate on the index.
    """


class Folders:
    """The directory as a tree of folders. Its methods block; any thread."""

    hook: Callable[[str, str], None] = staticmethod(default_hook)

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def index_path(self) -> Path:
        """Where SQLite keeps the index."""
        return self.root / INDEX_NAME

    @contextlib.contextmanager
    def _folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """A handle on a folder below the root, reached through no symbolic link. Raises OSError."""
        fd = os.open(self.root, _FOLDER)
        try:
            for name in names:
                try:
                    below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                except FileNotFoundError:
                    if not make:
                        raise
                    with contextlib.suppress(FileExistsError):  # the other writer was faster
                        os.mkdir(name, 0o700, dir_fd=fd)
                    below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                    os.fchmod(below, 0o700)  # whatever the umask
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _unlinked(self, name: str, folder: int) -> bool:
        """Remove a file; False where that cannot be now."""
        try:
            self.hook("unlink", name)
            os.unlink(name, dir_fd=folder)
        except OSError:
            return False
        return True

    def other_bytes(self) -> int:
        """Bytes of all files but the blobs: the index with its journal, what is in tmp/ and in quarantine/."""
        total = self.index_bytes()
        for name in ("tmp", "quarantine"):
            with contextlib.suppress(FileNotFoundError), self._folder(name) as folder:
                total += sum(on_disk(s) for _, s in stats(folder))
        return total

    def index_bytes(self) -> int:
        """The index's size with its journal, in bytes."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                total += on_disk(os.stat(f"{self.index_path}{suffix}"))
        return total

    def free_bytes(self) -> int:
        """Bytes free on the disk for this user. Raises OSError."""
        return shutil.disk_usage(self.root).free


def on_disk(status: os.stat_result) -> int:
    """Bytes that a file takes: of one with holes, what is there."""
    return min(status.st_size, status.st_blocks * 512)


def stats(folder: int, pattern: re.Pattern[str] | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """Names and states of what is in a folder; links are not followed."""
    for name in os.listdir(folder):
        if pattern is None or pattern.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)
