"""Steps one after the other: plan, run, sample, tell the scheduler; on request with the next plan made meanwhile.

It owns the thread that runs the model when steps overlap, and the order of things: a step starts only when the results
of the one before it are in the scheduler's books, so its token ids are known and whoever ended is released. What
overlaps with a running step is planning the next one, and whatever the caller does with the events of the last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hf_paged.engine.policy import SwapCost
from hf_paged.engine.request import FinishReason, Request
from hf_paged.engine.scheduler import Scheduler, SchedulerOutput
from hf_paged.model.runner import ModelRunner, Prepared
from hf_paged.sampling.sampler import Sampled, SamplerState, sample


@dataclass(frozen=True)
class Event:
    """What a step brought for one completion: a token, the end, or both."""

    request: Request
    sampled: Sampled | None


@dataclass(frozen=True)
class _Step:
    """A planned step: ``rows`` are the requests that get a token and the row of logits each is sampled from."""

    plan: SchedulerOutput
    prepared: Prepared
    rows: Sequence[tuple[Request, SamplerState, int]]


Results = list[Sampled | Exception]


class Stepper:
    """Runs what a scheduler plans.

    Args:
        samplers: what is kept to sample each request, by request id; whoever adds requests fills it.
        overlap: run steps in a thread of its own, and plan one while the one before it runs.
        cost: told how long steps take.

    Not thread-safe: one thread calls it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        samplers: Mapping[str, SamplerState],
        *,
        overlap: bool = False,
        cost: SwapCost | None = None,
    ) -> None:
        self.scheduler, self.runner, self.samplers, self._cost = scheduler, runner, samplers, cost
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hf_paged step") if overlap else None
        self._running: tuple[_Step, Future[Results]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._running is not None

    def step(self) -> list[Event]:
        """Bring one step to its end; returns what it brought, in the order of its plan.

        Raises whatever the model raises; then no request that was in a step can go on, see :meth:`forget`.
        """
        step = self._plan()
        events = [Event(request, None) for request in step.plan.ended]
        if self._worker is None:
            if step.plan.chunks:
                events += self._take(step, self._execute(step))
            return events
        events += self.drain()
        if step.plan.transfers or any(not chunk.request.finished for chunk in step.plan.chunks):
            self._running = step, self._worker.submit(self._execute, step)
        else:  # everybody in it has ended with the step before
            self.scheduler.update(step.plan, {})
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

    # -- inside ----------------------------------------------------------------------------------------------------

    def _plan(self) -> _Step:
        plan = self.scheduler.schedule()
        rows: list[tuple[Request, SamplerState, int]] = []
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        for row, chunk in enumerate(sampling):
            rows += [(r, self.samplers[r.request_id], row) for r in (chunk.request, *chunk.also)]
        keep = self.scheduler.stateful_ids() if self.runner.recurrent else ()
        return _Step(plan, self.runner.prepare(plan.chunks, plan.transfers, keep), rows)

    def _execute(self, step: _Step) -> Results:
        start = time.perf_counter()
        logits = self.runner.run(step.prepared)
        if self._cost is not None:
            self._cost.step_took(step.plan.num_tokens, time.perf_counter() - start)
        if len(step.rows) != len(logits):
            logits = logits[torch.tensor([row for _, _, row in step.rows], device=logits.device)]
        return sample(logits, [state for _, state, _ in step.rows], [request.tokens for request, _, _ in step.rows])

    def _take(self, step: _Step, results: Results) -> list[Event]:
        """Tell the scheduler. A row that failed ends alone; one that ended meanwhile brings nothing."""
        events: list[Event] = []
        found: dict[str, Sampled] = {}
        for (request, _, _), result in zip(step.rows, results, strict=True):
            if not isinstance(result, Exception):
                found[request.request_id] = result
            elif not request.finished:
                self.scheduler.fail(request, result)
                events.append(Event(request, None))
        for request in self.scheduler.update(step.plan, {name: result.token for name, result in found.items()}):
            result = found[request.request_id]
            if result.stopped and not request.finished:
                self.scheduler.finish(request, FinishReason.STOP)
            events.append(Event(request, result))
        return events
