"""Paged, shared KV blocks for stock Hugging Face transformers models.

The public names and nothing else; each is imported when first used, so that ``import hf_paged`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_paged.config import CacheConfig as CacheConfig
    from hf_paged.config import EngineConfig as EngineConfig
    from hf_paged.engine.async_llm import AsyncLLM as AsyncLLM
    from hf_paged.engine.llm import LLM as LLM
    from hf_paged.engine.outputs import CompletionOutput as CompletionOutput
    from hf_paged.engine.outputs import RequestOutput as RequestOutput
    from hf_paged.errors import ConfigError as ConfigError
    from hf_paged.errors import EngineDeadError as EngineDeadError
    from hf_paged.errors import EnginePausedError as EnginePausedError
    from hf_paged.errors import HfPagedError as HfPagedError
    from hf_paged.errors import InternalError as InternalError
    from hf_paged.errors import InvalidRequestError as InvalidRequestError
    from hf_paged.errors import OutOfBlocksError as OutOfBlocksError
    from hf_paged.errors import UnknownOptionError as UnknownOptionError
    from hf_paged.errors import UnsupportedError as UnsupportedError
    from hf_paged.generation import PagedCache as PagedCache
    from hf_paged.generation import cache_stats as cache_stats
    from hf_paged.generation import clear as clear
    from hf_paged.generation import register as register
    from hf_paged.generation import unregister as unregister
    from hf_paged.generation import weights_changed as weights_changed
    from hf_paged.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "hf_paged.engine.async_llm",
    "CacheConfig": "hf_paged.config",
    "CompletionOutput": "hf_paged.engine.outputs",
    "EngineConfig": "hf_paged.config",
    "EngineDeadError": "hf_paged.errors",
    "EnginePausedError": "hf_paged.errors",
    "LLM": "hf_paged.engine.llm",
    "RequestOutput": "hf_paged.engine.outputs",
    "SamplingParams": "hf_paged.sampling_params",
    "ConfigError": "hf_paged.errors",
    "HfPagedError": "hf_paged.errors",
    "InternalError": "hf_paged.errors",
    "InvalidRequestError": "hf_paged.errors",
    "OutOfBlocksError": "hf_paged.errors",
    "UnknownOptionError": "hf_paged.errors",
    "UnsupportedError": "hf_paged.errors",
    "PagedCache": "hf_paged.generation",
    "cache_stats": "hf_paged.generation",
    "clear": "hf_paged.generation",
    "register": "hf_paged.generation",
    "unregister": "hf_paged.generation",
    "weights_changed": "hf_paged.generation",
}

__all__ = [
    "__version__",
    *_HOME,
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
