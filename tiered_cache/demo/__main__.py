"""The demo's child process: one life of a program that runs a model with the cache.

It reports each step as a line of JSON on stdout. The demo's parent starts it twice, so that the second life finds only
what the first one left in the directory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from ssd_tier import TierError
from tiered_cache import ConfigError, TieredCache, layers
from tiered_cache.demo.conversation import AGENTS, SYSTEM, Script, script
from tiered_cache.demo.smollm2 import ModelMissing, load_smollm2

# A sixteenth of the default, because the texts are about a sixteenth of what agents really send: with blocks larger
# than a turn, little would be shared, and the pieces that leave RAM would be whole conversations.
BLOCK_TOKENS = 16

Message = dict[str, str]
Emit = Callable[..., None]


class Unusable(Exception):
    """The demo cannot run with what it was given; the message is one sentence for a person."""


class Outcome(NamedTuple):
    """An answer, `first_token`: seconds from the request to it, and `computed`: prompt tokens that the model had to
    see."""

    answer: list[int]
    first_token: float
    computed: int


class Chat:
    """A model that answers greedily, with and without the cache."""

    def __init__(self, model: Any, tokenizer: Any, answer_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.answer_tokens = answer_tokens
        self._kept: list[list[int]] = []  # what this process has stored so far

    def prompt(self, messages: list[Message], *, ask: bool = True) -> list[int]:
        """Token ids of a conversation; `ask`: the assistant is to speak next."""
        return [int(t) for t in self.tokenizer.apply_chat_template(messages, add_generation_prompt=ask)]

    def cold(self, ids: list[int]) -> Outcome:
        """Compute everything, keep nothing."""
        start = time.perf_counter()
        answer, first = self._generate(ids, make_prompt_cache(self.model))
        return Outcome(answer, first - start, len(ids))

    def cached(self, cache: TieredCache, ids: list[int]) -> tuple[Outcome, str]:
        """Answer as a program would that embeds the cache; also say where the state came from."""
        start = time.perf_counter()
        state, remaining = cache.fetch(ids)
        in_ram = len(remaining)
        promotion = cache.promote(ids)
        if promotion:
            state, remaining = promotion.result(timeout=60)
        if state is None:
            state = make_prompt_cache(self.model)
        answer, first = self._generate(remaining, state)
        kept = ids + answer[:-1]  # the last token's state has not been computed
        cache.store(kept, state)
        source = self._source(ids, in_ram, len(remaining))
        self._kept.append(kept)
        return Outcome(answer, first - start, len(remaining)), source

    def _generate(self, ids: Sequence[int], state: list[Any]) -> tuple[list[int], float]:
        # In one call: a prompt cut in two gives the same bits on a CPU, but only the state's owner may decide to cut it.
        logits = self.model(mx.array([list(ids)]), cache=state)
        answer = [int(mx.argmax(logits[0, -1]).item())]
        first = time.perf_counter()
        while len(answer) < self.answer_tokens and answer[-1] not in self.tokenizer.eos_token_ids:
            logits = self.model(mx.array([answer[-1:]]), cache=state)
            answer.append(int(mx.argmax(logits[0, -1]).item()))
        return answer, first

    def _source(self, ids: list[int], left_by_ram: int, left: int) -> str:
        if left == len(ids):
            return "cold"
        if left == left_by_ram:
            return "RAM hit"
        # More than this process ever stored can only be what an earlier one left.
        known = max((len(os.path.commonprefix([ids, kept])) for kept in self._kept), default=0)
        return "SSD hit" if len(ids) - left <= known else "SSD hit after restart"

    def text(self, answer: list[int]) -> str:
        """The answer as a message."""
        return str(self.tokenizer.decode([t for t in answer if t not in self.tokenizer.eos_token_ids]))

    def token_bytes(self, ids: list[int]) -> int:
        """Bytes of state a token, measured."""
        state = make_prompt_cache(self.model)
        mx.eval(self.model(mx.array([ids]), cache=state))
        return layers.read_state(state, len(ids)).layout.token_bytes

    def longest(self, order: Script) -> int:
        """Tokens of the longest conversation, at the end of its last turn and with the longest answers."""
        lengths = []
        for name, says in AGENTS.items():
            turns = (order.first + order.resume).count(name)
            messages = [_system()]
            for text in says[:turns]:
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
            lengths.append(len(self.prompt(messages, ask=False)) + turns * self.answer_tokens)
        return max(lengths)


def _system() -> Message:
    return {"role": "system", "content": SYSTEM}


def main() -> int:
    """Run one stage. 2 and an `error` event where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m tiered_cache.demo")
    parser.add_argument("--stage", choices=["first", "resume"], required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    # stdout is for events alone; what loaders print goes to stderr.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(kind: str, **fields: object) -> None:
        print(json.dumps({"event": kind, **fields}), file=events, flush=True)

    signal.signal(signal.SIGTERM, _stop)
    try:
        _stage(args.stage, args.data, args.model, script(args.quick), emit)
    except (Unusable, ModelMissing, TierError, ConfigError) as e:
        emit("error", message=str(e))
        return 2
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt what the first one ends
    raise SystemExit(128 + number)


def _stage(stage: str, data: Path, model: str | None, order: Script, emit: Emit) -> None:
    chat = _load(model, order.answer_tokens)
    name = model or "SmolLM2-135M-Instruct"
    saved = data / "conversations.json"
    talks: dict[str, list[Message]] = json.loads(saved.read_text()) if stage == "resume" else {}
    try:
        system = chat.prompt([_system()], ask=False)
        longest = chat.longest(order)
        token_bytes = chat.token_bytes(system[:8])
    except layers.Refused as e:
        raise Unusable(f"{name}: its state cannot be cached: {e}") from None
    except Exception as e:
        raise Unusable(f"{name}: its chat template cannot be used: {_sentence(e)}") from None
    config = {
        "cache": {"block_tokens": BLOCK_TOKENS},
        # Room for one conversation and a block to grow into: the agents have to push each other out.
        "ram": {"max_memory": token_bytes * (longest + BLOCK_TOKENS), "min_prefix_tokens": 2 * BLOCK_TOKENS},
        "ssd": {"path": str(data / "cache")},
    }
    with TieredCache.open(config, model=chat.model, name=name) as cache:
        stats = cache.stats()
        if not stats["ssd"]["on"]:
            raise Unusable(f"{data / 'cache'}: {stats['ssd']['off_because']}")
        device = "CPU" if mx.default_device().type == mx.cpu else "GPU"
        emit("open", model=name, device=device, token_bytes=token_bytes, shared_tokens=len(system), stats=stats)
        for agent in order.first if stage == "first" else order.resume:
            _turn(chat, cache, agent, talks.setdefault(agent, [_system()]), emit)
        cache.flush()
        emit("end", stats=cache.stats())
        saved.write_text(json.dumps(talks, indent=1, ensure_ascii=False))


def _turn(chat: Chat, cache: TieredCache, agent: str, messages: list[Message], emit: Emit) -> None:
    turn = len(messages) // 2  # a system message, then pairs
    messages.append({"role": "user", "content": AGENTS[agent][turn]})
    ids = chat.prompt(messages)
    about = {"agent": agent, "turn": turn + 1, "prompt": len(ids)}
    emit("cached", **about)
    ours, source = chat.cached(cache, ids)
    emit("cold", **about)
    cold = chat.cold(ids)
    messages.append({"role": "assistant", "content": chat.text(ours.answer)})
    emit(
        "turn",
        **about,
        source=source,
        computed=ours.computed,
        first_token=ours.first_token,
        cold_first_token=cold.first_token,
        equal=ours.answer == cold.answer,
        answer=chat.text(ours.answer),
        answer_tokens=ours.answer,
        cold_answer=chat.text(cold.answer),
        cold_answer_tokens=cold.answer,
    )
    # With a model that answers in milliseconds the turns would outrun the writer, as they never do in earnest.
    patience = time.monotonic() + 5
    while cache.stats()["ram"]["queued"] and time.monotonic() < patience:
        time.sleep(0.01)


def _load(model: str | None, answer_tokens: int) -> Chat:
    if model is None:
        return Chat(*load_smollm2(), answer_tokens)
    try:
        loaded = load(model)
    except Exception as e:  # whatever a hub, a parser or a model class raises
        raise Unusable(f"{model}: the model cannot be loaded: {_sentence(e)}") from None
    return Chat(loaded[0], loaded[1], answer_tokens)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
