"""The reference backend: paged attention written as plainly as torch allows.

It owns the row-major layout (``k [num_blocks, block_size, Hkv, Dk]``, ``v [num_blocks, block_size, Hkv, Dv]``) and is
the truth every other backend is tested against. It knows no device, dtype, block size or head size it would refuse,
and nothing of speed. The registry falls back to it when no faster backend supports a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from hf_paged.attention.backends.base import AttentionBackend
from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerKV, LayerSpec
from hf_paged.errors import InternalError

#: Query rows are taken in pieces so that one score matrix stays below this many elements.
_MAX_SCORE_ELEMENTS = 1 << 24


class TorchReferenceBackend(AttentionBackend):
    """Attention over blocks in float32 (float64 stays float64), one sequence after the other."""

    name: ClassVar[str] = "torch"
    priority: ClassVar[int] = 0

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, spec: LayerSpec, block_size: int) -> str | None:
        return None

    def allocate(self, spec: LayerSpec, num_blocks: int, block_size: int) -> LayerKV:
        def reserve(width: int) -> torch.Tensor:
            shape = (num_blocks, block_size, spec.num_kv_heads, width)
            return torch.empty(shape, dtype=spec.dtype, device=spec.device)

        k, v = reserve(spec.head_dim), reserve(spec.v_head_dim)
        return LayerKV(spec=spec, num_blocks=num_blocks, block_size=block_size, k=k, v=v, backend=self.name)

    @torch.no_grad()
    def write(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        stored = slot_mapping >= 0
        slots = slot_mapping[stored]
        kv.k.flatten(0, 1).index_copy_(0, slots, key[stored].to(kv.k.dtype))
        kv.v.flatten(0, 1).index_copy_(0, slots, value[stored].to(kv.v.dtype))

    @torch.no_grad()
    def gather(self, kv: LayerKV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        present = slots >= 0
        k = kv.k.new_zeros((slots.shape[0], *kv.k.shape[2:]))
        v = kv.v.new_zeros((slots.shape[0], *kv.v.shape[2:]))
        k[present] = kv.k.flatten(0, 1)[slots[present]]
        v[present] = kv.v.flatten(0, 1)[slots[present]]
        return k, v

    @torch.no_grad()
    def copy_blocks(self, layers: Sequence[LayerKV], src: Sequence[int], dst: Sequence[int]) -> None:
        for kv in layers:
            # One pair after the other: a later source may be an earlier destination.
            for a, b in zip(src, dst, strict=True):
                kv.k[b].copy_(kv.k[a])
                kv.v[b].copy_(kv.v[a])

    @torch.no_grad()
    def attend(
        self, query: torch.Tensor, kv: LayerKV, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        out = query.new_zeros((query.shape[0], query.shape[1], kv.spec.v_head_dim))
        starts = metadata.cu_seqlens_q.tolist()
        for i, seq_len in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[i], starts[i + 1]
            if seq_len == 0 or begin == end:
                continue
            num_blocks = -(-seq_len // kv.block_size)
            table = metadata.block_tables[i, :num_blocks].long()
            rows = max(1, _MAX_SCORE_ELEMENTS // (seq_len * query.shape[1]))
            for first in range(begin, end, rows):
                last = min(end, first + rows)
                positions = torch.arange(seq_len - (end - first), seq_len - (end - last), device=query.device)
                out[first:last] = _attend_rows(query[first:last], positions, kv, table, params)
        return out


def visible(positions: torch.Tensor, keys: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Which of ``keys [K]`` the queries at ``positions [Q]`` see, as bool ``[Q, K]``."""
    p, k = positions[:, None], keys[None, :]
    mask = (k >= 0) & (k <= p)
    if params.sliding_window is not None:
        mask &= k > p - params.sliding_window
    if params.chunk_size is not None:
        mask &= torch.div(k, params.chunk_size, rounding_mode="floor") == torch.div(
            p, params.chunk_size, rounding_mode="floor"
        )
    return mask


def _attend_rows(
    query: torch.Tensor, positions: torch.Tensor, kv: LayerKV, table: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """``query [Q, Hq, Dk]`` at ``positions [Q]`` of the one sequence whose blocks are ``table``."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_rows, num_heads = query.shape[0], query.shape[1]
    group = num_heads // kv.spec.num_kv_heads

    # Keys nobody here sees are not read: their blocks may have been given away already.
    all_keys = torch.arange(int(positions[-1]) + 1, device=query.device)
    mask = visible(positions, all_keys, params)
    seen = mask.any(0)
    keys, mask = all_keys[seen], mask[:, seen]
    slots = table[keys // kv.block_size] * kv.block_size + keys % kv.block_size
    k = kv.k.flatten(0, 1)[slots].to(compute).transpose(0, 1).repeat_interleave(group, 0)
    v = kv.v.flatten(0, 1)[slots].to(compute).transpose(0, 1).repeat_interleave(group, 0)

    scores = query.to(compute).transpose(0, 1) @ k.transpose(1, 2) * params.scaling  # [Hq, Q, K]
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if params.alibi_slopes is not None:
        distance = (keys[None, :] - positions[:, None]).to(compute)
        scores = scores + params.alibi_slopes.to(query.device, compute)[:, None, None] * distance
    scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.to(query.device, compute)[:, None, None].expand(num_heads, num_rows, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ v).transpose(0, 1).to(query.dtype)


@torch.no_grad()
def attend_dense(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, params: AttentionParams
) -> torch.Tensor:
    """``query [B, Hq, W, Dk]`` over dense ``k, v [B, Hkv, K, D]`` under a mask of the caller's.

    ``mask`` is bool or additive, ``[B | 1, 1 | Hq, W, K]``; None means causal, the first query on the first key, as in
    ``scaled_dot_product_attention(is_causal=True)``, or no mask for a single query. Windows and chunks are the mask's
    affair. Returns ``[B, W, Hq, Dv]``. With a softcap or sinks the scores are made in float32, all at once.
    """
    group = query.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if mask is not None and mask.shape[-1] < k.shape[2]:
        raise InternalError(f"a mask of {mask.shape[-1]} columns for {k.shape[2]} keys")
    if mask is not None:
        mask = mask[..., : k.shape[2]]
    if params.softcap is None and params.sinks is None:
        causal = mask is None and query.shape[2] > 1
        additive = mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, additive, is_causal=causal, scale=params.scaling
        )
        return out.transpose(1, 2).contiguous()
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(compute) @ keys.to(compute).transpose(2, 3) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(compute).min) if mask.dtype == torch.bool else scores + mask
    if params.sinks is not None:
        sinks = params.sinks.to(query.device, compute)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ values.to(compute)).transpose(1, 2).to(query.dtype).contiguous()
