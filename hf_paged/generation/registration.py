"""``register()``: make ``generate(cache_implementation="paged")`` mean what it says, and give calls a shared past.

Owns the patches on transformers' ``GenerationMixin``, and nothing that lasts: pools and counters are in ``models``, the
memory of prompts in ``prompts``. It knows how ``generate()`` is put together (which method prepares the cache, which
one prefills). Decoding loops it leaves alone or, where ``on_engine`` can do the same, replaces as a whole.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_paged import compat
from hf_paged.attention import registry
from hf_paged.config import CacheConfig
from hf_paged.errors import ConfigError
from hf_paged.generation import models, prompts
from hf_paged.generation.paged_cache import PagedCache, pageable_layer
from hf_paged.generation.prompts import Call, Given, calls_here
from hf_paged.model.weights import storage_key

logger = logging.getLogger("hf_paged")

PUBLIC_NAME = "paged"
#: what the keyword argument becomes inside ``generate()``, which re-routes the public word to its own batching
_INTERNAL_NAME = "hf_paged"
_NAMES = (PUBLIC_NAME, _INTERNAL_NAME)
#: modes of ``generate()`` whose loop the engine can take over, and those it takes over only when told to
_ENGINE_MODES, _MORE_ENGINE_MODES = ("greedy_search", "sample"), ("beam_search",)

_lock = threading.RLock()


class _Patches:
    """Attributes that were replaced, each with what it was."""

    def __init__(self) -> None:
        self.replaced: list[tuple[Any, str, Any, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self.replaced)

    def patch(self, owner: Any, name: str, new: Any) -> None:
        self.replaced.append((owner, name, owner.__dict__[name], new))
        setattr(owner, name, new)

    def restore(self) -> None:
        for owner, name, old, new in reversed(self.replaced):
            if owner.__dict__[name] is new:  # else somebody wrapped ours, which then passes calls through
                setattr(owner, name, old)
        self.replaced.clear()


class _Registration(_Patches):
    """What ``register()`` put in place, and the defaults it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.defaults = CacheConfig()
        self.continuous_batching = _Patches()


_registration = _Registration()


def register(
    cache_config: CacheConfig | Mapping[str, Any] | None = None,
    *,
    continuous_batching: bool | None = None,
    **options: Any,
) -> None:
    """Make ``cache_implementation="paged"`` run stock ``generate()`` on paged, shared KV blocks.

    Args:
        cache_config: defaults for every later call, as a CacheConfig or a dict; ``options`` are the same as keywords.
            A call's own ``cache_config=`` goes on top.
        continuous_batching: with True, ``model.generate_batch``, ``model.continuous_batching_context_manager`` and
            ``transformers serve --continuous-batching`` run on hf_paged's engine, too, with these defaults; False gives
            them back to transformers, and None leaves them as they are.

    Idempotent. A second call with other arguments changes the defaults of later calls; pools whose size or block size
    no longer fits are replaced when their model is next used. Raises UnsupportedError on a transformers version that
    is not supported and ConfigError on a bad option.
    """
    compat.check_supported()
    if cache_config is not None and options:
        raise ConfigError("give register() either cache_config or keywords, not both")
    defaults = CacheConfig.from_dict(cache_config if cache_config is not None else options)
    registry.check_name(defaults.attention_backend)
    with _lock:
        _registration.defaults = defaults
        if continuous_batching is not None:
            _set_continuous_batching(continuous_batching)
        if _registration.active:
            return
        names = compat.generation_configuration_utils
        for name, wrap in _WRAPPERS.items():
            _registration.patch(compat.GenerationMixin, name, wrap(compat.GenerationMixin.__dict__[name]))
        _registration.patch(names, "ALL_CACHE_IMPLEMENTATIONS", (*names.ALL_CACHE_IMPLEMENTATIONS, _INTERNAL_NAME))
        models.optimizer_hook.install()


def unregister() -> None:
    """Undo :func:`register`: restore every attribute it touched and drop every pool. Idempotent.

    Calls in progress finish on the blocks they have; their memory goes with them.
    """
    with _lock:
        _set_continuous_batching(False)
        _registration.restore()
        _registration.defaults = CacheConfig()
        models.optimizer_hook.remove()
        models.forget_all()


def is_registered() -> bool:
    """Whether ``register()`` is in force."""
    return _registration.active


def _set_continuous_batching(wanted: bool) -> None:
    patches = _registration.continuous_batching
    if wanted == patches.active:
        return
    from hf_paged.generation import batching_manager, continuous, transformers_serve

    if not wanted:
        patches.restore()
        batching_manager.forget_kept_managers()
        return
    found = continuous.replacements(lambda: _registration.defaults)
    utils = compat.serving_utils()
    if utils is not None:
        found += transformers_serve.replacements(utils)
    for owner, name, wrap in found:
        patches.patch(owner, name, wrap(owner.__dict__[name]))


# -- the patches ------------------------------------------------------------------------------------------------------


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _registration.active:
            return original(self, *args, **kwargs)
        if kwargs.get("cache_implementation") == PUBLIC_NAME:
            kwargs["cache_implementation"] = _INTERNAL_NAME
        call = _call(self, args, kwargs)
        calls_here.calls.append(call)
        returned = None
        try:
            returned = original(self, *args, **kwargs)
            if call.cache is not None:
                call.cache.check_attended()
            prompts.keep_generated(call, returned)
            return returned
        finally:
            calls_here.calls.pop()
            if call.cache is not None and (returned is None or isinstance(returned, torch.Tensor)):
                # Nobody was given the cache. Its blocks return now: a traceback, or a compiler's guards, may keep the
                # object itself alive for long.
                call.cache.free()

    return generate


def _call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    named = compat.arguments_of_generate(args, kwargs)
    given = Given(
        named.get("logits_processor") or (), named.get("stopping_criteria") or (), named.get("prefix_allowed_tokens_fn")
    )
    return Call(model, custom=named.get("custom_generate") is not None, given=given)


def _wrap_prepare_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = generation_config.cache_implementation
        if name is None and generation_config.cache_config and not calls_here.stock_only:
            logger.warning('cache_config has no effect without cache_implementation="paged"')
        if name not in _NAMES:
            return original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        if calls_here.stock_only:
            generation_config.cache_implementation = generation_config.cache_config = None
            return original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        given = compat.cache_in_kwargs(model_kwargs)
        if given is not None and not isinstance(compat.self_attention_cache(given[1]), PagedCache):
            # let stock raise its error about two ways to name the cache
            return original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        config = CacheConfig.from_dict(generation_config.cache_config, _registration.defaults)
        if given is not None and generation_config.cache_config:
            has = compat.self_attention_cache(given[1]).state.shared.config
            if has.geometry != config.geometry:
                raise ConfigError(
                    f"cache_config asks for {config}, but the PagedCache passed in was made with {has}: give one "
                    "of the two, or equal ones"
                )
        # Stock builds the cache, as for the default; only then are its layers replaced. So every model-specific
        # choice of stock (encoder-decoder, layer types, no cache at all) stays stock's.
        options, generation_config.cache_implementation = generation_config.cache_config, None
        generation_config.cache_config = None
        try:
            result = original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        finally:
            generation_config.cache_implementation, generation_config.cache_config = name, options
        mode = str(getattr(generation_mode, "value", generation_mode))
        modes = (*_ENGINE_MODES, *_MORE_ENGINE_MODES) if config.engine else _ENGINE_MODES
        if config.engine is not False and (given is not None or mode not in modes):
            why = "a cache was passed in" if given is not None else f"its mode is {mode}"
            logger.info("paged: this call runs in the stock loop, not on the engine: %s", why)
        if given is None:
            _install_cache(self, generation_config, model_kwargs, generation_mode, config)
        return result

    return _prepare_cache_for_generation


def _install_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, config: CacheConfig
) -> None:
    made = compat.cache_in_kwargs(model_kwargs)
    if made is None:
        if generation_config.use_cache is not False:
            logger.warning("paged: %s takes no standard cache; its own is used", type(model).__name__)
        return
    name, cache = made
    own = compat.self_attention_cache(cache)
    pageable = sum(pageable_layer(layer) for layer in own.layers)
    if type(own) is not compat.DynamicCache or not pageable:
        logger.info("paged: %s keeps no plain keys and values; its stock cache is used", type(model).__name__)
        return
    kv = models.kv_of(model)
    stateful = any(isinstance(layer, compat.LinearAttentionCacheLayerMixin) for layer in own.layers)
    shared = kv.pool_for(config, pageable, storage_key(model), stateful)
    paged = PagedCache.from_dynamic(own, model.config, shared, config)
    mask = model_kwargs.get("attention_mask")
    if generation_config.output_attentions or generation_config.output_hidden_states:
        # they show the padding columns too: keep all, and let the model's own attention make them
        paged.state.force_gather = True
        if mask is not None and not model.config.is_encoder_decoder:
            paged.state.keep_padding(mask.shape[0])
    elif model.config.is_encoder_decoder or "prepare_inputs_for_generation" in model.__dict__:
        pass  # the mask is the encoder's, or the model gets another one (PEFT's virtual tokens come before the padding)
    elif not kv.uses_stock_masks(model):
        # code of its own may read padding columns in its own way, so they must be there
        if isinstance(mask, torch.Tensor):
            paged.state.keep_padding(mask.shape[0])
    elif isinstance(mask, torch.Tensor) and mask.ndim == 2 and "inputs_embeds" not in model_kwargs:
        paged.state.observe_mask(mask, 0, mask.shape[1])
    if own is cache:
        model_kwargs[name] = paged
    else:
        cache.self_attention_cache = paged
    with kv.lock:
        kv.calls += 1
        kv.obstacles, kv.paged_layers = paged.profile.obstacles, [layer.layer_idx for layer in paged.paged_layers]
    call = calls_here.current(model)
    if call is not None:
        call.cache, call.kv, call.config = paged, kv, config
        call.pad_token = compat.pad_token(generation_config)
        mode = str(getattr(generation_mode, "value", generation_mode))
        call.rows_stay = not call.custom and "beam" not in mode and "contrastive" not in mode


def _wrap_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prefill(
        self: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kw: Any
    ) -> Any:
        call = _beginning(self, input_ids, generation_config, model_kwargs)
        if call is None:
            return original(self, input_ids, generation_config, model_kwargs, *args, **kw)
        if call.reused and model_kwargs.get("attention_mask") is None:
            compat.remember_prompt_length(generation_config, input_ids.shape[1])
        outputs = original(self, input_ids, generation_config, model_kwargs, *args, **kw)
        prompts.prompt_done(call)
        return outputs

    return _prefill


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _sample(
        self: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        call = _paged_call(self)
        found = None if call is None else _on_engine(call, *arguments, model_kwargs)
        return original(self, *arguments, **model_kwargs) if found is None else found

    return _sample


def _wrap_beam_search(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _beam_search(
        self: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus)
        call, found = _paged_call(self), None
        if call is not None and call.config is not None and call.config.engine and not generation_config.do_sample:
            found = _on_engine(call, *arguments, None, model_kwargs)
        return original(self, *arguments, **model_kwargs) if found is None else found

    return _beam_search


def _paged_call(model: Any) -> Call | None:
    """The call of ``model`` on this thread, if it has a PagedCache of ours."""
    call = calls_here.current(model)
    return call if call is not None and call.cache is not None and call.config is not None else None


def _on_engine(*arguments: Any) -> torch.Tensor | None:
    from hf_paged.generation import on_engine

    return on_engine.run(*arguments)


def _wrap_assisted(original: Callable[..., Any]) -> Callable[..., Any]:
    own = inspect.signature(original).parameters

    @functools.wraps(original)
    def _assisted_decoding(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # This loop has no prefill: its first forward takes the prompt and the first candidates.
        model_kwargs = {name: value for name, value in kwargs.items() if name not in own}
        call = _beginning(self, input_ids, kwargs.get("generation_config"), model_kwargs, assisted=True)
        if call is not None:
            call.skip = call.reused
        return original(self, input_ids, *args, **kwargs)

    return _assisted_decoding


def _wrap_prepare_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_inputs_for_generation(
        self: Any, input_ids: torch.Tensor, next_sequence_length: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        call = calls_here.current(self)
        if call is None or call.cache is None:
            return original(self, input_ids, next_sequence_length, *args, **kwargs)
        if call.skip and next_sequence_length is None:
            # assisted decoding hands over the whole prompt, whatever the cache holds already
            next_sequence_length, call.skip = input_ids.shape[1] - call.skip, 0
        inputs = original(self, input_ids, next_sequence_length, *args, **kwargs)
        fed = inputs.get("input_ids")
        if call.rows_stay and fed is not None:
            call.fed.append((call.cache.state.length, fed))
        return inputs

    return prepare_inputs_for_generation


def _beginning(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], assisted: bool = False
) -> Call | None:
    """Before the first forward over a prompt: check it and take what is known of it. None: not a new paged call."""
    call = calls_here.current(model)
    given = compat.cache_in_kwargs(model_kwargs)
    if given is not None and isinstance(compat.self_attention_cache(given[1]), PagedCache):
        prompts.check_ids(model, input_ids, model_kwargs)
    if call is None or call.cache is None or call.cache.state.length:
        return None
    # what a reused prefix cannot give: hidden states of the prompt for a drafting head, or a method of the model's own
    # that prepares the shortened first input
    whole = assisted and (
        compat.drafts_from_hidden_states(generation_config)
        or type(model).prepare_inputs_for_generation is not compat.GenerationMixin.prepare_inputs_for_generation
    )
    prompts.begin_prompt(call, input_ids, generation_config, model_kwargs, reuse=not whole)
    call.reused = call.cache.state.length
    return call


#: the methods of ``GenerationMixin`` that ``register()`` wraps
_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "generate": _wrap_generate,
    "prepare_inputs_for_generation": _wrap_prepare_inputs,
    compat.PREPARE_CACHE: _wrap_prepare_cache,
    compat.PREFILL: _wrap_prefill,
    compat.ASSISTED_DECODING: _wrap_assisted,
    compat.SAMPLE: _wrap_sample,
    compat.BEAM_SEARCH: _wrap_beam_search,
}
