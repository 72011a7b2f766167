"""The SSD tier of tiered-cache: verified, budgeted, restart-proof storage of named blocks of bytes.

It knows keys and bytes, nothing of models or MLX.
"""

from ssd_tier.blob import Block, TensorSpec
from ssd_tier.catalog import Entry
from ssd_tier.errors import DirectoryInUse, DirectoryUnusable, IndexUnusable, TierError
from ssd_tier.spill import Listener
from ssd_tier.tier import SSDTier, TierOptions

__all__ = [
    "Block",
    "DirectoryInUse",
    "DirectoryUnusable",
    "Entry",
    "IndexUnusable",
    "Listener",
    "SSDTier",
    "TensorSpec",
    "TierError",
    "TierOptions",
]
