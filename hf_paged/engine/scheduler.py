"""Which tokens run in the next step. No torch: a step of hundreds of requests is planned in milliseconds or less.

The scheduler owns the requests and is the only one that changes them; blocks it moves only through KVCacheManager. A
step is ``schedule()``, which hands out a frozen plan, and ``update()``, which takes what came of it. In between the
plan belongs to whoever runs the model. The next step may be planned before the last one is known, as long as steps run
one after the other, in order: then a block that is given back is not written by anybody else before its last reader or
writer is done, and a request that turns out to have ended computes one token too many, which nobody sees or stores.

Running requests come first, then waiting ones, all under one budget of tokens (vLLM v1). A request is admitted when its
whole sequence fits next to what the running ones are expected to need (SGLang's new_token_ratio); when blocks run out
all the same, somebody gives way and later continues with what it had generated.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_paged.cache.block import num_blocks_for
from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.cache.manager import KVCacheManager
from hf_paged.cache.radix_tree import Namespace, common_prefix
from hf_paged.engine.plan import Chunk, Plan, SchedulerOutput
from hf_paged.engine.policy import NewTokenRatio, Policy, is_overdue, policy_named, victim
from hf_paged.engine.request import FinishReason, Preemption, Request, Status
from hf_paged.errors import InternalError, InvalidRequestError, OutOfBlocksError

#: a waiting request that shares this much with one being computed in this very step waits for it
_SHARED_WORTH_WAITING = 32
#: requests found waiting for a sibling after which a step looks no further
_MOST_POSTPONED = 32
#: output tokens beyond this are not reserved for (SGLang's CLIP_MAX_NEW_TOKENS)
_CLIP_NEW_TOKENS = 4096


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made, and the queue lengths now."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
    swaps: int = 0
    finished: int = 0
    computed_tokens: int = 0
    new_token_ratio: float = NewTokenRatio.START


class Scheduler:
    """Continuous batching over one KVCacheManager.

    Args:
        manager: the blocks.
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: tokens that may run in one step.
        max_model_len: tokens a sequence may have, or None.
        policy: "fcfs", "lpm" or "priority".
        whole_prompts: never split a prompt over steps, even past the budget (models that compute it only in one piece).
        stateful: requests have a state besides blocks, which the runner keeps.
        preemption: how a request gives way: "recompute" forgets what it has computed, "swap" moves it to the manager's
            host tier while that has room, "auto" swaps when ``swap_pays()``.
        others: whether somebody else holds blocks of the manager and will give them back, so that a request that does
            not fit even alone waits for that. Asked under the manager's lock.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        policy: str = "fcfs",
        whole_prompts: bool = False,
        stateful: bool = False,
        preemption: str = "recompute",
        swap_pays: Callable[[], bool] = lambda: True,
        others: Callable[[], bool] = lambda: False,
    ) -> None:
        self.manager = manager
        self.preemption, self._swap_pays, self._others = preemption, swap_pays, others
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.whole_prompts, self.stateful = whole_prompts, stateful
        self.policy: Policy = policy_named(policy)
        self.running: list[Request] = []
        self.waiting: dict[str, Request] = {}
        #: requests that wait for their parent's prompt to be computed
        self.attached: dict[str, Request] = {}
        self._under_way: dict[int, SchedulerOutput] = {}
        self._moves: list[tuple[str, str]] = []
        self._saves: list[tuple[str, Checkpoint]] = []
        self.ratio = NewTokenRatio()
        self.step = 0
        self._arrivals = 0
        self._stats = SchedulerStats()

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request, parent: Request | None = None) -> None:
        """Queue a request. With ``parent``, a request with the same prompt that has not begun, it waits for that
        prompt to be computed and goes on from it.

        Raises:
            InvalidRequestError: its prompt is empty or too long, or its id is in use.
            OutOfBlocksError: its prompt and one token would not fit into the whole pool.
        """
        if self.find(request.request_id) is not None:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; ids must be unique while they run")
        if not request.prompt:
            raise InvalidRequestError("the prompt has no tokens: a model needs at least one to go on from")
        length = len(request.prompt)
        if self.max_model_len is not None and length >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {length} tokens; with max_model_len={self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for one more"
            )
        usable = self.manager.stats().num_blocks - 1
        needed = num_blocks_for(length + (1 if request.max_tokens > 1 else 0), self.manager.block_size)
        if needed > usable:
            raise OutOfBlocksError(
                f"a prompt of {length} tokens, with what follows, needs {needed} blocks of {self.manager.block_size} "
                f"tokens, the whole pool has {usable}: give it more memory or num_blocks, or shorten the prompt",
                needed=needed,
                available=usable,
            )
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        request.queued_at, request.added_at = self.step, time.monotonic()
        if parent is not None and parent.request_id in self.waiting and not parent.num_output:
            request.parent = parent
            parent.siblings.append(request)
            self.attached[request.request_id] = request
        else:
            self.waiting[request.request_id] = request

    def find(self, request_id: str) -> Request | None:
        """The request with this id that has not ended, if there is one."""
        found = self.waiting.get(request_id) or self.attached.get(request_id)
        return found or next((r for r in self.running if r.request_id == request_id), None)

    @property
    def unfinished(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self.running, *self.waiting.values(), *self.attached.values()]

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it is. None, and no error, when there is none with this id."""
        request = self.find(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)
        return request

    def fail(self, request: Request, error: Exception) -> None:
        """End one request with an error; the others do not notice."""
        if not request.finished:
            request.error = error
            self._end(request, FinishReason.ERROR)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request for a reason that only its output shows (a stop string). That reason also takes the place of
        one that its last token gave."""
        request.stop_reason = stop_reason
        if request.finished:
            request.finish_reason = reason
        else:
            self._end(request, reason)

    def recompute_all(self, replaced: int, namespace: Namespace) -> None:
        """Forget the keys and values of running requests, because what computed them has changed; they go on from
        their tokens. ``namespace`` takes the place of the first ``replaced`` parts of theirs."""
        for request in [*self.running, *self.waiting.values()]:
            self._release(request)
        for request in list(self.running):
            self._requeue(request)
        for request in self.unfinished:
            request.namespace = (*namespace, *request.namespace[replaced:])

    def stateful_ids(self) -> set[str]:
        """Ids of requests that have begun and not lost what they computed, or begin with a step under way."""
        begun = {r.request_id for r in self.running} | {n for n, r in self.waiting.items() if r.swapped is not None}
        chunks = (chunk for output in self._under_way.values() for chunk in output.chunks)
        return begun | {request.request_id for chunk in chunks for request in chunk.also}

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> SchedulerStats:
        self._stats.running, self._stats.waiting = len(self.running), len(self.waiting) + len(self.attached)
        self._stats.steps, self._stats.new_token_ratio = self.step, self.ratio.value
        return self._stats

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The plan may be empty when nothing can run; ``ended`` then says why not."""
        self.step += 1
        plan = Plan(self.max_num_batched_tokens, self._under_way.values(), keeps_states=self.manager.keeps_states)
        with self.manager.lock:
            self._continue_running(plan)
            if not plan.preempted:
                self._admit_waiting(plan)
            while self._is_stuck(plan):
                stalled = victim(self.running, self.policy.name == "priority")
                self._preempt(stalled, plan, next(r for r in self.waiting.values() if not r.stalled))
                self._admit_waiting(plan)
        if plan.preempted:
            self._stats.preemptions += plan.preempted
            self.ratio.preempted(self.running)
        elif self.running:
            self.ratio.step()
        else:
            self.ratio.idle()
        for chunk in plan.chunks.values():
            chunk.request.num_in_flight += chunk.count
            chunk.request.num_pending += chunk.samples
        output = SchedulerOutput(
            self.step,
            tuple(plan.chunks.values()),
            tuple(plan.transfers),
            tuple(plan.ended),
            tuple(self._moves),
            tuple(self._saves),
        )
        self._moves.clear()
        self._saves.clear()
        if output.chunks:
            self._under_way[output.step] = output
        return output

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """Take the tokens that a step sampled, by request id; returns the requests that took one, in order. Those that
        are finished then ended with it.

        Requests that were aborted or failed while the step ran are passed over.
        """
        self._under_way.pop(output.step, None)
        taken: list[Request] = []
        for chunk in output.chunks:
            request = chunk.request
            resident = chunk.residency == request.residency
            if resident and not request.finished:
                self._computed(chunk)
                if not request.max_tokens and not request.num_missing:
                    self._end(request, FinishReason.LENGTH)
                    taken.append(request)
            if chunk.scores:
                request.num_scored = max(request.num_scored, min(chunk.start + chunk.count, len(request.prompt) - 1))
            if not chunk.samples:
                continue
            request.num_pending -= 1
            forked = self._fork(chunk, resident) if chunk.also else []
            if request.lockstep:
                for one in (request, *chunk.also):
                    one.stalled = True
                continue
            for one in (request, *forked):
                if not one.finished:
                    self._take(one, sampled)
                    taken.append(one)
        return taken

    def continue_beams(self, beams: Sequence[Request], origins: Sequence[tuple[int, int]]) -> None:
        """Let stalled requests go on: ``beams[i]`` from where ``beams[parent]`` is, with one more token, for
        ``(parent, token)`` in ``origins``. Blocks of a parent are shared; without any, its tokens are computed again.
        """
        with self.manager.lock:
            tables = {p: beams[p].table for p, _ in origins}
            forks = [None if (table := tables[p]) is None else self.manager.fork(table) for p, _ in origins]
            tokens = [array("q", [*beams[p].tokens, token]) for p, token in origins]
            computed = [beams[p].num_computed for p, _ in origins]
            for beam, (parent, _), table, own, count in zip(beams, origins, forks, tokens, computed, strict=True):
                self._release(beam)
                if self.stateful and table is not None and beams[parent] is not beam:
                    self._moves.append((beams[parent].request_id, beam.request_id))
                beam.tokens, beam.stalled = own, False
                if table is not None and beam.status is Status.WAITING:
                    self.manager.free(table)  # it waits for a place among the running ones
                elif table is not None:
                    beam.table, beam.num_computed = table, count
                elif beam.status is Status.RUNNING:
                    self._requeue(beam)

    def forget_steps(self) -> None:
        """No step under way will ever be known; requests that were in one cannot go on."""
        self._under_way.clear()
        self._moves.clear()
        self._saves.clear()
        if self.manager.keeps_states:
            self.manager.clear()  # some of the states that it knows of were never kept

    def _computed(self, chunk: Chunk) -> None:
        request = chunk.request
        if request.num_computed != chunk.start:
            raise InternalError(f"{request!r}: a step computed from {chunk.start}, out of turn")
        request.num_computed += chunk.count
        request.num_in_flight -= chunk.count
        self._stats.computed_tokens += chunk.count
        if chunk.count > 1 or not chunk.samples:
            self._store(request, chunk.keeps)  # every piece of a prompt at once, so that siblings find it

    def _fork(self, chunk: Chunk, resident: bool) -> list[Request]:
        """Let siblings go on from the table of the request whose prompt is computed, as many as may run; returns them.
        The others queue."""
        parent, forked = chunk.request, []
        for sibling in chunk.also:
            if sibling.parent is not parent:
                continue  # aborted, or on its own, since the step was planned
            self._detach(sibling)
            if not resident or parent.table is None or len(self.running) >= self.max_num_seqs:
                continue
            del self.waiting[sibling.request_id]
            sibling.table, sibling.status = self.manager.fork(parent.table), Status.RUNNING
            sibling.num_computed = chunk.start + chunk.count
            self.manager.truncate(sibling.table, sibling.num_computed)
            sibling.num_cached, sibling.scheduled_at = parent.num_cached, parent.scheduled_at
            sibling.forked = True
            self.running.append(sibling)
            forked.append(sibling)
        return forked

    def _detach(self, sibling: Request) -> None:
        """Make a sibling an ordinary waiting request."""
        assert sibling.parent is not None
        sibling.parent.siblings.remove(sibling)
        sibling.parent = None
        del self.attached[sibling.request_id]
        sibling.queued_at = self.step
        self.waiting[sibling.request_id] = sibling

    def _take(self, request: Request, sampled: Mapping[str, int]) -> None:
        """Append the token sampled for a request, and end it if it is its last."""
        token = sampled.get(request.request_id)
        if token is None:
            raise InternalError(f"{request!r}: the step sampled no token for it")
        request.tokens.append(token)
        reason = self._reason_to_end(request, token)
        if reason is not None:
            request.stop_reason = token if reason is FinishReason.STOP else None
            self._end(request, reason)

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_token_ids and request.num_output > request.min_tokens:
            return FinishReason.STOP
        if request.num_output >= request.max_tokens:
            return FinishReason.LENGTH
        if self.max_model_len is not None and request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _is_stuck(self, plan: Plan) -> bool:
        """Whether nobody goes on because stalled requests hold what the ones they wait for need."""
        if plan.chunks or plan.ended or self._under_way or not self.running:
            return False
        return all(r.stalled for r in self.running) and any(not r.stalled for r in self.waiting.values())

    # -- running requests ----------------------------------------------------------------------------------------

    def _continue_running(self, plan: Plan) -> None:
        # Those that miss one token first: a long prompt must not keep the others from their next token.
        for request in sorted(self.running, key=lambda r: r.num_missing > 1):
            if request.status is not Status.RUNNING or request.stalled:
                continue  # gave way to one before it, or waits for its other beams
            if request.num_pending and self._ends_with_pending(request):
                continue
            count = self._count(request, plan.budget)
            if count and not self._give_room(request, count, plan):
                continue
            if count:
                plan.add(request, count)

    def _ends_with_pending(self, request: Request) -> bool:
        """Whether the token being sampled is its last whatever it is, or all that can be done for now."""
        if request.lockstep:
            return True
        longest = len(request.prompt) + request.max_tokens
        if self.max_model_len is not None:
            longest = min(longest, self.max_model_len)
        return request.num_tokens + request.num_pending >= longest

    def _count(self, request: Request, budget: int) -> int:
        missing, start = request.num_missing, request.num_planned
        if self.whole_prompts and missing > 1:
            return missing if budget > 0 else 0
        count = min(missing, budget)
        if self.manager.keeps_states and start + self.manager.block_size <= request.num_stored < start + count:
            return request.num_stored - start  # it parts here from what is stored; others will, too
        return count

    def _give_room(self, request: Request, count: int, plan: Plan) -> bool:
        """Blocks for ``count`` more tokens of a running request, taken from others if need be. False: it gave way."""
        assert request.table is not None
        while True:
            try:
                self._append(request, count, plan)
            except OutOfBlocksError as error:
                loser = victim(self.running, self.policy.name == "priority")
                if len(self.running) == 1:
                    if request.num_pending:
                        return False  # the token under way may be its last, and then it needs no block
                    if self._others():
                        self._preempt(request, plan, request)
                        return False
                    request.error = error
                    self._end(request, FinishReason.ERROR)
                    plan.ended.append(request)
                    return False
                self._preempt(loser, plan, request)
                if loser is request:
                    return False
            else:
                return True

    def _append(self, request: Request, count: int, plan: Plan) -> None:
        assert request.table is not None
        before = self.manager.num_evicted_blocks
        plan.transfers += self.manager.append(request.table, count)
        request.evicted_blocks += self.manager.num_evicted_blocks - before

    def _preempt(self, request: Request, plan: Plan, needed_by: Request) -> None:
        if request.num_tokens < request.progress:
            raise InternalError(f"{request!r} lost tokens between two preemptions")
        plan.drop(request)
        plan.preempted += 1
        request.progress = request.num_tokens
        how = "swap" if self._swaps(request) else "recompute"
        request.preemptions.append(Preemption(self.step, how, needed_by.request_id))
        if needed_by is not request:
            needed_by.preempted.append(request.request_id)
        swapped = None
        if how == "swap":
            assert request.table is not None
            # what a step under way computes is there before the transfer is executed
            swapped, transfers = self.manager.swap_out(request.table, request.num_planned)
            plan.transfers += transfers
            self._stats.swaps += 1
        self._release(request)
        request.swapped = swapped
        self._requeue(request)

    def _swaps(self, request: Request) -> bool:
        tokens = request.num_planned
        if self.preemption == "recompute" or not tokens or not self.manager.can_swap_out(tokens):
            return False
        return self.preemption == "swap" or self._swap_pays()

    def _requeue(self, request: Request) -> None:
        """From the running list back to the queue."""
        request.status, request.queued_at = Status.WAITING, self.step
        self.running.remove(request)
        self.waiting[request.request_id] = request

    # -- waiting requests ----------------------------------------------------------------------------------------

    def _admit_waiting(self, plan: Plan) -> None:
        if not self.waiting or plan.budget <= 0 or len(self.running) >= self.max_num_seqs:
            return
        waiting = [request for request in self.waiting.values() if not request.stalled]
        postponed = 0
        for request in self.policy.order(waiting, self.step, self._matched):
            if plan.budget <= 0 or len(self.running) >= self.max_num_seqs:
                return
            if self._waits_for_a_sibling(request, plan):
                postponed += 1
                if postponed == _MOST_POSTPONED:
                    return  # looking at more would cost more than it brings
                continue
            if not self._admit(request, plan) and (self.policy.name == "fcfs" or is_overdue(request, self.step)):
                return  # nobody passes it

    def _matched(self, request: Request) -> int:
        match = self.manager.match_prefix(
            request.namespace, request.tokens, max_tokens=request.num_tokens - 1, record=False, touch=False
        )
        self.manager.release(match)
        return match.num_tokens

    def _waits_for_a_sibling(self, request: Request, plan: Plan) -> bool:
        """Whether much of its prompt is being computed right now by another, and will be there at the next step."""
        if not self.manager.prefix_caching or request.swapped is not None or request.scores_prompt:
            return False
        computed_now = [c for c in plan.prompts if c.request.namespace == request.namespace]
        if not computed_now:
            return False
        least = max(_SHARED_WORTH_WAITING, self._matched(request) + 1)
        return any(
            min(common_prefix(request.tokens, c.request.tokens, 0), c.start + c.count) >= least for c in computed_now
        )

    def _admit(self, request: Request, plan: Plan) -> bool:
        manager, size = self.manager, self.manager.block_size
        match = manager.match_prefix(
            request.namespace,
            request.tokens,
            max_tokens=self._reusable(request),
            record=False,
        )
        # The match is pinned, so what it holds counts neither as free nor as evictable.
        swapped, found, checkpoint = request.swapped, match.num_tokens, match.checkpoint
        if swapped is not None:
            found = found - found % size if found < swapped.num_tokens else found
        expected = plan.reserved_for(self.running, self._expected_blocks) + self._missing_blocks(request, found)
        expected += self._expected_blocks(request) - num_blocks_for(request.num_tokens, size)
        if self.running and expected > manager.num_available_blocks:
            manager.release(match)
            return False
        if not self.running and self._missing_blocks(request, found) > manager.num_available_blocks:
            found -= found % size  # without the copy of a block shared in part, it may fit after all
            if checkpoint is not None and found < match.num_tokens:
                found, checkpoint = 0, None
        apart = []
        for sibling in request.siblings:
            more = self._expected_blocks(sibling) - len(request.prompt) // size
            if expected + more > manager.num_available_blocks:
                apart.append(sibling)
            else:
                expected += more
        table = manager.adopt(match, found)
        if not manager.can_append([table], [request.num_tokens - found]):
            manager.free(table)
            if not self.running and not self._others():  # nothing will ever free more
                self._cannot_fit(request, plan)
            return False
        for sibling in apart:
            self._detach(sibling)  # it will wait for room of its own
        request.num_computed = found
        if swapped is not None:
            if found < swapped.num_tokens:
                plan.transfers += manager.swap_in(swapped, table)
                request.num_computed, checkpoint = swapped.num_tokens, None
            manager.discard(swapped)
            request.swapped = None
        request.table, request.status, request.num_stored = table, Status.RUNNING, match.num_stored
        count = self._count(request, plan.budget)
        self._append(request, count, plan)
        del self.waiting[request.request_id]
        if request.num_cached < 0:
            manager.count_query(request.num_tokens - 1, found)
            request.num_cached, request.scheduled_at = found, time.monotonic()
        self.running.append(request)
        plan.reserved = None
        plan.add(request, count, checkpoint)
        return True

    def _reusable(self, request: Request) -> int:
        """Tokens that need not be computed if their keys and values are stored."""
        if request.scores_prompt and request.num_scored < len(request.prompt) - 1:
            return request.num_scored
        return request.num_tokens - 1

    def _cannot_fit(self, request: Request, plan: Plan) -> None:
        size, available = self.manager.block_size, self.manager.num_available_blocks
        needed = num_blocks_for(request.num_tokens, size)
        request.error = OutOfBlocksError(
            f"a sequence of {request.num_tokens} tokens needs {needed} blocks of {size} tokens, but only {available} "
            "can be had: give the engine more memory or num_blocks",
            needed=needed,
            available=available,
        )
        self._end(request, FinishReason.ERROR)
        plan.ended.append(request)

    def _missing_blocks(self, request: Request, found: int) -> int:
        """Blocks a waiting request needs besides ``found`` tokens in shared ones; one shared in part is copied."""
        return num_blocks_for(request.num_tokens, self.manager.block_size) - found // self.manager.block_size

    def _expected_blocks(self, request: Request) -> int:
        """Blocks that a request is expected to hold before it ends, at least those of its present tokens."""
        left = min(request.max_tokens - request.num_output, _CLIP_NEW_TOKENS)
        return num_blocks_for(request.num_tokens + int(left * self.ratio.value), self.manager.block_size)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, request: Request, reason: FinishReason) -> None:
        with self.manager.lock:  # others that share the blocks see it running for as long as it holds any
            self._end_locked(request, reason)

    def _end_locked(self, request: Request, reason: FinishReason) -> None:
        for sibling in list(request.siblings):
            self._detach(sibling)
        if request.parent is not None:
            self._detach(request)
        if request.status is Status.RUNNING:
            self.running.remove(request)
            if reason is not FinishReason.ERROR:
                self._store(request, self._save(request))  # the next turn of a chat begins with it
        else:
            self.waiting.pop(request.request_id, None)
        self._release(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        self._stats.finished += 1

    def _store(self, request: Request, checkpoint: Checkpoint | None = None) -> None:
        if request.table is not None and request.num_computed:
            tokens = request.tokens[: request.num_computed]
            self.manager.commit(request.namespace, tokens, request.table, checkpoint)

    def _save(self, request: Request) -> Checkpoint | None:
        """Order the state that a request ends with. None where a step under way takes it further than its end, or gives
        it to another beam."""
        if not self.manager.keeps_states or request.num_in_flight or request.lockstep or not request.num_computed:
            return None
        checkpoint = Checkpoint()
        self._saves.append((request.request_id, checkpoint))
        return checkpoint

    def _release(self, request: Request) -> None:
        """The one place where what a request holds is given back."""
        if request.table is not None:
            self.manager.free(request.table)
        if request.swapped is not None:
            self.manager.discard(request.swapped)
        request.table = request.swapped = None
        request.num_computed = request.num_in_flight = 0
        request.residency += 1
