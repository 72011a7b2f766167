"""`serve`: mlx-lm's server with a cache in two tiers, from its flags to its end."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server

from tiered_cache.config import Config
from tiered_cache.integrations.mlx_lm import TieredPromptCache
from tiered_cache.integrations.mlx_lm_server import Generator, Handler

log = logging.getLogger("tiered_cache")

DRAIN = 10.0  # seconds that running requests get once the server is told to stop


class CannotServe(LookupError):
    """What a person asked for cannot be served. One sentence that says why."""


class Stop:
    """SIGTERM and SIGINT: the first one ends the server in good order, the second one cuts running requests short."""

    def __init__(self) -> None:
        self.asked = False
        self.hurry = threading.Event()
        self.server: ThreadingHTTPServer | None = None

    def on_signal(self, *_: object) -> None:
        """The handler, on the main thread: it must not wait for the loop that it interrupts."""
        if self.asked:
            self.hurry.set()
        else:
            self.now()

    def now(self) -> None:
        """Have the HTTP server end. Any thread."""
        self.asked = True
        if self.server:
            threading.Thread(target=self.server.shutdown, daemon=True).start()

    def started(self, http: ThreadingHTTPServer) -> None:
        """There is a server now."""
        self.server = http
        if self.asked:
            self.now()

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle the signals meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():  # one more signal must not disturb the last steps of an orderly end
                signal.signal(number, signal.SIG_IGN if self.asked else handler)


def serve(config: Config, argv: Sequence[str]) -> int:
    """Run mlx-lm's server with these flags of its own until SIGTERM or SIGINT; the exit code.

    Main thread. Raises `CannotServe`, `TierError` and OSError, each before the model is loaded, but for a model that
    cannot be.
    """
    stop = Stop()
    before = sys.argv, server.run, argparse.ArgumentParser.error

    def run(host: str, port: int, provider: Any, *_: Any, **__: Any) -> None:
        _restore(*before)
        if mx.distributed.init().size() > 1:
            log.warning("several machines share this model: it is served without the cache")
            server.run(host, port, provider)
            return
        with stop.handling():
            _run(config, argv, stop, host, port, provider)

    try:
        _restore(["tiered-cache serve", *argv], run, _refuse)
        server.main()
    except (KeyError, ValueError) as e:
        if server.run is not run:
            raise  # not while the flags were parsed
        raise CannotServe(f"an option has a value that cannot be used ({e}); see `tiered-cache serve --help`") from e
    finally:
        _restore(*before)
    return 0


def _restore(argv: list[str], run: Callable[..., None], error: Callable[..., NoReturn]) -> None:
    sys.argv, server.run = argv, run
    setattr(argparse.ArgumentParser, "error", error)  # noqa: B010 - it is the one way to a sentence without the usage


def _refuse(_: argparse.ArgumentParser, message: str) -> NoReturn:
    raise CannotServe(f"{message}; `tiered-cache serve --help` tells all options")


def _run(config: Config, argv: Sequence[str], stop: Stop, host: str, port: int, provider: Any) -> None:
    flags = provider.cli_args
    _check_port(host, port)
    _check_models(flags)
    # mlx-lm lists models by looking there, and gives no answer where it is missing.
    with suppress(OSError):
        Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    bits = getattr(flags, "kv_bits", None)
    cache = TieredPromptCache(
        limited(config, flags, argv),
        resolve=lambda key: (provider.model, provider.draft_model) if key == provider.model_key else None,
        # Quantized from another token on, a state is another one; and without the flag, mlx-lm cannot use it.
        tenant=f"kv-bits {bits} {flags.kv_group_size} {flags.quantized_kv_start}" if bits else None,
        quantized=bool(bits),
        wait=lambda: generator.patience(),
    )
    log.info("cache: %s", cache)
    try:
        generator = Generator(provider, cache, stop.now)
        ended = False
        try:
            server._run_http_server(host, port, generator, http_server(stop, host), Handler)
        finally:
            if stop.server:
                stop.server.server_close()
            ended = generator.finish(0 if generator.failure else DRAIN, stop.hurry)
    finally:
        log.info("closing: %s", json.dumps(cache.stats()))
        cache.close()
    if generator.failure:
        problem = textwrap.shorten(f"{type(generator.failure).__name__}: {generator.failure}", 300)
        if generator.loaded:
            raise CannotServe(f"the thread that runs the model has ended, what it had is saved: {problem}")
        raise CannotServe(f"{flags.model} cannot be used as the model: {problem}")
    if not ended:
        log.warning("the thread that runs the model did not stop in time; leaving it")
        logging.shutdown()
        os._exit(0)  # its thread would keep the process for ever


def http_server(stop: Stop, host: str) -> type[ThreadingHTTPServer]:
    """The class of a server that tells where it listens, and can be stopped."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def server_activate(self) -> None:
            super().server_activate()
            log.info("listening on http://%s:%d", host, self.server_address[1])
            stop.started(self)

        def handle_error(self, request: Any, client_address: Any) -> None:
            error = sys.exc_info()[1]
            if isinstance(error, ConnectionError):
                log.info("a client has gone: %s", error)
            else:
                super().handle_error(request, client_address)

    return Server


def limited(config: Config, flags: argparse.Namespace, argv: Sequence[str]) -> Config:
    """The configuration, with mlx-lm's own limits as upper bounds.

    `--prompt-cache-size` counts only where it is given: its default, ten, is meant for a cache without a second tier.
    """
    changed: dict[str, int] = {}
    if getattr(flags, "prompt_cache_bytes", None) is not None:
        changed["max_memory"] = max(1, min(flags.prompt_cache_bytes, config.ram_limit()))
    if any(a.startswith("--prompt-cache-s") for a in argv):
        changed["max_entries"] = max(1, min(flags.prompt_cache_size, config.ram.max_entries))
    return config.model_copy(update={"ram": config.ram.model_copy(update=changed)})


def _check_models(flags: argparse.Namespace) -> None:
    """Raise `CannotServe` where what looks like a directory is none: mlx-lm would look for it on a hub."""
    for name in ("model", "draft_model", "adapter_path"):
        value = getattr(flags, name, None)
        if value and str(value).startswith((".", "/", "~")) and not Path(value).expanduser().is_dir():
            raise CannotServe(f"--{name.replace('_', '-')} {value}: there is no such directory")


def _check_port(host: str, port: int) -> None:
    """Raise `CannotServe` where nothing can listen there, before a model is loaded for minutes."""
    if not 0 <= port <= 65535:
        raise CannotServe(f"there is no port {port}; give a --port up to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as e:
        if isinstance(e, OSError) and e.errno == errno.EADDRINUSE:
            remedy = "give another --port, or stop the program that uses it"
            raise CannotServe(f"port {port} of {host} is in use; {remedy}") from e
        raise CannotServe(f"nothing can listen on {host}, port {port} ({e}); give another --host or --port") from e
