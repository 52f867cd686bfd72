"""Arbitrary arrivals, lengths, aborts and failures against the scheduler, on a runner that checks every token's place.

After every step: books balance, budgets hold, no request is ended twice, and none waits for ever: while there is work
each step brings somebody on, and a request that is passed over is overdue after a bounded number of steps.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_paged.engine.invariants import check_books
from hf_paged.engine.plan import SchedulerOutput
from hf_paged.engine.request import FinishReason, Request
from hf_paged.errors import OutOfBlocksError
from tests.engine.fake import VOCAB, Driver, alone, assert_as_alone, make

HEADS = [[(7 * i + h) % VOCAB for i in range(40)] for h in range(3)]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, FinishReason] = {}

    @initialize(
        blocks=st.integers(6, 40),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        name=st.sampled_from(["fcfs", "lpm", "priority"]),
        ratio=st.sampled_from([0.0, 0.1, 0.7]),
        host=st.sampled_from([0, 7, 60]),
        preemption=st.sampled_from(["swap", "recompute", "auto"]),
        overlap=st.booleans(),
    )
    def start(
        self, blocks: int, seqs: int, budget: int, name: str, ratio: float, host: int, preemption: str, overlap: bool
    ) -> None:
        self.blocks, self.host = blocks, host
        self.scheduler, runner = make(
            blocks, host_blocks=host, max_num_seqs=seqs, max_num_batched_tokens=budget, policy=name,
            preemption=preemption, swap_pays=lambda: len(self.requests) % 2 == 0,
        )  # fmt: skip
        self.driver = Driver(self.scheduler, runner, overlap)
        self.scheduler.ratio.value = ratio

    @rule(
        head=st.sampled_from(HEADS), shared=st.integers(0, 40), own=st.integers(1, 30), tokens=st.integers(1, 24),
        urgency=st.integers(0, 2), stop=st.booleans(), salt=st.sampled_from(["a", "a", "b"]),
        copies=st.sampled_from([1, 1, 1, 2, 4]),
    )  # fmt: skip
    def arrive(
        self, head: list[int], shared: int, own: int, tokens: int, urgency: int, stop: bool, salt: str, copies: int
    ) -> None:  # fmt: skip
        prompt = [*head[:shared], *((own * 3 + i) % VOCAB for i in range(own))]
        parent = None
        for copy in range(copies):
            name = f"r{len(self.requests)}"
            # siblings sample the same tokens here, and end at different ones
            end = alone(prompt, tokens)[max(0, tokens // 2 - copy)]
            request = Request(
                name, array("q", prompt), tokens, stop_token_ids=frozenset({end} if stop else ()), priority=urgency,
                namespace=(("salt", salt),),
            )  # fmt: skip
            try:
                self.scheduler.add(request, parent)
            except OutOfBlocksError:
                assert (len(prompt) + (tokens > 1) + 3) // 4 > self.blocks
            else:
                self.requests[name] = request
                parent = parent or request

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            request = self.requests[name]
            was = request.finished
            assert (self.scheduler.abort(name) is request) == (not was)
            if not was:
                self._note(request, FinishReason.ABORT)

    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        alive = sorted(name for name, r in self.requests.items() if not r.finished)
        if alive:
            request = self.requests[data.draw(st.sampled_from(alive))]
            self.scheduler.fail(request, RuntimeError("a processor failed"))
            self._note(request, FinishReason.ERROR)

    @rule(abort_in_flight=st.booleans(), times=st.integers(1, 6))
    def step(self, abort_in_flight: bool, times: int) -> None:
        def abort(output: SchedulerOutput) -> None:
            if abort_in_flight and output.chunks and not output.chunks[0].request.finished:
                victim = output.chunks[0].request
                self.scheduler.abort(victim.request_id)
                self._note(victim, FinishReason.ABORT)

        for _ in range(times):
            busy = self.driver.has_work
            before = {name: (r.num_tokens, r.num_computed) for name, r in self.requests.items()}
            touched, progress = self.driver.step(abort)
            assert progress or not busy, f"nobody goes on: {before}"
            for request in touched:
                if request.finished:
                    self._note(request, request.finish_reason)

    def _note(self, request: Request, reason: FinishReason | None) -> None:
        assert request.request_id not in self.ended, f"{request!r} ended twice"
        assert reason is not None and request.finish_reason is reason
        self.ended[request.request_id] = reason

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            check_books(self.scheduler, [r for r in self.requests.values() if r.finished])
            for request in self.requests.values():
                assert request.finished == (request.request_id in self.ended)
                assert not self.scheduler.step - request.queued_at > 20_000

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.driver.has_work:
                break
            self.step(False, 1)
        assert not self.driver.has_work, f"starved: {self.scheduler.running} {self.scheduler.waiting}"
        for name, reason in self.ended.items():
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert_as_alone(self.requests[name])
            elif reason is FinishReason.ERROR and isinstance(self.requests[name].error, OutOfBlocksError):
                # it was the only one left, or nothing else could have made room
                assert (self.requests[name].num_tokens + 1 + 3) // 4 > self.blocks
        assert self.scheduler.manager.num_available_blocks == self.blocks
        assert self.scheduler.manager.stats().free_host_blocks == self.host


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase


def test_the_machine_notices_a_block_given_away_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: without copy-on-write two requests write into one block, and the runner reads a wrong token."""
    from hf_paged.cache.manager import KVCacheManager

    plan = KVCacheManager._plan
    monkeypatch.setattr(
        KVCacheManager, "_plan", lambda self, wishes: [(t, new, False) for t, new, _ in plan(self, wishes)]
    )
    scheduler, runner = make(60, max_num_batched_tokens=64)
    head = HEADS[0]
    for i in range(3):
        scheduler.add(Request(f"r{i}", array("q", [*head[:37], i]), 6))

    def run() -> None:
        for _ in range(40):
            output = scheduler.schedule()
            scheduler.update(output, runner.run(output))

    with pytest.raises(AssertionError, match="not its own tokens"):
        run()
