"""``register()``: make ``generate(cache_implementation="paged")`` mean what it says, and give calls a shared past.

Owns the per-model pools, the three patches on transformers' ``GenerationMixin`` and the memory of prompts across calls.
It knows how ``generate()`` is put together (which method prepares the cache, which one prefills) and leaves the
decoding loops alone: sampling, beams, assisted decoding, stopping and streaming stay stock code over a PagedCache.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged import compat
from hf_paged.config import CacheConfig
from hf_paged.errors import ConfigError, InvalidRequestError
from hf_paged.generation.paged_cache import PagedCache, pageable_layer
from hf_paged.generation.shared import SharedKV
from hf_paged.generation.weights import OptimizerHook, WeightsWatch, runtime_signature, storage_key

logger = logging.getLogger("hf_paged")

PUBLIC_NAME = "paged"
#: what the keyword argument becomes inside ``generate()``, which re-routes the public word to its own batching
_INTERNAL_NAME = "hf_paged"
_NAMES = (PUBLIC_NAME, _INTERNAL_NAME)

#: what may be in ``model_kwargs`` without changing the keys and values of a prompt's tokens
_NEUTRAL_KWARGS = frozenset(
    {
        *compat.CACHE_KWARGS, "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep",
        "output_router_logits", "return_dict",
    }
)  # fmt: skip


@dataclass
class CacheStats:
    """What a model's paged cache holds and has done since it was made. Token counts are of prompts, per row.

    Attributes:
        block_size: tokens per block.
        total_blocks, free_blocks: usable blocks in the pool, and those holding nothing.
        cached_blocks: blocks kept for prefixes that no running call uses.
        used_blocks: blocks that running calls or returned caches hold.
        bytes_per_block, used_bytes, cached_bytes, reserved_bytes: sizes over all layers; ``reserved_bytes`` is address
            space, which on CPU costs nothing until touched.
        prompt_tokens: tokens in all prompts so far, padding excluded.
        hit_tokens: of those, taken from prefixes computed by earlier calls.
        prefilled_tokens: of those, computed.
        calls: paged ``generate()`` calls.
        evicted_blocks: cached blocks that had to give way.
        weights_epoch: grows when the weights are seen to have changed.
        native: layers that attend on blocks directly; gathered: layers that do not, with the reason.
    """

    block_size: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    bytes_per_block: int = 0
    used_bytes: int = 0
    cached_bytes: int = 0
    reserved_bytes: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefilled_tokens: int = 0
    calls: int = 0
    evicted_blocks: int = 0
    weights_epoch: int = 0
    native: list[int] = field(default_factory=list)
    gathered: dict[int, str] = field(default_factory=dict)


class ModelKV:
    """What is kept for one model between calls. Holds no reference to the model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.shared: SharedKV | None = None
        self.storage: tuple[Any, ...] = ()
        self.watch = WeightsWatch()
        self.calls = self.prompt_tokens = self.hit_tokens = 0
        #: what the model's profile says of each layer that has blocks
        self.obstacles: dict[int, str | None] = {}
        self.paged_layers: list[int] = []
        self._stock_masks: bool | None = None

    def uses_stock_masks(self, model: Any) -> bool:
        """Whether any of the model's code builds masks with transformers' functions, which hide padding exactly."""
        if self._stock_masks is None:
            homes = {type(module).__module__ for module in model.modules()}
            ours = compat.masking_utils.__name__
            self._stock_masks = any(
                getattr(value, "__module__", None) == ours
                for home in homes
                if home.startswith("transformers.models.") or not home.startswith(("transformers.", "torch."))
                for value in vars(sys.modules[home]).values()
            )
        return self._stock_masks

    def served(self) -> tuple[list[int], dict[int, str]]:
        """Layers that attend on blocks, and those that do not with the reason."""
        missing = "its keys never reached the attention interface"
        why = {i: self.obstacles.get(i, missing) for i in self.paged_layers}
        return [i for i, reason in why.items() if reason is None], {i: r for i, r in why.items() if r is not None}

    def pool_for(self, config: CacheConfig, num_layers: int, storage: tuple[Any, ...]) -> SharedKV:
        """The pool for this geometry and these dtypes. Others replace it; calls still on the old one keep theirs."""
        with self.lock:
            if self.shared is None or self.shared.config.geometry != config.geometry or self.storage != storage:
                self.shared, self.storage = SharedKV(config, num_layers), storage
            return self.shared

    def clear(self) -> None:
        with self.lock:
            self.shared = None
            self.watch.changed()


@dataclass
class _Call:
    """One ``generate()`` in progress on this thread."""

    model: Any
    #: a decoding loop of the user's, which may return other tokens than it ran
    custom: bool = False
    cache: PagedCache | None = None
    kv: ModelKV | None = None
    config: CacheConfig | None = None
    namespace: tuple[Any, ...] | None = None
    #: rows of the returned sequences are rows of the cache, so that generated tokens can be kept too
    rows_stay: bool = False
    prompt: list[list[int]] | None = None
    #: what finished rows are filled up with
    pad_token: int | None = None


class _CallStack(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        #: this thread is trying something out with stock calls, which must not be paged
        self.stock_only = False


_stack = _CallStack()
_models: weakref.WeakKeyDictionary[Any, ModelKV] = weakref.WeakKeyDictionary()
_models_lock = threading.RLock()
_hook = OptimizerHook()


class _Registration:
    """The patches in force, each with what it replaced."""

    def __init__(self) -> None:
        self.defaults = CacheConfig()
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


_registration = _Registration()


def register(cache_config: CacheConfig | Mapping[str, Any] | None = None, **options: Any) -> None:
    """Make ``cache_implementation="paged"`` run stock ``generate()`` on paged, shared KV blocks.

    Args:
        cache_config: defaults for every later call, as a CacheConfig or a dict; ``options`` are the same as keywords.
            A call's own ``cache_config=`` goes on top.

    Idempotent. A second call with other arguments changes the defaults of later calls; pools whose size or block size
    no longer fits are replaced when their model is next used. Raises UnsupportedError on a transformers version that
    is not supported and ConfigError on a bad option.
    """
    compat.check_supported()
    if cache_config is not None and options:
        raise ConfigError("give register() either cache_config or keywords, not both")
    defaults = CacheConfig.from_dict(cache_config if cache_config is not None else options)
    with _models_lock:
        _registration.defaults = defaults
        if _registration.active:
            return
        mixin = compat.GenerationMixin
        names = compat.generation_configuration_utils
        _registration.patch(mixin, "generate", _wrap_generate(mixin.__dict__["generate"]))
        _registration.patch(
            mixin,
            "_prepare_cache_for_generation",
            _wrap_prepare_cache(mixin.__dict__["_prepare_cache_for_generation"]),
        )
        _registration.patch(mixin, "_prefill", _wrap_prefill(mixin.__dict__["_prefill"]))
        _registration.patch(names, "ALL_CACHE_IMPLEMENTATIONS", (*names.ALL_CACHE_IMPLEMENTATIONS, _INTERNAL_NAME))
        _hook.install()


def unregister() -> None:
    """Undo :func:`register`: restore every attribute it touched and drop every pool. Idempotent.

    Calls in progress finish on the blocks they have; their memory goes with them.
    """
    with _models_lock:
        _registration.restore()
        _registration.defaults = CacheConfig()
        _hook.remove()
        for kv in list(_models.values()):
            kv.clear()
        _models.clear()


def is_registered() -> bool:
    """Whether ``register()`` is in force."""
    return _registration.active


# -- what users ask about a model -------------------------------------------------------------------------------------


def cache_stats(model: Any) -> CacheStats:
    """What the paged cache of ``model`` holds and has done; all zeros before its first paged call."""
    kv = _known(model)
    if kv is None:
        return CacheStats()
    with kv.lock:
        stats = CacheStats(
            calls=kv.calls,
            prompt_tokens=kv.prompt_tokens,
            hit_tokens=kv.hit_tokens,
            prefilled_tokens=kv.prompt_tokens - kv.hit_tokens,
            weights_epoch=kv.watch.epoch,
            native=kv.served()[0],
            gathered=kv.served()[1],
        )
        shared = kv.shared
    if shared is not None and shared.manager is not None:
        blocks, per_block = shared.manager.stats(), shared.pool.bytes_per_block
        stats.block_size = shared.config.block_size
        stats.total_blocks, stats.free_blocks = blocks.num_blocks - 1, blocks.free_blocks
        stats.cached_blocks, stats.used_blocks = blocks.evictable_blocks, blocks.owned_blocks
        stats.bytes_per_block = per_block
        stats.used_bytes, stats.cached_bytes = stats.used_blocks * per_block, stats.cached_blocks * per_block
        stats.reserved_bytes = shared.pool.reserved_bytes
        stats.evicted_blocks = blocks.evicted_blocks
    return stats


def clear(model: Any) -> None:
    """Forget every prefix of ``model`` and return its memory. Caches still in use keep theirs until dropped."""
    kv = _known(model)
    if kv is not None:
        kv.clear()


def weights_changed(model: Any) -> None:
    """Say that the weights of ``model`` changed in a way that cannot be seen from outside.

    In-place writes, optimizer steps, ``load_state_dict`` and adapter switches are noticed without this. It is for
    partial writes through ``.data`` to models above 2 GiB on CPU, whose bytes are only sampled.
    """
    kv = _known(model)
    if kv is not None:
        kv.watch.changed()


def check_invariants(model: Any) -> None:
    """Raise InternalError unless the books of the model's pool balance. For tests and bug reports."""
    kv = _known(model)
    if kv is not None and kv.shared is not None and kv.shared.manager is not None:
        kv.shared.manager.check_invariants()


def _known(model: Any) -> ModelKV | None:
    """What is kept for ``model``, or for the model inside a PEFT, DDP or torch.compile wrapper."""
    while model is not None:
        kv = _models.get(model)
        if kv is not None:
            return kv
        inner = getattr(model, "get_base_model", None)
        model = inner() if inner is not None else getattr(model, "module", getattr(model, "_orig_mod", None))
    return None


def _kv_of(model: Any) -> ModelKV:
    with _models_lock:
        kv = _models.get(model)
        if kv is None:
            kv = _models[model] = ModelKV()
            _hook.watches.add(kv.watch)
        return kv


# -- the patches ------------------------------------------------------------------------------------------------------


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _registration.active:
            return original(self, *args, **kwargs)
        if kwargs.get("cache_implementation") == PUBLIC_NAME:
            kwargs["cache_implementation"] = _INTERNAL_NAME
        call = _Call(self, custom=kwargs.get("custom_generate") is not None)
        _stack.calls.append(call)
        returned = None
        try:
            returned = original(self, *args, **kwargs)
            if call.cache is not None:
                call.cache.check_attended()
            _keep_generated(call, returned)
            return returned
        finally:
            _stack.calls.pop()
            if call.cache is not None and (returned is None or isinstance(returned, torch.Tensor)):
                # Nobody was given the cache. Its blocks return now: a traceback, or a compiler's guards, may keep the
                # object itself alive for long.
                call.cache.free()

    return generate


def _wrap_prepare_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = generation_config.cache_implementation
        if name not in _NAMES:
            return original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        if _stack.stock_only:
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
    kv = _kv_of(model)
    paged = PagedCache.from_dynamic(own, model.config, kv.pool_for(config, pageable, storage_key(model)), config)
    mask = model_kwargs.get("attention_mask")
    if generation_config.output_attentions or generation_config.output_hidden_states:
        # they show the padding columns too: keep all, and let the model's own attention make them
        paged.state.force_gather = True
        if mask is not None and not model.config.is_encoder_decoder:
            paged.state.keep_padding(mask.shape[0])
    elif model.config.is_encoder_decoder:
        pass  # the mask is the encoder's and says nothing about the decoder
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
    kv.calls += 1
    kv.obstacles, kv.paged_layers = paged.profile.obstacles, [layer.layer_idx for layer in paged.paged_layers]
    call = _stack.calls[-1] if _stack.calls and _stack.calls[-1].model is model else None
    if call is not None:
        call.cache, call.kv, call.config = paged, kv, config
        pad = getattr(generation_config, "_pad_token_tensor", None)
        call.pad_token = None if pad is None else int(pad)
        mode = str(getattr(generation_mode, "value", generation_mode))
        call.rows_stay = not call.custom and "beam" not in mode and "contrastive" not in mode


def _wrap_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prefill(
        self: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kw: Any
    ) -> Any:
        call = _stack.calls[-1] if _stack.calls else None
        if call is None or call.model is not self or call.cache is None or call.cache.state.length:
            return original(self, input_ids, generation_config, model_kwargs, *args, **kw)
        _check_ids(self, input_ids, model_kwargs)
        state = call.cache.state
        _begin_prompt(call, input_ids, generation_config, model_kwargs)
        state_length = state.length
        if state_length and model_kwargs.get("attention_mask") is None:
            # from 5.20 on, stock slices by the mask's recorded length; before, it needs the mask itself
            generation_config._mask_length = input_ids.shape[1]
        outputs = original(self, input_ids, generation_config, model_kwargs, *args, **kw)
        state.end_prompt()
        _keep(call, call.prompt)
        return outputs

    return _prefill


def _check_ids(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Ids outside the vocabulary end in an IndexError deep inside an embedding, or on a GPU in a dead context."""
    if input_ids.dtype.is_floating_point or model_kwargs.get("inputs_embeds") is not None or not input_ids.numel():
        return
    if any(isinstance(v, torch.Tensor) for k, v in model_kwargs.items() if k not in _NEUTRAL_KWARGS):
        return  # placeholders of images and the like may lie outside the vocabulary
    embeddings = model.get_input_embeddings()
    size = getattr(embeddings, "num_embeddings", None)
    if size is None or model.config.is_encoder_decoder:
        return
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= size:
        bad = high if high >= size else low
        raise InvalidRequestError(
            f"input_ids holds token id {bad}, the model's vocabulary is 0..{size - 1}: was the prompt made with "
            "another model's tokenizer?"
        )


# -- prefixes across calls --------------------------------------------------------------------------------------------


def _begin_prompt(call: _Call, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Before the first forward: share identical rows, and take what earlier calls computed."""
    cache, kv, config = call.cache, call.kv, call.config
    assert cache is not None
    assert kv is not None
    assert config is not None
    state, model = cache.state, call.model
    if model.config.is_encoder_decoder or input_ids.dtype.is_floating_point or input_ids.ndim != 2:
        return
    if not input_ids.numel():
        return  # stock's error, or stock's answer to an empty prompt
    batch, width = input_ids.shape
    if not state.pads_known:
        state.keep_padding(batch)
    if len(state.pads_np) != batch:
        return
    if not _prompt_decides(model_kwargs, input_ids) or _mask_has_holes(model_kwargs, state):
        return
    pads = state.pads_np.tolist()
    rows = [row[pad:] for row, pad in zip(input_ids.tolist(), pads, strict=True)]
    if not state.force_gather and not any(cache.profile.obstacles.values()):
        # Equal rows of one batch can differ in the last bit (a matrix kernel treats its edge rows differently), so
        # where the result must be stock's to the bit, every row keeps its own.
        first: dict[tuple[int, ...], int] = {}
        state.share_prompts([first.setdefault((pads[i], *row), i) for i, row in enumerate(rows)])
    call.prompt = rows
    kv.prompt_tokens += sum(len(row) for row in rows)
    if not config.prefix_caching or any(cache.is_linear) or len(cache.paged_layers) != _attending(cache):
        return
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return  # the first step's outputs would lack the columns that were not computed
    if generation_config.prefill_chunk_size is not None and compat.transformers_version() < (5, 23):
        return  # before, chunked prefill takes its positions from the first column whatever the cache holds
    runtime = runtime_signature(model)
    if runtime is None:
        return
    manager = cache.state.shared.manager
    with kv.lock:
        before, epoch = kv.watch.epoch, kv.watch.observe(model)
        if epoch is None:
            return  # weights that cannot be read cannot be watched
        if manager is not None and epoch != before:
            manager.drop(lambda namespace: namespace[0] != ("weights", epoch))  # can never be matched again
    call.namespace = (("weights", epoch), ("salt", config.salt), *runtime)
    if manager is None:
        return
    # The matches are pinned, so nothing they hold can go while the model is tried out.
    found = [manager.match_prefix(call.namespace, row, max_tokens=max(len(row) - 1, 0)) for row in rows]
    columns = min([width - 1, *(pad + match.num_tokens for pad, match in zip(pads, found, strict=True))])
    useful = columns > min(pads)
    if useful and cache.profile.continues is None:
        cache.profile.continues = _can_continue(model, max(rows, key=len))
    if not useful or not cache.profile.continues:
        for match in found:
            manager.release(match)
        return
    state.adopt(found, columns)
    for layer in cache.paged_layers:
        layer.length = columns
    kv.hit_tokens += sum(max(columns - pad, 0) for pad in pads)


def _can_continue(model: Any, tokens: list[int]) -> bool:
    """Try, with stock calls on a stock cache, whether the model gives the same logits for a prompt in two parts.

    Some models do not: they count positions from zero again, or take one token at a time after the first forward.
    Costs three short forwards, once per model.
    """
    ids = torch.tensor([tokens[:12]], device=model.device)
    options = {
        "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1, "use_cache": True,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    _stack.stock_only = True
    try:
        whole = model.generate(ids, **options).logits[0].float()
        head = model.generate(ids[:, : ids.shape[1] // 2], **options)
        cache = getattr(head, compat.CACHE_KWARG)
        rest = model.generate(ids, **{compat.CACHE_KWARG: cache}, **options).logits[0].float()
    except Exception as error:  # whatever stock raises means the same: it cannot
        logger.info(
            "paged: prefixes are not reused for %s, it cannot go on from a cache: %s", type(model).__name__, error
        )
        return False
    finally:
        _stack.stock_only = False
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if float((whole - rest).abs().max()) <= tolerance * float(whole.abs().max()):
        return True
    logger.info(
        "paged: prefixes are not reused for %s, its logits differ when it goes on from a cache", type(model).__name__
    )
    return False


def _attending(cache: PagedCache) -> int:
    """Layers that hold anything between calls; all must be paged for a prefix to be complete."""
    return sum(not dummy for dummy in getattr(cache, "is_dummy", [False] * len(cache.layers)))


def _prompt_decides(model_kwargs: dict[str, Any], input_ids: torch.Tensor) -> bool:
    """Whether the token ids alone decide the keys and values: no images, no custom embeddings or positions."""
    for name, value in model_kwargs.items():
        if name not in _NEUTRAL_KWARGS and value is not None and not isinstance(value, bool):
            return False
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return True
    if positions.ndim != 2 or positions.shape[-1] != input_ids.shape[1]:
        return False
    positions = positions.expand(input_ids.shape)
    if mask is None:
        usual = torch.arange(input_ids.shape[1], device=positions.device).expand_as(positions)
        return bool(torch.equal(positions, usual))
    if mask.ndim != 2 or mask.shape != input_ids.shape:
        return False
    usual = mask.long().cumsum(-1) - 1
    seen = mask != 0
    return bool(torch.equal(positions[seen.to(positions.device)], usual[seen].to(positions.device)))


def _mask_has_holes(model_kwargs: dict[str, Any], state: Any) -> bool:
    mask = model_kwargs.get("attention_mask")
    return mask is not None and not state.observe_mask(mask, 0, mask.shape[1])


def _keep(call: _Call, rows: list[list[int]] | None) -> None:
    """Put the rows' tokens that the cache holds into the tree, if the weights are still those that computed them."""
    cache, kv = call.cache, call.kv
    if cache is None or kv is None or rows is None or call.namespace is None:
        return
    state = cache.state
    manager = state.shared.manager
    if manager is None or len(rows) != len(state.tables) or not kv.watch.unchanged_since_observed(call.model):
        return
    if kv.shared is not state.shared or call.namespace[0] != ("weights", kv.watch.epoch):
        return  # cleared or resized meanwhile
    with manager.lock:
        for row, table in zip(rows, state.tables, strict=True):
            count = min(len(row), table.num_tokens)
            if count:
                manager.commit(call.namespace, row[:count], table)


def _keep_generated(call: _Call, result: Any) -> None:
    """After the loop: the tokens generated are part of the next turn's prompt, so keep them too."""
    if call.cache is None or call.namespace is None or not call.rows_stay:
        return
    sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    state = call.cache.state
    if not isinstance(sequences, torch.Tensor) or sequences.ndim != 2 or sequences.shape[0] != len(state.tables):
        return
    held = min(state.length, sequences.shape[1])
    rows = [row[pad:held] for row, pad in zip(sequences.tolist(), state.pads_np.tolist(), strict=True)]
    if call.prompt is None or any(row[: len(p)] != p[: len(row)] for row, p in zip(rows, call.prompt, strict=True)):
        return  # the sequences do not begin with the prompt the cache was filled with
    _keep(
        call,
        [_without_filling(row, len(prompt), call.pad_token) for row, prompt in zip(rows, call.prompt, strict=True)],
    )


def _without_filling(row: list[int], prompt: int, pad_token: int | None) -> list[int]:
    """Drop the padding that a finished row collects while the rest of its batch goes on."""
    end = len(row)
    while end > prompt and row[end - 1] == pad_token:
        end -= 1
    return row[:end]
