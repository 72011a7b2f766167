"""The directory: one owner, nobody else's files, private modes, and whole files or none."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

from ssd_tier import DirectoryInUse, DirectoryUnusable
from ssd_tier.errors import BlobDamaged
from ssd_tier.files import Directory
from ssd_tier.folders import default_hook
from tests.blocks import listing

KEY = bytes(range(32))
PARTS: list[Any] = [b"head", np.arange(7, dtype=np.uint8), b"", np.empty(0, np.uint8), b"x" * 5000, *[b"tail"] * 9]
WHOLE = b"".join(bytes(p) for p in PARTS)
OWN = "import sys, pathlib, ssd_tier.files as f; d = f.Directory.own(pathlib.Path(sys.argv[1])); print(1, flush=True)"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def directory(root):
    with closing(Directory.own(root)) as directory:
        yield directory


def snapshot(root):
    """Everything at and below `root`: its mode and its bytes."""
    return {p: (oct(p.lstat().st_mode), p.read_bytes() if p.is_file() else None) for p in [root, *root.rglob("*")]}


def refusal(root, kind=DirectoryUnusable):
    """The sentence that a user gets, without the path."""
    with pytest.raises(kind, match=rf"^ssd\.path {root} [^\n]+$") as caught:
        Directory.own(root)
    return str(caught.value).removeprefix(f"ssd.path {root} ")


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o177])
def test_directories_and_files_are_private_whatever_the_umask(root, umask):
    old = os.umask(umask)
    try:
        with closing(Directory.own(root)) as directory:
            directory.write(KEY, 1, PARTS, "cache")
    finally:
        os.umask(old)
    assert {oct(p.stat().st_mode & 0o777) for p in [root, *root.rglob("*")] if p.is_dir()} == {"0o700"}
    assert {oct(p.stat().st_mode & 0o777) for p in root.rglob("*") if p.is_file()} == {"0o600"}
    assert listing(root) == [directory.blob_path(KEY, 1).name, "lock"]


def test_a_second_owner_is_told_who_the_first_one_is(root, directory):
    told = f"is in use by process {os.getpid()}; stop that process or give this one another path"
    assert refusal(root, DirectoryInUse) == told
    other = subprocess.run([sys.executable, "-c", OWN, root], capture_output=True, text=True, timeout=30)
    assert other.returncode
    assert other.stderr.splitlines()[-1] == f"ssd_tier.errors.DirectoryInUse: ssd.path {root} {told}"
    directory.close()
    directory.close()
    Directory.own(root).close()


def test_a_killed_owner_leaves_no_lock_behind(root):
    with subprocess.Popen([sys.executable, "-c", f"{OWN}; input()", root], stdin=-1, stdout=-1) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == b"1\n"
        assert f"is in use by process {owner.pid};" in refusal(root, DirectoryInUse)
        owner.send_signal(signal.SIGKILL)
    with closing(Directory.own(root)):
        assert (root / "lock").read_text() == f"{os.getpid()}\n"


def foreign(root, *names):
    root.mkdir(0o700)
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("precious")


@pytest.mark.parametrize(("make", "told"), [
    (lambda p: p.write_text("text"), "is a file, not a directory; choose another path or move it away"),
    (lambda p: os.mkfifo(p), "is a file, not a directory; choose another path or move it away"),
    (lambda p: p.symlink_to("nowhere"), "cannot be used (No such file or directory); choose "),
    (lambda p: p.mkdir(0o500), "is not writable; run: chmod 700 {}, or choose another directory"),
    (lambda p: (p.mkdir(), p.chmod(0o770)), "can be changed by other users (mode 0770) and what they put there would "
     "be served to the model; run: chmod 700 {}"),
    (lambda p: (p.mkdir(), p.chmod(0o702)), "can be changed by other users (mode 0702) and what they put there would "
     "be served to the model; run: chmod 700 {}"),
    (lambda p: (p.mkdir(0o700), (p / "lock").symlink_to("nowhere")), "cannot be used (Too many levels of symbolic "
     "links); choose a directory that you may write to"),
    (lambda p: foreign(p, "tmp/draft", "thesis.doc"), "holds other files (thesis.doc, ...); choose an empty directory"),
    (lambda p: foreign(p, "lock", "thesis.doc"), "holds other files"),
    (lambda p: foreign(p, "tmp/draft"), "holds other files")])
def test_a_place_that_is_not_for_us_is_told_with_the_remedy_and_left_alone(root, make, told):
    make(root)
    before = snapshot(root)
    assert refusal(root).startswith(told.format(root))
    assert snapshot(root) == before


def test_a_path_below_a_file_is_told(tmp_path):
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file" / "cache") == "cannot be reached (Not a directory); choose another directory"


def test_temporary_files_are_removed_here_and_nowhere_else(root, directory, tmp_path):
    (root / "tmp").rmdir()
    foreign(tmp_path / "home", "thesis.doc")
    (root / "tmp").symlink_to(tmp_path / "home")
    directory.close()
    with suppress(DirectoryUnusable, OSError), closing(Directory.own(root)) as directory:
        directory.clear_temporary()
    assert listing(tmp_path / "home") == ["thesis.doc"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("place", "told"), [
    (lambda p: p.symlink_to(p.with_suffix(".moved")), "not a regular file"),
    (lambda p: os.mkfifo(p), "not a regular file"),
    (lambda p: p.mkdir(), "not a regular file"),
    (lambda p: p.write_bytes(WHOLE + b"x"), f"{len(WHOLE) + 1} bytes where {len(WHOLE)} are expected"),
    (lambda p: p.write_bytes(WHOLE[:-1]), f"{len(WHOLE) - 1} bytes where {len(WHOLE)} are expected"),
    (lambda p: p.touch(), f"0 bytes where {len(WHOLE)} are expected")])
def test_what_lies_in_a_blobs_place_is_never_taken_for_it(directory, place, told):
    assert directory.write(KEY, 1, PARTS, "cache") == len(WHOLE)
    assert bytes(directory.read(KEY, 1, len(WHOLE))) == WHOLE
    path = directory.blob_path(KEY, 1)
    path.rename(path.with_suffix(".moved"))
    with pytest.raises(FileNotFoundError):
        directory.read(KEY, 1, len(WHOLE))
    place(path)
    with pytest.raises(BlobDamaged, match=told):
        directory.read(KEY, 1, len(WHOLE))


@pytest.mark.parametrize("durability", ["cache", "batch", "full"])
def test_a_write_that_fails_at_any_operation_leaves_nothing(root, directory, durability):
    operations: list[str] = []
    parts = [b"part"] * 1100  # more than one call takes
    directory.hook = lambda operation, name: operations.append(operation)
    directory.write(KEY, 1, parts, durability)
    assert operations == ["open", *["write"] * 3, *["fsync"] * (durability != "cache"), "rename"]
    before = listing(root)
    for n in range(len(operations)):
        left = iter(range(n))

        def hook(operation, name, left=left):
            if operation != "unlink" and next(left, None) is None:
                raise OSError(errno.ENOSPC, operation)

        directory.hook = hook
        with pytest.raises(OSError, match=operations[n]):
            directory.write(KEY, 2, parts, durability)
        assert listing(root) == before
    directory.hook = default_hook
    assert bytes(directory.read(KEY, 1, 4400)) == b"part" * 1100


@pytest.mark.parametrize("most", [1, 3, 7, 5010])
def test_a_disk_that_takes_a_few_bytes_at_a_time_still_gets_the_right_file(directory, monkeypatch, most):
    monkeypatch.setattr(os, "writev", lambda fd, buffers: os.write(fd, b"".join(buffers)[:most]))
    assert directory.write(KEY, 1, PARTS, "cache") == len(WHOLE)
    assert directory.blob_path(KEY, 1).read_bytes() == WHOLE


def test_only_blobs_in_their_place_are_listed_and_a_blob_can_be_removed_twice(root, directory):
    directory.write(KEY, 2**63, PARTS, "cache")
    name = directory.blob_path(KEY, 2**63).name
    for stray in (f"{name}.bak", f"ff/{name}", f"{KEY[:1].hex()}/note.txt", f"{KEY[:1].hex()}/{name.upper()}"):
        (root / "blobs" / stray).parent.mkdir(exist_ok=True)
        (root / "blobs" / stray).touch()
    assert [f[:3] for f in directory.blobs()] == [(KEY, 2**63, len(WHOLE))]
    for _ in range(2):
        directory.remove(KEY, 2**63)
    assert list(directory.blobs()) == []
    assert len(listing(root, "blobs")) == 4
