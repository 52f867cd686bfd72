"""Random paged attention calls, for the backend tests: builds pools, tables and metadata, and fills them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_paged.attention.backends.base import AttentionBackend
from hf_paged.attention.metadata import AttentionMetadata, LayerKV, LayerSpec


@dataclass
class Case:
    """Token ``t`` of sequence ``i`` has ``keys[i][t]``, ``values[i][t]``; queries are packed as the metadata says."""

    spec: LayerSpec
    block_size: int
    num_blocks: int
    tables: list[list[int]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: torch.Tensor
    metadata: AttentionMetadata

    def slots(self, seq: int) -> torch.Tensor:
        table = torch.tensor(self.tables[seq], dtype=torch.int64)
        t = torch.arange(self.keys[seq].shape[0])
        return table[t // self.block_size] * self.block_size + t % self.block_size

    def pool(self, backend: AttentionBackend, poison: bool = True) -> LayerKV:
        """A pool with every sequence written, and NaN in each slot that belongs to nobody."""
        kv = backend.allocate(self.spec, self.num_blocks, self.block_size)
        if poison:
            kv.k.fill_(float("nan"))
            kv.v.fill_(float("nan"))
        for i in range(len(self.keys)):
            if len(self.keys[i]):
                backend.write(kv, self.keys[i], self.values[i], self.slots(i))
        return kv

    def run(self, backend: AttentionBackend, params: object) -> torch.Tensor:
        return backend.attend(self.query, self.pool(backend), self.metadata, params)  # type: ignore[arg-type]


def make_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    seed: int = 0,
    scale: float = 1.0,
) -> Case:
    """``lengths``: a pair (query length, sequence length) for each sequence; (n, 0) is padding."""
    g = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    spec = LayerSpec(num_kv_heads, head_dim, v_head_dim or head_dim, dtype, torch.device("cpu"))
    counts = [-(-n // block_size) for _, n in lengths]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks, generator=g).tolist()
    tables: list[list[int]] = [[shuffled.pop() for _ in range(count)] for count in counts]
    width = max(1, *counts) + 1
    # Entries past the end are garbage on purpose.
    block_tables = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    for i, table in enumerate(tables):
        block_tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    starts = [0]
    for q_len, _ in lengths:
        starts.append(starts[-1] + q_len)
    case = Case(
        spec=spec,
        block_size=block_size,
        num_blocks=num_blocks,
        tables=tables,
        keys=[rand(n, num_kv_heads, head_dim) for _, n in lengths],
        values=[rand(n, num_kv_heads, v_head_dim or head_dim) for _, n in lengths],
        query=rand(starts[-1], num_q_heads, head_dim),
        metadata=AttentionMetadata(
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([n for _, n in lengths], dtype=torch.int32),
            block_tables=block_tables,
            slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
            max_query_len=max(q for q, _ in lengths),
            max_seq_len=max(n for _, n in lengths),
        ),
    )
    slots = []
    for i, (q_len, seq_len) in enumerate(lengths):
        slots.append(case.slots(i)[seq_len - q_len :] if seq_len else torch.full((q_len,), -1))
    case.metadata.slot_mapping.copy_(torch.cat(slots))
    return case


#: prefill, decode, extend, padding and lengths around block boundaries in one batch
MIXED = [(1, 1), (5, 5), (1, 16), (1, 17), (1, 15), (3, 0), (20, 20), (1, 300), (7, 290), (70, 130), (1, 0), (2, 513)]
