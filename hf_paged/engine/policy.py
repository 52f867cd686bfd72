"""In which order waiting requests are tried, and which running one gives way when blocks are short.

Small objects with one method. They see requests and, for the prefix policy, how long a prefix is stored; they change
nothing. Orders after SGLang (LPM with its fallback, retraction by shortest output) and vLLM (priority, then arrival).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from hf_paged.engine.request import Request
from hf_paged.errors import ConfigError

#: a queue longer than this is taken in order of arrival: matching each prompt at each step would cost too much
LPM_LONGEST_QUEUE = 128
#: steps in the queue that make up for one unit of priority
AGING_STEPS = 64
#: steps in the queue after which a request goes first whatever the policy says, and nobody may pass it
OVERDUE_STEPS = 512


class Policy(Protocol):
    """Orders the queue. ``matched(request)`` is the length of its longest stored prefix."""

    name: str

    def order(self, waiting: Iterable[Request], step: int, matched: Callable[[Request], int]) -> list[Request]: ...


class FCFS:
    """First come, first served. A preempted request keeps its place by its time of arrival."""

    name = "fcfs"

    def order(self, waiting: Iterable[Request], step: int, matched: Callable[[Request], int]) -> list[Request]:
        return sorted(waiting, key=lambda r: r.arrival)


class LongestPrefixMatch:
    """Those with the longest stored prefix first, so that it is used before it has to give way."""

    name = "lpm"

    def order(self, waiting: Iterable[Request], step: int, matched: Callable[[Request], int]) -> list[Request]:
        queue = list(waiting)
        if len(queue) > LPM_LONGEST_QUEUE:
            return sorted(queue, key=lambda r: r.arrival)
        return sorted(queue, key=lambda r: (*_overdue(r, step), -matched(r), r.arrival))


class Priority:
    """Lower ``priority`` first; waiting makes a request more urgent by one for every AGING_STEPS steps."""

    name = "priority"

    def order(self, waiting: Iterable[Request], step: int, matched: Callable[[Request], int]) -> list[Request]:
        return sorted(waiting, key=lambda r: (r.priority - (step - r.queued_at) // AGING_STEPS, r.arrival))


def is_overdue(request: Request, step: int) -> bool:
    """Whether nobody may pass the request any more."""
    return step - request.queued_at > OVERDUE_STEPS


def _overdue(request: Request, step: int) -> tuple[int, int]:
    """A key that puts overdue requests first, the oldest foremost."""
    return (0, request.arrival) if is_overdue(request, step) else (1, 0)


_POLICIES: dict[str, Policy] = {policy.name: policy for policy in (FCFS(), LongestPrefixMatch(), Priority())}


def policy_named(name: str) -> Policy:
    """The policy with this name. Raises ConfigError for an unknown one."""
    if name not in _POLICIES:
        raise ConfigError(f"policy={name!r} is not known; choose one of: {', '.join(_POLICIES)}")
    return _POLICIES[name]


def victim(running: Iterable[Request], by_priority: bool) -> Request:
    """The running request to give way.

    The least urgent; then the shortest output and the longest input, because that loses the fewest tokens that took a
    step each and returns the most blocks; then the latest arrival. One that has generated nothing since it was resumed
    comes last, so that two requests cannot push each other out for ever.
    """
    return min(
        running,
        key=lambda r: (
            r.num_tokens <= r.progress,
            -r.priority if by_priority else 0,
            r.num_output,
            -len(r.prompt),
            -r.arrival,
        ),
    )


class NewTokenRatio:
    """Which share of the tokens a request may still generate is reserved at admission (SGLang's estimate).

    It starts cautious, sinks a little with every step that preempts nobody, and is set from what the running requests
    have generated when somebody had to give way.
    """

    START, LEAST, DECAY_STEPS = 0.7, 0.098, 600

    def __init__(self) -> None:
        self.value = self.START

    def step(self) -> None:
        """A step went by without preemption."""
        self.value = max(self.LEAST, self.value - (self.START - self.LEAST) / self.DECAY_STEPS)

    def preempted(self, running: Iterable[Request]) -> None:
        """Somebody gave way: reserve in proportion to what the others turned out to need."""
        done = allowed = 0
        for request in running:
            done += request.num_output + 20
            allowed += request.max_tokens
        self.value = min(1.0, max(self.value, done / (allowed + 1)))

    def idle(self) -> None:
        self.value = self.START


class SwapCost:
    """Whether moving a sequence to the host and back takes less time than computing it again.

    Both are in proportion to its length, and both are estimates: computing by a moving average over steps that were
    mostly prompts, moving (out and in again) by its bytes and ``bytes_per_second``.
    """

    WEIGHT = 0.1

    def __init__(self, bytes_per_token: int, bytes_per_second: float) -> None:
        self.seconds_per_swap = 2 * bytes_per_token / bytes_per_second
        self._tokens = self._seconds = 0.0

    def step_took(self, tokens: int, seconds: float) -> None:
        """Take the length of one step that was mostly prompts."""
        self._tokens += self.WEIGHT * (tokens - self._tokens)
        self._seconds += self.WEIGHT * (seconds - self._seconds)

    def pays(self) -> bool:
        """Whether to swap; False before any prompt was computed."""
        return bool(self._tokens) and self.seconds_per_swap < self._seconds / self._tokens
