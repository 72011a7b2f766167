"""The wheel, in an environment of its own, away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def test_a_wheel_holds_the_migrations_and_works_from_anywhere(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    migrations = sorted(p.name for p in (ROOT / "migrations").glob("*.sql"))
    assert sorted(n for n in names if n.endswith(".sql")) == [f"ssd_tier/migrations/{m}" for m in migrations]
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"tiered_cache", "ssd_tier"}
    # The dependencies are those of this environment; the package itself comes from the wheel alone.
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    script = (
        "import ssd_tier, tiered_cache, sys; from pathlib import Path; from ssd_tier import index, migrations\n"
        "assert ssd_tier.__file__.startswith(sys.argv[1]), ssd_tier.__file__\n"
        "assert index.prepare(Path(sys.argv[2])) == index.Contents()\n"
        "assert len(migrations.scripts()) == int(sys.argv[3])\n"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", script, str(site), str(tmp_path / "index.sqlite"), str(len(migrations))],
        cwd="/",
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        check=True,
    )
