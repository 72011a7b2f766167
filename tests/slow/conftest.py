"""Models and configurations for servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.served_models import write


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of models, written when first asked for."""
    root = tmp_path_factory.mktemp("models")

    def get(kind: str, seed: int = 0) -> Path:
        path = root / f"{kind}-{seed}"
        return path if path.exists() else write(path, kind, seed)

    return get


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """A configuration file with the test's own directory."""

    def make(memory: str = "64MB", budget: str = "200MB", write: str = "evict", shortest: int = 32) -> Path:
        path = tmp_path / "tiered-cache.toml"
        path.write_text(
            f'[ram]\nmax_memory = "{memory}"\nmin_prefix_tokens = {shortest}\n[promotion]\npolicy = "always"\n'
            f'[ssd]\npath = "{tmp_path / "cache"}"\nbudget = "{budget}"\nmin_free = "1MB"\nwrite = "{write}"\n'
        )
        return path

    return make
