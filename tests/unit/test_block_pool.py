"""BlockPool and FreeList: who keeps a block alive, and which block is handed out next."""

from __future__ import annotations

import pytest

from hf_paged.cache.block import NULL_BLOCK, FreeList
from hf_paged.cache.block_pool import BlockPool
from hf_paged.errors import ConfigError, InternalError


def test_low_ids_are_handed_out_first_and_the_null_block_never() -> None:
    pool = BlockPool(6)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(3) == [3, 4, 5]
    assert pool.num_free == 0
    assert pool.ref_count(NULL_BLOCK) == 0


def test_released_blocks_are_reused_before_untouched_ones() -> None:
    pool = BlockPool(10)
    blocks = pool.allocate(3)
    pool.decref(blocks)
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_a_pool_too_small_to_hold_anything_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 1"):
        BlockPool(1)


def test_taking_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(InternalError, match="4 blocks taken from a free list of 3"):
        pool.allocate(4)
    assert pool.allocate(3) == [1, 2, 3]


def test_a_given_free_block_can_be_claimed_and_others_keep_their_order() -> None:
    pool = BlockPool(6)
    pool.claim(3)
    assert pool.allocate(4) == [1, 2, 4, 5]
    with pytest.raises(InternalError, match="block 3 is not free"):
        pool.claim(3)


def test_a_shared_block_lives_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.incref([block])
    assert (pool.holds(block), pool.num_owned, pool.num_free) == (2, 1, 2)
    pool.decref([block])
    assert pool.num_free == 2
    pool.decref([block])
    assert (pool.num_owned, pool.num_free) == (0, 3)


def test_a_block_is_evictable_exactly_while_only_the_tree_keeps_it() -> None:
    pool = BlockPool(4)
    woken: list[int] = []
    pool.on_idle = woken.append
    (block,) = pool.allocate(1)
    pool.cache([block])
    assert (pool.num_idle, pool.num_cached, pool.num_available) == (0, 1, 2)
    pool.decref([block])
    assert (pool.num_idle, pool.num_available, woken) == (1, 3, [block])
    pool.incref([block])
    assert (pool.num_idle, pool.num_owned) == (0, 1)
    pool.decref([block])
    assert pool.uncache(block)
    assert (pool.num_idle, pool.num_cached, pool.num_free) == (0, 0, 3)
    pool.check_invariants({}, {})


def test_uncaching_a_block_in_use_frees_nothing() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.cache([block, block])
    assert not pool.uncache(block)
    assert pool.uncache(block)
    assert pool.num_free == 1
    pool.check_invariants({block: 1}, {})


def test_misuse_is_an_internal_error_that_names_the_block() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.decref([block])
    for misuse in (pool.decref, pool.incref, pool.cache):
        with pytest.raises(InternalError, match=f"block {block}"):
            misuse([block])
    with pytest.raises(InternalError, match=f"block {block}"):
        pool.uncache(block)


@pytest.mark.parametrize("block", [NULL_BLOCK, 2, -1, 5])
def test_the_free_list_refuses_what_cannot_become_free(block: int) -> None:
    free = FreeList(5)
    with pytest.raises(InternalError, match=f"block {block} cannot become free"):
        free.push(block)
    assert free.to_list() == [1, 2, 3, 4]


def test_the_free_list_survives_any_order_of_operations() -> None:
    free = FreeList(6)
    free.remove(1)
    free.remove(5)
    free.remove(3)
    assert free.to_list() == [2, 4]
    assert free.pop(2) == [2, 4]
    assert free.to_list() == []
    free.push(5)
    free.push(1)
    assert free.to_list() == [1, 5]
    assert 5 in free
    assert 2 not in free


def test_wrong_books_are_noticed() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(InternalError, match=r"block 2 counts \(holds, cache refs\) = \(1, 0\)"):
        pool.check_invariants({1: 1}, {})
    pool.check_invariants({1: 1, 2: 1}, {})
    pool.num_owned = 1
    with pytest.raises(InternalError, match="the counters say"):
        pool.check_invariants({1: 1, 2: 1}, {})
