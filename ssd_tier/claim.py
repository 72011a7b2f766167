"""Whose a directory is: what may serve as a cache directory, and the lock that makes one process its owner."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ssd_tier.errors import DirectoryInUse, DirectoryUnusable, IndexUnusable, TierError

INDEX_NAME = "index.sqlite"
BLOB_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})\.safetensors")
TEMPORARY = re.compile(r"[0-9]+-[0-9]+")
# Faults of the machine, not of the configuration: the program starts all the same, with RAM alone.
_PASSING = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
QUARANTINED = re.compile(BLOB_NAME.pattern + r"|index-[0-9]+\.sqlite(-wal|-shm)?")
FOLDERS = ("blobs", "tmp", "quarantine")
_OURS = {"lock", *FOLDERS, INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm"}


def lock(root: Path) -> int:
    """Take the directory's lock; its handle. Raises `TierError`."""
    try:
        fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as e:
        raise _cannot("used", root, e, "choose a directory that you may write to") from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # the name of another file, which we would empty
            raise DirectoryUnusable(f"ssd.path {root} has a lock that is no file of its own; remove {root / 'lock'}")
        _flock(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as e:
        owner = holder(root)
        os.close(fd)
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise DirectoryInUse(
                f"ssd.path {root} is in use by process {owner}; stop that process or give this one another path"
            ) from e
        if e.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise _cannot("locked", root, e, "choose a directory on a local disk") from e
        raise _cannot("written to", root, e, "choose another directory or free some space") from e
    except BaseException:
        os.close(fd)
        raise
    return fd


def _flock(fd: int) -> None:
    for again in (True, True, False):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not again:
                raise
            time.sleep(0.02)  # somebody may only have asked, as `is_owned` does


def holder(root: Path) -> str:
    """Who took the lock last, as it says itself. Changes nothing."""
    try:
        fd = os.open(root / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "unknown"
    try:
        return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"
    finally:
        os.close(fd)


def is_owned(root: Path) -> bool:
    """Whether a running process holds the lock. Changes nothing. Raises OSError."""
    fd = os.open(root / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def make_private(folder: Path) -> None:
    """Make a directory that is ours alone, whatever the umask; one that is there is left as it is. Raises OSError."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    folder.chmod(0o700)


def prepare_root(root: Path) -> None:
    """Make the directory and those above it where they are missing. Raises `DirectoryUnusable`."""
    try:
        for folder in [*reversed(root.parents), root]:
            make_private(folder)
    except OSError as e:
        raise _cannot("used", root, e, "choose a directory that you may write to") from e


def make_folders(root: Path) -> None:
    """Make what lies in the directory. Raises `DirectoryUnusable`."""
    try:
        for name in FOLDERS:
            make_private(root / name)
    except OSError as e:
        raise _cannot("written to", root, e, "choose another directory or free some space") from e


def _cannot(what: str, root: Path, e: OSError, remedy: str) -> TierError:
    kind = IndexUnusable if e.errno in _PASSING else DirectoryUnusable
    return kind(f"ssd.path {root} cannot be {what} ({e.strerror}); {remedy}")


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
    for name in FOLDERS:
        folder = root / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            yield f"{name} is no directory"
    if (root / INDEX_NAME).exists():
        return
    names = {p.name for p in root.iterdir() if not p.name.startswith(".")}
    yield from sorted(names - _OURS - {"lost+found"})
    for pattern, place in ((TEMPORARY, "tmp/*"), (BLOB_NAME, "blobs/*/*"), (QUARANTINED, "quarantine/*")):
        yield from (str(p.relative_to(root)) for p in root.glob(place) if not pattern.fullmatch(p.name))
