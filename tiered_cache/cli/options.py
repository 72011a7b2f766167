"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssd_tier.tier import TierOptions
from tiered_cache.config import Config

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; its ssd.path is meant.")]
CachePath = Annotated[Path | None, typer.Option("--path", "-p", help="Cache directory that is meant.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes, instead of a table.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def root_of(config: Path | None, path: Path | None) -> Path:
    """The directory that the options name."""
    return path.absolute() if path else Config.load(config).ssd_path()


def options_of(config: Path | None) -> TierOptions:
    """The SSD tier as its program opens it."""
    return Config.load(config).tier_options()
