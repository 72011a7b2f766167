"""The cache's directory: the only place that opens, writes, renames or removes a file.

    <root>/lock             flock of the owner; holds its pid, for the message that a second one gets
    <root>/index.sqlite     written by SQLite alone (with its -wal and -shm)
    <root>/blobs/<ab>/      one immutable file per block
    <root>/tmp/             files being written; emptied at every open
    <root>/quarantine/      what was found damaged: a few of the latest

A file is written aside, then renamed to a name that never existed before. Nothing here follows a symbolic link below
the root, and names come from keys and generations, never from what a file or the index says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ssd_tier.buffers import Bytes, Scratch, view
from ssd_tier.claim import (
    BLOB_NAME,
    INDEX_NAME,
    QUARANTINED,
    TEMPORARY,
    check_usable,
    lock,
    make_folders,
    prepare_root,
)
from ssd_tier.errors import BlobDamaged
from ssd_tier.folders import Folders, stats

Durability = Literal["cache", "batch", "full"]

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in a blob's place must not hang us
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITEV_MAX = 512  # below every system's IOV_MAX


class BlobFile(NamedTuple):
    """One blob as the directory lists it. `nbytes` is its size on disk by `stat`, in bytes; `mtime` in seconds."""

    key: bytes
    generation: int
    nbytes: int
    mtime: float


class Directory(Folders):
    """An owned cache directory. Its methods may be called from any thread; they block, so never from the model's."""

    def __init__(self, root: Path, lock_fd: int = -1, quarantine_bytes: int = 0) -> None:
        """`quarantine_bytes`: how much of what is found damaged is kept."""
        super().__init__(root)
        self._quarantine_bytes = quarantine_bytes
        self._lock_fd = lock_fd
        self._serial = itertools.count()
        self._scratch = Scratch()
        _live.add(self)

    @classmethod
    def own(cls, root: Path, quarantine_bytes: int = 0) -> Directory:
        """Create `root` where it is missing and take its lock.

        Raises `DirectoryUnusable` or `DirectoryInUse`; changes nothing in a directory that is not ours.
        """
        check_usable(root)
        prepare_root(root)
        self = cls(root, lock(root), quarantine_bytes)
        try:
            make_folders(root)
        except BaseException:
            self.close()
            raise
        return self

    def blob_path(self, key: bytes, generation: int) -> Path:
        """The blob's path, derived from its key (32 bytes) and generation. Touches nothing."""
        return self.root / "blobs" / key[:1].hex() / _name(key, generation)

    def write(self, key: bytes, generation: int, parts: Sequence[Bytes | bytes], durability: Durability) -> int:
        """Write a new blob aside and rename it into place; return its size in bytes.

        Raises OSError; then neither the file nor its temporary one exists, unless that could not be removed.
        """
        name = _name(key, generation)
        temporary = f"{os.getpid()}-{next(self._serial)}"
        with self._folder("tmp") as aside:
            try:
                self.hook("open", temporary)
                fd = os.open(temporary, _CREATE, 0o600, dir_fd=aside)
                try:
                    nbytes = self._write_all(fd, parts, temporary)
                    if durability != "cache":
                        self._sync(fd, temporary, full=durability == "full")
                finally:
                    os.close(fd)
                with self._folder("blobs", key[:1].hex(), make=True) as folder:
                    self.hook("rename", name)
                    os.rename(temporary, name, src_dir_fd=aside, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):  # counted in `temporary_bytes`, and tried again
                    self.hook("unlink", temporary)
                    os.unlink(temporary, dir_fd=aside)
                raise
        return nbytes

    def _write_all(self, fd: int, parts: Sequence[Bytes | bytes], name: str) -> int:
        waiting = [view(p) for p in parts if len(p)]
        total = 0
        while waiting:
            self.hook("write", name)
            written = os.writev(fd, waiting[:_WRITEV_MAX])
            total += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
        return total

    def _sync(self, fd: int, name: str, *, full: bool) -> None:
        self.hook("fsync", name)
        if full and hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves the data in the drive's own cache
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(fd)

    def sync_names(self, keys: Sequence[bytes]) -> None:
        """Make the names of these blobs durable: fsync their directories, each once. Raises OSError."""
        for names in [*(("blobs", k) for k in sorted({key[:1].hex() for key in keys})), ("blobs",)]:
            with self._folder(*names) as fd:
                self._sync(fd, names[-1], full=False)

    def read(self, key: bytes, generation: int, nbytes: int) -> Bytes:
        """A whole blob in one buffer, uint8 [nbytes], which holds until the same thread reads the next one.

        Raises OSError, or `BlobDamaged` where it is no regular file of just `nbytes` bytes (checked before any read).
        """
        with self._opened(key, generation) as (fd, size):
            if size != nbytes:
                raise BlobDamaged(f"{size} bytes where {nbytes} are expected")
            buffer = self._scratch.take(nbytes)
            self._read_into(fd, view(buffer), _name(key, generation))
            return buffer

    def read_start(self, key: bytes, generation: int, nbytes: int) -> tuple[bytes, int]:
        """The first `nbytes` of a blob, or all of a shorter one, and the size of the whole. Raises as `read`."""
        with self._opened(key, generation) as (fd, size):
            buffer = bytearray(min(nbytes, size))
            self._read_into(fd, memoryview(buffer), _name(key, generation))
            return bytes(buffer), size

    @contextlib.contextmanager
    def _opened(self, key: bytes, generation: int) -> Iterator[tuple[int, int]]:
        name = _name(key, generation)
        try:
            with self._folder("blobs", key[:1].hex()) as folder:
                self.hook("open", name)
                fd = os.open(name, _READ, dir_fd=folder)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
                raise BlobDamaged("not a regular file") from e
            if e.errno == errno.ENOENT and not self._is_there():
                raise OSError(errno.ENODEV, f"{self.root} is no longer the directory that was opened") from e
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BlobDamaged("not a regular file")
            yield fd, status.st_size
        finally:
            os.close(fd)

    def _is_there(self) -> bool:
        """Whether the path still leads to the directory that we own, and not to where a disk was taken away."""
        try:
            return self._lock_fd < 0 or os.path.samestat(os.fstat(self._lock_fd), os.lstat(self.root / "lock"))
        except OSError:
            return False

    def _read_into(self, fd: int, target: memoryview, name: str) -> None:
        done = 0
        while done < len(target):
            self.hook("read", name)
            n = os.readv(fd, [target[done:]])
            if n == 0:
                raise BlobDamaged(f"ends after {done} of {len(target)} bytes")
            done += n

    def remove(self, key: bytes, generation: int) -> None:
        """Remove a blob; one that is gone already is fine. Raises OSError."""
        name = _name(key, generation)
        self.hook("unlink", name)
        with contextlib.suppress(FileNotFoundError), self._folder("blobs", key[:1].hex()) as folder:
            os.unlink(name, dir_fd=folder)

    def blobs(self) -> Iterator[BlobFile]:
        """Every file that has a blob's name, in the directory where it belongs. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root / "blobs") as folders:
            for name in [f.name for f in folders if len(f.name) == 2 and f.is_dir(follow_symlinks=False)]:
                with os.scandir(self.root / "blobs" / name) as files:
                    for file in files:
                        m = BLOB_NAME.fullmatch(file.name)
                        if not m or not file.name.startswith(name):
                            continue
                        try:
                            status = file.stat(follow_symlinks=False)
                        except FileNotFoundError:  # removed just now
                            continue
                        yield BlobFile(bytes.fromhex(m[1]), int(m[2], 16), status.st_size, status.st_mtime)

    # -- tmp/ and quarantine/

    def clear_temporary(self) -> int:
        """Remove what was left half-written, while nothing is being written; how many files. Raises OSError."""
        with self._folder("tmp") as aside:
            return sum(self._unlinked(name, aside) for name in os.listdir(aside) if TEMPORARY.fullmatch(name))

    def quarantine(self, key: bytes, generation: int) -> None:
        """Move a damaged blob out of the way, for people to look at; the oldest there go for it. Raises OSError."""
        name = _name(key, generation)
        with self._folder("blobs", key[:1].hex()) as source, self._folder("quarantine", make=True) as target:
            self.hook("rename", name)
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        self.trim_quarantine()

    def quarantine_index(self) -> None:
        """Move an index out of the way, its journals first: a new index must not meet them. Raises OSError."""
        with self._folder() as root, self._folder("quarantine", make=True) as target:
            number = time.time_ns()
            for suffix in ("-wal", "-shm", ""):
                name = f"{INDEX_NAME}{suffix}"
                self.hook("rename", name)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(name, f"index-{number}.sqlite{suffix}", src_dir_fd=root, dst_dir_fd=target)
        self.trim_quarantine(keep=f"index-{number}.sqlite")

    def trim_quarantine(self, keep: str = "") -> None:
        """Remove the oldest in quarantine, but `keep`, until there is no more than may be. Raises OSError."""
        with self._folder("quarantine", make=True) as folder:
            files = [(s.st_ctime_ns, name, s.st_size) for name, s in stats(folder, QUARANTINED)]
            held = sum(size for *_, size in files)
            for _, name, size in sorted(files):
                if held > self._quarantine_bytes and name != keep and self._unlinked(name, folder):
                    held -= size

    def empty_quarantine(self) -> int:
        """Remove all that is in quarantine; how many files. Raises OSError."""
        with self._folder("quarantine", make=True) as folder:
            return sum(self._unlinked(name, folder) for name in os.listdir(folder) if QUARANTINED.fullmatch(name))

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _name(key: bytes, generation: int) -> str:
    return f"{key.hex()}-{generation:016x}.safetensors"


_live: weakref.WeakSet[Directory] = weakref.WeakSet()


def _forget_locks() -> None:
    """A forked child must not keep its parent's directory locked after the parent has ended."""
    for directory in list(_live):
        directory.close()


os.register_at_fork(after_in_child=_forget_locks)
