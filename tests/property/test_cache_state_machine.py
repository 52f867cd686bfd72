"""The cache keeps every reader's content apart and its books balanced, whatever the order of calls.

The second half breaks the cache on purpose, one rule at a time, and shows that the machine notices.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.manager import KVCacheManager
from hf_paged.cache.radix_tree import RadixNode, RadixTree
from hf_paged.errors import InternalError
from tests.property.cache_machine import CacheMachine, random_life

TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(60))
def test_no_reader_is_disturbed_in_a_random_life(seed: int) -> None:
    random_life(seed, steps=150)


def must_be_noticed() -> None:
    with pytest.raises((AssertionError, InternalError, KeyError, IndexError)):
        live_many_lives()


def live_many_lives() -> None:
    for seed in range(200):
        random_life(seed, steps=100)


def test_writing_into_shared_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = KVCacheManager._plan
    monkeypatch.setattr(KVCacheManager, "_plan", lambda self, w: [(t, new, False) for t, new, _ in plan(self, w)])
    monkeypatch.setattr(KVCacheManager, "check_invariants", lambda self: None)  # by its content alone
    must_be_noticed()


def test_writing_over_tokens_the_tree_relies_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "claimed", lambda self, block: 0)
    monkeypatch.setattr(KVCacheManager, "check_invariants", lambda self: None)
    must_be_noticed()


def test_a_forgotten_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheMachine, "copy", lambda self, copies: None)
    must_be_noticed()


def test_a_match_that_ignores_the_namespace_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    match = RadixTree.match

    def anywhere(self: RadixTree, namespace: Any, tokens: Any, touch: bool = True) -> Any:
        return match(self, next(iter(self.roots), namespace), tokens, touch)

    monkeypatch.setattr(RadixTree, "match", anywhere)
    must_be_noticed()


def test_a_split_that_forgets_the_straddled_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    split = RadixTree._split

    def forgetful(self: RadixTree, node: RadixNode, length: int) -> RadixNode:
        upper = split(self, node, length)
        if upper.end % self.block_size:
            self._pool.uncache(upper.blocks[-1])
        return upper

    monkeypatch.setattr(RadixTree, "_split", forgetful)
    must_be_noticed()


def test_a_pin_that_holds_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "incref", lambda self, blocks: None)
    must_be_noticed()


def test_a_right_to_write_that_survives_a_fork_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = BlockTable.fork

    def careless(self: BlockTable) -> BlockTable:
        limit = self.write_limit
        twin = fork(self)
        self.write_limit = twin.write_limit = limit
        return twin

    monkeypatch.setattr(BlockTable, "fork", careless)
    monkeypatch.setattr(KVCacheManager, "check_invariants", lambda self: None)
    must_be_noticed()
