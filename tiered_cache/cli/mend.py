"""Commands that check a cache directory and change it. All but `verify` ask that no program uses it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ssd_tier import Entry, TierOptions, maintenance
from ssd_tier.budget import Budget
from ssd_tier.catalog import Catalog
from ssd_tier.inspection import Inspection
from ssd_tier.maintenance import Finding
from tiered_cache.cli.options import CachePath, ConfigFile, Json, Yes, options_of, root_of
from tiered_cache.cli.output import confirmed, print_json, right, show_table
from tiered_cache.config import format_size, parse_size

DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would go, and change nothing.")]


def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Set damaged blobs aside, drop rows without file.")] = False,
    config: ConfigFile = None,
    path: CachePath = None,
    as_json: Json = False,
) -> None:
    """Read every blob and compare it with its digest and its row. Exit code 1 where something is wrong.

    Runs beside the program that uses the directory; with --repair, only when none does.
    """
    root = root_of(config, path)
    opened: dict[str, int] = {}
    with progress(None if repair else sum(e.file_bytes for e in Inspection(root).entries)) as on_read:
        if repair:
            findings, opened = asyncio.run(maintenance.repair(unlimited(root), on_read))
        else:
            findings = maintenance.verify(root, on_read)
    kinds = Counter(f.kind for f in findings)
    mended = {
        "set_aside": kinds["damaged"],
        "rows_dropped": kinds["missing"] + opened.get("lost_missing", 0),
        "files_removed": opened.get("orphans_removed", 0),
    }
    if as_json:
        rows = [{"kind": f.kind, "key": f.key.hex(), "bytes": f.nbytes, "why": f.why} for f in findings]
        print_json({"findings": rows, **(mended if repair else {})})
    else:
        show_findings(findings)
        told = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "nothing wrong"
        print(f"{root}: {len(Inspection(root).entries)} blocks, {told}.")
        if repair:
            print(", ".join(f"{name.replace('_', ' ')}: {n}" for name, n in mended.items()))
        elif findings:
            print("A program that meets one of these counts a miss. To mend: tiered-cache verify --repair")
    raise typer.Exit(1 if kinds["unreadable"] or (findings and not repair) else 0)


def rebuild(config: ConfigFile = None, path: CachePath = None) -> None:
    """Make the index anew from the blobs alone. The old one is kept in quarantine/."""
    root = root_of(config, path)
    count = maintenance.rebuild_index(root)
    print(f"{root}: {count} blocks in the new index. Order of use and ages are those of the files.")


def gc(
    to: Annotated[str | None, typer.Option(help="Shrink to this size, like 20GB; without it, to ssd.budget.")] = None,
    dry_run: DryRun = False,
    config: ConfigFile = None,
    path: CachePath = None,
) -> None:
    """Remove what is over the budget or older than ssd.retention, least recently used first; empty quarantine/."""
    if config is None and to is None:
        raise LookupError("gc needs a size to shrink to; give --to SIZE, or --config FILE with an ssd.budget")
    options = options_of(config)._replace(path=root_of(config, path))
    if to is not None:
        options = options._replace(budget=parse_size(to))
    before = Inspection(options.path)
    if dry_run:
        gone = maintenance.surplus(options.path, Budget(options.budget, options.min_free, options.retention))
        return print(f"{options.path}: would remove {removal(gone)}.")
    asyncio.run(maintenance.remove(options, []))
    after = {e.key for e in Inspection(options.path).entries}
    print(f"{options.path}: removed {removal([e for e in before.entries if e.key not in after])}.")


def rm(
    key: Annotated[str, typer.Argument(help="First hex digits of a sequence's key, as `ls` prints it.")],
    dry_run: DryRun = False,
    config: ConfigFile = None,
    path: CachePath = None,
) -> None:
    """Remove one stored sequence, and whatever continues it. Blocks that others share stay."""
    root = root_of(config, path)
    found = Inspection(root)
    catalog = Catalog(found.entries)
    keys = maintenance.below(catalog, found.find(key).blocks[-1].key)
    told = removal([e for e in catalog if e.key in set(keys)])
    if not dry_run:
        asyncio.run(maintenance.remove(unlimited(root), keys))
    print(f"{root}: {'would remove' if dry_run else 'removed'} {told}.")


def clear(yes: Yes = False, config: ConfigFile = None, path: CachePath = None) -> None:
    """Remove everything that is stored, with what is in quarantine/."""
    root = root_of(config, path)
    entries = Inspection(root).entries
    if not confirmed(f"Remove all {removal(entries)}, from {root}?", yes):
        raise typer.Exit(1)
    asyncio.run(maintenance.remove(unlimited(root), None))
    print(f"{root}: removed {removal(entries)}.")


def unlimited(root: Path) -> TierOptions:
    """Opened so, a directory loses nothing to a budget that may not be the one of its program."""
    return TierOptions(root, budget=2**60, min_free=0, spill_queue=0)


def removal(entries: Sequence[Entry]) -> str:
    """How much goes, for people."""
    return f"{len(entries)} blocks, {format_size(sum(e.file_bytes for e in entries))}"


def show_findings(findings: Sequence[Finding]) -> None:
    """A table, where there is anything to show."""
    if findings:
        table = Table("key", "kind", right("bytes"), "why")
        for f in findings:
            table.add_row(f.key.hex()[:12], f.kind, f"{f.nbytes:,}", f.why)
        show_table(table)


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
