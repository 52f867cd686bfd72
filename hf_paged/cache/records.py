"""What KVCacheManager takes in and hands out, as plain values.

Owns the shape of matches and statistics and the checks of caller-given namespaces and token ids. It refuses to know
how any of them are computed. Called by the manager; callers of the manager import the types from here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.cache.radix_tree import Namespace
from hf_paged.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """A stored prefix, pinned until it is adopted, released or garbage-collected.

    Attributes:
        num_tokens: length of the prefix in tokens.
        blocks: physical ids that hold it, logical index 0 first; the last one may hold more than the prefix.
        namespace: where it was found.
        num_stored: tokens that are stored; more than ``num_tokens`` where the rest cannot be gone on from.
        checkpoint: the state of recurrent layers behind the prefix, where the manager keeps such.
    """

    num_tokens: int
    blocks: tuple[int, ...]
    namespace: Namespace
    num_stored: int = 0
    checkpoint: Checkpoint | None = None


@dataclass(eq=False, slots=True)
class SwappedTable:
    """A sequence's content in the host tier: host block ids, logical index 0 first, that hold ``num_tokens`` tokens."""

    blocks: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks now, and events since the manager was made. free + evictable + owned == num_blocks - 1.

    Attributes:
        num_blocks, block_size: size of the pool (null block included) and tokens a block.
        free_blocks: hold nothing.
        cached_blocks: in the tree, whether or not a sequence uses them too.
        evictable_blocks: in the tree and nowhere else.
        owned_blocks: in use by a table, a pinned match or a lock.
        num_nodes, num_namespaces, num_tables: sizes of the books.
        min_reusable_prefix: shortest common prefix, in tokens, that is reused; 0 without prefix caching.
        queries, lookup_tokens, hit_tokens: recorded matches, tokens that could have been hit, tokens that were.
        evicted_blocks: freed by eviction (for space or for max_cached_blocks).
        cow_copies: blocks copied because a sequence wrote into shared ones.
        num_checkpoints: states of recurrent layers that are kept.
        host_blocks, free_host_blocks: size of the host tier, and how much of it is free.
    """

    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    evictable_blocks: int
    owned_blocks: int
    num_nodes: int
    num_namespaces: int
    num_tables: int
    min_reusable_prefix: int
    queries: int
    lookup_tokens: int
    hit_tokens: int
    evicted_blocks: int
    cow_copies: int
    num_checkpoints: int = 0
    host_blocks: int = 0
    free_host_blocks: int = 0


def check_namespace(namespace: Namespace) -> None:
    """Refuse anything but a tuple of tagged tuples: an adapter called "x" must never equal a salt "x"."""
    if type(namespace) is not tuple or not all(
        isinstance(part, tuple) and len(part) > 1 and isinstance(part[0], str) for part in namespace
    ):
        raise ConfigError(f'namespace is {namespace!r}: use tagged tuples such as (("weights", 3), ("salt", "s"))')
    try:
        hash(namespace)
    except TypeError as error:
        raise ConfigError(f"namespace is {namespace!r}: every part must be hashable") from error


def as_token_array(tokens: Sequence[int]) -> array[int]:
    """Token ids in the form the tree compares; an ``array("q")`` is used as it is, without a copy."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return tokens
    if isinstance(tokens, (bytes, bytearray)):  # array() would read these as raw memory
        raise InvalidRequestError(f"token ids must be integers, not {type(tokens).__name__}")
    try:
        return array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(f"token ids must be integers of at most 64 bits: {error}") from error
