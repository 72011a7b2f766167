"""mlx-lm's HTTP server with both tiers as its prompt cache, every flag of its own kept.

What the SSD must read is read while a request waits in its own HTTP thread, so that the one thread that runs the model
never does. mlx-lm is not patched: its `main` parses the flags and calls `run`, in whose place ours is put.
"""

from __future__ import annotations

import copy
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tiered_cache.integrations.mlx_lm import TieredPromptCache, done
from tiered_cache.promotion import Promotion

if TYPE_CHECKING:

    class ResponseGenerator:
        """What is relied on of mlx-lm's, from 0.31.3 on."""

        model_provider: Any

        def __init__(self, model_provider: Any, prompt_cache: Any) -> None: ...
        def _generate(self) -> None: ...
        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any: ...
        def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> tuple[Any, Any]: ...
        def stop_and_join(self) -> None: ...

    class APIHandler:
        """What is relied on of mlx-lm's."""

        connection: socket.socket
        response_generator: Any

        def handle_completion(self, request: Any, stop_words: list[str]) -> None: ...

else:
    from mlx_lm.server import APIHandler, ResponseGenerator

log = logging.getLogger("tiered_cache")

POLL = 0.05  # seconds between looks at whether a client is still there
MEASURED = 64  # tokens; what a shorter piece of a prompt took says little


class Visit:
    """One request, from its arrival in its HTTP thread until its answer is written."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.connection = connection
        self.context: Any = None
        self.promotion: Promotion | None = None
        self.begun = 0.0  # when the model began with it

    def gone(self) -> bool:
        """Whether the client has hung up."""
        if self.connection is None:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def release(self) -> None:
        """What was promoted may leave RAM again."""
        promotion, self.promotion = self.promotion, None
        if promotion:
            promotion.cancel()

    def stop(self) -> None:
        """Have the model go on with others."""
        if self.context is not None:
            self.context.stop()


class Generator(ResponseGenerator):
    """mlx-lm's, whose requests bring what the SSD holds of their prompts to RAM before they queue for the model."""

    def __init__(self, model_provider: Any, cache: TieredPromptCache, failed: Callable[[], object]) -> None:
        """Starts the thread that loads and runs the model. `failed` is called where the first model does not load."""
        self.cache = cache
        self.failure: Exception | None = None
        self.loaded = False  # the model that the flags name, if they name one
        self.stopping = False
        self.cut = False  # answers that run now end before they are whole
        self.visits: set[Visit] = set()
        self._failed = failed
        self._local = threading.local()
        self._loaded = threading.Event()
        self._lock = threading.Lock()  # of `visits` and `_tokenized`
        self._tokenizing = threading.Lock()  # tokenizers are not made for several threads
        self._tokenized: dict[int, tuple[Any, Any]] = {}
        self._prepared = False  # the request that the model's thread is looking at
        super().__init__(model_provider, cache)

    # -- on the model's thread

    def _generate(self) -> None:
        provider = self.model_provider
        try:
            provider.load_default()
            if provider.model is not None:
                self.cache.add_model(provider.model_key, provider.model, provider.draft_model, name=label(provider))
            self.loaded = True
        except Exception as e:  # whatever a hub, a parser or a model class raises
            self.failure = e
            self._failed()
            return
        finally:
            self._loaded.set()
        try:
            super()._generate()
        except Exception as e:  # it would serve nobody any more: whoever watches the process shall start it again
            log.exception("the thread that runs the model has ended")
            self.failure = e
            self._failed()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        with self._lock:
            found = self._tokenized.pop(id(request), None)
        self._prepared = bool(found and found[0] is tokenizer)
        if found and self._prepared:
            return found[1]
        with self._tokenizing:
            return super()._tokenize(tokenizer, request, args)

    def patience(self) -> float:
        """Seconds that a fetch may wait for the SSD: none while it would hold up another stream."""
        with self._lock:
            alone = len(self.visits) == 1 and not self.stopping and not any(v.gone() for v in self.visits)
            return self.cache.patience if alone and not self._prepared else 0.0

    # -- on the threads of requests

    @contextmanager
    def visit(self, connection: socket.socket) -> Iterator[None]:
        """One request of a client is being handled."""
        visit = self._local.visit = Visit(connection)
        with self._lock:
            self.visits.add(visit)
        try:
            yield
        finally:
            with self._lock:
                self.visits.remove(visit)
            self._local.visit = None
            visit.stop()  # where the client was gone before the first byte, nobody else does
            visit.release()

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> tuple[Any, Any]:
        """As mlx-lm's. Raises ConnectionAbortedError where the client has gone, or the server is being stopped."""
        visit: Visit = getattr(self._local, "visit", None) or Visit()
        try:
            self._prepare(visit, request, generation_args)
            progress = self._progress(visit, progress_callback)
            visit.context, responses = super().generate(request, generation_args, progress)
            visit.begun = time.monotonic()
            return visit.context, self._whole(responses)
        finally:
            with self._lock:
                self._tokenized.pop(id(request), None)

    def _whole(self, responses: Iterator[Any]) -> Iterator[Any]:
        """An answer; one that was cut short by the server's end must not look like a whole one."""
        yield from responses
        if self.cut:
            raise ConnectionAbortedError("the server is being stopped")

    def _prepare(self, visit: Visit, request: Any, args: Any) -> None:
        """Have in RAM what both tiers hold of a request's prompt. Raises ValueError for what would end the model's
        thread."""
        self._await(visit, self._loaded, None)
        provider = self.model_provider
        key, tokenizer = provider.model_key, provider.tokenizer
        check_stop(args.stop_words)
        if tokenizer is None or key is None or asked_for(provider, args.model) != key:
            return  # a model to be loaded yet
        check_tokens(args, getattr(getattr(provider.model, "args", None), "vocab_size", None))
        try:
            if has_images(request):
                return
            with self._tokenizing:  # of a copy: it is edited
                tokenized = super()._tokenize(tokenizer, copy.deepcopy(request), args)
        except Exception:
            return  # the model's thread will meet the same, and answer
        check_prompt(tokenized[0])
        with self._lock:
            self._tokenized[id(request)] = tokenizer, tokenized
        visit.promotion = self.cache.promote(key, tokenized[0])
        if visit.promotion:
            self._await(visit, done(visit.promotion), self.cache.patience)

    def _await(self, visit: Visit, event: threading.Event, seconds: float | None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        while not event.wait(POLL) and (end is None or time.monotonic() < end):
            if visit.gone():
                raise ConnectionAbortedError("the client has gone")
            if self.stopping:
                break
        if self.stopping:
            raise ConnectionAbortedError("the server is being stopped")

    def _progress(self, visit: Visit, callback: Any) -> Callable[[int, int], None]:
        """The callback of a prompt's progress, on the request's thread; it tells the cache what computing costs."""
        key = self.model_provider.model_key
        last: tuple[int, float] | None = None

        def progress(processed: int, total: int) -> None:
            nonlocal last
            visit.release()  # it has been fetched
            now = time.monotonic()
            before, then = last or (0, visit.begun)
            if processed - before >= MEASURED:
                self.cache.prefilled(key, processed - before, now - then)
            last = processed, now
            if callback is not None:
                callback(processed, total)

        return progress

    # -- the end

    def finish(self, seconds: float, hurry: threading.Event) -> bool:
        """Take no more requests, let those at hand end in so many seconds, stop the rest; False where the model's
        thread does not end, in half of that again. Not on that thread.
        """
        self.stopping = True
        end = time.monotonic() + seconds
        while self.visits and time.monotonic() < end and not hurry.wait(POLL):
            pass
        with self._lock:
            late = list(self.visits)
        self.cut = bool(late)
        for visit in late:
            visit.stop()
        thread = threading.Thread(target=self.stop_and_join, daemon=True)
        thread.start()
        thread.join(seconds / 2)
        return not thread.is_alive()


class Handler(APIHandler):
    """mlx-lm's, which tells the generator whose request it is."""

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """As mlx-lm's."""
        with self.response_generator.visit(self.connection):
            super().handle_completion(request, stop_words)


def label(provider: Any) -> str | None:
    """A model's name for people: the last part of its path or repository."""
    with suppress(TypeError, IndexError):
        return str(provider.model_key[0]).rstrip("/").rpartition("/")[2] or None
    return None


def asked_for(provider: Any, model: Any) -> Any:
    """The key of the model that a request names, as mlx-lm's provider makes it; None where that has changed."""
    with suppress(AttributeError):
        return (
            provider._model_map.get(model.model, model.model),
            provider._adapter_map.get(model.model, model.adapter),
            provider._draft_model_map.get(model.draft, model.draft),
        )
    return None


def check_stop(words: Any) -> None:
    """Raise ValueError for what mlx-lm would take, and its thread end with: then nobody is served any more."""
    if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
        raise ValueError("stop must be a string, or a list of strings")


def check_tokens(args: Any, vocabulary: int | None) -> None:
    """Raise ValueError for tokens that the model does not have: as `check_stop`."""
    if vocabulary:
        if args.sampling.top_k > vocabulary:
            raise ValueError(f"top_k must be {vocabulary} at most")
        if any(not 0 <= token < vocabulary for token in args.logits.logit_bias or {}):
            raise ValueError(f"logit_bias must name tokens below {vocabulary}")


def check_prompt(tokens: Any) -> None:
    """Raise ValueError for what is no prompt: as `check_stop`."""
    if not len(tokens) or not all(isinstance(t, int) for t in tokens):
        raise ValueError("the prompt must be a text that is not empty")


def has_images(request: Any) -> bool:
    """Whether a request has parts that are not text, which are prepared with MLX, on the model's thread."""
    contents = [m.get("content") for m in request.messages or [] if isinstance(m, dict)]
    parts = [p for c in contents if isinstance(c, list) for p in c]
    return any(not isinstance(p, dict) or p.get("type") != "text" for p in parts)
