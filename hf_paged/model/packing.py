"""Parts of requests as the tensors of one forward.

It owns the shape of a request's part in a step, and numpy's arithmetic over many of them. It knows no models.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.model.engine_cache import Step

Ints = npt.NDArray[Any]


class Work(Protocol):
    """One request's part of a step: token ids at positions ``start : start + count``, and its blocks. ``key`` is the
    same for all parts of a request; ``forks`` are the keys of requests that will go on from where it ends. The logits
    of its last ``num_logits`` positions are wanted. ``resumes`` holds the state it goes on from, where that is not its
    own; a copy of the state behind it goes to ``keeps``."""

    @property
    def key(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def forks(self) -> Sequence[str]: ...
    @property
    def resumes(self) -> Checkpoint | None: ...
    @property
    def keeps(self) -> Checkpoint | None: ...


@dataclass(frozen=True)
class Probe:
    """A sequence part without a request."""

    key: str
    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logits: int = 1
    forks: Sequence[str] = ()
    resumes: Checkpoint | None = None
    keeps: Checkpoint | None = None

    @property
    def count(self) -> int:
        return len(self.token_ids)


def pack(work: Sequence[Work], block_size: int) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """All parts in one row: the step, the positions (int64 ``[tokens]``), and the indices of the tokens whose logits
    are wanted (int64)."""
    counts = np.array([part.count for part in work], dtype=np.int32)
    starts = np.array([part.start for part in work], dtype=np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    tables = tables_of(work)
    row = np.repeat(np.arange(len(work)), counts)
    positions = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
    slots = tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    step = Step(
        AttentionMetadata(
            cu_seqlens_q=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            seq_lens=torch.from_numpy(starts + counts),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots),
            max_query_len=int(counts.max()),
            max_seq_len=int((starts + counts).max()),
        )
    )
    wanted = np.array([part.num_logits for part in work])
    first = np.repeat(ends - np.cumsum(wanted), wanted)  # the k-th of all wanted is at first + k
    return step, torch.from_numpy(positions.astype(np.int64)), torch.from_numpy(first + np.arange(len(first)))


def flat_ids(work: Sequence[Work]) -> torch.Tensor:
    """The token ids of all parts, one after the other, int64."""
    flat = array("q")
    for part in work:
        flat.extend(part.token_ids)
    return torch.from_numpy(np.frombuffer(flat, dtype=np.int64))


def tables_of(work: Sequence[Work]) -> Ints:
    """Block ids as int32 ``[parts, widest]``, zeros beyond each part's own."""
    widest = max(len(part.blocks) for part in work)
    tables = np.zeros((len(work), widest), dtype=np.int32)
    for row, part in enumerate(work):
        tables[row, : len(part.blocks)] = part.blocks
    return tables
