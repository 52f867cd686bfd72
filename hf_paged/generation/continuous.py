"""``register(continuous_batching=True)``: transformers' own way to call continuous batching, on hf_paged's engine.

Owns the manager that ``model.generate_batch``, ``model.continuous_batching_context_manager`` and ``transformers serve``
drive, and what they are replaced with. The engine and its loop are in ``hf_paged.engine``; the HTTP requests of
``transformers serve`` are translated in ``transformers_serve``.

Of stock's ContinuousBatchingConfig the engine honours page_size (block_size in 5.17: tokens per block), num_blocks (of
that size), max_memory_percent (of the memory that is free), max_batch_tokens, max_requests_per_batch,
allow_block_sharing (prefix reuse), scheduler_type ("fifo" and "prefill_first" mean "fcfs"; the engine's own policies
may be named too), return_logprobs (of the model's own scores, before processors), seed and cpu_offload_space. The rest
describes stock's CUDA graphs, compilation, flash attention and padding, which do not exist here; every request has
processors of its own, and none is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged import compat
from hf_paged.cache.pool import free_memory
from hf_paged.compat import GenerationConfig, GenerationOutput, RequestStatus
from hf_paged.config import CacheConfig, EngineConfig
from hf_paged.engine.core import EngineCore
from hf_paged.engine.llm import LLM
from hf_paged.engine.loop import EngineLoop
from hf_paged.engine.outputs import CompletionOutput, RequestOutput
from hf_paged.errors import ConfigError, EngineDeadError, InvalidRequestError, UnsupportedError
from hf_paged.sampling.generation_config import sampling_params_from
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger("hf_paged")

_STOCK_SCHEDULERS = ("fifo", "prefill_first")
#: seconds between looks whether the loop still lives, for whoever waits for a result
_GLANCE = 0.2

#: those that somebody holds; models keep some for their next session
_managers: weakref.WeakSet[Manager] = weakref.WeakSet()


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


class _ThreadStatus:
    """What others may ask about the engine's thread."""

    def __init__(self, manager: Manager) -> None:
        self._manager = weakref.ref(manager)

    @property
    def fatal_error(self) -> BaseException | None:
        manager = self._manager()
        return None if manager is None or manager.loop is None else manager.loop.cause


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
    by id, and ids are never used twice. The engine and its blocks live from the first request or :meth:`start` to
    :meth:`stop`, or longer with ``keep_for_next_session``.
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
        if getattr(model, "_device_mesh", None) is not None:
            raise UnsupportedError("the engine runs on one process, this model is split over several (tensor parallel)")
        self.model: Any = model
        self.config, self.salt, self.logprobs = config, salt, logprobs
        self.generation_config, self.made_for = generation_config, made_for
        self.background_thread_status = _ThreadStatus(self)
        self.loop: EngineLoop | None = None
        self._llm: LLM | None = LLM(model, config=config)
        self._started, self._pauses = False, 0
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._requests: dict[str, Queued] = {}
        self._handlers: dict[str, tuple[Callable[[Any], None], asyncio.AbstractEventLoop]] = {}
        #: outputs that nobody has taken, by the id of their completion
        self._results: dict[str, deque[Any]] = {}
        _managers.add(self)

    # -- the engine ----------------------------------------------------------------------------------------------

    @property
    def batch_processor(self) -> EngineCore | None:
        """The engine's core, whose ``scheduler`` can be watched; None while there is no engine."""
        return None if self._llm is None else self._llm.core

    def engine(self) -> EngineLoop:
        """The loop, paused where :meth:`start` was not called yet."""
        if self.loop is None:
            if self._llm is None:
                self._llm = LLM(self.model, config=self.config)
            self.loop = EngineLoop(self._llm, paused=True)
        return self.loop

    def use_tokenizer(self, tokenizer: Any) -> None:
        """What stop texts are found with from now on."""
        if not hasattr(tokenizer, "_tokenizer"):
            raise ConfigError(f"a fast transformers tokenizer is wanted, not {type(tokenizer).__name__}")
        llm = self.engine().llm
        if llm.tokenizer is None:
            llm.tokenizer = tokenizer

    def warmup(self) -> None:
        """Nothing: the engine is ready when it is made."""

    def is_running(self) -> bool:
        """Whether the engine was started, and its thread lives."""
        return self._started and self.loop is not None and self.loop.is_alive

    def start(self) -> None:
        """Start computing. After a fault it is a new engine that starts; what the old one had is lost."""
        loop = self.loop
        if self.is_running() and loop is not None and not loop.is_closing:
            logger.warning("the engine is running already")
            return
        if loop is not None and self._started:
            loop.close()
            self.loop = None
            if loop.cause is not None:
                self._llm = None
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
        if self.loop is None or not self._started:
            logger.warning("the engine was not started, so there is nothing to stop")
            if self.loop is not None:
                self.loop.close()
                self.loop = None
            return
        ended = self.loop.close(drain=not hard_stop, timeout=timeout if block else 0)
        if not ended and block:
            logger.warning("the engine still finishes its requests after %s seconds", timeout)
        if keep_for_next_session:
            setattr(self.model, compat.CACHED_MANAGER, self)
        else:
            self._llm = None

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread's end after a :meth:`stop` that did not."""
        if self.loop is not None:
            self.loop.close(drain=True, timeout=timeout)

    def destroy(self) -> None:
        """End the thread, once its requests have finished, and let go of the engine and its blocks. Idempotent."""
        if self.loop is not None:
            self.loop.close(drain=self._started)
        self._llm = self.loop = None
        self._started = False

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No step is made inside; requests stay where they are. If weights changed meanwhile, they are recomputed.

        Raises EngineDeadError when no engine is running.
        """
        loop = self.loop
        if loop is None or not self.is_running():
            raise EngineDeadError("there is nothing to pause: the engine is not running")
        with self._changed:
            self._pauses += 1
        try:
            loop.pause()
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                last = not self._pauses
            if last and loop.is_alive:
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
        request = self.queue(
            input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id,
            generation_config=generation_config, tokenizer=tokenizer, **options,
        )  # fmt: skip
        return request.name

    def queue(
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
    ) -> Queued:
        """As :meth:`add_request`; returns the names of its completions, too."""
        prompt = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
        loop = self.engine()
        if tokenizer is not None:
            self.use_tokenizer(tokenizer)
        config = self._config(generation_config, max_new_tokens, options)
        refused = None
        try:
            params = self.params_for(config, len(prompt), eos_token_id)
        except InvalidRequestError as error:
            refused, params = error, self.params_for(config, 1, eos_token_id)  # raises unless it is the prompt's length
        if params.stop and loop.llm.tokenizer is None:
            raise ConfigError("stop_strings need a tokenizer to be found with: pass tokenizer=")
        name = self._new_name() if request_id is None else request_id
        request = Queued(name, prompt, streaming, record_timestamps, params.n)
        with self._changed:
            if name in self._requests:
                raise InvalidRequestError(f"request id {name!r} is in use; ids must be unique while they run")
            self._requests[name] = request
        if refused is not None:
            self._take(request, refused)
            return request
        try:
            loop.submit(
                prompt, params, functools.partial(self._take, request), request_id=name, salt=self.salt,
                every_step=streaming or record_timestamps or params.n > 1,
            )  # fmt: skip
        except EngineDeadError:
            del self._requests[name]
            raise
        return request

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """:meth:`add_request` for each of several prompts; if one cannot be added, none is."""
        limits = {"max_new_tokens": max_new_tokens, "streaming": streaming, "record_timestamps": record_timestamps}
        return [request.name for request in self.queue_all(inputs, **limits, **options)]

    def queue_all(self, inputs: Sequence[Sequence[int]], **options: Any) -> list[Queued]:
        """:meth:`queue` for each of several prompts; if one cannot be queued, none is."""
        requests: list[Queued] = []
        try:
            for prompt in inputs:
                requests += [self.queue(prompt, **options)]
        except BaseException:  # whatever it is: none of this call's requests may stay behind
            self.discard(requests)
            raise
        return requests

    def cancel_request(self, request_id: str) -> None:
        """End a request; it is delivered as FAILED with what it has. An unknown id is no error."""
        if self.loop is not None:
            self.loop.abort(request_id)

    def discard(self, requests: Sequence[Queued]) -> None:
        """End requests and forget what they delivered."""
        with self._changed:
            for request in requests:
                if self._requests.get(request.name) is request:
                    del self._requests[request.name]
                for part in request.parts:
                    self._results.pop(part, None)
        for request in requests:
            self.cancel_request(request.name)

    def _new_name(self) -> str:
        names = (f"req_{number}" for number in self._numbers)
        return next(name for name in names if name not in self._requests)

    def _config(
        self, config: GenerationConfig | None, max_new_tokens: int | None, options: dict[str, Any]
    ) -> GenerationConfig:
        base = config if config is not None else self.generation_config
        made = copy.deepcopy(base if base is not None else self.model.generation_config)
        unknown = made.update(**options)
        if unknown:
            raise ConfigError(f"GenerationConfig has no option named {', '.join(map(repr, unknown))}")
        if max_new_tokens is not None:
            made.max_new_tokens = max_new_tokens
        return made

    def params_for(
        self, config: GenerationConfig, prompt_length: int, eos_token_id: int | Sequence[int] | None = None
    ) -> SamplingParams:
        """What the engine makes of a request's config. Without any limit of length, the model's own is the limit.

        Raises InvalidRequestError for what cannot be honoured.
        """
        core = self.engine().llm.core
        eos = config.eos_token_id if eos_token_id is None else eos_token_id
        listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        real = [token for token in listed if token >= 0]
        config.eos_token_id = real or None
        limits = [
            getattr(c, n) for c in (config, self.model.generation_config) for n in ("max_new_tokens", "max_length")
        ]
        if all(limit is None for limit in limits):
            longest = core.scheduler.max_model_len
            if longest is None:
                raise InvalidRequestError("give max_new_tokens: the model's config names no largest length either")
            config.max_new_tokens = max(longest - prompt_length, 1)
        params: SamplingParams = sampling_params_from(config, self.model, prompt_length)
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
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                name = next(iter(self._results), None) if request_id is None else request_id
                waiting = None if name is None else self._results.get(name)
                if waiting:
                    found = waiting.popleft()
                    if not waiting:
                        del self._results[found.request_id]
                    return found
                left = _GLANCE if until is None else until - time.monotonic()
                if left <= 0 or not self._may_come(request_id):
                    return None
                self._changed.wait(min(left, _GLANCE))

    def _may_come(self, request_id: str | None) -> bool:
        loop = self.loop
        if loop is not None and loop.cause is not None:
            raise EngineDeadError(f"the engine's loop ended: {loop.cause!r}") from loop.cause
        if request_id is not None and request_id.partition("__child#")[0] not in self._requests:
            return False
        return loop is not None and loop.is_alive

    def __iter__(self) -> Iterator[Any]:
        """Outputs as they come, for as long as the engine runs."""
        while self.is_running() or self._results:
            output = self.get_result(timeout=_GLANCE)
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
        loop = asyncio.get_running_loop()
        with self._changed:
            self._handlers[request_id] = callback, loop
            for output in self._results.pop(request_id, ()):
                self._hand_over(output)

    def _take(self, request: Queued, item: RequestOutput | BaseException) -> None:
        """In the engine's thread: what it tells of a request, as outputs of its completions."""
        if isinstance(item, BaseException):
            outputs = [self._failed(request, name, item) for name in request.parts]
            over = True
        else:
            outputs = [self._output(request, part, item) for part in item.outputs if self._is_news(request, part)]
            over = item.finished
        with self._changed:
            if over and self._requests.get(request.name) is request:
                del self._requests[request.name]
            elif self._requests.get(request.name) is not request:
                return  # discarded
            for output in outputs:
                self._hand_over(output)

    def _is_news(self, request: Queued, part: CompletionOutput) -> bool:
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

    def _output(self, request: Queued, part: CompletionOutput, output: RequestOutput) -> Any:
        begun, error = output.metrics.first_scheduled_time, None
        status = RequestStatus.DECODING if part.finish_reason is None else RequestStatus.FINISHED
        if part.finish_reason in ("error", "abort"):
            status, error = RequestStatus.FAILED, str(output.error or "the request was cancelled")
        logprobs = zip(part.token_ids, part.logprobs or (), strict=False)
        return GenerationOutput(
            request_id=request.parts[part.index],
            prompt_ids=request.prompt,
            generated_tokens=part.token_ids,
            logprobs=[found[token].logprob for token, found in logprobs],
            error=error,
            status=status,
            created_time=request.created,
            lifespan=(
                -1.0 if begun is None else request.created + (begun - output.metrics.arrival_time),
                -1.0 if part.finish_reason is None else time.perf_counter(),
            ),
            timestamps=list(request.timestamps[part.index]) if request.record_timestamps else None,
        )

    def _failed(self, request: Queued, name: str, error: BaseException) -> Any:
        return GenerationOutput(
            request_id=name,
            prompt_ids=request.prompt,
            error=str(error),
            status=RequestStatus.FAILED,
            created_time=request.created,
            lifespan=(-1.0, time.perf_counter()),
        )

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
        try:
            loop.call_soon_threadsafe(callback, output)
        except RuntimeError:  # the handler's event loop is closed: nobody is waiting any more
            logger.debug("an output came for a closed event loop")


# -- what register() puts in place -------------------------------------------------------------------------------------


def replacements(defaults: Callable[[], CacheConfig]) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """A class, methods of it, and what makes the ones to replace them of the old ones."""
    return [
        (compat.ContinuousMixin, "init_continuous_batching", functools.partial(_wrap_init, defaults=defaults)),
        (compat.ContinuousMixin, "generate_batch", _wrap_generate_batch),
    ]


def managers() -> list[Manager]:
    """Those that somebody still holds."""
    return list(_managers)


def forget_kept_managers() -> None:
    """Let go of the managers that models keep for their next session."""
    for manager in managers():
        if getattr(manager.model, compat.CACHED_MANAGER, None) is manager:
            delattr(manager.model, compat.CACHED_MANAGER)
            manager.destroy()


def engine_config(
    defaults: CacheConfig, batching: compat.ContinuousBatchingConfig | None, device: torch.device
) -> EngineConfig:
    """The engine that ``register()``'s defaults and stock's config ask for; the latter goes on top.

    Raises ConfigError for a scheduler that is not known.
    """
    names = ("block_size", "memory", "num_blocks", "prefix_caching", "attention_backend")
    options = {name: getattr(defaults, name) for name in names}
    if batching is None:
        return EngineConfig(**options)
    size, chosen = compat.page_size(batching)
    if chosen:
        options["block_size"] = size
    if batching.num_blocks is not None:
        options.update(memory=None, num_blocks=-(-batching.num_blocks * size // options["block_size"]))
    elif batching.max_memory_percent is not None:
        options.update(memory=int(free_memory(device) * batching.max_memory_percent), num_blocks=None)
    if batching.max_batch_tokens is not None:
        options["max_num_batched_tokens"] = batching.max_batch_tokens
    if batching.max_requests_per_batch is not None:
        options["max_num_seqs"] = batching.max_requests_per_batch
    if batching.scheduler_type not in _STOCK_SCHEDULERS:
        options["policy"] = batching.scheduler_type
    options["prefix_caching"] = options["prefix_caching"] and batching.allow_block_sharing
    if batching.cpu_offload_space:
        options["host_memory"] = int(batching.cpu_offload_space * 2**30)
    options["seed"] = batching.seed
    return EngineConfig(**options)


def _wrap_init(original: Callable[..., Any], defaults: Callable[[], CacheConfig]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_continuous_batching(
        self: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: compat.ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Manager:
        cache, batching = defaults(), continuous_batching_config
        if batching is None:
            batching = getattr(generation_config or self.generation_config, "continuous_batching_config", None)
        kept = getattr(self, compat.CACHED_MANAGER, None)
        if isinstance(kept, Manager) and kept.made_for == (cache, batching or kept.made_for[1]):
            kept.generation_config = generation_config
            return kept
        if kept is not None:  # stock's, or one that was made with other settings
            self.destroy_cached_continuous_batching_manager()
        return Manager(
            self,
            generation_config,
            engine_config(cache, batching, self.device),
            salt=cache.salt,
            logprobs=batching is not None and batching.return_logprobs,
            made_for=(cache, copy.copy(batching)),
        )

    return init_continuous_batching


def _wrap_generate_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_batch(
        self: Any,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: compat.ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **options: Any,
    ) -> dict[str, Any]:
        """Complete prompts; returns a GenerationOutput for each completion by its id, in the order of the prompts.

        ``options`` are ``tokenizer``, which stop texts need, and fields of GenerationConfig. A prompt that cannot run
        has status FAILED and an ``error``. Raises ConfigError or InvalidRequestError for an option that cannot be
        honoured, and EngineDeadError when the engine dies: never are there fewer results than prompts.
        """
        if not len(inputs):
            return {}
        with self.continuous_batching_context_manager(
            generation_config=generation_config,
            continuous_batching_config=continuous_batching_config,
            persistent_manager=persistent_manager,
            warmup=warmup,
        ) as manager:
            requests = manager.queue_all(
                inputs, record_timestamps=record_timestamps, generation_config=generation_config, **options
            )
            return _collected(manager, requests, progress_bar)

    return generate_batch


def _collected(manager: Manager, requests: list[Queued], progress_bar: bool) -> dict[str, Any]:
    from tqdm.auto import tqdm

    parts = [part for request in requests for part in request.parts]
    results: dict[str, Any] = {}
    try:
        for part in tqdm(parts, disable=not progress_bar, desc="completions", unit="row"):
            results[part] = manager.get_result(part)
            if results[part] is None:
                raise EngineDeadError(f"the engine was stopped before {part!r} had a result")
        error = manager.background_thread_status.fatal_error
        if error is not None:
            raise EngineDeadError(f"the engine's loop ended: {error!r}") from error
    except BaseException:  # an interrupt, too: none of this call's requests may go on
        manager.discard(requests)
        raise
    return results
