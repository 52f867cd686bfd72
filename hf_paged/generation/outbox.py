"""Requests of transformers' continuous batching on their way, and their outputs until somebody takes them.

It turns what an EngineLoop tells into stock's GenerationOutputs, and owns the lock under which names are given, outputs
wait and handlers are called. The manager in ``batching_manager`` is its only user.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_paged.compat import GenerationOutput, RequestStatus
from hf_paged.engine.async_llm import call_in
from hf_paged.engine.outputs import CompletionOutput, RequestOutput
from hf_paged.errors import InvalidRequestError

#: seconds between looks whether anything can still come, for whoever waits for a result
GLANCE = 0.2


@dataclass(eq=False)
class Queued:
    """A request on its way: what it was given, and when the tokens of its ``n`` completions came.

    ``parts`` are the ids of the completions: the request's own, then stock's names for its children.
    """

    name: str
    prompt: list[int]
    streaming: bool
    record_timestamps: bool
    n: int
    created: float = field(default_factory=time.perf_counter)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.parts = [self.name, *(f"{self.name}__child#{i}" for i in range(self.n - 1))]
        self.timestamps: list[list[float]] = [[] for _ in self.parts]


class Outbox:
    """What was asked for and has not ended, and what was delivered and is not taken. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._requests: dict[str, Queued] = {}
        self._handlers: dict[str, tuple[Callable[[Any], None], asyncio.AbstractEventLoop]] = {}
        #: outputs that nobody has taken, by the id of their completion
        self._results: dict[str, deque[Any]] = {}

    @property
    def has_results(self) -> bool:
        """Whether outputs wait to be taken."""
        return bool(self._results)

    def is_known(self, part: str) -> bool:
        """Whether a completion, by its id, is on its way."""
        return part.partition("__child#")[0] in self._requests

    def __len__(self) -> int:
        """Requests on their way."""
        return len(self._requests)

    def add(self, name: str | None, **fields: Any) -> Queued:
        """A request under ``name``, or one that no request, handler or waiting output has.

        Raises InvalidRequestError for a name that is in use.
        """
        with self._changed:
            request = Queued(self._new_name() if name is None else name, **fields)
            if request.name in self._requests:
                raise InvalidRequestError(f"request id {name!r} is in use; ids must be unique while they run")
            self._requests[request.name] = request
            return request

    def _new_name(self) -> str:
        used = (self._requests, self._results, self._handlers)
        names = (f"req_{number}" for number in self._numbers)
        return next(name for name in names if not any(name in those for those in used))

    def remove(self, request: Queued) -> None:
        """Take a request from those on their way, unless its name is another's by now."""
        with self._changed:
            if self._requests.get(request.name) is request:
                del self._requests[request.name]

    def discard(self, requests: Sequence[Queued]) -> None:
        """Forget requests, and what they delivered."""
        with self._changed:
            for request in requests:
                self.remove(request)
                for part in request.parts:
                    self._results.pop(part, None)

    def take(self, name: str | None, timeout: float | None, may_come: Callable[[], bool]) -> Any:
        """The next output of one completion, or of any; waits for it. None after ``timeout`` seconds, or when
        ``may_come`` (which may also raise) says that there will be none."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                waiting = self._results.get(next(iter(self._results), "") if name is None else name)
                if waiting:
                    found = waiting.popleft()
                    if not waiting:
                        del self._results[found.request_id]
                    return found
                left = GLANCE if until is None else until - time.monotonic()
                if left <= 0 or not may_come():
                    return None
                self._changed.wait(min(left, GLANCE))

    def call(self, name: str, callback: Callable[[Any], None], loop: asyncio.AbstractEventLoop) -> None:
        """Have the outputs of a completion passed to ``callback`` in ``loop``; also those that came."""
        with self._changed:
            self._handlers[name] = callback, loop
            for output in self._results.pop(name, ()):
                self._hand_over(output)

    def put(self, request: Queued, item: RequestOutput | BaseException) -> None:
        """In the engine's thread: what it tells of a request, as outputs of its completions."""
        if isinstance(item, BaseException):
            outputs = [_failed(request, name, item) for name in request.parts]
            over = True
        else:
            outputs = [_output(request, part, item) for part in item.outputs if _is_news(request, part)]
            over = item.finished
        with self._changed:
            if over and self._requests.get(request.name) is request:
                del self._requests[request.name]
            elif self._requests.get(request.name) is not request:
                return  # discarded
            for output in outputs:
                self._hand_over(output)

    def _hand_over(self, output: Any) -> None:
        """To whoever registered for it, else to the results that wait; under the lock, so that order is kept."""
        handler = self._handlers.get(output.request_id)
        if handler is None:
            self._results.setdefault(output.request_id, deque()).append(output)
            self._changed.notify_all()
            return
        if output.is_finished():
            del self._handlers[output.request_id]
        callback, loop = handler
        call_in(loop, callback, output)


def _is_news(request: Queued, part: CompletionOutput) -> bool:
    """Whether a completion has something to deliver; notes when its tokens came."""
    times = request.timestamps[part.index]
    fresh = len(part.token_ids) - len(times)
    times.extend([time.perf_counter()] * fresh)
    ended = part.finish_reason is not None
    if part.index in request.ended or not (ended or (request.streaming and fresh)):
        return False
    if ended:
        request.ended.add(part.index)
    return True


def _output(request: Queued, part: CompletionOutput, output: RequestOutput) -> Any:
    begun, error = output.metrics.first_scheduled_time, None
    status = RequestStatus.DECODING if part.finish_reason is None else RequestStatus.FINISHED
    if part.finish_reason in ("error", "abort"):
        status, error = RequestStatus.FAILED, str(output.error or "the request was cancelled")
    logprobs = zip(part.token_ids, part.logprobs or (), strict=False)
    return GenerationOutput(
        request_id=request.parts[part.index],
        prompt_ids=request.prompt,
        generated_tokens=part.token_ids,
        logprobs=[found[token].logprob for token, found in logprobs if found is not None],
        error=error,
        status=status,
        created_time=request.created,
        lifespan=(
            -1.0 if begun is None else request.created + (begun - output.metrics.arrival_time),
            -1.0 if part.finish_reason is None else time.perf_counter(),
        ),
        timestamps=list(request.timestamps[part.index]) if request.record_timestamps else None,
    )


def _failed(request: Queued, name: str, error: BaseException) -> Any:
    return GenerationOutput(
        request_id=name,
        prompt_ids=request.prompt,
        error=str(error),
        status=RequestStatus.FAILED,
        created_time=request.created,
        lifespan=(-1.0, time.perf_counter()),
    )
