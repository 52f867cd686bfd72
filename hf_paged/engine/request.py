"""One request as the scheduler sees it: token ids and counters. No tensors, no text, no model.

Only the scheduler changes a request; everybody else reads it.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from hf_paged.cache.block_table import BlockTable
from hf_paged.cache.radix_tree import Namespace


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


@dataclass(eq=False, slots=True)
class Request:
    """A sequence that grows from its prompt to its end.

    There is no prefill phase and no decode phase: ``num_computed`` of ``num_tokens`` tokens have keys and values in
    blocks, and a step computes some of the difference. When none is left, the logits of the last token give a new one.

    Attributes:
        request_id: unique among the requests of one scheduler.
        prompt: token ids, at least one.
        max_tokens: tokens to generate at most.
        min_tokens: tokens before which a stop token does not end it.
        stop_token_ids: ids that end it; the last one generated is part of the output.
        priority: lower is more urgent; only the policy "priority" looks at it.
        namespace: prefixes are shared only within one.
        arrival: position in the order of arrival.
        tokens: prompt and output.
        num_computed: tokens whose keys and values are in ``table``.
        num_cached: tokens of the prompt that were found in the cache when it was first admitted.
        table: its blocks while it is running.
        preemptions: how often it had to give its blocks back.
        progress: tokens it had when it was last preempted; it grows from one preemption to the next.
        queued_at: step at which it last joined the queue.
        scheduled_at: seconds on the monotonic clock when it was first admitted.
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
    num_cached: int = -1
    table: BlockTable | None = None
    preemptions: int = 0
    progress: int = -1
    queued_at: int = 0
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
    def num_missing(self) -> int:
        """Tokens without keys and values; at least one while the request runs."""
        return len(self.tokens) - self.num_computed

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed}/{self.num_tokens} tokens)"
