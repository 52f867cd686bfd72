"""What callers get back: vLLM's shapes and names, so that its users can switch the import."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_paged.engine.request import Preemption
from hf_paged.sampling.sampler import Logprob


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    ``finish_reason`` is "stop", "length", "abort" or "error"; ``stop_reason`` the stop text or token id that ended it,
    None for the model's own end of sequence. ``token_ids`` holds every token generated, ``text`` ends before a stop
    text. ``logprobs`` has one dict a token when they were asked for, and ``cumulative_logprob`` then their sum over the
    chosen tokens. With ``echo``, ``text``, ``token_ids`` and ``logprobs`` begin with the prompt's (None for its first
    token, which nothing comes before).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestMetrics:
    """Seconds on the monotonic clock, and counts, of one request (of all its completions)."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """A request and what it has so far. ``error`` is set when it ended with one; its outputs then hold what came first.

    ``num_cached_tokens`` are tokens of the prompt that earlier requests had computed. ``prompt_logprobs``, where asked
    for, has None for the first token and a dict for each that follows.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: Exception | None = None


@dataclass(frozen=True)
class Explanation:
    """What became of one completion, and why.

    Attributes:
        request_id: of the completion: the request's, a dash and the completion's number.
        status: "waiting", "running" or "finished".
        finish_reason: why it is finished, as in its output ("stop", "length", "abort" or "error"); None before.
        prompt_tokens, output_tokens: so far.
        cached_tokens: tokens of the prompt that were found in the cache, None before it was first admitted.
        why_not_more: why it was not more than that.
        blocks, host_blocks: blocks it holds now, and blocks of the host tier.
        queue_time: seconds until it was first admitted, or until now.
        preemptions: each time it gave way, in which way, and to whom.
        preempted: ids of completions that gave way to it.
        evicted_blocks: blocks of stored prefixes that gave way to it.
    """

    request_id: str
    status: str
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    why_not_more: str
    blocks: int
    host_blocks: int
    queue_time: float
    preemptions: list[Preemption]
    preempted: list[str]
    evicted_blocks: int
