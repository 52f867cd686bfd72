"""The one place that knows which transformers this is and touches names it does not promise to keep.

Everything else in the package imports transformers' cache, mask and generation internals from here, so a release
that moves one of them is a change to this file. Measured on 5.17, 5.23 and 5.24; the API broke between the last two
(``past_key_values`` became ``cache``, and ``update`` gained ``kwargs=``).
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers import masking_utils as masking_utils
from transformers import modeling_utils as modeling_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)
from transformers.generation import configuration_utils as generation_configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface

from hf_paged.errors import UnsupportedError

__all__ = [
    "CACHE_KWARG",
    "CACHE_KWARGS",
    "AttentionInterface",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "EncoderDecoderCache",
    "GenerationMixin",
    "LinearAttentionCacheLayerMixin",
    "cache_in_kwargs",
    "check_supported",
    "generation_configuration_utils",
    "masking_utils",
    "transformers_version",
]

OLDEST = (5, 17)
#: first major version that is not supported
TOO_NEW = (6, 0)

#: how models, outputs and ``model_kwargs`` call the cache in this version
CACHE_KWARG: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
#: every name under which a cache can travel in ``model_kwargs`` (mamba-like models have their own in 5.17)
CACHE_KWARGS: tuple[str, ...] = ("cache", "past_key_values", "cache_params")


def transformers_version() -> tuple[int, int]:
    """(major, minor) of the imported transformers."""
    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


def check_supported() -> None:
    """Raise :class:`UnsupportedError` unless this transformers is one the package was made for."""
    version = transformers_version()
    if not OLDEST <= version < TOO_NEW:
        raise UnsupportedError(
            f"hf_paged supports transformers {OLDEST[0]}.{OLDEST[1]} up to, not including, {TOO_NEW[0]}.{TOO_NEW[1]}; "
            f"this is {transformers.__version__}. Install a supported one: pip install 'transformers>=5.17,<6'"
        )


def cache_in_kwargs(model_kwargs: dict[str, Any]) -> tuple[str, Any] | None:
    """The (name, cache) under which a transformers cache travels in ``model_kwargs``, or None."""
    for name in CACHE_KWARGS:
        value = model_kwargs.get(name)
        if isinstance(value, Cache | EncoderDecoderCache):
            return name, value
    return None


def self_attention_cache(cache: Any) -> Any:
    """The part of ``cache`` that holds the decoder's own keys and values."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
