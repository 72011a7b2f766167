"""The tier: what is spilled comes back, within the budget, and no fault on the way costs more than what it hits."""

import asyncio
import os
import sqlite3
import threading
from dataclasses import replace
from unittest.mock import AsyncMock

import psutil
import pytest

from ssd_tier import SSDTier
from ssd_tier.files import Directory
from ssd_tier.folders import default_hook
from ssd_tier.spill import SpillQueue
from tests import blocks
from tests.blocks import Recorder, block, chain, content, failing, keys, listing, options, path_of, rows, running, spill

MB = 1 << 20


@pytest.mark.parametrize(("durability", "level"), [("cache", 1), ("batch", None), ("full", 3)])
async def test_blocks_come_back_bit_for_bit_also_after_a_restart_and_are_written_once(tmp_path, durability, level):
    family, names = [*chain(4), block(77, chain(2)[1])], [listing(tmp_path)]
    for start in range(2):
        async with running(tmp_path, heard := Recorder(), durability=durability, level=level) as tier:
            if start == 0:
                await spill(tier, *family)
            assert [content(await tier.read(b.key)) for b in family] == [content(b) for b in family]
            await spill(tier, *family)
            names.append(listing(tmp_path, "blobs"))
            assert heard.stored[-5:] == keys(*family)  # told all the same: they are there
        assert keys(*rows(tmp_path)) == keys(*(family[i] for i in (3, 2, 4, 1, 0)))
    assert names[1] == names[2]
    async with running(tmp_path) as tier:
        await tier.remove(keys(*family))
        assert (await tier.read(family[0].key), tier.counters["miss_evicted"]) == (None, 1)
        await spill(tier, *family)
    assert len({*names[2], *listing(tmp_path, "blobs")}) == 10  # no name is used again


async def test_what_hangs_on_a_failed_block_is_lost_with_its_own_reason(tmp_path):
    family, other = chain(3), chain(2, seed=1)
    async with running(tmp_path, heard := Recorder()) as tier:
        tier._directory.hook = failing("rename", name=family[0].key.hex())
        await spill(tier, *family, *other, chain(5, seed=2)[4])  # the parents of the last were never handed over
        assert heard.stored == keys(*other) == keys(*rows(tmp_path))[::-1]
        assert list(heard.lost.values()).count("parent_not_stored") == tier.counters["lost_parent_not_stored"] == 3
        assert heard.lost[family[0].key] == "write_failed"
        assert len(listing(tmp_path, "blobs")) == 2


@pytest.mark.parametrize("kind", ["budget", "floor"])
async def test_the_disk_never_holds_more_than_it_may(tmp_path, monkeypatch, kind):
    limit, changes = 6 * MB, {"budget": 6 * MB}
    if kind == "floor":
        monkeypatch.setattr(Directory, "free_bytes", lambda self: 9 * MB - blocks.on_disk(tmp_path))
        limit, changes = 7 * MB, {"budget": 12 * MB, "min_free": 3 * MB}  # the journal grows a little more
    async with running(tmp_path, heard := blocks.Watch(tmp_path), **changes) as tier:
        heard.tier = tier
        tier._directory.hook = heard.look
        for seed in range(30):
            await spill(tier, *chain(4, seed, nbytes=MB // 4))
        assert limit / 2 < heard.peak <= limit
        assert (heard.wrong, heard.lost) == ([], {})
        assert set(heard.stored) - set(heard.removed) == set(keys(*tier.catalog))
        assert len(heard.removed) == tier.counters["blocks_evicted"] > 90
    async with running(tmp_path, budget=4 * MB):
        assert blocks.on_disk(tmp_path) <= 4 * MB


async def test_what_can_never_fit_is_lost_and_costs_no_other(tmp_path):
    many = [*chain(8, nbytes=MB // 4), block(9, nbytes=8 * MB)]  # the first seven fill it, and carry the next
    async with running(tmp_path, heard := Recorder(), budget=4 * MB) as tier:
        await spill(tier, *many)
        assert (heard.stored, heard.removed) == (keys(*many[:7]), [])
        assert heard.lost == dict.fromkeys(keys(*many[7:]), "no_room")


@pytest.mark.parametrize(("durability", "operations"), [
    ("cache", ["open", "write", "rename"]), ("full", ["open", "write", "fsync", "rename", "fsync", "fsync"])])
async def test_a_spill_that_fails_at_any_operation_costs_its_block_and_no_more(tmp_path, durability, operations):
    seen: list[str] = []
    async with running(tmp_path, heard := Recorder(), durability=durability) as tier:
        tier._directory.hook = lambda operation, name: seen.append(operation)
        await spill(tier, block(0))
        assert seen == operations
        for n, b in enumerate(chain(len(operations), seed=1)):
            before = listing(tmp_path)
            tier._directory.hook = failing(at=n)
            await spill(tier, b)
            assert heard.lost.pop(b.key) == "write_failed"
            assert (listing(tmp_path), tier.queue.nbytes, await tier.read(b.key)) == (before, 0, None)
            await spill(tier, b)  # goes on
            assert content(await tier.read(b.key)) == content(b)
        assert tier.counters["lost_write_failed"] == len(operations)


async def test_an_index_that_fails_costs_a_batch_and_no_more(tmp_path, monkeypatch):
    async with running(tmp_path, heard := Recorder()) as tier:
        with monkeypatch.context() as patched:
            full = sqlite3.OperationalError("disk is full")
            patched.setattr(tier._store._index, "apply", AsyncMock(side_effect=full))
            await spill(tier, *chain(2))
        assert heard.lost == dict.fromkeys(keys(*chain(2)), "write_failed")
        assert (list(tier.catalog), tier.queue.nbytes, listing(tmp_path, "blobs")) == ([], 0, [])
        await spill(tier, *chain(2))
        assert keys(*rows(tmp_path))[::-1] == heard.stored == keys(*chain(2))


def test_the_queue_is_bounded_in_bytes_and_gives_back_what_is_taken_back():
    queue, (a, b, c), huge = SpillQueue(10000), chain(3), block(9, nbytes=20480)
    assert [queue.put(x) for x in (a, b, c, huge)] == [True, True, False, False]
    assert [queue.cancel(x.key) for x in (a, a, c)] == [True, False, False]
    assert queue.put(c)
    taken = queue.take(5000, 9)
    assert (taken, queue.cancel(b.key), queue.put(a), queue.nbytes, len(queue)) == ([b], False, False, 8192, 2)
    queue.finished(taken)
    assert queue.put(a)
    assert (queue.close(), queue.nbytes, len(queue)) == ([c, a], 0, 0)
    assert not queue.put(a), "it is closed"
    alone = SpillQueue(10000)
    assert (alone.put(huge), alone.put(a), alone.take(1, 9)) == (True, False, [huge])


async def test_closing_tells_what_was_not_written_and_leaves_nothing_open(tmp_path, monkeypatch):
    threads, gate, many = set(threading.enumerate()), threading.Event(), [block(i, nbytes=MB // 16) for i in range(20)]
    await (tier := SSDTier(options(tmp_path, budget=4 * MB))).start(heard := Recorder())
    monkeypatch.setattr(tier._directory, "hook", lambda *_: gate.wait(5))
    assert all(tier.put(b) for b in many)
    await asyncio.sleep(0.05)
    assert (tier.cancel(many[0].key), tier.cancel(many[19].key)) == (False, True)
    asyncio.get_running_loop().call_later(0.01, gate.set)
    await tier.close()
    await tier.close()
    assert heard.stored == keys(*many[:2])  # the files at hand
    assert heard.lost == dict.fromkeys(keys(*many[2:19]), "closed")
    assert (tier.counters["lost_closed"], len(tier.queue), tier.queue.nbytes, tier.put(many[19])) == (17, 0, 0, False)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not [f for f in psutil.Process().open_files() if f.path.startswith(str(tmp_path))]
    for thread in {t for t in threading.enumerate() if not t.name.startswith("asyncio_")} - threads:
        thread.join(2)
        assert not thread.is_alive()


@pytest.mark.parametrize(("harm", "counter"), [
    (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"?"), "lost_damaged"), (lambda p: p.unlink(), "lost_missing"),
    (lambda p: os.truncate(p, 100), "lost_damaged"),
    (lambda p: p.write_bytes(blocks.blob(block(5, chain(1)[0]))), "lost_damaged"),  # intact, but another one
    (lambda p: p.symlink_to(p.rename(p.with_suffix(".moved"))), "lost_damaged")])
async def test_a_harmed_blob_is_a_counted_miss_and_goes(tmp_path, harm, counter):
    a, b = chain(2)
    async with running(tmp_path, heard := Recorder()) as tier:
        await spill(tier, a, b)
        path = path_of(tier, b)
        harm(path)
        assert await tier.read(b.key) is None
        assert (tier.counters[counter], heard.removed, path.name in listing(tmp_path, "blobs")) == (1, [b.key], False)
        await spill(tier, b)
        assert [content(await tier.read(x.key)) for x in (a, b)] == [content(a), content(b)]


async def test_a_disk_that_cannot_be_read_now_is_a_miss_and_the_block_stays(tmp_path):
    async with running(tmp_path, heard := Recorder()) as tier:
        await spill(tier, block(0))
        for n, operation in enumerate(["open", "read"], 1):
            tier._directory.hook = failing(operation)
            assert (await tier.read(block(0).key), tier.counters["read_failed"], heard.removed) == (None, n, [])
            assert await tier.read(block(0).key, wanted=lambda: False) is None  # nobody waits: the disk is not asked
            assert tier.counters["read_failed"] == n
        tier._directory.hook = default_hook  # the disk is well again
        assert content(await tier.read(block(0).key)) == content(block(0))


async def test_an_open_brings_index_and_files_to_agree(tmp_path):
    family = chain(4)
    async with running(tmp_path) as tier:
        await spill(tier, *family)
        paths = [path_of(tier, b) for b in family]
    orphan = paths[0].with_name(f"{family[0].key.hex()}-{7:016x}.safetensors")
    for path in (tmp_path / "tmp" / "1-0", orphan, paths[0].with_name("note.txt")):
        path.write_bytes(paths[0].read_bytes())
    paths[3].unlink()
    paths[2].write_bytes(b"short")
    async with running(tmp_path) as tier:
        assert keys(*tier.catalog) == keys(*rows(tmp_path)) == keys(family[1], family[0])
        assert listing(tmp_path, "blobs") == sorted(["note.txt", paths[0].name, paths[1].name])
        assert (listing(tmp_path, "tmp"), tier.counters["orphans_removed"], tier.counters["lost_missing"]) == ([], 2, 2)
        assert content(await tier.read(family[1].key)) == content(family[1])


async def test_a_replaced_block_goes_once_the_new_one_is_stored(tmp_path):
    short, parent = block(0, tokens=8), block(1)
    child, new = block(2, parent), replace(block(3), replaces=(short.key, parent.key))
    async with running(tmp_path, heard := Recorder()) as tier:
        await spill(tier, short, parent, child)
        tier._directory.hook = failing("write")
        await spill(tier, new)
        assert (heard.removed, len(rows(tmp_path))) == ([], 3)
        tier._directory.hook = default_hook
        await spill(tier, new)
        assert (heard.removed, heard.stored[-1]) == ([short.key], new.key)  # something hangs on the other one
        assert (len(rows(tmp_path)), len(listing(tmp_path, "blobs"))) == (3, 3)
