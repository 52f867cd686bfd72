"""What an attention call over paged KV needs to know, and nothing about who asks.

``AttentionMetadata`` is the same for every layer of one forward; ``AttentionParams`` belongs to one layer's call;
``LayerKV`` is that layer's storage. Backends take the three and know no models, caches or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores per token, and what it will be asked to do with it.

    ``head_dim`` is the width of a key (and query) head, ``v_head_dim`` that of a value head; they differ in MLA.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


@dataclass
class LayerKV:
    """Paged storage of one layer. The layout of ``k`` and ``v`` is known only to the backend that allocated them.

    Tensors are reserved once and stay at their address. On CPU, untouched pages cost no memory.
    """

    spec: LayerSpec
    num_blocks: int
    block_size: int
    k: torch.Tensor
    v: torch.Tensor
    backend: str
    #: free space for the backend: cached pointers, strides
    aux: dict[str, object] = field(default_factory=dict)


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
