"""The contract between the cache and whatever computes attention on its blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerKV, LayerSpec


class AttentionBackend(ABC):
    """Owns one KV layout and the kernels that read and write it.

    Backends are stateless and thread-safe: everything they need comes with the call. None of the methods builds an
    autograd graph.
    """

    #: the word users write in ``cache_config={"attention_backend": ...}``; must not contain "flash"
    name: ClassVar[str]
    #: higher wins among the backends that support a layer
    priority: ClassVar[int]

    @abstractmethod
    def unavailable(self) -> str | None:
        """None when the backend can run in this process, else why not and how to get it (for ``hf-paged doctor``)."""

    @abstractmethod
    def unsupported(self, spec: LayerSpec, block_size: int) -> str | None:
        """None when layers of this kind can be stored and attended, else the reason in one sentence."""

    def unsupported_call(self, spec: LayerSpec, params: AttentionParams) -> str | None:
        """None when a call with these params can be served, else the reason in one sentence."""
        return None

    @abstractmethod
    def allocate(self, spec: LayerSpec, num_blocks: int, block_size: int) -> LayerKV:
        """Reserve storage for ``num_blocks`` blocks. Never called in inference mode; block 0 is a block like others."""

    @abstractmethod
    def write(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store ``key [T, Hkv, Dk]`` and ``value [T, Hkv, Dv]`` (any strides with a dense last dimension) at
        ``slot_mapping`` int64 ``[T]``; slot -1 is skipped."""

    @abstractmethod
    def gather(self, kv: LayerKV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read back ``slots`` int64 ``[N]`` as ``k [N, Hkv, Dk], v [N, Hkv, Dv]``, contiguous; slot -1 gives zeros.
        The values are bit for bit those written."""

    @abstractmethod
    def copy_blocks(self, layers: Sequence[LayerKV], src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole blocks ``src[i] -> dst[i]`` in every layer given, in order."""

    def touched_bytes(self, kv: LayerKV) -> int | None:
        """Memory that the blocks written so far take; None where it is not known (all of it, on most devices)."""
        return None

    @abstractmethod
    def attend(
        self, query: torch.Tensor, kv: LayerKV, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """Attention of ``query [T, Hq, Dk]`` (any strides with a dense last dimension; dtype of the KV) over blocks.

        Returns ``[T, Hq, Dv]`` contiguous, in the query's dtype. ``Hq`` is a multiple of the layer's KV heads.
        """
