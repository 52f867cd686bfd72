"""The cache beside a naive model of it: memory is simulated, so every reader's content is checked after every step.

A simulated slot contains ``(namespace, all tokens up to and including this one)``, as a KV entry depends on its whole
history. Whatever shares, copies, evicts or reuses blocks wrongly makes some table, pinned match or tree node read a
history that is not its own. Hypothesis drives the machine (and shrinks what it finds); ``random_life`` drives it with a
seeded generator, which takes more steps in a second.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.cache.block import BlockCopy
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.manager import KVCacheManager
from hf_paged.cache.radix_tree import RadixNode
from hf_paged.cache.records import PrefixMatch, as_token_array
from hf_paged.errors import OutOfBlocksError

NAMESPACES = [
    (("weights", 0),),
    (("weights", 1),),
    (("weights", 0), ("salt", "a")),
    (("weights", 0), ("adapter", "a", 1)),
]
NAMESPACE = st.sampled_from([NAMESPACES[0]] * 3 + NAMESPACES)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)
PICK = st.integers(0, 1000)


class Sequence:
    """A live table and what it must read back."""

    def __init__(self, namespace: Any, table: BlockTable, tokens: list[int]) -> None:
        self.namespace = namespace
        self.table = table
        self.tokens = tokens


class CacheMachine(RuleBasedStateMachine):
    """Random lives of sequences in a pool so small that eviction and exhaustion are everyday events."""

    @initialize(
        num_blocks=st.sampled_from([12, 8, 16, 5, 3, 2]),
        block_size=st.sampled_from([1, 2, 4]),
        max_cached=st.sampled_from([None, None, 0, 3]),
    )
    def start(self, num_blocks: int, block_size: int, max_cached: int | None) -> None:
        self.size = block_size
        self.manager = KVCacheManager(num_blocks, block_size, max_cached_blocks=max_cached)
        self.tree = self.manager._tree
        self.memory: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self.live: list[Sequence] = []
        self.matches: list[tuple[PrefixMatch, list[int]]] = []
        self.locked: list[RadixNode] = []

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence in self.live:
            self.manager.free(sequence.table)
        for match, _ in self.matches:
            self.manager.release(match)
        for node in self.locked:
            self.tree.unlock(node)
        self.manager.clear()
        self.manager.check_invariants()
        stats = self.manager.stats()
        assert stats.free_blocks == stats.num_blocks - 1, "blocks leaked"

    # -- the simulated device ----------------------------------------------------------------------------------------

    def copy(self, copies: list[BlockCopy]) -> None:
        for src, dst in copies:
            for offset in range(self.size):
                self.memory[dst * self.size + offset] = self.memory.get(src * self.size + offset, (None, ()))

    def write(self, sequence: Sequence, tokens: list[int]) -> None:
        start = len(sequence.tokens)
        sequence.tokens = sequence.tokens + tokens
        for position, slot in enumerate(sequence.table.slots(start, len(sequence.tokens)), start):
            self.memory[slot] = (sequence.namespace, tuple(sequence.tokens[: position + 1]))

    def expect(self, namespace: Any, tokens: list[int], blocks: Any, first: int = 0) -> None:
        """``blocks``, from logical index ``first`` on, must read as ``tokens``."""
        for position in range(first * self.size, len(tokens)):
            slot = blocks[position // self.size - first] * self.size + position % self.size
            assert self.memory[slot] == (namespace, tuple(tokens[: position + 1])), f"position {position}, slot {slot}"

    def pick(self, number: int) -> Sequence:
        return self.live[number % len(self.live)]

    def stored(self) -> list[tuple[Any, list[int], RadixNode]]:
        """Every path of the tree as (namespace, tokens from the root, last node)."""
        found = []
        for namespace, root in self.tree.roots.items():
            todo = [(list[int](), child) for child in root.children.values()]
            while todo:
                above, node = todo.pop()
                path = above + list(node.tokens)
                found.append((namespace, path, node))
                todo += [(path, child) for child in node.children.values()]
        return found

    # -- what a caller does ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 6)
    @rule(namespace=NAMESPACE, tokens=TOKENS, share=st.sampled_from([0.5, 1.0, 1.0]))
    def admit(self, namespace: Any, tokens: list[int], share: float) -> None:
        match = self.manager.match_prefix(namespace, tokens, max_tokens=len(tokens) - 1)
        assert match.num_tokens < len(tokens)
        shared = int(match.num_tokens * share)
        table = self.manager.adopt(match, shared)
        sequence = Sequence(namespace, table, tokens[:shared])
        self.live.append(sequence)
        self.grow([sequence], [tokens[shared:]])

    @precondition(lambda self: self.live)
    @rule(picks=st.lists(PICK, min_size=1, max_size=4), tokens=st.lists(TOKENS, min_size=4, max_size=4))
    def append(self, picks: list[int], tokens: list[list[int]]) -> None:
        chosen = list({id(sequence): sequence for sequence in map(self.pick, picks)}.values())
        self.grow(chosen, tokens[: len(chosen)])

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1))
    def decode_step(self, token: int) -> None:
        self.grow(self.live, [[token]] * len(self.live))

    def grow(self, sequences: list[Sequence], tokens: list[list[int]]) -> None:
        tables, counts = [s.table for s in sequences], [len(t) for t in tokens]
        fits = self.manager.can_append(tables, counts)
        needed = self.manager.blocks_needed(tables, counts)
        before = self.manager.stats()
        contents = [(table.num_tokens, list(table.blocks)) for table in tables]
        try:
            copies = self.manager.append_many(tables, counts)
            refused = None
        except OutOfBlocksError as error:
            copies, refused = [], (error.needed, error.available)
        assert (refused is None) == fits
        if refused is not None:
            assert refused == (needed, before.free_blocks + before.evictable_blocks)
            assert self.manager.stats() == before
            assert contents == [(table.num_tokens, list(table.blocks)) for table in tables]
            return
        after = self.manager.stats()
        # A copy may let go of the last hold on its source, so blocks in use grow by at most what was allocated.
        assert after.owned_blocks <= before.owned_blocks + needed
        assert after.cow_copies - before.cow_copies == len(copies)
        assert not {copy.src for copy in copies} & {copy.dst for copy in copies}
        self.copy(copies)
        for sequence, new in zip(sequences, tokens, strict=True):
            self.write(sequence, new)

    @precondition(lambda self: self.live)
    @rule(pick=PICK, back=st.integers(0, 5))
    def commit(self, pick: int, back: int) -> None:
        sequence = self.pick(pick)
        tokens = sequence.tokens[: max(0, len(sequence.tokens) - back)]
        known = self.longest_match(sequence.namespace, tokens)
        added = self.manager.commit(sequence.namespace, tokens, sequence.table)
        assert added == len(tokens) - known
        if self.manager.max_cached_blocks is None:
            assert self.longest_match(sequence.namespace, tokens) == len(tokens)

    @precondition(lambda self: 0 < len(self.live) < 6)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        parent = self.pick(pick)
        self.live.append(Sequence(parent.namespace, self.manager.fork(parent.table), parent.tokens))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, back=st.integers(0, 6))
    def truncate(self, pick: int, back: int) -> None:
        sequence = self.pick(pick)
        sequence.tokens = sequence.tokens[: max(0, len(sequence.tokens) - back)]
        self.manager.truncate(sequence.table, len(sequence.tokens))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, how=st.sampled_from(["store", "store", "free", "lose"]))
    def finish(self, pick: int, how: str) -> None:
        num_tables = self.manager.stats().num_tables
        sequence = self.live.pop(pick % len(self.live))
        if how == "store":
            self.manager.commit(sequence.namespace, sequence.tokens, sequence.table)
        if how != "lose":
            self.manager.free(sequence.table)
            self.manager.free(sequence.table)
        del sequence.table
        assert self.manager.stats().num_tables == num_tables - 1

    @rule(namespace=NAMESPACE, tokens=TOKENS)
    def pin(self, namespace: Any, tokens: list[int]) -> None:
        expected = self.longest_match(namespace, tokens)
        match = self.manager.match_prefix(namespace, tokens)
        assert match.num_tokens == expected
        self.matches.append((match, tokens[: match.num_tokens]))

    @precondition(lambda self: self.matches)
    @rule(pick=PICK, how=st.sampled_from(["adopt", "release", "lose"]))
    def unpin(self, pick: int, how: str) -> None:
        match, tokens = self.matches.pop(pick % len(self.matches))
        if how == "adopt":
            table = self.manager.adopt(match, len(tokens))
            self.live.append(Sequence(match.namespace, table, tokens))
        if how != "lose":
            self.manager.release(match)

    @rule(namespace=NAMESPACE, tokens=TOKENS, take=st.booleans(), pick=PICK)
    def lock(self, namespace: Any, tokens: list[int], take: bool, pick: int) -> None:
        if self.locked and not take:
            self.tree.unlock(self.locked.pop(pick % len(self.locked)))
            return
        node = self.tree.match(namespace, as_token_array(tokens))[2]
        if node is not None:
            self.tree.lock(node)
            self.locked.append(node)

    @rule(how=st.sampled_from(["evict", "drop", "new weights"]), namespace=NAMESPACE, num_blocks=st.integers(1, 4))
    def lose_stored(self, how: str, namespace: Any, num_blocks: int) -> None:
        before = self.manager.stats()
        if how == "evict":
            freed = self.tree.evict(num_blocks)
            assert freed == min(num_blocks, before.evictable_blocks), "evictable must be what eviction can free"
        elif how == "drop":
            freed = self.manager.drop(namespace)
            assert namespace not in self.tree.roots
        else:
            freed = self.manager.drop(lambda name: name[0] == ("weights", 0))
            assert all(name[0] != ("weights", 0) for name in self.tree.roots)
        assert self.manager.stats().free_blocks == before.free_blocks + freed

    # -- what must hold ----------------------------------------------------------------------------------------------

    def longest_match(self, namespace: Any, tokens: list[int]) -> int:
        """The naive answer: compare with every stored path, token by token."""
        best = 0
        for name, path, _ in self.stored():
            if name == namespace:
                shared = 0
                while shared < min(len(path), len(tokens)) and path[shared] == tokens[shared]:
                    shared += 1
                best = max(best, shared)
        return best

    @invariant()
    def every_reader_reads_its_own_history(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence in self.live:
            assert sequence.table.num_tokens == len(sequence.tokens)
            self.expect(sequence.namespace, sequence.tokens, sequence.table.blocks)
        for match, tokens in self.matches:
            self.expect(match.namespace, tokens, match.blocks)
        for namespace, path, node in self.stored():
            self.expect(namespace, path, node.blocks, first=node.start // self.size)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_invariants()
            stats = self.manager.stats()
            assert stats.free_blocks + stats.evictable_blocks + stats.owned_blocks == stats.num_blocks - 1


def random_life(seed: int, steps: int) -> CacheMachine:
    """Drive a machine with a seeded generator and check it after every step; returns it, torn down."""
    rng = random.Random(seed)

    def tokens() -> list[int]:
        # Prefixes repeat: few second choices, so that sequences meet, part inside blocks and meet again.
        return [int(rng.random() < 0.15) for _ in range(rng.randint(1, 11))]

    def namespace() -> Any:
        return rng.choice([NAMESPACES[0]] * 4 + NAMESPACES)

    def pick() -> int:
        return rng.randrange(1000)

    machine = CacheMachine()
    machine.start(
        num_blocks=rng.choice([2, 3, 5, 8, 8, 12, 12, 16, 16, 24]),
        block_size=rng.choice([1, 2, 4, 4]),
        max_cached=rng.choice([None, None, None, 0, 3]),
    )

    def finish() -> None:
        machine.finish(pick=pick(), how=rng.choice(["store", "store", "free", "lose"]))

    any_time = {
        lambda: machine.admit(namespace=namespace(), tokens=tokens(), share=rng.choice([0.5, 1.0, 1.0])): 8,
        lambda: machine.pin(namespace=namespace(), tokens=tokens()): 2,
        lambda: machine.lock(namespace=namespace(), tokens=tokens(), take=rng.random() < 0.5, pick=pick()): 1,
        lambda: machine.lose_stored(
            how=rng.choice(["evict"] * 4 + ["drop", "new weights"]), namespace=namespace(), num_blocks=rng.randint(1, 4)
        ): 1,
    }
    with_sequences = {
        lambda: machine.append(
            picks=[pick() for _ in range(rng.randint(1, 3))], tokens=[tokens() for _ in range(3)]
        ): 3,
        lambda: machine.decode_step(token=int(rng.random() < 0.15)): 4,
        lambda: machine.commit(pick=pick(), back=rng.choice([0, 0, 1, 3])): 4,
        lambda: machine.fork(pick=pick()): 1,
        lambda: machine.truncate(pick=pick(), back=rng.randint(0, 6)): 2,
        finish: 3,
    }
    with_matches = {lambda: machine.unpin(pick=pick(), how=rng.choice(["adopt", "release", "lose"])): 3}
    for _ in range(steps):
        if len(machine.live) > 4:
            finish()
            continue
        moves = any_time | (with_sequences if machine.live else {}) | (with_matches if machine.matches else {})
        rng.choices(list(moves), list(moves.values()))[0]()
        machine.every_reader_reads_its_own_history()
        machine.books_balance()
    machine.teardown()
    return machine
