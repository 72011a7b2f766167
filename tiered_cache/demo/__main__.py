"""The demo's child process: one life of a program that runs a model with the cache.

It reports each step as a line of JSON on stdout. The parent starts it twice: the second one finds what the first left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from ssd_tier import TierError
from tiered_cache import ConfigError, TieredCache, layers
from tiered_cache.demo.conversation import AGENTS, FOLLOW_UPS, FULL, QUICK, SYSTEM, Script
from tiered_cache.demo.smollm2 import ModelMissing, load_smollm2

# A sixteenth of the default, as the texts are about a sixteenth of what agents really send. With blocks larger than a
# turn the agents would share little of their prompt, and repeat the rest in files of their own.
BLOCK_TOKENS = 16
SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}

Message = dict[str, str]


class Unusable(Exception):
    """The demo cannot run with what it was given; the message is one sentence for a person."""


class Chat:
    """A model that answers greedily, with and without the cache."""

    def __init__(self, model: Any, tokenizer: Any, answer_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.answer_tokens = answer_tokens
        self._stored: list[list[int]] = []  # by this process

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in which the assistant is to speak next."""
        return [int(t) for t in self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)]

    def text(self, answer: list[int]) -> str:
        """An answer as people read it."""
        return str(self.tokenizer.decode([t for t in answer if t not in self.tokenizer.eos_token_ids]))

    def cached(self, cache: TieredCache, ids: list[int]) -> dict[str, Any]:
        """Answer as a program does that embeds the cache, and say what that took."""
        start = time.perf_counter()
        state, remaining = cache.fetch(ids)
        left_by_ram = len(remaining)
        promotion = cache.promote(ids)
        if promotion:
            state, remaining = promotion.result(timeout=60)
        if state is None:
            state = make_prompt_cache(self.model)
        answer, first = self.generate(remaining, state)
        stored = ids + answer[:-1]  # the last token's state has not been computed
        cache.store(stored, state)
        source = self._source(ids, left_by_ram, len(remaining))
        self._stored.append(stored)
        return {"source": source, "computed": len(remaining), "first_token": first - start, "answer_tokens": answer}

    def generate(self, ids: Sequence[int], state: list[Any]) -> tuple[list[int], float]:
        """The answer, and when its first token was there. `ids` in one call, so that only the cache cuts the prompt."""
        logits = self.model(mx.array([list(ids)]), cache=state)
        answer = [int(logits[0, -1].argmax().item())]
        first = time.perf_counter()
        while len(answer) < self.answer_tokens and answer[-1] not in self.tokenizer.eos_token_ids:
            logits = self.model(mx.array([answer[-1:]]), cache=state)
            answer.append(int(logits[0, -1].argmax().item()))
        return answer, first

    def _source(self, ids: list[int], left_by_ram: int, left: int) -> str:
        covered = ids[: len(ids) - left]
        if not covered:
            return "cold"
        if left == left_by_ram:
            return "RAM hit"
        # What this process never stored can only be what an earlier one left.
        own = any(stored[: len(covered)] == covered for stored in self._stored)
        return "SSD hit" if own else "SSD hit after restart"


def main() -> int:
    """Run one stage; 2, after an `error` event, where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m tiered_cache.demo")
    parser.add_argument("--stage", choices=["first", "resume"], required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    # stdout is for events alone: what loaders print goes to stderr.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(kind: str, **fields: object) -> None:
        print(json.dumps({"event": kind, **fields}), file=events, flush=True)

    signal.signal(signal.SIGTERM, _stop)
    try:
        _stage(args.stage == "first", args.data, args.model, QUICK if args.quick else FULL, emit)
    except (Unusable, ModelMissing, TierError, ConfigError) as e:
        emit("error", message=str(e))
        return 2
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one must not interrupt the closing
    raise SystemExit(128 + number)


def _stage(first: bool, data: Path, model: str | None, script: Script, emit: Callable[..., None]) -> None:
    saved = data / "conversations.json"
    talks: dict[str, list[Message]] = {} if first else json.loads(saved.read_text())
    chat, token_bytes, longest = _load(model, script)
    limit = token_bytes * longest  # one conversation and little more: they push each other out
    config = {
        "cache": {"block_tokens": BLOCK_TOKENS},
        "ram": {"max_memory": limit, "min_prefix_tokens": 2 * BLOCK_TOKENS},
        "ssd": {"path": str(data / "cache")},
    }
    with TieredCache.open(config, model=chat.model, name=model or "SmolLM2-135M-Instruct") as cache:
        ssd = cache.stats()["ssd"]
        if not ssd["on"]:
            raise Unusable(f"{data / 'cache'} cannot be used: {ssd['off_because']}")
        about = {"model": cache.stats()["model"], "device": str(mx.default_device()), "token_bytes": token_bytes}
        emit("open", **about, ram_limit=limit, blocks_found=ssd["blocks"])
        for agent in script.first if first else script.resume:
            _turn(chat, cache, agent, talks.setdefault(agent, [SYSTEM_MESSAGE]), emit)
        saved.write_text(json.dumps(talks, indent=1, ensure_ascii=False))
        cache.flush()
        emit("end", stats=cache.stats())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _load(model: str | None, script: Script) -> tuple[Chat, int, int]:
    """The model, bytes of state a token (measured), and the most tokens that a conversation can have."""
    try:
        loaded: Any = load(model) if model else load_smollm2()
        chat = Chat(loaded[0], loaded[1], script.answer_tokens)
        turns = max((script.first + script.resume).count(agent) for agent in AGENTS)
        texts = [" ".join((opening, *FOLLOW_UPS[: turns - 1])) for opening in AGENTS.values()]
        prompts = [chat.prompt([SYSTEM_MESSAGE, {"role": "user", "content": text}]) for text in texts]
        # With a block a turn for what the chat template adds.
        longest = max(map(len, prompts)) + turns * (script.answer_tokens + BLOCK_TOKENS)
        state = make_prompt_cache(chat.model)
        chat.model(mx.array([prompts[0][:8]]), cache=state)
        return chat, layers.read_state(state, 8).layout.token_bytes, longest
    except ModelMissing:
        raise
    except Exception as e:  # whatever a hub, a parser, a template or a model class raises
        problem = textwrap.shorten(f"{type(e).__name__}: {e}", 300)
        raise Unusable(f"{model or 'SmolLM2'} cannot be used as the model: {problem}") from None


def _turn(chat: Chat, cache: TieredCache, agent: str, messages: list[Message], emit: Callable[..., None]) -> None:
    turn = len(messages) // 2  # a system message, then pairs
    messages.append({"role": "user", "content": (AGENTS[agent], *FOLLOW_UPS)[turn]})
    ids = chat.prompt(messages)
    about = {"agent": agent, "turn": turn + 1, "prompt": len(ids)}
    emit("step", **about, doing="with the cache")
    result = chat.cached(cache, ids)
    answer = chat.text(result["answer_tokens"])
    messages.append({"role": "assistant", "content": answer})
    emit("step", **about, doing="without the cache, to compare")
    start = time.perf_counter()
    cold, first = chat.generate(ids, make_prompt_cache(chat.model))
    compared = {"cold_first_token": first - start, "cold_answer": chat.text(cold), "cold_answer_tokens": cold}
    emit("turn", **about, **result, answer=answer, **compared, equal=result["answer_tokens"] == cold)
    # A model that answers in milliseconds would outrun the writer, as a real one never does.
    patience = time.monotonic() + 5
    while cache.stats()["ram"]["queued"] and time.monotonic() < patience:
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
