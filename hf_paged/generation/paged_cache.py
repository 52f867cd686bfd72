"""PagedCache: a transformers ``Cache`` whose keys and values live in paged, shareable blocks.

It is what stock code sees: every method a model, ``generate()`` or a user calls on a ``DynamicCache`` works here, with
the same results. Edits of rows (beam reorder, crop, repeat, select) are edits of block tables; data moves only when a
shared block is written. Callers: stock models and ``generate()``; ``generation.registration`` builds one per call.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_paged import compat
from hf_paged.attention import registry
from hf_paged.attention.ops import outside_graphs
from hf_paged.config import CacheConfig
from hf_paged.errors import ConfigError, UnsupportedError
from hf_paged.generation.layers import PagedLayer, PagedSlidingLayer
from hf_paged.generation.shared import SharedKV, profile_of
from hf_paged.generation.state import BatchState


class PagedCache(compat.DynamicCache):
    """A paged KV cache for one batch.

    Args:
        config: the model's config (the text part is used), as for ``DynamicCache(config=...)``.
        cache_config: a :class:`hf_paged.CacheConfig` or a dict of its fields.

    Full, sliding-window and chunked attention layers are paged; recurrent, convolutional and indexed layers keep their
    stock form. Left padding found in the attention mask never enters a block. Blocks go back to the pool when the
    cache is garbage collected, on :meth:`free`, and on ``reset()``.

    ``copy.deepcopy`` shares every block with the copy, so keeping a prompt's cache and copying it per question costs
    nothing until the copies are written to. Pickling is not supported.
    """

    #: paged layers and stock ones; what a layer can do differs by kind, and every kind is asked only what it can
    layers: list[Any]

    def __init__(self, config: Any = None, *, cache_config: CacheConfig | Mapping[str, Any] | None = None) -> None:
        if not hasattr(config, "get_text_config"):
            raise ConfigError(
                f"PagedCache needs the model's config, not {type(config).__name__}: PagedCache(model.config)"
            )
        decoder = config.get_text_config(decoder=True)
        super().__init__(config=decoder)
        settings = CacheConfig.from_dict(cache_config)
        if settings.engine:
            raise ConfigError("engine=True is for generate() and register(): a PagedCache is for the stock loop")
        self._page(config, None, settings)

    @classmethod
    def from_dynamic(
        cls, cache: Any, config: Any, shared: SharedKV | None = None, cache_config: CacheConfig | None = None
    ) -> PagedCache:
        """Take over an empty ``DynamicCache`` made for ``config``: its layers, with the pageable ones replaced."""
        self = cls.__new__(cls)
        self.__dict__.update(cache.__dict__)
        self.layers = list(cache.layers)
        self._page(config, shared, cache_config or CacheConfig())
        return self

    def _page(self, config: Any, shared: SharedKV | None, cache_config: CacheConfig) -> None:
        self.profile = profile = profile_of(config)
        config = config.get_text_config(decoder=True)
        types = getattr(config, "layer_types", None) or []
        pageable = [i for i, layer in enumerate(self.layers) if pageable_layer(layer)]
        if shared is None:
            shared = SharedKV(cache_config, len(pageable))
        #: owned here alone: layers and tags refer to the state, never to the cache, so blocks return without a gc run
        self.state = BatchState(shared)
        self.state.force_gather = shared.config.attention_backend == registry.GATHER
        for i in pageable:
            stock = self.layers[i]
            if isinstance(stock, compat.DynamicSlidingWindowLayer):
                chunked = types[i] == "chunked_attention" if i < len(types) else compat.chunked_without_types(config)
                self.layers[i] = PagedSlidingLayer(
                    self.state, i, profile, sliding_window=stock.sliding_window, chunked=chunked
                )
            else:
                self.layers[i] = PagedLayer(self.state, i, profile)
        self.paged_layers: list[PagedLayer] = [self.layers[i] for i in pageable]

    # -- the mask hook (called by attention.interface) -----------------------------------------------------------

    def mask_hook(self, kind: str, attention_mask: Any, query_length: int, plain: bool) -> bool:
        """See the mask of the forward about to start; True when no full mask has to be built for it."""
        if not self.paged_layers:
            return False
        start = self.paged_layers[0].length
        self.check_mask_given(attention_mask)
        if attention_mask is None:
            known = plain
        elif isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            known = self.state.observe_mask(attention_mask, start, query_length) and plain
        else:
            known = False
        # several masks may be built for one forward (full, sliding); all of them must be the usual ones
        self.state.mask_known = known and self.state.mask_known is not False
        if not known or self.state.force_gather or not self.profile.native:
            return False
        self.state.native_for = (start, query_length)
        return True

    def check_mask_given(self, attention_mask: Any) -> None:
        """Raise UnsupportedError for a forward without mask over rows whose padding is not stored."""
        if attention_mask is None and self.state.padded:
            raise UnsupportedError(
                "this PagedCache was filled with left-padded rows, whose padding it does not store, but the "
                "forward comes without an attention_mask. Pass the 2D mask of all columns so far."
            )

    def mask_traced(self, attention_mask: Any) -> None:
        """The mask hook while torch.compile traces: the mask is built, and says nothing about the model."""
        self.check_mask_given(attention_mask)
        self.state.mask_known = False

    # -- whole-cache edits: of block tables, so never part of a graph ----------------------------------------------

    @outside_graphs
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (a negative number, as in transformers 5)."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    @outside_graphs
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was: a permutation of tables, copied on write."""
        self._select(beam_idx.tolist())
        for layer in self.layers:
            if not isinstance(layer, PagedLayer):
                layer.reorder_cache(beam_idx)

    @outside_graphs
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times in place: ``a b`` becomes ``a a b b``."""
        if self.state.tables or self.state.pads_known:
            rows = max(len(self.state.tables), len(self.state.pads_np))
            self._select([row for row in range(rows) for _ in range(repeats)])
        for layer in self.layers:
            if not isinstance(layer, PagedLayer):
                layer.batch_repeat_interleave(repeats)

    @outside_graphs
    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep only the rows in ``indices`` (integers or a boolean mask), in that order."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        self._select(rows.tolist())
        for layer in self.layers:
            if not isinstance(layer, PagedLayer):
                layer.batch_select_indices(indices)

    def _select(self, rows: Sequence[int]) -> None:
        self.state.select(rows)
        for layer in self.paged_layers:
            layer.drop_graph()

    def check_attended(self) -> None:
        """Raise InternalError when a layer's last update was not followed by its attention."""
        for layer in self.paged_layers:
            layer.check_attended()

    @outside_graphs
    def reset(self) -> None:
        """Forget everything and give the blocks back; the cache can be used again."""
        self.free()
        for layer in self.layers:
            if not isinstance(layer, PagedLayer):
                layer.reset()

    @outside_graphs
    def free(self) -> None:
        """Give every block back to the pool now instead of at garbage collection. Idempotent."""
        self.state.release()
        for layer in self.paged_layers:
            layer.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = self.state.fork()
        skip = {"layers", "state", "paged_layers", "profile"}
        twin.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in skip})
        twin.state, twin.profile = state, self.profile
        twin.layers = [
            layer.twin(state) if isinstance(layer, PagedLayer) else copy.deepcopy(layer, memo) for layer in self.layers
        ]
        twin.paged_layers = [layer for layer in twin.layers if isinstance(layer, PagedLayer)]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a PagedCache refers to blocks of this process's pool and cannot be pickled")

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Distinct blocks this cache holds; a block shared by several rows counts once."""
        return self.state.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in those blocks, all paged layers together."""
        return self.num_blocks * self.state.shared.pool.bytes_per_block


def pageable_layer(layer: Any) -> bool:
    """Whether a stock cache layer stores plain keys and values only, so that blocks can hold them."""
    return type(layer) in (compat.DynamicLayer, compat.DynamicSlidingWindowLayer)
