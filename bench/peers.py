"""What others that do the same job come to, in an environment of their own: nothing of theirs is a dependency."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.result import Options, Result, Skipped

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-peers"
VLLM = "vllm-mlx==0.6.0"  # without its dependencies: a web server and vision models
NEEDED = ("mlx" if sys.platform == "darwin" else "mlx[cpu]", "mlx-lm>=0.31.3,<0.32", "psutil", "numpy", "safetensors")
TIMEOUT = 900  # seconds


def environment() -> Path:
    """The environment's interpreter, made where it is not there. Raises `Skipped` where it cannot be made."""
    python = ENVIRONMENT / "bin" / "python"
    ready = ENVIRONMENT / "ready"
    wanted = "\n".join((VLLM, *NEEDED))
    if ready.is_file() and ready.read_text() == wanted:
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        for command in (
            [sys.executable, "-m", "venv", str(ENVIRONMENT)],
            [*pip, *NEEDED],
            [*pip, "--no-deps", VLLM],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        (ENVIRONMENT / ".gitignore").write_text("*\n")
        ready.write_text(wanted)
    except subprocess.CalledProcessError as e:
        said = (e.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Skipped(f"the peers cannot be installed: {said}") from e
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Skipped(f"the peers cannot be installed: {e}") from e
    return python


def compare(folder: Path, options: Options) -> list[Result]:
    """What `peer_script` measures, one result a peer and measurement; the table shows them beside ours."""
    python = environment()
    script = str(Path(__file__).with_name("peer_script.py"))
    try:
        run = subprocess.run([str(python), script], check=True, capture_output=True, text=True, timeout=TIMEOUT)
        told = json.loads(run.stdout.splitlines()[-1])
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, ValueError, IndexError) as e:
        raise Skipped(f"the peers' measurements did not end well: {e}") from e
    return [
        Result(f"{peer}/{key}", f"{peer}: {key}", entry["value"], "", None, entry["figures"])
        for peer, entries in told.items()
        for key, entry in entries.items()
    ]
