"""Faults of disk, index and callers, in the corners where they hurt: what the SSD tier does about each."""

import asyncio
import os
import sqlite3
import threading
from collections import deque
from contextlib import suppress
from unittest.mock import AsyncMock

import numpy as np
import pytest

from ssd_tier import SSDTier, TensorSpec, TierError, blob
from ssd_tier import tier as tiers
from ssd_tier import writer as writing
from ssd_tier.blob import decode_blob, read_info
from ssd_tier.codec import Part
from ssd_tier.errors import BlobDamaged
from ssd_tier.files import Directory
from ssd_tier.index import prepare, read_contents, read_only
from tests import blocks
from tests.blocks import Recorder, Watch, block, chain, failing, listing, options, path_of, rows, running, spill

MB = 1 << 20
FULL = sqlite3.OperationalError("database or disk is full")


async def test_a_block_whose_removal_the_index_refused_can_be_stored_again(tmp_path, monkeypatch):
    async with running(tmp_path, heard := Recorder()) as tier:
        await spill(tier, block(0))
        with monkeypatch.context() as patched:
            patched.setattr(tier._store._index, "apply", AsyncMock(side_effect=FULL))
            await tier.remove([block(0).key])
        await spill(tier, block(0), block(1))
        assert heard.lost == {}  # both: the row of block 0 is still there, IntegrityError for every batch it is in


@pytest.mark.parametrize("fault", [MemoryError(), ValueError("of another size"), KeyError("F8_E4M3")])
async def test_a_block_that_cannot_be_encoded_costs_a_batch_and_no_more(tmp_path, monkeypatch, fault):
    def encode(*_):
        raise fault

    async with running(tmp_path, heard := Recorder()) as tier:
        with monkeypatch.context() as patched:
            patched.setattr(writing, "encode_blob", encode)
            tier.put(block(0))
            await asyncio.wait(tier._tasks[:1], timeout=0.2)
        if ended := tier._tasks[0].done():
            tier._tasks[0] = asyncio.create_task(tier.writer.run())  # else close() raises and leaves everything open
        assert not ended
        assert heard.lost == {block(0).key: "write_failed"}


async def test_files_that_cannot_be_removed_count_against_the_budget(tmp_path):
    async with running(tmp_path, heard := Watch(tmp_path), budget=6 * MB) as tier:
        heard.tier, tier._directory.hook = tier, failing("unlink")
        for i in range(40):
            await spill(tier, block(i, nbytes=MB // 4))
        assert heard.peak <= 6 * MB


async def test_a_block_handed_over_twice_is_written_once(tmp_path):
    async with running(tmp_path) as tier:
        await spill(tier, block(0), block(0))
        assert len(listing(tmp_path, "blobs")) == 1


async def test_blocks_whose_parent_is_not_stored_make_no_room(tmp_path):
    async with running(tmp_path, heard := Recorder(), budget=4 * MB) as tier:
        await spill(tier, *chain(16, nbytes=MB // 4))  # six fit; the others are lost, whatever goes
        assert heard.removed == []  # one goes for children of a block that was lost, which are written and deleted


async def test_a_floor_that_cannot_be_reached_does_not_empty_the_cache(tmp_path, monkeypatch):
    async with running(tmp_path, heard := Recorder(), min_free=100 * MB) as tier:
        monkeypatch.setattr(Directory, "free_bytes", lambda self: 200 * MB)
        await spill(tier, *chain(4))
        monkeypatch.setattr(Directory, "free_bytes", lambda self: 1 * MB)  # another program has filled the disk
        await spill(tier, block(9))
        assert heard.removed == []


async def test_the_floor_counts_the_growth_of_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(Directory, "free_bytes", lambda self: 9 * MB - blocks.on_disk(tmp_path))
    async with running(tmp_path, heard := Watch(tmp_path), budget=12 * MB, min_free=3 * MB) as tier:
        heard.tier, tier._directory.hook = tier, heard.look
        for seed in range(30):
            await spill(tier, *chain(4, seed, nbytes=MB // 4))
        assert heard.peak <= 6 * MB


async def test_a_tier_that_is_closed_answers_with_misses(tmp_path):
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
    assert await tier.read(block(0).key) is None
    await tier.remove([block(0).key])


async def test_a_damaged_blob_read_while_the_tier_closes_is_a_miss(tmp_path):
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
        os.truncate(path_of(tier, block(0)), 100)
        read = asyncio.create_task(tier.read(block(0).key))
        await asyncio.sleep(0)
        await tier.close()
        assert await read is None


async def test_use_is_saved_though_the_tier_closes_just_while_it_saves(tmp_path, monkeypatch):
    for i in range(60):
        monkeypatch.setattr(tiers, "SAVE_EVERY", 0.0003 * (i % 10))
        async with running(tmp_path / str(i)) as tier:
            await spill(tier, block(0))
            tier.touch([block(0).key], hit=True)
            for _ in range(i % 7):
                await asyncio.sleep(0)
        assert [e.hits for e in prepare(tmp_path / str(i) / "index.sqlite").entries] == [1], i


async def test_use_that_the_index_refused_is_saved_with_the_next_change(tmp_path, monkeypatch):
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
        tier.touch([block(0).key], hit=True)
        await asyncio.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(tier._store._index, "apply", AsyncMock(side_effect=FULL))
            await spill(tier, block(1))
        await spill(tier, block(2))
    assert [e.hits for e in rows(tmp_path) if e.key == block(0).key] == [1]


async def test_two_threads_that_touch_at_once_do_not_silence_it(tmp_path, monkeypatch):
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
        both = threading.Barrier(2)

        class Slow(deque):
            def append(self, item):  # both have appended before either asks for the length
                super().append(item)
                both.wait(2)

        tier._touches = Slow()
        threads = [threading.Thread(target=tier.touch, args=([block(0).key],), kwargs={"hit": True}) for _ in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        Slow.append = deque.append
        tier.touch([block(0).key], hit=True)
        await asyncio.sleep(0.05)
        assert [e.hits for e in tier.catalog] == [3]
        assert not tier._touches


async def test_losses_found_at_open_are_in_the_sums_over_all_runs(tmp_path):
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
        path_of(tier, block(0)).unlink()
    async with running(tmp_path):
        pass
    with read_only(tmp_path / "index.sqlite") as reader:
        assert read_contents(reader).counters["lost_missing"] == 1


@pytest.mark.parametrize("what", ["a directory in its place", "the system refuses"])
async def test_an_orphan_that_cannot_be_removed_is_no_crash(tmp_path, monkeypatch, what):
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
        orphan = path_of(tier, block(0)).with_name(f"{block(0).key.hex()}-{7:016x}.safetensors")
    if what == "the system refuses":
        orphan.touch()
        monkeypatch.setattr(Directory, "hook", staticmethod(failing("unlink")))
    else:
        orphan.mkdir()
    with suppress(TierError):
        SSDTier(options(tmp_path)).disown()


async def test_a_row_without_its_tokens_does_not_stand_in_the_way(tmp_path):
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
    with sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None) as connection:
        connection.execute("DELETE FROM block_tokens")
    connection.close()
    async with running(tmp_path, heard := Recorder()) as tier:
        await spill(tier, block(0), block(1))
        assert heard.lost == {}


def test_a_forged_part_of_negative_length_does_not_make_room_for_a_bomb(monkeypatch):
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(256 * MB))
    parts = [Part("zstd", 256 * MB, np.frombuffer(bomb, np.uint8)), Part("raw", 64 - 256 * MB, np.empty(0, np.uint8))]
    monkeypatch.setattr(blob, "encode", lambda *_: parts)
    b = blocks.with_data([TensorSpec("x", "BF16", (32,))], np.zeros(64, np.uint8))
    file = np.frombuffer(blocks.blob(b), np.uint8)
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(BlobDamaged):
        decode_blob(read_info(file), np.empty(64, np.uint8))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MB


def test_parents_of_the_directory_are_not_writable_by_others(tmp_path):
    old = os.umask(0)
    try:
        Directory.own(tmp_path / "a" / "b").close()
    finally:
        os.umask(old)
    assert oct((tmp_path / "a").stat().st_mode & 0o022) == "0o0"


def test_a_fresh_disk_or_folder_is_not_taken_for_somebodys(tmp_path):
    (tmp_path / "lost+found").mkdir(0o700)
    tmp_path.chmod(0o700)
    Directory.own(tmp_path).close()


async def test_a_block_that_comes_again_while_it_is_being_removed_keeps_its_row(tmp_path, monkeypatch):
    gate = threading.Event()
    async with running(tmp_path) as tier:
        await spill(tier, block(0))
        monkeypatch.setattr(Directory, "hook", staticmethod(lambda op, _: gate.wait(5) if op == "unlink" else None))
        removal = asyncio.create_task(tier.remove([block(0).key]))
        await asyncio.sleep(0.05)
        await spill(tier, block(0))  # with another name
        gate.set()
        await removal
        assert len(tier.catalog) == 1
    assert [e.key for e in rows(tmp_path)] == [block(0).key]
    async with running(tmp_path) as tier:
        assert blocks.content(await tier.read(block(0).key)) == blocks.content(block(0))
