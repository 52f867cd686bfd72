"""``AsyncLLM``: the same engine under a loop of its own thread, for servers and anything else on asyncio.

It turns the loop's callbacks into async iterators; the loop itself is EngineLoop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from hf_paged.config import EngineConfig
from hf_paged.engine.frontend import Params, Prompt
from hf_paged.engine.llm import LLM
from hf_paged.engine.loop import EngineLoop
from hf_paged.engine.outputs import Explanation, RequestOutput
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger("hf_paged")


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Have somebody's event loop call ``function``; from any thread. If the loop is closed, nobody waits any more."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # what asyncio raises for a closed loop
        logger.debug("an output came for a closed event loop")


class _Reader:
    """Where one request's outputs go: the latest snapshot, or the exception that ended it, and an event."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._event = loop, asyncio.Event()
        self._latest: RequestOutput | BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread."""
        self._latest = item
        call_in(self._loop, self._event.set)

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
        self._loop = EngineLoop(self._llm)

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
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yields what there is whenever something was added, the last one finished.

        ``sampling_params`` may also be a transformers GenerationConfig. Leaving the iteration, or cancelling the task,
        ends the request. One that goes wrong on its way has ``error`` set. Raises InvalidRequestError or
        OutOfBlocksError for one that can never run, and EngineDeadError, with the cause chained, when the loop ended.
        """
        params = SamplingParams(temperature=0) if sampling_params is None else sampling_params
        reader = _Reader(asyncio.get_running_loop())
        submission = self._loop.submit(prompt, params, reader.put, request_id=request_id, priority=priority, salt=salt)
        try:
            while True:
                output = await reader.get()
                yield output
                if output.finished:
                    return
        finally:
            self._loop.forget(submission)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: str | None = None,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a conversation; ``template_options`` go to the tokenizer's chat template. Else as :meth:`generate`.

        Raises ConfigError without a tokenizer.
        """
        prompt = self._llm.frontend.templated(messages, template_options)
        return self.generate(prompt, sampling_params, request_id=request_id, priority=priority, salt=salt)

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, finished with reason "abort". Unknown ids are no error."""
        self._loop.abort(request_id)

    # -- the engine as a whole -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop stepping, once the present step is done; requests stay where they are. Weights may change then."""
        self._loop.pause()

    def resume(self) -> None:
        """Go on. Requests that had begun are recomputed if the weights changed meanwhile."""
        self._loop.resume()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix."""
        self._loop.call(self._llm.reset_prefix_cache)

    def weights_changed(self) -> None:
        """Say that the weights changed in a way that cannot be seen from outside; prefixes are forgotten."""
        self._loop.call(self._llm.weights_changed)

    def stats(self) -> dict[str, Any]:
        """Counters of scheduler and cache."""
        return self._llm.stats()

    def explain(self, request_id: str) -> list[Explanation]:
        """What became of each completion of a request, and why; see :meth:`LLM.explain`."""
        return self._loop.call(lambda: self._llm.explain(request_id))

    def check_health(self, stalled_after: float = 60.0) -> None:
        """Raise EngineDeadError when the loop has ended, or has work and made no step for ``stalled_after`` seconds."""
        self._loop.check_health(stalled_after)

    def close(self) -> None:
        """End every request and the loop. Idempotent."""
        self._loop.close()
        self._llm.core.close()
