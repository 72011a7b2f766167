"""The command `tiered-cache`: look into the index, show and write configuration, run the demo."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ssd_tier.errors import TierError
from ssd_tier.inspection import Inspection
from tiered_cache.config import Config, ConfigError, format_size, template

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Write a commented configuration file, or show what is in force.")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; its ssd.path is looked into.")]
CachePath = Annotated[Path | None, typer.Option("--path", "-p", help="Cache directory to look into.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes, instead of a table.")]


def main() -> None:
    """Entry point. What a person did wrong is one sentence on stderr and exit code 2."""
    try:
        app()
    except (ConfigError, TierError, LookupError) as e:
        print(f"tiered-cache: {e}", file=sys.stderr)
        sys.exit(2)


@app.command("ls")
def list_sequences(config: ConfigFile = None, path: CachePath = None, as_json: Json = False) -> None:
    """List stored sequences, most recently used first."""
    found = inspect(config, path)
    rows: list[dict[str, Any]] = [
        {
            "key": s.key,
            "tokens": s.tokens,
            "blocks": len(s.blocks),
            "file_bytes": s.file_bytes,
            "raw_bytes": s.raw_bytes,
            "ratio": round(s.file_bytes / s.raw_bytes, 3),
            "age_seconds": max(0, int(time.time()) - s.blocks[-1].created),
            "hits": s.blocks[-1].hits,
            "model": s.model,
        }
        for s in found.sequences()
    ]
    if as_json:
        return print_json(rows)
    table = Table("key", *(right(c) for c in ("tokens", "blocks", "in file", "raw", "ratio", "age", "hits")), "model")
    for r in rows:
        table.add_row(
            str(r["key"])[:12],
            f"{r['tokens']:,}",
            str(r["blocks"]),
            format_size(r["file_bytes"]),
            format_size(r["raw_bytes"]),
            f"{r['ratio']:.3f}",
            ago(r["age_seconds"]),
            str(r["hits"]),
            str(r["model"]),
        )
    show_table(table)
    print(f"{len(rows)} sequences; blocks that they share are counted in each. {totals(found)}")


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="First hex digits of a sequence's key, as `ls` prints it.")],
    config: ConfigFile = None,
    path: CachePath = None,
    as_json: Json = False,
) -> None:
    """Show one stored sequence: its blocks, their files, and what the state is made of."""
    found = inspect(config, path)
    sequence = found.find(key)
    info = found.blob(sequence.blocks[-1])
    blocks: list[dict[str, Any]] = [
        {
            "key": b.key.hex(),
            "start": b.start,
            "tokens": len(b.ids) // 8,
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
        table.add_row(b["key"][:12], f"{b['start']:,}", str(b["tokens"]), *sizes, str(b["hits"]), Path(b["file"]).name)
    show_table(table)


@app.command()
def stats(config: ConfigFile = None, path: CachePath = None, as_json: Json = False) -> None:
    """Sums over the whole directory, and counters over all runs."""
    found = inspect(config, path)
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
        "models": models,
        "counters": found.counters,
    }
    if as_json:
        return print_json(result)
    print(f"{found.root}: {result['sequences']} sequences. {totals(found)}")
    table = Table("model", *(right(c) for c in ("blocks", "in files", "raw", "ratio")))
    for model, sums in models.items():
        sizes = format_size(sums["file_bytes"]), format_size(sums["raw_bytes"])
        table.add_row(model, str(sums["blocks"]), *sizes, f"{sums['file_bytes'] / sums['raw_bytes']:.3f}")
    show_table(table)
    if found.counters:
        counters = Table("counter, over all runs", right("value"))
        for name, value in found.counters.items():
            counters.add_row(name, format_size(value) if name.startswith("bytes_") else f"{value:,}")
        show_table(counters)


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Model directory or repository, instead of SmolLM2-135M.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About two minutes instead of ten.")] = False,
    data: Annotated[Path | None, typer.Option(help="Keep the cache in this directory.")] = None,
    as_json: Json = False,
) -> None:
    """Watch agents share prefixes, push each other out of RAM, and go on after a restart; every answer is checked."""
    from tiered_cache.demo.run import run_demo  # takes seconds to import: not for `ls`

    raise typer.Exit(run_demo(model=model, quick=quick, as_json=as_json, data=data))


@config_app.command("init")
def config_init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("tiered-cache.toml"),
) -> None:
    """Write a commented configuration file with every key and its default. Never overwrites one."""
    try:
        with file.open("x", encoding="utf-8") as f:
            f.write(template())
    except FileExistsError as e:
        raise ConfigError(f"{file} exists already; give another name, or remove it first") from e
    except OSError as e:
        raise ConfigError(f"{file} cannot be written ({e.strerror}); give another name") from e
    print(f"wrote {file}; every key is there, commented out, with its default")


@config_app.command("show")
def config_show(config: ConfigFile = None, as_json: Json = False) -> None:
    """Show the values in force with this file (without one: the defaults) and where each comes from."""
    settings = Config.load(config).effective()
    if as_json:
        return print_json({s.key: {"value": s.value, "origin": s.origin} for s in settings})
    table = Table("key", "value", "from")
    for s in settings:
        table.add_row(s.key, s.shown, s.origin)
    show_table(table)


def class_names(tree: list[dict[str, Any]]) -> list[str]:
    """The class of each layer, those inside lists among them."""
    return [name for node in tree for name in (class_names(node["caches"]) if "caches" in node else [node["class"]])]


def inspect(config: Path | None, path: Path | None) -> Inspection:
    """The directory that the options name."""
    return Inspection(path.absolute() if path else Config.load(config).ssd_path())


def totals(found: Inspection) -> str:
    """One sentence on what the directory holds."""
    file_bytes, raw_bytes = (sum(getattr(e, name) for e in found.entries) for name in ("file_bytes", "raw_bytes"))
    ratio = f", ratio {file_bytes / raw_bytes:.3f}" if raw_bytes else ""
    return f"{len(found.entries)} blocks: {format_size(file_bytes)} in files, {format_size(raw_bytes)} raw{ratio}."


def right(name: str) -> Any:
    """A column of figures."""
    from rich.table import Column

    return Column(name, justify="right")


def ago(seconds: int) -> str:
    """A short age: 12s, 5m, 3h, 2d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def show_table(table: Table) -> None:
    """Print it as wide as its content where the output is no terminal, so that pipes get whole lines."""
    console = Console()
    console.print(table) if console.is_terminal else Console(width=240).print(table)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))
