"""RadixTree: matching token by token, sharing straddled blocks, and giving up the right leaves."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from hf_paged.cache import invariants
from hf_paged.cache.block import num_blocks_for
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.cache.eviction import LFU, LRU, EvictionPolicy
from hf_paged.cache.radix_tree import RadixNode, RadixTree, common_prefix
from hf_paged.errors import InternalError

A = (("weights", 0),)
B = (("weights", 1),)


class Forest:
    """A tree whose inserts allocate their own blocks, as a sequence that computed everything itself would."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, policy: EvictionPolicy | None = None, max_checkpoints: int = 0
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size, policy or LRU(), max_checkpoints)
        self.held: list[list[int]] = []

    def store(self, text: str, namespace: tuple[tuple[str, int], ...] = A, keep: bool = False) -> list[int]:
        blocks = self.pool.allocate(num_blocks_for(len(text), self.tree.block_size))
        self.tree.insert(namespace, key(text), blocks)
        if keep:
            self.held.append(blocks)
        else:
            self.pool.decref(blocks)
        return blocks

    def match(self, text: str, namespace: tuple[tuple[str, int], ...] = A) -> int:
        return self.tree.match(namespace, key(text))[0]

    def check(self) -> None:
        invariants.check(self.pool, self.tree, self.held)


def key(text: str) -> array[int]:
    return array("q", list(text.encode()))


def paths(tree: RadixTree) -> set[tuple[int, str, tuple[int, ...]]]:
    return {(n.start, bytes(n.tokens.tolist()).decode(), tuple(n.blocks)) for n in tree.nodes()}


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 1000])
def test_the_common_prefix_is_found_at_every_position(length: int) -> None:
    rng = random.Random(length)
    tokens = array("q", (rng.randrange(100) for _ in range(length)))
    for differ in {0, 1, length // 3, length - 1, length} & set(range(length + 1)):
        other = array("q", [-5, -6]) + tokens
        if differ < length:
            other[2 + differ] = -1
        assert common_prefix(tokens, other, 2) == differ
        assert common_prefix(tokens, other[: 2 + differ], 2) == differ


def test_a_match_ends_at_the_very_token_where_the_texts_part() -> None:
    """Whole-block matching would find nothing here: https://github.com/vllm-project/vllm/issues/53749"""
    forest = Forest(block_size=256)
    forest.store("x" * 100 + "first")
    assert forest.match("x" * 100 + "second") == 100


def test_a_match_inside_a_node_leaves_it_whole_and_returns_the_blocks_in_reach() -> None:
    forest = Forest()
    blocks = forest.store("abcdefghij")
    before = paths(forest.tree)
    assert forest.tree.match(A, key("abcdef!"))[:2] == (6, blocks[:2])
    assert forest.tree.match(A, key("abcd"))[:2] == (4, blocks[:1])
    assert forest.tree.match(A, key("abcdefghijkl"))[:2] == (10, blocks)
    assert paths(forest.tree) == before


def test_storing_a_known_prefix_again_keeps_the_first_blocks() -> None:
    forest = Forest()
    blocks = forest.store("abcdefgh")
    free = forest.pool.num_free
    forest.store("abcdefgh")
    forest.store("abcde")
    assert forest.pool.num_free == free
    assert forest.tree.match(A, key("abcdefgh"))[1] == blocks
    forest.check()


def test_a_branch_inside_a_block_gets_its_own_copy_of_the_head() -> None:
    forest = Forest()
    first = forest.store("abcdefghij")
    second = forest.store("abcdefGHI")
    assert paths(forest.tree) == {
        (0, "abcdef", tuple(first[:2])),
        (6, "ghij", tuple(first[1:])),
        (6, "GHI", tuple(second[1:])),
    }
    assert forest.tree.match(A, key("abcdefghij"))[1] == first
    assert forest.tree.match(A, key("abcdefGHI"))[1] == [first[0], *second[1:]]
    assert forest.pool.cache_refs(first[1]) == 2
    forest.check()


def test_a_branch_at_a_block_boundary_shares_no_block() -> None:
    forest = Forest()
    first, second = forest.store("abcdefgh"), forest.store("abcdEFGH")
    assert paths(forest.tree) == {(0, "abcd", (first[0],)), (4, "efgh", (first[1],)), (4, "EFGH", (second[1],))}
    forest.check()


def test_a_sequence_stored_again_and_again_stays_one_node() -> None:
    forest = Forest()
    text = "abcdefghijklmnopq"
    blocks = forest.pool.allocate(5)
    forest.held.append(blocks)
    for end in range(1, len(text) + 1):
        assert forest.tree.insert(A, key(text[:end]), blocks) == 1
    assert paths(forest.tree) == {(0, text, tuple(blocks))}
    forest.check()


def test_a_node_with_a_recurrent_state_is_not_grown_past_it() -> None:
    forest, checkpoint = Forest(max_checkpoints=2), Checkpoint()
    forest.store("abcd")
    forest.tree.keep_checkpoint(A, key("abcd"), checkpoint)
    forest.store("abcdefgh")
    assert {(n.start, n.end, n.state) for n in forest.tree.nodes()} == {(0, 4, checkpoint), (4, 8, None)}
    # A split leaves the state with the half that ends where it was taken.
    forest.store("abX")
    assert {(n.start, n.end, n.state) for n in forest.tree.nodes() if n.state} == {(2, 4, checkpoint)}
    forest.check()


def last_checkpoint(forest: Forest, text: str) -> tuple[int, Checkpoint | None]:
    matched, _, node = forest.tree.match(A, key(text))
    return forest.tree.last_checkpoint(node, matched)


def test_a_checkpoint_is_found_behind_exactly_the_tokens_it_belongs_to() -> None:
    forest, checkpoint = Forest(max_checkpoints=4), Checkpoint()
    forest.store("abcdefgh")
    forest.tree.keep_checkpoint(A, key("abcde"), checkpoint)
    assert last_checkpoint(forest, "abcdefghi") == (5, checkpoint)
    assert last_checkpoint(forest, "abcdeX") == (5, checkpoint)
    assert last_checkpoint(forest, "abcde") == (5, checkpoint)
    assert last_checkpoint(forest, "abcd") == (0, None), "one token before it the state is another"
    assert last_checkpoint(forest, "abcdXfgh") == (0, None)
    assert last_checkpoint(forest, "x") == (0, None)
    with pytest.raises(InternalError, match="a checkpoint behind 3 tokens, of which 2 are stored"):
        forest.tree.keep_checkpoint(A, key("abX"), Checkpoint())
    forest.check()


def test_the_least_recently_used_checkpoint_goes_and_the_tokens_stay() -> None:
    forest, found = Forest(max_checkpoints=2), [Checkpoint() for _ in range(3)]
    forest.store("abcdefgh")
    forest.tree.keep_checkpoint(A, key("ab"), found[0])
    forest.tree.keep_checkpoint(A, key("abcd"), found[1])
    assert last_checkpoint(forest, "abX") == (2, found[0])
    forest.tree.keep_checkpoint(A, key("abcdef"), found[2])
    assert last_checkpoint(forest, "abcdX") == (2, found[0]), "the one behind 'abcd' was used less recently"
    assert last_checkpoint(forest, "abcdefgh") == (6, found[2])
    assert forest.tree.match(A, key("abcdefgh"))[0] == 8
    forest.check()


def test_what_leaves_the_tree_takes_its_checkpoint_along() -> None:
    forest = Forest(max_checkpoints=8)
    forest.store("abcdefgh")
    for end in (2, 5, 8):
        forest.tree.keep_checkpoint(A, key("abcdefgh"[:end]), Checkpoint())
    assert len(forest.tree.checkpoints) == 3
    forest.tree.evict(1)
    assert len(forest.tree.checkpoints) == 1 and forest.tree.match(A, key("abcdefgh"))[0] == 4
    forest.check()
    forest.tree.drop(lambda _: True)
    assert len(forest.tree.checkpoints) == 0
    forest.check()


def test_namespaces_never_meet() -> None:
    forest = Forest()
    forest.store("abcdef", A)
    assert forest.match("abcdef", B) == 0
    forest.store("abcdef", B)
    assert forest.tree.drop(lambda namespace: namespace == A) == 2
    assert (forest.match("abcdef", A), forest.match("abcdef", B)) == (0, 6)
    assert list(forest.tree.roots) == [B]
    forest.check()


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    """A hot prefix survives pressure: transformers 5.24 forgets all cached blocks at once."""
    forest = Forest(num_blocks=10)
    forest.store("hot system prompt"[:8])
    for name in "123":
        forest.store(name * 8)
    forest.match("hot system prompt")
    assert forest.tree.evict(4) == 4
    assert [forest.match(text) for text in ("hot syst", "1" * 8, "2" * 8, "3" * 8)] == [8, 0, 0, 8]
    forest.check()


def test_eviction_takes_no_more_than_needed_off_the_end_of_a_leaf() -> None:
    forest = Forest()
    forest.store("abcdefghijklmn")
    assert forest.tree.evict(1) == 1
    assert forest.match("abcdefghijklmn") == 12
    assert forest.tree.evict(2) == 2
    assert forest.match("abcdefghijklmn") == 4
    forest.check()


def test_children_go_before_their_parent() -> None:
    forest = Forest()
    forest.store("abcdefgh")
    forest.store("abcdEFGH")
    assert forest.tree.evict(2) == 2
    assert forest.match("abcdefgh") == 4
    assert forest.tree.evict(5) == 1
    assert (forest.tree.num_nodes, forest.tree.roots) == (0, {})
    forest.check()


def test_leaves_in_use_are_spared_while_others_can_give() -> None:
    forest = Forest()
    forest.store("running", keep=True)
    forest.store("finished")
    assert forest.tree.evict(1) == 1
    assert (forest.match("running"), forest.match("finished")) == (7, 4)
    assert forest.tree.evict(9) == 1
    assert forest.match("running") == 7
    forest.check()


def test_what_lies_behind_a_leaf_in_use_can_still_be_freed() -> None:
    """A second sequence computed the prefix itself: it uses its own blocks, and the tree's are idle."""
    forest = Forest()
    forest.store("abcdefgh")
    forest.store("abcdefghijkl", keep=True)
    assert forest.pool.num_idle == 2
    assert forest.tree.evict(2) == 2
    forest.check()


def test_a_leaf_becomes_evictable_again_when_its_user_lets_go() -> None:
    forest = Forest()
    forest.store("abcdefgh", keep=True)
    assert forest.tree.evict(1) == 0
    forest.pool.decref(forest.held.pop())
    assert forest.tree.evict(1) == 1
    forest.check()


def test_a_locked_path_stays() -> None:
    forest = Forest()
    forest.store("abcdefgh")
    node = forest.tree.match(A, key("abcdef"))[2]
    assert node is not None
    forest.tree.lock(node)
    forest.store("other")
    assert forest.pool.num_idle == 2
    assert forest.tree.evict(4) == 2
    assert forest.match("abcdefgh") == 8
    forest.check()
    forest.tree.unlock(node)
    assert forest.tree.evict(4) == 2
    forest.check()


def test_a_lock_outlives_splits_and_drops() -> None:
    forest = Forest()
    forest.store("abcdefgh")
    node = forest.tree.match(A, key("abcdefgh"))[2]
    assert node is not None
    forest.tree.lock(node)
    forest.store("abcdefX")
    assert {n.lock_ref for n in forest.tree.nodes() if n.tokens[-1] in b"fh"} == {1}
    forest.check()
    assert forest.tree.drop(lambda _: True) == 1
    assert forest.pool.num_owned == 2
    forest.check()
    forest.tree.unlock(node)
    assert forest.pool.num_owned == 0
    forest.check()


def test_a_policy_is_one_method() -> None:
    class Longest:
        def priority(self, node: RadixNode) -> tuple[float, ...]:
            return (-node.end,)

    def fill(policy: EvictionPolicy) -> list[int]:
        forest = Forest(policy=policy)
        forest.store("aaaaaaaaaaaa")
        forest.store("bbbb")
        forest.store("cccc")
        for text in ("aaaaaaaaaaaa", "aaaaaaaaaaaa", "cccc", "bbbb"):
            forest.match(text)
        forest.match("cccc")
        forest.tree.evict(1)
        forest.check()
        return [forest.match(text) for text in ("aaaaaaaaaaaa", "bbbb", "cccc")]

    assert fill(LRU()) == [8, 4, 4]
    assert fill(LFU()) == [12, 0, 4]
    assert fill(Longest()) == [8, 4, 4]


def test_dropping_leaves_no_entries_behind_in_the_eviction_queue() -> None:
    forest = Forest()
    for _ in range(20):
        forest.store("abcd")
        forest.store("efgh", keep=True)
        forest.tree.drop(lambda _: True)
        forest.pool.decref(forest.held.pop())
    assert forest.tree.queue._heap == []
    assert forest.tree.queue._parked == {}


def _rename(node: RadixNode) -> None:
    node.tokens[0] += 1


def _shift(node: RadixNode) -> None:
    node.start += 1


def _lose_block(node: RadixNode) -> None:
    node.blocks.pop()


def _unqueue(node: RadixNode) -> None:
    node.queued = 0


def _remove(node: RadixNode) -> None:
    node.removed = True


def _lock_child_only(node: RadixNode) -> None:
    assert node.parent is not None
    node.lock_ref, node.parent.lock_ref = 1, 0


@pytest.mark.parametrize("damage", [_rename, _shift, _lose_block, _unqueue, _remove, _lock_child_only])
def test_damage_is_noticed(damage: Callable[[RadixNode], None]) -> None:
    forest = Forest()
    forest.store("abcdefgh")
    forest.store("abcdefG")
    forest.check()
    damage(next(n for n in forest.tree.nodes() if n.start == 6))
    with pytest.raises(InternalError):
        forest.check()
