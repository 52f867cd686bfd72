"""Does a model still compute what it computed when a prefix was cached?

``WeightsWatch`` turns everything that may change the keys and values of a prompt into a hashable namespace: parameter
and buffer identities and versions, a checksum of their bytes, adapters, the attention implementation, autocast. It
knows no caches. Why so much: fused optimizers and ``.data`` writes do not move ``_version``, ``load_state_dict(assign=
True)`` moves only pointers, adapters change neither.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_internals
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_paged import compat
from hf_paged.kernels import cpu

#: models up to this size are checksummed in full; larger ones by samples, unless they are on a GPU
_FULL_BYTES = 2 << 30
#: bytes sampled from each tensor of a larger model, in chunks spread evenly
_SAMPLE_BYTES = 1 << 16
_SAMPLE_CHUNK = 1 << 10


class WeightsWatch:
    """The weights epoch of one model: a number that grows whenever its weights may have changed."""

    def __init__(self) -> None:
        self.epoch = 0
        self._seen: tuple[Any, ...] | None = None
        self._ids: frozenset[int] = frozenset()
        self._stepped = False

    def changed(self) -> None:
        """Start a new epoch whatever the tensors say."""
        self.epoch += 1
        self._seen = None

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after any optimizer's step; matters when it owns one of this model's parameters."""
        if any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            self._stepped = True

    def observe(self, model: torch.nn.Module) -> int | None:
        """Compare the model with the last call and return its epoch; None when its weights cannot be read."""
        tensors = [*model.parameters(), *model.buffers()]
        inner, how = unwrapped(tensors)
        if not all(_readable(t) for t in inner):
            return None
        seen = (quick_signature(inner), checksum(inner), how)
        if self._stepped or seen != self._seen:
            self.epoch += 1
            self._seen, self._stepped = seen, False
            self._ids = frozenset(id(t) for t in tensors)
        return self.epoch

    def namespace(self, model: torch.nn.Module, runtime: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """What keys and values computed now belong to: the weights epoch and ``runtime`` (see runtime_signature); None
        when nobody can tell."""
        return namespace_of(None if runtime is None else self.observe(model), runtime)

    def unchanged_since_observed(self, model: torch.nn.Module) -> bool:
        """Cheap second look: versions, addresses and optimizer steps, without reading the weights again."""
        seen = self._seen  # another thread may call changed() at any time
        if self._stepped or seen is None:
            return False
        inner, how = unwrapped([*model.parameters(), *model.buffers()])
        return bool(quick_signature(inner) == seen[0]) and how == seen[2]


def namespace_of(epoch: int | None, runtime: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """See WeightsWatch.namespace."""
    return None if runtime is None or epoch is None else (("weights", epoch), *runtime)


def unwrapped(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Tensors that hold others (quantized weights, such as torchao's) replaced by those, as far as they say which, and
    what they say besides."""
    inner: list[torch.Tensor] = []
    how: list[str] = []
    for tensor in tensors:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if _readable(tensor) or flatten is None:
            inner.append(tensor)
            continue
        names, context = flatten()
        found, deeper = unwrapped([getattr(tensor, name) for name in names])
        inner += found
        how.append(f"{len(inner)} {type(tensor).__qualname__} {names} {context} {deeper}")
    return inner, "\n".join(how)


def quick_signature(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Addresses and in-place versions. Inference tensors have no version; their bytes are still checksummed."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype) for t in tensors)


def checksum(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """A checksum per tensor: of every byte up to 2 GiB in all (and always on a GPU), else of samples of each."""
    total = sum(t.nbytes for t in tensors)
    on_cpu: list[torch.Tensor] = []
    elsewhere: list[torch.Tensor] = []
    for t in tensors:
        t = t.detach()
        if t.device.type == "meta" or t.numel() == 0 or t.layout != torch.strided:
            continue
        if not t.is_contiguous():
            t = t.contiguous()
        data = t.reshape(-1).view(torch.uint8)
        if total > _FULL_BYTES and t.device.type == "cpu" and data.numel() > _SAMPLE_BYTES:
            step = data.numel() // (_SAMPLE_BYTES // _SAMPLE_CHUNK)
            data = data.as_strided((_SAMPLE_BYTES // _SAMPLE_CHUNK, _SAMPLE_CHUNK), (step, 1)).reshape(-1)
        (on_cpu if t.device.type == "cpu" else elsewhere).append(data)
    native = cpu.checksums(on_cpu)
    return (*(native if native is not None else map(_sum_bytes, on_cpu)), *map(_sum_bytes, elsewhere))


def _sum_bytes(data: torch.Tensor) -> int:
    head = data[: data.numel() // 4 * 4].view(torch.int32) if data.data_ptr() % 4 == 0 else data
    # Two different linear forms, so that a change that cancels in one (a sign flip, a swap) shows in the other.
    weights = torch.arange(1, 1 + 4096, device=data.device, dtype=torch.int64)
    whole = head.numel() // 4096 * 4096
    columns = head[:whole].view(-1, 4096).sum(0, dtype=torch.int64) if whole else torch.zeros_like(weights)
    rest = head[whole:].to(torch.int64)
    rows = head[:whole].view(-1, 4096).sum(1, dtype=torch.int64) if whole else rest[:0]
    order = torch.arange(1, rows.numel() + 1, device=data.device, dtype=torch.int64)
    first = int((columns * weights).sum() + (rest * weights[: rest.numel()]).sum())
    second = int((rows * order).sum()) ^ int(data[-4:].to(torch.int64).sum())
    return hash((first, second))


def runtime_signature(model: torch.nn.Module) -> tuple[Any, ...] | None:
    """What besides weights decides the keys and values: configuration, structure, adapters, attention, autocast.

    The structure is each module's class and its attributes that are numbers, text, short lists of those or tensors
    (scales, epsilons, counts of experts). None when nobody can tell: the model is in training mode (dropout), carries
    hooks or replaced methods of the user's, keeps weights packed where torch cannot read them, or has rotary
    frequencies that move with the longest prompt seen.
    """
    if model.training or _global_hooks() or "prepare_inputs_for_generation" in model.__dict__:
        return None
    structure: list[Any] = []
    for name, module in model.named_modules():
        own = module.__dict__
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            if hooks and not all(map(_is_harmless, hooks.values())):
                return None
        if "forward" in own and not _known_forward(module, own["forward"]):
            return None
        if _moves_with_length(own.get("rope_type")):
            return None
        attributes = []
        for key, value in own.items():
            if key in _NOT_SETTINGS:
                continue
            if isinstance(value, torch.ScriptObject):
                return None
            known = _frozen(value) if key in _ADAPTER_STATE else _attribute(value)
            if known is not None:
                attributes.append((key, known))
        kind = type(module)
        structure.append((name, id(kind), id(kind.forward), kind.__qualname__, attributes))
    return (
        ("config", _frozen_config(getattr(model, "config", None))),
        ("structure", hashlib.blake2b(repr(structure).encode(), digest_size=16).hexdigest()),
        ("storage", *storage_key(model)),
        ("attention", *compat.attention_function(getattr(model, "config", None))),
    )


#: a collection longer than this is data, not a setting; and settings are not nested deeper than this
_LONGEST_SETTING, _DEEPEST_SETTING = 4096, 4


def _attribute(value: Any, depth: int = 0) -> Any:
    """What an attribute of a module contributes to the structure, as nested tuples of text; None for nothing.

    Text, because Python hashes -1 and -2 alike, and 0, 0.0 and False.
    """
    if value is None or isinstance(value, torch.nn.Module) or hasattr(value, "get_text_config"):
        return None  # submodules and configurations are looked at by themselves
    if isinstance(value, int | float | str | bool | bytes | complex | enum.Enum | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if not _readable(value) or value.is_quantized:
            return f"tensor {id(value)}"
        return repr((tuple(value.shape), value.dtype, checksum([value])))
    if isinstance(value, np.ndarray | np.generic):
        return repr((value.shape, value.dtype, hash(value.tobytes()) if value.dtype != object else id(value)))
    if depth >= _DEEPEST_SETTING or isinstance(value, type) or callable(value):
        return f"{type(value).__qualname__} {id(value)}"
    if isinstance(value, dict):
        items = [(str(k), _attribute(v, depth + 1)) for k, v in itertools.islice(value.items(), _LONGEST_SETTING)]
    elif isinstance(value, list | tuple | set | frozenset):
        items = [("", _attribute(v, depth + 1)) for v in itertools.islice(value, _LONGEST_SETTING)]
    else:
        kept = getattr(value, "__dict__", {})
        items = [(k, _attribute(v, depth + 1)) for k, v in itertools.islice(kept.items(), _LONGEST_SETTING)]
        items.append((type(value).__qualname__, None))
    return (type(value).__name__, *items)


#: "training" is among a module's own; "forward" is looked at by itself; the last one is put there by generate_batch()
_NOT_SETTINGS = frozenset({*torch.nn.Module().__dict__, "forward", compat.CACHED_MANAGER})
_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def _global_hooks() -> bool:
    return bool(module_internals._global_forward_hooks or module_internals._global_forward_pre_hooks)


def _known_forward(module: torch.nn.Module, forward: Any) -> bool:
    """A ``forward`` set on the instance that changes nothing: accelerate's wrapper, or the class's own, compiled."""
    if "_hf_hook" in module.__dict__:
        return _moves_only(module.__dict__["_hf_hook"])
    original = getattr(forward, "_torchdynamo_orig_callable", None)
    return getattr(original, "__func__", None) is type(module).forward


def _moves_only(hook: Any) -> bool:
    """Whether an accelerate hook is one of accelerate's own, which move tensors and compute nothing."""
    return type(hook).__module__ == "accelerate.hooks" and all(map(_moves_only, getattr(hook, "hooks", ())))


def _moves_with_length(rope_type: Any) -> bool:
    kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def _frozen_config(config: Any) -> str:
    """A digest of a configuration's values, those of nested ones included."""

    def freeze(value: Any) -> Any:
        if hasattr(value, "get_text_config"):
            return tuple(sorted((k, freeze(v)) for k, v in vars(value).items() if not k.startswith("_")))
        return repr(value)

    return hashlib.blake2b(repr(freeze(config)).encode(), digest_size=16).hexdigest()


def storage_key(model: torch.nn.Module) -> tuple[Any, ...]:
    """What decides the dtype and device of a model's keys: its own, and autocast's."""
    floating = (p for p in model.parameters() if p.is_floating_point() and p.device.type != "meta")
    first = next(floating, None)
    device = torch.device("cpu") if first is None else first.device
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (None if first is None else first.dtype, device, autocast)


def _readable(tensor: torch.Tensor) -> bool:
    """Plain memory: not sparse, not on the meta device (offloaded), not a wrapper (see unwrapped)."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
    )


def _is_harmless(hook: Any) -> bool:
    """transformers' own hooks record outputs and change nothing."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((str(k), repr(v)) for k, v in value.items()))
    if isinstance(value, list | tuple | set):
        return tuple(str(v) for v in value)
    return str(value)


class OptimizerHook:
    """One process-wide hook after every optimizer step, telling the watches that are alive."""

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[WeightsWatch] = weakref.WeakSet()
        self._handle: Any = None

    def install(self) -> None:
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for watch in list(self.watches):
            watch.optimizer_stepped(optimizer)
