"""The demo: agents that share a system prompt outgrow the RAM budget, the process restarts, and they go on.

This is the parent. It runs no model: it starts the two processes that do, shows their progress, and sums up.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiered_cache.config import format_size
from tiered_cache.demo.conversation import script

SOURCES = ("cold", "RAM hit", "SSD hit", "SSD hit after restart")
ROUNDING = "on a GPU, rounding depends on how a prompt is cut, so that close calls may differ without a fault of the cache"

Event = dict[str, Any]


class Failed(Exception):
    """The demo ends here, with this exit code and one sentence for a person."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def run_demo(*, model: str | None, quick: bool, as_json: bool, data: Path | None) -> int:
    """Run the demo and show it on stdout; the exit code.

    0: all is well; 1: an answer differs from the one computed without the cache, or the demo broke; 2: the model or the
    directory cannot be used; 130 or 143: stopped by Ctrl-C or SIGTERM. Keeps its files in `data`, or else none.
    On the main thread.
    """
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with tempfile.TemporaryDirectory(prefix="tiered-cache-demo-") if data is None else nullcontext(data) as where:
            Path(where).mkdir(parents=True, exist_ok=True)
            return _demo(Path(where), model, quick, as_json)
    except Failed as e:
        _complain(str(e))
        return e.code
    except OSError as e:
        _complain(f"{e.filename or data}: cannot be used: {e.strerror}")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit


def _complain(message: str) -> None:
    print(f"tiered-cache demo: {message}", file=sys.stderr)


def _demo(data: Path, model: str | None, quick: bool, as_json: bool) -> int:
    start = time.monotonic()
    view = View(quick, as_json)
    with view.progress:
        for stage in ("first", "resume"):
            view.begin(stage)
            _run(stage, data, model, quick, view.show)
    report = summary(view, time.monotonic() - start)
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        _print(report, view.console)
    wrong = [t for t in report["turns"] if not t["equal"]]
    for t in wrong:
        _complain(
            f"UNEQUAL: {t['agent']}, turn {t['turn']} ({t['source']}): with the cache {t['answer']!r} {t['answer_tokens']}, "
            f"without it {t['cold_answer']!r} {t['cold_answer_tokens']}"
        )
    if wrong and report["device"] == "GPU":
        _complain(ROUNDING)
    missing = set(SOURCES) - {row["source"] for row in report["rows"]}
    if missing and view.opened[0]["stats"]["ssd"]["blocks"] == 0:  # what an earlier run left changes what is found where
        raise Failed(1, f"no turn was {' or '.join(sorted(missing))}, which the order of turns should have made")
    return 1 if wrong else 0


def _run(stage: str, data: Path, model: str | None, quick: bool, show: Callable[[Event], None]) -> None:
    """Run one child to its end. Whatever interrupts this, ends the child first."""
    command = [sys.executable, "-m", "tiered_cache.demo", "--stage", stage, "--data", str(data)]
    command += ["--model", model] * (model is not None) + ["--quick"] * quick  # type: ignore[list-item]
    # A session of its own: Ctrl-C is for the parent, which passes it on as SIGTERM.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            assert child.stdout
            for line in child.stdout:
                event = json.loads(line)
                if event["event"] == "error":
                    raise Failed(2, event["message"])
                show(event)
            if child.wait():
                raise Failed(1, f"its process for the {stage} stage ended early, with exit code {child.returncode}")
        except (KeyboardInterrupt, SystemExit):
            _complain("stopping, once the step at hand is done and what RAM holds is saved")
            raise
        finally:
            if child.poll() is None:
                child.terminate()


class View:
    """What the children report, kept and shown."""

    def __init__(self, quick: bool, quiet: bool) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        self.turns: list[Event] = []
        self.opened: list[Event] = []
        self.ended: list[Event] = []
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._start = time.monotonic()
        self._task: TaskID = self.progress.add_task("", total=script(quick).turns)

    def begin(self, stage: str) -> None:
        """A process is about to be started."""
        if stage == "resume":
            self._line("The process has ended. A new one goes on with what it finds on the SSD.")
        self.progress.update(self._task, description="loading the model")

    def show(self, event: Event) -> None:
        """One event of a child."""
        kind = event.pop("event")
        if kind == "open":
            if not self.opened:
                self._introduce(event)
            self.opened.append(event)
        elif kind == "end":
            self.ended.append(event["stats"])
        elif kind == "turn":
            self.turns.append(event)
            self.progress.advance(self._task)
            self._line(
                f"{event['agent']} {event['turn']}: {event['source']}, {event['computed']} of {event['prompt']} tokens "
                f"computed, first token in {event['first_token']:.1f} s (cold {event['cold_first_token']:.1f} s): "
                f"{event['answer'] if event['equal'] else 'UNEQUAL ANSWER'}"
            )
        else:
            how = "with the cache" if kind == "cached" else "once more, cold"
            self.progress.update(self._task, description=f"{event['agent']}, turn {event['turn']}, {how}")

    def _introduce(self, event: Event) -> None:
        limit = format_size(event["stats"]["ram"]["limit"])
        self.console.print(
            f"{event['model']}: agents share a system prompt of {event['shared_tokens']} tokens and take turns. Each turn is "
            f"answered with the cache, and once more from the first token, without it (cold). The cache may use {limit} of "
            f"RAM, hardly more than one conversation ({event['token_bytes']:,} bytes a token): the rest has to go to the SSD.",
            markup=False,
        )

    def _line(self, text: str) -> None:
        seconds = int(time.monotonic() - self._start)
        self.console.print(f"{seconds // 60}:{seconds % 60:02} {text}", markup=False, soft_wrap=True)


def summary(view: View, seconds: float) -> Event:
    """All figures of a run, for JSON. Bytes, seconds, tokens."""
    turns, stats = view.turns, view.ended
    rows = []
    for source in SOURCES:
        mine = turns if source == "cold" else [t for t in turns if t["source"] == source]
        first, computed = ("cold_first_token", "prompt") if source == "cold" else ("first_token", "computed")
        if mine:
            rows.append(
                {
                    "source": source,
                    "turns": len(mine),
                    "first_token": median(t[first] for t in mine),
                    "computed": median(t[computed] for t in mine),
                    "prompt": median(t["prompt"] for t in mine),
                    "speed_up": median(t["cold_first_token"] / t[first] for t in mine),
                }
            )
    equal = sum(t["equal"] for t in turns)
    last = stats[-1]["ssd"]
    return {
        "model": view.opened[0]["model"],
        "device": view.opened[0]["device"],
        "token_bytes": view.opened[0]["token_bytes"],
        "rows": rows,
        "ram": {"limit": stats[-1]["ram"]["limit"], "peak": max(s["ram"]["peak"] for s in stats)},
        "ssd": {"blocks": last["blocks"], "file_bytes": last["file_bytes"], "state_bytes": last["raw_bytes"]},
        "answers": {"equal": equal, "unequal": len(turns) - equal},
        "seconds": seconds,
        "turns": turns,
        "stats": stats,
    }


def _print(report: Event, console: Console) -> None:
    table = Table("", title_justify="left")
    for heading in ("turns", "time to first token", "tokens computed", "of prompt tokens", "speed-up against cold"):
        table.add_column(heading, justify="right")
    for r in report["rows"]:
        times = "" if r["source"] == "cold" else f"{r['speed_up']:.1f} x"
        figures = (f"{r['first_token']:.2f} s", f"{r['computed']:.0f}", f"{r['prompt']:.0f}", times)
        table.add_row(r["source"], str(r["turns"]), *figures)
    console.print(table)
    ram, ssd, answers = report["ram"], report["ssd"], report["answers"]
    nothing = sum(t["source"] == "cold" for t in report["turns"])
    ratio = ssd["file_bytes"] / ssd["state_bytes"]
    console.print(
        f"Medians. The row cold is every turn, computed without the cache; {nothing} found nothing in the cache either.\n"
        f"RAM: {format_size(ram['peak'])} at most, limit {format_size(ram['limit'])}\n"
        f"SSD: {format_size(ssd['file_bytes'])} in {ssd['blocks']} files, for {format_size(ssd['state_bytes'])} of state "
        f"(ratio {ratio:.2f})\n"
        f"answers: {answers['equal']} equal, {answers['unequal']} unequal"
    )
    for reason, count in report["stats"][-1]["losses"].items():
        console.print(f"lost: {reason} {count}")
