"""Replays: what they count is what a cache of these sizes does, as figures that can be worked out by hand say."""

from __future__ import annotations

import json
import random

import pytest

from tests.integration.test_cli import refused, run
from tests.models import random_tokens
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache
from tiered_cache.simulation import BLOCK_TOKENS, Request, Simulation, TraceError, read_trace
from tiered_cache.traffic import FIRST, SYSTEM, TURN_IN, TURN_OUT, agents

UNIT = 100  # bytes a block


def talk(*blocks: int) -> Request:
    return Request(BLOCK_TOKENS * len(blocks), blocks)


def lru(requests: list[Request], blocks: int) -> int:
    """Tokens that leaf-first LRU in RAM alone reuses, in twenty lines of its own."""
    order: dict[tuple[int, ...], None] = {}  # prefixes, least recently used first
    reused = 0
    for request in requests:
        prefixes = [tuple(request.blocks[: i + 1]) for i in range(len(request.blocks))]
        known = next((i for i, p in enumerate(prefixes) if p not in order), len(prefixes))
        reused += request.covered(known)
        if len(prefixes) > blocks:
            prefixes = prefixes[:known]
        for prefix in reversed(prefixes[:known]):
            order.pop(prefix)
            order[prefix] = None
        missing = prefixes[known:]
        while len(order) + len(missing) > blocks:
            order.pop(next(p for p in order if not any(q[:-1] == p for q in order)))
        for prefix in reversed(prefixes):
            order.pop(prefix, None)
            order[prefix] = None
    return reused


def test_ram_alone_reuses_what_another_lru_does():
    rng = random.Random(1)
    starts = [[s, *(100 * s + i for i in range(rng.randrange(1, 6)))] for s in range(12)]
    requests = [talk(*rng.choice(starts), *rng.sample(range(5000, 5010), rng.randrange(3))) for _ in range(400)]
    out = Simulation(20 * UNIT, 0, UNIT).run(requests)
    assert out.ram_tokens == lru(requests, 20)
    assert (out.ssd_tokens, out.written, out.read) == (0, 0, 0)
    assert 0 < out.ram_tokens < out.ceiling_tokens < out.tokens


def test_what_leaves_ram_comes_back_from_the_ssd_and_is_written_once():
    a, b = talk(1, 2, 3), talk(4, 5, 6)
    out = Simulation(3 * UNIT, 100 * UNIT, UNIT).run([a, b, a, b])
    assert (out.ram_tokens, out.ssd_tokens, out.ceiling_tokens) == (0, 2 * a.tokens, 2 * a.tokens)
    assert (out.written, out.read) == (6, 6)


def test_a_full_ssd_takes_only_what_came_up_before():
    noise = [talk(i, i + 1) for i in range(1000, 3000, 2)]
    dear = talk(1, 2, 3)
    requests = [r for i, n in enumerate(noise) for r in ([n, dear] if i % 20 == 19 else [n])]
    second, everything = (Simulation(8 * UNIT, 40 * UNIT, UNIT, p).run(requests) for p in ("second-touch", "all"))
    assert everything.written > 1900
    assert second.written < 100
    assert second.share > 0.9 * everything.ceiling_tokens / everything.tokens > everything.share


def test_the_last_block_counts_for_the_tokens_it_has():
    request = Request(BLOCK_TOKENS + 10, [1, 2])
    out = Simulation(9 * UNIT, 0, UNIT).run([request, request])
    assert (out.tokens, out.ram_tokens) == (2 * request.tokens, request.tokens)


def test_agents_share_what_they_begin_with_and_grow_by_their_turns():
    requests = list(agents(3, turns=4))
    assert all(len(r.blocks) == -(-r.tokens // BLOCK_TOKENS) for r in requests)
    shared = SYSTEM // BLOCK_TOKENS
    assert len({tuple(r.blocks[:shared]) for r in requests}) == 1
    grown = [r.tokens for r in requests if r.tokens > SYSTEM + FIRST]
    assert max(grown) == SYSTEM + FIRST + 3 * (TURN_IN + TURN_OUT)
    out = Simulation(10**6, 0, UNIT).run(requests)
    assert out.ram_tokens == out.ceiling_tokens


def test_a_line_that_is_no_request_is_named(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"input_length": 5, "hash_ids": [1]}\n{"input_length": 5}\n')
    with pytest.raises(TraceError, match=r"line 2.*hash_ids"):
        list(read_trace(file))
    assert "line 2" in refused("simulate", file)
    assert "No such file" in refused("simulate", tmp_path / "none")
    assert "must be second-touch or all" in refused("simulate", "agents:1", "--admission", "some")


def test_the_command_prints_a_row_for_each_pair_of_sizes(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"input_length": 1024, "hash_ids": [i, 9]}) + "\n" for i in [1, 2, 1, 2]))
    rows = json.loads(run("simulate", file, "--ram", "1GB,4GB", "--ssd", "0,20GB", "--json").stdout)
    assert [(r["ram"], r["ssd"]) for r in rows] == [(a, b) for a in (10**9, 4 * 10**9) for b in (0, 20 * 10**9)]
    assert {r["share"] for r in rows} == {0.5} == {r["ceiling"] for r in rows}
    text = run("simulate", file, "--ram", "1GB").stdout
    assert "4 requests, 4,096 tokens" in text
    assert "50.0 %" in text


def test_a_log_of_look_ups_is_replayed_as_what_happened(make_config, tmp_path):
    """Four turns of a talk and a stranger: the same requests, and the same reuse, within a block."""
    file = tmp_path / "look-ups.jsonl"
    config = make_config(cache={"look_up_log": str(file)}, ram={"max_memory": "64MB"})
    talk, reused, asked = random_tokens(2000, 1), 0, 0
    with TieredCache.open(config, model=ShapeOnlyModel()) as cache:
        for tokens in (talk[:700], talk[:1300], random_tokens(900, 2), talk[:1700], talk):
            promotion = cache.promote(tokens)
            _, remaining = promotion.result(20) if promotion else cache.fetch(tokens)
            reused, asked = reused + len(tokens) - len(remaining), asked + len(tokens)
            assert cache.store(tokens, state_of(tokens))
    assert not set(str(talk[:3]).strip("[]").split(", ")) <= set(file.read_text().split())
    assert file.stat().st_mode & 0o777 == 0o600
    (row,) = json.loads(run("simulate", file, "--ram", "1GB", "--ssd", "0", "--json").stdout)
    assert (row["requests"], row["tokens"]) == (5, asked)
    assert reused - 3 * BLOCK_TOKENS <= row["share"] * asked <= reused + 1


def test_a_log_that_cannot_be_written_is_told_once_and_costs_nothing(make_config, tmp_path, caplog):
    config = make_config(cache={"look_up_log": str(tmp_path / "none" / "log")})
    with TieredCache.open(config, model=ShapeOnlyModel()) as cache:
        for seed in range(3):
            assert cache.fetch(random_tokens(600, seed))[0] is None
    assert sum("cannot be written" in r.getMessage() for r in caplog.records) == 1
