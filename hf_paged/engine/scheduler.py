"""Which tokens run in the next step. No torch: a step of hundreds of requests is planned in milliseconds or less.

The scheduler owns the requests and is the only one that changes them; blocks it moves only through KVCacheManager. A
step is ``schedule()``, which hands out a frozen plan, and ``update()``, which takes what came of it. In between the
plan belongs to whoever runs the model.

Running requests come first, then waiting ones, all under one budget of tokens (vLLM v1). A request is admitted when its
whole sequence fits next to what the running ones are expected to need (SGLang's new_token_ratio); when blocks run out
all the same, somebody gives way and later continues with what it had generated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hf_paged.cache.block import BlockCopy, num_blocks_for
from hf_paged.cache.manager import KVCacheManager
from hf_paged.cache.radix_tree import Namespace
from hf_paged.engine.policy import NewTokenRatio, Policy, is_overdue, policy_named, victim
from hf_paged.engine.request import FinishReason, Request, Status
from hf_paged.errors import InternalError, InvalidRequestError, OutOfBlocksError

#: a waiting request that shares this much with one being computed in this very step waits for it
_SHARED_WORTH_WAITING = 32
#: output tokens beyond this are not reserved for (SGLang's CLIP_MAX_NEW_TOKENS)
_CLIP_NEW_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a request that runs in one step: positions ``start : start + count``.

    ``blocks`` are its physical blocks, logical index 0 first, enough for ``start + count`` tokens. With ``samples`` the
    last position's logits give the next token.
    """

    request: Request
    start: int
    count: int
    blocks: tuple[int, ...]
    samples: bool

    @property
    def key(self) -> str:
        return self.request.request_id

    @property
    def token_ids(self) -> Sequence[int]:
        return self.request.tokens[self.start : self.start + self.count]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. ``copies`` have to be executed, in order, before anything is written. ``ended`` are requests that
    could not go on and ended with an error while the step was planned."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...]
    ended: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made, and the queue lengths now."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
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
    ) -> None:
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.whole_prompts = whole_prompts
        self.policy: Policy = policy_named(policy)
        self.running: list[Request] = []
        self.waiting: dict[str, Request] = {}
        self.ratio = NewTokenRatio()
        self.step = 0
        self._arrivals = 0
        self._stats = SchedulerStats()

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: its prompt is empty or too long, or its id is in use.
            OutOfBlocksError: its prompt and one token would not fit into the whole pool.
        """
        if request.request_id in self.waiting or any(r.request_id == request.request_id for r in self.running):
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
                f"a prompt of {length} tokens needs {needed} blocks of {self.manager.block_size} tokens, the whole "
                f"pool has {usable}: give the engine more memory or num_blocks, or shorten the prompt",
                needed=needed,
                available=usable,
            )
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        request.queued_at = self.step
        self.waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it is. None, and no error, when there is none with this id."""
        request = self.waiting.get(request_id) or next((r for r in self.running if r.request_id == request_id), None)
        if request is not None:
            self._end(request, FinishReason.ABORT)
        return request

    def fail(self, request: Request, error: Exception) -> None:
        """End one request with an error; the others do not notice."""
        if not request.finished:
            request.error = error
            self._end(request, FinishReason.ERROR)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request for a reason that only its output shows (a stop string)."""
        if not request.finished:
            request.stop_reason = stop_reason
            self._end(request, reason)

    def recompute_all(self, replaced: int, namespace: Namespace) -> None:
        """Forget the keys and values of running requests, because what computed them has changed; they go on from
        their tokens. ``namespace`` takes the place of the first ``replaced`` parts of theirs."""
        for request in list(self.running):
            self._release(request)
            request.status, request.queued_at = Status.WAITING, self.step
            self.running.remove(request)
            self.waiting[request.request_id] = request
        for request in self.waiting.values():
            request.namespace = (*namespace, *request.namespace[replaced:])

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> SchedulerStats:
        self._stats.running, self._stats.waiting = len(self.running), len(self.waiting)
        self._stats.steps, self._stats.new_token_ratio = self.step, self.ratio.value
        return self._stats

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The plan may be empty when nothing can run; ``ended`` then says why not."""
        self.step += 1
        plan = _Plan(self.max_num_batched_tokens)
        with self.manager.lock:
            self._continue_running(plan)
            if not plan.preempted:
                self._admit_waiting(plan)
        if plan.preempted:
            self._stats.preemptions += plan.preempted
            self.ratio.preempted(self.running)
        elif self.running:
            self.ratio.step()
        else:
            self.ratio.idle()
        return SchedulerOutput(self.step, tuple(plan.chunks.values()), tuple(plan.copies), tuple(plan.ended))

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """Take the tokens that a step sampled, by request id; returns the requests that ended with it.

        Requests that were aborted or failed while the step ran are passed over.
        """
        ended = []
        for chunk in output.chunks:
            request = chunk.request
            if request.status is not Status.RUNNING:
                continue
            if request.num_computed != chunk.start:
                raise InternalError(f"{request!r}: a step computed from {chunk.start}, out of turn")
            request.num_computed += chunk.count
            self._stats.computed_tokens += chunk.count
            if chunk.count > 1 or not chunk.samples:
                self._store(request)  # every piece of a prompt at once, so that siblings find it
            if not chunk.samples:
                continue
            if request.request_id not in sampled:
                raise InternalError(f"{request!r}: the step sampled no token for it")
            token = sampled[request.request_id]
            request.tokens.append(token)
            reason = self._reason_to_end(request, token)
            if reason is not None:
                request.stop_reason = token if reason is FinishReason.STOP else None
                self._end(request, reason)
                ended.append(request)
        return ended

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_token_ids and request.num_output > request.min_tokens:
            return FinishReason.STOP
        if request.num_output >= request.max_tokens:
            return FinishReason.LENGTH
        if self.max_model_len is not None and request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    # -- running requests ----------------------------------------------------------------------------------------

    def _continue_running(self, plan: _Plan) -> None:
        # Those that miss one token first: a long prompt must not keep the others from their next token.
        for request in sorted(self.running, key=lambda r: r.num_missing > 1):
            if request.status is not Status.RUNNING:
                continue  # gave way to one before it
            count = self._count(request, plan.budget)
            if count and not self._give_room(request, count, plan):
                continue
            if count:
                plan.add(request, count)

    def _count(self, request: Request, budget: int) -> int:
        if self.whole_prompts and request.num_missing > 1:
            return request.num_missing if budget > 0 else 0
        return min(request.num_missing, budget)

    def _give_room(self, request: Request, count: int, plan: _Plan) -> bool:
        """Blocks for ``count`` more tokens of a running request, taken from others if need be. False: it gave way."""
        assert request.table is not None
        while True:
            try:
                plan.copies += self.manager.append(request.table, count)
            except OutOfBlocksError as error:
                loser = victim(self.running, self.policy.name == "priority")
                if len(self.running) == 1:
                    request.error = error
                    self._end(request, FinishReason.ERROR)
                    plan.ended.append(request)
                    return False
                self._preempt(loser, plan)
                if loser is request:
                    return False
            else:
                return True

    def _preempt(self, request: Request, plan: _Plan) -> None:
        if request.num_tokens < request.progress:
            raise InternalError(f"{request!r} lost tokens between two preemptions")
        plan.drop(request)
        plan.preempted += 1
        request.preemptions += 1
        request.progress = request.num_tokens
        self._release(request)
        request.status, request.queued_at = Status.WAITING, self.step
        self.running.remove(request)
        self.waiting[request.request_id] = request

    # -- waiting requests ----------------------------------------------------------------------------------------

    def _admit_waiting(self, plan: _Plan) -> None:
        if not self.waiting or plan.budget <= 0 or len(self.running) >= self.max_num_seqs:
            return
        for request in self.policy.order(self.waiting.values(), self.step, self._matched):
            if plan.budget <= 0 or len(self.running) >= self.max_num_seqs:
                return
            if self._waits_for_a_sibling(request, plan):
                continue
            if not self._admit(request, plan) and (self.policy.name == "fcfs" or is_overdue(request, self.step)):
                return  # nobody passes it

    def _matched(self, request: Request) -> int:
        match = self.manager.match_prefix(
            request.namespace, request.tokens, max_tokens=request.num_tokens - 1, record=False
        )
        self.manager.release(match)
        return match.num_tokens

    def _waits_for_a_sibling(self, request: Request, plan: _Plan) -> bool:
        """Whether much of its prompt is being computed right now by another, and will be there at the next step."""
        computed_now = [c for c in plan.chunks.values() if c.count > 1 and c.request.namespace == request.namespace]
        if not computed_now or not self.manager.prefix_caching:
            return False
        least = max(_SHARED_WORTH_WAITING, self._matched(request) + 1)
        return any(_common(c.request.tokens, request.tokens, c.start + c.count) >= least for c in computed_now)

    def _admit(self, request: Request, plan: _Plan) -> bool:
        manager, size = self.manager, self.manager.block_size
        match = manager.match_prefix(
            request.namespace,
            request.tokens,
            max_tokens=request.num_tokens - 1,
            record=request.num_cached < 0,
        )
        # The match is pinned, so what it holds counts neither as free nor as evictable.
        missing = self._missing_blocks(request, match.num_tokens)
        expected = missing + self._expected_blocks(request) - num_blocks_for(request.num_tokens, size)
        for running in self.running:
            assert running.table is not None
            expected += max(0, self._expected_blocks(running) - len(running.table.blocks))
        if self.running and expected > manager.num_available_blocks:
            manager.release(match)
            return False
        found = match.num_tokens
        if not self.running and self._missing_blocks(request, found) > manager.num_available_blocks:
            found -= found % size  # without the copy of a block shared in part, it may fit after all
        table = manager.adopt(match, found)
        request.num_computed = found
        count = self._count(request, plan.budget)
        if not manager.can_append([table], [request.num_missing]):
            manager.free(table)
            request.num_computed = 0
            if not self.running:  # nothing will ever free more
                needed = num_blocks_for(request.num_tokens, size)
                request.error = OutOfBlocksError(
                    f"a sequence of {request.num_tokens} tokens needs {needed} blocks of {size} tokens, but only "
                    f"{manager.num_available_blocks} can be had: give the engine more memory or num_blocks",
                    needed=needed,
                    available=manager.num_available_blocks,
                )
                self._end(request, FinishReason.ERROR)
                plan.ended.append(request)
            return False
        plan.copies += manager.append(table, count)
        del self.waiting[request.request_id]
        if request.num_cached < 0:
            request.num_cached, request.scheduled_at = found, time.monotonic()
        request.table, request.status = table, Status.RUNNING
        self.running.append(request)
        plan.add(request, count)
        return True

    def _missing_blocks(self, request: Request, found: int) -> int:
        """Blocks a waiting request needs besides ``found`` tokens in shared ones; one shared in part is copied."""
        return num_blocks_for(request.num_tokens, self.manager.block_size) - found // self.manager.block_size

    def _expected_blocks(self, request: Request) -> int:
        """Blocks that a request is expected to hold before it ends, at least those of its present tokens."""
        left = min(request.max_tokens - request.num_output, _CLIP_NEW_TOKENS)
        return num_blocks_for(request.num_tokens + int(left * self.ratio.value), self.manager.block_size)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
            if reason is not FinishReason.ERROR:
                self._store(request)  # the next turn of a chat begins with it
        else:
            self.waiting.pop(request.request_id, None)
        self._release(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        self._stats.finished += 1

    def _store(self, request: Request) -> None:
        if request.table is not None and request.num_computed:
            self.manager.commit(request.namespace, request.tokens[: request.num_computed], request.table)

    def _release(self, request: Request) -> None:
        """The one place where a request's blocks are given back."""
        if request.table is not None:
            self.manager.free(request.table)
        request.table, request.num_computed = None, 0


class _Plan:
    """A step in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[str, Chunk] = {}
        self.copies: list[BlockCopy] = []
        self.ended: list[Request] = []
        self.preempted = 0

    def add(self, request: Request, count: int) -> None:
        assert request.table is not None
        start = request.num_computed
        self.budget -= count
        self.chunks[request.request_id] = Chunk(
            request, start, count, tuple(request.table.blocks), samples=start + count == request.num_tokens
        )

    def drop(self, request: Request) -> None:
        chunk = self.chunks.pop(request.request_id, None)
        if chunk is not None:
            self.budget += chunk.count


def _common(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Length of the common prefix, at most ``limit``."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # slices compare fast; the first difference lies in between
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


def check_books(scheduler: Scheduler, others: Iterable[Request] = ()) -> None:
    """Raise InternalError unless queue, running list and blocks agree. For tests, after every step."""
    for request in scheduler.running:
        if request.status is not Status.RUNNING or request.table is None or request.num_missing < 1:
            raise InternalError(f"{request!r} is in the running list")
        if request.table.num_tokens < request.num_computed:
            raise InternalError(f"{request!r} has computed more tokens than its table holds")
    for request in [*scheduler.waiting.values(), *others]:
        if request.table is not None:
            raise InternalError(f"{request!r} does not run and holds blocks")
    scheduler.manager.check_invariants()
