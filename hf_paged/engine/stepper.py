"""Steps one after the other: plan, run, sample, tell the scheduler; on request with the next plan made meanwhile.

It owns the thread that runs the model when steps overlap, and the order of things: a step starts only when the results
of the one before it are in the scheduler's books, so its token ids are known and whoever ended is released. What
overlaps with a running step is planning the next one, and whatever the caller does with the events of the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from hf_paged.engine.beams import Beam, BeamGroup
from hf_paged.engine.plan import Chunk, SchedulerOutput
from hf_paged.engine.policy import SwapCost
from hf_paged.engine.request import FinishReason, Request
from hf_paged.engine.scheduler import Scheduler
from hf_paged.model.runner import ModelRunner, Prepared
from hf_paged.sampling.beams import log_probabilities
from hf_paged.sampling.logprobs import Logprob, token_logprobs
from hf_paged.sampling.sampler import Sampled, SamplerState, sample

#: rows of logits that prompt tokens are scored with at once
_SCORED_ROWS = 64


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens from position ``start`` on."""

    start: int
    logprobs: list[dict[int, Logprob]]


@dataclass(frozen=True)
class Event:
    """What a step brought for one completion: a token, scores of its prompt, its end, or several of these."""

    request: Request
    sampled: Sampled | None = None
    prompt: PromptScores | None = None


@dataclass(frozen=True)
class _Row:
    """A row of logits that a request's next token comes from."""

    request: Request
    state: SamplerState | Beam
    logits: int


@dataclass(frozen=True)
class _Step:
    """A planned step. ``scored`` are the parts of prompts to score, each with its first row of logits and the number of
    alternatives wanted."""

    plan: SchedulerOutput
    prepared: Prepared
    rows: Sequence[_Row]
    scored: Sequence[tuple[Chunk, int, int]]


@dataclass(frozen=True)
class _Results:
    """What came of a step; ``sampled`` and ``beams`` by position in its rows."""

    sampled: dict[int, Sampled | Exception] = field(default_factory=dict)
    beams: dict[int, torch.Tensor | Exception] = field(default_factory=dict)
    prompts: list[tuple[Request, PromptScores]] = field(default_factory=list)


class Stepper:
    """Runs what a scheduler plans.

    Args:
        samplers: what is kept to choose each request's tokens, by request id; whoever adds requests fills it.
        overlap: run steps in a thread of its own, and plan one while the one before it runs.
        shared: threads beside this one take blocks from the same manager, so blocks are copied before any of these can
            take the blocks that copies free.
        cost: told how long steps take.

    Not thread-safe: one thread calls it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        samplers: Mapping[str, SamplerState | Beam],
        *,
        overlap: bool = False,
        shared: bool = False,
        cost: SwapCost | None = None,
    ) -> None:
        self.scheduler, self.runner, self.samplers, self._cost = scheduler, runner, samplers, cost
        self._shared = shared
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hf_paged step") if overlap else None
        self._running: tuple[_Step, Future[_Results]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._running is not None

    def step(self) -> list[Event]:
        """Bring one step to its end; returns what it brought, in the order of its plan.

        Raises whatever the model raises; then no request that was in a step can go on, see :meth:`forget`.
        """
        step = self._plan()
        events = [Event(request) for request in step.plan.ended]
        if self._worker is not None:
            events += self.drain()
        if not step.plan.runs:  # there is nothing, or everybody in it has ended with the step before
            self.scheduler.update(step.plan, {})
        elif self._worker is None:
            events += self._take(step, self._execute(step))
        else:
            self._running = step, self._worker.submit(self._execute, step)
        return events

    def drain(self) -> list[Event]:
        """Wait for the step under way, if there is one, and take its results without starting another."""
        if self._running is None:
            return []
        (step, future), self._running = self._running, None
        return self._take(step, future.result())

    def forget(self) -> None:
        """After a failure: wait until nothing runs any more, and give up what was planned."""
        if self._running is not None:
            (_, future), self._running = self._running, None
            future.exception()
        self.scheduler.forget_steps()

    def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.shutdown()

    # -- planning --------------------------------------------------------------------------------------------------

    def _plan(self) -> _Step:
        with self.scheduler.manager.lock:
            plan = self.scheduler.schedule()
            if self._shared:
                self.runner.transfer(plan.transfers)
        rows: list[_Row] = []
        scored: list[tuple[Chunk, int, int]] = []
        end = 0
        for chunk in plan.chunks:
            end += chunk.num_logits
            if chunk.samples:
                rows += [_Row(r, self.samplers[r.request_id], end - 1) for r in (chunk.request, *chunk.also)]
            if chunk.scores:
                scored.append((chunk, end - chunk.count, self._alternatives(chunk.request)))
        keep = self.scheduler.stateful_ids() if self.runner.recurrent else ()
        transfers = () if self._shared else plan.transfers
        prepared = self.runner.prepare(plan.chunks, transfers, keep, plan.moves, plan.saves)
        return _Step(plan, prepared, rows, scored)

    def _alternatives(self, request: Request) -> int:
        params = self.samplers[request.request_id].params
        return max(params.prompt_logprobs or 0, params.logprobs or 0 if params.echo else 0)

    # -- running, perhaps in the other thread ----------------------------------------------------------------------

    def _execute(self, step: _Step) -> _Results:
        start = time.perf_counter()
        logits = self.runner.run(step.prepared)
        if self._cost is not None and step.plan.num_tokens > 2 * len(step.plan.chunks):
            self._cost.step_took(step.plan.num_tokens, time.perf_counter() - start)
        results = _Results()
        with torch.no_grad():
            sampled = [i for i, row in enumerate(step.rows) if isinstance(row.state, SamplerState)]
            wanted = [step.rows[i].logits for i in sampled]
            chosen = sample(
                logits if wanted == list(range(len(logits))) else logits[wanted],
                [row.state for row in step.rows if isinstance(row.state, SamplerState)],
                [step.rows[i].request.tokens for i in sampled],
            )
            results.sampled.update(zip(sampled, chosen, strict=True))
            for i, row in enumerate(step.rows):
                if isinstance(row.state, Beam):
                    results.beams[i] = log_probabilities(logits[row.logits], row.state.processors, row.request.tokens)
            for chunk, first, count in step.scored:
                found = list(_scores(logits, chunk, first, count))
                results.prompts.append((chunk.request, PromptScores(chunk.start + 1, found)))
        return results

    # -- results ---------------------------------------------------------------------------------------------------

    def _take(self, step: _Step, results: _Results) -> list[Event]:
        """Tell the scheduler. A row that failed ends alone; one that ended meanwhile brings nothing."""
        events = [Event(request, prompt=prompt) for request, prompt in results.prompts]
        found: dict[str, Sampled] = {}
        for i, result in results.sampled.items():
            request = step.rows[i].request
            if not isinstance(result, Exception):
                found[request.request_id] = result
            elif not request.finished:
                self.scheduler.fail(request, result)
                events.append(Event(request))
        for request in self.scheduler.update(step.plan, {name: result.token for name, result in found.items()}):
            sampled = found.get(request.request_id)
            if sampled is not None and sampled.stopped and not request.finished:
                self.scheduler.finish(request, FinishReason.STOP)
            events.append(Event(request, sampled))
        groups: dict[BeamGroup, None] = {}
        for i, scores in results.beams.items():
            beam = step.rows[i].state
            assert isinstance(beam, Beam)
            beam.group.offer(beam.index, scores)
            groups[beam.group] = None
        for group in groups:
            events += [Event(request) for request in group.go_on(self.scheduler)]
        return events


def _scores(logits: torch.Tensor, chunk: Chunk, first: int, count: int) -> Iterator[dict[int, Logprob]]:
    """Log-probabilities of the prompt's tokens after each position of ``chunk``; its logits begin at row ``first``."""
    following = chunk.request.prompt[chunk.start + 1 : chunk.start + 1 + chunk.count].tolist()
    for start in range(0, len(following), _SCORED_ROWS):
        part = following[start : start + _SCORED_ROWS]
        yield from token_logprobs(logits[first + start : first + start + len(part)], part, count)
