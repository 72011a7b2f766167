"""`tiered-cache doctor`: is this machine, this directory, this index fit for the cache?"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil
import typer
from rich.table import Table

from ssd_tier import TierError, TierOptions
from ssd_tier.claim import check_usable, holder, is_owned
from ssd_tier.files import Directory
from ssd_tier.index import SQLITE_VERSION, check_index
from ssd_tier.inspection import Inspection
from tiered_cache.cli.options import CachePath, ConfigFile, Json, options_of, root_of
from tiered_cache.cli.output import add_row, print_json, show_table
from tiered_cache.config import format_size

REMOTE = {"nfs", "nfs4", "cifs", "smbfs", "smb3", "afpfs", "webdav", "fuse.sshfs", "9p"}
PACKAGES = ("mlx", "mlx-lm", "safetensors", "zstandard", "aiosqlite", "xxhash", "numpy")


class Check(NamedTuple):
    """One line. `verdict`: "ok", "note" (worth knowing) or "fail" (the SSD tier will not work)."""

    what: str
    verdict: str
    told: str


def doctor(config: ConfigFile = None, path: CachePath = None, as_json: Json = False) -> None:
    """Check directory, permissions, space, lock, index and versions. Changes nothing. Exit code 1 where one fails."""
    options = options_of(config)._replace(path=root_of(config, path))
    checks = list(examine(options))
    if as_json:
        print_json([c._asdict() for c in checks])
    else:
        table = Table("check", "", "found")
        for c in checks:
            add_row(table, c.what, c.verdict, c.told)
        show_table(table)
    raise typer.Exit(1 if any(c.verdict == "fail" for c in checks) else 0)


def examine(options: TierOptions) -> Iterator[Check]:
    """All checks, those of the machine first."""
    root = options.path
    yield versions()
    yield attempt("directory", lambda: directory(root))
    there = next(p for p in (root, *root.parents) if p.exists())
    yield attempt("disk", lambda: disk(there))
    yield attempt("free space", lambda: space(there, options))
    if not root.is_dir():
        return
    yield attempt("lock", lambda: lock(root))
    found = attempt("index", lambda: index(root))
    yield found
    if found.verdict == "ok":
        yield attempt("budget", lambda: budget(root, options))
    yield attempt("quarantine", lambda: quarantine(root))
    if sys.platform == "darwin":
        yield attempt("backups", lambda: backups(root))


def attempt(what: str, look: Callable[[], Check]) -> Check:
    """A check that cannot be made has failed."""
    try:
        return look()
    except (TierError, OSError) as e:
        return Check(what, "fail", str(e))


def versions() -> Check:
    """What is installed."""
    found = []
    for name in ("tiered-cache", *PACKAGES):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    system = f"Python {platform.python_version()}, SQLite {SQLITE_VERSION}, {platform.system()}"
    return Check("versions", "fail" if "is not" in "".join(found) else "ok", f"{system}; {', '.join(found)}")


def directory(root: Path) -> Check:
    """Whether it may serve as a cache directory."""
    check_usable(root)
    if not root.exists():
        return Check("directory", "ok", f"{root} does not exist yet; it is made at the first start")
    mode = stat.S_IMODE(root.stat().st_mode)
    if mode & 0o077:
        told = f"{root} can be read by other users (mode {mode:04o}), and prompts from it; run: chmod 700 {root}"
        return Check("directory", "note", told)
    return Check("directory", "ok", f"{root}, private (mode {mode:04o})")


def disk(there: Path) -> Check:
    """What it lies on."""
    mounts = [p for p in psutil.disk_partitions(all=True) if there.resolve().is_relative_to(p.mountpoint)]
    if not mounts:
        return Check("disk", "note", f"the file system of {there} is not known")
    mount = max(mounts, key=lambda p: len(p.mountpoint))
    if mount.fstype in REMOTE:
        told = f"{mount.fstype} on {mount.mountpoint}: slow, and locks may not hold; choose a local disk"
        return Check("disk", "note", told)
    return Check("disk", "ok", f"{mount.fstype} on {mount.mountpoint}")


def space(there: Path, options: TierOptions) -> Check:
    """Whether the disk has more than must stay free."""
    free = shutil.disk_usage(there).free
    told = f"{format_size(free)} free, of which ssd.min_free keeps {format_size(options.min_free)}"
    return Check("free space", "ok" if free > options.min_free else "note", told)


def lock(root: Path) -> Check:
    """Who uses it."""
    if not (root / "lock").exists():
        return Check("lock", "ok", "never used")
    if is_owned(root):
        return Check("lock", "ok", f"in use by process {holder(root)}")
    return Check("lock", "ok", f"free; last used by process {holder(root)}")


def index(root: Path) -> Check:
    """Whether SQLite finds it sound, and of what version it is."""
    found = Directory(root)
    if not found.index_path.exists():
        return Check("index", "note", "there is none; it is made at the next start, from the blobs if there are any")
    return Check("index", "ok", f"schema {check_index(found.index_path)}, sound, {format_size(found.index_bytes())}")


def budget(root: Path, options: TierOptions) -> Check:
    """What it holds of what it may."""
    found = Inspection(root)
    held = sum(e.file_bytes for e in found.entries) + Directory(root).other_bytes()
    told = f"{format_size(held)} held by {len(found.entries)} blocks, of ssd.budget = {format_size(options.budget)}"
    return Check("budget", "ok" if held <= options.budget else "note", told)


def quarantine(root: Path) -> Check:
    """What was found damaged."""
    folder = root / "quarantine"
    names = os.listdir(folder) if folder.is_dir() else []
    if not names:
        return Check("quarantine", "ok", "empty")
    return Check("quarantine", "note", f"{len(names)} damaged files were set aside; look at the disk's health")


def backups(root: Path) -> Check:
    """Whether Time Machine and Spotlight leave it alone: copies of a cache are of no use."""
    told = []
    if not (root / ".metadata_never_index").exists():
        told.append(f"Spotlight reads it; run: touch {root}/.metadata_never_index")
    out = subprocess.run(["tmutil", "isexcluded", str(root)], capture_output=True, text=True, check=False).stdout
    if "[Excluded]" not in out:
        told.append(f"Time Machine copies it; run: tmutil addexclusion {root}")
    return Check("backups", "note" if told else "ok", "; ".join(told) or "left alone by Spotlight and Time Machine")
