"""What must be true of the cache between two calls, recounted from scratch.

Owns no state. Called by KVCacheManager.check_invariants, which the tests run after every step and an engine when it is
idle (why: https://github.com/huggingface/text-generation-inference/issues/2871, corruption found long after its cause).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from hf_paged.cache.block import FreeList, num_blocks_for
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.radix_tree import RadixNode, RadixTree
from hf_paged.errors import InternalError


def check(pool: BlockPool, tree: RadixTree, held: Iterable[Sequence[int]]) -> None:
    """Check the tree's shape, then every block's counts against its holders.

    ``held``: the block lists of all tables and pinned matches. Raises InternalError at the first contradiction.
    """
    holds: Counter[int] = Counter()
    for blocks in held:
        if len(set(blocks)) != len(blocks):
            raise InternalError(f"one holder has a block twice: {list(blocks)}")
        holds.update(blocks)
    cache_refs: Counter[int] = Counter()
    last_holder: dict[int, RadixNode] = {}
    num_nodes = 0
    for root in tree.roots.values():
        if not root.children:
            raise InternalError(f"namespace {root.namespace} is empty but not removed")
    for node in tree.nodes():
        num_nodes += 1
        _check_node(node, tree)
        cache_refs.update(node.blocks)
        if node.lock_ref:
            holds.update(node.blocks)
        for index, block in enumerate(node.blocks, node.start // tree.block_size):
            _check_claim(node, index, block, tree)
            # Parents come before children. Two nodes share a block only when it straddles from one into the other; a
            # node between them may hold another copy of the same tokens, stored first by another sequence.
            other = last_holder.get(block)
            if other is not None and not _straddles(block, index, other, node, tree):
                raise InternalError(f"block {block} is in two places: {other!r} and {node!r}")
            last_holder[block] = node
    if num_nodes != tree.num_nodes:
        raise InternalError(f"the tree has {num_nodes} nodes, its counter says {tree.num_nodes}")
    for node in tree.detached:
        if node.lock_ref <= 0 or not node.removed:
            raise InternalError(f"{node!r} is kept as detached but is not locked, or still in the tree")
        holds.update(node.blocks)
    pool.check_invariants(holds, cache_refs)
    for block in tree.claimed_blocks():
        if tree.claimed(block) and not cache_refs[block]:
            raise InternalError(f"the tree claims {tree.claimed(block)} tokens of block {block} without storing it")
    tree.queue.check_invariants(tree.nodes())
    tree.checkpoints.check_invariants(tree.nodes())


def check_table(table: BlockTable, blocks: Sequence[int], tree: RadixTree) -> None:
    """Check one live table against the manager's books and against its right to write in place."""
    if table.freed or table.blocks is not blocks:
        raise InternalError(f"{table!r} is on the books with other blocks than its own")
    if len(blocks) != num_blocks_for(table.num_tokens, table.block_size):
        raise InternalError(f"{table!r} has {len(blocks)} blocks for {table.num_tokens} tokens")
    if table.write_limit not in (table.num_tokens, table.capacity):
        raise InternalError(f"{table!r} may write up to {table.write_limit}, neither its end nor its last block's")
    offset = table.num_tokens % table.block_size
    if offset and table.write_limit > table.num_tokens and tree.claimed(blocks[-1]) > offset:
        raise InternalError(
            f"{table!r} may write block {blocks[-1]} from offset {offset}, of which the tree relies on "
            f"{tree.claimed(blocks[-1])} tokens"
        )


class Holder(Protocol):
    """A table or a pinned match: reads the first ``num_tokens`` tokens of ``blocks``."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


def check_write_rights(holders: Sequence[Holder], block_size: int) -> None:
    """No table may write in place where another holder reads."""
    writers: dict[int, BlockTable] = {}
    for holder in holders:
        if isinstance(holder, BlockTable) and holder.write_limit > holder.num_tokens:
            if holder.blocks[-1] in writers:
                raise InternalError(f"two tables may write block {holder.blocks[-1]}")
            writers[holder.blocks[-1]] = holder
    for holder in holders:
        for index, block in enumerate(holder.blocks):
            writer = writers.get(block, holder)
            read = min(holder.num_tokens - index * block_size, block_size)
            if writer is not holder and read > writer.num_tokens - (len(writer.blocks) - 1) * block_size:
                raise InternalError(f"{writer!r} may write block {block} where {holder!r} reads {read} tokens")


def _check_node(node: RadixNode, tree: RadixTree) -> None:
    parent = node.parent
    if parent is None or node.removed or parent.removed or parent.children.get(node.tokens[0]) is not node:
        raise InternalError(f"{node!r} is resident, but its parent {parent!r} is not, or does not know it")
    if node.start != parent.end:
        raise InternalError(f"{node!r} does not start where its parent {parent!r} ends")
    expected = num_blocks_for(node.end, tree.block_size) - node.start // tree.block_size
    if len(node.tokens) == 0 or len(node.blocks) != expected:
        raise InternalError(f"{node!r} needs {expected} blocks for {len(node.tokens)} tokens from {node.start}")
    below = sum(child.lock_ref for child in node.children.values())
    if node.lock_ref < below:
        raise InternalError(f"{node!r} has fewer locks than its children together, {below}")


def _straddles(block: int, index: int, above: RadixNode, node: RadixNode, tree: RadixTree) -> bool:
    """Whether ``block``, of logical index ``index`` in ``node``, may also be the last block of ``above``."""
    first = index * tree.block_size
    if above.blocks[-1] != block or not first < above.end < first + tree.block_size:
        return False
    ancestor = node.parent
    while ancestor is not None and ancestor is not above and ancestor.start > first:
        ancestor = ancestor.parent
    return ancestor is above


def _check_claim(node: RadixNode, index: int, block: int, tree: RadixTree) -> None:
    covered = min(node.end - index * tree.block_size, tree.block_size)
    if tree.claimed(block) < covered:
        raise InternalError(f"{node!r} relies on {covered} tokens of block {block}, claimed {tree.claimed(block)}")


def check_host(free: FreeList, held: Iterable[Sequence[int]]) -> None:
    """Check that every block of the host tier is free or held by exactly one sequence."""
    blocks = [block for one in held for block in one]
    if len(set(blocks)) != len(blocks) or any(block in free for block in blocks):
        raise InternalError("a block of the host tier is held twice, or free while it is held")
    if len(blocks) + len(free.to_list()) != free.num_blocks - 1:
        raise InternalError(f"of {free.num_blocks - 1} host blocks {len(blocks)} are held and {free.size} free")
