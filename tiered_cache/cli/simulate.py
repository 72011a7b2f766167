"""`tiered-cache simulate`: what budgets would give, by a replay of requests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.table import Table

from tiered_cache.cli.options import Json
from tiered_cache.cli.output import add_row, print_json, right, show_table
from tiered_cache.config import format_size, parse_size
from tiered_cache.simulation import BLOCK_TOKENS, Simulation, read_trace
from tiered_cache.traffic import agents

Admissions = Annotated[str, typer.Option(help="second-touch, all, or both with a comma between them.")]


def simulate(
    trace: Annotated[
        str,
        typer.Argument(help='JSONL with "input_length" and "hash_ids" (one for 512 tokens) in each line; or agents:8.'),
    ],
    ram: Annotated[str, typer.Option(help="Sizes of the RAM tier, like 1GB,4GB.")] = "8GB",
    ssd: Annotated[str, typer.Option(help="Sizes of the SSD tier, like 20GB,100GB; 0: none.")] = "0,50GB",
    token_bytes: Annotated[int, typer.Option(min=1, help="Bytes of state a token: see `show`.")] = 98304,
    ratio: Annotated[float, typer.Option(min=0.01, max=1, help="Bytes in files / bytes of state.")] = 0.68,
    admission: Admissions = "second-touch",
    as_json: Json = False,
) -> None:
    """Replay a trace with the engine's own tree, eviction and admission, without arrays; a row for each pair of sizes.

    Reported is what of the prompts' tokens would have been reused from each tier, and what would have been written.
    """
    block = BLOCK_TOKENS * token_bytes
    rows = []
    for ram_size, ssd_size, policy in itertools.product(sizes(ram), sizes(ssd), admission.split(",")):
        if policy not in ("second-touch", "all"):
            raise LookupError(f"--admission {policy}: must be second-touch or all")
        requests = agents(int(trace[7:])) if trace.startswith("agents:") else read_trace(Path(trace))
        kind = cast('Literal["second-touch", "all"]', policy)
        out = Simulation(ram_size, round(ssd_size / ratio), block, kind).run(requests)
        rows.append(
            {
                "ram": ram_size,
                "ssd": ssd_size,
                "admission": policy,
                "requests": out.requests,
                "tokens": out.tokens,
                "ram_share": round(out.ram_tokens / max(1, out.tokens), 4),
                "ssd_share": round(out.ssd_tokens / max(1, out.tokens), 4),
                "share": round(out.share, 4),
                "ceiling": round(out.ceiling_tokens / max(1, out.tokens), 4),
                "blocks_written": out.written,
                "blocks_read": out.read,
                "bytes_written": round(out.written * block * ratio),
                "bytes_read": round(out.read * block * ratio),
            }
        )
    if as_json:
        return print_json(rows)
    names = ("RAM", "SSD", "from RAM", "from SSD", "together", "infinite cache", "written", "read")
    table = Table(*map(right, names), "admission")
    for r in rows:
        shares = (f"{100 * float(str(r[name])):.1f} %" for name in ("ram_share", "ssd_share", "share", "ceiling"))
        held = (format_size(int(str(r[name]))) for name in ("ram", "ssd"))
        moved = (format_size(int(str(r[name]))) for name in ("bytes_written", "bytes_read"))
        add_row(table, *held, *shares, *moved, str(r["admission"]))
    show_table(table)
    print(f"{rows[0]['requests']:,} requests, {rows[0]['tokens']:,} tokens; shares are of these tokens.")


def sizes(text: str) -> list[int]:
    """Bytes of a list like 1GB,4GB."""
    return [0 if part.strip() == "0" else parse_size(part) for part in text.split(",")]
