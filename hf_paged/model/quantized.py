"""Weights in 8 bits, as torchao keeps them: read for the native decoder, and made on a view of a model that has none.

It owns what is known about torchao, which is imported only to make such weights: a model that has them brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_paged.errors import ConfigError, UnsupportedError
from hf_paged.kernels.cpu.decoder import MAX_DEPTH_OF_BYTES, Weights
from hf_paged.kernels.cpu.memory import HugePages, return_free_memory
from hf_paged.model.view import view_of
from hf_paged.model.weights import unwrapped

#: EngineConfig.quantization, and what torchao calls it
_CONFIGS = {"int8_weight_only": "Int8WeightOnlyConfig", "int8_dynamic": "Int8DynamicActivationInt8WeightConfig"}
#: what has fewer outputs, or reads less, is worth no error
_LEAST = 16
#: see Quantization.epoch
AS_FOUND = "as found"
#: numbers of a weight that are quantized at once
_NUMBERS_AT_ONCE = 1 << 20
_HOW_TO_GET = "pip install 'hf-paged[quantization]'"


class Quantization:
    """A view of a model with its weights as they are, ``source``, and one to run with, ``view``: in 8 bits, if a
    ``kind`` is given. Where nobody can tell whether weights change (their epoch is None) they are quantized each time.

    ``pending`` says that they are to be quantized before anything may run: making them failed, or was put off.
    Not thread-safe. A copy keeps the views that there are.
    """

    def __init__(self, source: Any, kind: str | None) -> None:
        self.source, self.kind = source, kind
        #: of weights that are quantized; AS_FOUND of those that are looked at next, before anything runs
        self.epoch: int | str | None = None
        self.forget()

    def forget(self) -> None:
        """Have nothing quantized."""
        self.view, self.nbytes, self.pending = self.source, 0, self.kind is not None

    def outdated(self, epoch: int | None) -> bool:
        """Whether weights of ``epoch`` are to be quantized yet."""
        if self.kind is None or (self.epoch == AS_FOUND and not self.pending):
            return False
        return self.pending or epoch is None or epoch != self.epoch

    def make(self, epoch: int | str | None) -> None:
        """Quantize the weights as they are, which are those of ``epoch``.

        Raises as :func:`quantized`, and MemoryError; then it is pending.
        """
        self.forget()
        if self.kind is not None:
            view = quantized(self.source, self.kind)
            own = {id(p) for p in self.source.parameters()}
            inner, _ = unwrapped(p for p in view.parameters() if id(p) not in own)
            self.view, self.nbytes, self.pending = view, sum(t.nbytes for t in inner), False
        self.epoch = epoch


def quantized(view: Any, kind: str) -> Any:
    """A view of ``view`` with the weights of its projections in 8 bits, each output with a scale of its own.

    The head stays as it is, as transformers leaves it (a third of the error would be its), and so do embeddings, what
    chooses among experts, experts that are kept in one tensor, adapters, and weights that are not in memory.

    Raises ConfigError without torchao, UnsupportedError where there is nothing to quantize.
    """
    try:
        from torchao import quantization
    except ImportError as error:
        raise ConfigError(
            f"quantization={kind!r} needs torchao, which cannot be imported ({error}): {_HOW_TO_GET}"
        ) from error
    found = view_of(view)
    if any(map(is_int8, found.parameters())):
        raise UnsupportedError(f"quantization={kind!r}: the model is quantized already, and runs so without the option")
    head = found.get_output_embeddings()
    kept = set() if head is None else set(head.modules())
    experts = _numbers_of_experts(found.config)
    chosen = [
        module for name, module in found.named_modules()
        if module not in kept and _is_quantizable(module) and not _is_of_adapter(name)
        and (module.out_features not in experts or name.endswith("_proj"))  # keys may be as wide as experts are many
    ]  # fmt: skip
    if not chosen:
        raise UnsupportedError(
            f"quantization={kind!r}: {type(view).__name__} has no nn.Linear besides its head that torchao could "
            "quantize; leave the option out"
        )
    config = getattr(quantization, _CONFIGS[kind])(set_inductor_config=False)
    memory = HugePages(sum(module.weight.numel() for module in chosen))
    for module in chosen:
        weight = _in_pieces(module.weight.detach(), partial(quantization.quantize_, config=config), memory)
        # the dict was the user's
        module.__dict__["_parameters"] = {**module._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
        return_free_memory()
    return found


def _in_pieces(weight: torch.Tensor, quantize: Callable[[nn.Module], None], memory: HugePages) -> torch.Tensor:
    """A weight quantized a few rows at a time, since torchao computes in float32 and in many steps. What it keeps of
    every row is put together by what tensors of such kinds say about themselves."""
    inner: dict[str, torch.Tensor] = {}
    first: Any = None
    start = 0
    for rows in weight.split(max(1, _NUMBERS_AT_ONCE // weight.shape[1])):
        module = nn.Linear(weight.shape[1], len(rows), bias=False, device="meta")
        module.weight = nn.Parameter(rows, requires_grad=False)
        quantize(module)
        piece: Any = module.weight
        module.__dict__.pop("extra_repr", None)  # which would keep it, and its weight, until cycles are looked for
        names, _ = piece.__tensor_flatten__()
        for name in names:
            part = getattr(piece, name)
            if first is None:
                shape = (len(weight), *part.shape[1:])
                on_cpu = part.device.type == "cpu"
                inner[name] = memory.zeros(shape, part.dtype) if on_cpu else part.new_empty(shape)
            inner[name][start : start + len(rows)] = part
        first, start = first if first is not None else piece, start + len(rows)
    _, context = first.__tensor_flatten__()
    made: torch.Tensor = type(first).__tensor_unflatten__(inner, context, weight.shape, weight.stride())
    return made


def _is_quantizable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight: Any = module._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.layout is torch.strided
        and weight.device.type != "meta"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and min(weight.shape) >= _LEAST
    )


def _is_of_adapter(name: str) -> bool:
    """Whether a module is PEFT's: a part of LoRA, or a module trained in place of the model's own."""
    parts = name.split(".")
    return any(part.startswith("lora_") or part in ("modules_to_save", "original_module") for part in parts)


def _numbers_of_experts(config: Any) -> set[int]:
    text = config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return {getattr(text, name) for name in names if isinstance(getattr(text, name, None), int)}


def is_int8(weight: Any) -> bool:
    """Whether a weight is one that torchao quantized to 8 bits, in whatever way."""
    kind = type(weight)
    return kind.__name__ == "Int8Tensor" and kind.__module__.split(".")[0] == "torchao"


def quantizes_rows(weight: Any) -> bool:
    """Whether products with a weight of torchao's are of rows that are rounded to few bits first."""
    if type(weight).__module__.split(".")[0] != "torchao":
        return False
    return any(getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "activation_quantization"))


def shares_row_scale(weight: Any) -> bool:
    """Whether such a weight has rows rounded with a scale that depends on all of them."""
    if not quantizes_rows(weight) or getattr(weight, "act_quant_scale", None) is not None:
        return False
    kwargs = getattr(weight, "act_quant_kwargs", None)
    return type(getattr(kwargs, "granularity", None)).__name__ == "PerTensor"


def int8_weights(weight: Any) -> Weights:
    """What the native decoder needs of such a weight. Raises UnsupportedError if it does not compute like this one."""
    n, k = weight.shape
    kwargs, given = weight.act_quant_kwargs, getattr(weight, "act_quant_scale", None)
    scale, zero_point = weight.scale.detach(), weight.zero_point
    if scale.numel() not in (1, n) or (scale.numel() == n and n != 1 and list(weight.block_size) != [1, k]):
        raise UnsupportedError(f"weights in 8 bits share scales in blocks of {list(weight.block_size)}")
    if zero_point is not None and bool(zero_point.any()):
        raise UnsupportedError("weights in 8 bits are not symmetric")
    if given is not None or getattr(weight, "act_pre_scale", None) is not None:
        raise UnsupportedError("weights in 8 bits are multiplied with rows of a fixed scale")
    if kwargs is not None:
        usual = type(kwargs.granularity).__name__ == "PerRow" and kwargs.mapping_type.name == "SYMMETRIC"
        if not usual or kwargs.reduce_range:
            raise UnsupportedError(f"rows are quantized by {kwargs}")
        if k > MAX_DEPTH_OF_BYTES:
            raise UnsupportedError(f"rows of {k} numbers are quantized, more than {MAX_DEPTH_OF_BYTES}")
    scales = scale.float().reshape(-1).expand(n).contiguous()
    return Weights(weight.qdata.detach(), weight.dtype, scales, dynamic=kwargs is not None)
