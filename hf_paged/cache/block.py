"""Vocabulary of the cache: block ids, the null block, copies, and the list of free blocks.

This module owns the free list's links and nothing else. It refuses to know who holds a block or what is stored in
it; reference counts live in ``block_pool``. Called by every other module of ``hf_paged.cache``.
"""

from __future__ import annotations

from typing import NamedTuple

from hf_paged.errors import InternalError

#: Never handed out: padding rows of a forward may point at it and write garbage into it.
NULL_BLOCK = 0


class BlockCopy(NamedTuple):
    """Copy the whole physical block ``src`` over ``dst``, in every layer of the group, before the step writes."""

    src: int
    dst: int


class SwapOut(NamedTuple):
    """Copy the physical block ``src`` to block ``dst`` of the host tier."""

    src: int
    dst: int


class SwapIn(NamedTuple):
    """Copy block ``src`` of the host tier to the physical block ``dst``."""

    src: int
    dst: int


#: what has to happen to blocks before a step writes, always in the order given
Transfer = BlockCopy | SwapOut | SwapIn


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks needed to hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class FreeList:
    """Doubly linked list over block ids ``1..num_blocks-1``, links kept in two lists indexed by id.

    Taking from the front, returning to the front and taking one given id out of the middle are all O(1). Ids that were
    never handed out are not linked yet: they follow, in ascending order, when the linked ones run out. So a pool of
    millions of blocks costs nothing until they are used, a small workload only ever touches the low end of the pool's
    memory, and a returned block is the next one out, because its pages are already resident and likely in a CPU cache.
    """

    __slots__ = ("_next", "_prev", "linked", "num_blocks", "size")

    #: value of a link that belongs to a block outside the list
    _OUT = -1
    #: ids linked at a time
    _STRIDE = 256

    def __init__(self, num_blocks: int) -> None:
        # Id 0 is the null block, so its links are free to serve as the head: the list is circular through it.
        self.num_blocks = num_blocks
        self.size = num_blocks - 1
        #: ids below this one have links; the others are free and untouched
        self.linked = 1
        self._next = [0]
        self._prev = [0]

    def _link(self, n: int) -> None:
        """Link at least ``n`` more untouched ids, at the back."""
        first = self.linked
        end = min(first + max(n, self._STRIDE), self.num_blocks)
        if end == first:
            return
        nxt, prev = self._next, self._prev
        last = prev[0]
        nxt.extend(range(first + 1, end + 1))
        prev.extend(range(first - 1, end - 1))
        nxt[last], prev[first] = first, last
        nxt[end - 1], prev[0] = 0, end - 1
        self.linked = end

    def __contains__(self, block: int) -> bool:
        return 0 < block < self.num_blocks and (block >= self.linked or self._next[block] != self._OUT)

    def pop(self, n: int) -> list[int]:
        """Take the first ``n`` blocks. Raises InternalError when there are fewer."""
        if n > self.size:
            raise InternalError(f"{n} blocks taken from a free list of {self.size}")
        untouched = self.num_blocks - self.linked
        if n > self.size - untouched:
            self._link(n - (self.size - untouched))
        nxt, prev = self._next, self._prev
        taken: list[int] = []
        block = nxt[0]
        for _ in range(n):
            taken.append(block)
            following = nxt[block]
            nxt[block] = prev[block] = self._OUT
            block = following
        nxt[0] = block
        prev[block] = 0
        self.size -= n
        return taken

    def remove(self, block: int) -> None:
        """Take one given block. Raises InternalError when it is not in the list."""
        if block not in self:
            raise InternalError(f"block {block} is not free")
        if block >= self.linked:
            self._link(block - self.linked + 1)
        nxt, prev = self._next, self._prev
        before, after = prev[block], nxt[block]
        nxt[before] = after
        prev[after] = before
        nxt[block] = prev[block] = self._OUT
        self.size -= 1

    def push(self, block: int) -> None:
        """Return a block to the front. Raises InternalError on the null block, a foreign id and a double free."""
        if not 0 < block < self.linked or self._next[block] != self._OUT:
            raise InternalError(f"block {block} cannot become free: it is the null block, foreign, or free already")
        nxt, prev = self._next, self._prev
        first = nxt[0]
        nxt[block] = first
        prev[block] = 0
        prev[first] = block
        nxt[0] = block
        self.size += 1

    def to_list(self) -> list[int]:
        """The free ids, front first. Raises InternalError when the links are inconsistent. O(size)."""
        return [*self.linked_ids(), *range(self.linked, self.num_blocks)]

    def linked_ids(self) -> list[int]:
        """The free ids that have been handed out or linked before, front first; untouched ones follow them."""
        ids: list[int] = []
        size = self.size - (self.num_blocks - self.linked)
        previous, block = 0, self._next[0]
        while block != 0:
            if self._prev[block] != previous or len(ids) > size:
                raise InternalError(f"free list broken at block {block}: prev is {self._prev[block]}, not {previous}")
            ids.append(block)
            previous, block = block, self._next[block]
        if self._prev[0] != previous or len(ids) != size:
            raise InternalError(f"free list holds {len(ids)} linked blocks, its size says {size}")
        return ids
