"""What users can set, checked when it is set. No tensors, no models.

``CacheConfig`` is what ``generate(cache_config={...})``, ``register(...)`` and ``PagedCache(...)`` take.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_paged.errors import ConfigError

_UNITS = {"": 1} | {u: 1000**i for i, u in enumerate("kmgtp", 1)} | {f"{u}i": 1024**i for i, u in enumerate("kmgtp", 1)}
#: one exbibyte
_LARGEST = 1 << 60
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]i?)?b?\s*", re.IGNORECASE)


def parse_size(value: int | str, *, name: str = "memory") -> int:
    """Bytes meant by ``value``: an int, or text such as ``"512MiB"``, ``"2 GB"``, ``"1.5g"``.

    Raises ConfigError when it is not a size or not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r} is not a size; give bytes as an int or text such as '2GiB'")
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None:
            raise ConfigError(
                f"{name}={value!r} is not a size; give bytes as an int or text such as '512MiB' or '2GiB'"
            )
        size = int(min(float(found[1]), 2.0 * _LARGEST) * _UNITS[(found[2] or "").lower()])
    else:
        size = value
    if size > _LARGEST:
        raise ConfigError(f"{name}={str(value)[:40]!r} is more than any machine has; give bytes or text such as '2GiB'")
    if size <= 0:
        raise ConfigError(f"{name}={value!r} must be more than 0 bytes")
    return size


def _parse_share(value: str | float) -> float:
    """``"30%"`` as 0.3. Raises ConfigError outside of more than 0 and at most 95 %: something must be left."""
    try:
        share = value if isinstance(value, float) else float(value.strip()[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 0.95:
        raise ConfigError(f"memory={value!r} must be a size such as '2GiB', or a share from above 0% to 95%")
    return share


@dataclass(frozen=True)
class CacheConfig:
    """Settings of one paged KV cache.

    Attributes:
        block_size: tokens per block. 16 suits every native kernel; others fall back to the reference kernel.
        memory: bytes reserved for keys and values, e.g. ``"2GiB"``, or a share of what is free when the pool is made,
            e.g. ``"30%"``; None picks half of it. On CPU the
            reservation costs nothing until blocks are used.
        num_blocks: usable blocks, instead of ``memory``.
        prefix_caching: reuse the keys and values of prompts seen before (only under ``register()``).
        prefix_memory: bytes that prefixes nobody is using may keep; None means all of an explicit ``memory`` or
            ``num_blocks``, else at most 1 GiB. Prefixes give way to running requests in any case.
        attention_backend: "auto", the name of a backend ("cpu", "torch"), or "gather" for the model's own
            attention on gathered keys and values, bit-identical to the default cache.
        optimize: see EngineConfig; for calls that run on the engine. Packed copies stay for later calls, until
            ``clear(model)``.
        salt: any text; prefixes are shared only among calls with the same salt.
        engine: run ``generate()`` on the continuous-batching engine: rows are computed without padding and leave when
            they are done, and when memory is short some wait for others. None: where the result is certain to be the
            stock loop's (greedy search of plain prompts, with processors that do not look at padding, on a model whose
            attention reads blocks). True: wherever the engine can express the call, so also for sampling, beam search,
            stop strings, ``max_time``, criteria and processors of your own, and models with recurrent layers. Then
            every row gets what it would get alone. Criteria and processors are called for one row at a time, with its
            ids ``[1, tokens]`` without padding (in a beam search criteria with all candidates of a row, processors with
            one beam); ``prefix_allowed_tokens_fn`` is told the row's place in the call. What is sampled is reproducible
            under ``torch.manual_seed``, but not what the stock loop would draw. False: never.
    """

    block_size: int = 16
    memory: int | float | str | None = None
    num_blocks: int | None = None
    prefix_caching: bool = True
    prefix_memory: int | str | None = None
    attention_backend: str = "auto"
    optimize: bool = True
    salt: str | None = None
    engine: bool | None = None

    def __post_init__(self) -> None:
        if not _is_int(self.block_size) or not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block_size={self.block_size!r} must be an int from 1 to 1024 (16 is a good choice)")
        if isinstance(self.memory, float) or (isinstance(self.memory, str) and self.memory.strip().endswith("%")):
            object.__setattr__(self, "memory", _parse_share(self.memory))
        elif self.memory is not None:
            object.__setattr__(self, "memory", parse_size(self.memory))
        if isinstance(self.prefix_memory, str) and re.fullmatch(r"\s*0+(\.0+)?\s*\w*", self.prefix_memory):
            object.__setattr__(self, "prefix_memory", 0)
        if self.prefix_memory is not None and (self.prefix_memory != 0 or self.prefix_memory is False):
            object.__setattr__(self, "prefix_memory", parse_size(self.prefix_memory, name="prefix_memory"))
        if self.num_blocks is not None:
            if not _is_int(self.num_blocks) or not 1 <= self.num_blocks <= 1 << 31:
                raise ConfigError(f"num_blocks={self.num_blocks!r} must be an int from 1 to {1 << 31}")
            if self.memory is not None:
                raise ConfigError("give memory or num_blocks, not both: each alone fixes the size of the pool")
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"prefix_caching={self.prefix_caching!r} must be True or False")
        if not isinstance(self.optimize, bool):
            raise ConfigError(f"optimize={self.optimize!r} must be True or False")
        if self.engine is not None and not isinstance(self.engine, bool):
            raise ConfigError(f"engine={self.engine!r} must be True, False or None")
        if not isinstance(self.attention_backend, str):
            raise ConfigError(f"attention_backend={self.attention_backend!r} must be text, such as 'auto'")
        if self.salt is not None and not isinstance(self.salt, str):
            raise ConfigError(f"salt={self.salt!r} must be text")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | CacheConfig | None, base: CacheConfig | None = None) -> CacheConfig:
        """``base`` (default: the defaults) with ``values`` on top. An unknown key is an error that names the known."""
        if isinstance(values, CacheConfig):
            return values
        base = base or cls()
        if values is None:
            return base
        if not isinstance(values, Mapping):
            raise ConfigError(f"cache_config must be a dict or a CacheConfig, not {type(values).__name__}")
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                raise ConfigError(f"unknown cache_config key {key!r}{hint} Known keys: {', '.join(known)}")
        overrides = dict(values)
        # memory and num_blocks exclude each other; the one given last decides
        if "num_blocks" in overrides:
            overrides.setdefault("memory", None)
        elif "memory" in overrides:
            overrides.setdefault("num_blocks", None)
        return dataclasses.replace(base, **overrides)

    @property
    def geometry(self) -> tuple[Any, ...]:
        """What must be equal for two calls to share one pool."""
        return (self.block_size, self.memory, self.num_blocks, self.prefix_memory, self.attention_backend)


_PREEMPTION = ("auto", "recompute", "swap")
_QUANTIZATION = ("int8_weight_only", "int8_dynamic")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine (``LLM``).

    Attributes:
        block_size, memory, num_blocks, prefix_caching, attention_backend: as in CacheConfig.
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: tokens that may run in one step; longer prompts are split over steps.
        max_model_len: tokens a sequence may have, prompt included; None for what the model's config says, if anything.
        policy: "fcfs" (arrival), "lpm" (longest stored prefix first) or "priority" (lower first, waiting counts).
        preemption: what becomes of a request that has to give way when blocks are short. "recompute": its blocks are
            forgotten and computed again; "swap": they move to the host tier while that has room; "auto": whichever
            is estimated to take less time. The output is the same.
        host_memory: bytes of main memory for the host tier. None: none on a CPU under "auto", where the pool might as
            well be larger; else as much as the pool has, at most 4 GiB.
        checkpoint_memory: bytes for states of recurrent layers, kept so that later requests can go on from them; only
            for models that have such layers. None: 512 MiB, or a quarter of the pool if that is more.
        overlap: plan the next step and handle the last one's results while a step runs. The output is the same. None:
            where the model runs on an accelerator.
        optimize: on a CPU, run decoders of the usual build (Llama's, Qwen's and their like) by native code on packed
            copies of their weights, which take as much memory once more. The model itself is not touched, and changed
            weights are packed again when the engine next comes out of idleness or a pause. (Of models above 2 GiB
            bytes are only sampled: say ``weights_changed()`` after writing into a part of one through ``.data``, and
            after replacing a function that the model's code calls.)
        quantization: run with the weights of projections, not of the head, in 8 bits, by torchao: "int8_weight_only"
            multiplies them with rows as they are, "int8_dynamic" with rows that are brought to 8 bits too, each with a
            scale of its own. The output is then that of the model quantized, not of the model. The model is not
            touched, changed weights are quantized again as they are packed again, and the copies count as packed. A
            model that was quantized with torchao by its user needs no setting.
        dtype: to load a model in, when it is named and not given; None for what its checkpoint holds.
        seed: from which requests without a seed draw theirs; None for fresh ones.
    """

    block_size: int = 16
    memory: int | float | str | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    policy: str = "fcfs"
    preemption: str = "auto"
    host_memory: int | str | None = None
    checkpoint_memory: int | str | None = None
    overlap: bool | None = None
    prefix_caching: bool = True
    attention_backend: str = "auto"
    optimize: bool = True
    quantization: str | None = None
    dtype: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        cache = self.cache  # raises for what concerns the cache
        object.__setattr__(self, "memory", cache.memory)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if (value is not None or name != "max_model_len") and (not _is_int(value) or value < 1):
                raise ConfigError(f"{name}={value!r} must be an int of at least 1")
        if self.preemption not in _PREEMPTION:
            raise ConfigError(f"preemption={self.preemption!r} is not known; choose one of: {', '.join(_PREEMPTION)}")
        if self.quantization is not None and self.quantization not in _QUANTIZATION:
            raise ConfigError(
                f"quantization={self.quantization!r} is not known; choose None or one of: {', '.join(_QUANTIZATION)}"
            )
        if self.host_memory is not None:
            object.__setattr__(self, "host_memory", parse_size(self.host_memory, name="host_memory"))
            if self.preemption == "recompute":
                raise ConfigError('host_memory has no use with preemption="recompute"; leave one of the two out')
        if self.checkpoint_memory is not None:
            memory = parse_size(self.checkpoint_memory, name="checkpoint_memory")
            object.__setattr__(self, "checkpoint_memory", memory)
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise ConfigError(f"overlap={self.overlap!r} must be True, False or None")
        if self.seed is not None and not _is_int(self.seed):
            raise ConfigError(f"seed={self.seed!r} must be an int or None")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From keywords. Raises ConfigError for one that does not exist, with the nearest that does."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                if key == "cache_config":
                    hint = ": give its keys as options of their own."
                raise ConfigError(f"unknown engine option {key!r}{hint} Known options: {', '.join(known)}")
        return cls(**options)

    @property
    def cache(self) -> CacheConfig:
        """The part that concerns the KV cache."""
        return CacheConfig(
            block_size=self.block_size,
            memory=self.memory,
            num_blocks=self.num_blocks,
            prefix_caching=self.prefix_caching,
            attention_backend=self.attention_backend,
            optimize=self.optimize,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
