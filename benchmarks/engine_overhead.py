"""What the engine costs besides the model: microseconds per running sequence and step, with a model that does nothing.

    python benchmarks/engine_overhead.py [--sequences 64 256] [--steps 400]

A step is planned, its input tensors are made, a token is invented for every sequence, and the books are kept. Also the
time to look a prompt up in a tree that holds it, per 1,000 tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array

from hf_paged.cache.manager import KVCacheManager
from hf_paged.engine.request import Request
from hf_paged.engine.scheduler import Scheduler
from hf_paged.model.runner import flat_ids, pack

PROMPT, BLOCK = 128, 16


def decode(sequences: int, steps: int) -> dict[str, float]:
    """Median microseconds per sequence and step of each part, while ``sequences`` requests decode."""
    manager = KVCacheManager(sequences * (-(-(PROMPT + steps + 8) // BLOCK) + 1) + 1, BLOCK)
    scheduler = Scheduler(manager, max_num_seqs=sequences, max_num_batched_tokens=sequences * PROMPT)
    generator = random.Random(0)
    for i in range(sequences):
        prompt = array("q", [generator.randrange(50_000) for _ in range(PROMPT)])
        scheduler.add(Request(str(i), prompt, max_tokens=steps + 4))
    while any(r.num_output < 2 for r in scheduler.running) or scheduler.waiting:
        plan = scheduler.schedule()
        scheduler.update(plan, {c.request.request_id: 7 for c in plan.chunks if c.samples})
    times: dict[str, list[float]] = {"schedule": [], "inputs": [], "update": []}
    for step in range(steps - 8):
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        marks.append(time.perf_counter())
        pack(plan.chunks, BLOCK)
        flat_ids(plan.chunks)
        marks.append(time.perf_counter())
        scheduler.update(plan, {c.request.request_id: 100 + step for c in plan.chunks})
        marks.append(time.perf_counter())
        for name, a, b in zip(times, marks, marks[1:], strict=False):
            times[name].append(b - a)
    return {name: sorted(t)[len(t) // 2] / sequences * 1e6 for name, t in times.items()}


def lookup(tokens: int = 4000, repeats: int = 200) -> float:
    """Median microseconds per 1,000 tokens to match a stored prompt."""
    manager = KVCacheManager(tokens // BLOCK * 4, BLOCK)
    generator = random.Random(1)
    prompt = array("q", [generator.randrange(50_000) for _ in range(tokens)])
    table = manager.new_table()
    manager.append(table, tokens)
    manager.commit((), prompt, table)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        match = manager.match_prefix((), prompt, max_tokens=tokens - 1)
        times.append(time.perf_counter() - start)
        manager.release(match)
    return sorted(times)[repeats // 2] / tokens * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    for sequences in args.sequences:
        parts = decode(sequences, args.steps)
        detail = "  ".join(f"{name} {us:.2f}" for name, us in parts.items())
        print(f"{sequences:4d} running: {sum(parts.values()):6.2f} us per sequence and step  ({detail})")
    print(f"prefix lookup: {lookup():.2f} us per 1,000 tokens")


if __name__ == "__main__":
    main()
