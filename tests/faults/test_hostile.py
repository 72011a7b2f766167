"""A directory in which somebody has laid traps: nothing outside is touched, nothing hangs, memory stays small."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from ssd_tier import SSDTier
from tests.blocks import blob, path_of, running
from tests.faults.traps import (
    BUDGET,
    FAMILY,
    INDEX,
    MB,
    closed_cache,  # noqa: F401  the fixture `root`
    guarded,
    inside,
    live,
    precious_files,  # noqa: F401  the fixture `precious`
    small,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]

PLACES = ("blob", "fan-out", "tmp", "quarantine", "blobs", "lock", *INDEX)
TRAPS = ("link to a file", "link to a folder", "link to nothing", "pipe", "folder", "full folder")


def lay(trap: str, place: str, root: Path, precious: Path, at: Path) -> None:
    """Put a trap in a place; what was there is moved away."""
    place_of = {"blob": at, "fan-out": at.parent}.get(place, root / place)
    if os.path.lexists(place_of):
        place_of.rename(precious.parent / f"was-{place}")
    if trap.startswith("link"):
        target = {"link to a file": precious / "file", "link to a folder": precious}.get(trap, precious / "nothing")
        place_of.symlink_to(target)
    elif trap == "pipe":
        os.mkfifo(place_of)
    else:
        place_of.mkdir()
        if trap == "full folder":
            (place_of / "note").write_bytes(b"x")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trap", TRAPS)
async def test_a_trap_laid_before_the_open_leads_nowhere(root, precious, trap, place):
    victim = FAMILY[3]
    (at,) = (p for p in (root / "blobs").glob("*/*") if p.name.startswith(victim.key.hex()))
    lay(trap, place, root, precious, at)
    with guarded(root), small():
        outcome = await live(root, but={victim.key} if place in ("blob", "fan-out") else None)
        assert outcome == "open" or place not in ("blob", "fan-out")
        await live(root)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trap", TRAPS)
async def test_a_trap_laid_under_a_running_tier_leads_nowhere(root, precious, trap, place):
    victim = FAMILY[3]

    def harm(tier: SSDTier) -> None:
        watched = inside.pop()
        lay(trap, place, root, precious, path_of(tier, victim))
        inside.append(watched)

    with guarded(root), small():
        assert await live(root, but=None if place == "blobs" else {victim.key}, harm=harm) == "open"


@pytest.mark.parametrize("place", ["blob", "fan-out"])
async def test_a_link_to_what_was_in_its_place_is_not_followed(root, precious, place):
    async with running(root, budget=BUDGET) as tier:
        lay("link to nothing", place, root, precious, at := path_of(tier, FAMILY[3]))
        (precious / "nothing").symlink_to(moved := precious.parent / f"was-{place}")
        intact = blob(FAMILY[3])
        assert at.read_bytes() == intact, "the links lead to it"
        assert await tier.read(FAMILY[3].key) is None
        assert tier.counters["lost_damaged"] == 1
        assert (moved if place == "blob" else moved / at.name).read_bytes() == intact
    (precious / "nothing").unlink()


async def test_a_lock_that_is_another_name_of_a_file_is_refused(root, precious):
    (root / "lock").unlink()
    os.link(precious / "file", root / "lock")
    with guarded(root):
        assert await live(root) == "refused"
    (precious / "file").stat()


def test_the_guard_sees_what_it_is_there_for(tmp_path):
    (tmp_path / "in").mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    for act in (
        lambda: (tmp_path / "a").write_bytes(b""),
        lambda: os.mkdir("b", dir_fd=fd),
        lambda: os.rename("a", "c", src_dir_fd=fd, dst_dir_fd=fd),
        lambda: os.unlink("c", dir_fd=fd),
    ):
        with pytest.raises(AssertionError), guarded(tmp_path / "in"):
            act()
    with guarded(tmp_path / "in"):
        (tmp_path / "in" / "a").write_bytes(b"")
    os.close(fd)
    with pytest.raises(AssertionError), small():
        _hold(100 * MB)


def _hold(nbytes: int) -> None:
    held = np.ones(nbytes, np.uint8)
    time.sleep(0.05)
    del held
