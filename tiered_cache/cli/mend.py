"""Commands that check a cache directory and change it. All but `verify` ask that no program uses it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ssd_tier import Entry, IndexUnusable, TierOptions, maintenance
from ssd_tier.budget import Budget
from ssd_tier.catalog import Catalog
from ssd_tier.inspection import Inspection, one_of
from ssd_tier.maintenance import Finding
from tiered_cache.cli.options import CachePath, ConfigFile, Json, Yes, options_of, root_of
from tiered_cache.cli.output import add_row, confirmed, print_json, right, show_table
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
    root = existing(root_of(config, path))
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
        "files_taken_in": opened.get("files_adopted", 0),
        "files_removed": opened.get("orphans_removed", 0),
    }
    if as_json:
        rows = [{"kind": f.kind, "key": f.key.hex(), "bytes": f.nbytes, "why": f.why} for f in findings]
        print_json({"findings": rows, **(mended if repair else {})})
    else:
        show_findings(findings)
        told = [f"{n} {kind}" for kind, n in sorted(kinds.items())]
        told += [f"{name.replace('_', ' ')}: {n}" for name, n in mended.items() if repair and n]
        print(f"{root}: {len(Inspection(root).entries)} blocks, {', '.join(told) or 'nothing wrong'}.")
        if findings and not repair:
            print("A program that meets one of these counts a miss. To mend: tiered-cache verify --repair")
    raise typer.Exit(1 if kinds["unreadable"] or (findings and not repair) else 0)


def rebuild(config: ConfigFile = None, path: CachePath = None) -> None:
    """Make the index anew from the blobs alone. The old one is kept in quarantine/."""
    root = existing(root_of(config, path))
    count = maintenance.rebuild_index(root)
    print(f"{root}: {count} blocks in the new index. Order of use and ages are those of the files.")


def gc(
    to: Annotated[str | None, typer.Option(help="Shrink to this size, like 20GB; without it, to ssd.budget.")] = None,
    dry_run: DryRun = False,
    config: ConfigFile = None,
    path: CachePath = None,
) -> None:
    """Remove what is over the budget or older than ssd.retention, least recently used first; empty quarantine/.

    Without --config, the disk's free space does not matter.
    """
    if config is None and to is None:
        raise LookupError("gc needs a size to shrink to; give --to SIZE, or --config FILE with an ssd.budget")
    options = options_of(config)._replace(path=existing(root_of(config, path)))
    if config is None:
        options = options._replace(min_free=0)
    if to is not None:
        options = options._replace(budget=0 if to.strip() == "0" else parse_size(to))
    if dry_run:
        gone = maintenance.surplus(options.path, Budget(options.budget, options.min_free, options.retention))
        return print(f"{options.path}: would remove {removal(gone)}.")
    finish(options.path, asyncio.run(maintenance.remove(options, lambda catalog: [], compact=True)))


def rm(
    key: Annotated[str, typer.Argument(help="First hex digits of a sequence's key, as `ls` prints it.")],
    dry_run: DryRun = False,
    config: ConfigFile = None,
    path: CachePath = None,
) -> None:
    """Remove one stored sequence, and whatever continues it. Blocks that others share stay."""
    root = existing(root_of(config, path))

    def choose(catalog: Catalog) -> list[bytes]:
        return maintenance.below(catalog, bytes.fromhex(one_of([e.key.hex() for e in catalog], key)))

    if dry_run:
        catalog = Catalog(Inspection(root).entries)
        print(f"{root}: would remove {removal([e for k in choose(catalog) if (e := catalog.get(k))])}.")
    else:
        finish(root, asyncio.run(maintenance.remove(unlimited(root), choose)))


def clear(yes: Yes = False, config: ConfigFile = None, path: CachePath = None) -> None:
    """Remove everything that is stored, with what is in quarantine/."""
    root = existing(root_of(config, path))
    try:
        what = f"all {removal(Inspection(root).entries)}"
    except IndexUnusable:  # whatever it holds
        what = "everything"
    if not confirmed(f"Remove {what}, from {root}?", yes):
        raise typer.Exit(1)
    choose = lambda catalog: [e.key for e in catalog]  # noqa: E731
    finish(root, asyncio.run(maintenance.remove(unlimited(root), choose, compact=True)))


def existing(root: Path) -> Path:
    """The directory, if there is one: nothing is made where there is only a wrong name."""
    if not root.is_dir():
        raise LookupError(f"{root} is no directory; check --path, or ssd.path in the configuration")
    return root


def finish(root: Path, removed: maintenance.Removed) -> None:
    """Say what went; exit code 1 where some of it is still there."""
    size = f", {format_size(removed.nbytes)}" if removed.nbytes else ""
    print(f"{root}: removed {removed.blocks} blocks{size}.")
    if removed.undeleted:
        print(f"{removed.undeleted} files could not be removed; the next start tries again", file=sys.stderr)
        raise typer.Exit(1)


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
            add_row(table, f.key.hex()[:12], f.kind, f"{f.nbytes:,}", f.why)
        show_table(table)


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
