"""vllm-mlx 0.6.0's own scheduler and engine on our tiers. In an environment of its own: `make vllm`."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.models import tiny_llama
from tests.vllm.engine import Letters, ask, run, scheduler_of, submit
from tests.zoo import build
from tiered_cache import ConfigError
from tiered_cache.integrations import vllm_mlx as ours
from tiered_cache.promotion import Promotion

# vllm-mlx's web models are older than pydantic's present ways.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:Support for class-based:DeprecationWarning")]

ROOT = Path(__file__).parents[2]
PER_TOKEN = 2 * 2 * 2 * 16 * 2  # bytes of state of "llama-bf16"


@pytest.fixture(autouse=True)
def interpreted():
    """Without mx.compile, which calls a C++ compiler for each model on the CPU."""
    mx.disable_compile()
    yield
    ours._tiers.leave()
    mx.enable_compile()


@pytest.fixture
def install(make_config):
    """Install with a directory of the test's own."""

    def do(**sections: dict[str, Any]) -> dict[str, Any]:
        config = make_config(**sections)
        ours.install(config)
        return config

    return do


def prompt_of(count: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1, 100) for i in range(count)]


def conversation(model: Any, turns: int = 3, start: int = 300) -> list[tuple[list[int], list[int]]]:
    """Prompts, each of which continues what the one before it was answered, and the answers without any cache."""
    cold = scheduler_of(model, enable_prefix_cache=False)
    prompt, told = prompt_of(start, 1), []
    for turn in range(turns):
        answer = ask(cold, prompt).output_token_ids
        told.append((prompt, answer))
        prompt = prompt + answer + prompt_of(30, 50 + turn)
    return told


def in_process(job: dict[str, Any]) -> list[Any]:
    """`tests.vllm.engine` in a process of its own; [answer, reused tokens, kind] of each prompt."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.engine"],
        input=json.dumps(job), text=True, capture_output=True, cwd=ROOT, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not closed" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# What a second and a third turn reuse. Layers that cannot be rewound are stored once, one token into the answer.
REUSE = {
    "llama-bf16": [0, 308, 346],
    "gemma3_text": [0, 301, 301],
    "qwen3_next": [0, 301, 301],
    "falcon_h1": [0, 301, 301],
}


@pytest.mark.parametrize("name", REUSE)
def test_answers_are_those_without_a_cache(install, name):
    model = build(name)
    expected = conversation(model)
    install()
    scheduler = scheduler_of(model)
    for (prompt, answer), reused in zip(expected, REUSE[name], strict=True):
        request = ask(scheduler, prompt)
        assert (request.output_token_ids, request.cached_tokens) == (answer, reused)
    stats = scheduler.get_cache_stats()
    assert (stats["hits"], stats["misses"], stats["tokens_saved"]) == (2, 1, sum(REUSE[name]))
    assert stats["losses"] == {}
    scheduler.close_ssd_tier()  # and its engine goes on: all of it must come from the SSD
    request = ask(scheduler, expected[-1][0])
    assert (request.output_token_ids, request.cache_hit_type) == (expected[-1][1], "ssd_hit")
    assert request.cached_tokens >= REUSE[name][-1]


def test_a_process_without_install_answers_the_same_and_a_restart_reuses_from_the_ssd(make_config):
    expected = conversation(build("llama-bf16"))
    prompts = [prompt for prompt, _ in expected]
    job = {"model": "llama-bf16", "config": make_config(), "prompts": prompts[:2], "end": "stop"}
    untouched = in_process({**job, "config": None})
    first = in_process(job)
    assert [t[0] for t in first] == [t[0] for t in untouched] == [answer for _, answer in expected[:2]]
    assert [t[1] for t in first] == [0, 308]
    # The third turn in a new process, which ends without a word; and once more in another.
    for end, reused in (("none", 346), ("stop", 375)):
        (told,) = in_process({**job, "prompts": prompts[2:], "end": end})
        assert tuple(told) == (expected[2][1], reused, "ssd_hit")


def test_what_left_ram_comes_back_from_the_ssd(install):
    model = build("llama-bf16")
    cold = scheduler_of(model, enable_prefix_cache=False)
    prompts = [prompt_of(600, seed) for seed in range(8)]
    install(ram={"max_memory": 3 * 640 * PER_TOKEN})
    scheduler = scheduler_of(model)
    for prompt in prompts:
        assert ask(scheduler, prompt).cached_tokens == 0
    assert 600 * PER_TOKEN < scheduler.memory_aware_cache._current_memory <= 3 * 640 * PER_TOKEN
    kinds = []
    for prompt in prompts:
        longer = prompt + prompt_of(20, 99)
        request = ask(scheduler, longer)
        assert request.output_token_ids == ask(cold, longer).output_token_ids
        assert request.cached_tokens == 600
        kinds.append(request.cache_hit_type)
    assert kinds.count("ssd_hit") >= 5, kinds
    tiers = scheduler.get_cache_stats()["tiers"]
    assert tiers["promotion"]["started"] >= 5
    assert tiers["ram"]["peak"] <= tiers["ram"]["limit"]
    assert tiers["losses"] == {}


def late(promotion: Promotion, timeout: float | None = None) -> None:
    raise TimeoutError


def test_others_run_while_one_waits_for_the_ssd(install, monkeypatch):
    model = build("llama-bf16")
    install()
    scheduler = scheduler_of(model, max_num_seqs=1)
    prompt, other = prompt_of(300, 1), prompt_of(300, 2)
    answer = ask(scheduler, prompt).output_token_ids
    scheduler.close_ssd_tier()
    with monkeypatch.context() as slow:
        slow.setattr(Promotion, "done", lambda self: False)
        slow.setattr(Promotion, "result", late)
        waits = submit(scheduler, prompt)
        for _ in range(3):
            scheduler.step()
        assert (scheduler.get_num_waiting(), scheduler.get_num_running(), waits.cache_hit_type) == (1, 0, "pending")
        runs = submit(scheduler, other)
        aborted = submit(scheduler, prompt)
        while not runs.output_token_ids[7:]:
            scheduler.step()
        assert waits.cache_hit_type == aborted.cache_hit_type == "pending"
        assert [r.request_id for r in scheduler.waiting] == [waits.request_id, aborted.request_id]
        scheduler.abort_request(aborted.request_id)
        scheduler.step()
    run(scheduler)
    assert (waits.cache_hit_type, waits.cached_tokens, waits.output_token_ids) == ("ssd_hit", 299, answer)
    assert aborted.output_token_ids == []


@pytest.mark.parametrize("name", ["llama-bf16", "gemma3_text", "qwen3_next"])
def test_many_at_once_leave_no_wrong_state(install, name):
    """Prompts of different lengths in one batch are padded; what is kept of them must not show it."""
    model = build(name)
    cold = scheduler_of(model, enable_prefix_cache=False)
    install(ram={"max_memory": "50MB"})
    scheduler = scheduler_of(model, max_num_seqs=3)
    requests = [submit(scheduler, prompt_of(count, count)) for count in (250, 267, 340, 450)]
    run(scheduler)
    for request in requests:
        longer = request.prompt_token_ids + request.output_token_ids + prompt_of(20, 3)
        asked = ask(scheduler, longer)
        assert asked.output_token_ids == ask(cold, longer).output_token_ids
        assert asked.cached_tokens > 0 or name == "qwen3_next"
    assert scheduler.get_cache_stats()["losses"] == {}


def test_damaged_files_are_misses(install, tmp_path):
    model = build("llama-bf16")
    expected = conversation(model, turns=2)
    install()
    scheduler = scheduler_of(model)
    ask(scheduler, expected[0][0])
    scheduler.close_ssd_tier()
    blobs = list((tmp_path / "cache" / "blobs").rglob("*.safetensors"))
    assert blobs
    for blob in blobs:
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
    request = ask(scheduler, expected[1][0])
    assert (request.output_token_ids, request.cached_tokens) == (expected[1][1], 0)


def test_a_directory_in_use_costs_the_ssd_tier_only(install, tmp_path, caplog):
    (tmp_path / "cache").write_text("not a directory")
    install()
    model = build("llama-bf16")
    expected = conversation(model, turns=2)
    scheduler = scheduler_of(model)
    assert "the SSD tier is off" in caplog.text
    for (prompt, answer), reused in zip(expected, (0, 308), strict=True):
        request = ask(scheduler, prompt)
        assert (request.output_token_ids, request.cached_tokens) == (answer, reused)
    folder = str(tmp_path / "snapshot")  # then its own calls write and read a snapshot
    assert scheduler.save_cache_to_disk(folder)
    scheduler.reset()
    assert len(scheduler.memory_aware_cache) == 0
    assert scheduler.load_cache_from_disk(folder) == 2


def test_engines_share_one_ssd_tier(install):
    install()
    one, two = build("llama-bf16"), build("llama-f16")
    schedulers = [scheduler_of(one), scheduler_of(two)]
    prompt = prompt_of(300, 7)
    answers = [ask(s, prompt).output_token_ids for s in schedulers]
    assert [s.memory_aware_cache._runtime for s in schedulers] == [ours._tiers._runtime] * 2
    for s in schedulers:
        s.close_ssd_tier()
    assert ours._tiers._runtime is None
    for s, answer in zip(schedulers, answers, strict=True):
        request = ask(s, prompt)
        assert (request.cache_hit_type, request.cached_tokens, request.output_token_ids) == ("ssd_hit", 299, answer)


async def test_its_engine_saves_when_it_stops(install):
    model = build("llama-bf16")
    install()
    core = importlib.import_module("vllm_mlx.engine_core")
    params = importlib.import_module("vllm_mlx.request").SamplingParams(max_tokens=8, temperature=0.0)
    prompt, answers = prompt_of(300, 4), []
    for turn in range(2):
        engine = core.EngineCore(model, Letters())
        await engine.start()
        asked = [prompt, prompt] if turn else [prompt]
        for tokens in asked:
            output = await asyncio.wait_for(engine.generate(tokens, params), 60)
            answers.append(output.output_token_ids)
        stats = engine.get_cache_stats()
        await engine.stop()
        assert ours._tiers._runtime is None
        engine.close()
    importlib.import_module("vllm_mlx.mlx_streams").bind_generation_streams()  # the engine's thread had them
    assert answers[0] == answers[1] == answers[2]
    assert stats["hits"] == 2
    assert stats["tiers"]["promotion"]["started"] == 1


async def test_its_engine_with_a_model_that_lives_on_a_thread_of_its_own(install):
    """As its server runs it: requests are admitted and computed on the thread that loaded the model."""
    install()
    core = importlib.import_module("vllm_mlx.engine_core")
    params = importlib.import_module("vllm_mlx.request").SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [prompt_of(300, 4) + prompt_of(count, count) for count in (20, 30, 40)]
    with ThreadPoolExecutor(1) as worker:
        model = await asyncio.get_running_loop().run_in_executor(worker, build, "llama-bf16")
        told = []
        for _ in range(2):
            engine = core.AsyncEngineCore(model=model, tokenizer=Letters(), generation_worker=worker)
            await engine.engine.start()
            first = await asyncio.wait_for(engine.engine.generate(prompts[0], params), 60)
            asked = [engine.engine.generate(prompt, params) for prompt in prompts]
            told.append([o.output_token_ids for o in (first, *await asyncio.wait_for(asyncio.gather(*asked), 60))])
            stats = engine.get_cache_stats()
            await engine.engine.stop()
            await asyncio.get_running_loop().run_in_executor(worker, engine.engine.close)
    importlib.import_module("vllm_mlx.mlx_streams").bind_generation_streams()
    assert told[0] == told[1]
    assert told[0][0] == told[0][1]
    assert (stats["hits"], stats["misses"], stats["losses"]) == (4, 0, {})


def test_what_its_multimodal_batches_call(install):
    """They look up at once, so that here the look-up waits. (The batches themselves need vision models: not run.)"""
    model = build("llama-bf16")
    install()
    scheduler = scheduler_of(model)
    prompt = prompt_of(300, 1)
    ask(scheduler, prompt)
    scheduler.close_ssd_tier()
    cache = ours.PrefixCache(model=model)
    assert cache.fetch_exact_auxiliary(prompt) is None
    state, remaining = cache.fetch(prompt)
    assert (remaining, cache._last_match_type) == (prompt[-1:], "lcp")
    assert [layer.offset for layer in cache.clone_for_replay(state)] == [299] * 2
    assert cache.prepare_store(prompt, state, {"last_logits": None}) is None
    assert cache.fetch(prompt_of(300, 2))[0] is None
    assert cache.store(prompt[:299], state)


def test_a_reset_and_the_servers_own_files(install, tmp_path):
    model = build("llama-bf16")
    install()
    scheduler = scheduler_of(model, ssd_cache_dir=str(tmp_path / "theirs"))  # not opened
    prompt = prompt_of(300, 4)
    ask(scheduler, prompt)
    assert scheduler.save_cache_to_disk(str(tmp_path / "saved"))
    assert scheduler.memory_aware_cache._runtime.tier.stats()["blocks"] == 2
    assert scheduler.load_cache_from_disk(str(tmp_path / "saved")) == 0
    longer = prompt + prompt_of(300, 5)
    ask(scheduler, longer)
    scheduler.deep_reset()
    assert len(scheduler.memory_aware_cache) == 0
    assert ask(scheduler, longer).cached_tokens == 599
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache"]


ORDERS = """
import sys, types
if {early}:
    import vllm_mlx.memory_cache as memory, vllm_mlx.scheduler
    other = sys.modules["vllm_mlx.other"] = types.ModuleType("vllm_mlx.other")
    other.Named, other.trim = memory.MemoryAwarePrefixCache, memory._trim_cache_offset
from tiered_cache import memory_cache as contract
from tiered_cache.integrations import vllm_mlx as ours
ours.install()
ours.install()
import vllm_mlx.memory_cache as memory, vllm_mlx.scheduler as scheduler, vllm_mlx.ssd_cache as ssd
assert scheduler.MemoryAwarePrefixCache is ours.ScheduledCache
assert memory.MemoryAwarePrefixCache is ours.PrefixCache
assert scheduler.MemoryCacheConfig is memory.MemoryCacheConfig is contract.MemoryCacheConfig
assert memory.CacheStats is contract.CacheStats
assert scheduler.SSDCacheTier is ssd.SSDCacheTier is ours._NoTier
if {early}:
    assert (other.Named, other.trim) == (ours.PrefixCache, contract._trim_cache_offset)
"""


@pytest.mark.parametrize("early", [True, False])
def test_names_are_ours_whatever_was_imported_first(early):
    script = ORDERS.format(early=early)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_limits_are_ours_where_set_else_the_engines(make_config):
    model = build("llama-bf16")
    ours.install(make_config(ram={"max_memory": "8MB"}))
    assert scheduler_of(model, cache_memory_mb=64).memory_aware_cache.memory_limit_mb == pytest.approx(8e6 / 2**20)
    ours._tiers.leave()
    config = make_config()
    ours.install({**config, "ram": {"min_prefix_tokens": 64}})
    settings = {"kv_cache_quantization": True, "kv_cache_quantization_group_size": 32}
    scheduler = scheduler_of(tiny_llama(), cache_memory_mb=64, **settings)
    cache = scheduler.memory_aware_cache
    assert (cache.memory_limit_mb, cache.min_prefix_tokens) == (64, 64)
    assert cache.quantization == (32, 8)
    assert ask(scheduler, prompt_of(300, 1)).cached_tokens == 0
    assert cache._current_memory == 308 * (2 * 2 * 2 * 32 * 9 // 8)  # a byte, and an eighth for scales and biases
    assert ask(scheduler, prompt_of(300, 1)).cached_tokens == 299


def test_a_bound_of_its_own_and_a_change_of_it(install):
    """`--max-kv-size` makes windows of all layers; states of another one must not be taken for these."""
    model = build("llama-bf16")
    install()
    for bound in (200, 0, 240):
        cold = scheduler_of(model, enable_prefix_cache=False, max_kv_size=bound)
        scheduler = scheduler_of(model, max_kv_size=bound)
        prompt, reused = prompt_of(300, 1), []
        for turn in range(3):
            expected, request = ask(cold, prompt), ask(scheduler, prompt)
            assert request.output_token_ids == expected.output_token_ids
            reused.append(request.cached_tokens)
            prompt = prompt + request.output_token_ids + prompt_of(30, turn)
        if bound == 200:
            assert reused == [0, 301, 301]
        scheduler.close_ssd_tier()


def test_what_cannot_be_installed_says_so_in_a_sentence(monkeypatch):
    with pytest.raises(ConfigError):
        ours.install({"ssd": {"pth": "x"}})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm_mlx.scheduler", None)
        with pytest.raises(ImportError, match=r"vllm-mlx cannot be imported .*: install vllm-mlx==0\.6\.0"):
            ours.install()
    with monkeypatch.context() as patch:
        patch.delattr(importlib.import_module("vllm_mlx.scheduler").Scheduler, "close_ssd_tier")
        with pytest.raises(ImportError, match=r"vllm-mlx 0\.6\.0 has no close_ssd_tier"):
            ours.install()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda _: "0.7.0")
        with pytest.warns(RuntimeWarning, match=r"tested with 0\.6\.0"):
            ours.install()


def test_the_readmes_example_installs_it(make_config):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "vllm_mlx" in b]
    exec(code.replace('"tiered-cache.toml"', "config"), {"config": make_config()})
    assert isinstance(scheduler_of(tiny_llama()).memory_aware_cache, ours.ScheduledCache)
