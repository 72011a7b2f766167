"""mlx-lm's server in a process of its own, ours or the stock one, and a client for it.

Run as a program, this module is `tiered-cache` with two faults that a test switches on by making a file: `slow` makes
each read of a block take 1.5 seconds, `full` fails each write as a full disk does.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from unittest.mock import patch

Messages = list[dict[str, str]]
SLOW = 1.5  # seconds
SYSTEM = "You answer questions about ships and the sea, and nothing else. " * 6


def chat(*turns: str, system: str = SYSTEM) -> Messages:
    """A system prompt, then a user and an assistant by turns."""
    roles = ["user", "assistant"] * len(turns)
    said = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return [{"role": "system", "content": system}, *said]


def prompts(seed: int) -> list[Messages]:
    """A thousand: repeats, prefixes and diverging tails of a few conversations."""
    draw = random.Random(seed)
    words = ["sea", "ship", "mast", "keel", "sail", "wind", "rope", "deck", "port", "star"]
    text = [" ".join(draw.choices(words, k=20)) for _ in range(12)]
    found = []
    for _ in range(1000):
        system, user = draw.choice(text[:4]), draw.choice(text[4:])
        kind = draw.randrange(4)
        if kind == 1:
            user = user[: draw.randrange(1, len(user))]
        elif kind == 2:
            user = user[: draw.randrange(1, len(user))] + " ".join(draw.choices(words, k=10))
        found.append(chat(*([user, "ay", "more"] if kind == 3 else [user]), system=system))
    return found


class Answer(NamedTuple):
    text: str
    prompt: int  # tokens
    cached: int
    times: list[float]  # of each event of a stream


class Client:
    """Asks whoever listens on a port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def send(self, messages: Messages, tokens: int, stream: bool, **more: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream, **more}
        if stream:
            body["stream_options"] = {"include_usage": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def ask(self, messages: Messages, tokens: int = 12, *, stream: bool = False, **more: Any) -> Answer:
        connection = self.send(messages, tokens, stream, **more)
        try:
            response = connection.getresponse()
            assert response.status == 200, response.read()
            if stream:
                events = list(events_of(response))
                texts = [c["delta"].get("content") or "" for _, e in events for c in e["choices"]]
                usage = events[-1][1]["usage"]
                text, times = "".join(texts), [t for t, _ in events]
            else:
                answer = json.load(response)
                usage, text, times = answer["usage"], answer["choices"][0]["message"]["content"], [time.monotonic()]
        finally:
            connection.close()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(text, usage["prompt_tokens"], cached, times)


class Served(Client):
    """A server. It ends with SIGTERM where the block ends, if it has not before."""

    def __init__(self, model: Path | None, *flags: str, config: Path | None = None, faults: Path | None = None) -> None:
        """Ours with a configuration, the stock one without."""
        super().__init__(free_port())
        ours = ["serve", *(["--config", str(config)] if config else [])]
        program = ["-m", "tests.served", str(faults or "")] if config else ["-m", "mlx_lm", "server"]
        named = ["--model", str(model)] if model else []
        arguments = [*(ours if config else []), *named, "--port", str(self.port), *flags]
        descriptor, name = tempfile.mkstemp()
        self._log = Path(name)
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments], stderr=descriptor, cwd=Path(__file__).parents[1]
        )
        os.close(descriptor)
        self.stats: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for _ in range(600):
            if "Starting httpd" in self.log():
                break
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.05)
        raise TimeoutError(self.log())

    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.end()
        self._log.unlink()

    def end(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal and wait; the exit code. The statistics that ours logs at its end are kept."""
        self.process.send_signal(number)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise TimeoutError(self.log()[-3000:]) from None
        for line in self.log().splitlines():
            if "closing: " in line:
                self.stats = json.loads(line.partition("closing: ")[2])
        return self.process.returncode


def events_of(response: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    """When each event of a stream came, and what it said."""
    while line := response.readline():
        if line.startswith(b"data: {"):
            yield time.monotonic(), json.loads(line[6:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def flushed(folder: Path) -> None:
    """Wait until no more files come."""
    before: list[str] = []
    for _ in range(100):
        time.sleep(0.7)
        now = sorted(p.name for p in (folder / "blobs").rglob("*.safetensors"))
        if now and now == before:
            return
        before = now
    raise TimeoutError


def longest_gap(times: list[float], start: float, end: float) -> float:
    return max((b - a for a, b in pairwise(times) if b > start and a < end), default=0.0)


def refusal(*arguments: object) -> str:
    """The one sentence of a call that ends with exit code 2."""
    command = [str(Path(sys.executable).with_name("tiered-cache")), "serve", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("tiered-cache: ")]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def main() -> None:
    """`tiered-cache` with the faults."""
    import ssd_tier.tier
    from ssd_tier.files import Directory
    from tiered_cache.cli import main as command

    faults = Path(sys.argv.pop(1) or "/nowhere")
    read, write = ssd_tier.tier.read_block, Directory.write

    def slow_read(*arguments: Any) -> Any:
        if (faults / "slow").exists():
            time.sleep(SLOW)
        return read(*arguments)

    def full_write(*arguments: Any) -> Any:
        if (faults / "full").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    ssd_tier.tier.read_block = slow_read
    patch.object(Directory, "write", full_write).start()
    command()


if __name__ == "__main__":
    main()
