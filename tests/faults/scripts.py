"""Everything that is done to a disk while it is killed at each point: directories in every state, and acts on them."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from ssd_tier import SSDTier
from ssd_tier.budget import INDEX_SLACK
from ssd_tier.index import read_contents, read_only, statements
from ssd_tier.migrations import APPLICATION_ID, scripts
from tests.blocks import content, on_disk, options
from tests.faults.crash import BLOCKS, Child, Oracle, Say, Teller
from tests.faults.points import Script


async def flushed(tier: SSDTier) -> None:
    """Wait until nothing is queued."""
    while len(tier.queue):
        tier.writer.progress.clear()
        await tier.writer.progress.wait()


def put(tier: SSDTier, say: Say, *numbers: int) -> None:
    """Hand over some blocks."""
    for n in numbers:
        say("put", [n])
        if not tier.put(BLOCKS[n]):
            say("lost", [n])


def stored(base: Path, count: int, *, close: bool = True) -> Oracle:
    """Make a directory that holds so many blocks."""
    oracle = Oracle()

    async def work(say: Say) -> None:
        tier = SSDTier(options(base))
        await tier.start(Teller(say))
        put(tier, say, *range(count))
        await flushed(tier)
        if close:
            await tier.close()

    assert Child(work).end(oracle) == 0
    assert oracle.sure == set(range(count))
    return oracle


def file_of(base: Path, number: int) -> Path:
    """Where a block lies."""
    return next((base / "blobs").rglob(f"{BLOCKS[number].key.hex()}-*"))


def make_version_1(base: Path) -> None:
    """Put an index of the first version in the place of the newest."""
    with read_only(base / "index.sqlite") as reader:
        found = read_contents(reader)
    (base / "index.sqlite").unlink()
    with closing(sqlite3.connect(base / "index.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(scripts()[0])
        for statement, rows in statements(added=found.entries, models=found.models, layers=found.layers):
            if "INTO block " in statement:
                statement = statement.replace(", used, keep)", ")").replace("?, ?, ?)", "?)")
                rows = [row[:-2] for row in rows]
            connection.executemany(statement, rows)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")


def make_mess(base: Path, oracle: Oracle) -> None:
    """Temporary files, files without rows, rows without files, and a file that was cut short."""
    for name in ("1-0", "1-1", "22-7"):
        (base / "tmp" / name).write_bytes(b"half of a blob")
    for number in (0, 5):
        file = file_of(base, number)
        shutil.copy(file, file.with_name(f"{BLOCKS[number].key.hex()}-{1:016x}.safetensors"))
    for number in (3, 7):
        file_of(base, number).unlink()
    file_of(base, 11).write_bytes(b"short")
    for number in (3, 7, 11):
        oracle.hear("gone", number)


async def puts(tier: SSDTier, teller: Teller) -> None:
    """Seven blocks, in two batches; the first ones go on where others end."""
    put(tier, teller.say, *range(8, 12))
    await flushed(tier)
    put(tier, teller.say, *range(12, 15))
    await flushed(tier)


async def removes(tier: SSDTier, teller: Teller) -> None:
    """By hand, and by the writer."""
    await teller.remove(tier, [3])
    await teller.remove(tier, [7, 6])
    tier.discard([BLOCKS[n].key for n in (11, 10)])
    put(tier, teller.say, 3)  # what was removed may come again, and all discards come before it
    await flushed(tier)


async def mends(tier: SSDTier, teller: Teller) -> None:
    """A table is gone; the first batch finds that out, and the second has the index made anew."""
    with closing(sqlite3.connect(tier.options.path / "index.sqlite", isolation_level=None)) as other:
        other.execute("DROP TABLE block_tokens")
    await puts(tier, teller)


async def reads(tier: SSDTier, teller: Teller) -> None:
    """Everything, and the order of use is saved."""
    for n in range(8):
        assert content(await tier.read(BLOCKS[n].key)) == content(BLOCKS[n])
        tier.touch([BLOCKS[n].key], hit=True)
    await tier.save()


def make_scripts(folder: Path) -> dict[str, Script]:
    """Everything that is done to a disk, by name."""
    made: dict[str, Script] = {}

    def add(name: str, count: int, act: Any = None, *, close: bool = True, **more: Any) -> Script:
        made[name] = Script(folder / name, stored(folder / name, count, close=close), act, **more)
        return made[name]

    add("write", 8, puts)
    add("write synced", 8, puts, changes={"durability": "full"})
    add("remove", 12, removes)
    add("read", 8, reads)
    add("mend", 8, mends)
    for name, act in (("evict", puts), ("open with less", None)):
        script = add(name, 8, act, close=False)
        room = on_disk(script.base) - (on_disk(script.base / "blobs") // 2 if act is None else 0)
        script.changes = {"budget": INDEX_SLACK + room}
    make_version_1(add("migrate", 8).base)
    script = add("recover", 12)
    make_mess(script.base, script.oracle)
    script = add("rebuild", 8)
    (script.base / "index.sqlite").unlink()
    alien = script.base / "blobs" / "00" / f"{bytes(32).hex()}-{5:016x}.safetensors"  # in another's place: set aside
    alien.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(file_of(script.base, 2), alien)
    script = add("set aside", 8, close=False)
    with open(script.base / "index.sqlite", "r+b") as file:
        file.write(bytes(100))
    return made
