"""KVCacheManager, the only door to the cache: it decides where tokens go and what is kept for reuse.

It owns the block pool, the radix tree and the books of live tables and matches. It refuses to know tensors, models and
requests: it speaks of token ids, block ids and copies to make. The scheduler and the paged transformers cache call it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hf_paged.cache import invariants
from hf_paged.cache.block import BlockCopy, FreeList, SwapIn, SwapOut, Transfer, num_blocks_for
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.cache.eviction import LRU, EvictionPolicy
from hf_paged.cache.radix_tree import Namespace, RadixTree
from hf_paged.cache.records import CacheStats, PrefixMatch, SwappedTable, as_token_array, check_namespace
from hf_paged.cache.specs import FULL_GROUP, FullAttentionSpec, LayerGroup
from hf_paged.errors import ConfigError, InternalError, InvalidRequestError, OutOfBlocksError

__all__ = [
    "BlockCopy",
    "BlockTable",
    "CacheStats",
    "Checkpoint",
    "KVCacheManager",
    "Namespace",
    "PrefixMatch",
    "SwappedTable",
]


class KVCacheManager:
    """Block tables for sequences over one pool of blocks, with reuse of stored prefixes at one token's granularity.

    Args:
        num_blocks: physical blocks including the null block 0, which is never handed out.
        block_size: tokens a block holds.
        prefix_caching: False stores nothing and finds nothing.
        max_cached_blocks: soft cap on blocks that only the tree keeps, applied after commit and free.
        policy: order of eviction.
        host_blocks: blocks of the host tier that whole sequences can be moved to.
        max_checkpoints: states of recurrent layers to keep, for models that have such: then a stored prefix is found
            only as far as one of them. None for models whose tokens are all in blocks.

    Copies. ``append`` returns copies when a sequence is about to write into a block that others read. Execute them in
    the order returned, before the writes of that step, and before the copies of a later call. Then no copy reads a
    block that was reused: sources are released only after every block of the call has been allocated, so no
    destination of a call is a source of the same call (they may even run in parallel), and a source that becomes free
    later can only be overwritten by a later copy or a later step's write.

    All methods are thread-safe; hold ``lock`` to make several of them one step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        prefix_caching: bool = True,
        max_cached_blocks: int | None = None,
        policy: EvictionPolicy | None = None,
        host_blocks: int = 0,
        max_checkpoints: int | None = None,
    ) -> None:
        if max_cached_blocks is not None and max_cached_blocks < 0:
            raise ConfigError(f"max_cached_blocks is {max_cached_blocks}: use None for no cap, 0 to keep nothing idle")
        self.lock = threading.RLock()
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.max_cached_blocks = max_cached_blocks
        self.groups = (LayerGroup(FULL_GROUP, FullAttentionSpec(block_size)),)
        self._pool = BlockPool(num_blocks)
        self.keeps_states = prefix_caching and max_checkpoints is not None
        self._tree = RadixTree(self._pool, block_size, policy if policy is not None else LRU(), max_checkpoints or 0)
        # Weak references, so that a forgotten table or match does not keep its blocks. Their callbacks run at any
        # point of any thread, hence only note the death; the next call collects the blocks (see _reap).
        self._tables: dict[weakref.ref[BlockTable], list[int]] = {}
        self._pins: dict[weakref.ref[PrefixMatch], tuple[int, ...]] = {}
        self._dead: deque[weakref.ref[BlockTable] | weakref.ref[PrefixMatch]] = deque()
        self._host = FreeList(host_blocks + 1)
        self._swapped: set[SwappedTable] = set()
        self._queries = self._lookup_tokens = self._hit_tokens = self._evicted = self._cow_copies = 0

    # -- prefixes ----------------------------------------------------------------------------------------------------

    def match_prefix(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        record: bool = True,
        touch: bool = True,
    ) -> PrefixMatch:
        """Find and pin the longest stored prefix of ``tokens``.

        Args:
            namespace: tuple of tagged tuples, e.g. ``(("weights", 3), ("salt", "s"))``; equal tokens under different
                namespaces never meet.
            max_tokens: cap on the length. Callers that run a model pass ``len(tokens) - 1``: the last token must be
                computed, or there are no logits.
            record: count the query in ``stats()``; pass False when only probing.
            touch: count what is found as used now, so that it stays longer.
        """
        check_namespace(namespace)
        if max_tokens is not None and max_tokens < 0:
            raise InvalidRequestError(f"max_tokens is {max_tokens}: a match cannot be shorter than 0 tokens")
        key = as_token_array(tokens if max_tokens is None else tokens[:max_tokens])
        with self.lock:
            self._reap()
            num_stored, blocks, node = self._tree.match(namespace, key, touch)
            num_tokens, checkpoint = num_stored, None
            if self.keeps_states:
                num_tokens, checkpoint = self._tree.last_checkpoint(node, num_stored, touch)
                del blocks[num_blocks_for(num_tokens, self.block_size) :]
            self._pool.incref(blocks)
            match = PrefixMatch(num_tokens, tuple(blocks), namespace, num_stored, checkpoint)
            self._pins[weakref.ref(match, self._dead.append)] = match.blocks
            if record:
                self._queries += 1
                self._lookup_tokens += len(key)
                self._hit_tokens += num_tokens
            return match

    def count_query(self, lookup_tokens: int, hit_tokens: int) -> None:
        """Count, in ``stats()``, a lookup that was made with ``record=False`` and turned out to be used."""
        with self.lock:
            self._queries += 1
            self._lookup_tokens += lookup_tokens
            self._hit_tokens += hit_tokens

    def longest_elsewhere(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Tokens of the longest prefix that is stored under any other namespace, where it cannot be used."""
        key = as_token_array(tokens)
        with self.lock:
            others = [name for name in self._tree.roots if name != namespace]
            return max((self._tree.match(name, key, touch=False)[0] for name in others), default=0)

    def release(self, match: PrefixMatch) -> None:
        """Unpin a match. Again, or after ``adopt``, it does nothing."""
        with self.lock:
            self._reap()
            blocks = self._pins.pop(weakref.ref(match), None)
            if blocks:
                self._pool.decref(blocks)
                self._trim()

    def adopt(self, match: PrefixMatch, num_tokens: int) -> BlockTable:
        """A table that shares the first ``num_tokens`` tokens of a match; the match is used up.

        Raises:
            InvalidRequestError: the match is shorter.
            InternalError: the match was adopted or released before.
        """
        if not 0 <= num_tokens <= match.num_tokens:
            raise InvalidRequestError(f"{num_tokens} tokens adopted of a match of {match.num_tokens}")
        with self.lock:
            self._reap()
            pinned = self._pins.pop(weakref.ref(match), None)
            if pinned is None:
                raise InternalError("a prefix match was adopted after it had been adopted or released")
            # The pins of the blocks in use become the holds of the table.
            used = num_blocks_for(num_tokens, self.block_size)
            self._pool.decref(pinned[used:])
            table = BlockTable(self.block_size, pinned[:used], num_tokens)
            if num_tokens:
                table.namespace = match.namespace
            return self._register(table)

    def commit(
        self, namespace: Namespace, tokens: Sequence[int], table: BlockTable, checkpoint: Checkpoint | None = None
    ) -> int:
        """Store the first ``len(tokens)`` tokens of a table for reuse; returns how many the tree did not have.

        ``tokens`` are what the table holds from position 0, all of them computed. The table stays as it is and may
        go on appending: beyond the stored tokens it writes in place while it is the only sequence using its last
        block. Takes time in proportion to ``len(tokens)``: store after a prefill chunk and at the end, not every step.
        ``checkpoint`` is the state of recurrent layers behind ``tokens``.

        Raises:
            InvalidRequestError: more tokens than the table has.
            InternalError: the table's content belongs to another namespace, or the table was freed.
        """
        check_namespace(namespace)
        if not self.prefix_caching:
            return 0
        with self.lock:
            self._reap()
            self._check_live(table)
            if len(tokens) > table.num_tokens:
                raise InvalidRequestError(f"{len(tokens)} tokens committed of a table of {table.num_tokens}")
            if table.namespace is not None and table.namespace != namespace:
                raise InternalError(f"a table with content of {table.namespace} was committed to {namespace}")
            key = as_token_array(tokens)
            added = self._tree.insert(namespace, key, table.blocks)
            if checkpoint is not None and len(key):
                self._tree.keep_checkpoint(namespace, key, checkpoint)
            if len(tokens):
                table.namespace = namespace
            self._trim()
            return added

    def drop(self, namespace: Namespace | Callable[[Namespace], bool]) -> int:
        """Forget one namespace, or all for which a predicate says True; returns the number of blocks freed.

        Blocks in use by tables and pinned matches stay until these let go.
        """
        if not callable(namespace):
            check_namespace(namespace)
        with self.lock:
            self._reap()
            return self._tree.drop(namespace if callable(namespace) else lambda name: name == namespace)

    def clear(self) -> int:
        """Forget every stored prefix; returns the number of blocks freed."""
        return self.drop(lambda _: True)

    # -- tables ------------------------------------------------------------------------------------------------------

    def new_table(self) -> BlockTable:
        """An empty table."""
        with self.lock:
            self._reap()
            return self._register(BlockTable(self.block_size))

    def append(self, table: BlockTable, n: int) -> list[BlockCopy]:
        """``append_many`` for one table."""
        with self.lock:
            if 0 <= n <= table.write_limit - table.num_tokens:
                table.num_tokens += n
                return []
            return self.append_many((table,), (n,))

    def append_many(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> list[BlockCopy]:
        """Make room for ``counts[i]`` more tokens in ``tables[i]``: for all of them, or an error and no change.

        Stored prefixes are evicted when blocks are short. The returned copies must be executed as the class describes.

        Raises:
            OutOfBlocksError: not even evicting every idle block would do.
            InternalError: a table is freed, foreign, or named twice.
        """
        if len(tables) != len(counts):
            raise InvalidRequestError(f"{len(tables)} tables and {len(counts)} counts given to one append")
        with self.lock:
            if len(tables) > 1 and len(set(tables)) != len(tables):
                raise InternalError("one block table is named twice in one append")
            # Most decode steps need neither a block nor a look at sharing: two comparisons a table.
            slow = [
                (table, n)
                for table, n in zip(tables, counts, strict=True)
                if n < 0 or table.num_tokens + n > table.write_limit
            ]
            copies = self._make_room(slow) if slow else []
            for table, n in zip(tables, counts, strict=True):
                table.num_tokens += n
            return copies

    def blocks_needed(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> int:
        """Blocks that ``append_many`` with these arguments would allocate, copies included."""
        with self.lock:
            self._reap()
            return sum(new + cow for _, new, cow in self._plan(zip(tables, counts, strict=True)))

    def can_append(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> bool:
        """Whether ``append_many`` with these arguments would succeed now."""
        with self.lock:
            return self.blocks_needed(tables, counts) <= self._pool.num_available

    @property
    def num_available_blocks(self) -> int:
        """Blocks an append could get now: free and evictable ones."""
        with self.lock:
            self._reap()
            return self._pool.num_available

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks of stored prefixes that gave way to others since the manager was made."""
        return self._evicted

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same content. Whichever writes first into a shared last block copies it."""
        with self.lock:
            self._reap()
            self._check_live(table)
            self._pool.incref(table.blocks)
            return self._register(table.fork())

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` tokens (rejected speculative tokens, a crop)."""
        with self.lock:
            self._reap()
            self._check_live(table)
            if not 0 <= num_tokens <= table.num_tokens:
                raise InvalidRequestError(f"a table of {table.num_tokens} tokens cannot be cut to {num_tokens}")
            self._pool.decref(table.truncate(num_tokens))
            self._trim()

    def free(self, table: BlockTable) -> None:
        """Give a table's blocks back. Freeing it again does nothing."""
        with self.lock:
            self._reap()
            if table.freed:
                return
            self._check_live(table)
            self._pool.decref(self._tables.pop(weakref.ref(table)))
            table.retire()
            self._trim()

    # -- the host tier -----------------------------------------------------------------------------------------------

    def can_swap_out(self, num_tokens: int) -> bool:
        """Whether the host tier has room for a sequence of this length."""
        with self.lock:
            return num_blocks_for(num_tokens, self.block_size) <= self._host.size

    def swap_out(self, table: BlockTable, num_tokens: int) -> tuple[SwappedTable, list[Transfer]]:
        """Move the first ``num_tokens`` tokens of a table to the host tier and free the table.

        The transfers must be executed in order with all copies that were and will be returned: the blocks they read
        may be handed out again at once, to be written after them.

        Raises:
            OutOfBlocksError: the host tier is too full; nothing has changed.
        """
        with self.lock:
            self._check_live(table)
            if not 0 <= num_tokens <= table.num_tokens:
                raise InvalidRequestError(f"{num_tokens} tokens swapped out of a table of {table.num_tokens}")
            needed = num_blocks_for(num_tokens, self.block_size)
            if needed > self._host.size:
                raise OutOfBlocksError(
                    f"{num_tokens} tokens need {needed} blocks of the host tier, of which {self._host.size} are free: "
                    "give it more with host_memory",
                    needed=needed,
                    available=self._host.size,
                )
            swapped = SwappedTable(self._host.pop(needed), num_tokens)
            self._swapped.add(swapped)
            out: list[Transfer] = [SwapOut(a, b) for a, b in zip(table.blocks[:needed], swapped.blocks, strict=True)]
            self.free(table)
            return swapped, out

    def swap_in(self, swapped: SwappedTable, table: BlockTable) -> list[Transfer]:
        """Fill ``table``, which holds a block-aligned prefix of the same tokens, up from the host tier.

        ``swapped`` is used up. Raises OutOfBlocksError, with nothing changed, when the table cannot grow.
        """
        with self.lock:
            start = table.num_tokens
            if start % self.block_size or start > swapped.num_tokens or swapped not in self._swapped:
                raise InternalError(f"{swapped} cannot be swapped in behind {start} tokens")
            copies: list[Transfer] = [*self.append(table, swapped.num_tokens - start)]
            first = start // self.block_size
            back = [SwapIn(a, b) for a, b in zip(swapped.blocks[first:], table.blocks[first:], strict=True)]
            self.discard(swapped)
            return [*copies, *back]

    def discard(self, swapped: SwappedTable) -> None:
        """Give up what the host tier holds of a sequence. Again, or after ``swap_in``, it does nothing."""
        with self.lock:
            if swapped in self._swapped:
                self._swapped.remove(swapped)
                for block in swapped.blocks:
                    self._host.push(block)

    # -- reading tables ----------------------------------------------------------------------------------------------

    def block_ids(self, group: str, table: BlockTable) -> list[int]:
        """Physical blocks of a sequence in one layer group, logical index 0 first. Not a copy: do not change it."""
        self._check_group(group)
        return table.blocks

    def slots(self, group: str, table: BlockTable, start: int, end: int) -> list[int]:
        """Flat slots of the positions ``start..end-1`` in one layer group's pool."""
        self._check_group(group)
        return table.slots(start, end)

    # -- observation -------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        with self.lock:
            self._reap()
            pool = self._pool
            return CacheStats(
                num_blocks=pool.num_blocks,
                block_size=self.block_size,
                free_blocks=pool.num_free,
                cached_blocks=pool.num_cached,
                evictable_blocks=pool.num_idle,
                owned_blocks=pool.num_owned,
                num_nodes=self._tree.num_nodes,
                num_namespaces=len(self._tree.roots),
                num_tables=len(self._tables),
                min_reusable_prefix=1 if self.prefix_caching else 0,
                queries=self._queries,
                lookup_tokens=self._lookup_tokens,
                hit_tokens=self._hit_tokens,
                evicted_blocks=self._evicted,
                cow_copies=self._cow_copies,
                num_checkpoints=len(self._tree.checkpoints),
                host_blocks=self._host.num_blocks - 1,
                free_host_blocks=self._host.size,
            )

    def check_invariants(self) -> None:
        """Recount everything. Raises InternalError naming the first thing that does not add up. O(pool + tree)."""
        with self.lock:
            self._reap()
            # A table that died since _reap holds its blocks until the next call, so count the books, not the living.
            tables, pins = list(self._tables.items()), list(self._pins.items())
            invariants.check(self._pool, self._tree, [blocks for _, blocks in [*tables, *pins]])
            for ref, blocks in tables:
                if (table := ref()) is not None:
                    invariants.check_table(table, blocks, self._tree)
            live: list[invariants.Holder] = [table for ref, _ in tables if (table := ref()) is not None]
            live += [match for pin, _ in pins if (match := pin()) is not None]
            invariants.check_write_rights(live, self.block_size)
            invariants.check_host(self._host, [swapped.blocks for swapped in self._swapped])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make_room(self, wishes: list[tuple[BlockTable, int]]) -> list[BlockCopy]:
        """Give each table the blocks for ``n`` more tokens and the right to write them; raises with no change."""
        self._reap()
        plan = self._plan(wishes)
        pool = self._pool
        needed = sum(new + cow for _, new, cow in plan)
        if needed > pool.num_available:
            raise OutOfBlocksError(
                f"the KV pool needs {needed} more blocks of {self.block_size} tokens, but of its {pool.num_usable} "
                f"blocks {pool.num_free} are free and {pool.num_idle} evictable. "
                f"Give the pool more memory or num_blocks, or ask for fewer or shorter rows.",
                needed=needed,
                available=pool.num_available,
            )
        self._evict(needed - pool.num_free)
        fresh = pool.allocate(needed)
        copies: list[BlockCopy] = []
        taken = 0
        for table, new, cow in plan:
            if cow:
                copies.append(BlockCopy(table.blocks[-1], fresh[taken]))
                table.blocks[-1] = fresh[taken]
                taken += 1
            table.blocks.extend(fresh[taken : taken + new])
            taken += new
            table.write_limit = table.capacity
        # Only now: a source given back any earlier could have been allocated above.
        pool.decref([copy.src for copy in copies])
        self._cow_copies += len(copies)
        return copies

    def _plan(self, wishes: Iterable[tuple[BlockTable, int]]) -> list[tuple[BlockTable, int, bool]]:
        """(table, new blocks, whether the last block must be copied first) for each wish; changes nothing.

        A table may write into its last block in place when it is the block's only holder and the tree relies on none
        of the offsets to be written. Whoever else reads the block later got it from the tree, hence reads only
        offsets below, so the right lasts until the table is forked or truncated. Of several holders in one call, those
        planned first move away, and the last may stay.
        """
        pool, size = self._pool, self.block_size
        plan: list[tuple[BlockTable, int, bool]] = []
        leaving: dict[int, int] = {}
        for table, n in wishes:
            if n < 0:
                raise InvalidRequestError(f"{n} tokens appended: use truncate to shorten a table")
            self._check_live(table)
            have = table.num_tokens
            new = max(0, num_blocks_for(have + n, size) - len(table.blocks))
            cow = False
            if n and have % size and table.write_limit == have:
                last = table.blocks[-1]
                holders = pool.holds(last) - leaving.get(last, 0)
                cow = holders > 1 or self._tree.claimed(last) > have % size
                if cow:
                    leaving[last] = leaving.get(last, 0) + 1
            plan.append((table, new, cow))
        return plan

    def _evict(self, num_blocks: int) -> None:
        if num_blocks > 0:
            freed = self._tree.evict(num_blocks)
            self._evicted += freed
            if freed < num_blocks:
                raise InternalError(f"{num_blocks} blocks were evictable, but only {freed} could be evicted")

    def _trim(self) -> None:
        if self.max_cached_blocks is not None:
            self._evict(self._pool.num_idle - self.max_cached_blocks)

    def _register(self, table: BlockTable) -> BlockTable:
        self._tables[weakref.ref(table, self._dead.append)] = table.blocks
        return table

    def _reap(self) -> None:
        """Take back the blocks of tables and matches that were garbage-collected without being freed."""
        while self._dead:
            ref = self._dead.popleft()
            blocks = self._tables.pop(ref, None) or self._pins.pop(ref, None)  # type: ignore[arg-type]
            if blocks:
                self._pool.decref(blocks)

    def _check_live(self, table: BlockTable) -> None:
        if table.freed:
            raise InternalError("a block table was used after it had been freed")
        if weakref.ref(table) not in self._tables:
            raise InternalError(f"{table!r} does not belong to this manager")

    def _check_group(self, group: str) -> None:
        if group != FULL_GROUP:
            raise InternalError(f"there is no layer group {group!r}, only {FULL_GROUP!r}")
