"""Two-tier cache, RAM and SSD, of the attention state (KV cache) of language models run with MLX."""

from tiered_cache.config import Config, ConfigError
from tiered_cache.engine import TieredCache
from tiered_cache.handoff import Handoff, Ready
from tiered_cache.promotion import Promotion

__version__ = "0.1.0"

__all__ = ["Config", "ConfigError", "Handoff", "Promotion", "Ready", "TieredCache", "__version__"]
