"""mlx-lm's own server and ours, two agents taking turns: how long each waits for the first token of an answer."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from bench.result import Options, Result, Skipped
from tiered_cache.demo.conversation import AGENTS, FOLLOW_UPS, SYSTEM
from tiered_cache.demo.smollm2 import ModelMissing, export_smollm2

ANSWER = 8  # tokens
Message = dict[str, str]


def serving(folder: Path, options: Options) -> list[Result]:
    """SmolLM2 over HTTP: two agents, three turns each (--quick: two), a restart, one turn more."""
    try:
        model = export_smollm2(folder / "model")
    except ModelMissing as e:
        raise Skipped(str(e)) from e
    settings = folder / "tiered-cache.toml"
    settings.write_text(f'[ram]\nmax_memory = "1GiB"\n[ssd]\npath = "{folder / "cache"}"\nbudget = "2GB"\n')
    ours = ["-c", "from tiered_cache.cli import main; main()", "serve", "--config", str(settings)]
    turns = 2 if options.quick else 3
    waits, said = {}, {}
    for name, program in (("stock", ["-m", "mlx_lm", "server"]), ("ours", ours)):
        waits[name], said[name] = _two_runs([sys.executable, *program, "--model", str(model)], turns)
    assert said["stock"] == said["ours"], said
    results = []
    for kind in ("first turn", "later turns", "after a restart"):
        stock, own = (median(waits[name][kind]) for name in ("stock", "ours"))
        figures = {"stock_s": stock, "ours_s": own, "ratio": stock / own}
        value = f"{own:.2f} s, mlx-lm's server {stock:.2f} s: {stock / own:.1f} times as fast"
        last = kind == "after a restart"
        met = (stock / own >= 5 if last else own <= 1.5 * stock) if not options.quick else None
        aim = ">= 5 times as fast" if last else "no slower"
        results.append(Result(f"serving_{kind.split()[0]}", f"first token over HTTP, {kind}", value, aim, met, figures))
    return results


def _two_runs(command: list[str], turns: int) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds to the first token by kind of turn, and all answers."""
    waits: dict[str, list[float]] = {"first turn": [], "later turns": [], "after a restart": []}
    talks: list[list[Message]] = [[{"role": "system", "content": SYSTEM}] for _ in range(2)]
    openings = list(AGENTS.values())
    said = []
    for run, numbers in enumerate((range(turns), range(turns, turns + 1))):
        with _server(command) as port:
            for turn in numbers:
                kind = "after a restart" if run else "later turns" if turn else "first turn"
                for talk, opening in zip(talks, openings, strict=False):
                    talk.append({"role": "user", "content": FOLLOW_UPS[turn - 1] if turn else opening})
                    wait, answer = _ask(port, talk)
                    talk.append({"role": "assistant", "content": answer})
                    waits[kind].append(wait)
                    said.append(answer)
    return waits, said


@contextmanager
def _server(command: list[str]) -> Iterator[int]:
    """A server that has loaded its model; the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "WARNING"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        for _ in range(1200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None:
                raise Skipped(f"the server ended: {process.communicate()[1].decode()[-300:]}")
            time.sleep(0.05)
        _ask(port, [{"role": "user", "content": "Hi"}])  # the model is loaded with the first request
        yield port
    finally:
        process.send_signal(signal.SIGTERM if "serve" in command else signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()


def _ask(port: int, messages: list[Message]) -> tuple[float, str]:
    """Seconds to the first piece of the answer, and the whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "stream": True}
    started, first, text = time.perf_counter(), None, ""
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while line := response.readline():
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            piece = "".join(c["delta"].get("content") or "" for c in event["choices"])
            first = first or (time.perf_counter() - started if piece else None)
            text += piece
    connection.close()
    if first is None:
        raise Skipped(f"no answer to {messages[-1]['content']!r}")
    return first, text
