"""The caches that a stock model sees when the engine runs it: one forward over many requests.

Two shapes of a step. *Packed*: all tokens of all requests in one row, ``[1, tokens]``; attention reads blocks through
the step's metadata and no mask is built. *Dense*: requests with equally many new tokens as the rows of a left-padded
batch; layers return gathered keys and values and the model's own attention and masks do the rest, whatever they are.

The runner sets ``step`` before a forward; layers know nothing of requests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged import compat
from hf_paged.attention.interface import TAG, AttentionFn, AttentionOutput
from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerKV, LayerSpec
from hf_paged.attention.obstacles import attention_params, call_obstacle, wants_weights
from hf_paged.errors import InternalError, UnsupportedError

#: storage and backend of a layer, made when its first keys arrive
Storage = Callable[[int, LayerSpec], "tuple[LayerKV, Any]"]


@dataclass
class Step:
    """One forward. ``slot_mapping`` and the tensors of ``metadata`` are on the CPU; layers ask for their device's.

    ``gather_slots`` (dense only) is int64 ``[rows, columns]``: where the past of each row lies, -1 where it has none.
    """

    metadata: AttentionMetadata
    gather_slots: torch.Tensor | None = None
    _moved: dict[torch.device, AttentionMetadata] = field(default_factory=dict)

    def on(self, device: torch.device) -> AttentionMetadata:
        if device.type == "cpu":
            return self.metadata
        found = self._moved.get(device)
        if found is None:
            m = self.metadata
            found = self._moved[device] = AttentionMetadata(
                m.cu_seqlens_q.to(device),
                m.seq_lens.to(device),
                m.block_tables.to(device),
                m.slot_mapping.to(device),
                m.max_query_len,
                m.max_seq_len,
            )
        return found


class _EngineLayer(compat.DynamicLayer):
    """What both shapes share: storage on first use, writing by slot mapping, the number of past columns."""

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, cache: EngineCache, layer_idx: int, window: int | None, chunk: int | None) -> None:
        self.cache = weakref.proxy(cache)
        self.layer_idx, self.window, self.chunk = layer_idx, window, chunk
        self.is_initialized = False
        self.kv: LayerKV | None = None
        #: what its attention asked for last
        self.params: AttentionParams | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, dim = key_states.shape
        spec = LayerSpec(heads, dim, value_states.shape[-1], key_states.dtype, key_states.device)
        self.kv, self.backend = self.cache.storage(self.layer_idx, spec)
        self.is_initialized = True

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Step:
        if self.kv is None:
            self.lazy_initialization(key_states, value_states)
        assert self.kv is not None
        spec, (_, heads, _, dim) = self.kv.spec, key_states.shape
        if (heads, dim, value_states.shape[-1]) != spec.widths or key_states.device != spec.device:
            raise UnsupportedError(
                f"layer {self.layer_idx} stores {spec} and is now given keys {list(key_states.shape)} and values "
                f"{list(value_states.shape)} on {key_states.device}: make a new engine after changing a model's device "
                "or heads"
            )
        step: Step = self.cache.step
        slots = step.on(key_states.device).slot_mapping
        self.backend.write(self.kv, _tokens_first(key_states), _tokens_first(value_states), slots)
        return step

    def get_seq_length(self) -> int:
        return int(self.cache.past)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.cache.past) + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class PackedLayer(_EngineLayer):
    """Keys go to blocks and come back only as a tag; the attention call reads blocks."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._write(key_states, value_states)
        keys = key_states.view_as(key_states)
        setattr(keys, TAG, self)
        self._values = value_states
        self.cache.unattended.add(self.layer_idx)
        return keys, value_states

    def attend(
        self,
        impl: str | None,
        stock: AttentionFn,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> AttentionOutput:
        self.cache.unattended.discard(self.layer_idx)
        obstacle = call_obstacle(impl, module, kwargs, self.window, self.chunk)
        if obstacle is not None or value is not self._values or attention_mask is not None:
            why = "the model changes values or masks on the way" if obstacle is None else obstacle.reason
            raise UnsupportedError(f"layer {self.layer_idx} cannot attend to packed requests: {why}")
        if impl == "eager" and wants_weights(module, kwargs):
            raise UnsupportedError("attention weights are not available from packed requests")
        assert self.kv is not None
        params = self.params = attention_params(module, query, kwargs, self.window, self.chunk)
        reason = self.backend.unsupported_call(self.kv.spec, params)
        if reason is not None:
            raise UnsupportedError(f"layer {self.layer_idx} cannot attend to packed requests: {reason}")
        packed = query[0].transpose(0, 1)
        out = self.backend.attend(packed, self.kv, self.cache.step.on(query.device), params)
        return out[None], None


class DenseLayer(_EngineLayer):
    """Keys go to blocks and come back gathered, with zeros where a row is padded."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self._write(key_states, value_states)
        if step.gather_slots is None or not step.gather_slots.shape[1]:
            return key_states, value_states
        assert self.kv is not None
        rows, columns = step.gather_slots.shape
        k, v = self.backend.gather(self.kv, step.gather_slots.reshape(-1).to(key_states.device))
        past_k = k.view(rows, columns, *k.shape[1:]).transpose(1, 2)
        past_v = v.view(rows, columns, *v.shape[1:]).transpose(1, 2)
        return torch.cat([past_k, key_states], dim=2), torch.cat([past_v, value_states], dim=2)


class EngineCache(compat.DynamicCache):
    """A transformers cache over the engine's pool; ``step`` and ``past`` (columns before this forward) come first."""

    layers: list[Any]

    def __init__(self, config: Any, storage: Storage, packed: bool) -> None:
        decoder = config.get_text_config(decoder=True)
        super().__init__(config=decoder)
        types = getattr(decoder, "layer_types", None) or []
        self.storage, self.packed = storage, packed
        self.step: Step | None = None
        self.past = 0
        self.unattended: set[int] = set()
        #: layers with recurrent or convolutional state, and such a layer before its first token
        self.recurrent: dict[int, Any] = {}
        kind = PackedLayer if packed else DenseLayer
        for i, stock in enumerate(self.layers):
            if type(stock) is compat.DynamicLayer:
                self.layers[i] = kind(self, i, None, None)
            elif type(stock) is compat.DynamicSlidingWindowLayer:
                chunked = types[i] == "chunked_attention" if i < len(types) else compat.chunked_without_types(decoder)
                size = stock.sliding_window
                self.layers[i] = kind(self, i, None if chunked else size, size if chunked else None)
            elif type(stock) is compat.LinearAttentionLayer and not packed:
                self.recurrent[i] = stock
            elif not compat.keeps_nothing(stock):
                raise UnsupportedError(
                    f"layer {i} of this model keeps a {type(stock).__name__}, which the engine cannot page yet; "
                    "model.generate(cache_implementation='paged') serves such models"
                )

    def join(self, specs: Mapping[int, LayerSpec]) -> None:
        """Give layers their storage now, whatever dtype their keys will come in."""
        for layer_idx, spec in specs.items():
            layer = self.layers[layer_idx]
            layer.kv, layer.backend = self.storage(layer_idx, spec)
            layer.is_initialized = True

    def mask_hook(self, kind: str, attention_mask: Any, query_length: int, plain: bool) -> bool:
        """Packed requests need no mask; what a model adds to the usual one cannot be packed."""
        if self.packed and not plain:
            raise UnsupportedError(f"the model adds to its {kind}, which packed requests cannot follow")
        return self.packed

    def mask_traced(self, attention_mask: Any) -> None:
        """Under torch.compile the mask is built, which packed layers refuse."""

    def check_attended(self) -> None:
        """Raise InternalError when a layer's keys were not followed by its attention: the step was wrong."""
        if self.unattended:
            missing, self.unattended = sorted(self.unattended), set()
            raise InternalError(
                f"layers {missing} had their keys read without calling its attention interface, so that step is wrong: "
                "something replaced the model's attention; make a new engine"
            )


def _tokens_first(states: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, width, dim]`` as ``[batch * width, heads, dim]``."""
    batch, heads, width, dim = states.shape
    return states.transpose(1, 2).reshape(batch * width, heads, dim)
