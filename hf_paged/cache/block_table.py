"""Where one sequence's tokens lie: logical block index to physical block id.

A table owns its list of ids and its token count. It refuses to know reference counts and the tree: KVCacheManager
makes, grows, shares and frees tables, and is the only caller of the methods that change one. Readers (the model
runner, the scheduler) use ``num_tokens``, ``blocks`` and ``slots``.
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_paged.cache.block import num_blocks_for
from hf_paged.errors import InternalError


class BlockTable:
    """The blocks of one sequence; the token at position ``p`` is in ``blocks[p // block_size]``.

    Each table belongs to exactly one sequence and has one hold on each of its blocks. A table that is dropped without
    being freed gives its blocks back at the manager's next call.

    Attributes:
        block_size: tokens a block holds.
        num_tokens: tokens the table holds, or was asked to hold by the last append.
        blocks: physical ids, exactly as many as ``num_tokens`` needs. Read it; only the manager writes.
        namespace: namespace of the content, once known from an adoption or a commit.
    """

    __slots__ = ("__weakref__", "block_size", "blocks", "freed", "namespace", "num_tokens", "write_limit")

    def __init__(self, block_size: int, blocks: Iterable[int] = (), num_tokens: int = 0) -> None:
        self.block_size = block_size
        # The manager keeps a reference to this very list, so it is changed in place and never replaced.
        self.blocks = list(blocks)
        self.num_tokens = num_tokens
        self.namespace: tuple[object, ...] | None = None
        self.freed = False
        # Tokens up to which appending needs neither a block nor a check for sharing. Either num_tokens (not known) or
        # the end of the last block (this table alone may write there); -1 once freed, so that every append fails.
        self.write_limit = num_tokens

    def __repr__(self) -> str:
        state = "freed" if self.freed else f"{self.num_tokens} tokens in {len(self.blocks)} blocks"
        return f"BlockTable({state})"

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks the table has."""
        return len(self.blocks) * self.block_size

    def slot(self, position: int) -> int:
        """Flat slot ``block * block_size + offset`` of one token position."""
        if not 0 <= position < self.num_tokens:
            raise InternalError(f"position {position} is outside a table of {self.num_tokens} tokens")
        index, offset = divmod(position, self.block_size)
        return self.blocks[index] * self.block_size + offset

    def slots(self, start: int, end: int) -> list[int]:
        """Flat slots of the positions ``start..end-1``. Raises InternalError outside the table's tokens."""
        if not 0 <= start <= end <= self.num_tokens:
            raise InternalError(f"slots {start}:{end} are outside a table of {self.num_tokens} tokens")
        size = self.block_size
        if end - start == 1:
            return [self.blocks[start // size] * size + start % size]
        out: list[int] = []
        for index in range(start // size, num_blocks_for(end, size)):
            first = index * size
            base = self.blocks[index] * size - first
            out.extend(range(base + max(first, start), base + min(first + size, end)))
        return out

    def append(self, n: int, new_blocks: Iterable[int] = ()) -> None:
        """Grow by ``n`` tokens into the room there is and ``new_blocks``, all of it writable by this table alone."""
        self.blocks.extend(new_blocks)
        self.num_tokens += n
        self.write_limit = self.capacity
        if num_blocks_for(self.num_tokens, self.block_size) != len(self.blocks):
            raise InternalError(f"{self.num_tokens} tokens of {self.block_size} a block in {len(self.blocks)} blocks")

    def fork(self) -> BlockTable:
        """A table over the same blocks. From now on neither knows whether it may write into the last one."""
        twin = BlockTable(self.block_size, self.blocks, self.num_tokens)
        twin.namespace = self.namespace
        self.write_limit = self.num_tokens
        return twin

    def truncate(self, num_tokens: int) -> list[int]:
        """Keep the first ``num_tokens`` tokens; returns the blocks no longer needed, which the caller releases."""
        keep = num_blocks_for(num_tokens, self.block_size)
        surplus = self.blocks[keep:]
        del self.blocks[keep:]
        self.num_tokens = num_tokens
        self.write_limit = num_tokens
        return surplus

    def retire(self) -> None:
        """Mark as freed; the caller has taken over the blocks."""
        self.blocks.clear()
        self.num_tokens = 0
        self.write_limit = -1
        self.freed = True
