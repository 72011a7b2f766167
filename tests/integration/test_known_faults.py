"""Faults that a prefix cache must not have, one test each, through the public face."""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import mean, median
from timeit import timeit
from typing import Any

import mlx.core as mx
import pytest
import xxhash
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from ssd_tier import DirectoryUnusable
from ssd_tier.files import Directory
from ssd_tier.inspection import Inspection
from tests.models import bytes_of, greedy, prefill, random_tokens, same_state, tiny_llama
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig

MODEL = ShapeOnlyModel()
A, B, C, X = (random_tokens(600, seed) for seed in range(4))
SEQUENCE = 600 * bytes_per_token()


def layers(make: Callable[[], list[Any]], tokens: int) -> tuple[Any, list[Any]]:
    """A model with a cache of these layers, and a state of so many tokens, from two turns."""
    model, state = ShapeOnlyModel(), make()
    model.make_cache = make
    for layer in state:
        for size in (150, tokens - 150):
            getattr(layer, "maybe_trim_front", lambda: None)()
            layer.update_and_fetch(*mx.random.normal((2, 1, 2, size, 64)).astype(mx.bfloat16))
    return model, state


def promoted(cache: TieredCache, tokens: list[int]) -> Any:
    """The state that comes back, from the SSD if it has more than RAM, and how many tokens it covers."""
    promotion = cache.promote(tokens)
    state, remaining = promotion.result(20) if promotion else cache.fetch(tokens)
    return state, len(tokens) - len(remaining)


def test_1_a_promotion_into_a_full_ram_evicts_what_it_is_short_of(make_config):
    """RAM holds two of four sequences; each of them comes back from the SSD."""
    with TieredCache.open(make_config(ram={"max_memory": 2 * SEQUENCE}), model=MODEL) as cache:
        for tokens in (A, B, C, X):
            assert (cache.store(tokens, state_of(tokens)), cache.flush(20)) == (True, True)
        for tokens in (A, B, C, X):
            assert same_state(promoted(cache, tokens)[0], state_of(tokens), 599)
        assert cache.stats()["losses"] == {}


def test_2_a_short_match_in_ram_does_not_keep_the_ssd_from_being_asked(make_config):
    """RAM knows 200 tokens, the SSD 600."""
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A[:200] + X, state_of(A[:200] + X))
        assert cache.ram.check_ssd(A)["matched_tokens"] == 600
        assert promoted(cache, A)[1] == 599


def test_3_no_token_is_fed_twice_after_an_exact_hit(make_config):
    """The state stops one token short, and the answer is that of a cold start."""
    model = tiny_llama()
    with TieredCache.open(make_config(), model=model) as cache:
        assert cache.store(A, prefill(model, A)[0])
        state, remaining = cache.fetch(A)
        assert (remaining, greedy(model, remaining, 6, state)[0]) == (A[-1:], greedy(model, A, 6)[0])


def test_4_a_quantized_layer_that_is_reused_in_part_shows_nothing_of_another_request():
    """Rows after the common prefix are zeros, not the other request's."""
    model, source = layers(lambda: [QuantizedKVCache(64, 8)], 600)
    cache = MemoryAwarePrefixCache(model)
    assert cache.store(A, source)
    (layer,), _ = cache.fetch(A[:400] + X)
    assert (type(layer), layer.offset) == (QuantizedKVCache, 400)
    for old, new in zip(source[0].keys, layer.keys, strict=True):
        assert (bytes_of(new[..., :400, :]), any(bytes_of(new[..., 400:, :]))) == (bytes_of(old[..., :400, :]), False)


@pytest.mark.parametrize(("kind", "setting"), [(RotatingKVCache, 32), (RotatingKVCache, 512), (ChunkedKVCache, 64)])
def test_5_a_rotating_or_chunked_layer_comes_back_from_disk_as_what_it_was(make_config, kind, setting):
    """It has its class, and the next tokens see the same rows."""
    model, source = layers(lambda: [kind(setting), KVCache()], 200)
    with TieredCache.open(make_config(), model=model) as cache:
        assert cache.store(A[:200], source)
    with TieredCache.open(make_config(), model=model) as cache:
        state, covered = promoted(cache, A)
    assert (covered, [type(layer) for layer in state]) == (200, [kind, KVCache])
    for step in (1, 2, 30):
        rows = mx.random.normal((1, 2, step, 64)).astype(mx.bfloat16)
        for old, new in zip(source, state, strict=True):
            seen = {tuple(map(bytes_of, layer.update_and_fetch(rows, rows))) for layer in (old, new)}
            assert len(seen) == 1


def test_6_bfloat16_and_quantized_layers_lie_on_disk_as_they_are_however_often_they_return(make_config, tmp_path):
    """Two bytes a value, values beyond float16, and no bit lost in three round trips."""
    model, source = layers(lambda: [KVCache(), QuantizedKVCache(64, 4)], 600)
    source[0].keys[..., 0], state = 1e30, source
    for turn in range(3):
        with TieredCache.open(make_config(ssd={"compression": "none"}), model=model) as cache:
            assert cache.store([turn, *A[1:]], state)
        with TieredCache.open(make_config(), model=model) as cache:
            state = promoted(cache, [turn, *A[1:], *X])[0]
        for old, new in ((source[0].keys, state[0].keys), *zip(source[1].keys, state[1].keys, strict=True)):
            assert bytes_of(old[..., :600, :]) == bytes_of(new[..., :600, :])
    found = Inspection(tmp_path / "cache")
    assert {t.dtype for e in found.entries for t in found.blob(e).tensors} == {"BF16", "U32"}


def no_layers(file: bytes) -> bytes:
    """A block's file with an empty list of layers, the same length and a right digest (at byte 35)."""
    file = re.sub(rb'(?<="classes":").*?(?=","tensors":)', lambda found: b"[]".ljust(len(found[0])), file)
    return file[:35] + xxhash.xxh3_128(file[:35] + b"0" * 32 + file[67:]).hexdigest().encode() + file[67:]


@pytest.mark.parametrize("how", ["flipped", "zeroed tail", "no layers", "another model's"])
def test_7_whatever_became_of_a_file_it_is_never_a_hit(make_config, tmp_path, how):
    """Each is a miss and counted, also with a right digest and the right length."""
    for model in (ShapeOnlyModel(name="others"), MODEL):
        with TieredCache.open(make_config(ssd={"compression": "none"}), model=model) as cache:
            assert promoted(cache, A[:250]) == (None, 0), "of another model"
            assert cache.store(A[:250], state_of(A[:250]))
    found = Inspection(tmp_path / "cache")
    old = [found.path(e).read_bytes() for e in found.entries]
    new = {
        "flipped": [b[:20000] + bytes([b[20000] ^ 1]) + b[20001:] for b in old],
        "zeroed tail": [b[:20000] + bytes(len(b) - 20000) for b in old],
        "no layers": [no_layers(b) for b in old],
        "another model's": old[::-1],
    }[how]
    for entry, content in zip(found.entries, new, strict=True):
        found.path(entry).write_bytes(content)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert promoted(cache, A[:250]) == (None, 0)
        assert sum(cache.stats()["losses"].values()) == 1


def test_8_caps_count_bytes_on_disk_and_reservations_bytes_in_ram(make_config, monkeypatch):
    """States that compress: the SSD keeps more of them than its budget in bytes of state."""
    state, size = state_of(A, layers=2, heads=8, dim=64), 600 * bytes_per_token(layers=2, heads=8, dim=64)
    sequences = [random_tokens(600, seed) for seed in range(10)]
    config = make_config(ram={"max_memory": 11 * size}, ssd={"budget": "22MB"})
    with TieredCache.open(config, model=MODEL) as cache:
        assert all(cache.store(tokens, state) for tokens in sequences)
    monkeypatch.setattr(Directory, "hook", staticmethod(lambda name, _: time.sleep(0.2 * (name == "read"))))
    with TieredCache.open(config, model=MODEL) as cache:
        ssd = cache.stats()["ssd"]
        assert ssd["file_bytes"] <= ssd["budget"] < ssd["raw_bytes"] == 10 * size
        promotion = cache.promote(sequences[0])
        assert cache.stats()["ram"]["reserved"] == size
        assert (promotion.result(20)[1], cache.stats()["ram"]["reserved"]) == (sequences[0][-1:], 0)


def test_9_what_waits_for_the_disk_is_bounded_in_bytes_and_part_of_the_limit(make_config, monkeypatch):
    """Twenty victims and a slow disk."""
    config = make_config(ram={"max_memory": 6 * SEQUENCE}, ssd={"spill_queue": 2 * SEQUENCE})
    monkeypatch.setattr(Directory, "hook", staticmethod(lambda name, _: time.sleep(0.05 * (name == "write"))))
    with TieredCache.open(config, model=MODEL) as cache:
        for seed in range(20):
            assert cache.store(random_tokens(600, seed), state_of(random_tokens(600, seed)))
            ram, ssd = cache.stats()["ram"], cache.stats()["ssd"]
            assert ram["resident"] + ram["queued"] + ram["reserved"] <= ram["peak"] <= ram["limit"]
            assert ssd["queued_bytes"] <= 2 * SEQUENCE


def test_10_evicting_does_not_wait_for_the_disk_and_a_full_queue_loses_nothing(make_config, monkeypatch):
    """A slow disk and a queue for one sequence: five fit in RAM and are kept, those that evict are as quick."""
    stored = [(tokens := random_tokens(600, seed), state_of(tokens)) for seed in range(25)]
    config = make_config(ram={"max_memory": 6 * SEQUENCE}, ssd={"spill_queue": SEQUENCE})
    monkeypatch.setattr(Directory, "hook", staticmethod(lambda name, _: time.sleep(0.1 * (name == "write"))))
    with TieredCache.open(config, model=MODEL) as cache:
        took = [timeit(partial(cache.store, *pair), number=1) for pair in stored[:5]]
        assert (cache.flush(20), cache.stats()["losses"]) == (True, {})
        took += [timeit(partial(cache.store, *pair), number=1) for pair in stored[5:]]
        assert mean(took[5:]) < 15 * median(took[:3])  # the first three are far from evicting
        assert promoted(cache, stored[0][0])[1] == 599


def test_11_nothing_foreign_is_deleted_no_path_leads_outside_and_nobody_else_can_read(make_config, tmp_path):
    """Other programs' directories are refused, links in a block's place not followed; the umask changes nothing."""
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(DirectoryUnusable):
        TieredCache.open(make_config(ssd={"path": str(tmp_path)}), model=MODEL)
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]
    mask = os.umask(0)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A[:200], state_of(A[:200]))
    os.umask(mask)
    assert {p.stat().st_mode & 0o077 for p in (tmp_path / "cache").rglob("*")} == {0}
    (file,) = (tmp_path / "cache" / "blobs").rglob("*.safetensors")
    file.symlink_to(outside := file.rename(tmp_path / "outside"))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert promoted(cache, A[:200]) == (None, 0)
    assert outside.exists()


def test_12_fetching_and_storing_may_race():
    """Two threads that store and two that fetch, with room for half: right bits or a miss, and no error."""
    cache = MemoryAwarePrefixCache(MODEL, MemoryCacheConfig(max_memory_mb=2 * SEQUENCE / 2**20))
    stored = [(tokens, state_of(tokens)) for tokens in (A, B, A[:300] + X[:300], C)]

    def work(thread: int) -> None:
        for tokens, state in stored[thread:] + 15 * stored:
            if thread % 2:
                cache.store(tokens, state)
            elif (found := cache.fetch(tokens))[0]:
                assert same_state(found[0], state, 600 - len(found[1]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert 0 < cache.get_stats()["current_memory_mb"] <= cache.memory_limit_mb + 0.01  # rounded


def test_13_closing_keeps_what_was_in_ram_and_a_corrupt_index_stops_nobody(make_config, tmp_path):
    """What only RAM held is there after a restart, and after the index was lost, too."""
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert promoted(cache, A)[1] == 599
    (tmp_path / "cache" / "index.sqlite").write_bytes(b"\xff" * 8192)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert promoted(cache, A)[1] == 599
        assert cache.stats()["ssd"]["on"]


def test_14_a_look_up_costs_the_same_among_many_sequences_that_share_a_system_prompt(make_config):
    """Fetching, and asking the SSD, among 20 and among 1,000 sequences."""
    sequences = [A * 3 + random_tokens(100, seed) for seed in range(1000)]
    state = state_of(sequences[0], layers=2, heads=1, dim=4)
    with TieredCache.open(make_config(ram={"max_entries": 2000}), model=MODEL) as cache:
        took = []
        for known in (20, 1000):
            asked = [tokens[:-50] + X[:50] for tokens in sequences[: known : known // 20]]
            assert all(cache.store(tokens, state) for tokens in sequences[:known])
            assert cache.flush(60)
            took.append([median(timeit(partial(cache.fetch, tokens), number=1) for tokens in asked)])
            cache.ram.clear()
            took[-1].append(median(timeit(partial(cache.ram.check_ssd, tokens), number=1) for tokens in asked))
    assert all(many < 4 * few for few, many in zip(*took, strict=True)), took
