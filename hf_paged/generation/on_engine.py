"""The rows of a stock ``generate()`` call as requests of the continuous-batching engine: whether, and why not.

Everything before and after the decoding loop stays stock: it checks arguments, makes the mask, expands rows, builds
stopping criteria. Here the loop itself is replaced, where the result is certain to be the stock loop's, or, with
``cache_config={"engine": True}``, wherever the engine can express the call; else the stock loop runs over a PagedCache,
and one log line says why. ``engine_rows`` does the running.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from hf_paged import compat
from hf_paged.attention import registry
from hf_paged.errors import OutOfBlocksError, UnsupportedError
from hf_paged.generation import engine_rows
from hf_paged.generation.engine_rows import ModelChangedError, Rows
from hf_paged.generation.paged_cache import PagedCache
from hf_paged.generation.prompts import Call, check_ids, plain_rows, prompt_namespace
from hf_paged.model.quantized import quantizes_rows
from hf_paged.model.runner import ModelRunner
from hf_paged.model.view import is_compiled
from hf_paged.model.weights import runtime_signature

logger = logging.getLogger("hf_paged")


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
    """The sequences that ``_sample`` or ``_beam_search`` would return, or None when this call is one for the stock
    loop.

    Raises what a row of its own would: OutOfBlocksError for one that cannot fit even alone, the error of a processor or
    a criterion.
    """
    assert call.config is not None
    if call.config.engine is False:
        return None
    runtime = runtime_signature(call.model)
    if runtime is None:
        found: Rows | str = "the model is in training mode, or has hooks or methods that may treat rows differently"
    else:
        why = _obstacle(call, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        found = why or _rows(
            call, input_ids, logits_processor, stopping_criteria, generation_config, runtime, model_kwargs
        )
    if isinstance(found, str):
        logger.info("paged: this call runs in the stock loop, not on the engine: %s", found)
        return None
    drawn = torch.get_rng_state()
    try:
        generated = engine_rows.run(found)
    except ModelChangedError as error:
        assert call.kv is not None
        assert runtime is not None
        with call.kv.lock:
            if call.kv.model_config == runtime[0]:  # another thread's call may have gone on to another
                call.kv.no_engine = str(error)
        torch.set_rng_state(drawn)  # the stock loop draws what it would have drawn
        logger.info("paged: this call runs in the stock loop, not on the engine: %s", error)
        return None
    beams = f", as {found.num_beams} beams each" if found.num_beams > 1 else ""
    logger.info("paged: %d rows ran on the engine%s", len(found.prompts), beams)
    if found.num_beams == 1:
        return _assembled(input_ids, [tokens for (tokens,) in generated], call.pad_token or 0)
    prompts = found.columns.long().repeat_interleave(len(generated[0]), dim=0)
    return _assembled(prompts, [tokens for row in generated for tokens in row], compat.beam_filling(generation_config))


def _rows(
    call: Call,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    runtime: tuple[Any, ...],
    model_kwargs: dict[str, Any],
) -> Rows | str:
    """The call as rows for the engine; or why there is no such thing."""
    assert call.config is not None
    prompts = _prompts(call, input_ids, model_kwargs)
    if isinstance(prompts, str):
        return prompts
    if not call.config.engine:
        padded = any(len(prompt) < input_ids.shape[1] for prompt in prompts)
        why = _uncertain(call, logits_processor, generation_config, padded)
        if why is not None:
            return why
    try:
        runner = _runner(call, runtime)
    except UnsupportedError as error:
        return str(error)
    if not call.config.engine:
        if runner.recurrent:
            return "the model keeps recurrent state, which its own layers update, to stock's last bit"
        if not runner.packed:
            return "the model's own attention runs, to stock's last bit"
    namespace = prompt_namespace(call, runtime)
    shares = call.config.prefix_caching and not runner.recurrent
    step = int(generation_config.num_beams or 1)
    rows = Rows(
        call,
        runner,
        prompts[::step],
        input_ids[::step],
        generation_config,
        namespace if shares else None,
        list(stopping_criteria),
    )
    unfit = _unfit(rows)
    if unfit is not None:
        return unfit
    epoch = None if namespace is None else namespace[:-1]
    return dataclasses.replace(rows, runner=runner.for_call(epoch, call.config.optimize))


def _unfit(rows: Rows) -> str | None:
    """What of a call's ends the engine cannot express."""
    if rows.new_tokens < 1:
        return "max_length leaves no room for a token"
    if rows.num_beams > 1:
        if rows.max_length > rows.generation_config.max_length:
            return "a stopping criterion allows for more tokens than max_length"
        if getattr(rows.generation_config, "low_memory", None):
            return "low_memory is for stock's beam search to judge"
    elif rows.others and len(rows.prompts) > 1 and rows.call.pad_token is None:
        return "there is no pad token for rows that a stopping criterion ends early"
    return None


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


def _assembled(input_ids: torch.Tensor, generated: Sequence[Sequence[int]], filling: int) -> torch.Tensor:
    """Prompts as they came, and what was generated, rows that ended early filled up as stock does."""
    longest = max(map(len, generated))
    out = input_ids.new_full((len(generated), longest), filling, dtype=torch.int64)
    for i, tokens in enumerate(generated):
        out[i, : len(tokens)] = torch.tensor(tokens, dtype=out.dtype)
    return torch.cat([input_ids, out], dim=1)


def _prompts(call: Call, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]] | str:
    """The rows' tokens without padding, or why they cannot be told."""
    assert call.config is not None
    if call.config.engine:
        model_kwargs = {name: value for name, value in model_kwargs.items() if name not in compat.LOOP_KWARGS}
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
    """What of a call the engine cannot express, or may not."""
    assert call.config is not None
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
    if call.config.engine:
        return _seen_as_a_batch(call, logits_processor, generation_config)
    given = [*call.given.criteria, *call.given.processors]
    more = compat.ends(stopping_criteria)[2]
    for criterion in stopping_criteria:
        if any(criterion is one for one in [*more, *given]):
            return f"the stopping criterion {type(criterion).__name__}"
    for processor in logits_processor:
        own = compat.is_built_in(processor) and not any(processor is one for one in given)
        if not own or type(processor) is PrefixConstrainedLogitsProcessor:
            return f"the logits processor {type(processor).__name__} sees the batch as a whole"
    return None


def _seen_as_a_batch(call: Call, logits_processor: Any, generation_config: Any) -> str | None:
    """Which processor cannot be asked about one row at a time."""
    for processor in call.given.processors:
        if compat.made_for_a_batch(processor):
            return f"the logits processor {type(processor).__name__} sees the batch as a whole"
    if (generation_config.num_beams or 1) > 1:
        # where no beam's allowed tokens are left by the processors before, it lets all beams have theirs
        for processor in list(logits_processor)[1:]:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                return "prefix_allowed_tokens_fn after other processors looks at all beams"
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
    if any(map(quantizes_rows, call.model.parameters())):
        return "rows are rounded to few bits before they are multiplied, which makes steps of the last bits"
    for processor in logits_processor:
        if padded and compat.looks_at_padding(processor):
            return f"the logits processor {type(processor).__name__} looks at padding"
    return None


def _runner(call: Call, runtime: tuple[Any, ...]) -> ModelRunner:
    """The engine's way into this model, over the pool that its paged calls share; made once for a pool and a
    configuration, by which layers of the cache are told their windows.

    Raises UnsupportedError for a model that the engine cannot run, at once where that is known.
    """
    kv, cache = call.kv, call.cache
    assert kv is not None
    assert cache is not None
    assert call.config is not None
    shared = cache.state.shared
    with kv.lock:
        if kv.model_config != runtime[0]:
            kv.model_config, kv.runner, kv.no_engine = runtime[0], None, None
        if kv.no_engine is not None:
            raise UnsupportedError(kv.no_engine)
        known = kv.runner
        if known is None or known.pool is not shared.pool:
            try:
                known = ModelRunner(
                    call.model,
                    block_size=shared.config.block_size,
                    attention_backend=shared.config.attention_backend,
                    optimize=call.config.optimize,  # for what is set aside; else every call says so itself
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
    known.refresh()  # which waits for a step of other calls, and those may want the lock
    return known
