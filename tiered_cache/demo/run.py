"""The demo: agents that share a system prompt outgrow the RAM budget, the process is restarted, and they go on.

This is the parent. It runs no model: it starts the two processes that do, and shows what they report.
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
from typing import Any

from rich.console import Console
from rich.table import Table

from tiered_cache.config import format_size

SOURCES = ("cold", "RAM hit", "SSD hit", "SSD hit after restart")

Event = dict[str, Any]


class Failed(Exception):
    """The demo ends here; `args`: the exit code, and one sentence for a person."""


def run_demo(*, model: str | None, quick: bool, as_json: bool, data: Path | None) -> int:
    """Run the demo, show it on stdout, and return the exit code. Keeps its files in `data`, or else none. Main thread.

    0: all is well; 1: an answer differs from the one computed without the cache, or the demo broke; 2: the model or the
    directory cannot be used; 130 or 143: stopped by Ctrl-C or SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="tiered-cache-demo-") if data is None else nullcontext(data) as where:
            Path(where).mkdir(parents=True, exist_ok=True)
            return _demo(Path(where), model, quick, as_json)
    except Failed as e:
        _complain(e.args[1])
        return int(e.args[0])
    except OSError as e:
        _complain(f"{e.filename or data} cannot be used as the directory: {e.strerror}")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(message: str) -> None:
    print(f"tiered-cache demo: {message}", file=sys.stderr)


def _demo(data: Path, model: str | None, quick: bool, as_json: bool) -> int:
    view = View(Console(quiet=as_json, highlight=False))
    options = [*(["--model", model] if model else []), *(["--quick"] if quick else [])]
    with view.status:
        _run("first", data, options, view.show)
        view.line("The process has ended. A new one takes over, with nothing but the files on the SSD.")
        _run("resume", data, options, view.show)
    report = view.report()
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        view.print_report(report)
    wrong = [t for t in view.turns if not t["equal"]]
    for t in wrong:
        ours, cold = (f"{t[key]!r} {t[f'{key}_tokens']}" for key in ("answer", "cold_answer"))
        _complain(f"UNEQUAL: {t['agent']}, turn {t['turn']}, {t['source']}: {ours} with the cache, {cold} without")
    if wrong and "cpu" not in report["device"]:
        _complain("a GPU's rounding depends on where a prompt is cut: a close call can differ with correct state, too")
    missing = [s for s in SOURCES if s not in {row["source"] for row in report["rows"]}]
    if missing and not report["blocks_found"]:  # what an earlier run left changes what is found where
        raise Failed(1, f"no turn was: {', '.join(missing)}; the demo's order of turns should have made one of each")
    return 1 if wrong else 0


def _run(stage: str, data: Path, options: list[str], show: Callable[[Event], None]) -> None:
    """Run a child to its end; whatever interrupts this ends the child first."""
    command = [sys.executable, "-m", "tiered_cache.demo", "--stage", stage, "--data", str(data), *options]
    # In a session of its own, so that Ctrl-C reaches the parent alone, which passes it on as SIGTERM.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            for line in child.stdout or ():
                event = json.loads(line)
                if event["event"] != "error":
                    show(event)
                elif child.wait():
                    raise Failed(2, event["message"])
            if child.wait():
                raise Failed(1, f"the process of the stage {stage!r} ended with exit code {child.returncode}")
        except (KeyboardInterrupt, SystemExit):
            _complain("stopping as soon as the step at hand is done and what RAM holds is on the SSD")
            raise
        finally:
            try:
                child.terminate()  # does nothing to a child that has ended
                child.wait()
            except BaseException:  # stopped once more
                child.kill()
                raise


class View:
    """What the children report: shown, and kept for the report."""

    def __init__(self, console: Console) -> None:
        self.turns: list[Event] = []
        self.opened: Event = {}  # by the first child
        self.ended: list[Event] = []  # each child's last statistics
        self.status = console.status("loading the model")
        self._console = console
        self._start = time.monotonic()

    def show(self, event: Event) -> None:
        """An event of a child."""
        match event.pop("event"):
            case "open":
                if not self.opened:
                    self.opened = event
                    self.line(
                        f"Three agents share a system prompt; RAM may hold {format_size(event['ram_limit'])}, about "
                        f"one conversation. {event['model']} answers each turn twice: with the cache, and cold"
                    )
            case "turn":
                self.turns.append(event)
                self.line(
                    f"{event['agent']}, turn {event['turn']}: {event['source']}, {event['computed']} of "
                    f"{event['prompt']} tokens computed, first token after {event['first_token']:.1f} s (cold "
                    f"{event['cold_first_token']:.1f} s): {event['answer'] if event['equal'] else 'UNEQUAL ANSWER'}"
                )
            case "end":
                self.ended.append(event["stats"])
                self.status.update("loading the model")
            case "step":
                self.status.update(f"{event['agent']}, turn {event['turn']}: {event['prompt']} tokens {event['doing']}")

    def line(self, text: str) -> None:
        """Print a line of progress."""
        seconds = int(time.monotonic() - self._start)
        self._console.print(f"{seconds // 60}:{seconds % 60:02}  {text}", markup=False, soft_wrap=True)

    def report(self) -> Event:
        """All figures, for JSON: bytes, seconds, tokens."""
        rows = []
        for source in SOURCES:
            turns = [t for t in self.turns if source in ("cold", t["source"])]
            first, computed = ("cold_first_token", "prompt") if source == "cold" else ("first_token", "computed")
            if turns:
                figures = {name: median(t[name] for t in turns) for name in (first, computed, "prompt")}
                row = {"first_token": figures[first], "computed": figures[computed], "prompt": figures["prompt"]}
                speed_up = median(t["cold_first_token"] / t[first] for t in turns)
                rows.append({"source": source, "turns": len(turns), **row, "speed_up": speed_up})
        ssd, equal = self.ended[-1]["ssd"], [t["equal"] for t in self.turns]
        files = {"files": ssd["blocks"], "file_bytes": ssd["file_bytes"], "state_bytes": ssd["raw_bytes"]}
        return {
            **self.opened,
            "rows": rows,
            "ram": {"limit": self.opened["ram_limit"], "peak": max(stats["ram"]["peak"] for stats in self.ended)},
            "ssd": {**files, "ratio": ssd["file_bytes"] / max(1, ssd["raw_bytes"])},
            "answers": {"equal": sum(equal), "unequal": len(equal) - sum(equal)},
            "seconds": time.monotonic() - self._start,
            "turns": self.turns,
            "stats": self.ended,
        }

    def print_report(self, report: Event) -> None:
        """The same for people."""
        table = Table()
        table.add_column("", no_wrap=True)
        for heading in ("turns", "time to first token", "tokens computed", "of prompt tokens", "speed-up"):
            table.add_column(heading, justify="right")
        for r in report["rows"]:
            figures = (f"{r['computed']:.0f}", f"{r['prompt']:.0f}", f"{r['speed_up']:.1f} x")
            table.add_row(r["source"], str(r["turns"]), f"{r['first_token']:.2f} s", *figures)
        self._console.print(table)
        ram, ssd, answers = report["ram"], report["ssd"], report["answers"]
        self._console.print(
            "Medians. cold: every turn, without the cache; speed-up: against the same turns.\n"
            f"RAM: limit {format_size(ram['limit'])}, peak {format_size(ram['peak'])}\n"
            f"SSD: {format_size(ssd['file_bytes'])} in {ssd['files']} files, for {format_size(ssd['state_bytes'])} of "
            f"state (ratio {ssd['ratio']:.2f})\n"
            f"answers: {answers['equal']} equal, {answers['unequal']} unequal"
        )
