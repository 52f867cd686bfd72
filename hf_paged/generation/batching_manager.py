"""The manager that transformers' own calls for continuous batching drive, with an engine of ours inside.

It turns stock's requests into submissions of an EngineLoop; what comes of them waits in its ``outbox``. It owns neither
steps nor texts. ``continuous`` makes managers, ``transformers_serve`` uses them for HTTP requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hf_paged import compat
from hf_paged.compat import GenerationConfig
from hf_paged.config import EngineConfig
from hf_paged.engine.core import EngineCore
from hf_paged.engine.detokenizer import backend_of
from hf_paged.engine.llm import LLM
from hf_paged.engine.loop import EngineLoop
from hf_paged.errors import ConfigError, EngineDeadError, InvalidRequestError, UnsupportedError
from hf_paged.generation.outbox import GLANCE, Outbox, Queued
from hf_paged.sampling.generation_config import sampling_params_from
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger("hf_paged")

#: those that somebody holds; models keep some for their next session
_managers: weakref.WeakSet[Manager] = weakref.WeakSet()


class _ThreadStatus:
    """What others may ask about the engine's thread."""

    def __init__(self, manager: Manager) -> None:
        self._manager = weakref.ref(manager)

    @property
    def fatal_error(self) -> BaseException | None:
        manager = self._manager()
        return None if manager is None else manager.fault


class Manager(compat.ContinuousBatchingManager):  # type: ignore[misc]
    """Stock's ContinuousBatchingManager to whoever holds it; an engine of ours inside.

    Args:
        model: stays its user's: its attention, mode and config are not touched.
        generation_config: for requests that bring none of their own; None for the model's.
        config: of the engine.
        salt: as in CacheConfig.
        logprobs: whether outputs carry the log-probabilities of their tokens.
        made_for: the settings it comes from; a later session with other settings does not use it again.

    A request whose prompt cannot run (a token id outside the vocabulary, too long) is delivered as FAILED, with the
    reason as its ``error``; an option that cannot be honoured raises where the request is added. Results are looked up
    by id. An id that a caller gives may be given again once its request has ended; outputs of the earlier one that
    nobody took come first. Ids that the manager gives are none of those in use. The engine and its blocks live from the
    first request or :meth:`start` to :meth:`stop`, or longer with ``keep_for_next_session``.
    """

    #: there is nothing to warm up
    warmed_up = True

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None,
        config: EngineConfig,
        *,
        salt: str | None = None,
        logprobs: bool = False,
        made_for: Any = None,
    ) -> None:
        if compat.is_split(model):
            raise UnsupportedError("the engine runs on one process, this model is split over several (tensor parallel)")
        self.model: Any = model
        self.config, self.salt, self.logprobs = config, salt, logprobs
        self.generation_config, self.made_for = generation_config, made_for
        self.background_thread_status = _ThreadStatus(self)
        self._llm: LLM | None = LLM(model, config=config)
        self._loop: EngineLoop | None = None
        #: held to make or to end the loop, as requests come from several threads
        self._making = threading.Lock()
        self._fault: BaseException | None = None
        self._started = self._stopped = False
        self._pauses, self._pausing = 0, threading.Lock()
        self.outbox = Outbox()
        _managers.add(self)

    # -- the engine ----------------------------------------------------------------------------------------------

    @property
    def batch_processor(self) -> EngineCore | None:
        """The engine's core, whose ``scheduler`` can be watched; None while there is no engine."""
        return None if self._llm is None else self._llm.core

    @property
    def fault(self) -> BaseException | None:
        """What the engine died of, if it did."""
        loop = self._loop
        return self._fault if loop is None else loop.cause

    def engine(self) -> EngineLoop:
        """The loop, paused where :meth:`start` was not called yet. Raises EngineDeadError after :meth:`stop`."""
        with self._making:
            if self._loop is None:
                if self._stopped:
                    raise EngineDeadError("the engine was stopped; start() starts it anew") from self._fault
                if self._llm is None:
                    self._llm = LLM(self.model, config=self.config)
                self._loop = EngineLoop(self._llm, paused=True)
            return self._loop

    def use_tokenizer(self, tokenizer: Any) -> None:
        """What stop texts are found with from now on."""
        backend_of(tokenizer)  # raises where there is none
        frontend = self.engine().llm.frontend
        if frontend.tokenizer is None:
            frontend.tokenizer = tokenizer

    def warmup(self) -> None:
        """Nothing: the engine is ready when it is made."""

    def is_running(self) -> bool:
        """Whether the engine was started, and its thread lives."""
        loop = self._loop
        return self._started and loop is not None and loop.is_alive

    def start(self) -> None:
        """Start computing. After a fault it is a new engine that starts; what the old one had is lost."""
        if self.is_running() and not self.engine().is_closing:
            logger.warning("the engine is running already")
            return
        if self._started:
            self._end(drain=True, timeout=None)
        if self._fault is not None:
            self._let_go()
        self._fault, self._stopped = None, False
        self.engine().resume()
        self._started = True

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests, finish those that are there, and end the thread.

        Args:
            block: wait for that, at most ``timeout`` seconds.
            keep_for_next_session: keep the engine, with the prefixes it knows, for the model's next session.
            hard_stop: do not finish requests; they are delivered as FAILED.

        Raises RuntimeError inside :meth:`pause`, where nothing could finish.
        """
        if self._pauses:
            raise RuntimeError("the engine is paused and cannot finish its requests: leave pause() before stop()")
        if not self._started:
            logger.warning("the engine was not started, so there is nothing to finish")
        ended = self._end(drain=self._started and not hard_stop, timeout=timeout if block else 0)
        if block and not ended:
            logger.warning("the engine still finishes its requests after %s seconds", timeout)
        if keep_for_next_session:
            setattr(self.model, compat.CACHED_MANAGER, self)
        else:
            self._let_go()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread's end after a :meth:`stop` that did not."""
        self._end(drain=True, timeout=timeout)

    def destroy(self) -> None:
        """End the thread, once its requests have finished, and let go of the engine and its blocks. Idempotent."""
        self._end(drain=self._started, timeout=None)
        self._let_go()

    def _end(self, drain: bool, timeout: float | None) -> bool:
        """Close the loop; whether it has ended by now, which is when the engine is let go of."""
        with self._making:
            self._stopped, loop = True, self._loop
        if loop is None:
            return True
        if loop.close(drain=drain, timeout=timeout):
            self._fault, self._loop, self._started = loop.cause, None, False
        return self._loop is None

    def _let_go(self) -> None:
        """Of the engine; one that still finishes its requests goes when it has."""
        if self._llm is not None and self._loop is None:
            self._llm.core.close()
        self._llm = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No step is made inside; requests stay where they are. If weights changed meanwhile, they are recomputed.

        Raises EngineDeadError when no engine is running.
        """
        loop = self._loop
        if loop is None or not self.is_running():
            raise EngineDeadError("there is nothing to pause: the engine is not running") from self.fault
        with self._pausing:
            loop.pause()
            self._pauses += 1
        try:
            yield
        finally:
            with self._pausing:
                self._pauses -= 1
                if not self._pauses and loop.is_alive:
                    loop.resume()

    # -- requests come -------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> str:
        """Queue a prompt; returns its id.

        Args:
            request_id: one that is not in use; without it the engine gives one.
            max_new_tokens, eos_token_id: instead of the generation config's; a negative end of sequence is none.
            streaming: deliver what there is after every token, and not only the end.
            record_timestamps: note when each token came.
            generation_config: of this request, instead of the manager's.
            tokenizer: what stop texts are found with; needed once.
            options: fields of GenerationConfig that differ for this request.

        Raises:
            ConfigError, InvalidRequestError: an option does not exist or cannot be honoured, or the id is in use.
            EngineDeadError: the engine was stopped, or has died of its cause.
        """
        config = self.config_for(generation_config, max_new_tokens, eos_token_id, tokenizer, options)
        return self.queue(input_ids, config, request_id, streaming=streaming, record_timestamps=record_timestamps).name

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> list[str]:
        """:meth:`add_request` for each of several prompts; if one cannot be added, none is."""
        config = self.config_for(generation_config, max_new_tokens, eos_token_id, tokenizer, options)
        queued = self.queue_all(inputs, config, streaming=streaming, record_timestamps=record_timestamps)
        return [request.name for request in queued]

    def config_for(
        self,
        config: GenerationConfig | None = None,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        tokenizer: Any = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> GenerationConfig:
        """The config of requests, for :meth:`queue`; see :meth:`add_request`."""
        if tokenizer is not None:
            self.use_tokenizer(tokenizer)
        base = config if config is not None else self.generation_config
        made: GenerationConfig = copy.deepcopy(base if base is not None else self.model.generation_config)
        unknown = made.update(**options) if options else {}
        if unknown:
            raise ConfigError(f"GenerationConfig has no option named {', '.join(map(repr, unknown))}")
        if max_new_tokens is not None:
            made.max_new_tokens = max_new_tokens
        if eos_token_id is not None:
            made.eos_token_id = eos_token_id
        return made

    def queue(
        self,
        input_ids: Sequence[int],
        config: GenerationConfig,
        request_id: str | None = None,
        *,
        streaming: bool = False,
        record_timestamps: bool = False,
    ) -> Queued:
        """What :meth:`add_request` does, once the config is made."""
        loop = self.engine()
        prompt = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
        refused = None
        try:
            params = self.params_for(config, len(prompt))
        except InvalidRequestError as error:
            refused, params = error, self.params_for(config, 1)  # raises unless it is this prompt's length
        if params.stop and loop.llm.frontend.tokenizer is None:
            raise ConfigError("stop_strings need a tokenizer to be found with: pass tokenizer=")
        request = self.outbox.add(
            request_id, prompt=prompt, streaming=streaming, record_timestamps=record_timestamps, n=params.n
        )
        if refused is not None:
            self.outbox.put(request, refused)
            return request
        try:
            loop.submit(
                prompt, params, functools.partial(self.outbox.put, request), request_id=request.name, salt=self.salt,
                every_step=streaming or record_timestamps or params.n > 1,
            )  # fmt: skip
        except (EngineDeadError, InvalidRequestError):
            self.outbox.remove(request)
            raise
        return request

    def queue_all(
        self,
        inputs: Sequence[Sequence[int]],
        config: GenerationConfig,
        *,
        streaming: bool = False,
        record_timestamps: bool = False,
    ) -> list[Queued]:
        """:meth:`queue` for each of several prompts; if one cannot be queued, none is."""
        queued: list[Queued] = []
        try:
            for prompt in inputs:
                queued += [self.queue(prompt, config, streaming=streaming, record_timestamps=record_timestamps)]
        except BaseException:  # whatever it is: none of this call's requests may stay behind
            self.discard(queued)
            raise
        return queued

    def cancel_request(self, request_id: str) -> None:
        """End a request; it is delivered as FAILED with what it has. An unknown id is no error."""
        loop = self._loop
        if loop is not None:
            loop.abort(request_id)

    def discard(self, requests: Sequence[Queued]) -> None:
        """End requests and forget what they delivered."""
        self.outbox.discard(requests)
        for request in requests:
            self.cancel_request(request.name)

    def params_for(self, config: GenerationConfig, prompt_length: int) -> SamplingParams:
        """What the engine makes of a request's config. Without any limit of length, the model's own is the limit.

        Raises InvalidRequestError for what cannot be honoured.
        """
        config, own, core = copy.copy(config), self.model.generation_config, self.engine().llm.core
        eos = config.eos_token_id
        listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        real = [token for token in listed if token >= 0]
        config.eos_token_id = real or None
        limits = [getattr(c, name) for c in (config, own) for name in ("max_new_tokens", "max_length")]
        if all(limit is None for limit in limits):
            longest = core.scheduler.max_model_len
            if longest is None:
                raise InvalidRequestError("give max_new_tokens: the model's config names no largest length either")
            config.max_new_tokens = max(longest - prompt_length, 1)
        params = sampling_params_from(config, self.model, prompt_length)
        changes: dict[str, Any] = {}
        if listed and not real:
            changes.update(ignore_eos=True, stop_token_ids=())
        if params.seed is None and core.config.seed is None and not params.greedy:
            changes["seed"] = int(torch.randint(1 << 62, (1,)))  # so that torch.manual_seed makes it reproducible
        if self.logprobs and params.logprobs is None:
            changes["logprobs"] = 0
        return dataclasses.replace(params, **changes) if changes else params

    # -- results go ----------------------------------------------------------------------------------------------

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """The next output, of one completion or of any; waits for it.

        None after ``timeout`` seconds, or when none can come: the engine was stopped, or no such request is on its way.
        Raises EngineDeadError, with the cause chained, when the engine has died and every output was taken.
        """
        return self.outbox.take(request_id, timeout, lambda: self._may_come(request_id))

    def _may_come(self, request_id: str | None) -> bool:
        fault, loop = self.fault, self._loop
        if fault is not None:
            raise EngineDeadError(f"the engine's loop ended: {fault!r}") from fault
        if request_id is not None and not self.outbox.is_known(request_id):
            return False
        return loop is not None and loop.is_alive

    def __iter__(self) -> Iterator[Any]:
        """Outputs as they come, for as long as the engine runs."""
        while self.is_running() or self.outbox.has_results:
            output = self.get_result(timeout=GLANCE)
            if output is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[Any]:
        """The outputs of one request, the last one finished."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Have a request's outputs passed to ``callback``, in the event loop that runs now; also those that came."""
        self.outbox.call(request_id, callback, asyncio.get_running_loop())


def managers() -> list[Manager]:
    """Those that somebody still holds."""
    return list(_managers)


def forget_kept_managers() -> None:
    """Let go of the managers that models keep for their next session."""
    for manager in managers():
        if getattr(manager.model, compat.CACHED_MANAGER, None) is manager:
            delattr(manager.model, compat.CACHED_MANAGER)
            manager.destroy()
