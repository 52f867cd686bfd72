"""``EngineLoop``: one thread that owns an engine, for whoever must not wait for a step.

Everybody else leaves it commands, run between two steps, and is told of outputs through a callback in that thread.
Outputs are snapshots and cumulative, so whoever is slow needs only the latest one. AsyncLLM and the manager behind
transformers' ``generate_batch`` are two faces of it; it knows neither asyncio nor transformers.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from hf_paged.engine.frontend import Group, Params, Prompt, snapshot
from hf_paged.engine.llm import LLM
from hf_paged.engine.outputs import RequestOutput
from hf_paged.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger("hf_paged")

T = TypeVar("T")
#: called in the loop's thread, with an output or with what ended the request; it must not block
Tell = Callable[[RequestOutput | BaseException], None]


@dataclass(eq=False)
class Submission:
    """A request that somebody waits for. ``tell`` hears of every step that added to it, or of its end alone."""

    request_id: str
    tell: Tell
    every_step: bool = True


@dataclass
class _Command:
    """What to do between two steps, and what to do instead when the loop has ended."""

    run: Callable[[], None]
    refuse: Callable[[EngineDeadError], None]


class EngineLoop:
    """Steps an engine in a thread of its own for as long as there is work.

    Args:
        llm: the engine; from here on only the loop's thread may change it.
        paused: begin paused, taking requests but making no step before :meth:`resume`.

    Every method may be called from any thread. Those that reach the engine raise EngineDeadError once the loop has
    ended; if that was by a fault, the fault is its cause.
    """

    def __init__(self, llm: LLM, *, paused: bool = False) -> None:
        self.llm = llm
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._submissions: dict[str, Submission] = {}
        self._paused, self._closing, self._draining = paused, False, False
        self._cause: BaseException | None = None
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hf_paged engine", daemon=True)
        self._thread.start()

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: Params,
        tell: Tell,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str | None = None,
        every_step: bool = True,
    ) -> Submission:
        """Hand over a request.

        ``tell`` gets its outputs, the last one finished, or InvalidRequestError and its like for a request that can
        never run, or EngineDeadError when the loop ends first.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id={request_id!r} must be a text or None")
        name = uuid.uuid4().hex if request_id is None else request_id  # not a number that a caller might use, too
        submission = Submission(name, tell, every_step)

        def add() -> None:
            if name in self._submissions:
                taken = InvalidRequestError(f"request id {name!r} is in use; ids must be unique while they run")
                self._tell(submission, taken)
                return
            try:
                group = self.llm.frontend.add(prompt, params, priority, salt, name)
            except Exception as error:  # whatever it is belongs to whoever made the request
                self._tell(submission, error)
                return
            self._submissions[name] = submission
            if not group.open:
                self._publish(group)

        self._send(_Command(add, lambda ended: self._tell(submission, ended)))
        return submission

    def abort(self, request_id: str) -> None:
        """End a request; its end is told, with reason "abort". An unknown id, or a loop that ended, is no error."""
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id={request_id!r} must be a text: abort requests one by one")

        def end() -> None:
            group = self.llm.frontend.groups.get(request_id)
            if group is not None:
                self.llm.frontend.abort(group)
                self._publish(group)

        self._send(_Command(end, _nobody), quiet=True)

    def forget(self, submission: Submission) -> None:
        """End a request that nobody waits for any more, without a word. One that is over is no error."""
        self._send(_Command(lambda: self._forget(submission), _nobody), quiet=True)

    # -- the engine as a whole -----------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the loop's thread, between two steps; returns or raises what it does."""
        if threading.current_thread() is self._thread:
            return function()
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except Exception as error:  # it belongs to the caller, who waits
                answer.set_exception(error)

        self._send(_Command(run, answer.set_exception))
        return answer.result()

    def pause(self) -> None:
        """Stop stepping, once the present step is done; requests stay where they are. Weights may change then."""
        done: Future[None] = Future()

        def stop() -> None:
            self._step(drain=True)  # a fault in it ends the loop, as in any step
            self._paused = True
            done.set_result(None)

        self._send(_Command(stop, done.set_exception))
        done.result()

    def resume(self) -> None:
        """Go on. Requests that had begun are recomputed if the weights changed meanwhile."""

        def go_on() -> None:
            try:
                self.llm.core.look_at_weights()
            finally:  # nothing computed before is used again if that failed
                self._paused = False

        self.call(go_on)

    def check_health(self, stalled_after: float = 60.0) -> None:
        """Raise EngineDeadError when the loop has ended, or has work and made no step for ``stalled_after`` seconds."""
        self._check_alive()
        idle = time.monotonic() - self._last_step
        if self.llm.core.has_work and not self._paused and idle > stalled_after:
            raise EngineDeadError(f"the engine has work but made no step for {idle:.0f} seconds")

    @property
    def cause(self) -> BaseException | None:
        """The fault that ended the loop, if one did."""
        return self._cause

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs, be it to its end."""
        return self._thread.is_alive()

    @property
    def is_closing(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing

    def close(self, *, drain: bool = False, timeout: float | None = None) -> bool:
        """End the loop and every request; idempotent.

        Args:
            drain: take no more requests, but let those that are there finish first (a paused loop would not).
            timeout: seconds to wait for the loop's end; None waits for as long as it takes.

        Returns whether the loop has ended.
        """
        with self._wake:
            self._draining = drain and (self._draining or not self._closing)
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(f"the engine's loop ended: {self._cause!r}") from self._cause
        if self._closing:
            raise EngineDeadError("the engine was closed")

    def _send(self, command: _Command, quiet: bool = False) -> None:
        with self._wake:
            over = self._cause is not None or not self._thread.is_alive()
            # a draining loop still hears of requests that are to end
            if over or (self._closing and not (quiet and self._draining)):
                if quiet:
                    return
                self._check_alive()
            self._commands.append(command)
            self._wake.notify()

    def _has_step(self) -> bool:
        return not self._paused and self.llm.core.has_work

    def _wait(self) -> bool:
        """Wait for something to do; False when the loop is to end."""
        with self._wake:
            while not self._commands and not self._closing and not self._has_step():
                self._wake.wait()
                self._last_step = time.monotonic()  # having had nothing to do is no stall
            return not self._closing or (self._draining and (bool(self._commands) or self._has_step()))

    def _run(self) -> None:
        try:
            while self._wait():
                for _ in range(len(self._commands)):
                    self._commands[0].run()
                    self._commands.popleft()  # only now: one that ends the loop is among those that it refuses
                if self._has_step():
                    self._step()
                self._last_step = time.monotonic()
            self._step(drain=True)
            ended = EngineDeadError("the engine was closed")
        except BaseException as error:  # whatever it is, everybody who waits must learn of it
            logger.exception("the engine's loop ended")
            with self._wake:
                self._cause = error
            ended = EngineDeadError(f"the engine's loop ended: {error!r}")
            ended.__cause__ = error
        self._say_goodbye(ended)

    def _step(self, drain: bool = False) -> None:
        for group in self.llm.frontend.step(drain):
            self._publish(group)

    def _say_goodbye(self, ended: EngineDeadError) -> None:
        with self._wake:
            self._closing, self._draining = True, False
            left = list(self._commands)
            self._commands.clear()
        for command in left:
            command.refuse(ended)
        for submission in list(self._submissions.values()):
            self._forget(submission)
            self._tell(submission, ended)

    def _publish(self, group: Group) -> None:
        name = group.output.request_id
        submission = self._submissions.get(name)
        if not group.open:  # forgotten before anybody learns of it, who may use the same id at once
            self._submissions.pop(name, None)
            self.llm.frontend.drop(group)
        if submission is not None and (submission.every_step or not group.open):
            self._tell(submission, snapshot(group.output))

    def _tell(self, submission: Submission, item: RequestOutput | BaseException) -> None:
        try:
            submission.tell(item)
        except Exception:  # it is anybody's code, and the other requests must go on
            logger.exception("request %s ends, because whoever was told of it failed", submission.request_id)
            self._forget(submission)

    def _forget(self, submission: Submission) -> None:
        name = submission.request_id
        if self._submissions.get(name) is submission:
            del self._submissions[name]
            group = self.llm.frontend.groups.get(name)
            if group is not None:
                self.llm.frontend.drop(group)


def _nobody(_: EngineDeadError) -> None:
    """Nobody waits for a command that ends a request."""
