"""What an attention call over paged KV needs to know, and nothing about who asks.

``AttentionMetadata`` is the same for every layer of one forward; ``AttentionParams`` belongs to one layer's call;
``LayerKV`` (from the cache layer) is its storage. Backends take the three and know no models, caches or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_paged.cache.pool import LayerKV, LayerSpec

__all__ = ["AttentionMetadata", "AttentionParams", "LayerKV", "LayerSpec"]


@dataclass(frozen=True)
class AttentionParams:
    """The mathematics of one layer's attention call.

    A query at position ``p`` sees key positions ``k <= p`` with, where set, ``k > p - sliding_window`` and
    ``k // chunk_size == p // chunk_size``. Scores are ``scaling * q.k``, then ``softcap * tanh(score / softcap)``,
    then ``+ alibi_slopes[h] * (k - p)``. ``sinks[h]`` is one more logit in the softmax whose value is zero.

    Shapes: ``sinks`` and ``alibi_slopes`` are ``[num_query_heads]`` (any float dtype), or None.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    chunk_size: int | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the queries of one forward sit and where their keys lie. All tensors live on the KV pool's device.

    Queries are packed: sequence ``i`` owns query rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]``. Its ``q_len`` queries
    are the last ``q_len`` of its ``seq_lens[i]`` tokens: query ``j`` has position ``seq_lens[i] - q_len + j``.
    A sequence with ``seq_lens[i] == 0`` is padding: its query rows produce zeros and read nothing.

    Shapes:
        cu_seqlens_q: int32 ``[num_seqs + 1]``
        seq_lens: int32 ``[num_seqs]``, tokens in the cache including this forward's
        block_tables: int32 ``[num_seqs, max_blocks]``; entries past a sequence's length are arbitrary and not read
        slot_mapping: int64 ``[num_tokens]``; token ``t`` of this forward is stored at block ``slot // block_size``,
            offset ``slot % block_size``; -1 means "do not store" (padding)
        max_query_len, max_seq_len: Python ints, upper bounds of the above
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]
