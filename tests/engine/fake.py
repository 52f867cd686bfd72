"""A runner without a model: block storage as a dict, and a next token that depends on every token before it.

It reads each sequence back through its blocks before it samples, so a block that was given away, overwritten, not
copied or not written shows as a wrong token at once.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Collection, Sequence

from hf_paged.cache.block import SwapIn, SwapOut
from hf_paged.cache.manager import KVCacheManager
from hf_paged.engine.invariants import check_books
from hf_paged.engine.plan import Chunk, SchedulerOutput
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
    """Runs plans over a simulated memory: slot -> (token, the tokens before it).

    Every request also has a state, as it has in recurrent models: the tokens that it has seen.
    """

    def __init__(self, block_size: int, stateful: bool = False) -> None:
        self.block_size, self.stateful = block_size, stateful
        self.memory: dict[int, tuple[int, int]] = {}
        self.host: dict[int, tuple[int, int]] = {}
        self.states: dict[str, list[int]] = {}

    def slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, output: SchedulerOutput, keep: Collection[str] | None = None) -> dict[str, int]:
        """Tokens sampled by a step. ``keep`` are the requests that had a state when it was planned."""
        for key, checkpoint in output.saves:
            checkpoint.state = self.states.pop(key)
        self.states.update({target: self.states[source] for source, target in output.moves})
        if keep is not None:
            self.states = {key: state for key, state in self.states.items() if key in keep}
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
            self._go_on(chunk, tokens)
            seen = [self.memory.get(self.slot(chunk.blocks, p)) for p in range(len(tokens))]
            want = [(token, p) for p, token in enumerate(tokens)]
            assert seen == want, f"{chunk.request!r} reads {seen}, not its own tokens"
            if chunk.samples:
                for request in (chunk.request, *chunk.also):
                    sampled[request.request_id] = next_token(tokens)
        return sampled

    def _go_on(self, chunk: Chunk, tokens: list[int]) -> None:
        if chunk.resumes is not None:
            assert chunk.start, "a checkpoint behind nothing"
            self.states[chunk.key] = chunk.resumes.state
        state = self.states[chunk.key] if chunk.start and self.stateful else tokens[: chunk.start]
        assert state == tokens[: chunk.start], f"{chunk.request!r} goes on from the state behind {state}"
        for key in (chunk.key, *chunk.forks):
            self.states[key] = tokens
        if chunk.keeps is not None:
            chunk.keeps.state = tokens


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
        self.under_way: tuple[SchedulerOutput, set[str]] | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.under_way is not None

    def step(
        self,
        before_update: Callable[[SchedulerOutput], None] = lambda _: None,
        after_update: Callable[[SchedulerOutput], list[Request]] = lambda _: [],
    ) -> tuple[list[Request], bool]:
        """One plan; returns the requests that ended or took a token, and whether anybody goes on."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        planned = output, scheduler.stateful_ids()
        if not scheduler.whole_prompts:
            assert output.num_tokens <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert len({c.request.request_id for c in output.chunks}) == len(output.chunks)
        progress = bool(output.chunks or output.ended or self.under_way)
        if self.overlap:
            self.under_way, under_way = planned if output.chunks or relied_on(output) else None, self.under_way
        else:
            under_way = planned
        touched = list(output.ended)
        ready, keep = under_way or (None, set())
        if ready is not None and (ready.chunks or relied_on(ready)):
            sampled = self.runner.run(ready, keep)
            before_update(ready)
            touched += scheduler.update(ready, sampled) + after_update(ready)
        return touched, progress


def relied_on(output: SchedulerOutput) -> bool:
    """Whether a step without chunks has to be run."""
    return bool(output.transfers or output.moves or output.saves)


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
    manager_blocks: int,
    block_size: int = 4,
    host_blocks: int = 0,
    max_checkpoints: int | None = None,
    **options: object,
) -> tuple[Scheduler, FakeRunner]:
    """With ``max_checkpoints`` requests have a state besides blocks."""
    stateful = max_checkpoints is not None
    manager = KVCacheManager(manager_blocks + 1, block_size, host_blocks=host_blocks, max_checkpoints=max_checkpoints)
    return Scheduler(manager, stateful=stateful, **options), FakeRunner(block_size, stateful)  # type: ignore[arg-type]


def assert_as_alone(request: Request) -> None:
    assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (request, request.error)
    got = list(request.tokens[len(request.prompt) :])
    assert got == alone(request.prompt, request.max_tokens, request.stop_token_ids)
