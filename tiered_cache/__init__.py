"""Two-tier cache, RAM and SSD, of the attention state (KV cache) of language models run with MLX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd_tier import TierError
    from tiered_cache.config import Config, ConfigError
    from tiered_cache.engine import TieredCache
    from tiered_cache.handoff import Handoff, Ready
    from tiered_cache.promotion import Promotion

__version__ = "0.1.0"

# Imported when first used: MLX and mlx-lm take seconds, and `tiered-cache ls` needs neither.
_HOMES = {
    "Config": "tiered_cache.config",
    "ConfigError": "tiered_cache.config",
    "Handoff": "tiered_cache.handoff",
    "Promotion": "tiered_cache.promotion",
    "Ready": "tiered_cache.handoff",
    "TierError": "ssd_tier",
    "TieredCache": "tiered_cache.engine",
}

__all__ = ["Config", "ConfigError", "Handoff", "Promotion", "Ready", "TierError", "TieredCache", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiered_cache' has no attribute {name!r}")
