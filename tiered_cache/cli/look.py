"""Commands that look into a cache directory, beside the program that uses it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ssd_tier.clock import DAY, now, today
from ssd_tier.inspection import Inspection
from tiered_cache.cli.options import CachePath, ConfigFile, Json, root_of
from tiered_cache.cli.output import add_row, ago, print_json, right, show_table
from tiered_cache.config import format_size


def list_sequences(config: ConfigFile = None, path: CachePath = None, as_json: Json = False) -> None:
    """List stored sequences, most recently used first."""
    found = Inspection(root_of(config, path))
    rows: list[dict[str, Any]] = [
        {
            "key": s.key,
            "tokens": s.tokens,
            "blocks": len(s.blocks),
            "file_bytes": s.file_bytes,
            "raw_bytes": s.raw_bytes,
            "ratio": round(s.file_bytes / s.raw_bytes, 3),
            "age_seconds": max(0, now() - s.blocks[-1].created),
            "unused_seconds": max(0, now() - s.blocks[-1].used),
            "hits": s.blocks[-1].hits,
            "model": s.model,
        }
        for s in found.sequences()
    ]
    if as_json:
        return print_json(rows)
    figures = (right(c) for c in ("tokens", "blocks", "in file", "raw", "ratio", "age", "used", "hits"))
    table = Table("key", *figures, "model")
    for r in rows:
        add_row(
            table,
            str(r["key"])[:12],
            f"{r['tokens']:,}",
            str(r["blocks"]),
            format_size(r["file_bytes"]),
            format_size(r["raw_bytes"]),
            f"{r['ratio']:.3f}",
            ago(r["age_seconds"]),
            ago(r["unused_seconds"]),
            str(r["hits"]),
            str(r["model"]),
        )
    show_table(table)
    print(f"{len(rows)} sequences; blocks that they share are counted in each. {totals(found)}")


def show(
    key: Annotated[str, typer.Argument(help="First hex digits of a sequence's key, as `ls` prints it.")],
    config: ConfigFile = None,
    path: CachePath = None,
    as_json: Json = False,
) -> None:
    """Show one stored sequence: its blocks, their files, and what the state is made of."""
    found = Inspection(root_of(config, path))
    sequence = found.find(key)
    info = found.blob(sequence.blocks[-1])
    blocks: list[dict[str, Any]] = [
        {
            "key": b.key.hex(),
            "start": b.start,
            "tokens": b.tokens,
            "file_bytes": b.file_bytes,
            "raw_bytes": b.raw_bytes,
            "hits": b.hits,
            "file": str(found.path(b)),
        }
        for b in sequence.blocks
    ]
    tree = json.loads(info.classes)
    classes = class_names(tree["layers"] if isinstance(tree, dict) else tree)  # of a checkpoint, of a block
    state: dict[str, Any] = {
        "layers": len(classes),
        "classes": sorted(set(classes)),
        "dtypes": sorted({t.dtype for t in info.tensors}),
        "shapes": sorted({t.shape for t in info.tensors}),
    }
    if as_json:
        return print_json({"key": sequence.key, "model": sequence.model, "state": state, "blocks": blocks})
    print(f"{sequence.key}\n{sequence.tokens:,} tokens of {sequence.model}, {format_size(sequence.raw_bytes)} of state")
    shapes = ", ".join("x".join(map(str, s)) for s in state["shapes"])
    kinds = f"{', '.join(state['classes'])}, {', '.join(state['dtypes'])}"
    print(f"last block: {state['layers']} layers of {kinds} of {shapes}")
    table = Table("key", *(right(c) for c in ("from", "tokens", "in file", "raw", "hits")), "file")
    for b in blocks:
        sizes = format_size(b["file_bytes"]), format_size(b["raw_bytes"])
        add_row(table, b["key"][:12], f"{b['start']:,}", str(b["tokens"]), *sizes, str(b["hits"]), Path(b["file"]).name)
    show_table(table)


def stats(config: ConfigFile = None, path: CachePath = None, as_json: Json = False) -> None:
    """Sums over the whole directory, and counters over all runs."""
    found = Inspection(root_of(config, path))
    models: dict[str, dict[str, int]] = {}
    for e in found.entries:
        sums = models.setdefault(found.models.get(e.namespace, "?"), {"blocks": 0, "file_bytes": 0, "raw_bytes": 0})
        sums["blocks"] += 1
        sums["file_bytes"] += e.file_bytes
        sums["raw_bytes"] += e.raw_bytes
    result = {
        "path": str(found.root),
        "blocks": len(found.entries),
        "sequences": len(found.sequences()),
        "file_bytes": sum(e.file_bytes for e in found.entries),
        "raw_bytes": sum(e.raw_bytes for e in found.entries),
        "index_bytes": found.index_bytes(),
        "written": {date(day): nbytes for day, nbytes in found.written.items()},
        "models": models,
        "counters": found.counters,
    }
    if as_json:
        return print_json(result)
    written = format_size(found.written.get(today(), 0))
    print(f"{found.root}: {result['sequences']} sequences. {totals(found)} Written today: {written}.")
    table = Table("model", *(right(c) for c in ("blocks", "in files", "raw", "ratio")))
    for model, sums in models.items():
        sizes = format_size(sums["file_bytes"]), format_size(sums["raw_bytes"])
        add_row(table, model, str(sums["blocks"]), *sizes, f"{sums['file_bytes'] / sums['raw_bytes']:.3f}")
    show_table(table)
    if found.counters:
        counters = Table("counter, over all runs", right("value"))
        for name, value in found.counters.items():
            add_row(counters, name, format_size(value) if name.startswith("bytes_") else f"{value:,}")
        show_table(counters)


def date(day: int) -> str:
    """A day's number since 1970 as people write it."""
    return time.strftime("%Y-%m-%d", time.gmtime(day * DAY))


def class_names(tree: list[dict[str, Any]]) -> list[str]:
    """The class of each layer, those inside lists among them."""
    return [name for node in tree for name in (class_names(node["caches"]) if "caches" in node else [node["class"]])]


def totals(found: Inspection) -> str:
    """One sentence on what the directory holds."""
    file_bytes, raw_bytes = (sum(getattr(e, name) for e in found.entries) for name in ("file_bytes", "raw_bytes"))
    ratio = f", ratio {file_bytes / raw_bytes:.3f}" if raw_bytes else ""
    return f"{len(found.entries)} blocks: {format_size(file_bytes)} in files, {format_size(raw_bytes)} raw{ratio}."
