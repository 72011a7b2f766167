"""Schema versions: numbered SQL files, each applied once, `user_version` saying how far an index has come."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ssd_tier.errors import IndexUnusable
from ssd_tier.files import Directory

APPLICATION_ID = 0x544B5631  # "TKV1"


def scripts() -> list[str]:
    """The migrations' SQL in order. In a wheel they lie inside the package, in a checkout beside it."""
    folder: Traversable = files("ssd_tier") / "migrations"
    if not folder.is_dir():
        folder = Path(__file__).parent.parent / "migrations"
    found = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    numbers = [int(f.name[:4]) for f in found]
    if not found or numbers != list(range(1, len(found) + 1)):
        raise IndexUnusable(f"the migrations in {folder} are not complete ({numbers}); install tiered-cache again")
    return [f.read_text("utf-8") for f in found]


def check_version(connection: sqlite3.Connection, path: Path, known: int) -> int:
    """The index's schema version. Raises `IndexUnusable` where it is another program's or newer than `known`."""
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if application != APPLICATION_ID and not (application == 0 and version == 0 and empty):
        raise IndexUnusable(f"{path} is another program's database; move it away or choose another ssd.path")
    if version > known:
        raise IndexUnusable(
            f"{path} has schema version {version}, and this version of tiered-cache knows up to {known}; "
            "install a newer tiered-cache or choose another ssd.path"
        )
    return version


def migrate(
    connection: sqlite3.Connection, path: Path, steps: list[str], fill: Callable[[], object] = lambda: None
) -> None:
    """Bring the index to the newest schema in one transaction; `fill` is called in it where the index is new.

    `connection` is in autocommit mode. The version is read inside the transaction: read before it, two processes that
    start at once both migrate.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        have = check_version(connection, path, len(steps))
        for script in steps[have:]:
            for statement in _statements(script):  # executescript() would commit first
                Directory.hook("migrate", path.name)
                connection.execute(statement)
        if have == 0:
            fill()
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        Directory.hook("commit", path.name)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> list[str]:
    statements, buffer = [], ""
    for line in script.splitlines(keepends=True):
        buffer += line
        if sqlite3.complete_statement(buffer):
            statements.append(buffer.strip())
            buffer = ""
    if any(part.strip() and not part.strip().startswith("--") for part in buffer.splitlines()):
        raise ValueError(f"an unfinished statement at the end of a migration: {buffer.strip()!r}")
    return statements
