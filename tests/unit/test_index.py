"""The index: opened, migrated or refused and left alone; written all or nothing; read beside its writer."""

import asyncio
import hashlib
import os
import re
import sqlite3
import threading
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest

from ssd_tier import IndexUnusable, index, migrations
from ssd_tier.errors import IndexDamaged
from ssd_tier.index import Contents, Index, prepare, read_contents, read_only
from ssd_tier.migrations import APPLICATION_ID, scripts
from tests import blocks
from tests.blocks import chain

FROZEN = {
    "0001_initial.sql": "26f96baded7967ae8d12a5f2282c7286efc6061f46e4818bb8cc71ca104b9ced",
    "0002_use_and_writes.sql": "ffeff0193b241290d6a50ff0c03bb4e8d1a5bb7836988b9852c0b6f49d01359b",
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index.sqlite"


@asynccontextmanager
async def opened(path):
    prepare(path)
    index = await Index.open(path, "cache")
    try:
        yield index
    finally:
        await index.close()


def run(path, *statements):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return [connection.execute(s).fetchall() for s in statements]


def dump(path):
    with read_only(path) as connection:
        return sorted(connection.iterdump())


def schema(path):
    return run(path, "PRAGMA user_version", "PRAGMA application_id", "SELECT * FROM sqlite_schema ORDER BY name")


def refusal(call, path, kind=IndexUnusable):
    """The sentence that a user gets, without the path; the folder is as it was before."""
    files = [{p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}]
    with pytest.raises(kind, match=rf"^{path} [^\n]+$") as caught:
        call(path)
    assert files == [{p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}]
    return str(caught.value).removeprefix(f"{path} ")


def test_migrations_that_are_out_never_change():
    found = Path(__file__).parents[2].glob("migrations/*.sql")
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in found} == FROZEN, (
        "a migration runs once in the life of an index: where it ran already, a change to it never arrives, and two "
        "indexes of one version differ. Undo the change; add a migration with the next number, and its SHA-256 here"
    )


@pytest.mark.parametrize("empty_file", [False, True])
async def test_a_fresh_index_is_made_and_opens_again_with_its_rows(path, empty_file):
    if empty_file:
        path.touch()
    assert prepare(path) == Contents()
    first = schema(path)
    assert first[:2] == [[(len(FROZEN),)], [(APPLICATION_ID,)]]
    async with opened(path) as index:
        await index.apply(added=[blocks.entry(chain(1)[0])])
    assert [e.key for e in prepare(path).entries] == [chain(1)[0].key]
    assert schema(path) == first
    assert run(path, "PRAGMA journal_mode") == [[("wal",)]]


@pytest.mark.parametrize(("make", "told"), [
    (lambda p: (prepare(p), run(p, "PRAGMA user_version = 99")), "has schema version 99, and this version of "
     f"tiered-cache knows up to {len(FROZEN)}; install a newer tiered-cache or"),
    (lambda p: run(p, "PRAGMA application_id = 7"), "is another program's database; move it away or"),
    (lambda p: run(p, f"PRAGMA application_id = {APPLICATION_ID + 1}", "CREATE TABLE block (key)"), "is another prog"),
    (lambda p: run(p, "CREATE TABLE note (text)", "INSERT INTO note VALUES ('mine')"), "is another program's database"),
    (lambda p: p.mkdir(), "is not a regular file; move it away or"),
    (lambda p: os.mkfifo(p), "is not a regular file; move it away or"),
    (lambda p: p.symlink_to("elsewhere"), "is not a regular file; move it away or")])
def test_what_is_no_index_of_ours_is_told_and_left_as_it_is(path, make, told):
    make(path)
    assert re.fullmatch(re.escape(told) + ".*choose another ssd.path", refusal(prepare, path))


@pytest.mark.parametrize("damage", [
    lambda whole: whole[: len(whole) // 2],
    lambda whole: whole[:4096] + b"\xff" * (len(whole) - 4096),
    lambda _: b"to do: buy milk\n",
    lambda _: b"buy milk\n" * 9999])
def test_a_damaged_index_is_told_and_left_as_it_is(path, damage):
    prepare(path)
    path.write_bytes(damage(path.read_bytes()))
    told = refusal(prepare, path, IndexDamaged)
    assert re.fullmatch(r"is damaged \((database disk image is malformed|file is not a database)\); it is made anew "
                        "when the program that uses it starts, or by: tiered-cache rebuild-index", told)


@pytest.mark.parametrize("have", [0, 1])
async def test_a_migration_that_fails_half_way_changes_nothing(path, monkeypatch, have):
    if have:
        async with opened(path) as index_:
            await index_.apply(added=[blocks.entry(b) for b in chain(2)])
    run(path, "PRAGMA journal_mode = WAL")
    before = schema(path)
    steps = [*scripts(), "CREATE TABLE extra (x); -- ;\nUPDATE block SET hits = 9;\nINSERT INTO nowhere VALUES (1);"]
    for module in (index, migrations):
        monkeypatch.setattr(module, "scripts", lambda: steps)
    assert "(no such table: nowhere)" in refusal(prepare, path)
    assert schema(path) == before
    steps[-1] = "CREATE TABLE extra (x);\nUPDATE block SET hits = hits + 5;"
    for _ in range(2):  # a migration runs once
        assert [e.hits for e in prepare(path).entries] == [5] * 2 * have
        assert schema(path)[0] == [(len(steps),)]


async def test_a_change_is_made_in_whole_or_not_at_all(path):
    a, b, c, d = (blocks.entry(b) for b in chain(4))
    async with opened(path) as index:
        await index.apply(added=[a, b], models={a.namespace: "tiny"}, counters={"n": 1})
        before = dump(path)
        a.hits, d.raw_bytes = 7, 0
        with pytest.raises(sqlite3.IntegrityError):  # the last row cannot be
            await index.apply(added=[c, d], removed=[a.key], touched=[a], models={c.key: "x"}, counters={"n": 1})
        assert dump(path) == before
        await index.apply(added=[c], removed=[a.key], counters={"n": 1, "m": 5})
        with read_only(path) as reader:
            found = read_contents(reader)
            assert {e.key for e in found.entries} == {b.key, c.key}
            assert (found.counters, found.models) == ({"n": 2, "m": 5}, {a.namespace: "tiny"})


async def test_a_cancelled_change_does_not_stand_in_the_way_of_the_next(path):
    async with opened(path) as index:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # the change waits for its end
            change = asyncio.create_task(index.apply(counters={"n": 1}))
            await asyncio.sleep(0.02)
            change.cancel()
        with suppress(asyncio.CancelledError):
            await change
        await index.apply(counters={"m": 1})


async def test_everything_comes_back_in_the_order_of_use(path):
    entries = [blocks.entry(b, seq=i, hits=i, created=9, generation=2**63 - 1 - i) for i, b in enumerate(chain(5), 1)]
    async with opened(path) as index:
        await index.apply(added=entries)
        for seq, i in enumerate([3, 0, 4], 10):
            entries[i].seq = seq
        await index.apply(touched=[entries[i] for i in (3, 0, 4)])
    for found, i in zip(prepare(path).entries, [1, 2, 3, 0, 4], strict=True):
        assert {n: getattr(found, n) for n in found.__slots__} == {n: getattr(entries[i], n) for n in found.__slots__}


async def test_no_thread_outlives_the_connection(path):
    before = set(threading.enumerate())
    async with opened(path):
        (thread,) = set(threading.enumerate()) - before
    thread.join(2)
    assert not thread.is_alive()


async def test_a_reader_beside_the_writer_sees_what_is_committed_and_cannot_write(path):
    async with opened(path) as index:
        for i, b in enumerate(chain(3), 1):
            await index.apply(added=[blocks.entry(b)])
            with read_only(path) as connection:
                assert len(read_contents(connection).entries) == i
                for statement in ("DELETE FROM block", "PRAGMA user_version = 7", "CREATE TABLE x (y)"):
                    with pytest.raises(sqlite3.OperationalError, match="readonly"):
                        connection.execute(statement)


def test_a_reader_is_told_where_there_is_nothing_to_read(path):
    assert refusal(dump, path).startswith("does not exist; check ssd.path")
    path.touch()
    assert refusal(dump, path).startswith("is empty; start the program")


async def test_index_and_journal_are_private_whatever_the_umask(path):
    old = os.umask(0)
    try:
        async with opened(path) as index:
            await index.apply(counters={"n": 1})
            modes = {p.name.removeprefix(path.name): oct(p.stat().st_mode & 0o777) for p in path.parent.iterdir()}
    finally:
        os.umask(old)
    assert modes == {"": "0o600", "-wal": "0o600", "-shm": "0o600"}
