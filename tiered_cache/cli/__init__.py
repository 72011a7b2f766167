"""The command `tiered-cache`: look into a cache directory and mend it, configure, run the demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ssd_tier.errors import TierError
from ssd_tier.index import DatabaseError
from tiered_cache.cli import configure, look, mend
from tiered_cache.cli.doctor import doctor
from tiered_cache.cli.options import Json
from tiered_cache.cli.serve import PASSED_ON, serve
from tiered_cache.cli.simulate import simulate
from tiered_cache.config import ConfigError
from tiered_cache.simulation import TraceError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Write a commented configuration file, or show what is in force.")

app.command("ls")(look.list_sequences)
app.command()(look.show)
app.command()(look.stats)
app.command()(mend.verify)
app.command("rebuild-index")(mend.rebuild)
app.command()(mend.gc)
app.command()(mend.rm)
app.command()(mend.clear)
app.command()(doctor)
app.command()(simulate)
app.command(context_settings=PASSED_ON)(serve)
app.add_typer(config_app, name="config")
config_app.command()(configure.init)
config_app.command()(configure.show)


def main() -> None:
    """Entry point. What a person did wrong is one sentence on stderr and exit code 2."""
    try:
        app()
    except (KeyError, IndexError):
        raise  # a fault of ours, though a LookupError
    except (ConfigError, TierError, TraceError, LookupError, OSError, DatabaseError) as e:
        print(f"tiered-cache: {e}", file=sys.stderr)
        sys.exit(2)


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Model directory or repository, instead of SmolLM2-135M.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About two minutes instead of five.")] = False,
    data: Annotated[Path | None, typer.Option(help="Keep the cache in this directory.")] = None,
    as_json: Json = False,
) -> None:
    """Watch agents share prefixes, push each other out of RAM, and go on after a restart; every answer is checked."""
    from tiered_cache.demo.run import run_demo  # takes seconds to import: not for `ls`

    raise typer.Exit(run_demo(model=model, quick=quick, as_json=as_json, data=data))
