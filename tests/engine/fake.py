"""A runner without a model: block storage as a dict, and a next token that depends on every token before it.

It reads each sequence back through its blocks before it samples, so a block that was given away, overwritten, not
copied or not written shows as a wrong token at once.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from hf_paged.cache.manager import KVCacheManager
from hf_paged.engine.request import FinishReason, Request
from hf_paged.engine.scheduler import Scheduler, SchedulerOutput, check_books

VOCAB = 50


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("q", tokens).tobytes()) % VOCAB


def alone(prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What a request generates when it is the only one."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Runs plans over a simulated memory: slot -> (token, the tokens before it)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[int, tuple[int, int]] = {}

    def slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, output: SchedulerOutput) -> dict[str, int]:
        size = self.block_size
        for copy in output.copies:
            for offset in range(size):
                if copy.src * size + offset in self.memory:
                    self.memory[copy.dst * size + offset] = self.memory[copy.src * size + offset]
        sampled = {}
        for chunk in output.chunks:
            tokens = chunk.request.tokens
            for position in range(chunk.start, chunk.start + chunk.count):
                self.memory[self.slot(chunk.blocks, position)] = (tokens[position], position)
        for chunk in output.chunks:
            tokens = chunk.request.tokens
            seen = [self.memory.get(self.slot(chunk.blocks, p)) for p in range(chunk.start + chunk.count)]
            want = [(tokens[p], p) for p in range(chunk.start + chunk.count)]
            assert seen == want, f"{chunk.request!r} reads {seen}, not its own tokens"
            if chunk.samples:
                sampled[chunk.request.request_id] = next_token(tokens)
        return sampled


def drive(scheduler: Scheduler, runner: FakeRunner, requests: Sequence[Request], limit: int = 10_000) -> int:
    """Run until nothing is left, checking the books and the budgets after every step; returns the steps it took."""
    for step in range(limit):
        if not scheduler.has_work:
            return step
        one_step(scheduler, runner, requests)
    raise AssertionError(f"not done after {limit} steps: {scheduler.running}, {list(scheduler.waiting)}")


def one_step(scheduler: Scheduler, runner: FakeRunner, requests: Sequence[Request]) -> SchedulerOutput:
    output = scheduler.schedule()
    if not scheduler.whole_prompts:
        assert output.num_tokens <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert output.chunks or output.ended or not scheduler.has_work, "a step without any progress"
    scheduler.update(output, runner.run(output))
    check_books(scheduler, [r for r in requests if r.finished])
    return output


def make(manager_blocks: int, block_size: int = 4, **options: object) -> tuple[Scheduler, FakeRunner]:
    manager = KVCacheManager(manager_blocks + 1, block_size)
    return Scheduler(manager, **options), FakeRunner(block_size)  # type: ignore[arg-type]


def assert_as_alone(request: Request) -> None:
    assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (request, request.error)
    got = list(request.tokens[len(request.prompt) :])
    assert got == alone(request.prompt, request.max_tokens, request.stop_token_ids)
