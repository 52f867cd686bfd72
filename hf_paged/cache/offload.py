"""The host tier's tensors: room in main memory for the blocks of sequences that gave way to others.

It owns memory and copies blocks as it is told. Which host block holds what is KVCacheManager's business. Storage of a
layer is made when its first block arrives, and copied whole: the layout stays the backend's secret, as long as blocks
come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_paged.cache.block import SwapIn, SwapOut
from hf_paged.cache.pool import KVPool, LayerKV


class HostTier:
    """``num_blocks`` blocks in main memory (and one more, the null block) for the layers of ``pool``."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def swap_out(self, pairs: Iterable[SwapOut]) -> None:
        """Copy blocks from the pool to the host, in every layer."""
        src, dst = zip(*pairs, strict=True)
        for layer_idx, kv in self._pool.layers.items():
            for own, host in zip((kv.k, kv.v), self._storage(layer_idx, kv), strict=True):
                _copy(own, src, host, dst)

    def swap_in(self, pairs: Iterable[SwapIn]) -> None:
        """Copy blocks from the host to the pool, in every layer."""
        src, dst = zip(*pairs, strict=True)
        for layer_idx, kv in self._pool.layers.items():
            for own, host in zip((kv.k, kv.v), self._storage(layer_idx, kv), strict=True):
                _copy(host, src, own, dst)

    def _storage(self, layer_idx: int, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._layers.get(layer_idx)
        if found is None:
            pinned = kv.spec.device.type == "cuda"
            # as in the pool: tensors made in inference mode could not be written outside it
            with torch.inference_mode(False):
                made = [
                    torch.empty((self.num_blocks + 1, *t.shape[1:]), dtype=t.dtype, pin_memory=pinned, device="cpu")
                    for t in (kv.k, kv.v)
                ]
            found = self._layers[layer_idx] = (made[0], made[1])
        return found


@torch.no_grad()
def _copy(source: torch.Tensor, src: Sequence[int], target: torch.Tensor, dst: Sequence[int]) -> None:
    rows = source.index_select(0, torch.tensor(src, device=source.device))
    target.index_copy_(0, torch.tensor(dst, device=target.device), rows.to(target.device))
