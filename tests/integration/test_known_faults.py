"""Faults that a prefix cache must not have, one test each, through the public face."""

from __future__ import annotations

import os
import sqlite3
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from ssd_tier import Block, DirectoryUnusable
from ssd_tier.blob import decode_blob, encode_blob
from ssd_tier.files import Directory
from ssd_tier.inspection import Inspection
from tests.models import bytes_of, greedy, prefill, random_tokens, same_state, tiny_llama
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig

MODEL = ShapeOnlyModel()
PER_TOKEN = bytes_per_token()
A, B, C, X = (random_tokens(600, seed) for seed in range(4))
SEQUENCE = 600 * PER_TOKEN


class MadeOf(ShapeOnlyModel):
    """A model whose cache consists of the layers that `make` gives."""

    def __init__(self, make: Callable[[], list[Any]], name: str = "made") -> None:
        super().__init__(len(make()), name)
        self.make_cache = make


def filled(make: Callable[[], list[Any]], tokens: int, seed: int = 0) -> list[Any]:
    """A state of so many tokens, fed in chunks of 64 as a long prompt is."""
    state, rng = make(), np.random.default_rng(seed)
    for layer in state:
        for start in range(0, tokens, 64):
            if isinstance(layer, ChunkedKVCache):
                layer.maybe_trim_front()
            shape = 1, 2, min(64, tokens - start), 64
            layer.update_and_fetch(*(mx.array(rng.normal(size=shape)).astype(mx.bfloat16) for _ in range(2)))
    mx.eval([vars(layer)[name] for layer in state for name in ("keys", "values")])
    return state


def put(cache: Any, *sequences: list[int]) -> None:
    for tokens in sequences:
        assert cache.store(tokens, state_of(tokens))


def promoted(cache: TieredCache, tokens: list[int]) -> Any:
    """The state that comes back, from the SSD if it has more than RAM, and how many tokens it covers."""
    promotion = cache.promote(tokens)
    state, remaining = promotion.result(20) if promotion else cache.fetch(tokens)
    return state, len(tokens) - len(remaining)


def hold(monkeypatch: Any, operation: str, seconds: float) -> None:
    """Make every such operation of the disk slow."""
    hook = staticmethod(lambda name, _: time.sleep(seconds) if name == operation else None)
    monkeypatch.setattr(Directory, "hook", hook)


def test_1_a_promotion_into_a_full_ram_evicts_what_it_is_short_of(make_config):
    """RAM holds two of four sequences; each of them comes back from the SSD."""
    with TieredCache.open(make_config(ram={"max_memory": 2 * SEQUENCE}), model=MODEL) as cache:
        for tokens in (A, B, C, X):
            put(cache, tokens)
            assert cache.flush(20)
        for tokens in (A, B, C, X):
            state, covered = promoted(cache, tokens)
            assert covered == 599
            assert same_state(state, state_of(tokens), 599)
        assert cache.stats()["losses"] == {}


def test_2_a_short_match_in_ram_does_not_keep_the_ssd_from_being_asked(make_config):
    """RAM knows 200 tokens, the SSD 600."""
    with TieredCache.open(make_config(), model=MODEL) as cache:
        put(cache, A)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        put(cache, A[:200] + X)
        assert cache.ram.check_ssd(A)["matched_tokens"] == 600
        assert promoted(cache, A)[1] == 599


def test_3_no_token_is_fed_twice_after_an_exact_hit(make_config):
    """The state stops one token short, and the answer is that of a cold start."""
    model = tiny_llama()
    with TieredCache.open(make_config(), model=model) as cache:
        assert cache.store(A, prefill(model, A)[0])
        state, remaining = cache.fetch(A)
        assert (remaining, [layer.offset for layer in state]) == (A[-1:], [599, 599])
        assert greedy(model, remaining, 6, state)[0] == greedy(model, A, 6)[0]


def test_4_a_quantized_layer_that_is_reused_in_part_shows_nothing_of_another_request():
    """Rows after the common prefix are zeros, not the other request's."""
    cache, source = MemoryAwarePrefixCache(MODEL), filled(lambda: [QuantizedKVCache(64, 8)], 600)
    assert cache.store(A, source)
    state, remaining = cache.fetch(A[:400] + X)
    assert remaining == X
    assert (type(state[0]), state[0].offset) == (QuantizedKVCache, 400)
    for old, new in zip(source[0].keys + source[0].values, state[0].keys + state[0].values, strict=True):
        assert bytes_of(new[..., :400, :]) == bytes_of(old[..., :400, :])
        assert not any(bytes_of(new[..., 400:, :]))


@pytest.mark.parametrize("layer", [lambda: RotatingKVCache(32), lambda: RotatingKVCache(32, 4),
    lambda: ChunkedKVCache(64)], ids=["rotating", "rotating-keep", "chunked"])  # fmt: skip
def test_5_a_rotating_or_chunked_layer_comes_back_from_disk_as_what_it_was(make_config, layer):
    """Class and attributes, and the next tokens see the same rows."""

    def make() -> list[Any]:
        return [layer(), KVCache()]

    source = filled(make, 200)
    with TieredCache.open(make_config(), model=MadeOf(make)) as cache:
        assert cache.store(A[:200], source)
    with TieredCache.open(make_config(), model=MadeOf(make)) as cache:
        state, covered = promoted(cache, A)
        assert (covered, type(state[0])) == (200, type(source[0]))
        for step in (1, 2, 30):
            rows = mx.random.normal((1, 2, step, 64)).astype(mx.bfloat16)
            for old, new in zip(source, state, strict=True):
                seen = [c.update_and_fetch(rows, rows) for c in (old, new)]
                assert [bytes_of(a) for a in seen[0]] == [bytes_of(a) for a in seen[1]]
                assert (old.offset, old.is_trimmable()) == (new.offset, new.is_trimmable())


def test_6_bfloat16_and_quantized_layers_lie_on_disk_as_they_are_however_often_they_return(make_config, tmp_path):
    """Two bytes a value, values beyond float16, and no bit lost in three round trips."""

    def make() -> list[Any]:
        return [KVCache(), QuantizedKVCache(64, 4)]

    source = filled(make, 600)
    source[0].keys[..., 0] = 1e30
    state, model = source, MadeOf(make)
    for turn in range(3):
        with TieredCache.open(make_config(ssd={"compression": "none"}), model=model) as cache:
            assert cache.store([turn, *A[1:]], state)
        with TieredCache.open(make_config(), model=model) as cache:
            state = promoted(cache, [turn, *A[1:], *X])[0]
            for old, new in ((source[0].keys, state[0].keys), *zip(source[1].keys, state[1].keys, strict=True)):
                assert bytes_of(old[..., :600, :]) == bytes_of(new[..., :600, :])
    assert state[0].keys[0, 0, 0, 0].item() == pytest.approx(1e30, rel=0.01)
    found = Inspection(tmp_path / "cache")
    kinds = {t.dtype for e in found.entries for t in found.blob(e).tensors}
    assert kinds == {"BF16", "U32"}
    per_token = 2 * 2 * 64 * 2 + 2 * 2 * (64 // 2 + 2 * 2)  # and a scale and a bias, 16 bits each, a group
    assert sum(e.raw_bytes for e in found.entries) == 3 * 600 * per_token
    assert sum(e.file_bytes for e in found.entries) < 1.1 * 3 * 600 * (per_token + 8)


def rewritten(cache: Inspection, **changes: Any) -> bytes:
    """The first block's file, with a right digest, and something else in it."""
    info = cache.blob(cache.entries[0])
    data = np.empty(info.raw_bytes, np.uint8)
    decode_blob(info, data)
    fields = {n: getattr(info, n) for n in ("key", "namespace", "parent", "tokens", "start", "tensors", "classes")}
    return b"".join(bytes(p) for p in encode_blob(Block(**{**fields, "data": data, **changes}), None))


@pytest.mark.parametrize("how", ["flipped", "zeroed tail", "no layers", "shorter", "another model's", "other tokens"])
def test_7_whatever_became_of_a_file_it_is_never_a_hit(make_config, tmp_path, how):
    """Each is a miss that is counted; what has a right digest too."""
    for model in (ShapeOnlyModel(name="other"), MODEL):
        with TieredCache.open(make_config(), model=model) as cache:
            assert promoted(cache, A[:250]) == (None, 0), "of another model"
            put(cache, A[:250])
    found = Inspection(tmp_path / "cache")
    files = [found.path(e) for e in found.entries]
    contents = [f.read_bytes() for f in files]
    for file, content, other in zip(files, contents, reversed(contents), strict=True):
        half = len(content) // 2
        file.write_bytes({
            "flipped": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
            "zeroed tail": content[:half] + bytes(len(content) - half),
            "no layers": rewritten(found, classes="[]", tensors=(), data=np.empty(0, np.uint8)),
            "shorter": content[:half],
            "another model's": other,
            "other tokens": rewritten(found, tokens=bytes(250 * 8)),
        }[how])  # fmt: skip
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert promoted(cache, A[:250]) == (None, 0)
        assert sum(cache.stats()["losses"].values()) == 1


def test_8_caps_count_bytes_on_disk_and_reservations_bytes_in_ram(make_config, monkeypatch, tmp_path):
    """States that compress: the SSD keeps more of them than its budget in bytes of state."""
    zeros = KVCache()
    zeros.update_and_fetch(*2 * [mx.zeros((1, 2, 600, 1024), mx.bfloat16)])
    size = 600 * 2 * 2 * 1024 * 2
    sequences = [random_tokens(600, seed) for seed in range(10)]
    config, model = make_config(ram={"max_memory": 11 * size}, ssd={"budget": "4MB"}), ShapeOnlyModel(1)
    with TieredCache.open(config, model=model) as cache:
        assert all(cache.store(tokens, [zeros]) for tokens in sequences)
    used = sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*") if f.is_file())
    with TieredCache.open(config, model=model) as cache:
        ssd = cache.stats()["ssd"]
        assert ssd["raw_bytes"] == 10 * size > 10 * ssd["budget"]
        assert ssd["file_bytes"] <= used <= ssd["budget"]
        hold(monkeypatch, "read", 0.2)
        promotion = cache.promote(sequences[0])
        assert cache.stats()["ram"]["reserved"] == size
        assert promotion.result(20)[1] == sequences[0][-1:]
        assert (cache.stats()["ram"]["reserved"], cache.stats()["ram"]["resident"]) == (0, size)


def test_9_what_waits_for_the_disk_is_bounded_in_bytes_and_part_of_the_limit(make_config, monkeypatch):
    """Large victims and a disk that stands still."""
    config = make_config(ram={"max_memory": 6 * SEQUENCE}, ssd={"spill_queue": 2 * SEQUENCE, "close_deadline": "0.1s"})
    hold(monkeypatch, "write", 0.05)
    with TieredCache.open(config, model=MODEL) as cache:
        for seed in range(20):
            put(cache, random_tokens(600, seed))
            ram, ssd = cache.stats()["ram"], cache.stats()["ssd"]
            assert ram["resident"] + ram["queued"] + ram["reserved"] <= ram["peak"] <= ram["limit"]
            assert ssd["queued_bytes"] <= 2 * SEQUENCE


def test_10_evicting_does_not_wait_for_the_disk_and_drops_nothing_that_ram_has_room_for(make_config, monkeypatch):
    """A queue for one sequence and a slow disk: storing takes as long as with a fast one, and all five are kept."""
    states = {seed: (tokens := random_tokens(600, seed), state_of(tokens)) for seed in range(30)}
    config = make_config(ram={"max_memory": 6 * SEQUENCE}, ssd={"spill_queue": SEQUENCE})
    hold(monkeypatch, "write", 0.1)
    with TieredCache.open(config, model=MODEL) as cache:
        for seed in range(5):
            assert cache.store(*states[seed])
        assert cache.flush(20)
        assert cache.stats()["losses"] == {}
        times = []
        for seed in range(5, 30):  # each of them evicts
            started = time.perf_counter()
            assert cache.store(*states[seed])
            times.append(time.perf_counter() - started)
        assert statistics.median(times) < 0.05
        assert promoted(cache, states[0][0])[1] == 599


def test_11_nothing_foreign_is_deleted_no_path_leads_outside_and_nobody_else_can_read(make_config, tmp_path):
    """A directory with other files is left alone; a link in a block's place is not followed; umask 0 changes
    nothing."""
    theirs = tmp_path / "theirs"
    (theirs / "blobs" / "photos").mkdir(parents=True)
    theirs.chmod(0o700)
    (theirs / "blobs" / "photos" / "1.jpg").write_text("mine")
    with pytest.raises(DirectoryUnusable):
        TieredCache.open(make_config(ssd={"path": str(theirs)}), model=MODEL)
    assert (theirs / "blobs" / "photos" / "1.jpg").read_text() == "mine"
    mask = os.umask(0)
    try:
        with TieredCache.open(make_config(), model=MODEL) as cache:
            put(cache, A[:200])
    finally:
        os.umask(mask)
    assert {p.stat().st_mode & 0o077 for p in (tmp_path / "cache").rglob("*")} == {0}
    columns = sqlite3.connect(tmp_path / "cache" / "index.sqlite")
    assert not [row for row in columns.execute("SELECT sql FROM sqlite_schema") if "path" in str(row[0])]
    columns.close()
    (file,) = (tmp_path / "cache" / "blobs").rglob("*.safetensors")
    outside = file.rename(tmp_path / "outside")
    file.symlink_to(outside)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert promoted(cache, A[:200]) == (None, 0)
    assert outside.exists()


def test_12_fetching_and_storing_may_race():
    """Two threads that store and two that fetch, with room for half: right bits or a miss, and no error."""
    cache = MemoryAwarePrefixCache(MODEL, MemoryCacheConfig(max_memory_mb=2 * SEQUENCE / 2**20))
    sequences = [A, B, A[:300] + X, C]
    states = [state_of(tokens) for tokens in sequences]

    def work(thread: int) -> None:
        for i in range(thread, thread + 60):
            tokens, state = sequences[i % 4], states[i % 4]
            if thread % 2:
                cache.store(tokens, state)
            elif (found := cache.fetch(tokens))[0]:
                assert same_state(found[0], state, 600 - len(found[1]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert cache.memory_usage_mb <= cache.memory_limit_mb
    assert cache.get_stats()["hits"] > 0


def test_13_closing_keeps_what_was_in_ram_and_a_corrupt_index_stops_nobody(make_config, tmp_path: Path):
    """What only RAM held is there after a restart; without a usable index RAM serves alone."""
    for _ in range(2):
        with TieredCache.open(make_config(), model=MODEL) as cache:
            covered = promoted(cache, A)[1]
            put(cache, A)
    assert covered == 599
    (tmp_path / "cache" / "index.sqlite").write_bytes(b"\xff" * 8192)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        put(cache, A)
        assert promoted(cache, A)[1] == 599
        assert "index.sqlite" in cache.stats()["ssd"]["off_because"]


def test_14_a_look_up_costs_the_same_among_many_sequences_that_share_a_system_prompt(make_config):
    """Fetching and asking the SSD, with 20 sequences of 2,100 tokens and with 1,000."""
    system, model, state = random_tokens(2000, 1), ShapeOnlyModel(1), KVCache()
    state.update_and_fetch(*2 * [mx.zeros((1, 1, 2100, 4), mx.bfloat16)])
    sequences = [system + random_tokens(100, seed) for seed in range(1000)]

    def best(look_up: Callable[[list[int]], Any], known: int) -> float:
        times = []
        for tokens in [t[:-50] + X[:50] for t in sequences[:known:known // 20]]:
            started = time.perf_counter()
            assert look_up(tokens)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    with TieredCache.open(make_config(ram={"max_entries": 2000}), model=model) as cache:
        took = []
        for first, known in ((0, 20), (20, 1000)):
            assert all(cache.store(tokens, [state]) for tokens in sequences[first:known])
            took.append(best(lambda tokens: cache.fetch(tokens)[0], known))
        assert len(cache.ram) == 1000
        assert took[1] < 4 * took[0], took
        asked = []
        for known in (20, 1000):
            cache.ram.clear()
            assert all(cache.store(tokens, [state]) for tokens in sequences[:known])
            assert cache.flush(60)
            cache.ram.clear()
            asked.append(best(cache.ram.check_ssd, known))
        assert asked[1] < 4 * asked[0], asked
