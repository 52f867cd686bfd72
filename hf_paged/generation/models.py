"""What is kept for a model between calls, and what users may ask about it.

One ``ModelKV`` per model, weakly keyed: pool, tree and counters die with the model. It knows no ``generate()``;
``registration`` makes and finds them, ``prompts`` reads and fills their trees.
"""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_paged import compat
from hf_paged.config import CacheConfig
from hf_paged.errors import ConfigError
from hf_paged.generation.shared import SharedKV
from hf_paged.model.weights import OptimizerHook, WeightsWatch

if TYPE_CHECKING:
    from hf_paged.engine.scheduler import Scheduler
    from hf_paged.model.runner import ModelRunner


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
        packed_bytes: what packed copies of the weights take, which calls on the engine use.
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
    packed_bytes: int = 0
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
        #: the engine's way into the model, once a call asked for it
        self.runner: ModelRunner | None = None
        #: of the calls that run on the engine now
        self.schedulers: list[Scheduler] = []
        #: why the engine cannot run the model, once that is known
        self.no_engine: str | None = None
        #: the model's configuration that both were found with, as runtime_signature() tells it
        self.model_config: Any = None

    def uses_stock_masks(self, model: Any) -> bool:
        """Whether any of the model's code builds masks with transformers' functions, which hide padding exactly."""
        if self._stock_masks is None:
            homes = {type(module).__module__ for module in model.modules()}
            ours = compat.masking_utils.__name__
            self._stock_masks = any(
                getattr(value, "__module__", None) == ours
                for home in homes
                if home.startswith("transformers.models.") or not home.startswith(("transformers.", "torch."))
                for value in list(vars(sys.modules.get(home, compat)).values())
            )
        return self._stock_masks

    def served(self) -> tuple[list[int], dict[int, str]]:
        """Layers that attend on blocks, and those that do not with the reason."""
        missing = "its keys never reached the attention interface"
        why = {i: self.obstacles.get(i, missing) for i in self.paged_layers}
        return [i for i, reason in why.items() if reason is None], {i: r for i, r in why.items() if r is not None}

    def pool_for(
        self, config: CacheConfig, num_layers: int, storage: tuple[Any, ...], stateful: bool = False
    ) -> SharedKV:
        """The pool for this geometry and these dtypes. Others replace it; calls still on the old one keep theirs."""
        with self.lock:
            if self.shared is None or self.shared.config.geometry != config.geometry or self.storage != storage:
                self.shared, self.storage = SharedKV(config, num_layers, stateful=stateful), storage
            return self.shared

    def clear(self) -> None:
        with self.lock:
            self.shared = self.runner = self.no_engine = None
            self.watch.changed()


_models: weakref.WeakKeyDictionary[Any, ModelKV] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
optimizer_hook = OptimizerHook()


def kv_of(model: Any) -> ModelKV:
    """What is kept for ``model``, made if there is nothing yet."""
    with _lock:
        kv = _models.get(model)
        if kv is None:
            kv = _models[model] = ModelKV()
            optimizer_hook.watches.add(kv.watch)
        return kv


def forget_all() -> None:
    """Drop every pool; caches still in use keep theirs until dropped."""
    with _lock:
        for kv in list(_models.values()):
            kv.clear()
        _models.clear()


def cache_stats(model: Any) -> CacheStats:
    """What the paged cache of ``model`` holds and has done; all zeros before its first paged call."""
    kv = known(model)
    if kv is None:
        return CacheStats()
    with kv.lock:
        stats = CacheStats(
            calls=kv.calls,
            prompt_tokens=kv.prompt_tokens,
            hit_tokens=kv.hit_tokens,
            prefilled_tokens=kv.prompt_tokens - kv.hit_tokens,
            weights_epoch=kv.watch.epoch,
            packed_bytes=0 if kv.runner is None else kv.runner.packed_bytes,
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
    kv = known(model)
    if kv is not None:
        kv.clear()


def weights_changed(model: Any) -> None:
    """Say that the weights of ``model`` changed in a way that cannot be seen from outside.

    In-place writes, optimizer steps, ``load_state_dict``, adapter switches and attributes of modules (numbers, text,
    tensors, collections of them) are noticed without this. It is for partial writes through ``.data`` to models above
    2 GiB on CPU, whose bytes are only sampled, and for what a module uses from elsewhere (a global, a closure, a
    function of its file that is replaced).
    """
    kv = known(model)
    if kv is not None:
        kv.watch.changed()
        kv.no_engine = None
        if kv.runner is not None:
            kv.runner.reconsider()


def check_invariants(model: Any) -> None:
    """Raise InternalError unless the books of the model's pool balance. For tests and bug reports."""
    kv = known(model)
    if kv is not None and kv.shared is not None and kv.shared.manager is not None:
        kv.shared.manager.check_invariants()


def known(model: Any) -> ModelKV | None:
    """What is kept for ``model``, or for the model inside a PEFT, DDP or torch.compile wrapper."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"a model is wanted here, not {type(model).__name__}")
    while model is not None:
        kv = _models.get(model)
        if kv is not None:
            return kv
        inner = getattr(model, "get_base_model", None)
        model = inner() if inner is not None else getattr(model, "module", getattr(model, "_orig_mod", None))
    return None
