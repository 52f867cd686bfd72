"""States of recurrent layers kept at points of the prefix tree, so that a later request can go on from there.

Blocks hold what attention needs of every token, so a stored prefix can be left anywhere. A recurrent layer has one
state, which is that of the last token it saw: a prefix can be gone on from only where somebody kept it. A checkpoint is
such a state, at the end of a node; the tree owns it, and the least recently used one goes when there are too many. What
a state is, nobody here knows: whoever runs the model puts it into the handle and takes it out again.

Where to keep them is the scheduler's business: at the end of every piece of a prompt, at the end of a request, and
where a prompt leaves what is stored, because a place where two have parted will be passed by a third (as Marconi does
it, arXiv 2411.19379).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hf_paged.errors import InternalError

if TYPE_CHECKING:
    from hf_paged.cache.radix_tree import RadixNode


class Checkpoint:
    """A handle to a state, which is there once the step that it was ordered with has run."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None


class CheckpointBook:
    """The nodes that have a checkpoint, least recently used first; at most ``capacity`` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._nodes: dict[RadixNode, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: RadixNode, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint at the end of ``node``, instead of one that is there."""
        node.state = checkpoint
        self.touch(node)
        while len(self._nodes) > self.capacity:
            self.remove(next(iter(self._nodes)))

    def touch(self, node: RadixNode) -> None:
        """Count the checkpoint of ``node`` as used now."""
        self._nodes.pop(node, None)
        self._nodes[node] = None

    def remove(self, node: RadixNode) -> None:
        """Give up the checkpoint of ``node``, if it has one."""
        node.state = None
        self._nodes.pop(node, None)

    def check_invariants(self, nodes: Iterable[RadixNode]) -> None:
        """Exactly the resident nodes with a state are booked, and not too many. Raises InternalError."""
        with_state = {node for node in nodes if node.state is not None}
        if with_state != set(self._nodes) or len(with_state) > self.capacity:
            raise InternalError(
                f"{len(with_state)} nodes have a checkpoint, {len(self._nodes)} are booked, {self.capacity} allowed"
            )
