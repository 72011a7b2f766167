"""How the commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table


def right(name: str) -> Column:
    """A column of figures."""
    return Column(name, justify="right")


def add_row(table: Table, *cells: str) -> None:
    """A row of cells as they are: what looks like markup may be a model's name."""
    table.add_row(*map(escape, cells))


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


def confirmed(question: str, yes: bool) -> bool:
    """Whether a person agrees, or did so beforehand. Without a terminal to ask, it is no."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise LookupError(f"{question} Nothing was done: say so with --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))
