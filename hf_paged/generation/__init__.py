"""Stock ``generate()`` on paged blocks. Importing this package installs the two inert attention wrappers."""

from hf_paged.attention.interface import install as _install
from hf_paged.generation.models import CacheStats, cache_stats, check_invariants, clear, weights_changed
from hf_paged.generation.paged_cache import PagedCache
from hf_paged.generation.registration import is_registered, register, unregister

__all__ = [
    "CacheStats",
    "PagedCache",
    "cache_stats",
    "check_invariants",
    "clear",
    "is_registered",
    "register",
    "unregister",
    "weights_changed",
]

_install()
