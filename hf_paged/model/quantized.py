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

#: EngineConfig.quantization, and what torchao calls it
_CONFIGS = {"int8_weight_only": "Int8WeightOnlyConfig", "int8_dynamic": "Int8DynamicActivationInt8WeightConfig"}
#: what has fewer outputs, or reads less, is worth no error: the gates of experts
_LEAST = 16
#: numbers of a weight that are quantized at once
_NUMBERS_AT_ONCE = 1 << 20
_HOW_TO_GET = "pip install 'hf-paged[quantization]'"


def quantized(view: Any, kind: str) -> Any:
    """A view of ``view`` with the weights of its projections in 8 bits, each output with a scale of its own.

    The head stays as it is, as transformers leaves it (a third of the error would be its), and so do embeddings, what
    is small (the gates of experts), adapters, experts that are kept in one tensor, and weights that are not in memory.

    Raises ConfigError without torchao, UnsupportedError where there is nothing to quantize.
    """
    try:
        from torchao import quantization
    except ImportError as error:
        raise ConfigError(
            f"quantization={kind!r} needs torchao, which cannot be imported ({error}): {_HOW_TO_GET}"
        ) from error
    found = view_of(view)
    head = found.get_output_embeddings()
    chosen = [m for n, m in found.named_modules() if m is not head and _is_quantizable(m) and not _is_of_adapter(n)]
    if not chosen:
        raise UnsupportedError(f"quantization={kind!r}: {type(view).__name__} has no projections that can be quantized")
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
    return any(part.startswith("lora_") for part in name.split("."))


def is_int8(weight: Any) -> bool:
    """Whether a weight is one that torchao quantized to 8 bits, in whatever way."""
    kind = type(weight)
    return kind.__name__ == "Int8Tensor" and kind.__module__.split(".")[0] == "torchao"


def quantizes_rows(weight: Any) -> bool:
    """Whether products with a weight of torchao's are of rows that are rounded to few bits first."""
    return type(weight).__module__.split(".")[0] == "torchao" and getattr(weight, "act_quant_kwargs", None) is not None


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
