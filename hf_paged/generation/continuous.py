"""``register(continuous_batching=True)``: transformers' own way to call continuous batching, on hf_paged's engine.

Owns what ``model.init_continuous_batching`` and ``model.generate_batch`` are replaced with, and says what stock's
configuration means for the engine. The manager that they and ``model.continuous_batching_context_manager`` drive is in
``batching_manager``; the HTTP requests of ``transformers serve`` are translated in ``transformers_serve``.

Of stock's ContinuousBatchingConfig the engine honours page_size (block_size in 5.17: tokens per block), num_blocks (of
that size), max_memory_percent (of the memory that is free), max_batch_tokens, max_requests_per_batch,
allow_block_sharing (prefix reuse), scheduler_type ("fifo" and "prefill_first" mean "fcfs"; the engine's own policies
may be named too), return_logprobs (of the model's own scores, before processors), seed and cpu_offload_space. The rest
describes stock's CUDA graphs, compilation, flash attention and padding, which do not exist here; every request has
processors of its own, and none is dropped.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_paged import compat
from hf_paged.cache.pool import free_memory
from hf_paged.compat import GenerationConfig
from hf_paged.config import CacheConfig, EngineConfig
from hf_paged.errors import EngineDeadError
from hf_paged.generation.batching_manager import Manager
from hf_paged.generation.outbox import Queued

_STOCK_SCHEDULERS = ("fifo", "prefill_first")


def replacements(defaults: Callable[[], CacheConfig]) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """A class, methods of it, and what makes the ones to replace them of the old ones."""
    return [
        (compat.ContinuousMixin, "init_continuous_batching", functools.partial(_wrap_init, defaults=defaults)),
        (compat.ContinuousMixin, "generate_batch", _wrap_generate_batch),
    ]


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
            named = {name: options.pop(name, None) for name in ("max_new_tokens", "eos_token_id", "tokenizer")}
            config = manager.config_for(generation_config, **named, options=options)
            requests = manager.queue_all(inputs, config, record_timestamps=record_timestamps)
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
        if manager.fault is not None:
            raise EngineDeadError(f"the engine's loop ended: {manager.fault!r}") from manager.fault
    except BaseException:  # an interrupt, too: none of this call's requests may go on
        manager.discard(requests)
        raise
    return results
