"""What several caches of one model have in common: the pool, the block manager, and what a probe taught about it.

``SharedKV`` owns storage and outlives single calls when ``register()`` keeps it per model; a ``PagedCache`` made by
hand has one of its own. It never holds the model, so a model that is dropped takes its pool along.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hf_paged import compat
from hf_paged.attention import registry
from hf_paged.attention.backends.base import AttentionBackend
from hf_paged.attention.obstacles import Obstacle
from hf_paged.cache.manager import KVCacheManager
from hf_paged.cache.pool import KVPool, LayerKV, LayerSpec
from hf_paged.config import CacheConfig

logger = logging.getLogger("hf_paged")


class SharedKV:
    """One pool with its manager. The manager appears with the first layer's keys: only they tell how big a block is.

    With ``stateful``, other layers keep a state that is not in blocks, so that nothing stored could be gone on from.
    """

    def __init__(self, config: CacheConfig, num_layers: int, *, stateful: bool = False) -> None:
        registry.check_name(config.attention_backend)
        self.config, self._stateful = config, stateful
        self.lock = threading.RLock()
        self.manager: KVCacheManager | None = None
        choose: Callable[[LayerSpec, int], AttentionBackend] = functools.partial(
            registry.select, name=config.attention_backend
        )
        assert not isinstance(config.memory, str)  # CacheConfig parsed it
        self.pool = KVPool(config.block_size, num_layers, choose, memory=config.memory, num_blocks=config.num_blocks)

    def join(self, layer_idx: int, spec: LayerSpec) -> tuple[LayerKV, AttentionBackend] | None:
        """Storage for a layer, or None when another call stored other shapes or dtypes under that index."""
        with self.lock:
            joined = self.pool.layer(layer_idx, spec)
            if joined is not None and self.manager is None:
                self.manager = KVCacheManager(
                    self.pool.num_blocks,
                    self.config.block_size,
                    prefix_caching=not self._stateful,  # where it is possible, each call decides for itself
                    max_cached_blocks=self._max_cached_blocks(spec),
                )
        return joined  # type: ignore[return-value]  # the pool's backends come from our registry

    def _max_cached_blocks(self, spec: LayerSpec) -> int | None:
        limit = self.config.prefix_memory
        if isinstance(limit, int):
            return limit // (spec.bytes_per_token * self.config.block_size * self.pool.num_layers)
        if self.config.memory is not None or self.config.num_blocks is not None:
            return None
        return self.pool.auto_prefix_blocks(spec)


class Profile:
    """Which layers of a kind of model can run natively on blocks; learned in its first paged forward.

    A layer whose tagged keys arrive at the attention interface with arguments a kernel can honour is native. One whose
    keys never arrive (MLA's up-projection, models with own attention code) or whose call needs more than positions
    (relative position bias) is served by gathering, and the stock mask is then built for the whole model.
    """

    def __init__(self) -> None:
        #: layer index -> None when native, else why not
        self.obstacles: dict[int, str | None] = {}
        #: layers that ever stored keys
        self.wrote: set[int] = set()
        #: every one of them was probed and found native (layers that share others' keys store none)
        self.native = False
        #: attention calls answered by kernels on blocks, and by stock code on gathered keys
        self.native_calls = 0
        self.gathered_calls = 0
        #: whether a prompt may be prefilled in two parts, the first taken from a cache; None until it was tried
        self.continues: bool | None = None
        self.logged = False

    def stores(self, layer_idx: int) -> None:
        """Note that a layer keeps keys of its own."""
        self.wrote.add(layer_idx)
        self._conclude()

    def record(self, layer_idx: int, obstacle: Obstacle | None) -> None:
        """Note what a layer's attention call showed."""
        if obstacle is not None and obstacle.passing:
            return
        # a layer whose keys several modules attend to (KV sharing) is native only if all of them can be served
        if self.obstacles.get(layer_idx) is None:
            self.obstacles[layer_idx] = None if obstacle is None else obstacle.reason
            self._conclude()
        if obstacle is None:
            return
        if obstacle.mask:
            self.continues = False
        if not self.logged:
            self.logged = True
            logger.info(
                "paged attention: keys and values are gathered for this model (layer %d: %s)",
                layer_idx,
                obstacle.reason,
            )

    def _conclude(self) -> None:
        self.native = all(self.obstacles.get(i, "not probed yet") is None for i in self.wrote)


_profiles: dict[int, tuple[weakref.ref[Any], dict[str, Profile]]] = {}
_profiles_lock = threading.Lock()


def profile_of(config: Any) -> Profile:
    """The profile of models that run with this config object under their decoder's present attention implementation.

    Keyed by the model's own config: ``get_text_config`` makes a new object at each call for encoder-decoder models.
    """
    impl = compat.attention_implementation(config.get_text_config(decoder=True))
    key = id(config)
    with _profiles_lock:
        found = _profiles.get(key)
        if found is None or found[0]() is not config:
            found = (weakref.ref(config, lambda _: _profiles.pop(key, None)), {})
            _profiles[key] = found
        return found[1].setdefault(impl, Profile())
