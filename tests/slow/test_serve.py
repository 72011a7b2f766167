"""`tiered-cache serve` as its users meet it: a process, HTTP, restarts, kills; answers as the stock server's."""

from __future__ import annotations

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.served import (
    SYSTEM,
    Answer,
    Messages,
    Served,
    chat,
    flushed,
    longest_gap,
    prompts,
)
from tests.served_models import BATCHED_KINDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TURN = 3  # tokens of a template around a message, at most, and the last one of an answer, which is not in the cache yet


THINGS = {"Ada": "keel", "Ben": "mast", "Cleo": "rudder"}
FIRST = [f"I am {n}. Who made the first {t}, and what is it good for? " * 2 + t for n, t in THINGS.items()]
SECOND = "And who sailed it?"


def rounds(server: Served) -> tuple[list[Answer], list[Answer]]:
    """Three conversations of two rounds at once: the first round's answers in whole, the second's as streams."""
    with ThreadPoolExecutor(3) as pool:
        first = list(pool.map(lambda f: server.ask(chat(f)), FIRST))
        second = list(pool.map(lambda f, a: server.ask(chat(f, a.text, SECOND), stream=True), FIRST, first))
    return first, second


def texts(answers: list[Answer]) -> list[str]:
    return [a.text for a in answers]


def all_but_the_new_turn(first: Answer, second: Answer) -> None:
    assert second.cached >= first.prompt + len(first.text) - 1
    assert second.prompt - second.cached <= len(SECOND) + TURN + 1


@pytest.mark.parametrize("kind", BATCHED_KINDS)
def test_the_second_round_is_cached_again_after_a_restart_and_a_kill(models, config, kind):
    model = models(kind)
    with Served(model) as stock:
        expected = [texts(answers) for answers in rounds(stock)]
        assert len(set(expected[0])) == 3
    with Served(model, config=config()) as server:
        first, second = rounds(server)
        assert [texts(first), texts(second)] == expected
        for f, s in zip(first, second, strict=True):
            all_but_the_new_turn(f, s)
        new = server.ask(chat("Who are you?"))
        assert new.cached >= len(SYSTEM)  # the system prompt is a resume point
        assert server.end() == 0
        assert [s["promotion"]["prefill_rate"] > 0 for s in server.stats["models"].values()] == [True]
    with Served(model, config=config(write="through")) as server:
        again = server.ask(chat(FIRST[0], first[0].text, SECOND))  # the very first request
        all_but_the_new_turn(first[0], again)
        assert again.text == expected[1][0]
        other = server.ask(chat("Where is the " + "harbour? " * 9))
        flushed(config().parent / "cache")
        server.process.kill()
        server.process.wait()
    with Served(model, config=config()) as server:
        after = server.ask(chat("Where is the " + "harbour? " * 9, other.text, SECOND))
        all_but_the_new_turn(other, after)
        assert server.end(signal.SIGINT) == 0
        faults = server.stats["faults"]
        assert not faults


@pytest.mark.parametrize("flags", ["draft", "quantized"])
def test_what_is_served_one_request_at_a_time(models, config, flags):
    """With a draft model, and with quantized keys and values. Greedy answers are those of the model alone."""
    model = models("llama")
    if flags == "quantized" and "--kv-bits" not in Path(find_spec("mlx_lm.server").origin).read_text():
        pytest.skip("this mlx-lm has no --kv-bits")
    quantized = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "100"]
    given = ["--draft-model", str(models("llama", 1))] if flags == "draft" else quantized
    with Served(model, *(quantized if flags == "quantized" else [])) as stock:
        first = stock.ask(chat(FIRST[0]))
        second = stock.ask(chat(FIRST[0], first.text, SECOND), stream=True)
    for restarted in (False, True):
        with Served(model, *given, config=config()) as server:
            a = server.ask(chat(FIRST[0]))
            b = server.ask(chat(FIRST[0], a.text, SECOND), stream=True)
            assert [a.text, b.text] == [first.text, second.text]
            assert b.cached >= a.prompt + len(a.text) - 2
            assert (a.cached >= a.prompt - 1) == restarted
    with Served(model, config=config()) as server:  # their states are of no use without the flags
        plain = server.ask(chat(FIRST[0]))
        assert plain.cached == 0
        assert server.ask(chat(FIRST[0])).text == plain.text


def gives_up(server: Served, asked: str) -> None:
    """A client that goes away while its prompt is being read: nothing is computed for it."""
    connection = server.send(chat(asked, system=asked * 4), 12, stream=False)
    time.sleep(0.4)
    connection.close()
    time.sleep(0.3)
    assert server.end() == 0
    (stats,) = server.stats["models"].values()
    assert stats["promotion"]["started"] == 2
    assert stats["ram"]["hits"] + stats["ram"]["misses"] == 3  # the fourth never came to the model's thread


def test_a_slow_disk_holds_up_nobody_else(models, config, tmp_path):
    """While 1.5 s of reading go on for one request, another's tokens come as when nothing is read slowly.

    Other programs on the machine only make gaps longer, and a stall would be in every attempt: the best of three
    counts.
    """
    with Served(models("llama"), config=config()) as server:
        for f in FIRST:
            server.ask(chat(f, system=f * 4))
    gaps: dict[bool, list[float]] = {False: [], True: []}
    took: dict[bool, list[float]] = {False: [], True: []}
    for attempt in range(3):
        for slow in (False, True):
            (tmp_path / "slow").unlink(missing_ok=True)
            with Served(models("llama"), config=config(), faults=tmp_path) as server, ThreadPoolExecutor(1) as pool:
                server.ask(chat("Hello?", system="none"))
                running = pool.submit(server.ask, chat("Tell me all.", system="none"), 2500, stream=True)
                time.sleep(0.5)
                if slow:
                    (tmp_path / "slow").touch()
                start = time.monotonic()
                other = server.ask(chat(FIRST[attempt], system=FIRST[attempt] * 4))
                end = time.monotonic()
                assert other.cached == other.prompt - 1
                times = running.result().times
                assert times[-1] > end, "the other stream ended too early to tell anything"
                gaps[slow].append(longest_gap(times, start, end))
                took[slow].append(end - start)
                if slow and attempt == 0:
                    gives_up(server, FIRST[1])
        if min(gaps[True]) <= min(gaps[False]) + 0.05:
            break
    print("longest gaps", gaps, "requests", took)
    assert min(took[True]) > 1.5 > min(took[False])
    assert min(gaps[True]) <= min(gaps[False]) + 0.05


def test_a_thousand_requests(models, config, tmp_path):
    """All answered, the same prompt always alike, nothing grows, no limit is passed; the disk is full for a while."""
    budget, limit = 8_000_000, 4_000_000
    answers: dict[str, set[str]] = {}
    lock, sizes, state = threading.Lock(), [], []
    path = config(memory=str(limit), budget=str(budget), shortest=16)
    with Served(models("llama"), config=path, faults=tmp_path) as server:
        process = psutil.Process(server.process.pid)

        def one(item: tuple[int, Messages]) -> None:
            n, messages = item
            if n == 400:
                (tmp_path / "full").touch()
            if n == 600:
                (tmp_path / "full").unlink()
            if n % 20 == 7:  # it goes away: at once, or in the middle of its stream
                connection = server.send(messages, 30, stream=True)
                if n % 40 == 7:
                    connection.getresponse().readline()
                connection.close()
                return
            got = server.ask(messages, 3, stream=n % 3 == 0)
            with lock:
                answers.setdefault(json.dumps(messages), set()).add(got.text)
                if n % 50 == 0:
                    sizes.append(sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*") if f.is_file()))
                if n % 100 == 0:
                    state.append((process.memory_info().rss, process.num_threads()))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, enumerate(prompts(1))))
        time.sleep(1)
        state.append((process.memory_info().rss, process.num_threads()))
        assert server.end() == 0
    (stats,) = server.stats["models"].values()
    print("rss and threads", state, "ssd", max(sizes), stats, server.stats["faults"])
    assert all(len(texts) == 1 for texts in answers.values())
    assert not server.stats["faults"]
    assert stats["ram"]["peak"] <= limit
    assert stats["ssd"]["on"]
    assert max(sizes) <= budget
    assert stats["promotion"]["started"] > 10
    assert max(rss for rss, _ in state[4:]) - state[3][0] < 60 * 2**20
    assert state[-1][1] <= state[3][1] + 2


def test_a_model_that_the_first_request_names(models, config):
    """No tokenizer is there before, so the look-up itself waits for the SSD, while nobody else is served."""
    model = models("llama")
    for restarted in (False, True):
        with Served(None, config=config()) as server:
            answer = server.ask(chat(FIRST[0]), model=str(model))
            assert answer.cached == (answer.prompt - 1 if restarted else 0)


def test_the_end_lets_a_running_answer_finish(models, config):
    with (
        Served(models("llama"), "--prompt-cache-bytes", "2MB", config=config()) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.ask(chat("Hello?"))
        running = pool.submit(server.ask, chat("Tell me all."), 400, stream=True)
        time.sleep(0.3)
        assert server.end() == 0
        assert len(running.result().text) == 400
        with pytest.raises(OSError, match="refused"):
            server.ask(chat("Hello?"))
        (stats,) = server.stats["models"].values()
        assert stats["ram"]["limit"] <= 2 * 2**20


def test_a_second_signal_cuts_answers_short(models, config):
    with Served(models("llama"), config=config()) as server:
        connection = server.send(chat("Tell me all."), 100_000, stream=True)
        response = connection.getresponse()
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        start = time.monotonic()
        assert server.end(signal.SIGINT) == 0
        assert time.monotonic() - start < 5
        connection.close()
