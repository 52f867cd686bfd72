"""A runner without a model: block storage as a dict, and a next token that depends on every token before it.

It reads each sequence back through its blocks before it samples, so a block that was given away, overwritten, not
copied or not written shows as a wrong token at once.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence

from hf_paged.cache.block import SwapIn, SwapOut
from hf_paged.cache.manager import KVCacheManager
from hf_paged.engine.invariants import check_books
from hf_paged.engine.plan import SchedulerOutput
from hf_paged.engine.policy import NewTokenRatio
from hf_paged.engine.request import FinishReason, Request
from hf_paged.engine.scheduler import Scheduler

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
        self.host: dict[int, tuple[int, int]] = {}

    def slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, output: SchedulerOutput) -> dict[str, int]:
        size = self.block_size
        memory, host = self.memory, self.host
        for transfer in output.transfers:
            source = host if isinstance(transfer, SwapIn) else memory
            target = host if isinstance(transfer, SwapOut) else memory
            for offset in range(size):
                target.pop(transfer.dst * size + offset, None)
                if transfer.src * size + offset in source:
                    target[transfer.dst * size + offset] = source[transfer.src * size + offset]
        sampled = {}
        for chunk in output.chunks:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self.memory[self.slot(chunk.blocks, position)] = (token, position)
        for chunk in output.chunks:
            tokens = [*chunk.request.tokens[: chunk.start], *chunk.token_ids]
            seen = [self.memory.get(self.slot(chunk.blocks, p)) for p in range(len(tokens))]
            want = [(token, p) for p, token in enumerate(tokens)]
            assert seen == want, f"{chunk.request!r} reads {seen}, not its own tokens"
            if chunk.samples:
                for request in (chunk.request, *chunk.also):
                    sampled[request.request_id] = next_token(tokens)
        return sampled


class AdmitAll(NewTokenRatio):
    """Reserves nothing for tokens to come, so that running requests have to give way."""

    def __init__(self) -> None:
        self.value = 0.0

    def step(self) -> None: ...
    def preempted(self, running: object) -> None: ...
    def idle(self) -> None: ...


class Driver:
    """Steps a scheduler over a runner, the next plan being made before or after the results of a step are known."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, overlap: bool = False) -> None:
        self.scheduler, self.runner, self.overlap = scheduler, runner, overlap
        self.under_way: SchedulerOutput | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.under_way is not None

    def step(self, before_update: Callable[[SchedulerOutput], None] = lambda _: None) -> tuple[list[Request], bool]:
        """One plan; returns the requests that ended or took a token, and whether anybody goes on."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        if not scheduler.whole_prompts:
            assert output.num_tokens <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert len({c.request.request_id for c in output.chunks}) == len(output.chunks)
        progress = bool(output.chunks or output.ended or self.under_way)
        ready = self.under_way if self.overlap else output
        touched = list(output.ended)
        if ready is not None and (ready.chunks or ready.transfers):
            sampled = self.runner.run(ready)
            before_update(ready)
            touched += scheduler.update(ready, sampled)
        self.under_way = output if self.overlap and (output.chunks or output.transfers) else None
        return touched, progress


def drive(
    scheduler: Scheduler, runner: FakeRunner, requests: Sequence[Request], limit: int = 10_000, overlap: bool = False
) -> int:
    """Run until nothing is left, checking the books and the budgets after every step; returns the steps it took."""
    driver = Driver(scheduler, runner, overlap)
    for step in range(limit):
        if not driver.has_work:
            return step
        _, progress = driver.step()
        assert progress or not driver.has_work, "a step without any progress"
        check_books(scheduler, [r for r in requests if r.finished])
    raise AssertionError(f"not done after {limit} steps: {scheduler.running}, {list(scheduler.waiting)}")


def one_step(scheduler: Scheduler, runner: FakeRunner, requests: Sequence[Request]) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output.num_tokens <= scheduler.max_num_batched_tokens or scheduler.whole_prompts
    scheduler.update(output, runner.run(output))
    check_books(scheduler, [r for r in requests if r.finished])
    return output


def make(
    manager_blocks: int, block_size: int = 4, host_blocks: int = 0, **options: object
) -> tuple[Scheduler, FakeRunner]:
    manager = KVCacheManager(manager_blocks + 1, block_size, host_blocks=host_blocks)
    return Scheduler(manager, **options), FakeRunner(block_size)  # type: ignore[arg-type]


def assert_as_alone(request: Request) -> None:
    assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (request, request.error)
    got = list(request.tokens[len(request.prompt) :])
    assert got == alone(request.prompt, request.max_tokens, request.stop_token_ids)
