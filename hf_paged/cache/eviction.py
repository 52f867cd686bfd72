"""Which cached prefix goes first: the policy, and the queue that finds its choice without walking the tree.

The queue owns the order of the tree's leaves. It refuses to know tokens and never removes anything itself; RadixTree
tells it which nodes became leaves, asks for victims and does the removing.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from hf_paged.cache.block_pool import BlockPool
from hf_paged.errors import InternalError

if TYPE_CHECKING:
    from hf_paged.cache.radix_tree import RadixNode

#: RadixNode.queued: where the queue has the node
NOWHERE, IN_HEAP, PARKED = 0, 1, 2


class EvictionPolicy(Protocol):
    """Order of eviction. Leaves with the smallest priority go first.

    A node's priority may rise while the node is queued, never fall: the queue looks again only when the node's turn
    has come.
    """

    def priority(self, node: RadixNode) -> tuple[float, ...]: ...


class LRU:
    """Least recently matched or inserted first."""

    def priority(self, node: RadixNode) -> tuple[float, ...]:
        return (node.last_access,)


class LFU:
    """Least often matched first; among equals, least recently."""

    def priority(self, node: RadixNode) -> tuple[float, ...]:
        return (node.hit_count, node.last_access)


class LeafQueue:
    """Leaves of the tree in eviction order.

    A heap with lazy entries: matching a node costs the queue nothing, an outdated entry is corrected when it surfaces.
    A leaf whose last block someone holds would free nothing. It is *parked* under that block and comes back when the
    pool reports the block idle, so a leaf of a running sequence is looked at once, not once per eviction.
    """

    def __init__(self, pool: BlockPool, policy: EvictionPolicy) -> None:
        self._pool = pool
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], int, RadixNode]] = []
        self._parked: dict[int, list[RadixNode]] = {}
        self._serial = 0
        pool.on_idle = self._wake

    def push(self, node: RadixNode) -> None:
        """Queue a leaf, or look again at a parked one whose last block changed."""
        if node.queued == IN_HEAP:
            return
        self.unpark(node)
        node.queued = IN_HEAP
        self._serial += 1
        heappush(self._heap, (self._policy.priority(node), self._serial, node))

    def pop(self) -> RadixNode | None:
        """Take out the first leaf that would give blocks back; None when all others are parked."""
        heap = self._heap
        while heap:
            queued_as, _, node = heappop(heap)
            node.queued = NOWHERE
            if node.removed or node.children:
                continue
            if self._policy.priority(node) > queued_as:
                self.push(node)
            elif self._pool.is_idle(node.blocks[-1]):
                return node
            else:
                node.queued = PARKED
                self._parked.setdefault(node.blocks[-1], []).append(node)
        return None

    def pop_parked(self) -> RadixNode | None:
        """Take out the first parked leaf that is not locked, for the sake of what lies behind it. O(parked)."""
        candidates = [node for nodes in self._parked.values() for node in nodes if node.lock_ref == 0]
        if not candidates:
            return None
        node = min(candidates, key=self._policy.priority)
        self.unpark(node)
        return node

    def unpark(self, node: RadixNode) -> None:
        """Forget a parked leaf. To be called before its last block changes or it gets a child."""
        if node.queued == PARKED:
            node.queued = NOWHERE
            nodes = self._parked[node.blocks[-1]]
            nodes.remove(node)
            if not nodes:
                del self._parked[node.blocks[-1]]

    def forget_removed(self) -> None:
        """Throw away the entries of nodes that have left the tree. O(entries); needed after a bulk removal."""
        self._heap = [entry for entry in self._heap if not entry[2].removed]
        heapify(self._heap)

    def _wake(self, block: int) -> None:
        for node in self._parked.pop(block, ()):
            node.queued = NOWHERE
            self.push(node)

    def check_invariants(self, nodes: Iterator[RadixNode]) -> None:
        """Every leaf is queued exactly once, and parked only under its busy last block. Raises InternalError."""
        heap_ids = [id(entry[2]) for entry in self._heap]
        in_heap = set(heap_ids)
        if len(in_heap) != len(heap_ids):
            raise InternalError("a node is in the eviction heap twice")
        parked = {id(node): block for block, held in self._parked.items() for node in held}
        num_parked = 0
        for node in nodes:
            if (node.queued == IN_HEAP) != (id(node) in in_heap) or (node.queued == PARKED) != (id(node) in parked):
                raise InternalError(f"{node!r} is marked {node.queued} but the eviction queue has it elsewhere")
            if not node.children and node.queued == NOWHERE:
                raise InternalError(f"leaf {node!r} is not in the eviction queue")
            if node.queued == PARKED:
                num_parked += 1
                block = parked[id(node)]
                if node.children or block != node.blocks[-1] or self._pool.is_idle(block):
                    raise InternalError(f"{node!r} is parked under block {block} for no reason")
        if num_parked != len(parked):
            raise InternalError(f"{len(parked) - num_parked} nodes outside the tree are parked for eviction")
