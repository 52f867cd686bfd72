"""BlockTable: from token positions to slots; and the arithmetic of layer specs."""

from __future__ import annotations

import pytest

from hf_paged.cache.block import num_blocks_for
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.specs import FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec
from hf_paged.errors import ConfigError, InternalError


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "blocks"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7), (16, 16, 1)]
)
def test_blocks_needed_round_up(num_tokens: int, block_size: int, blocks: int) -> None:
    assert num_blocks_for(num_tokens, block_size) == blocks


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_slots_follow_the_table(block_size: int) -> None:
    num_tokens = 11
    blocks = [7 + 3 * i for i in range(num_blocks_for(num_tokens, block_size))]
    table = BlockTable(block_size, blocks, num_tokens)
    naive = [blocks[p // block_size] * block_size + p % block_size for p in range(num_tokens)]
    assert [table.slot(p) for p in range(num_tokens)] == naive
    for start in range(num_tokens + 1):
        for end in range(start, num_tokens + 1):
            assert table.slots(start, end) == naive[start:end]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 6)])
def test_slots_outside_the_tokens_are_refused(start: int, end: int) -> None:
    table = BlockTable(4, [1, 2], 5)
    with pytest.raises(InternalError, match=f"slots {start}:{end} are outside a table of 5 tokens"):
        table.slots(start, end)


def test_a_position_outside_the_tokens_is_refused() -> None:
    table = BlockTable(4, [1, 2], 5)
    for position in (-1, 5):
        with pytest.raises(InternalError, match=f"position {position}"):
            table.slot(position)


def test_appending_without_the_blocks_it_takes_is_noticed() -> None:
    table = BlockTable(4)
    table.append(5, [1, 2])
    assert (table.blocks, table.num_tokens, table.capacity, table.write_limit) == ([1, 2], 5, 8, 8)
    with pytest.raises(InternalError, match="9 tokens of 4 a block in 2 blocks"):
        table.append(4)


def test_truncation_returns_the_blocks_no_longer_needed() -> None:
    table = BlockTable(4, [5, 6, 7], 10)
    assert table.truncate(8) == [7]
    assert table.truncate(5) == []
    assert table.truncate(0) == [5, 6]
    assert (table.blocks, table.num_tokens) == ([], 0)


def test_a_fork_takes_the_right_to_write_in_place_from_both() -> None:
    table = BlockTable(4)
    table.append(5, [1, 2])
    twin = table.fork()
    assert twin.blocks == table.blocks
    assert twin.blocks is not table.blocks
    assert (table.write_limit, twin.write_limit) == (5, 5)


def test_the_repr_tells_size_and_fate() -> None:
    table = BlockTable(4, [1, 2], 5)
    assert repr(table) == "BlockTable(5 tokens in 2 blocks)"
    table.retire()
    assert repr(table) == "BlockTable(freed)"


def test_full_attention_needs_everything() -> None:
    spec = FullAttentionSpec(16)
    assert spec.first_needed(100) == 0
    assert spec.resident_for_hit(100) == 100


@pytest.mark.parametrize(("num_tokens", "first"), [(0, 0), (3, 0), (4, 1), (11, 8)])
def test_a_sliding_window_needs_its_last_tokens_but_one(num_tokens: int, first: int) -> None:
    # The query at position n is itself one of the `window` keys it sees.
    spec = SlidingWindowSpec(16, window=4)
    assert spec.first_needed(num_tokens) == first
    assert spec.resident_for_hit(num_tokens) == num_tokens - first


def test_a_recurrent_state_needs_no_tokens() -> None:
    assert RecurrentStateSpec(16, checkpoint_interval=64).resident_for_hit(100) == 0


def test_specs_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        FullAttentionSpec(0)
    with pytest.raises(ConfigError, match="sliding window is 0"):
        SlidingWindowSpec(16, window=0)
    with pytest.raises(ConfigError, match="checkpoint_interval is 0"):
        RecurrentStateSpec(16, checkpoint_interval=0)
