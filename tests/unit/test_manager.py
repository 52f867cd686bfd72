"""KVCacheManager: sequences over one pool, with prefix reuse, copy on write, eviction and exact books."""

from __future__ import annotations

import gc
import random
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_paged.cache.block import BlockCopy
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.manager import KVCacheManager
from hf_paged.cache.specs import FULL_GROUP
from hf_paged.errors import ConfigError, InternalError, InvalidRequestError, OutOfBlocksError

NS = (("weights", 0),)

Make = Callable[..., KVCacheManager]


@pytest.fixture
def make() -> Iterator[Make]:
    """Managers with small blocks, whose books are checked when the test is over."""
    made: list[KVCacheManager] = []

    def build(num_blocks: int = 33, block_size: int = 4, **options: Any) -> KVCacheManager:
        made.append(KVCacheManager(num_blocks, block_size, **options))
        return made[-1]

    yield build
    for manager in made:
        manager.check_invariants()


def run(manager: KVCacheManager, tokens: list[int], namespace: Any = NS) -> tuple[BlockTable, int]:
    """What a prefill does: reuse, compute the rest, store. Returns the table and the number of reused tokens."""
    match = manager.match_prefix(namespace, tokens, max_tokens=len(tokens) - 1)
    table = manager.adopt(match, match.num_tokens)
    manager.append(table, len(tokens) - match.num_tokens)
    manager.commit(namespace, tokens, table)
    return table, match.num_tokens


def store(manager: KVCacheManager, tokens: list[int], namespace: Any = NS) -> None:
    manager.free(run(manager, tokens, namespace)[0])


# -- prefix reuse -----------------------------------------------------------------------------------------------------


def test_a_match_is_longest_pinned_and_counted(make: Make) -> None:
    manager = make()
    store(manager, list(range(10)))
    match = manager.match_prefix(NS, [*range(7), 99, 98])
    assert (match.num_tokens, len(match.blocks), match.namespace) == (7, 2, NS)
    stats = manager.stats()
    assert (stats.owned_blocks, stats.evictable_blocks, stats.cached_blocks) == (2, 1, 3)
    assert (stats.queries, stats.lookup_tokens, stats.hit_tokens) == (2, 9 + 9, 7)
    manager.match_prefix(NS, [1], record=False)
    assert manager.stats().queries == 2


def test_a_short_shared_prefix_is_reused_whatever_the_block_size(make: Make) -> None:
    """A shared prefix below the block size gave no hit at all: https://github.com/vllm-project/vllm/issues/53749"""
    manager = make(block_size=256)
    store(manager, [*range(100), 1000])
    assert run(manager, [*range(100), 2000, 2001])[1] == 100
    assert manager.stats().min_reusable_prefix == 1


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_fully_cached_prompt_leaves_one_token_to_compute(make: Make, length: int) -> None:
    """Prompts of a whole number of blocks were sliced by ``[-0:]``: https://github.com/Wenyueh/MinivLLM/pull/87"""
    manager = make()
    prompt = list(range(length))
    first, _ = run(manager, prompt)
    shared = list(first.blocks)
    match = manager.match_prefix(NS, prompt, max_tokens=length - 1)
    assert match.num_tokens == length - 1
    second = manager.adopt(match, length - 1)
    copies = manager.append(second, 1)
    # The last token goes to a block of its own: either a copy of the shared one, or a new one at a boundary.
    assert second.slot(length - 1) // 4 not in shared
    assert copies == ([] if length % 4 == 1 else [BlockCopy(shared[-1], second.blocks[-1])])


def test_an_adapter_and_a_salt_of_the_same_name_are_different(make: Make) -> None:
    """Untagged keys let them meet: https://github.com/vllm-project/vllm/issues/44701"""
    manager = make()
    store(manager, list(range(8)), (("weights", 0), ("adapter", "X", 1)))
    for other in (("salt", "X"), ("adapter", "X", 2), ("adapter", "Y", 1)):
        assert manager.match_prefix((("weights", 0), other), list(range(8))).num_tokens == 0
    assert manager.match_prefix(NS, list(range(8))).num_tokens == 0


@pytest.mark.parametrize("namespace", ["salt", ("salt", "s"), (("salt",),), ((1, 2),), [("salt", "s")], (("mm", []),)])
def test_a_namespace_that_could_be_confused_is_refused(make: Make, namespace: Any) -> None:
    manager = make()
    with pytest.raises(ConfigError, match="namespace is"):
        manager.match_prefix(namespace, [1, 2])


@pytest.mark.parametrize("tokens", [[1.5], ["a"], b"ab", [1 << 63], [None]])
def test_tokens_that_are_not_integers_are_refused(make: Make, tokens: Any) -> None:
    with pytest.raises(InvalidRequestError, match="token ids must be integers"):
        make().match_prefix(NS, tokens)


def test_arrays_of_any_integer_type_are_tokens(make: Make) -> None:
    manager = make()
    store(manager, list(range(8)))
    for typecode in "iqHb":
        assert manager.match_prefix(NS, array(typecode, range(8))).num_tokens == 8


def test_part_of_a_match_can_be_adopted_and_the_rest_is_let_go(make: Make) -> None:
    manager = make()
    store(manager, list(range(12)))
    match = manager.match_prefix(NS, list(range(12)))
    table = manager.adopt(match, 5)
    assert (table.num_tokens, table.blocks) == (5, list(match.blocks[:2]))
    assert manager.stats().owned_blocks == 2


def test_a_match_is_used_up_once(make: Make) -> None:
    manager = make()
    store(manager, list(range(8)))
    match = manager.match_prefix(NS, list(range(8)))
    with pytest.raises(InvalidRequestError, match="9 tokens adopted of a match of 8"):
        manager.adopt(match, 9)
    manager.adopt(match, 8)
    manager.release(match)
    with pytest.raises(InternalError, match="adopted after"):
        manager.adopt(match, 8)
    released = manager.match_prefix(NS, list(range(8)))
    manager.release(released)
    manager.release(released)
    with pytest.raises(InternalError, match="adopted after"):
        manager.adopt(released, 1)


def test_a_pinned_match_survives_eviction_and_drop(make: Make) -> None:
    manager = make(num_blocks=4)
    store(manager, list(range(12)))
    match = manager.match_prefix(NS, list(range(8)))
    table = manager.new_table()
    manager.append(table, 4)
    assert not manager.can_append([table], [1])
    assert manager.clear() == 0
    assert manager.adopt(match, 8).blocks == list(match.blocks)


def test_without_prefix_caching_nothing_is_stored_or_found(make: Make) -> None:
    manager = make(prefix_caching=False)
    store(manager, list(range(8)))
    assert manager.match_prefix(NS, list(range(8))).num_tokens == 0
    stats = manager.stats()
    assert (stats.cached_blocks, stats.free_blocks, stats.min_reusable_prefix) == (0, 32, 0)


def test_commit_reports_what_was_new_and_refuses_what_is_not_there(make: Make) -> None:
    manager = make()
    table = manager.new_table()
    manager.append(table, 6)
    assert manager.commit(NS, [0, 1, 2], table) == 3
    assert manager.commit(NS, [0, 1, 2, 3, 4, 5], table) == 3
    assert manager.commit(NS, [0, 1, 2, 3], table) == 0
    with pytest.raises(InvalidRequestError, match="7 tokens committed of a table of 6"):
        manager.commit(NS, list(range(7)), table)


def test_content_of_old_weights_cannot_be_stored_as_new(make: Make) -> None:
    manager = make()
    store(manager, list(range(8)), (("weights", 1),))
    table = manager.adopt(manager.match_prefix((("weights", 1),), [0, 1, 2]), 3)
    with pytest.raises(InternalError, match="committed to"):
        manager.commit((("weights", 2),), [0, 1, 2], manager.fork(table))


def test_new_weights_drop_exactly_the_old_ones(make: Make) -> None:
    manager = make()
    old, new = (("weights", 1), ("salt", "s")), (("weights", 2), ("salt", "s"))
    store(manager, list(range(8)), old)
    store(manager, list(range(8)), new)
    assert manager.drop(lambda namespace: namespace[0] == ("weights", 1)) == 2
    assert manager.match_prefix(old, list(range(8))).num_tokens == 0
    assert manager.match_prefix(new, list(range(8))).num_tokens == 8
    assert manager.drop(old) == 0


# -- writing and sharing ----------------------------------------------------------------------------------------------


def test_a_sequence_stored_while_it_runs_keeps_writing_in_place(make: Make) -> None:
    manager = make()
    table = manager.new_table()
    for step in range(1, 12):
        assert manager.append(table, 1) == []
        manager.commit(NS, list(range(step)), table)
    stats = manager.stats()
    assert (stats.cow_copies, stats.cached_blocks, stats.owned_blocks, stats.num_nodes) == (0, 3, 3, 1)


def test_a_stored_tail_is_continued_in_place_by_one_and_copied_by_the_next(make: Make) -> None:
    manager = make()
    store(manager, list(range(6)))
    first, second = (manager.adopt(manager.match_prefix(NS, list(range(6))), 6) for _ in range(2))
    tail = first.blocks[-1]
    copies = manager.append(first, 1)
    assert copies == [BlockCopy(tail, first.blocks[-1])]
    assert manager.append(second, 1) == []
    assert second.blocks[-1] == tail
    # The tree still relies on six tokens only, so a third sequence may not write while the second one does.
    third = manager.adopt(manager.match_prefix(NS, list(range(6))), 6)
    assert manager.append(third, 1) == [BlockCopy(tail, third.blocks[-1])]


def test_writing_below_what_the_tree_relies_on_copies(make: Make) -> None:
    manager = make()
    table, _ = run(manager, list(range(7)))
    manager.truncate(table, 5)
    tail = table.blocks[-1]
    assert manager.append(table, 1) == [BlockCopy(tail, table.blocks[-1])]
    assert manager.match_prefix(NS, list(range(7))).num_tokens == 7


def test_rejected_tokens_are_cut_off_and_written_again_in_place(make: Make) -> None:
    manager = make()
    table, _ = run(manager, list(range(6)))
    for _ in range(3):
        assert manager.append(table, 5) == []
        manager.truncate(table, 6)
    assert (table.num_tokens, len(table.blocks)) == (6, 2)


@pytest.mark.parametrize("prompt", [6, 8])
def test_samples_of_one_prompt_share_it_and_part_when_they_write(make: Make, prompt: int) -> None:
    """Copies are needed only for a partial last block: https://github.com/huggingface/transformers/issues/45563"""
    manager = make()
    parent = manager.new_table()
    manager.append(parent, prompt)
    children = [manager.fork(parent), manager.fork(parent)]
    tables = [parent, *children]
    shared = list(parent.blocks)
    assert manager.stats().owned_blocks == 2
    needed = manager.blocks_needed(tables, [1, 1, 1])
    copies = manager.append_many(tables, [1, 1, 1])
    # Of three sharers of a partial block two move away and the last one stays.
    assert [copy.src for copy in copies] == ([shared[-1]] * 2 if prompt == 6 else [])
    assert needed == (2 if prompt == 6 else 3)
    assert len({table.blocks[-1] for table in tables}) == 3
    manager.free(children[0])
    assert parent.blocks[0] == children[1].blocks[0] == shared[0]
    manager.check_invariants()


def test_no_destination_of_a_call_is_one_of_its_sources(make: Make) -> None:
    manager = make(num_blocks=40)
    tables = []
    for base in range(5):
        parent = manager.new_table()
        manager.append(parent, 2 + base % 2)
        tables += [parent, manager.fork(parent), manager.fork(parent)]
    copies = manager.append_many(tables, [3] * len(tables))
    assert len(copies) == 10
    assert not {copy.src for copy in copies} & {block for table in tables for block in table.blocks[1:]}
    assert not {copy.src for copy in copies} & {copy.dst for copy in copies}


def test_an_append_fails_as_a_whole_and_changes_nothing(make: Make) -> None:
    manager = make(num_blocks=6)
    store(manager, list(range(8)))
    tables = [manager.new_table() for _ in range(3)]
    manager.append_many(tables[:2], [3, 3])
    before, contents = manager.stats(), [list(table.blocks) for table in tables]
    with pytest.raises(OutOfBlocksError, match=r"needs 4 more blocks .* 5 blocks 1 are free and 2 evictable") as error:
        manager.append_many(tables, [1, 2, 12])
    assert (error.value.needed, error.value.available) == (4, 3)
    assert manager.stats() == before
    assert [list(table.blocks) for table in tables] == contents
    assert [table.num_tokens for table in tables] == [3, 3, 0]
    assert manager.can_append(tables, [1, 2, 8])
    manager.append_many(tables, [1, 2, 8])
    assert manager.stats().evicted_blocks == 2


def test_slots_and_block_ids_are_asked_per_layer_group(make: Make) -> None:
    manager = make()
    table = manager.new_table()
    manager.append(table, 6)
    assert manager.slots(FULL_GROUP, table, 2, 6) == [6, 7, 8, 9]
    assert manager.block_ids(FULL_GROUP, table) == [1, 2]
    assert [group.name for group in manager.groups] == [FULL_GROUP]
    with pytest.raises(InternalError, match="no layer group 'sliding'"):
        manager.slots("sliding", table, 0, 1)


# -- letting go -------------------------------------------------------------------------------------------------------


def test_a_hot_prefix_survives_pressure(make: Make) -> None:
    """transformers 5.24 forgets every cached block once few are free; here only what was used least recently goes."""
    manager = make(num_blocks=21)
    hot = list(range(8))
    store(manager, hot)
    for i in range(20):
        table, reused = run(manager, [*hot, *range(100 * (i + 1), 100 * (i + 1) + 8)])
        assert reused == 8
        manager.free(table)
    assert manager.stats().evicted_blocks > 0


def test_freeing_twice_does_nothing_and_a_freed_table_cannot_be_used(make: Make) -> None:
    manager = make()
    table = manager.new_table()
    manager.append(table, 5)
    manager.free(table)
    manager.free(table)
    assert manager.stats().free_blocks == 32
    for use in (
        lambda: manager.append(table, 1),
        lambda: manager.append_many([table], [0]),
        lambda: manager.fork(table),
        lambda: manager.truncate(table, 0),
        lambda: manager.commit(NS, [], table),
    ):
        with pytest.raises(InternalError, match="after it had been freed"):
            use()


def test_tables_and_matches_that_are_merely_dropped_give_their_blocks_back(make: Make) -> None:
    manager = make()
    store(manager, list(range(8)))
    match = manager.match_prefix(NS, list(range(8)))
    table = manager.new_table()
    manager.append(table, 9)
    assert manager.stats().owned_blocks == 5
    del table, match
    gc.collect()
    assert (manager.stats().owned_blocks, manager.stats().num_tables) == (0, 0)


def test_the_cap_on_idle_blocks_is_applied_after_commit_and_free(make: Make) -> None:
    manager = make(max_cached_blocks=3)
    table, _ = run(manager, list(range(24)))
    assert manager.stats().cached_blocks == 6
    manager.free(table)
    assert manager.stats().evictable_blocks == 3
    assert manager.match_prefix(NS, list(range(24))).num_tokens == 12


def test_a_cap_of_zero_shares_only_between_running_sequences(make: Make) -> None:
    manager = make(max_cached_blocks=0)
    first, _ = run(manager, list(range(8)))
    second, reused = run(manager, [*range(8), 9])
    assert reused == 8
    manager.free(first)
    manager.free(second)
    assert manager.stats().free_blocks == 32


def test_clear_frees_everything_nobody_uses(make: Make) -> None:
    manager = make()
    table, _ = run(manager, list(range(8)))
    store(manager, list(range(100, 108)))
    assert manager.clear() == 2
    assert (manager.stats().owned_blocks, manager.stats().cached_blocks, manager.stats().num_nodes) == (2, 0, 0)
    assert manager.append(table, 1) == []


# -- misuse -----------------------------------------------------------------------------------------------------------


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 1"):
        KVCacheManager(1)
    with pytest.raises(ConfigError, match="block_size is 0"):
        KVCacheManager(8, 0)
    with pytest.raises(ConfigError, match="max_cached_blocks is -1"):
        KVCacheManager(8, max_cached_blocks=-1)


def test_arguments_that_cannot_work_are_refused(make: Make) -> None:
    manager, stranger = make(), make().new_table()
    table = manager.new_table()
    manager.append(table, 3)
    with pytest.raises(InvalidRequestError, match="-1 tokens appended"):
        manager.append(table, -1)
    with pytest.raises(InvalidRequestError, match="2 tables and 1 counts"):
        manager.append_many([table, manager.new_table()], [1])
    with pytest.raises(InternalError, match="named twice"):
        manager.append_many([table, table], [1, 1])
    with pytest.raises(InvalidRequestError, match="3 tokens cannot be cut to 4"):
        manager.truncate(table, 4)
    with pytest.raises(InvalidRequestError, match="max_tokens is -1"):
        manager.match_prefix(NS, [1], max_tokens=-1)
    for use in (manager.free, manager.fork, lambda t: manager.append(t, 1)):
        with pytest.raises(InternalError, match="does not belong to this manager"):
            use(stranger)
    assert table.num_tokens == 3


def test_the_checker_sees_a_leak_a_double_use_and_a_lost_write_limit() -> None:
    """Corruption showed long after its cause: https://github.com/huggingface/text-generation-inference/issues/2871"""
    manager = KVCacheManager(16, 4)
    table, _ = run(manager, list(range(6)))
    leaked = manager._pool.allocate(1)
    with pytest.raises(InternalError, match=r"holders add up to \(0, 0\)"):
        manager.check_invariants()
    manager._pool.decref(leaked)
    manager.check_invariants()
    table.num_tokens += 4
    with pytest.raises(InternalError, match="has 2 blocks for 10 tokens"):
        manager.check_invariants()
    table.num_tokens = 5
    with pytest.raises(InternalError, match="the tree relies on 2 tokens"):
        manager.check_invariants()
    table.num_tokens = 6
    twin = manager.fork(table)
    table.write_limit = twin.write_limit = 8
    with pytest.raises(InternalError, match="two tables may write block 2"):
        manager.check_invariants()
    manager.truncate(twin, 5)
    table.num_tokens, table.write_limit = 6, 8
    manager.clear()
    twin.write_limit = 8
    table.write_limit = 6
    with pytest.raises(InternalError, match=r"may write block 2 where .* reads 2 tokens"):
        manager.check_invariants()


def test_threads_may_share_a_manager(make: Make) -> None:
    manager = make(num_blocks=65)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                prompt = [rng.randrange(2) for _ in range(rng.randint(2, 20))]
                table, _ = run(manager, prompt)
                manager.append(table, rng.randint(0, 5))
                twin = manager.fork(table)
                manager.append_many([table, twin], [1, 1])
                if rng.random() < 0.8:
                    manager.free(twin)
                manager.free(table)
                manager.stats()
        except BaseException as failure:  # reported by the main thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert manager.stats().owned_blocks == 0
