"""Scripts of what is done to a cache directory, and the points in them at which a process is killed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ssd_tier import SSDTier
from ssd_tier.claim import BLOB_NAME, TEMPORARY
from ssd_tier.files import Directory
from tests.blocks import options
from tests.faults.crash import CHILD_SECONDS, Child, Oracle, Say, Teller, Work, opened

HALF = "half a write"


class Point(NamedTuple):
    """An operation on a kind of file, for the n-th time in a script."""

    name: str
    time: int


def point_name(operation: str, file: str) -> str:
    """What a call of the hook is counted as."""
    kinds = ((TEMPORARY, "aside"), (BLOB_NAME, "blob"), (re.compile("[0-9a-f]{2}|blobs"), "folder"))
    kind = next((kind for pattern, kind in kinds if pattern.fullmatch(file)), file.replace("index.sqlite", "index"))
    return f"{operation} {kind}"


def die_at(point: Point) -> None:
    """Have this process killed when it comes to that point."""
    calls = itertools.count(1)
    write = os.writev

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(CHILD_SECONDS)  # it may take a moment

    def hook(operation: str, file: str) -> None:
        if point_name(operation, file) == point.name and next(calls) == point.time:
            die()

    def half(fd: int, parts: Sequence[Any]) -> int:
        if next(calls) == point.time:
            data = b"".join(parts)
            os.write(fd, data[: len(data) // 2])
            die()
        return write(fd, parts)

    if point.name == HALF:
        os.writev = half
    else:
        Directory.hook = staticmethod(hook)


@dataclass
class Script:
    """What is done to a directory that was prepared: `base`, with what `oracle` knows of it.

    `act`: what is done once it is open; `changes`: the tier's options.
    """

    base: Path
    oracle: Oracle
    act: Callable[[SSDTier, Teller], Awaitable[object]] | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    async def play(self, root: Path, say: Say) -> None:
        """Open the directory and act."""
        tier = SSDTier(options(root, **self.changes))
        teller = Teller(say)
        await tier.start(teller)
        teller.evicted()
        if self.act:
            await self.act(tier, teller)

    def points(self, root: Path) -> list[Point]:
        """All points that it passes when nobody kills it, and the middle of each write."""
        names: list[str] = []

        async def work(say: Say) -> None:
            Directory.hook = staticmethod(lambda operation, file: names.append(point_name(operation, file)))
            await self.play(root, say)
            root.with_name("points").write_text(json.dumps(names))

        self.run(work, root)
        times = Counter(json.loads(root.with_name("points").read_text()))
        times[HALF] = times["write aside"]
        return [Point(name, n) for name in sorted(times) for n in range(1, times[name] + 1)]

    def killed_at(self, point: Point, root: Path, *, deep: bool = False) -> Counter[str]:
        """Die at a point, and open again; what was found then."""

        async def work(say: Say) -> None:
            die_at(point)
            await self.play(root, say)

        return self.run(work, root, -signal.SIGKILL, deep=deep)

    def run(self, work: Work, root: Path, end: int = 0, *, deep: bool = False) -> Counter[str]:
        """Work that comes to this end on a copy of the directory, then a look at what is left; what was found."""
        shutil.copytree(self.base, root)
        oracle = self.oracle.copy()
        assert (status := Child(work).end(oracle)) == end, f"ended with {status}"
        after = oracle.copy()
        look = Child(lambda say: opened(root, oracle, say, deep=deep, **self.changes))
        assert look.end(after) == 0, "the next open is not clean"
        shutil.rmtree(root)
        return after.found
