"""A prefix tree over token ids whose nodes keep the blocks that hold their tokens.

The tree owns its nodes and one cache reference per node and block. It refuses to know sequences, tables and tensors.
KVCacheManager is its only caller. Token-granular matching, path locks and leaf eviction follow RadixAttention (SGLang,
arXiv 2312.07104); storing blocks instead of single slots, with heads copied at divergence, is ours.

A node that covers the positions ``[start, end)`` holds the blocks with the logical indexes ``start // block_size`` to
``(end - 1) // block_size``: all that contain one of its tokens, including the one that straddles its start. On the
way down, a child's first block therefore replaces the parent's block of the same logical index. With blocks of 4:

    position   0 1 2 3   4 5 6 7   8 9
    parent     a b c d   e f                 blocks 1 2
    child                    g h   i j       blocks 3 4      block 3 contains e f g h
    child                    k               blocks 2        this sequence wrote on in place: the same block, e f k

Splitting a node inside a block makes both halves refer to that block. Eviction takes blocks off the end of leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence

from hf_paged.cache.block import num_blocks_for
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.checkpoints import Checkpoint, CheckpointBook
from hf_paged.cache.eviction import NOWHERE, EvictionPolicy, LeafQueue
from hf_paged.errors import InternalError

Namespace = tuple[Hashable, ...]


class RadixNode:
    """A run of tokens without a branch in it.

    Attributes:
        tokens: the ids at positions ``start..end-1``.
        blocks: physical ids, see the module docstring.
        children: by first token, so siblings always differ in their first token.
        parent: None for a root.
        removed: has left the tree; whoever still has a handle finds an empty hull.
        namespace: of a root; None elsewhere.
        lock_ref: locks on this node or below; a locked node stays.
        last_access, hit_count: logical time of the last match or insert; number of matches.
        state: checkpoint of recurrent layers after the token at ``end - 1``, or None.
    """

    __slots__ = (
        "blocks",
        "children",
        "hit_count",
        "last_access",
        "lock_ref",
        "namespace",
        "parent",
        "queued",
        "removed",
        "start",
        "state",
        "tokens",
    )

    def __init__(self, tokens: array[int], start: int, blocks: list[int], parent: RadixNode | None) -> None:
        self.tokens = tokens
        self.start = start
        self.blocks = blocks
        self.parent = parent
        self.children: dict[int, RadixNode] = {}
        self.lock_ref = 0
        self.last_access = 0
        self.hit_count = 0
        self.state: Checkpoint | None = None
        self.queued = NOWHERE
        self.removed = False
        self.namespace: Namespace | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def __repr__(self) -> str:
        return f"RadixNode([{self.start}, {self.end}), blocks={self.blocks}, lock_ref={self.lock_ref})"


def common_prefix(a: array[int], b: array[int], offset: int) -> int:
    """Length of the common prefix of ``a`` and ``b[offset:]``: doubling steps, then bisection, on slice equality."""
    length = min(len(a), len(b) - offset)
    if a[:length] == b[offset : offset + length]:
        return length
    low, step = 0, 8
    while low + step < length and a[low : low + step] == b[offset + low : offset + low + step]:
        low += step
        step *= 2
    high = min(low + step, length)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low


class RadixTree:
    """Prefix trees, one root per namespace, over the blocks of one pool. Not thread-safe; the manager locks."""

    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy, max_checkpoints: int = 0) -> None:
        self.block_size = block_size
        self.checkpoints = CheckpointBook(max_checkpoints)
        self.num_nodes = 0
        self.roots: dict[Namespace, RadixNode] = {}
        #: nodes removed by drop() while locked; their locks still hold blocks
        self.detached: set[RadixNode] = set()
        self._pool = pool
        self.queue = LeafQueue(pool, policy)
        self._clock = 0
        # Leading tokens of each block that nodes rely on: never written again while the block is cached.
        self._claims: dict[int, int] = {}

    def claimed(self, block: int) -> int:
        """How many leading tokens of the block the tree relies on; may overstate after an eviction."""
        return self._claims.get(block, 0)

    def claimed_blocks(self) -> list[int]:
        """Blocks with a claim."""
        return list(self._claims)

    def match(
        self, namespace: Namespace, tokens: array[int], touch: bool = True
    ) -> tuple[int, list[int], RadixNode | None]:
        """Longest stored prefix of ``tokens``: its length, the blocks holding it, and the node it ends in.

        A match that ends inside a node leaves the node whole. With ``touch``, every node on the way counts as used now.
        """
        node = self.roots.get(namespace)
        if node is None:
            return 0, [], None
        self._clock += touch
        blocks: list[int] = []
        matched, total, size = 0, len(tokens), self.block_size
        while matched < total:
            child = node.children.get(tokens[matched])
            if child is None:
                break
            node = child
            if touch:
                node.last_access = self._clock
                node.hit_count += 1
            first = node.start // size
            del blocks[first:]
            shared = common_prefix(node.tokens, tokens, matched)
            matched += shared
            if shared < len(node.tokens):
                blocks += node.blocks[: num_blocks_for(matched, size) - first]
                break
            blocks += node.blocks
        return matched, blocks, node

    def last_checkpoint(
        self, node: RadixNode | None, matched: int, touch: bool = True
    ) -> tuple[int, Checkpoint | None]:
        """The longest part of a match, as ``match`` returned it, that ends in a checkpoint: its length, and that."""
        while node is not None and (node.end > matched or node.state is None):
            node = node.parent
        if node is None:
            return 0, None
        if touch:
            self.checkpoints.touch(node)
        return node.end, node.state

    def keep_checkpoint(self, namespace: Namespace, tokens: array[int], checkpoint: Checkpoint) -> None:
        """Keep a checkpoint behind ``tokens``, which must be stored."""
        matched, _, node = self.match(namespace, tokens, touch=False)
        if node is None or matched < len(tokens):
            raise InternalError(f"a checkpoint behind {len(tokens)} tokens, of which {matched} are stored")
        if node.end > matched:
            node = self._split(node, matched - node.start)
        self.checkpoints.put(node, checkpoint)

    def insert(self, namespace: Namespace, tokens: array[int], blocks: Sequence[int]) -> int:
        """Store ``tokens``, held by ``blocks`` (logical index 0 first); returns how many tokens were new.

        What the tree already has keeps its blocks, so equal prefixes are stored once. A leaf that the new tokens
        simply continue grows in place instead of getting a child, so a sequence that is stored after every step stays
        one node.
        """
        total, size = len(tokens), self.block_size
        if total == 0:
            return 0
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = RadixNode(array("q"), 0, [], None)
            node.namespace = namespace
        self._clock += 1
        matched = 0
        while matched < total:
            child = node.children.get(tokens[matched])
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens, matched)
            matched += shared
            if shared < len(child.tokens):
                if matched < total:
                    child = self._split(child, shared)
                child.last_access = self._clock
                node = child
                break
            child.last_access = self._clock
            node = child
        if matched == total:
            return 0
        added = blocks[matched // size : num_blocks_for(total, size)]
        self._pool.cache(added)
        claim_before = self._claims.get(added[-1], 0)
        for block in added:
            self._claims[block] = size
        if total % size:
            self._claims[added[-1]] = max(claim_before, total % size)
        if node.parent is not None and not node.children and node.lock_ref == 0 and node.state is None:
            self._extend(node, tokens[matched:], added)
        else:
            self.queue.unpark(node)
            leaf = RadixNode(tokens[matched:], matched, list(added), node)
            leaf.last_access = self._clock
            node.children[tokens[matched]] = leaf
            self.num_nodes += 1
            self.queue.push(leaf)
        return total - matched

    def lock(self, node: RadixNode) -> None:
        """Keep a node and its ancestors in the tree, and their blocks held, until ``unlock`` of the same node."""
        step: RadixNode | None = node
        while step is not None:
            step.lock_ref += 1
            if step.lock_ref == 1:
                self._pool.incref(step.blocks)
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one ``lock`` of this node, also when the node was split or dropped in the meantime."""
        step: RadixNode | None = node
        while step is not None:
            step.lock_ref -= 1
            if step.lock_ref == 0:
                self._pool.decref(step.blocks)
                self.detached.discard(step)
            step = step.parent

    def evict(self, num_blocks: int) -> int:
        """Free at least ``num_blocks`` idle blocks, or all there are; returns how many.

        Leaves that give blocks back go first, in the order of the policy, each from its end and only as far as
        needed. When only leaves of running sequences are left, those are forgotten too (their blocks stay with their
        tables), because what lies behind them may be idle: a prefix stored twice keeps the tree's blocks, which the
        second sequence does not use.
        """
        pool = self._pool
        before = pool.num_free
        target = before + min(num_blocks, pool.num_idle)
        while pool.num_free < target:
            leaf = self.queue.pop()
            forced = leaf is None
            if leaf is None:
                leaf = self.queue.pop_parked()
                if leaf is None:
                    break
            while leaf.blocks and pool.num_free < target and (forced or pool.is_idle(leaf.blocks[-1])):
                self._uncache(leaf.blocks.pop())
            if leaf.blocks:
                self._cut(leaf)
                self.queue.push(leaf)
            else:
                self._remove(leaf)
        return pool.num_free - before

    def drop(self, unwanted: Callable[[Namespace], bool]) -> int:
        """Forget every namespace for which ``unwanted`` says True; returns the number of blocks that became free."""
        before = self._pool.num_free
        for namespace in [name for name in self.roots if unwanted(name)]:
            root = self.roots.pop(namespace)
            for node in list(self._below(root)):
                self.queue.unpark(node)
                for block in node.blocks:
                    self._uncache(block)
                self.num_nodes -= 1
                self.checkpoints.remove(node)
                node.children = {}
                node.removed = True
                if node.lock_ref:
                    self.detached.add(node)
            root.children = {}
        self.queue.forget_removed()
        return self._pool.num_free - before

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots, parents before children."""
        for root in list(self.roots.values()):
            yield from self._below(root)

    def _below(self, root: RadixNode) -> Iterator[RadixNode]:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Cut ``length`` tokens off the front of a node into a new parent, which is returned.

        The node stays the lower half, so whoever locked it keeps a valid handle to the whole path.
        """
        size, cut = self.block_size, node.start + length
        first = node.start // size
        assert node.parent is not None
        upper = RadixNode(
            node.tokens[:length], node.start, node.blocks[: num_blocks_for(cut, size) - first], node.parent
        )
        upper.last_access, upper.hit_count, upper.lock_ref = node.last_access, node.hit_count, node.lock_ref
        upper.children[node.tokens[length]] = node
        node.parent.children[node.tokens[0]] = upper
        if cut % size:
            straddled = upper.blocks[-1:]
            self._pool.cache(straddled)
            if node.lock_ref:
                self._pool.incref(straddled)
        del node.blocks[: cut // size - first]
        node.tokens = node.tokens[length:]
        node.start, node.parent = cut, upper
        self.num_nodes += 1
        return upper

    def _extend(self, leaf: RadixNode, tokens: array[int], blocks: Sequence[int]) -> None:
        """Continue a leaf in place; ``blocks`` already have this leaf's cache reference."""
        self.queue.unpark(leaf)
        if leaf.end % self.block_size:
            # The first new block contains the leaf's last tokens too, so the old one (maybe the same) is not needed.
            self._uncache(leaf.blocks.pop())
        leaf.tokens.extend(tokens)
        leaf.blocks.extend(blocks)
        self.queue.push(leaf)

    def _cut(self, leaf: RadixNode) -> None:
        """Forget the tokens of a leaf for which there is no block any more."""
        end = (leaf.start // self.block_size + len(leaf.blocks)) * self.block_size
        del leaf.tokens[end - leaf.start :]
        self.checkpoints.remove(leaf)

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        leaf.removed = True
        self.checkpoints.remove(leaf)
        self.num_nodes -= 1
        if parent.children:
            return
        if parent.namespace is None:
            self.queue.push(parent)
        else:
            del self.roots[parent.namespace]

    def _uncache(self, block: int) -> None:
        if self._pool.uncache(block):
            self._claims.pop(block, None)
