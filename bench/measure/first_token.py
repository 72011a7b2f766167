"""What a user waits for: the first token of an answer, computed or from the SSD, on a real model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from bench.result import Options, Result, Skipped, config
from bench.state import drop_from_page_cache, seconds
from tiered_cache import TieredCache
from tiered_cache.demo.smollm2 import ModelMissing, load_smollm2


def first_token(folder: Path, options: Options) -> list[Result]:
    """SmolLM2, a prompt of 1,000 tokens (--quick: 200): the first token from an empty cache, and from a fresh process's
    view of the SSD, page cache dropped. The model computes in the dtype that the demo uses.
    """
    try:
        model, tokenizer = load_smollm2()
    except ModelMissing as e:
        raise Skipped(str(e) or "SmolLM2 is not installed") from e
    text = Path(__file__).parents[2].joinpath("DESIGN.md").read_text()
    tokens = tokenizer.encode(text)[: 200 if options.quick else 1000]
    said = []

    def answer(state: list[Any], rest: list[int]) -> None:
        logits = model(mx.array([rest]), cache=state)[:, -1]
        said.append(mx.argmax(logits, axis=-1).item())

    state = make_prompt_cache(model)
    cold = seconds(partial(answer, state, tokens))
    with TieredCache.open(config(folder), model=model) as cache:
        assert cache.store(tokens, state)
    warm = []
    for _ in range(3):
        drop_from_page_cache(p for p in (folder / "cache" / "blobs").rglob("*") if p.is_file())
        with TieredCache.open(config(folder), model=model) as cache:

            def from_ssd(cache: TieredCache = cache) -> None:
                promotion = cache.promote(tokens)
                assert promotion
                promoted, rest = promotion.result(60)
                assert promoted
                answer(promoted, list(rest))

            warm.append(seconds(from_ssd))
    assert len(set(said)) == 1, said
    figures = {"cold_ms": cold * 1e3, "ssd_ms": median(warm) * 1e3, "ratio": cold / median(warm)}
    value = f"{figures['ssd_ms']:.0f} ms from the SSD, {figures['cold_ms']:.0f} computed: {figures['ratio']:.0f} times"
    met = figures["ratio"] >= 20 if not options.quick else None
    what = f"first token after a prompt of {len(tokens):,} tokens, SmolLM2"
    return [Result("first_token", what, value, ">= 20 times faster", met, figures)]
