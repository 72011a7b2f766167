"""`tiered-cache serve` and what people get wrong with it, or with the requests they send."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.served import Client, Served, chat, free_port, refusal
from tiered_cache import TieredCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIRST = "I am Ada. Who made the first keel, and what is it good for? Tell me all that you know of it."
SECOND = "I am Ben. Who sailed it, and where to? Tell me all that you know of the sea and of the stars."


def test_bad_input_gets_a_sentence(models, config, tmp_path):
    model = ["--config", config(), "--model", models("llama")]
    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        calls = {
            "--no-such-flag": [*model, "--no-such-flag"],
            "cannot be read": ["--config", tmp_path / "none.toml", "--model", models("llama")],
            f"port {port} of 127.0.0.1 is in use": [*model, "--port", port],
            "/no/such/model: there is no such directory": ["--config", config(), "--model", "/no/such/model"],
        }
        for expected, told in zip(calls, pool.map(lambda c: refusal(*c), calls.values()), strict=True):
            assert expected in told
    with TieredCache.open({"ssd": {"path": str(tmp_path / "cache")}}, model=Nothing()):
        assert "in use by process" in refusal(*model, "--port", free_port())


class Nothing:
    def make_cache(self) -> list[Any]:
        return []


def test_help_shows_both_sets_of_options():
    command = [str(Path(sys.executable).with_name("tiered-cache")), "serve", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.index("--config") < out.index("mlx_lm.server are taken") < out.index("--decode-concurrency")


def test_the_readmes_command_answers(models, config):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (words,) = [line.split() for line in readme.splitlines() if line.startswith("tiered-cache serve ")]
    values = {"--model": str(models("llama")), "--port": str(free_port())}
    given = [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    command = [str(Path(sys.executable).parent / given[0]), *given[1:], "--config", str(config())]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with suppress(OSError), socket.create_connection(("127.0.0.1", int(values["--port"]))):
                    break
                time.sleep(0.05)
            client = Client(int(values["--port"]))
            assert client.ask(chat(FIRST)).text
            assert client.ask(chat(FIRST)).cached > len(FIRST)
        finally:
            process.terminate()
            assert process.wait(30) == 0


MALFORMED = [
    {"stop": [5]}, {"stop": 5}, {"stop": [None]}, {"stop": [""]}, {"logit_bias": {"99999999": 1}},
    {"top_k": 10**6, "temperature": 1},
]  # fmt: skip


def test_a_malformed_request_costs_nobody_else_anything(models, config):
    """mlx-lm's own server serves nobody after some of these."""
    with Served(models("llama"), config=config()) as server:
        first = server.ask(chat(FIRST))
        for more in MALFORMED:
            connection = server.send(chat("Hello"), 5, False, **more)
            response = connection.getresponse()
            assert (response.status, "error" in json.load(response)) == (404, True), more
            connection.close()
        for prompt in ("", ["a", "b"]):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 3}), headers)
            assert connection.getresponse().status == 404
            connection.close()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/v1/models")
        assert str(models("llama")) in connection.getresponse().read().decode()
        connection.close()
        again = server.ask(chat(FIRST))
        assert (again.text, again.cached) == (first.text, again.prompt - 1)


def test_an_answer_that_the_end_cut_short_does_not_look_whole(models, config):
    with Served(models("llama"), config=config()) as server, ThreadPoolExecutor(1) as pool:
        server.ask(chat(FIRST))
        answer = pool.submit(server.ask, chat(SECOND), 100_000, seed=1)  # one at a time, not in a batch
        time.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        for _ in range(20):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert server.process.wait(20) == 0
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            answer.result(10)
