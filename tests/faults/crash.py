"""Processes that are killed, and an oracle that knows what must be on the SSD afterwards.

All of it runs in a helper: a process that has imported everything and has started no thread, so that it may fork. Each
fork either works on a cache directory until it is killed, or opens one after a kill and looks at it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ssd_tier import Block, Entry, SSDTier
from ssd_tier.index import read_only
from tests.blocks import block, content, listing, options, rows

Say = Callable[[str, Iterable[int]], None]
Work = Callable[[Say], Awaitable[object]]

FAMILY = 4  # blocks that follow one another
BLOCKS: list[Block] = []  # block n hangs on n - 1, or on nothing where n is a multiple of FAMILY
NUMBERS: dict[bytes, int] = {}
COUNTED = ("ready", "wrong", "reads", "served", "evicted", "temporary", "strays", "checked")  # by the number said
SHARES = 2  # processes at a time
CHILD_SECONDS = 60  # then it is no longer alive, but hangs
_RECORD = struct.Struct("<cI")


def make_blocks(count: int, nbytes: int) -> None:
    """The blocks that are stored here, the same in every process."""
    for n in range(len(BLOCKS), count):
        BLOCKS.append(block(n, BLOCKS[n - 1] if n % FAMILY else None, nbytes))
        NUMBERS[BLOCKS[n].key] = n


def family(number: int) -> range:
    """The numbers of the blocks that hang together with this one, the first one first."""
    first = number - number % FAMILY
    return range(first, first + FAMILY)


class Oracle:
    """What must be on the SSD and what may be, from what a process said before it was killed.

    "put": handed over. "stored": acknowledged. "lost": not written. "going": its removal has begun. "gone": its removal
    was acknowledged. "here" and "away": found so at an open. Everything is counted, too: `found`.
    """

    def __init__(self) -> None:
        self.sure: set[int] = set()
        self.possible: set[int] = set()  # with the sure ones
        self.found: Counter[str] = Counter()
        self.waiting: set[int] = set()  # in the queue of a process

    def copy(self) -> Oracle:
        """Another one that knows the same, and has counted nothing."""
        other = Oracle()
        other.sure, other.possible = set(self.sure), set(self.possible)
        return other

    def hear(self, what: str, number: int) -> None:
        """One thing that was said."""
        self.found[what] += number if what in COUNTED else 1
        if what == "put":
            self.waiting.add(number)
            self.possible.add(number)
        elif what in ("stored", "here"):
            self.waiting.discard(number)
            self.possible.add(number)
            self.sure.add(number)
        elif what == "lost":
            self.waiting.discard(number)
        elif what == "going":
            self.sure.discard(number)
        elif what in ("gone", "away"):
            self.sure.discard(number)
            if number not in self.waiting:  # it may have been put again
                self.possible.discard(number)


WORDS = ("put", "stored", "here", "lost", "going", "gone", "away", *COUNTED)


class Teller:
    """A listener that says what it hears. What the writer removed is gone for good when the writer stores the next."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.by_hand: set[bytes] = set()
        self.removed: set[int] = set()
        self._begun: set[bytes] = set()
        self._evicting: set[bytes] = set()

    def on_stored(self, entries: Sequence[Entry]) -> None:
        self.evicted()
        self.say("stored", [NUMBERS[e.key] for e in entries])

    def on_lost(self, blocks: Sequence[Block], reason: str) -> None:
        self.say("lost", [NUMBERS[b.key] for b in blocks])

    def on_removed(self, entries: Sequence[Entry]) -> None:
        numbers = [NUMBERS[e.key] for e in entries]
        self.removed.update(numbers)
        self.say("going", numbers)
        for key in (e.key for e in entries):
            if key in self.by_hand and key not in self._begun:
                self._begun.add(key)
            else:  # also where it was stored again meanwhile, and evicted
                self.by_hand.discard(key)
                self._evicting.add(key)

    def on_closed(self) -> None: ...

    def on_back(self) -> None:
        raise AssertionError("the disk was never away")

    def evicted(self) -> None:
        """All that was removed, but not by hand, is gone."""
        self.say("gone", [NUMBERS[k] for k in self._evicting])
        self._evicting.clear()

    async def remove(self, tier: SSDTier, numbers: Iterable[int]) -> None:
        """Remove blocks that are there, and say so when it is done. One caller at a time."""
        keys = [k for n in numbers if (k := BLOCKS[n].key) in tier.catalog]
        self.by_hand |= set(keys)
        await tier.remove(keys)
        self.say("gone", [NUMBERS[k] for k in keys if k in self.by_hand])
        self.by_hand.clear()
        self._begun.clear()


class Child:
    """A fork that works on an event loop of its own, and is heard through a pipe."""

    def __init__(self, work: Work) -> None:
        self._mine, theirs = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.alarm(CHILD_SECONDS)
                os.close(self._mine)

                def say(what: str, numbers: Iterable[int]) -> None:
                    letter = bytes([WORDS.index(what)])
                    for n in numbers:  # each of them whole: it is shorter than what a pipe takes at once
                        os.write(theirs, _RECORD.pack(letter, n))

                asyncio.new_event_loop().run_until_complete(work(say))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(theirs)

    def hear(self, oracle: Oracle, until: str = "") -> bool:
        """Pass on what is said until this word, or until its end; whether the word came."""
        while record := os.read(self._mine, _RECORD.size):
            letter, number = _RECORD.unpack(record)
            what = WORDS[letter[0]]
            oracle.hear(what, number)
            if what == until:
                return True
        return False

    def end(self, oracle: Oracle) -> int:
        """Hear the rest; its exit status, or minus the signal that ended it."""
        self.hear(oracle)
        os.close(self._mine)
        oracle.waiting.clear()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def in_helpers(function: Callable[..., Any], folder: Path, *arguments: Any, seconds: float = 570) -> list[Any]:
    """Call a function in as many fresh processes as there are `SHARES`, each with a folder and the number of its share;
    what they returned. AssertionError with what one printed, where it failed.
    """
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    def call(share: int) -> Any:
        own = folder / f"share-{share}"
        own.mkdir()
        given = json.dumps([str(own), share, *arguments])
        command = [sys.executable, "-m", "tests.faults.crash", function.__module__, function.__name__, given]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(SHARES) as pool:
        return list(pool.map(call, range(SHARES)))


async def opened(root: Path, oracle: Oracle, say: Say, *, deep: bool = False, **changes: Any) -> Any:
    """Open a directory after a kill; the running tier and its teller, once everything is found to be as it must be; the
    index as SQLite finds it, too, where `deep`."""
    say("temporary", [len(listing(root, "tmp"))])
    tier = SSDTier(options(root, **changes))
    say("strays", [tier.counters["files_adopted"] + tier.counters["lost_missing"]])
    teller = Teller(say)
    await tier.start(teller)
    teller.evicted()
    assert not listing(root, "tmp"), "a temporary file is left"
    found = rows(root)
    named = sorted(f"{e.key.hex()}-{e.generation:016x}.safetensors" for e in found)
    assert listing(root, "blobs") == named, "files and rows differ"
    assert {e.key for e in found} == {e.key for e in tier.catalog}, "rows and catalog differ"
    here = {NUMBERS[e.key] for e in found}
    assert here <= oracle.possible, f"came back: {sorted(here - oracle.possible)}"
    lost = oracle.sure - here - teller.removed
    assert not lost, f"lost: {sorted(lost)}"
    for n in here:
        say("served", [1])
        got = await tier.read(BLOCKS[n].key)
        assert content(got) == content(BLOCKS[n]), f"wrong bytes for {n}: {got}"
    if deep:
        with read_only(root / "index.sqlite") as reader:
            assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    say("here", here)
    say("away", oracle.possible - here)
    say("checked", [1])
    return tier, teller


def main() -> None:
    """Run one function of one module, and print what it returns."""
    module, function, arguments = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))))


if __name__ == "__main__":
    importlib.import_module("tests.faults.crash").main()  # everybody else's module, not a second one
