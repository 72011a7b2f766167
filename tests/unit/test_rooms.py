"""Which module may know which: imports go down only, and each outside thing has one home."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the top of the house to its cellar; a room may import rooms below it, and its neighbours of the same line.
ROOMS = [
    ["tiered_cache.cli"],
    ["tiered_cache.integrations"],
    ["tiered_cache.demo"],
    ["tiered_cache.traffic"],
    ["tiered_cache.engine", "tiered_cache.simulation"],
    ["tiered_cache.runtime"],
    ["tiered_cache.handoff"],
    ["tiered_cache.promotion"],
    ["tiered_cache.memory_cache"],
    ["tiered_cache.ram_tier"],
    ["tiered_cache.block_pool"],
    ["tiered_cache.residency"],
    ["tiered_cache.plans"],
    ["tiered_cache.prefix_tree", "tiered_cache.ledger"],
    ["tiered_cache.layers"],
    ["tiered_cache.cache_helpers", "tiered_cache.snapshot"],
    ["tiered_cache.attributes"],
    ["tiered_cache.layer_tree"],
    ["tiered_cache.layer_kinds", "tiered_cache.pricing"],
    ["tiered_cache.config", "tiered_cache.fingerprint", "tiered_cache.metrics", "tiered_cache.look_up_log"],
    ["ssd_tier.maintenance"],
    ["ssd_tier.inspection", "ssd_tier.tier"],
    ["ssd_tier.writer", "ssd_tier.reader", "ssd_tier.recovery"],
    ["ssd_tier.store", "ssd_tier.rebuild"],
    ["ssd_tier.budget", "ssd_tier.spill"],
    ["ssd_tier.index"],
    ["ssd_tier.migrations", "ssd_tier.rows"],
    ["ssd_tier.catalog"],
    ["ssd_tier.blob"],
    ["ssd_tier.files", "ssd_tier.codec"],
    ["ssd_tier.folders"],
    ["ssd_tier.claim"],
    ["ssd_tier.keys", "ssd_tier.leaf_first", "ssd_tier.buffers", "ssd_tier.clock", "ssd_tier.admission"],
    ["ssd_tier.errors", "ssd_tier.breaker", "ssd_tier.workers"],
]
LEVEL = {room: len(ROOMS) - i for i, level in enumerate(ROOMS) for room in level}
PACKAGES = {"tiered_cache": LEVEL["tiered_cache.engine"], "ssd_tier": LEVEL["ssd_tier.tier"]}

MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(path: Path) -> list[str]:
    """Modules that a file imports, as far as `from a import b` may name a module too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{a.name}" for a in node.names]
            found += [n if node.module in PACKAGES and n in LEVEL else node.module for n in names]
    return found


# A package's own face shows what lies in its rooms.
@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p) not in PACKAGES], ids=name_of)
def test_imports_go_down_only(path):
    module = name_of(path)
    assert room_of(module) in LEVEL, f"{module} has no room: give it a place in the list"
    for target in imports(path):
        if target.split(".")[0] not in PACKAGES:
            continue
        level = PACKAGES.get(target) or LEVEL[room_of(target)]
        same = room_of(target) == room_of(module)
        assert same or level < LEVEL[room_of(module)], f"{module} imports {target}, which is not below it"


def users_of(library: str) -> set[str]:
    return {name_of(p) for p in MODULES if any(t == library or t.startswith(library + ".") for t in imports(p))}


def test_mlx_has_one_home():
    """Arrays are touched by these; `layer_tree` and `engine` know classes of layers, `snapshot` mlx-lm's own files."""
    hosts = ("tiered_cache.demo", "tiered_cache.integrations")
    inside = {m for lib in ("mlx", "mlx_lm") for m in users_of(lib) if not m.startswith(hosts)}
    names = "layers attributes layer_kinds layer_tree cache_helpers pricing snapshot fingerprint engine"
    assert inside == {f"tiered_cache.{name}" for name in names.split()}
    engine = imports(ROOT / "tiered_cache" / "engine.py")
    assert [t for t in engine if t.startswith("mlx")] == ["mlx_lm.models.cache"]  # make_prompt_cache, at open


def test_sqlite_has_one_home():
    assert users_of("aiosqlite") == {"ssd_tier.index"}
    inside = "ssd_tier.index ssd_tier.migrations ssd_tier.rows ssd_tier.store ssd_tier.tier ssd_tier.errors"
    assert users_of("sqlite3") <= set(inside.split())


# `index` makes its own empty file, `config` and `cli` deal in TOML, `snapshot` in a folder of the host's.
HAVE_FILES = [
    "ssd_tier.files", "ssd_tier.folders", "ssd_tier.claim", "ssd_tier.index", "tiered_cache.config",
    "tiered_cache.cli.configure", "tiered_cache.simulation", "tiered_cache.snapshot", "tiered_cache.look_up_log",
]  # fmt: skip


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.parts[-2] != "demo" and name_of(p) not in HAVE_FILES], ids=name_of
)
def test_only_files_opens_renames_or_removes(path):
    forbidden = {"open", "unlink", "rename", "replace", "remove", "rmtree", "rmdir", "mkdir"}
    modules = {"os", "shutil", "Path", "pathlib"}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            assert function.id != "open", f"line {node.lineno}"
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            used = function.value.id in modules and function.attr in forbidden
            assert not used, f"line {node.lineno}: {function.value.id}.{function.attr}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 350
