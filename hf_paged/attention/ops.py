"""Attention over blocks as operators of torch, so that ``torch.compile`` sees one opaque call per layer.

``hf_paged::attention`` stores a layer's new keys and values and attends to all of them; ``hf_paged::gathered`` stores
them and returns what the stock layer would have returned. Both name their cache by a *token*, a 0-dim int64 tensor: a
tensor is an input of a compiled graph, where an int would be a constant of it and every new cache a recompilation.

The token is declared as mutated, although its value never changes: it stands for the blocks. So the operators of one
cache keep their order, and none is dropped because nobody uses its result. Tokens are looked up weakly. The operators
know no models; the layer they name does the work, outside the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch

from hf_paged.errors import InternalError

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Keep a function out of compiled graphs: tracing breaks there, and the function runs as it stands."""
    return cast("F", torch.compiler.disable(function))


class OpaqueLayer(Protocol):
    """A cache layer that can be called from inside a compiled graph. ``start`` is the first new column."""

    def run_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        start: int,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def run_gathered(self, key: torch.Tensor, value: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class OpaqueCache(Protocol):
    """What a token stands for."""

    @property
    def opaque_layers(self) -> Mapping[int, OpaqueLayer]: ...


_caches: weakref.WeakValueDictionary[int, OpaqueCache] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def token_for(cache: OpaqueCache) -> torch.Tensor:
    """A new token for ``cache``; it stays good as long as the cache lives."""
    number = next(_numbers)
    _caches[number] = cache
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def _layer(token: torch.Tensor, layer_idx: int) -> OpaqueLayer:
    cache = _caches.get(int(token))
    layer = None if cache is None else cache.opaque_layers.get(layer_idx)
    if layer is None:
        raise InternalError(f"a compiled graph ran with layer {layer_idx} of a paged cache that no longer exists")
    return layer


@torch.library.custom_op("hf_paged::attention", mutates_args=("token",))
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    token: torch.Tensor,
    layer_idx: int,
    start: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Store ``key [B, Hkv, W, Dk]`` and ``value [B, Hkv, W, Dv]`` as columns ``start : start + W`` and attend.

    ``query`` is ``[B, Hq, W, Dk]``; ``mask`` is stock's for this call (bool or additive, ``[B | 1, 1, W, columns]``),
    or None. Returns ``[B, W, Hq, Dv]``.
    """
    return _layer(token, layer_idx).run_attention(query, key, value, mask, start, scaling, softcap, sinks)


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, width, _dim = query.shape
    return query.new_empty((batch, width, heads, value.shape[-1]))


@torch.library.custom_op("hf_paged::gathered", mutates_args=("token",))
def gathered(
    key: torch.Tensor, value: torch.Tensor, token: torch.Tensor, layer_idx: int, start: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store as :func:`attention` does; return keys and values of the last ``columns`` columns, contiguous."""
    keys, values = _layer(token, layer_idx).run_gathered(key, value, start)
    if keys.shape[2] != columns:
        raise InternalError(f"layer {layer_idx} gathered {keys.shape[2]} columns, the graph was promised {columns}")
    # an operator's result must not be one of its arguments, and has the dtypes that were promised
    return _fresh(keys, key), _fresh(values, value)


def _fresh(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return result.clone() if result is like else result.to(like.dtype)


@gathered.register_fake
def _(
    key: torch.Tensor, value: torch.Tensor, token: torch.Tensor, layer_idx: int, start: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _, dim = key.shape
    return key.new_empty((batch, heads, columns, dim)), value.new_empty((batch, heads, columns, value.shape[-1]))
