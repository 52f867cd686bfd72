"""The rows of one batch: their block tables, their left padding, and the plan of the forward in progress.

Two coordinate systems meet here. Stock transformers counts *columns*: every row of a batch has the same width, padding
included. Blocks hold *tokens*: row ``r``'s token ``p`` is column ``p + pads[r]``, and padding is never stored.
``BatchState`` is the only place that converts. It knows no layers and no models; ``PagedLayer`` asks it for the plan of
a forward, and ``PagedCache`` tells it about crops, reorders and masks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_paged.attention import ops
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.ops import OpaqueLayer
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.manager import KVCacheManager, PrefixMatch
from hf_paged.errors import InternalError, InvalidRequestError, OutOfBlocksError, UnsupportedError
from hf_paged.generation.shared import SharedKV

Ints = npt.NDArray[Any]


class StepPlan:
    """One forward over columns ``start : start + width`` of every row. Every layer of that forward uses the same plan.

    ``slot_mapping`` is int64 ``[batch * width]``; ``native`` says that no mask was built because kernels need none.
    ``mask_known`` is True when the mask follows from positions and left padding, False when it does not, and None when
    the model never asked transformers for one.
    """

    __slots__ = (
        "_metadata",
        "_slots",
        "mask_known",
        "masks",
        "native",
        "pads_np",
        "slots_np",
        "start",
        "tables_np",
        "width",
    )

    def __init__(
        self, start: int, width: int, native: bool, mask_known: bool | None, pads: Ints, slots: Ints, tables: Ints
    ) -> None:
        self.start, self.width, self.native, self.mask_known = start, width, native, mask_known
        self.pads_np, self.slots_np, self.tables_np = pads, slots, tables
        #: in compiled forwards: (window, chunk) of a layer -> the mask it should get
        self.masks: dict[tuple[int | None, int | None], torch.Tensor] = {}
        self._slots: dict[torch.device, torch.Tensor] = {}
        self._metadata: dict[torch.device, AttentionMetadata] = {}

    def slot_mapping(self, device: torch.device) -> torch.Tensor:
        found = self._slots.get(device)
        if found is None:
            found = self._slots[device] = torch.from_numpy(self.slots_np).to(device)
        return found

    def metadata(self, device: torch.device) -> AttentionMetadata:
        found = self._metadata.get(device)
        if found is None:
            found = self._metadata[device] = self._build_metadata(device)
        return found

    def _build_metadata(self, device: torch.device) -> AttentionMetadata:
        width, end = self.width, self.start + self.width
        pads, batch = self.pads_np, len(self.pads_np)
        padding = np.clip(pads - self.start, 0, width)
        if not padding.any():
            cu_seqlens = np.arange(0, (batch + 1) * width, width, dtype=np.int32)
            seq_lens, tables = (end - pads).astype(np.int32), self.tables_np
        else:
            # A padded row is two sequences: its padding columns, which read nothing, and its tokens. So the dense
            # [batch, width] layout is packed already, and nothing has to be copied.
            lengths = np.stack([padding, width - padding], axis=1).reshape(-1)
            cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            seq_lens = np.stack([np.zeros_like(pads), np.maximum(end - pads, 0)], axis=1).reshape(-1).astype(np.int32)
            tables = np.repeat(self.tables_np, 2, axis=0)
        return AttentionMetadata(
            cu_seqlens_q=torch.from_numpy(cu_seqlens).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            block_tables=torch.from_numpy(tables).to(device),
            slot_mapping=self.slot_mapping(device),
            max_query_len=width,
            max_seq_len=end,
        )


class BatchState:
    """Block tables of a batch and the conversion between its columns and its tokens.

    When it is garbage collected, its tables die with it, and the manager collects their blocks at its next call. No
    finalizer of ours runs then: it could re-enter the manager in the middle of an operation.
    """

    def __init__(self, shared: SharedKV) -> None:
        self.shared = shared
        self.tables: list[BlockTable] = []
        self.pads_np = np.zeros(0, dtype=np.int64)
        self.pads_known = False
        #: columns covered by the tables
        self.length = 0
        #: set by the mask hook for the forward about to start: (start, width) that needs no mask
        self.native_for: tuple[int, int] | None = None
        #: and whether its mask is the one that positions and left padding imply; None until the hook is called
        self.mask_known: bool | None = None
        self.plan: StepPlan | None = None
        #: no kernel may be used, whatever the model allows
        self.force_gather = False
        #: some row begins with padding, which is not stored
        self.padded = False
        #: by layer index, for operators in compiled graphs, which name this state by its token
        self.opaque_layers: weakref.WeakValueDictionary[int, OpaqueLayer] = weakref.WeakValueDictionary()
        self.token = ops.token_for(self)
        #: while identical prompts are prefilled: index of the row whose blocks row i uses
        self.leaders: list[int] | None = None
        #: the same for rows that keep blocks of their own for now, and share them only if memory is short
        self.alike: list[int] | None = None
        self._block_ids = np.zeros((0, 0), dtype=np.int32)
        self._known_blocks: list[int] = []
        self._dirty = True

    # -- the forward in progress ---------------------------------------------------------------------------------

    def plan_for(self, start: int, width: int, batch: int) -> StepPlan:
        """The plan for columns ``start : start + width``; made by the first layer that asks, shared by the others."""
        plan = self.plan
        if plan is not None and plan.start == start and plan.width == width and len(self.tables) == batch:
            return plan
        plan = self.plan = self._make_plan(start, width, batch)
        return plan

    def _make_plan(self, start: int, width: int, batch: int) -> StepPlan:
        manager = self.manager
        native, self.native_for = self.native_for == (start, width), None
        mask_known, self.mask_known = self.mask_known, None
        if not self.tables:
            self._open(manager, batch)
        elif batch != len(self.tables):
            raise InvalidRequestError(
                f"this cache holds {len(self.tables)} rows, the forward has {batch}; use batch_repeat_interleave() or "
                "batch_select_indices() to change the number of rows, or a new cache"
            )
        if start != self.length:
            raise UnsupportedError(
                f"a layer is at column {start} while the cache is at {self.length}: the layers of one PagedCache must "
                "advance together. After a forward that was interrupted, call reset(). An encoder-decoder model takes "
                "EncoderDecoderCache(PagedCache(config), DynamicCache()); one that skips layers, no PagedCache."
            )
        end = start + width
        pads = self.pads_np
        counts = (np.maximum(end - pads, 0) - np.maximum(start - pads, 0)).tolist()
        leaders = self.leaders
        with manager.lock:
            copies = None
            if leaders is None:
                try:
                    copies = manager.append_many(self.tables, counts)
                except OutOfBlocksError:
                    leaders, self.alike = self.alike, None
                    if leaders is None:
                        raise
                    self.leaders = leaders
            if copies is None and leaders is not None:
                first = [i for i, leader in enumerate(leaders) if leader == i]
                copies = manager.append_many([self.tables[i] for i in first], [counts[i] for i in first])
                for i, leader in enumerate(leaders):
                    if leader != i:
                        manager.free(self.tables[i])
                        self.tables[i] = manager.fork(self.tables[leader])
                self._dirty = True
            if copies:
                self.shared.pool.copy_blocks([(c.src, c.dst) for c in copies])
                self._dirty = True
        self.length = end
        self._refresh_block_ids()
        slots = self.slots(start, end)
        if leaders is not None:
            slots[[i for i, leader in enumerate(leaders) if leader != i]] = -1  # the leader's write serves them too
        bs = self.shared.config.block_size
        used = max(-(-(end - int(pads.min())) // bs), 1)
        return StepPlan(start, width, native, mask_known, pads, slots.reshape(-1), self._block_ids[:, :used].copy())

    def slots(self, start: int, end: int) -> Ints:
        """Flat slots of columns ``start : end``, int64 ``[batch, end - start]``; -1 for padding."""
        if self._dirty:
            self._refresh_block_ids()
        bs = self.shared.config.block_size
        pads = self.pads_np
        if end - start == 1 and start >= self._max_pad:
            token = start - pads
            decode: Ints = (self._block_ids[self._rows, token // bs].astype(np.int64) * bs + token % bs)[:, None]
            return decode
        tokens = np.arange(start, end)[None, :] - pads[:, None]
        known = np.maximum(tokens, 0)
        slots: Ints = self._block_ids[self._rows[:, None], known // bs].astype(np.int64) * bs + known % bs
        slots[tokens < 0] = -1
        return slots

    def _refresh_block_ids(self) -> None:
        """Bring the dense int32 copy of the tables up to date; most steps add nothing, some add one block a row."""
        widest = max(len(t.blocks) for t in self.tables)
        if self._dirty or widest > self._block_ids.shape[1]:
            cap = max(widest + 8, self._block_ids.shape[1])
            self._block_ids = np.zeros((len(self.tables), cap), dtype=np.int32)
            self._known_blocks = [0] * len(self.tables)
            self._dirty = False
        ids, known = self._block_ids, self._known_blocks
        for row, table in enumerate(self.tables):
            blocks = table.blocks
            n = len(blocks)
            if n != known[row]:
                lo = known[row] if n > known[row] else 0
                ids[row, lo:n] = blocks[lo:n]
                known[row] = n

    # -- rows ----------------------------------------------------------------------------------------------------

    @property
    def manager(self) -> KVCacheManager:
        manager = self.shared.manager
        if manager is None:
            raise InternalError("the cache has no storage yet: no layer has joined")
        return manager

    def _open(self, manager: KVCacheManager, batch: int) -> None:
        self.tables[:] = [manager.new_table() for _ in range(batch)]
        if not self.pads_known:
            self.set_pads(np.zeros(batch, dtype=np.int64))
        elif len(self.pads_np) != batch:
            raise InvalidRequestError(f"the attention mask has {len(self.pads_np)} rows, the keys have {batch}")
        self._rows = np.arange(batch)
        self._dirty = True

    def set_pads(self, pads: Ints) -> None:
        self.pads_np = pads.astype(np.int64)
        self.pads_known = True
        self._max_pad = int(pads.max()) if len(pads) else 0
        self.padded = self._max_pad > 0
        self._rows = np.arange(len(pads))

    def observe_mask(self, mask: torch.Tensor, start: int, width: int) -> bool:
        """Learn or check the left padding from a 2D ``mask [batch, start + width]``. False: it is not left padding.

        An empty cache learns: rows that are padded elsewhere than on the left are stored in full, padding included,
        and left to the stock mask.
        """
        if mask.shape[1] != start + width or not mask.numel():
            return False
        visible = (mask != 0).cpu().numpy()
        columns = visible.shape[1]
        if start == 0 and not self.tables and not self.pads_known:
            pads = np.where(visible.any(axis=1), visible.argmax(axis=1), columns)
            if (pads == columns).any() or not np.array_equal(visible, np.arange(columns)[None, :] >= pads[:, None]):
                pads = np.zeros_like(pads)  # also where a row has no token at all: what it sees is the model's affair
            self.set_pads(pads)
        if len(self.pads_np) != visible.shape[0]:
            return False
        return bool(np.array_equal(visible, np.arange(columns)[None, :] >= self.pads_np[:, None]))

    def keep_padding(self, batch: int) -> None:
        """Treat every column as a token: nothing is known to be padding, or the caller wants to see it."""
        self.set_pads(np.zeros(batch, dtype=np.int64))

    def share_prompts(self, leaders: list[int], now: bool) -> None:
        """Until :meth:`end_prompt`, row ``i`` is the same prompt as row ``leaders[i]``.

        With ``now`` it uses its blocks from the start, else only if there are not enough for both.
        """
        if any(leader != i for i, leader in enumerate(leaders)):
            self.leaders, self.alike = (leaders, None) if now else (None, leaders)

    def end_prompt(self, merge: bool) -> None:
        """The rows go their own ways; with ``merge``, those known to be alike give up all copies but one."""
        alike, self.leaders, self.alike = self.alike, None, None
        if merge and alike is not None and len(alike) == len(self.tables):
            self.select(alike)

    def adopt(self, matches: Sequence[PrefixMatch], columns: int) -> None:
        """Start an empty batch with the first ``columns`` columns taken from prefixes."""
        manager = self.manager
        self.tables[:] = [
            manager.adopt(match, max(columns - int(pad), 0))
            for match, pad in zip(matches, self.pads_np.tolist(), strict=True)
        ]
        self.length = columns
        self._dirty, self.plan = True, None

    def truncate(self, columns: int) -> None:
        """Forget everything from column ``columns`` on; blocks that are no longer needed are free at once."""
        self.plan = None
        if columns >= self.length:
            return
        for table, pad in zip(self.tables, self.pads_np.tolist(), strict=True):
            self.manager.truncate(table, max(columns - pad, 0))
        self.length = columns
        self._dirty = True

    def select(self, rows: Sequence[int]) -> None:
        """Make row ``i`` what row ``rows[i]`` was. Repeated rows share blocks until one of them writes."""
        if not self.tables:
            if self.pads_known:
                self.set_pads(self.pads_np[list(rows)])
            return
        old, manager = list(self.tables), self.manager
        with manager.lock:
            taken: set[int] = set()
            new = []
            for row in rows:
                new.append(manager.fork(old[row]) if row in taken else old[row])
                taken.add(row)
            self.tables[:] = new
            for row, table in enumerate(old):
                if row not in taken:
                    manager.free(table)
        self.set_pads(self.pads_np[list(rows)])
        self._dirty, self.plan, self.leaders, self.alike = True, None, None, None

    def fork(self) -> BatchState:
        """A copy that shares every block."""
        twin = BatchState(self.shared)
        if self.tables:
            twin.tables[:] = [self.manager.fork(t) for t in self.tables]
        if self.pads_known:
            twin.set_pads(self.pads_np.copy())
        twin.length, twin.force_gather = self.length, self.force_gather
        return twin

    def release(self) -> None:
        """Give every block back and start over, empty."""
        _free_all(self.shared, self.tables)
        self.pads_np, self.pads_known, self.padded = np.zeros(0, dtype=np.int64), False, False
        self.length, self.plan, self.leaders, self.alike, self._dirty = 0, None, None, None, True
        self.native_for = self.mask_known = None

    def move_to(self, shared: SharedKV) -> None:
        """Use other storage. Only while empty."""
        if self.length:
            raise InternalError("cannot move a batch that already holds tokens")
        self.release_tables()
        self.shared = shared

    def release_tables(self) -> None:
        _free_all(self.shared, self.tables)
        self.plan, self._dirty = None, True

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in use."""
        return len({block for table in self.tables for block in table.blocks})


def _free_all(shared: SharedKV, tables: list[BlockTable]) -> None:
    if shared.manager is not None:
        for table in tables:
            shared.manager.free(table)
    tables.clear()
