"""Results as a table, as JSON, and as a page with plots."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from bench.result import Result

MARK = {True: "yes", False: "NO", None: ""}
PEERS = ("vllm-mlx", "mlx-lm")
BUSY = 0.1  # of all cores, in other processes


class Run(NamedTuple):
    """`others`: the share of all cores that other processes took during each measurement; `skipped`: reasons."""

    results: list[Result]
    others: dict[str, float]
    skipped: dict[str, str]


class Load:
    """How much of the machine other processes use, since it was made."""

    def __init__(self) -> None:
        self._began = self._taken()

    def others(self) -> float:
        """Their share of all cores' time."""
        everything, idle, own = (now - then for now, then in zip(self._taken(), self._began, strict=True))
        return max(0.0, everything - idle - own) / everything if everything else 0.0

    @staticmethod
    def _taken() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        own = os.times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # in user and nice already
        return sum(times) - guests, idle, sum(own[:4])


def machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "numpy", "tiered-cache")},
    }


def document(run: Run) -> dict[str, Any]:
    """All figures, for JSON."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results = [r._asdict() for r in run.results]
    return {"date": now, "machine": machine(), "results": results, "others": run.others, "skipped": run.skipped}


def remarks(run: Run) -> list[str]:
    """What a reader of the figures must know."""
    busy = [f"{name} ({share:.0%})" for name, share in run.others.items() if share > BUSY]
    told = [f"other processes used the machine meanwhile, so do not trust: {', '.join(busy)}"] if busy else []
    return told + [f"skipped: {name}: {reason}" for name, reason in run.skipped.items()]


def rows(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table: a peer's figure in our row of that key, or in a row of its own."""
    ours = [r for r in results if "/" not in r.key]
    peers = {r.key: r for r in results if "/" in r.key}
    names = [p for p in PEERS if any(key.startswith(f"{p}/") for key in peers)]
    lines = []
    for r in ours:
        beside = [peers.pop(f"{name}/{r.key}", None) for name in names]
        lines.append([r.what, r.value, r.aim, MARK[r.met], *(b.value if b else "" for b in beside)])
    for key, r in peers.items():
        lines.append([r.what, "", "", "", *(r.value if key.startswith(f"{name}/") else "" for name in names)])
    return ["measured", "result", "aim", "met", *names], lines


def show(run: Run) -> None:
    """Print the table."""
    head, lines = rows(run.results)
    table = Table(*head, title=", ".join(f"{k} {v}" for k, v in machine().items()), show_lines=True)
    for line in lines:
        table.add_row(*line)
    console = Console(width=None if Console().is_terminal else 180)
    console.print(table)
    for remark in remarks(run):
        console.print(remark, markup=False)


def write_page(folder: Path, run: Run) -> None:
    """A Markdown page with the table, and plots where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    head, lines = rows(run.results)
    told = document(run)
    plots, why = plot(folder, {r.key: r for r in run.results})
    text = [
        "# How fast",
        "",
        f"{told['date']}; " + ", ".join(f"{k} {v}" for k, v in told["machine"].items()),
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines),
        "",
        *(f"![{name.removesuffix('.png')}]({name})" for name in plots),
        "",
        *(f"- {remark}" for remark in [*remarks(run), *([f"skipped: plots: {why}"] if why else [])]),
    ]
    (folder / "README.md").write_text("\n".join(text) + "\n")


def plot(folder: Path, by_key: dict[str, Result]) -> tuple[list[str], str | None]:
    """Names of the plots that were written, and why there are none."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as e:
        return [], f"matplotlib is not installed ({e})"
    written = []

    def save(name: str, axes: Any, title: str, ylabel: str) -> None:
        axes.set_title(title)
        axes.set_ylabel(ylabel)
        axes.figure.tight_layout()
        axes.figure.savefig(folder / name, dpi=120)
        pyplot.close(axes.figure)
        written.append(name)

    if found := by_key.get("look_up_new"):
        times = {int(k.split("_")[1]): v for k, v in found.figures.items() if k.startswith("new_")}
        axes = pyplot.subplots(figsize=(6, 4))[1]
        axes.plot(list(times), list(times.values()), "o-", label="tiered-cache")
        for peer in PEERS:
            if other := by_key.get(f"{peer}/look_up_new"):
                f = other.figures
                axes.plot([10, f["sequences"]], [f["new_few_ms"], f["new_many_ms"]], "o--", label=peer)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(0.1, 3 * max(axes.get_ylim()[1], 1))
        axes.set_xlabel("sequences that share 8,000 tokens")
        axes.legend()
        save("fetch.png", axes, "fetch of 8k tokens", "ms")
    sizes = {k.removeprefix("bytes_"): r.figures for k, r in by_key.items() if k.startswith("bytes_") and r.figures}
    if sizes:
        axes = pyplot.subplots(figsize=(6, 4))[1]
        places = range(len(sizes))
        axes.bar([p - 0.2 for p in places], [f["ratio"] for f in sizes.values()], 0.4, label="files")
        axes.bar([p + 0.2 for p in places], [f["order0_bound"] for f in sizes.values()], 0.4, label="order-0 entropy")
        axes.set_xticks(list(places), list(sizes))
        axes.legend()
        save("bytes.png", axes, "bytes in files, of bytes of state (bfloat16, lossless)", "share")
    if found := by_key.get("load"):
        axes = pyplot.subplots(figsize=(6, 4))[1]
        bars = {"promotion": found.figures["promote"], "mx.load": found.figures["mx_load"]}
        for peer in PEERS:
            if other := by_key.get(f"{peer}/load"):
                bars[peer] = other.figures["load_ms"]
        axes.bar(list(bars), list(bars.values()))
        save("promotion.png", axes, "192 MiB from a cold page cache", "ms")
    turns = {key.removeprefix("serving_"): r.figures for key, r in by_key.items() if key.startswith("serving_")}
    if turns:
        axes = pyplot.subplots(figsize=(6, 4))[1]
        places = range(len(turns))
        axes.bar([p - 0.2 for p in places], [f["stock_s"] for f in turns.values()], 0.4, label="mlx_lm.server")
        axes.bar([p + 0.2 for p in places], [f["ours_s"] for f in turns.values()], 0.4, label="tiered-cache serve")
        axes.set_xticks(list(places), [f"{name} turn" if name != "after" else "after a restart" for name in turns])
        axes.legend()
        save("serving.png", axes, "first token over HTTP, SmolLM2-135M on two CPU cores", "seconds")
    return written, None
