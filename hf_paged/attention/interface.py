"""The two inert wrappers through which a stock model's attention reaches paged KV.

Paging belongs to the call, not to the model: ``config._attn_implementation`` never changes. The key tensor that a
paged layer's ``update()`` returns carries a tag; the dispatcher that ``AttentionInterface.get_interface`` hands out
looks for it and otherwise calls exactly what transformers would have called. The mask wrapper skips building a mask
when, and only when, the cache passed in is ours and will serve every layer natively in this forward.

This module knows how transformers calls attention; it does not know what a cache is. The tag and the cache are seen
only through the protocols below. Why a tag and not a context variable: a variable would also catch nested forwards
(guidance, draft models) and break ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_paged import compat

#: attribute of a key tensor that marks it as belonging to a paged layer
TAG = "_hf_paged"

AttentionOutput = tuple[torch.Tensor, torch.Tensor | None]
AttentionFn = Callable[..., AttentionOutput]


class PagedTag(Protocol):
    """What rides on the key tensor returned by a paged layer's ``update()``."""

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
    ) -> AttentionOutput: ...


class MaskAware(Protocol):
    """A cache that wants to see the padding mask, and to skip building the full one when its kernels need none."""

    def mask_hook(self, kind: str, attention_mask: torch.Tensor | None, query_length: int, plain: bool) -> bool: ...

    def mask_traced(self, attention_mask: torch.Tensor | None) -> None: ...


#: mask builders whose result the kernels can reproduce from positions alone, and the arguments that would change it
_PLAIN_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_OVERLAYS = ("or_mask_function", "and_mask_function", "block_sequence_ids")

_install_lock = threading.Lock()
_installed = False


def install() -> None:
    """Install both wrappers, once per process. They change nothing for calls without a paged cache."""
    global _installed
    with _install_lock:
        if _installed:
            return
        compat.check_supported()
        _wrap_get_interface()
        _wrap_mask_arguments()
        _installed = True


def _wrap_get_interface() -> None:
    original = compat.AttentionInterface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: AttentionFn) -> AttentionFn:
        stock: AttentionFn = original(self, attn_implementation, default)

        def attention(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> AttentionOutput:
            tag: PagedTag | None = getattr(key, TAG, None)
            if tag is None:
                return stock(module, query, key, value, attention_mask, *args, **kwargs)
            if args:  # positional scaling or dropout: only the stock function knows what they mean
                stock_args = args

                def with_args(*a: Any, **k: Any) -> AttentionOutput:
                    return stock(*a, *stock_args, **k)

                return tag.attend(None, with_args, module, query, key, value, attention_mask, kwargs)
            return tag.attend(attn_implementation, stock, module, query, key, value, attention_mask, kwargs)

        return attention

    get_interface.__doc__ = original.__doc__
    get_interface.__wrapped__ = original  # type: ignore[attr-defined]
    compat.AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]


def _wrap_mask_arguments() -> None:
    original = getattr(compat.masking_utils, compat.MASK_ARGUMENTS)

    def mask_arguments(config: Any, inputs_embeds: torch.Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        cache = args[0] if args else next((kwargs[name] for name in compat.CACHE_KWARGS if name in kwargs), None)
        own = compat.self_attention_cache(cache) if cache is not None else None
        hook = getattr(own, "mask_hook", None)
        if hook is not None and not torch.compiler.is_compiling():
            builder = sys._getframe(1)
            kind = builder.f_code.co_name
            plain = kind in _PLAIN_MASKS and all(builder.f_locals.get(name) is None for name in _OVERLAYS)
            if hook(kind, attention_mask, inputs_embeds.shape[1], plain):
                return True, None, None, None, None, None, None
        elif hook is not None and own is not None:
            own.mask_traced(attention_mask)
        return original(config, inputs_embeds, attention_mask, *args, **kwargs)

    functools.update_wrapper(mask_arguments, original)
    setattr(compat.masking_utils, compat.MASK_ARGUMENTS, mask_arguments)
