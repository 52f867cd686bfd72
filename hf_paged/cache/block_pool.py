"""Reference counts of physical blocks: who keeps each block alive, and how many blocks are in which condition.

The pool owns the counts and the free list. It refuses to know tokens, sequences and tensors. The radix tree and
KVCacheManager call it; nobody else should.

A block has two counts. *Holds* belong to tables, pinned matches and locks: someone may read or write the block now.
*Cache references* belong to nodes of the radix tree: the content might be useful again. Keeping the two apart is what
makes the number of evictable blocks exact at all times in O(1): it changes only when one of the counts reaches or
leaves zero.

    holds  cache refs
      0        0        free
      0       >0        idle: only the tree keeps it, eviction would free it
     >0       any       owned

Paged blocks with reference counts follow PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hf_paged.cache.block import NULL_BLOCK, FreeList
from hf_paged.errors import ConfigError, InternalError


class BlockPool:
    """Counts for the physical blocks ``0..num_blocks-1``; block 0 is the null block and is never handed out.

    Attributes:
        num_blocks: physical blocks including the null block; ``num_usable`` is one less.
        num_idle: blocks that only the radix tree keeps (evictable).
        num_owned: blocks with at least one hold.
        num_cached: blocks with at least one cache reference, idle or owned.
        on_idle: called with a block id when a cached block loses its last hold.
    """

    __slots__ = ("_cached", "_free", "_holds", "num_blocks", "num_cached", "num_idle", "num_owned", "on_idle")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks}: at least 2 are needed, the null block and one to use")
        self.num_blocks = num_blocks
        self.num_idle = 0
        self.num_owned = 0
        self.num_cached = 0
        self.on_idle: Callable[[int], None] | None = None
        self._free = FreeList(num_blocks)
        # counts of blocks that were handed out at least once; they grow with use, not with the pool
        self._holds = [0]
        self._cached = [0]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._free.size

    @property
    def num_available(self) -> int:
        """Blocks an allocation can get: the free ones and those that eviction would free."""
        return self._free.size + self.num_idle

    def holds(self, block: int) -> int:
        return self._holds[block] if block < len(self._holds) else 0

    def cache_refs(self, block: int) -> int:
        return self._cached[block] if block < len(self._cached) else 0

    def ref_count(self, block: int) -> int:
        """All references: holds and cache references."""
        return self.holds(block) + self.cache_refs(block)

    def is_idle(self, block: int) -> bool:
        return self._holds[block] == 0 and self._cached[block] > 0

    def allocate(self, n: int) -> list[int]:
        """Take ``n`` free blocks with one hold each. The caller makes room first: too few is an InternalError."""
        blocks = self._free.pop(n)
        holds = self._holds
        if len(holds) < self._free.linked:
            self._grow()
        for block in blocks:
            holds[block] = 1
        self.num_owned += n
        return blocks

    def claim(self, block: int) -> None:
        """Take one given free block, with one hold. Raises InternalError when it is not free."""
        self._free.remove(block)
        self._grow()
        self._holds[block] = 1
        self.num_owned += 1

    def _unused(self, block: int) -> int:
        raise InternalError(f"block {block} is free: it was never handed out")

    def _grow(self) -> None:
        missing = [0] * (self._free.linked - len(self._holds))
        self._holds += missing
        self._cached += missing

    def incref(self, blocks: Iterable[int]) -> None:
        """One more hold on each block. Raises InternalError for a free block: nothing says what it contains."""
        holds, cached = self._holds, self._cached
        for block in blocks:
            count = holds[block] if block < len(holds) else self._unused(block)
            if count == 0:
                if cached[block] == 0:
                    raise InternalError(f"block {block} is free and cannot be shared")
                self.num_idle -= 1
                self.num_owned += 1
            holds[block] = count + 1

    def decref(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block, last block first, so that the head of a sequence is reused first."""
        holds, cached = self._holds, self._cached
        for block in reversed(blocks):
            count = holds[block] if block < len(holds) else self._unused(block)
            if count <= 0:
                raise InternalError(f"block {block} released more often than held")
            holds[block] = count - 1
            if count == 1:
                self.num_owned -= 1
                if cached[block] == 0:
                    self._free.push(block)
                else:
                    self.num_idle += 1
                    if self.on_idle is not None:
                        self.on_idle(block)

    def cache(self, blocks: Iterable[int]) -> None:
        """One more cache reference on each block. Raises InternalError for a free block."""
        holds, cached = self._holds, self._cached
        for block in blocks:
            count = cached[block] if block < len(cached) else self._unused(block)
            if count == 0:
                if holds[block] == 0:
                    raise InternalError(f"block {block} is free and cannot be cached")
                self.num_cached += 1
            cached[block] = count + 1

    def uncache(self, block: int) -> bool:
        """Give up one cache reference. True when it was the last one, whether or not the block is free now."""
        count = self._cached[block]
        if count <= 0:
            raise InternalError(f"block {block} uncached more often than cached")
        self._cached[block] = count - 1
        if count > 1:
            return False
        self.num_cached -= 1
        if self._holds[block] == 0:
            self.num_idle -= 1
            self._free.push(block)
        return True

    def check_invariants(self, holds: dict[int, int], cache_refs: dict[int, int]) -> None:
        """Compare every count with what the callers say they hold. Raises InternalError at the first difference."""
        free = set(self._free.linked_ids())
        untouched = self.num_blocks - self._free.linked
        idle = owned = cached = 0
        for block in range(len(self._holds)):
            expected = (holds.get(block, 0), cache_refs.get(block, 0))
            counted = (self._holds[block], self._cached[block])
            if counted != expected:
                raise InternalError(
                    f"block {block} counts (holds, cache refs) = {counted}, its holders add up to {expected}"
                )
            if (counted == (0, 0)) != (block in free or block == NULL_BLOCK):
                raise InternalError(f"block {block} with counts {counted} is {'' if block in free else 'not '}free")
            owned += counted[0] > 0
            cached += counted[1] > 0
            idle += counted[0] == 0 and counted[1] > 0
        if (idle, owned, cached) != (self.num_idle, self.num_owned, self.num_cached):
            raise InternalError(
                f"(idle, owned, cached) are {(idle, owned, cached)}, "
                f"the counters say {(self.num_idle, self.num_owned, self.num_cached)}"
            )
        if len(free) + untouched + idle + owned != self.num_usable:
            raise InternalError(f"free {len(free) + untouched} + idle {idle} + owned {owned} is not {self.num_usable}")
