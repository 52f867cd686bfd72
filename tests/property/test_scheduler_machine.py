"""Arbitrary arrivals, lengths, aborts and failures against the scheduler, on a runner that checks every token's place.

Beam searches run among ordinary requests: the real BeamGroup with a search that goes on, ends and fails as drawn. After
every step: books balance, budgets hold, no request is ended twice, and none waits for ever: while there is work each
step brings somebody on, and a request that is passed over is overdue after a bounded number of steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_paged.engine.beams import BeamGroup
from hf_paged.engine.invariants import check_books
from hf_paged.engine.plan import SchedulerOutput
from hf_paged.engine.request import FinishReason, Request
from hf_paged.errors import OutOfBlocksError
from tests.engine.fake import VOCAB, Driver, alone, assert_as_alone, make

HEADS = [[(7 * i + h) % VOCAB for i in range(40)] for h in range(3)]
SCORES = torch.zeros(1)
#: beams of a search at most
WIDEST = 4
#: how a search goes on, round by round: for each beam the one it goes on from, and its token
ROUNDS = st.lists(
    st.lists(st.tuples(st.integers(0, WIDEST - 1), st.integers(0, VOCAB - 1)), min_size=WIDEST, max_size=WIDEST),
    max_size=9,
)


class ScriptedSearch:
    """Takes the place of a BeamSearch: goes on as it was told, and then ends, or fails. ``sequences`` are its beams."""

    def __init__(self, prompt: Sequence[int], beams: int, rounds: list[list[tuple[int, int]]], fails: bool) -> None:
        self.rounds = [[(parent % beams, token) for parent, token in origins[:beams]] for origins in rounds]
        self.fails = fails
        self.sequences = [list(prompt)] * beams

    def advance(self, scores: torch.Tensor) -> list[tuple[int, int]] | None:
        assert len(scores) == len(self.sequences)
        if not self.rounds:
            if self.fails:
                raise RuntimeError("a stopping criterion failed")
            return None
        origins = self.rounds.pop(0)
        self.sequences = [[*self.sequences[parent], token] for parent, token in origins]
        return origins


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, FinishReason] = {}
        #: by the id of each beam, its search and its place there
        self.beams: dict[str, tuple[BeamGroup, int]] = {}

    @initialize(
        blocks=st.integers(6, 40),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        name=st.sampled_from(["fcfs", "lpm", "priority"]),
        ratio=st.sampled_from([0.0, 0.1, 0.7]),
        host=st.sampled_from([0, 7, 60]),
        preemption=st.sampled_from(["swap", "recompute", "auto"]),
        overlap=st.booleans(),
        checkpoints=st.sampled_from([None, 1, 4, 1000]),
    )
    def start(
        self, blocks: int, seqs: int, budget: int, name: str, ratio: float, host: int, preemption: str, overlap: bool,
        checkpoints: int | None,
    ) -> None:  # fmt: skip
        self.blocks, self.host = blocks, host
        self.scheduler, runner = make(
            blocks, host_blocks=host, max_num_seqs=seqs, max_num_batched_tokens=budget, policy=name,
            preemption=preemption, swap_pays=lambda: len(self.requests) % 2 == 0, max_checkpoints=checkpoints,
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

    @rule(
        head=st.sampled_from(HEADS), shared=st.integers(0, 40), own=st.integers(1, 30), urgency=st.integers(0, 2),
        salt=st.sampled_from(["a", "a", "b"]), beams=st.integers(2, WIDEST), rounds=ROUNDS, more=st.integers(1, 9),
        fails=st.booleans(),
    )  # fmt: skip
    def search(
        self, head: list[int], shared: int, own: int, urgency: int, salt: str, beams: int,
        rounds: list[list[tuple[int, int]]], more: int, fails: bool,
    ) -> None:  # fmt: skip
        """A beam search arrives, as EngineCore.add_beams() adds one."""
        prompt = [*head[:shared], *((own * 3 + i) % VOCAB for i in range(own))]
        group = BeamGroup(ScriptedSearch(prompt, beams, rounds, fails))  # type: ignore[arg-type]
        for place in range(beams):
            request = Request(
                f"r{len(self.requests)}", array("q", prompt), len(rounds) + more, priority=urgency,
                namespace=(("salt", salt),), lockstep=True,
            )  # fmt: skip
            try:
                self.scheduler.add(request, group.requests[0] if place else None)
            except OutOfBlocksError:
                assert not group.requests and (len(prompt) + (len(rounds) + more > 1) + 3) // 4 > self.blocks
                return
            group.requests.append(request)
            self.requests[request.request_id] = request
            self.beams[request.request_id] = group, place

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        if self.requests:
            self._abort(self.requests[data.draw(st.sampled_from(sorted(self.requests)))])

    def _abort(self, request: Request) -> None:
        """End a request, or a search, as its client does by leaving."""
        for one in self.beams[request.request_id][0].requests if request.lockstep else [request]:
            was = one.finished
            assert (self.scheduler.abort(one.request_id) is one) == (not was)
            if not was:
                self._note(one, FinishReason.ABORT)

    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        alive = sorted(name for name, r in self.requests.items() if not r.finished)
        if alive:
            request = self.requests[data.draw(st.sampled_from(alive))]
            error = RuntimeError("a processor failed")
            if request.lockstep:  # known to its search, which ends when scores of any beam come next
                group, place = self.beams[request.request_id]
                group.offer(place, error)
            else:
                self.scheduler.fail(request, error)
                self._note(request, FinishReason.ERROR)

    @rule(abort_in_flight=st.booleans(), times=st.integers(1, 6))
    def step(self, abort_in_flight: bool, times: int) -> None:
        def abort(output: SchedulerOutput) -> None:
            if abort_in_flight and output.chunks and not output.chunks[0].request.finished:
                self._abort(output.chunks[0].request)

        for _ in range(times):
            busy = self.driver.has_work
            before = {name: (r.num_tokens, r.num_computed) for name, r in self.requests.items()}
            touched, progress = self.driver.step(abort, self._go_on)
            assert progress or not busy, f"nobody goes on: {before}"
            for request in touched:
                if request.finished:
                    self._note(request, request.finish_reason)

    def _go_on(self, output: SchedulerOutput) -> list[Request]:
        """Let searches take what a step brought their beams, as Stepper does."""
        groups: dict[BeamGroup, None] = {}
        for chunk in output.chunks:
            for request in (chunk.request, *chunk.also) if chunk.samples else ():
                if request.lockstep:
                    group, place = self.beams[request.request_id]
                    group.offer(place, SCORES)
                    groups[group] = None
        return [request for group in groups for request in group.go_on(self.scheduler)]

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
            if name in self.beams:
                group, place = self.beams[name]
                assert reason is not FinishReason.LENGTH
                assert {one.finish_reason for one in group.requests} == {reason}, "a search ends as a whole"
                if reason is FinishReason.STOP:
                    assert list(self.requests[name].tokens) == group.search.sequences[place]  # type: ignore[attr-defined]
            elif reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert_as_alone(self.requests[name])
            if reason is FinishReason.ERROR and isinstance(self.requests[name].error, OutOfBlocksError):
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
