"""An explicit snapshot of RAM: what it holds, what is refused, and that saving and loading change nothing else."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, load_prompt_cache

from tests.models import prefill, random_tokens, same_state, tiny_llama
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import snapshot
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig
from tiered_cache.metrics import MB

A, B, C, X = (random_tokens(n, seed) for n, seed in ((600, 1), (600, 2), (600, 3), (200, 4)))
SEQUENCE = 600 * bytes_per_token()


def make(*stored: Any, nbytes: float = 64 * MB, model: Any = None) -> MemoryAwarePrefixCache:
    cache = MemoryAwarePrefixCache(model or ShapeOnlyModel(), MemoryCacheConfig(max_memory_mb=nbytes / MB))
    assert all(cache.store(tokens, state_of(tokens), evict_prefixes=False) for tokens in stored)
    return cache


def right(cache: MemoryAwarePrefixCache, *stored: Any) -> bool:
    return all(same_state(cache.fetch(tokens)[0], state_of(tokens)) for tokens in stored)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shot"


def test_what_was_saved_is_there_again_and_loading_twice_adds_nothing(folder):
    source, cache = make(*(stored := (A[:300], B, A[:500] + X, A))), make()
    assert [source.save_to_disk(folder), *(cache.load_from_disk(f) for f in (folder, str(folder)))] == [True, 4, 0]
    assert (right(cache, *stored), cache.memory_usage_mb) == (True, source.memory_usage_mb)


def test_saving_changes_neither_the_order_of_use_nor_the_figures(folder):
    before = ((cache := make(A, B, C)).sequences(), cache.get_stats())
    assert (cache.save_to_disk(folder), cache.sequences(), cache.get_stats()) == (True, *before)


def test_mlx_lm_reads_the_files(folder):
    state, cache = prefill(model := tiny_llama(), A)[0], make(model=model)
    assert (cache.store(A, state), cache.save_to_disk(folder)) == (True, True)
    assert same_state(load_prompt_cache(str(folder / "0.safetensors")), state)
    assert {p.stat().st_mode & 0o077 for p in folder.parent.iterdir()} == {0}, "prompts are private"


def test_layers_that_are_kept_whole_come_back(folder):
    (arrays := ArraysCache(2))[0], window = mx.ones((1, 3, 8), mx.bfloat16), RotatingKVCache(64)
    window.update_and_fetch(*2 * [mx.random.normal((1, 2, 600, 16))])
    for state in ([*state_of(A), arrays, window], [CacheList(arrays, state_of(A)[0])], [arrays]):
        source, cache = make(), make()
        assert (source.store(A, state), source.save_to_disk(folder), cache.load_from_disk(folder)) == (True, True, 1)
        assert str([c.state for c in cache.fetch(A)[0]]) == str([c.state for c in source.fetch(A)[0]])


def test_another_version_or_model_and_what_is_no_snapshot_is_refused(folder, caplog):
    other = make(model=ShapeOnlyModel(name="other"))
    assert (make(A).save_to_disk(folder), other.load_from_disk(folder)) == (True, 0)
    index = json.loads((file := folder / "index.json").read_text())
    for text in (json.dumps(index | {"version": 99}), json.dumps(index | {"format": "x"}), "[1]", "{", "{}", ""):
        assert (file.write_text(text), make().load_from_disk(folder)) == (len(text), 0)
    assert (make().load_from_disk(folder / "nowhere"), len(caplog.records)) == (0, 8)
    assert not make(A).save_to_disk(folder.parent), "a folder that is none of ours is left alone"


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "outside"])
def test_a_damaged_entry_is_passed_over_and_the_others_are_loaded(damage, folder):
    assert make(A, B, C).save_to_disk(folder)
    index = (folder / "index.json").read_text()
    file = folder / next(e["file"] for e in json.loads(index)["sequences"] if e["tokens"] == B)
    data = file.rename(folder.parent / file.name).read_bytes()
    if damage == "outside":
        (folder / "index.json").write_text(index.replace(file.name, f"../{file.name}"))
    elif damage != "gone":
        file.write_bytes(data[:-100] + (bytes([data[-100] ^ 1]) + data[-99:] if damage == "flipped" else b""))
    cache = make()
    assert (cache.load_from_disk(folder), B in cache, right(cache, A, C)) == (2, False, True)


@pytest.mark.parametrize(("stored", "room", "kept"), [
    ((A, B, C), 2.0, 2), ((A, B, C), 2.9, 2), ([A + random_tokens(10, 20 + i) for i in range(8)], 2.5, 8)])
def test_what_was_used_last_is_kept_where_not_all_fit_and_shared_prefixes_count_once(stored, room, kept, folder):
    cache = make(nbytes=room * SEQUENCE)
    assert (make(*stored).save_to_disk(folder), cache.load_from_disk(folder)) == (True, kept)
    assert cache.sequences() == list(stored)[: -kept - 1 : -1]


def test_the_state_of_one_tenant_is_not_saved_as_that_of_all(folder):
    source, cache = make(), make()
    (state := ArraysCache(1))[0] = mx.zeros((1, 4))
    assert (source.store(A[:200], [state]), source.store(A, [state], tenant="one")) == (True, True)
    assert (source.save_to_disk(folder), cache.load_from_disk(folder) >= 1) == (True, True)
    assert len(cache.fetch(A)[1]) == 400, "a shorter state was saved under the tenant's tokens"


@pytest.mark.parametrize("step", [
    (snapshot, "save_prompt_cache", "0.safetensors"), (snapshot, "save_prompt_cache", "1.safetensors"),
    (Path, "write_text", "index.json"), (Path, "rename", "/shot"), (Path, "rename", ".tmp")], ids=lambda s: s[1] + s[2])
def test_a_failure_on_the_way_leaves_the_old_snapshot(step, folder, monkeypatch):
    assert make(A).save_to_disk(folder)

    cache, (owner, name, ending) = make(A, B), step
    function = getattr(owner, name)

    def failing(path: Any, *rest: Any) -> Any:
        if str(path).endswith(ending):
            raise OSError("no more")
        return function(path, *rest)
    monkeypatch.setattr(owner, name, failing)
    assert not cache.save_to_disk(folder)
    monkeypatch.undo()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert (make().load_from_disk(folder), cache.save_to_disk(folder), make().load_from_disk(folder)) == (1, True, 2)
