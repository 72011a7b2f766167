"""Bringing state back from the SSD: how long it takes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from bench.result import Options, Result, config
from bench.state import Shapes, drop_from_page_cache, interleaved, realistic, seconds, tokens_for
from tiered_cache import TieredCache


def promotion(folder: Path, options: Options) -> list[Result]:
    """192 MiB from a cold page cache to a state the model can use, against `mx.load` of the same arrays as they are.

    And the way there: until they are written.
    """
    state, tokens = realistic(), tokens_for(2048, 1)
    plain = folder / "plain.safetensors"
    arrays = {f"{i}.{name}": getattr(layer, name) for i, layer in enumerate(state) for name in ("keys", "values")}
    saves, plain_saves = [], []
    for i in range(3):
        place = folder / str(i)
        place.mkdir()
        with TieredCache.open(config(place), model=Shapes()) as cache:
            saves.append(seconds(partial(_save, cache, tokens, state)))
        plain_saves.append(seconds(lambda: mx.save_safetensors(str(plain), arrays)))
    folder = place
    files = [p for p in (folder / "cache" / "blobs").rglob("*") if p.is_file()]

    with TieredCache.open(config(folder), model=Shapes()) as cache:

        def ours() -> None:
            promotion = cache.promote(tokens)
            assert promotion
            promoted, remaining = promotion.result(60)
            assert promoted
            assert len(remaining) == 1

        def forget() -> None:
            cache.ram.clear()
            drop_from_page_cache([*files, plain])

        times = interleaved(
            5 if options.quick else 9,
            a=forget,
            promote=ours,
            b=forget,
            mx_load=lambda: mx.eval(mx.load(str(plain))),
            c=forget,
            read=lambda: [p.read_bytes() for p in files],
        )
    figures = {name: times[name] * 1e3 for name in ("promote", "mx_load", "read")}
    figures["ratio"] = ratio = figures["mx_load"] / figures["promote"]
    value = (
        f"{figures['promote']:.0f} ms, mx.load {figures['mx_load']:.0f} ms: {ratio:.2f} times as fast; "
        f"reading our files alone {figures['read']:.0f} ms"
    )
    saved = {"save": median(saves) * 1e3, "mx_save": median(plain_saves) * 1e3}
    to_disk = f"{saved['save']:.0f} ms, mx.save_safetensors {saved['mx_save']:.0f} ms"
    return [
        Result("load", "promotion of 192 MiB, cold", value, ">= 1.0 times mx.load", ratio >= 1, figures),
        Result("save", "192 MiB stored and written to the SSD", to_disk, "", None, saved),
    ]


def _save(cache: TieredCache, tokens: list[int], state: list[KVCache]) -> None:
    assert cache.store(tokens, state)
    assert cache.flush(60)
