"""The cache's directory: the only place that opens, writes, renames or removes a file.

    <root>/lock             flock of the owner; holds its pid, for the message that a second one gets
    <root>/index.sqlite     written by SQLite alone (with its -wal and -shm)
    <root>/blobs/<ab>/      one immutable file per block
    <root>/tmp/             files being written; emptied at every open

A file is written aside, then renamed to a name that never existed before. Nothing here follows a symbolic link below
the root, and names come from keys and generations, never from what a file or the index says.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ssd_tier.buffers import Bytes, Scratch, view
from ssd_tier.errors import BlobDamaged, DirectoryInUse, DirectoryUnusable

Durability = Literal["cache", "batch", "full"]

INDEX_NAME = "index.sqlite"
_BLOB_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})\.safetensors")
_TEMPORARY = re.compile(r"[0-9]+-[0-9]+")
_OURS = {"lock", "blobs", "tmp", INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm"}
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in a blob's place must not hang us
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITEV_MAX = 512  # below every system's IOV_MAX


class BlobFile(NamedTuple):
    """One blob as the directory lists it. `nbytes` is its size on disk by `stat`, in bytes."""

    key: bytes
    generation: int
    nbytes: int


def default_hook(operation: str, name: str) -> None:
    """Called before each file operation; tests replace `Directory.hook` to inject faults."""


class Directory:
    """An owned cache directory. Its methods may be called from any thread; they block, so never from the model's."""

    hook: Callable[[str, str], None] = staticmethod(default_hook)

    def __init__(self, root: Path, lock_fd: int) -> None:
        self.root = root
        self._lock_fd = lock_fd
        self._serial = itertools.count()
        self._scratch = Scratch()

    @classmethod
    def own(cls, root: Path) -> Directory:
        """Create `root` where it is missing and take its lock.

        Raises `DirectoryUnusable` or `DirectoryInUse`; changes nothing in a directory that is not ours.
        """
        check_usable(root)
        try:
            for folder in [*reversed(root.parents), root]:
                _make_private(folder)
            fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise DirectoryUnusable(
                f"ssd.path {root} cannot be used ({e.strerror}); choose a directory that you may write to"
            ) from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise DirectoryUnusable(
                    f"ssd.path {root} cannot be locked ({e.strerror}); choose a directory on a local disk"
                ) from e
            raise DirectoryInUse(
                f"ssd.path {root} is in use by process {owner}; stop that process or give this one another path"
            ) from e
        self = cls(root, fd)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            for name in ("blobs", "tmp"):
                _make_private(root / name)
        except OSError as e:
            self.close()
            raise DirectoryUnusable(
                f"ssd.path {root} cannot be written to ({e.strerror}); choose another directory or free some space"
            ) from e
        return self

    @property
    def index_path(self) -> Path:
        """Where SQLite keeps the index."""
        return self.root / INDEX_NAME

    def blob_path(self, key: bytes, generation: int) -> Path:
        """The blob's path, derived from its key (32 bytes) and generation. Touches nothing."""
        name = key.hex()
        return self.root / "blobs" / name[:2] / f"{name}-{generation:016x}.safetensors"

    def write(self, key: bytes, generation: int, parts: Sequence[Bytes | bytes], durability: Durability) -> int:
        """Write a new blob aside and rename it into place; return its size in bytes.

        Raises OSError; then neither the file nor its temporary one exists.
        """
        path = self.blob_path(key, generation)
        temporary = self.root / "tmp" / f"{os.getpid()}-{next(self._serial)}"
        try:
            self.hook("open", temporary.name)
            fd = os.open(temporary, _CREATE, 0o600)
            try:
                nbytes = self._write_all(fd, parts, temporary.name)
                if durability != "cache":
                    self._sync(fd, temporary.name, full=durability == "full")
            finally:
                os.close(fd)
            self.hook("rename", path.name)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:  # the first blob of this fan-out directory
                _make_private(path.parent)
                os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
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
        folders = {self.root / "blobs" / key[:1].hex() for key in keys}
        for folder in [*sorted(folders), self.root / "blobs"]:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._sync(fd, folder.name, full=False)
            finally:
                os.close(fd)

    def read(self, key: bytes, generation: int, nbytes: int) -> Bytes:
        """A whole blob in one buffer, uint8 [nbytes], which holds until the same thread reads the next one.

        Raises OSError, or `BlobDamaged` where it is no regular file of just `nbytes` bytes (checked before any read).
        """
        path = self.blob_path(key, generation)
        self.hook("open", path.name)
        try:
            fd = os.open(path, _READ)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO):
                raise BlobDamaged("not a regular file") from e
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BlobDamaged("not a regular file")
            if status.st_size != nbytes:
                raise BlobDamaged(f"{status.st_size} bytes where {nbytes} are expected")
            buffer = self._scratch.take(nbytes)
            target, done = view(buffer), 0
            while done < nbytes:
                self.hook("read", path.name)
                n = os.readv(fd, [target[done:]])
                if n == 0:
                    raise BlobDamaged(f"ends after {done} of {nbytes} bytes")
                done += n
            return buffer
        finally:
            os.close(fd)

    def remove(self, key: bytes, generation: int) -> None:
        """Remove a blob; one that is gone already is fine. Raises OSError."""
        path = self.blob_path(key, generation)
        self.hook("unlink", path.name)
        path.unlink(missing_ok=True)

    def blobs(self) -> Iterator[BlobFile]:
        """Every file that has a blob's name, in the directory where it belongs. Raises OSError."""
        with os.scandir(self.root / "blobs") as folders:
            names = [f.name for f in folders if len(f.name) == 2 and f.is_dir(follow_symlinks=False)]
        for name in names:
            with os.scandir(self.root / "blobs" / name) as files:
                for file in files:
                    m = _BLOB_NAME.fullmatch(file.name)
                    if m and file.name.startswith(name):
                        yield BlobFile(bytes.fromhex(m[1]), int(m[2], 16), file.stat(follow_symlinks=False).st_size)

    def clear_temporary(self) -> int:
        """Remove what a killed process left half-written; return how many files. Raises OSError."""
        leftovers = [p for p in (self.root / "tmp").iterdir() if _TEMPORARY.fullmatch(p.name)]
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)

    def index_bytes(self) -> int:
        """The index's size with its journal, in bytes."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            try:
                total += os.stat(f"{self.index_path}{suffix}").st_size
            except FileNotFoundError:
                continue
        return total

    def free_bytes(self) -> int:
        """Bytes free on the disk for this user. Raises OSError."""
        return shutil.disk_usage(self.root).free

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _make_private(folder: Path) -> None:
    """Make a directory that is ours alone, whatever the umask; one that is there is left as it is. Raises OSError."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    folder.chmod(0o700)


def check_usable(root: Path, *, writable: bool = True) -> None:
    """Raise `DirectoryUnusable` where `root` exists and is not a cache directory of ours. Changes nothing."""
    try:
        status = root.stat()
    except FileNotFoundError:
        return
    except OSError as e:
        raise DirectoryUnusable(f"ssd.path {root} cannot be reached ({e.strerror}); choose another directory") from e
    if not stat.S_ISDIR(status.st_mode):
        raise DirectoryUnusable(f"ssd.path {root} is a file, not a directory; choose another path or move it away")
    if not writable:
        return
    if status.st_uid != os.geteuid():
        raise DirectoryUnusable(f"ssd.path {root} belongs to another user (uid {status.st_uid}); choose another path")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DirectoryUnusable(
            f"ssd.path {root} can be changed by other users (mode {stat.S_IMODE(status.st_mode):04o}) and what "
            f"they put there would be served to the model; run: chmod 700 {root}"
        )
    # The owner's write bit is asked for even from root, who could write all the same: somebody took it away on purpose.
    if not status.st_mode & stat.S_IWUSR or not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise DirectoryUnusable(f"ssd.path {root} is not writable; run: chmod 700 {root}, or choose another directory")
    try:
        foreign = next(_foreign(root), None)
    except OSError as e:
        raise DirectoryUnusable(f"ssd.path {root} cannot be listed ({e.strerror}); choose another directory") from e
    if foreign:
        raise DirectoryUnusable(f"ssd.path {root} holds other files ({foreign}, ...); choose an empty directory")


def _foreign(root: Path) -> Iterator[str]:
    """What shows that a directory is not a cache of ours: links in the place of our folders, and, where there is no
    index, whatever does not have a name that we give.
    """
    for name in ("blobs", "tmp"):
        folder = root / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            yield f"{name} is no directory"
    if (root / INDEX_NAME).exists():
        return
    names = {p.name for p in root.iterdir() if not p.name.startswith(".")}
    yield from sorted(names - _OURS - {"lost+found"})
    for pattern, files in ((_TEMPORARY, root.glob("tmp/*")), (_BLOB_NAME, root.glob("blobs/*/*"))):
        yield from (str(p.relative_to(root)) for p in files if not pattern.fullmatch(p.name))
