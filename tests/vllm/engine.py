"""vllm-mlx's own scheduler on small models, and a process of its own to run it in: `python -m tests.vllm.engine`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from tests.zoo import build

_numbers = itertools.count()


class Letters:
    """Enough of a tokenizer: the scheduler turns answers into text."""

    eos_token_id = None
    clean_up_tokenization_spaces = False

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(65 + t % 26) for t in tokens)


def scheduler_of(model: Any, **settings: Any) -> Any:
    """Its scheduler, imported only now: after `install`, or before."""
    from vllm_mlx.scheduler import Scheduler, SchedulerConfig

    return Scheduler(model, Letters(), SchedulerConfig(**settings))


def submit(scheduler: Any, tokens: Sequence[int], count: int = 8) -> Any:
    """A request in its queue; greedy, `count` tokens of answer."""
    from vllm_mlx.request import Request, SamplingParams

    params = SamplingParams(max_tokens=count, temperature=0.0)
    request = Request(request_id=f"r{next(_numbers)}", prompt=list(tokens), sampling_params=params)
    scheduler.add_request(request)
    return request


def run(scheduler: Any, most: int = 100_000) -> None:
    """Step until all is finished."""
    for _ in range(most):
        if not scheduler.has_requests():
            return
        scheduler.step()
    raise AssertionError("requests that never finish")


def ask(scheduler: Any, tokens: Sequence[int], count: int = 8) -> Any:
    """One request, finished."""
    request = submit(scheduler, tokens, count)
    run(scheduler)
    assert len(request.output_token_ids) == count, request
    return request


def main(job: dict[str, Any]) -> None:
    """One process: `install` with `config`, or not; ask `prompts` one after the other; end as `end` says."""
    mx.disable_compile()
    from tiered_cache.integrations import vllm_mlx as ours

    model = build(job["model"])
    if job["config"]:
        ours.install(job["config"])
    scheduler = scheduler_of(model)
    told = []
    for prompt in job["prompts"]:
        request = ask(scheduler, prompt)
        told.append([request.output_token_ids, request.cached_tokens, request.cache_hit_type])
    if job["end"] == "stop":
        scheduler.close_ssd_tier()
    print(json.dumps(told))


if __name__ == "__main__":
    main(json.load(sys.stdin))
