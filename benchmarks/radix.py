"""How long the block bookkeeping takes, without tensors or a model.

    python -m benchmarks.radix [--sequences 1000] [--length 2048] [--block-size 16] [--repeats 300]

A tree of many stored sequences is filled first. Then whole request lives are timed: match_prefix, adopt, append,
commit, free. *Fresh* requests share nothing with the tree, *half* share the first half of a stored sequence, *full*
repeat one entirely (the match is capped at length - 1, as a model run needs). The rest is raw throughput.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.manager import KVCacheManager

NAMESPACE = (("weights", 0),)
VOCABULARY = 50_000


def request(manager: KVCacheManager, tokens: list[int]) -> int:
    """One request's life in the cache; returns the tokens it did not have to compute."""
    match = manager.match_prefix(NAMESPACE, tokens, max_tokens=len(tokens) - 1)
    table = manager.adopt(match, match.num_tokens)
    manager.append(table, len(tokens) - match.num_tokens)
    manager.commit(NAMESPACE, tokens, table)
    manager.free(table)
    return match.num_tokens


def timed(runs: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Median and 99th percentile over ``runs``, in microseconds."""
    samples = []
    for run in runs:
        start = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    samples.sort()
    return statistics.median(samples), samples[min(len(samples) - 1, int(len(samples) * 0.99))]


def _live(manager: KVCacheManager, tokens: list[int], hits: list[int]) -> None:
    hits.append(request(manager, tokens))


def lives(args: argparse.Namespace, spare: float) -> None:
    """Time requests on a filled tree. ``spare``: size of the pool, in units of what the stored sequences take."""
    rng = random.Random(0)
    per_sequence = -(-args.length // args.block_size)
    manager = KVCacheManager(int(args.sequences * per_sequence * spare) + 2 * per_sequence, args.block_size)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    stored = [fresh(args.length) for _ in range(args.sequences)]
    for tokens in stored:
        request(manager, tokens)
    half = args.length // 2
    recent = stored[args.sequences // 2 :]  # under pressure, the older half makes room for what is timed here
    cases = {
        "full": [rng.choice(recent) for _ in range(args.repeats)],
        "half": [rng.choice(recent)[:half] + fresh(args.length - half) for _ in range(args.repeats)],
        "fresh": [fresh(args.length) for _ in range(args.repeats)],
    }
    for name, prompts in cases.items():
        hits: list[int] = []
        median, p99 = timed([partial(_live, manager, tokens, hits) for tokens in prompts])
        print(f"  {name:6} median {median:8.1f} us   p99 {p99:8.1f} us   reused {statistics.mean(hits):7.1f} tokens")
    stats = manager.stats()
    print(f"  {stats.num_nodes} nodes, {stats.cached_blocks} cached blocks, {stats.evicted_blocks} evicted")
    manager.check_invariants()


def throughput() -> None:
    """Operations a second of the parts."""
    pool = BlockPool(1 << 16)
    rounds, n = 200, 1000
    start = time.perf_counter()
    for _ in range(rounds):
        pool.decref(pool.allocate(n))
    print(f"  pool     {rounds * n / (time.perf_counter() - start) / 1e6:6.2f} M blocks/s allocated and released")

    blocks = pool.allocate(n)
    start = time.perf_counter()
    for _ in range(rounds):
        pool.incref(blocks)
        pool.decref(blocks)
    print(f"  pool     {rounds * n / (time.perf_counter() - start) / 1e6:6.2f} M blocks/s shared and unshared")

    manager = KVCacheManager(1 << 16, 16)
    for batch in (1, 64, 256):
        tables = [manager.new_table() for _ in range(batch)]
        ones = [1] * batch
        steps = 1600
        start = time.perf_counter()
        for _ in range(steps):
            manager.append_many(tables, ones)
        each = (time.perf_counter() - start) / (steps * batch)
        inside = min(_in_block_append(manager, tables, ones) for _ in range(20))
        print(
            f"  tables   {1 / each / 1e6:6.2f} M decode tokens/s at batch {batch}: {each * 1e9:.0f} ns a token, "
            f"{inside / batch * 1e9:.0f} ns where the last block has room"
        )
        for table in tables:
            manager.free(table)

    table = manager.new_table()
    manager.append(table, 2048)
    start = time.perf_counter()
    for _ in range(rounds):
        table.slots(0, 2048)
    print(f"  slots    {rounds * 2048 / (time.perf_counter() - start) / 1e6:6.2f} M tokens/s mapped")


def _in_block_append(manager: KVCacheManager, tables: list[BlockTable], ones: list[int]) -> float:
    if tables[0].num_tokens % 16 in (0, 15):
        manager.append_many(tables, [2] * len(tables))
    start = time.perf_counter()
    manager.append_many(tables, ones)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1000, help="stored sequences")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument("--repeats", type=int, default=300, help="timed requests of each kind")
    args = parser.parse_args()
    for title, spare in (("pool with room", 3.0), ("pool full, every new block evicts one", 1.0)):
        print(f"{args.length} tokens, {args.sequences} stored sequences, {title}:")
        lives(args, spare)
    print("throughput:")
    throughput()


if __name__ == "__main__":
    main()
