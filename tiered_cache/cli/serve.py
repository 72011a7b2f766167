"""`tiered-cache serve`: mlx-lm's server with a cache in two tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiered_cache.config import Config

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def serve(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of the cache.")] = None,
    show_help: Annotated[bool, typer.Option("--help", help="Show this, and all options of mlx_lm.server.")] = False,
) -> None:
    """Serve a model over HTTP as mlx_lm.server does, with all of its options, and this cache.

    tiered-cache serve --model PATH_OR_REPOSITORY [--config FILE] [options of mlx_lm.server]
    """
    from tiered_cache.integrations import serve as server  # takes seconds to import: not for `ls`

    if show_help:
        typer.echo(context.get_help())
        typer.echo("\nAll options of mlx_lm.server are taken:\n")
        server.serve(Config(), ["--help"])
    raise typer.Exit(server.serve(Config.load(config), context.args))
