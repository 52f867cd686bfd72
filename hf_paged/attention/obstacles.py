"""Can a kernel compute what this call of the stock attention would? Answers with None or with the obstacle.

Pure judgement: these functions look at one attention call, at what its cache layer knows (window, chunk, columns) and
at nothing else. Cache layers ask them; what they say of a model is remembered elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_paged.attention.metadata import AttentionParams

#: arguments of an attention call that change nothing a kernel has to know
_HARMLESS = frozenset(
    {
        "position_ids", "cache_position", "position_embeddings", "use_cache", "is_causal", "sliding_window", "softcap",
        "s_aux", "dropout", "scaling", "labels", "num_items_in_batch", "logits_to_keep", "cache", "past_key_values",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "deterministic",
    }
)  # fmt: skip


class Obstacle(NamedTuple):
    """Why a layer's attention cannot run on blocks.

    ``passing``: it lies in this call (dropout is on, an unusual argument) and says nothing about the model.
    ``mask``: stock attends to other keys than positions and windows imply, so that a prompt prefilled in parts gives
    another result than one prefilled at once.
    """

    reason: str
    passing: bool = False
    mask: bool = False


def call_obstacle(
    impl: str | None, module: torch.nn.Module, kwargs: dict[str, Any], window: int | None, chunk: int | None
) -> Obstacle | None:
    """What the arguments of the attention call ask for beyond positions, ``window`` and ``chunk``."""
    if impl is None:
        return Obstacle("attention was called with positional options", passing=True)
    if kwargs.get("position_bias") is not None:
        return Obstacle("the model adds a relative position bias")
    if kwargs.get("dropout"):
        return Obstacle("attention dropout is on", passing=True)
    causal = kwargs.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        return Obstacle("attention is not causal")
    named = kwargs.get("sliding_window")
    if chunk is None and named != window:
        return Obstacle(f"the call names the sliding window {named}, the cache layer {window}", mask=True)
    if kwargs.get("softcap") is not None and impl == "sdpa":
        return Obstacle("sdpa does not apply the softcap")
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and not isinstance(value, bool | str):
            return Obstacle(f"attention takes {name}, whose meaning is not known here", passing=True)
    return None


def attention_params(
    module: torch.nn.Module, query: torch.Tensor, kwargs: dict[str, Any], window: int | None, chunk: int | None
) -> AttentionParams:
    """The mathematics that a call without obstacles asks for."""
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = getattr(module, "scaling", None)
    return AttentionParams(
        scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        sliding_window=None if chunk is not None else window,
        softcap=kwargs.get("softcap"),
        chunk_size=chunk,
        sinks=kwargs.get("s_aux"),
    )


def mask_obstacle(mask: Any, seen: torch.Tensor) -> Obstacle | None:
    """Whether ``mask``, as stock attention got it, hides exactly what ``seen`` (bool ``[B, 1, Q, K]``) hides."""
    if mask is None:
        # as scaled_dot_product_attention takes is_causal: the first query on the first key; one query sees all
        visible = torch.ones_like(seen).tril() if seen.shape[-2] > 1 else torch.ones_like(seen)
    elif isinstance(mask, torch.Tensor) and mask.ndim == 4:
        visible = mask[..., : seen.shape[-1]]
        if visible.dtype != torch.bool:
            hidden = visible <= torch.finfo(visible.dtype).min / 2
            if bool((visible != 0).logical_and(~hidden).any()):
                return Obstacle("the model adds a bias to the scores through its mask")
            visible = ~hidden
    else:
        return Obstacle(f"attention gets a mask of type {type(mask).__name__}")
    real = seen.any(dim=-1, keepdim=True)  # rows of padding see nothing and may be masked in any way
    try:
        same = bool(((visible == seen) | ~real).all())
    except RuntimeError:  # shapes that do not broadcast
        same = False
    return None if same else Obstacle("the mask is not the one that positions and windows imply", mask=True)


def wants_weights(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the caller wants the attention probabilities, which kernels do not keep."""
    asked = kwargs.get("output_attentions")
    return bool(asked if asked is not None else getattr(getattr(module, "config", None), "output_attentions", False))
