"""Run measurements and print them as a table of ratios with what the project aims at. Some minutes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from bench import report
from bench.measure import MEASUREMENTS
from bench.result import Measurement, Options, Result, Skipped


def apart(measurement: Measurement, folder: Path, options: Options) -> list[Result]:
    """Run it in a process of its own, whose memory nothing else has used before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measurement, folder, options).result()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"only these: {', '.join(MEASUREMENTS)}")
    parser.add_argument("--quick", action="store_true", help="less of everything, to see that it works")
    parser.add_argument("--full", action="store_true", help="the full sizes, where they take minutes")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of request traces to replay")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there; - for standard output")
    parser.add_argument("--onto", type=Path, metavar="FILE", help="add to what an earlier run wrote with --json")
    parser.add_argument("--page", type=Path, metavar="DIR", help="write a Markdown page, and plots, there")
    arguments = parser.parse_args()
    if unknown := [n for n in arguments.names if n not in MEASUREMENTS]:
        parser.error(f"no measurement {unknown[0]}; there are {', '.join(MEASUREMENTS)}")
    earlier = json.loads(arguments.onto.read_text())["results"] if arguments.onto else []
    options = Options(arguments.quick, arguments.full, arguments.traces)
    run = report.Run([], {}, {})
    for name in arguments.names or MEASUREMENTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(prefix="tiered-cache-bench-"))
        load = report.Load()
        try:
            found = apart(MEASUREMENTS[name], folder, options)
            run.others[name] = load.others()
            run.results.extend(found)
            for result in found:  # at once: who interrupts has seen what was measured
                print(f"  {result.what}: {result.value}", file=sys.stderr, flush=True)
        except Skipped as e:
            run.skipped[name] = str(e)
        finally:
            shutil.rmtree(folder)
    together = {r["key"]: Result(**r) for r in earlier} | {r.key: r for r in run.results}
    run = run._replace(results=list(together.values()))
    text = json.dumps(report.document(run), indent=2) + "\n"
    if str(arguments.json) == "-":
        print(text, end="")
    else:
        report.show(run)
        if arguments.json:
            arguments.json.write_text(text)
    if arguments.page:
        report.write_page(arguments.page, run)


if __name__ == "__main__":
    main()
