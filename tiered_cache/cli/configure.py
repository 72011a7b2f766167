"""Commands about the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tiered_cache.cli.options import ConfigFile, Json
from tiered_cache.cli.output import add_row, print_json, show_table
from tiered_cache.config import Config, ConfigError, template


def init(
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


def show(config: ConfigFile = None, as_json: Json = False) -> None:
    """Show the values in force with this file (without one: the defaults) and where each comes from."""
    settings = Config.load(config).effective()
    if as_json:
        return print_json({s.key: {"value": s.value, "origin": s.origin} for s in settings})
    table = Table("key", "value", "from")
    for s in settings:
        add_row(table, s.key, s.shown, s.origin)
    show_table(table)
