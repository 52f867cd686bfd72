"""The rows of a stock ``generate()`` call as requests of the continuous-batching engine.

Everything before and after the decoding loop stays stock: it checks arguments, makes the mask, expands rows, builds
stopping criteria. Here the loop itself is replaced, where the result is certain to be the stock loop's, or, with
``cache_config={"engine": True}``, wherever the engine can express the call; else the stock loop runs over a PagedCache,
and one log line says why.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from array import array
from typing import Any

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_paged import compat
from hf_paged.attention import registry
from hf_paged.attention.obstacles import Obstacle
from hf_paged.engine.beams import Beam
from hf_paged.engine.request import Request
from hf_paged.engine.scheduler import Scheduler
from hf_paged.engine.stepper import Event, Stepper
from hf_paged.errors import InternalError, OutOfBlocksError, UnsupportedError
from hf_paged.generation.paged_cache import PagedCache
from hf_paged.generation.prompts import Call, check_ids, plain_rows, prompt_namespace
from hf_paged.model.runner import ModelRunner
from hf_paged.model.view import is_compiled
from hf_paged.model.weights import runtime_signature
from hf_paged.sampling.sampler import SamplerState
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger("hf_paged")

#: tokens that run in one step, and rows
_MAX_BATCHED_TOKENS, _MAX_SEQS = 512, 256
#: how often a call looks whether others have given blocks back, when it cannot go on without
_WAIT_S = 0.002
_private = itertools.count()


def run(
    call: Call,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """The sequences that ``_sample`` would return, or None when this call is one for the stock loop.

    Raises what a row of its own would: OutOfBlocksError for one that cannot fit even alone, a processor's error.
    """
    assert call.config is not None
    if call.config.engine is False:
        return None
    runtime = runtime_signature(call.model)
    if runtime is None:
        found: tuple[ModelRunner, list[list[int]]] | str = (
            "the model is in training mode, or has hooks or methods that may treat rows differently"
        )
    else:
        why = _obstacle(call, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        found = why or _runner_and_rows(call, input_ids, logits_processor, generation_config, model_kwargs)
    if isinstance(found, str):
        logger.info("paged: this call runs in the stock loop, not on the engine: %s", found)
        return None
    runner, rows = found
    generated = _generate(call, runner, rows, input_ids, generation_config, runtime)
    logger.info("paged: %d rows ran on the engine", len(rows))
    return _assembled(input_ids, generated, call.pad_token)


def _runner_and_rows(
    call: Call, input_ids: torch.Tensor, logits_processor: Any, generation_config: Any, model_kwargs: dict[str, Any]
) -> tuple[ModelRunner, list[list[int]]] | str:
    """What runs the model, and the rows' tokens without padding; or why there is no such thing for this call."""
    assert call.config is not None
    rows = _rows(call, input_ids, model_kwargs)
    if isinstance(rows, str):
        return rows
    if generation_config.max_length <= input_ids.shape[1]:
        return "max_length leaves no room for a token"
    if not call.config.engine:
        padded = any(len(row) < input_ids.shape[1] for row in rows)
        why = _uncertain(call, logits_processor, generation_config, padded)
        if why is not None:
            return why
    try:
        runner = _runner(call)
    except UnsupportedError as error:
        return str(error)
    if not runner.packed and not call.config.engine:
        return "the model's own attention runs, to stock's last bit"
    return runner, rows


def _generate(
    call: Call,
    runner: ModelRunner,
    rows: list[list[int]],
    input_ids: torch.Tensor,
    generation_config: Any,
    runtime: tuple[Any, ...] | None,
) -> list[list[int]]:
    """The tokens generated for each row."""
    assert call.cache is not None
    assert call.config is not None
    manager = call.cache.state.shared.manager
    assert manager is not None
    private = None
    namespace = prompt_namespace(call, runtime) if call.config.prefix_caching else None
    if namespace is None:
        namespace = private = (("private", next(_private)),)
    sampling = bool(generation_config.do_sample)
    new_tokens = generation_config.max_length - input_ids.shape[1]
    eos = compat.eos_tokens(generation_config)
    seed = int(torch.randint(1 << 62, (1,))) if sampling else 0
    params = SamplingParams(temperature=1.0 if sampling else 0.0, max_tokens=new_tokens)
    kv = call.kv
    assert kv is not None
    scheduler = Scheduler(
        manager,
        max_num_seqs=_MAX_SEQS,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        others=lambda: any(other.running for other in kv.schedulers if other is not scheduler),
    )
    requests: list[Request] = []
    states: dict[str, SamplerState | Beam] = {}
    stepper = Stepper(scheduler, runner, states, shared=True)
    with kv.lock:
        kv.schedulers = [*kv.schedulers, scheduler]  # a new list: others may be going through the old one
    try:
        for i, row in enumerate(rows):
            request = Request(str(i), array("q", row), new_tokens, stop_token_ids=eos, namespace=namespace)
            scheduler.add(request)
            requests.append(request)
            processors = compat.processors_of_row(call.model, generation_config, input_ids, row)
            states[request.request_id] = SamplerState(params, processors, seed, i)
        while scheduler.has_work:
            events = _step(call, stepper)
            for event in events:
                if event.request.error is not None:
                    raise event.request.error
            if not events and not scheduler.running:
                time.sleep(_WAIT_S)  # for blocks that another call is to give back
    finally:
        with kv.lock:
            kv.schedulers = [other for other in kv.schedulers if other is not scheduler]
        for request in requests:
            scheduler.abort(request.request_id)
        if private is not None:
            manager.drop(private)
    _count(call, runner, requests)
    return [list(request.tokens[len(request.prompt) :]) for request in requests]


def _count(call: Call, runner: ModelRunner, requests: list[Request]) -> None:
    """For ``cache_stats()``."""
    kv = call.kv
    assert kv is not None
    with kv.lock:
        kv.prompt_tokens += sum(len(request.prompt) for request in requests)
        kv.hit_tokens += sum(max(request.num_cached, 0) for request in requests)
        kv.paged_layers = sorted(runner.pool.layers)
        kv.obstacles = dict.fromkeys(
            kv.paged_layers, None if runner.packed else "its own attention runs on gathered keys"
        )


def _try_stock_loop(call: Call, runner: ModelRunner) -> None:
    """One forward over a PagedCache, so that calls for the stock loop find out here whether the model's attention reads
    blocks. Once it is compiled, they could not."""
    if is_compiled(call.model):
        return
    assert call.config is not None
    config = dataclasses.replace(call.config, memory=None, num_blocks=2, block_size=16, prefix_memory=None, engine=None)
    cache = PagedCache(call.model.config, cache_config=config)
    ids = torch.tensor([[3 % runner.vocab_size] * 8], device=runner.device)
    with torch.no_grad():
        call.model(input_ids=ids, use_cache=True, **{compat.CACHE_KWARG: cache})


def _step(call: Call, stepper: Stepper) -> list[Event]:
    try:
        return stepper.step()
    except InternalError as error:  # its attention is not what it was when it was tried out
        assert call.kv is not None
        assert call.cache is not None
        call.kv.no_engine = str(error)
        for layer in call.cache.paged_layers:
            call.cache.profile.record(layer.layer_idx, Obstacle("its attention was once not called"))
        raise


def _assembled(input_ids: torch.Tensor, generated: list[list[int]], pad: int | None) -> torch.Tensor:
    """Prompts as they came, and what was generated, rows that ended early filled up as stock does."""
    longest = max(map(len, generated))
    out = input_ids.new_full((len(generated), longest), 0 if pad is None else pad)
    for i, tokens in enumerate(generated):
        out[i, : len(tokens)] = torch.tensor(tokens, dtype=out.dtype)
    return torch.cat([input_ids, out], dim=1)


def _rows(call: Call, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]] | str:
    """The rows' tokens without padding, or why they cannot be told."""
    check_ids(call.model, input_ids, model_kwargs)
    rows = plain_rows(call, input_ids, model_kwargs)
    if rows is None:
        return "its prompts are more than left-padded token ids"
    if any(not row for row in rows):
        return "a prompt is empty"
    return rows


def _obstacle(
    call: Call, logits_processor: Any, stopping_criteria: Any, generation_config: Any, synced_gpus: bool, streamer: Any
) -> str | None:
    """What of a call the engine cannot express."""
    if synced_gpus:
        return "synced_gpus keeps the steps of several processes together"
    if call.custom:
        return "custom_generate brings a loop of its own"
    if streamer is not None:
        return "a streamer was given"
    if generation_config.return_dict_in_generate:
        return "return_dict_in_generate asks for more than tokens"
    if generation_config.guidance_scale not in (None, 1, 1.0):
        return "guidance_scale runs the model a second time"
    for criterion in stopping_criteria:
        if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria):
            return f"the stopping criterion {type(criterion).__name__}"
    for processor in logits_processor:
        home = type(processor).__module__
        if not home.startswith("transformers.") or type(processor) is PrefixConstrainedLogitsProcessor:
            return f"the logits processor {type(processor).__name__} sees the batch as a whole"
    return None


def _uncertain(call: Call, logits_processor: Any, generation_config: Any, padded: bool) -> str | None:
    """Why the engine's result may not be the stock loop's."""
    assert call.config is not None
    if generation_config.do_sample:
        return "sampling draws from torch's generator, row after row"
    if call.config.attention_backend == registry.GATHER:
        return "attention_backend is 'gather'"
    if is_compiled(call.model):
        return "the model is compiled, for the shapes of the stock loop"
    for processor in logits_processor:
        if padded and compat.looks_at_padding(processor):
            return f"the logits processor {type(processor).__name__} looks at padding"
    return None


def _runner(call: Call) -> ModelRunner:
    """The engine's way into this model, over the pool that its paged calls share; made once for a pool.

    Raises UnsupportedError for a model that the engine cannot run, at once where that is known.
    """
    kv, cache = call.kv, call.cache
    assert kv is not None
    assert cache is not None
    shared = cache.state.shared
    with kv.lock:
        if kv.no_engine is not None:
            raise UnsupportedError(kv.no_engine)
        known = kv.runner
        if known is None or known.pool is not shared.pool:
            try:
                known = ModelRunner(
                    call.model,
                    block_size=shared.config.block_size,
                    attention_backend=shared.config.attention_backend,
                    pool=shared.pool,
                    join=shared.join,
                )
                _try_stock_loop(call, known)
            except OutOfBlocksError:
                raise
            except Exception as error:  # whatever a model raises when it is tried out means the same: not this way
                kv.no_engine = str(error)
                raise UnsupportedError(f"trying the model out failed: {error}") from error
            kv.runner = known
        if known.recurrent:
            raise UnsupportedError("the model keeps recurrent state, which these calls do not share yet")
        known.refresh()
        return known
