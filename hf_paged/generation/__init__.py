"""Stock ``generate()`` on paged blocks. Importing this package installs the two inert attention wrappers."""

from hf_paged.attention.interface import install as _install
from hf_paged.generation.paged_cache import PagedCache
from hf_paged.generation.registration import (
    CacheStats,
    cache_stats,
    check_invariants,
    clear,
    is_registered,
    register,
    unregister,
    weights_changed,
)

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
