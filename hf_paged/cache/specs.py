"""What each kind of layer must keep of a sequence, as facts a block manager can compute with.

Layers with the same needs form a group, and each group has its own block ids and its own pool of tensors. This module
owns the arithmetic of those needs; it refuses to know models, tensors and blocks. KVCacheManager reads it today for
its one group, ``"full"``; groups that free early build on the same three questions.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.errors import ConfigError

FULL_GROUP = "full"


@dataclass(frozen=True)
class CacheSpec:
    """Base of the specs. ``block_size`` is in tokens."""

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}: at least 1 token is needed")

    def first_needed(self, num_tokens: int) -> int:
        """Lowest position the query at position ``num_tokens`` still reads; whole blocks before it may be freed."""
        raise NotImplementedError

    def resident_for_hit(self, num_tokens: int) -> int:
        """How many of the last tokens of a prefix of ``num_tokens`` must be stored for the prefix to be reusable."""
        return num_tokens - self.first_needed(num_tokens)


@dataclass(frozen=True)
class FullAttentionSpec(CacheSpec):
    """Every query reads every earlier token."""

    def first_needed(self, num_tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class SlidingWindowSpec(CacheSpec):
    """The query at ``p`` reads the keys ``k`` with ``p - window < k <= p``. ``window`` is in tokens."""

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"sliding window is {self.window}: a query sees at least itself, so at least 1")

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1)


@dataclass(frozen=True)
class RecurrentStateSpec(CacheSpec):
    """A state of constant size replaces all earlier tokens; reuse needs a checkpoint at exactly that position.

    ``checkpoint_interval``: tokens between the positions at which a state is kept.
    """

    checkpoint_interval: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_interval < 1:
            raise ConfigError(f"checkpoint_interval is {self.checkpoint_interval}: at least 1 token is needed")

    def first_needed(self, num_tokens: int) -> int:
        return num_tokens


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share block ids. ``layers`` are layer indexes of the model; None stands for all of them."""

    name: str
    spec: CacheSpec
    layers: tuple[int, ...] | None = None
