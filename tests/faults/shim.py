"""System calls that fail, one after the other: the library `shim.c`, and the process that it is preloaded into. And
awaits that are cancelled, one after the other.

As a program (`python -m tests.faults.shim scenario root operation durability`) it goes through a scenario once for
each call that the scenario makes, with that call failing, and prints what was wrong as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from ssd_tier import Block, SSDTier, TierError
from tests.blocks import Recorder, chain, content, keys, listing, options, rows, running, spill

OPERATIONS = {"write": 1, "read": 2, "open": 4, "sync": 8, "rename": 16, "unlink": 32, "truncate": 64, "any": 127}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE)
SHORT = -1  # half of the bytes
FOR_EVER = 1 << 20
DAMAGE = ("lost_damaged", "lost_missing")  # no fault of the machine is one of these


def build(folder: Path) -> Path:
    """Compile the library. Skips where there is no compiler, but not in CI."""
    compiler = which("cc") or which("gcc") or which("clang")
    if not compiler or not sys.platform.startswith("linux"):
        assert not os.environ.get("CI"), "CI must have a C compiler, on Linux"
        pytest.skip("no C compiler, or no Linux: failing system calls are not tried")
    library = folder / "shim.so"
    source = str(Path(__file__).with_name("shim.c"))
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", str(library), source, "-ldl"], check=True)
    return library


def run(library: Path, scenario: str, root: Path, operation: str, durability: str = "cache") -> dict[str, Any]:
    """A scenario in a process of its own; what it found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.shim", scenario, str(root), operation, durability],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Faults:
    """The library from inside, and the list of what was wrong."""

    def __init__(self, root: Path, operation: str) -> None:
        self.root, self.operation = root, operation
        self.points = self.fired = 0
        self.problems: list[str] = []
        self.place = ""
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.fault_syncs.restype = ctypes.c_char_p

    def each(self, *times: int) -> Iterator[tuple[Callable[[], None], bool]]:
        """For each error and call: (arm it, whether it fails from then on), until there is no such call."""
        short = [SHORT] if self.operation in ("read", "write", "any") else []
        for error, many in itertools.product([*ERRORS, *short], times):
            if self.operation == "any" and many > 1 and error != errno.EIO:
                continue  # it takes long, and each call has been met
            for n in itertools.count(1):
                calls = f"{n} and on" if many > 1 else n
                self.place = f"{self.operation} {calls}: {errno.errorcode.get(error, 'short')}"
                yield self._armed(n, error, many), many > 1
                self.points += 1
                if self.seen < n:
                    break
                self.fired += 1

    def _armed(self, n: int, error: int, times: int) -> Callable[[], None]:
        mask, root = OPERATIONS[self.operation], str(self.root).encode()
        return lambda: self._library.fault_arm(mask, n, error, times, root)

    def off(self) -> None:
        """No more faults; what was synced and how that went is looked at."""
        self.seen = self._library.fault_count()
        failed: set[str] = set()
        for line in self._library.fault_syncs().decode().splitlines():
            path, outcome = line.removesuffix(" (deleted)").rsplit(" ", 1)
            if "/tmp/" in path.removeprefix(str(self.root)):  # names there are never used twice
                self.check(path not in failed, f"fsync of {path} after one that failed")
            failed |= {path} if outcome == "1" else set()
        self._library.fault_arm(0, 0, 0, 0, b"")

    def check(self, right: bool, what: str) -> None:
        """Note what is not as it should be."""
        if not right:
            self.problems.append(f"{self.place}: {what}")

    async def same(self, tier: SSDTier, blocks: list[Block]) -> None:
        """All of these can be read, bit for bit."""
        for b in blocks:
            self.check(content(await tier.read(b.key)) == content(b), f"{b.key.hex()[:8]} does not come back")

    def settled(self, tier: SSDTier, spare: Sequence[bytes] = ()) -> None:
        """Each file has its entry (but those of `spare`), of its size, each entry its file and row; tmp/ is empty."""
        left = {key.hex() for key in spare}
        files = {p.name: p.stat().st_size for p in (self.root / "blobs").glob("*/*") if p.name[:64] not in left}
        entries = {tier._directory.blob_path(e.key, e.generation).name: e.file_bytes for e in tier.catalog}
        many, gone = len(files.keys() - entries.keys()), len(entries.keys() - files.keys())
        self.check(files == entries, f"{many} files too many, {gone} gone")
        self.check(set(keys(*tier.catalog)) <= set(keys(*rows(self.root))), "an entry without a row")
        self.check(not listing(self.root, "tmp"), "a file left in tmp/")
        self.check(not listing(self.root, "quarantine"), "what is whole was taken for damaged")
        tier._directory.empty_quarantine()  # said once
        tier.catalog.check_integrity()


def handles() -> int:
    """How many file handles this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def stores(faults: Faults, durability: Any) -> None:
    """Two blocks are stored and older ones removed, while a call fails; then the same and one more without a fault."""
    kept, heard, expected = chain(3), Recorder(), 3
    async with running(faults.root, heard, durability=durability) as tier:
        old = chain(2, seed=1)
        await spill(tier, *kept, *old)
        await faults.same(tier, kept)
        faults.settled(tier)
        expected, before = 5, handles()
        for seed, (arm, on_and_on) in enumerate(faults.each(1, FOR_EVER), 2):
            *new, last = chain(3, seed)
            heard.stored.clear(), heard.lost.clear()
            expected += 2
            arm()
            await spill(tier, *new)
            await tier.remove(keys(*reversed(old)))
            faults.off()
            faults.check(not len(tier.queue) and not tier.queue.nbytes, "the queue is not empty")
            told = sorted([*heard.stored, *heard.lost])
            faults.check(told == sorted(keys(*new)), f"told of {len(told)} blocks of 2")
            lost = sum(v for k, v in tier.counters.items() if k.startswith("lost_"))
            faults.check(tier.counters["blocks_written"] + lost == expected, "the counters do not add up")
            faults.check(set(heard.stored) == {k for k in keys(*new) if k in tier.catalog}, "told otherwise than it is")
            if not on_and_on:
                faults.settled(tier, spare=keys(*old))  # what could not be removed lies there until the next attempt
            await faults.same(tier, kept)
            new.append(last)
            expected += sum(k not in tier.catalog for k in keys(*new))
            await spill(tier, *new)
            faults.check(all(k in tier.catalog for k in keys(*new)), "not stored without a fault")
            await faults.same(tier, new)
            faults.settled(tier)
            faults.check(handles() == before, f"{handles()} handles, where {before} were open")
            old = new
        faults.place = "at the end"
        faults.check(not any(tier.counters[k] for k in DAMAGE), "a block was given up")
    async with running(faults.root) as tier:
        faults.settled(tier)
        await faults.same(tier, [*kept, *old])


async def reads(faults: Faults, durability: Any) -> None:
    """A block is read while a call fails: once, it is read again; for ever, it is a miss and stays."""
    kept = chain(3)
    async with running(faults.root, durability=durability) as tier:
        await spill(tier, *kept)
        await faults.same(tier, kept)
        faults.settled(tier)
        before, misses = handles(), 0
        for arm, on_and_on in faults.each(1, FOR_EVER):
            arm()
            found = await tier.read(kept[1].key)
            faults.off()
            if found or not on_and_on:
                faults.check(content(found) == content(kept[1]), "not read again, or wrong")
            misses += not found
            faults.check(tier.counters["read_failed"] == misses, "a miss that is not counted")
            faults.check(handles() == before, "a handle left open")
            await faults.same(tier, kept)
        faults.settled(tier)
        faults.check(bool(misses) == bool(faults.fired), "no miss, or more than there were faults")
        faults.check(not any(tier.counters[k] for k in DAMAGE), "a block was given up")


async def opens(faults: Faults, durability: Any) -> None:
    """The tier is opened and closed while a call fails: a clear error or a tier that works; nothing is deleted."""
    kept = chain(3)
    async with running(faults.root, durability=durability) as tier:
        await spill(tier, *kept)
    before = 0
    for arm, _ in faults.each(1, FOR_EVER):
        tier = None
        arm()
        try:
            tier = SSDTier(options(faults.root, durability=durability))
            await tier.start(Recorder())
            await tier.close()
        except TierError as e:
            faults.check("; " in str(e), f"no sentence that says what to do: {e}")
            if tier:
                tier.disown()
        except Exception as e:
            faults.check(False, f"{type(e).__name__}: {e}")
            if tier:
                tier.disown()
        faults.off()
        async with running(faults.root, durability=durability) as tier:
            await faults.same(tier, kept)
            faults.settled(tier)
        del tier
        before = before or handles()
        faults.check(handles() == before, f"{handles()} handles, where {before} were open")


class Stepper:
    """Awaits a coroutine as a task does, and cancels it at its await number `at`, counted from 0."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], at: int) -> None:
        self.coroutine, self.at, self.awaits = coroutine, at, 0

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self.coroutine.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                waiting: Any = steps.throw(thrown) if thrown else next(steps)
            except StopIteration as e:
                return e.value
            thrown = None
            if self.awaits == self.at:
                if waiting is not None:
                    waiting._asyncio_future_blocking = False
                    waiting.cancel()  # as `Task.cancel` does
                thrown = asyncio.CancelledError()
            else:
                try:
                    yield waiting
                except BaseException as e:
                    thrown = e
            self.awaits += 1


def whole(root: Path, tier: SSDTier) -> None:
    """Each file has its entry, each entry its file and its row; nothing lies in tmp/."""
    files = {p.name for p in (root / "blobs").glob("*/*")}
    assert files == {tier._directory.blob_path(e.key, e.generation).name for e in tier.catalog}
    assert set(keys(*tier.catalog)) == set(keys(*rows(root)))
    assert listing(root, "tmp") == []
    tier.catalog.check_integrity()


async def quiet(tier: SSDTier) -> None:
    """What a cancelled await had begun has come to its end."""
    async with asyncio.timeout(10):
        async with tier._store._index._lock:
            pass
        await asyncio.gather(*(tier._store.run(time.sleep, 0.01) for _ in range(2)))  # both writer threads


async def stepped(coroutine: Coroutine[Any, Any, object], at: int) -> bool:
    """Run with a cancellation at await `at`; whether it was cancelled."""

    async def body() -> None:
        await Stepper(coroutine, at)

    try:
        await asyncio.create_task(body())
    except asyncio.CancelledError:
        return True
    return False


def main() -> None:
    """What the tests run in a process of its own."""
    scenario, root, operation, durability = sys.argv[1:]
    faults = Faults(Path(root), operation)
    asyncio.run({"stores": stores, "reads": reads, "opens": opens}[scenario](faults, durability))
    print(json.dumps({"points": faults.points, "fired": faults.fired, "problems": faults.problems}))


if __name__ == "__main__":
    main()
