"""One request as the scheduler sees it: token ids and counters. No tensors, no text, no model.

Only the scheduler changes a request; everybody else reads it.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.radix_tree import Namespace
from hf_paged.cache.records import SwappedTable


class Status(enum.Enum):
    """Where a request is in its life. A preempted request waits again, with what it generated so far."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended: vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request gave its blocks back at ``step``, because ``needed_by`` (a request id) found none left; ``how`` is
    "recompute" or "swap"."""

    step: int
    how: str
    needed_by: str


@dataclass(eq=False, slots=True)
class Request:
    """A sequence that grows from its prompt to its end.

    There is no prefill phase and no decode phase: ``num_computed`` of ``num_tokens`` tokens have keys and values in
    blocks, and a step computes some of the difference. When none is left, the logits of the last token give a new one.
    Where steps overlap, a step is planned before the one before it is known: that one computes ``num_in_flight``
    tokens, and samples ``num_pending``.

    Attributes:
        request_id: unique among the requests of one scheduler.
        prompt: token ids, at least one.
        max_tokens: tokens to generate at most; with 0 it ends when its prompt is computed.
        min_tokens: tokens before which a stop token does not end it.
        stop_token_ids: ids that end it; the last one generated is part of the output.
        priority: lower is more urgent; only the policy "priority" looks at it.
        namespace: prefixes are shared only within one.
        arrival: position in the order of arrival.
        tokens: prompt and output.
        num_computed: tokens whose keys and values are in ``table``.
        num_in_flight: tokens after those that a step under way computes.
        num_pending: tokens, 0 or 1, that a step under way samples.
        num_cached: tokens of the prompt that were found in the cache when it was first admitted.
        num_stored: tokens that were stored when it was last admitted, whether or not it could go on from there.
        table: its blocks while it is running.
        swapped: what it has in the host tier while it waits to go on.
        residency: how often it has had blocks; tells a step's result for blocks it gave back from a present one.
        siblings: requests with the same prompt that get a copy of its table once the prompt is computed.
        parent: the request whose sibling it is, until then.
        forked: it went on from another one's table, and computed no prompt of its own.
        preemptions: each time it had to give its blocks back.
        preempted: ids of requests that gave way to it.
        evicted_blocks: blocks of stored prefixes that gave way to it.
        progress: tokens it had when it was last preempted; it grows from one preemption to the next.
        scores_prompt: the logits behind each token of its prompt are wanted, so that all of it must be computed.
        num_scored: positions of the prompt whose logits have been delivered.
        lockstep: it is told its next token by somebody who waits for others, too (a beam of a search). Meanwhile it is
            ``stalled``: its logits are known, and no step has anything to do for it.
        queued_at: step at which it last joined the queue.
        added_at, scheduled_at: seconds on the monotonic clock when it was queued and when it was first admitted.
    """

    request_id: str
    prompt: array[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    namespace: Namespace = ()
    arrival: int = 0
    tokens: array[int] = field(init=False)
    status: Status = Status.WAITING
    num_computed: int = 0
    num_in_flight: int = 0
    num_pending: int = 0
    num_cached: int = -1
    num_stored: int = 0
    table: BlockTable | None = None
    swapped: SwappedTable | None = None
    residency: int = 0
    siblings: list[Request] = field(default_factory=list)
    parent: Request | None = None
    forked: bool = False
    preemptions: list[Preemption] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    evicted_blocks: int = 0
    scores_prompt: bool = False
    num_scored: int = 0
    lockstep: bool = False
    stalled: bool = False
    progress: int = -1
    queued_at: int = 0
    added_at: float = 0.0
    scheduled_at: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = array("q", self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_planned(self) -> int:
        """Tokens whose keys and values are in ``table`` once the steps under way are done."""
        return self.num_computed + self.num_in_flight

    @property
    def num_missing(self) -> int:
        """Tokens that no step computes yet; at least one while the request runs and is not stalled."""
        return len(self.tokens) + self.num_pending - self.num_computed - self.num_in_flight

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed}/{self.num_tokens} tokens)"
