"""Attention over blocks as operators of torch, so that ``torch.compile`` sees one opaque call per layer.

``hf_paged::attention`` stores a layer's new keys and values and attends to all of them; ``hf_paged::gathered`` stores
them and returns what the stock layer would have returned. Both name their layer by a *token*, a 0-dim int64 tensor: a
tensor is an input of a compiled graph, where an int would be a constant of it and every new cache a recompilation.

Tokens are looked up weakly. The operators know no models; the layer behind a token does the work, outside the graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch


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


_layers: weakref.WeakValueDictionary[int, OpaqueLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def token_for(layer: OpaqueLayer) -> torch.Tensor:
    """A new token for ``layer``; it stays good as long as the layer lives."""
    number = next(_numbers)
    _layers[number] = layer
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


@torch.library.custom_op("hf_paged::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    token: torch.Tensor,
    start: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Store ``key [B, Hkv, W, Dk]`` and ``value [B, Hkv, W, Dv]`` as columns ``start : start + W`` and attend.

    ``query`` is ``[B, Hq, W, Dk]``; ``mask`` is stock's for this call (bool or additive, ``[B | 1, 1, W, columns]``),
    or None. Returns ``[B, W, Hq, Dv]``.
    """
    return _layers[int(token)].run_attention(query, key, value, mask, start, scaling, softcap, sinks)


@attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    token: torch.Tensor,
    start: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, width, _ = query.shape
    return query.new_empty((batch, width, heads, value.shape[-1]))


@torch.library.custom_op("hf_paged::gathered", mutates_args=())
def gathered(
    key: torch.Tensor, value: torch.Tensor, token: torch.Tensor, start: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store as :func:`attention` does; return keys and values of the last ``columns`` columns, contiguous."""
    keys, values = _layers[int(token)].run_gathered(key, value, start)
    # an operator's result must not be one of its arguments
    return keys.clone() if keys is key else keys, values.clone() if values is value else values


@gathered.register_fake
def _(
    key: torch.Tensor, value: torch.Tensor, token: torch.Tensor, start: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _, dim = key.shape
    return key.new_empty((batch, heads, columns, dim)), value.new_empty((batch, heads, columns, value.shape[-1]))
