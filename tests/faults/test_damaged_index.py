"""An index that is damaged, cut, lost or somebody else's: blocks come back as they were or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ssd_tier import Block, Entry, SSDTier, breaker
from ssd_tier.errors import BlobDamaged, IndexUnusable
from ssd_tier.files import Directory
from ssd_tier.reader import read_block
from ssd_tier.recovery import recover
from tests.blocks import Recorder, blob, block, chain, content, keys, listing, options, rows, running, spill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

FLIPS = int(os.environ.get("FLIPS", "4000"))  # FLIPS=10000 for a longer look
FULL = 300  # of these through a whole tier: open, read all, close
PARTS = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")


class Template(NamedTuple):
    """A directory as a killed owner left it: half of the rows in the index, half in its journal."""

    root: Path
    blocks: list[Block]
    index: dict[str, bytes]  # the index's three files
    blobs: dict[str, bytes]  # by path
    rows: dict[bytes, tuple[object, ...]]


def _fields(e: Entry) -> tuple[object, ...]:
    return e.key, e.namespace, e.parent, e.generation, e.start, e.ids, e.file_bytes, e.raw_bytes


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory where there is one, as nothing here depends on a disk but its speed."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
async def template(place: Path) -> Template:
    """Forty blocks in ten chains."""
    root, blocks = place / "cache", [b for seed in range(10) for b in chain(4, seed)]
    async with running(root) as tier:
        await spill(tier, *blocks[:20])
    async with running(root) as tier:
        for n in range(20, 40, 4):
            await spill(tier, *blocks[n : n + 4])
        index = {name: (root / name).read_bytes() for name in PARTS}
        blobs = {str(p): p.read_bytes() for p in root.glob("blobs/*/*")}
        found = {e.key: _fields(e) for e in rows(root)}
    assert len(found) == len(blobs) == 40
    assert all(index.values())
    made = Template(root, blocks, index, blobs, found)
    restore(made, index)
    return made


def restore(t: Template, index: dict[str, bytes]) -> None:
    """The directory again, with an index of these files."""
    for name in PARTS:
        path = t.root / name
        if path.is_dir():
            path.rmdir()
        elif name in index:
            path.write_bytes(index[name])
        else:
            path.unlink(missing_ok=True)
    for name in os.listdir(t.root / "quarantine"):
        os.unlink(t.root / "quarantine" / name)
    for path, data in t.blobs.items():
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).write_bytes(data)


def flipped(index: dict[str, bytes], rng: random.Random, flips: int) -> dict[str, bytes]:
    """The same files with some bits flipped."""
    files = {name: bytearray(data) for name, data in index.items()}
    for _ in range(flips):
        file = files[rng.choice(list(files))]
        i = rng.choice([rng.randrange(len(file)), rng.randrange(min(len(file), 200))])
        file[i] ^= 1 << rng.randrange(8)
    return {name: bytes(file) for name, file in files.items()}


def kept(t: Template) -> int:
    """How many of the blobs are still in their place."""
    return sum(map(os.path.exists, t.blobs))


def open_and_check(t: Template) -> str:
    """Open, and hold what is found against what was stored; what came of it."""
    originals = {b.key: b for b in t.blocks}
    directory = Directory(t.root, quarantine_bytes=1 << 20)
    try:
        found = recover(directory)
    except IndexUnusable:
        assert kept(t) == 40, "an index that cannot be used must cost no blob"
        return "unusable"
    for e in found.contents.entries:
        if _fields(e) != t.rows[e.key]:  # a row that says what it said leads to a file that is what it was
            try:
                assert content(read_block(directory, e)) == content(originals[e.key])
            except (BlobDamaged, FileNotFoundError):
                continue
    return "rebuilt" if found.rebuilt else f"{len(found.contents.entries) // 10 * 10} rows or more"


def test_thousands_of_damaged_indexes_open_or_say_why_not_and_serve_nothing_wrong(template):
    rng, outcomes, left, slowest = random.Random(20), Counter(), Counter(), 0.0
    for case in range(FLIPS):
        restore(template, flipped(template.index, rng, 1 if case % 2 else rng.randrange(2, 20)))
        start = time.monotonic()
        outcomes[open_and_check(template)] += 1
        slowest = max(slowest, time.monotonic() - start)
        left[kept(template)] += 1
    print(dict(outcomes), "blobs left:", dict(sorted(left.items())), f"slowest {slowest:.3f} s")
    assert slowest < 5
    assert min(outcomes["rebuilt"], 5 * outcomes["unusable"]) > FLIPS / 50, "the flips must hurt"
    assert min(left) >= 36, f"an index that is damaged must not cost the blobs: {dict(sorted(left.items()))}"


async def test_a_whole_tier_runs_on_a_damaged_index_and_serves_nothing_wrong(template):
    rng, outcomes, originals = random.Random(21), Counter(), {b.key: content(b) for b in template.blocks}
    new = chain(2, seed=77)
    for case in range(FULL):
        restore(template, flipped(template.index, rng, 1 if case % 2 else rng.randrange(2, 20)))
        try:
            async with asyncio.timeout(5), running(template.root, heard := Recorder()) as tier:
                for key, wanted in originals.items():
                    assert content(await tier.read(key)) in (None, wanted)
                here = len(tier.catalog)
                await spill(tier, *new)
                assert set(heard.stored) == set(keys(*new)), heard.lost
                assert [content(await tier.read(b.key)) for b in new] == [content(b) for b in new]
            async with asyncio.timeout(5), running(template.root) as tier:  # what is there now stays
                assert len(tier.catalog) == here + 2
                assert [content(await tier.read(b.key)) for b in new] == [content(b) for b in new]
                await tier.remove(keys(*new))
            outcomes["opened"] += 1
        except IndexUnusable:
            assert kept(template) == 40
            outcomes["unusable"] += 1
    print(dict(outcomes))
    assert outcomes["opened"] > FULL * 0.9


def test_an_index_and_a_journal_cut_at_every_page(template):
    frame, outcomes, left = 4096 + 24, Counter(), Counter()
    cuts = [("index.sqlite", n) for n in range(0, len(template.index["index.sqlite"]), 4096)]
    cuts += [("index.sqlite-wal", n + 32) for n in range(-32, len(template.index["index.sqlite-wal"]), frame)]
    cuts += [("index.sqlite-shm", n) for n in range(0, 32768, 4096)]
    for name, at in cuts:
        for n in (at, at + 1, at + 100, at + 2000):
            restore(template, template.index | {name: template.index[name][: max(0, n)]})
            outcomes[open_and_check(template)] += 1
            left[kept(template)] += 1
    print(len(cuts) * 4, dict(outcomes), "blobs left:", dict(sorted(left.items())))
    assert outcomes["unusable"] == 0
    assert min(left) == 40, dict(sorted(left.items()))


@pytest.mark.parametrize("gone", [PARTS[:1], PARTS[:2], PARTS, PARTS[::2], PARTS[1:2], PARTS[2:], PARTS[1:]])
def test_an_index_that_is_lost_in_part_or_whole_is_made_anew_from_the_blobs(template, gone):
    restore(template, {k: v for k, v in template.index.items() if k not in gone})
    found = recover(Directory(template.root, quarantine_bytes=1 << 20))
    assert kept(template) == 40
    assert set(keys(*found.contents.entries)) == set(keys(*template.blocks))


@pytest.mark.parametrize("parts", [PARTS[:1], PARTS])
@pytest.mark.parametrize("other", ["empty", "text", "noise", "zeros"])
def test_a_file_that_is_no_index_is_set_aside_and_the_blobs_make_a_new_one(template, other, parts):
    noise = random.Random(3).randbytes(40_960)
    what = {"empty": b"", "text": b"dear diary\n" * 900, "noise": noise, "zeros": bytes(8192)}
    restore(template, dict.fromkeys(parts, what[other]))
    assert open_and_check(template) == "rebuilt"
    assert kept(template) == 40
    assert {e.key for e in rows(template.root)} == set(keys(*template.blocks))
    if other in ("text", "noise"):
        assert what[other] in [p.read_bytes() for p in (template.root / "quarantine").iterdir()]


@pytest.mark.parametrize("other", ["directory", "another program's", "newer", "newer, with a journal"])
def test_what_is_somebody_elses_is_left_as_it_is(template, other):
    index = template.root / "index.sqlite"
    restore(template, template.index if other == "newer, with a journal" else {})
    if other == "directory":
        index.mkdir()
    else:
        with contextlib.closing(sqlite3.connect(index)) as c:
            if other == "another program's":
                c.execute("CREATE TABLE songs (title TEXT)")
            else:
                c.execute("PRAGMA application_id = 0x544B5631")
                c.execute("PRAGMA user_version = 99")
            c.commit()
    before = index.read_bytes() if index.is_file() else None
    for _ in range(2):
        with pytest.raises(IndexUnusable):
            SSDTier(options(template.root))
        assert (index.read_bytes() if index.is_file() else None) == before
        assert (kept(template), listing(template.root, "quarantine")) == (40, [])


def test_ten_thousand_blobs_make_an_index_in_seconds(place):
    root, rng, family = place / "cache", random.Random(8), {}
    Directory.own(root).close()
    for seed in range(2_500):
        above = None
        for depth in range(4):
            above = block(10 * seed + depth, above, nbytes=256)
            family[above.key] = above
    ages = {}
    for key, b in family.items():
        folder = root / "blobs" / key.hex()[:2]
        folder.mkdir(exist_ok=True)
        path = folder / f"{key.hex()}-{rng.getrandbits(63):016x}.safetensors"
        path.write_bytes(blob(b))
        ages[key] = rng.randrange(10**9, 17 * 10**8)
        os.utime(path, (ages[key], ages[key]))
    start = time.monotonic()
    tier = SSDTier(options(root))
    took = time.monotonic() - start
    tier.disown()
    print(f"10,000 blobs in {took:.2f} s")
    assert took < 10
    found = rows(root)
    place_of = {e.key: n for n, e in enumerate(found)}
    assert set(place_of) == set(family)
    assert all(place_of[e.key] < place_of[e.parent] for e in found if e.parent in place_of)
    used = dict(ages)
    for b in reversed(family.values()):  # children come after their parents in it
        used[b.parent] = max(used.get(b.parent, 0), used[b.key])
    assert [used[e.key] for e in found] == sorted(used[k] for k in family)
    directory = Directory(root)
    for e in rng.sample(found, 500):
        assert content(read_block(directory, e)) == content(family[e.key])


def _overwrite(path: Path, start: float, stop: float, data: Callable[[int], bytes]) -> None:
    """Garbage from one share of the file to another, in place."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(int(size * start))
        file.write(data(int(size * (stop - start))))


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("harm", ["index", "index's middle", "journal", "journal's middle", "both", "zeros", "lost"])
async def test_a_tier_goes_on_when_its_index_is_destroyed_under_it(place, monkeypatch, harm, remembers):
    """Without the pages that SQLite remembers the damage is met at once; with them only the next open meets it."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.01)
    root, index = place / "cache", place / "cache" / "index.sqlite"
    journal = Path(f"{index}-wal")
    blocks = {b.key: b for seed in range(60) for b in chain(2, seed)}
    chains = [keys(*chain(2, seed)) for seed in range(60)]
    async with running(root) as tier:
        await spill(tier, *(blocks[k] for c in chains[:10] for k in c))
    async with running(root, heard := Recorder()) as tier:
        heard.stored = keys(*tier.catalog)
        if not remembers:
            await tier._store._index._connection.execute("PRAGMA cache_size = 0")
        for c in chains[10:20]:
            await spill(tier, *(blocks[k] for k in c))
        if harm == "lost":
            for path in (index, journal):
                os.unlink(path)
        files = [p for p in (index, journal) if harm.startswith({index: "index", journal: "journal"}[p])]
        span = (0.3, 0.7) if "middle" in harm else (0, 1)
        for path in files or ([index, journal] if harm != "lost" else []):
            _overwrite(path, *span, bytes if harm == "zeros" else os.urandom)
        for c in chains[20:]:
            await spill(tier, *(blocks[k] for k in c))
            await asyncio.sleep(0.005)
        assert not tier.writer.breaker.open
        assert set(chains[-1]) <= set(heard.stored), "it must end with the tier working again"
        here = set(heard.stored) - set(heard.removed)
        assert [k for k in here if content(await tier.read(k)) != content(blocks[k])] == []
    assert here >= set(chains[0] + chains[15])
    async with running(root) as tier:
        back = [k for k in here if content(await tier.read(k)) == content(blocks[k])]
        print(f"{harm}: {len(here)} stored, {len(back)} back, {len(heard.lost)} not stored")
        assert set(back) == here
