"""What other threads feel while state is brought back from the SSD."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from bench.result import Options, Result, config
from bench.state import Shapes, realistic, tokens_for
from tiered_cache import TieredCache

TICK = 0.001  # seconds that a watch sleeps at a time
LATE = 0.002  # seconds; what wakes up less late is not noted

Pause = tuple[float, float]  # from when a watch should have woken up to when it did, by `time.monotonic`


def watch(note: Callable[[float, float], object], ended: Callable[[], bool]) -> None:
    """Sleep a millisecond at a time, and note how much later it was."""
    last = time.monotonic()
    while not ended():
        time.sleep(TICK)
        now = time.monotonic()
        if now - last - TICK > LATE:
            note(last + TICK, now)
        last = now


def child(name: str) -> None:
    """A watch in a process of its own, until its parent has gone."""
    parent = os.getppid()
    with open(name, "w", buffering=1) as file:
        watch(lambda a, b: file.write(f"{a} {b}\n"), lambda: os.getppid() != parent)


class Watches:
    """One watch on a thread of this process, one in a process that shares nothing with it but the machine.

    What both feel is the machine's: a core that was taken away. What only ours feels is the cache's.
    """

    def __init__(self, file: Path) -> None:
        """`file` is where the other process tells."""
        file.touch()
        self._file = file
        self._read = 0  # lines
        self._ours: list[Pause] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=watch, args=(self._note, self._ended.is_set), daemon=True)
        code = "import sys; from bench.measure.pauses import child; child(sys.argv[1])"
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen([sys.executable, "-c", code, str(file)], cwd=root)
        self._thread.start()
        time.sleep(3)  # until the other one runs

    def _note(self, start: float, end: float) -> None:
        self._ours.append((start, end))

    def take(self) -> tuple[float, float]:
        """The longest pause since the last call, and the longest after taking off what the other watch felt at the
        same time; in milliseconds."""
        ours, self._ours = self._ours, []
        time.sleep(0.1)  # until the other one has told
        lines = self._file.read_text().splitlines()[self._read :]
        self._read += len(lines)
        theirs = [(float(a), float(b)) for a, b in map(str.split, lines)]
        own = [b - a - sum(max(0.0, min(b, d) - max(a, c)) for c, d in theirs) for a, b in ours]
        return max((b - a for a, b in ours), default=0.0) * 1e3, max(own, default=0.0) * 1e3

    def end(self) -> None:
        """Stop both."""
        self._ended.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()


def pauses(folder: Path, options: Options) -> list[Result]:
    """The longest pause of another Python thread while 1 GB (--quick: 256 MB) is promoted: while the blocks are read,
    and while the model's thread joins them to a state. The medians of five promotions; beside them, an idle second."""
    tokens = tokens_for(2560 if options.quick else 10_240, 1)  # of 96 KiB
    with TieredCache.open(config(folder), model=Shapes()) as cache:
        assert cache.store(tokens, realistic(len(tokens)))
    longest: dict[str, list[tuple[float, float]]] = {"idle": [], "reading": [], "joining": []}
    with TieredCache.open(config(folder), model=Shapes()) as cache:
        watches = Watches(folder / "pauses")
        for _ in range(5):
            cache.ram.clear()
            time.sleep(0.1)
            watches.take()
            time.sleep(1)
            longest["idle"].append(watches.take())
            promotion = cache.promote(tokens)
            assert promotion
            ready = threading.Event()
            promotion.add_done_callback(partial(_tell, ready))
            assert ready.wait(120)
            longest["reading"].append(watches.take())
            state, _ = promotion.result(0)
            longest["joining"].append(watches.take())
            assert state
            del state, promotion
        watches.end()
    figures = {f"{name}_ms": median(own for _, own in found) for name, found in longest.items()}
    figures |= {f"{name}_with_machine_ms": median(whole for whole, _ in found) for name, found in longest.items()}
    worst = max(figures["reading_ms"], figures["joining_ms"])
    value = (
        f"{worst:.1f} ms ({figures['reading_ms']:.1f} while reading, {figures['joining_ms']:.1f} while joining, "
        f"{figures['idle_ms']:.1f} while idle), beyond what a thread of another process feels at the same time; with "
        f"that, {figures['reading_with_machine_ms']:.1f}"
    )
    what = f"longest pause of another Python thread while {len(tokens) * 98304 / 1e9:.2f} GB is promoted"
    return [Result("pauses", what, value, "<= 10 ms", worst <= 10, figures)]


def _tell(ready: threading.Event, _: object) -> None:
    ready.set()
