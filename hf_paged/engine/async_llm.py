"""``AsyncLLM``: the same engine under a loop of its own thread, for servers and anything else on asyncio.

The thread owns the engine; everybody else leaves it commands and is handed snapshots. Outputs are cumulative, so a slow
reader gets the latest one and never a backlog.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from hf_paged.config import EngineConfig
from hf_paged.engine.llm import LLM, Prompt, _Group
from hf_paged.engine.outputs import RequestOutput
from hf_paged.errors import EngineDeadError, InvalidRequestError
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger("hf_paged")


class _Reader:
    """Where one request's outputs go: the latest snapshot, or the exception that ended it, and an event."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._event = loop, asyncio.Event()
        self._latest: RequestOutput | BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread."""
        self._latest = item
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # the reader's event loop is closed: nobody is waiting any more
            logger.debug("an output came for a closed event loop")

    async def get(self) -> RequestOutput:
        await self._event.wait()
        self._event.clear()
        item = self._latest
        assert item is not None
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncLLM:
    """A model under continuous batching, driven from asyncio.

    Args:
        model, tokenizer, config, options: as for ``LLM``.

    Use it as ``async with AsyncLLM(...) as llm``, or call :meth:`close`. Every method may be called from any thread or
    event loop.
    """

    def __init__(self, model: Any, tokenizer: Any = None, config: EngineConfig | None = None, **options: Any) -> None:
        self._llm = LLM(model, tokenizer, config, **options)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._readers: dict[str, _Reader] = {}
        self._numbers = itertools.count()
        self._paused = self._closing = False
        self._cause: BaseException | None = None
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hf_paged engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    @property
    def tokenizer(self) -> Any:
        return self._llm.tokenizer

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yields what there is whenever something was added, the last one finished.

        Leaving the iteration, or cancelling the task, ends the request. One that goes wrong on its way has ``error``
        set. Raises InvalidRequestError or OutOfBlocksError for one that can never run, and EngineDeadError when the
        loop has ended, with the cause chained.
        """
        params = sampling_params or SamplingParams(temperature=0)
        name = f"auto-{next(self._numbers)}" if request_id is None else request_id
        reader = _Reader(asyncio.get_running_loop())

        def add() -> None:
            if name in self._readers:
                reader.put(InvalidRequestError(f"request id {name!r} is in use; ids must be unique while they run"))
                return
            try:
                group = self._llm._add(prompt, params, priority, salt, name)
            except Exception as error:  # whatever it is belongs to whoever made the request
                reader.put(error)
                return
            self._readers[name] = reader
            if not group.open:
                self._publish(group)

        self._send(add)
        try:
            while True:
                output = await reader.get()
                yield output
                if output.finished:
                    return
        finally:
            self._send(lambda: self._forget(name, reader), quiet=True)

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, finished with reason "abort". Unknown ids are no error."""

        def end() -> None:
            group = self._llm._groups.get(request_id)
            if group is not None:
                self._llm._abort(group)
                self._publish(group)

        self._send(end, quiet=True)

    # -- the engine as a whole -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop stepping, once the present step is done; requests stay where they are. Weights may change then."""
        done = threading.Event()

        def stop() -> None:
            self._paused = True
            done.set()

        self._send(stop)
        while not done.wait(0.1):
            self._check_alive()

    def resume(self) -> None:
        """Go on. Requests that had begun are recomputed if the weights changed meanwhile."""

        def go_on() -> None:
            self._llm.core.look_at_weights()
            self._paused = False

        self._send(go_on)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix."""
        self._send(self._llm.reset_prefix_cache)

    def stats(self) -> dict[str, Any]:
        """Counters of scheduler and cache."""
        return self._llm.stats()

    def check_health(self, stalled_after: float = 60.0) -> None:
        """Raise EngineDeadError when the loop has ended, or has work and made no step for ``stalled_after`` seconds."""
        self._check_alive()
        idle = time.monotonic() - self._last_step
        if self._llm.core.has_work and not self._paused and idle > stalled_after:
            raise EngineDeadError(f"the engine has work but made no step for {idle:.0f} seconds")

    def close(self) -> None:
        """End every request and the loop. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(f"the engine's loop ended: {self._cause!r}") from self._cause
        if self._closing:
            raise EngineDeadError("the engine was closed")

    def _send(self, command: Callable[[], Any], quiet: bool = False) -> None:
        with self._wake:
            if self._closing or self._cause is not None:
                if quiet:
                    return
                self._check_alive()
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._commands and not self._closing and (self._paused or not self._llm.core.has_work):
                        self._wake.wait()
                    if self._closing:
                        break
                    commands = list(self._commands)
                    self._commands.clear()
                for command in commands:
                    command()
                if not self._paused and self._llm.core.has_work:
                    for group in self._llm._step():
                        self._publish(group)
                self._last_step = time.monotonic()
            ended: BaseException = EngineDeadError("the engine was closed")
        except BaseException as error:  # whatever it is, everybody who waits must learn of it
            logger.exception("the engine's loop ended")
            with self._wake:
                self._cause = error
            ended = EngineDeadError(f"the engine's loop ended: {error!r}")
            ended.__cause__ = error
        with self._wake:
            left = list(self._commands)
            self._commands.clear()
        for command in left:  # requests on their way in get an answer, too
            try:
                command()
            except Exception:  # the engine is dead, so it may fail in any way; every reader is told below
                logger.debug("a command came too late", exc_info=True)
        for name, reader in list(self._readers.items()):
            reader.put(ended)
            self._forget(name, reader)

    def _publish(self, group: _Group) -> None:
        name = group.output.request_id
        reader = self._readers.get(name)
        if not group.open:  # forgotten before its reader learns of it, who may ask for the same id at once
            self._readers.pop(name, None)
            self._llm._drop(group)
        if reader is not None:
            reader.put(_snapshot(group.output))

    def _forget(self, name: str, reader: _Reader) -> None:
        if self._readers.get(name) is reader:
            del self._readers[name]
            group = self._llm._groups.get(name)
            if group is not None:
                self._llm._drop(group)


def _snapshot(output: RequestOutput) -> RequestOutput:
    parts = [
        dataclasses.replace(
            part, token_ids=list(part.token_ids), logprobs=None if part.logprobs is None else list(part.logprobs)
        )
        for part in output.outputs
    ]
    return dataclasses.replace(output, outputs=parts, metrics=dataclasses.replace(output.metrics))
