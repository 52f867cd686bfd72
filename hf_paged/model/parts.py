"""The parts of a decoder of the usual build: recognised in a model, watched while it runs, and packed.

It owns what counts as usual and how parts are told: by what they are made of and what they compute, names being only
how they are found. It runs nothing natively; ``fused`` does, and tries out whether what was found here is all.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_paged.attention.metadata import AttentionParams, LayerSpec
from hf_paged.errors import UnsupportedError
from hf_paged.kernels import cpu
from hf_paged.kernels.cpu.decoder import (
    PANEL,
    DecoderLayer,
    Norm,
    PackedLinear,
    Weights,
    as_they_are,
    can_stay,
    pack,
    pack_gated,
)
from hf_paged.kernels.cpu.memory import HugePages
from hf_paged.model.quantized import int8_weights, is_int8

_DTYPES = (torch.float32, torch.bfloat16)
#: of tensors made here, whatever torch's defaults are
PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
#: settings that change nothing before numbers are large; the first is known, the other refused
_SOFTCAP, _CLIP = "final_logit_softcapping", "clip_qkv"
_LIMIT = re.compile(r"limit|clip|clamp|cap(?:ping)?(?:_|$)", re.IGNORECASE)


class UnusualBuildError(UnsupportedError):
    """The model is not of the usual build; the message says in what. Whoever asked for a FusedDecoder does without."""


class DifferenceError(UnusualBuildError):
    """It looks like it but gives other numbers, at least with these weights."""


@dataclass
class Seen:
    """What a forward of the model's own fed to a layer and got from it, float32 ``[tokens, hidden]``; and for each time
    that its MLP was called what that was fed, as it was, and gave, float32 ``[tokens, hidden]``."""

    hidden: torch.Tensor | None = None
    output: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    mlp: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass
class Parts:
    """A model's modules by what they are to the decoder."""

    embed: nn.Embedding
    layers: Sequence[nn.Module]
    norm: nn.Module
    rotary: nn.Module
    head: nn.Linear
    #: logits are this times the hyperbolic tangent of what they are otherwise over this
    softcap: float | None = None
    layer_types: Sequence[str] | None = None
    seen: list[Seen] = field(default_factory=list)

    def head_product(self, memory: HugePages) -> PackedLinear:
        """With the model's own weights where those can be multiplied as they are: a copy of a large vocabulary is a
        fifth of a small model, and would save some hundredths of a step. So changes of the head, as those of the
        embedding, are seen at once, also by requests that run."""
        if self._head_can_stay():
            return as_they_are(self.head.weight, _bias(self.head))
        return pack(_weights(self.head), _bias(self.head), memory)

    def _head_can_stay(self) -> bool:
        return not is_int8(self.head.weight) and can_stay(self.head.weight)

    @property
    def packable_bytes(self) -> int:
        """Bytes of the weights that a FusedDecoder packs."""
        packed: list[nn.Module] = [] if self._head_can_stay() else [self.head]
        for layer in self.layers:
            attention, mlp = (getattr(layer, name, None) for name in ("self_attn", "mlp"))
            packed += [attention] if isinstance(attention, nn.Module) else []
            packed += [mlp] if isinstance(mlp, nn.Module) and _gate_of(mlp) is not None else []
        linears = {m for module in packed for m in module.modules() if type(m) is nn.Linear}
        return sum(_num_bytes(p) for linear in linears for p in linear.parameters())

    @classmethod
    def of(cls, view: Any) -> Parts:
        """Raises UnusualBuildError."""
        reason = cpu.unavailable()
        if reason is not None:
            raise UnusualBuildError(reason)
        base, head = view.base_model, view.get_output_embeddings()
        try:
            embed, layers, norm, rotary = base.embed_tokens, base.layers, base.norm, base.rotary_emb
        except AttributeError as error:
            raise UnusualBuildError("it is not made of embed_tokens, layers, norm and rotary_emb") from error
        config = view.config.get_text_config(decoder=True)
        softcap = getattr(config, _SOFTCAP, None)
        if getattr(config, _CLIP, None) is not None or (softcap is not None and not _caps_logits(view)):
            name = _SOFTCAP if softcap is not None else _CLIP
            raise UnusualBuildError(f"it has a {name}, which small numbers would not show")
        layer_types = getattr(config, "layer_types", None)
        return cls(embed, list(layers), norm, rotary, _linear(head), softcap, layer_types)

    def rotary_kinds(self) -> list[str | None]:
        """By layer, the type of layer by which its rotary embedding is told from others'; None where all share one.

        Raises UnusualBuildError.
        """
        given = [seen.rotary for seen in self.seen]
        if any(rotary is None for rotary in given):
            raise UnusualBuildError("a layer is given no rotary embedding")
        if all(rotary is given[0] for rotary in given):
            return [None] * len(given)
        kinds: list[str | None] = list(self.layer_types or ())
        pairs = {(kind, id(rotary)) for kind, rotary in zip(kinds, given, strict=False)}
        if len(kinds) != len(given) or not len(pairs) == len(set(kinds)) == len({r for _, r in pairs}):
            raise UnusualBuildError("its layers do not share one rotary embedding, nor those of a type")
        return kinds

    def watching(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``run()`` a forward, and note what layers are fed and give."""
        mlps: list[Any] = [layer.mlp for layer in self.layers if isinstance(getattr(layer, "mlp", None), nn.Module)]
        if len(mlps) < len(self.layers):
            raise UnusualBuildError("a layer has no mlp")
        watched = [*self.layers, *mlps]
        if any("forward" in module.__dict__ for module in watched):
            raise UnusualBuildError("the forward of a layer was replaced")
        self.seen = [Seen() for _ in self.layers]
        try:
            for layer, mlp, seen in zip(self.layers, mlps, self.seen, strict=True):
                layer.__dict__["forward"] = _noting(layer, seen)
                mlp.__dict__["forward"] = _noting_mlp(mlp, seen)
            return run()
        finally:
            for module in watched:
                module.__dict__.pop("forward", None)


def _caps_logits(model: Any) -> bool:
    """Whether a model does with its softcap what transformers' own do; numbers of usual size would not show it."""
    forward = type(model).forward
    if not forward.__module__.startswith("transformers.models."):
        return False
    try:
        return _SOFTCAP in inspect.getsource(inspect.unwrap(forward))
    except OSError:  # installed without sources, so nobody can tell
        return False


def _noting(layer: nn.Module, seen: Seen) -> Callable[..., Any]:
    forward = layer.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        fed = None if hidden is None else hidden[0].detach().float().clone()
        output = forward(*args, **kwargs)
        if hidden is None:
            raise UnusualBuildError("its layers are not fed hidden_states")
        # the layer may change in place what it was fed, so that had better been noted before it ran
        seen.hidden, seen.output = fed, _first(output)[0].detach().float()
        seen.rotary = kwargs.get("position_embeddings")
        return output

    return noting


def _noting_mlp(mlp: nn.Module, seen: Seen) -> Callable[..., Any]:
    forward = mlp.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            raise UnusualBuildError("its MLPs are fed more than one tensor")
        fed = args[0].detach().clone()
        output = forward(*args)
        seen.mlp.append((fed, rows_of(output).clone()))
        return output

    return noting


def _first(output: Any) -> torch.Tensor:
    """Some modules return more than what goes on."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def rows_of(output: Any) -> torch.Tensor:
    """What an MLP returned as float32 ``[tokens, hidden]``."""
    found = _first(output).detach().float()
    return found.reshape(-1, found.shape[-1])


def asked(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What a module of the model's makes of ``args``. Raises UnusualBuildError where it does not know them."""
    try:
        return module(*args, **kwargs)
    except Exception as error:  # it may be anybody's code
        raise UnusualBuildError(f"its {type(module).__name__} is called in another way ({error!r})") from error


def layer_of(
    layer: nn.Module, params: AttentionParams, spec: LayerSpec, hidden: int, memory: HugePages
) -> DecoderLayer:
    """A layer packed in ``memory``, without storage. ``params`` is what its attention asked for, ``spec`` what it
    stores of a token.

    Raises UnusualBuildError.
    """
    attention: Any = getattr(layer, "self_attn", None)
    if attention is None:
        raise UnusualBuildError("a layer has no self_attn")
    dim = spec.head_dim
    o = _linear(getattr(attention, "o_proj", None))
    if params.alibi_slopes is not None:
        raise UnusualBuildError("its attention has slopes")  # the kernels could; no such model is of this build
    if o.weight.shape[1] % PANEL and o.weight.dtype == torch.bfloat16:
        raise UnusualBuildError(f"its heads have {o.weight.shape[1]} dimensions together, not a multiple of {PANEL}")
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    inner, kv_inner = o.weight.shape[1], spec.num_kv_heads * dim
    whole = q_norm is not None and getattr(q_norm, "weight", o.weight).shape[0] != dim
    if whole and k_norm is None:
        raise UnusualBuildError("its queries have a norm over all heads, and its keys have none")
    sizes = (inner, kv_inner) if whole else (dim, dim)
    extra = {name for name, _ in attention.named_children()} - {
        "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm",
    }  # fmt: skip
    if extra:
        raise UnusualBuildError(f"its attention has {', '.join(sorted(extra))}")
    limits = [*_limits(layer), *(n for n in _limits(attention) if getattr(attention, n) != params.softcap)]
    if limits:
        raise UnusualBuildError(f"a layer has a {limits[0]}, which small numbers would not show")
    before_mlp, after_attn, after_mlp = (
        getattr(layer, "pre_feedforward_layernorm", None),
        getattr(layer, "post_attention_layernorm", None),
        getattr(layer, "post_feedforward_layernorm", None),
    )
    if before_mlp is None and after_mlp is None:  # Llama calls the norm before the MLP by its place
        before_mlp, after_attn = after_attn, None
    gate_up, down, act = _mlp(getattr(layer, "mlp", None), memory)
    sinks = None if params.sinks is None else params.sinks.detach().float().contiguous()
    return DecoderLayer(
        qkv=_qkv(attention, memory),
        o=pack(_weights(o), _bias(o), memory),
        kv=0,
        params=0,
        before_attn=norm_of(getattr(layer, "input_layernorm", None), hidden),
        after_attn=norm_of(after_attn, hidden),
        before_mlp=norm_of(before_mlp, hidden),
        after_mlp=norm_of(after_mlp, hidden),
        q_norm=norm_of(q_norm, sizes[0]),
        k_norm=norm_of(k_norm, sizes[1]),
        whole_qk_norm=whole,
        gate_up=gate_up,
        down=down,
        act=act,
        sinks=sinks,
    )


def _linear(module: Any) -> nn.Linear:
    """The module, if its forward is a plain product with weights that can be read. Raises UnusualBuildError."""
    if type(module) is not nn.Linear:
        raise UnusualBuildError(f"a projection is a {type(module).__name__}")
    weight: Any = module._parameters.get("weight")
    if not (type(weight) is nn.Parameter or is_int8(weight)) or weight.device.type != "cpu":
        raise UnusualBuildError("the weights of a projection are not plain parameters on the CPU")
    if weight.layout is not torch.strided or weight.dtype not in _DTYPES:
        raise UnusualBuildError(f"the weights of a projection are {weight.dtype}, {weight.layout}")
    bias: Any = module._parameters.get("bias")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device.type != "cpu"):
        raise UnusualBuildError(f"the bias of a projection is of shape {list(bias.shape)} on {bias.device}")
    return module


def _weights(linear: nn.Linear) -> Weights:
    """Those of a module that :func:`_linear` found to be one. Raises UnusualBuildError."""
    if not is_int8(linear.weight):
        return Weights.plain(linear.weight)
    try:
        return int8_weights(linear.weight)
    except UnsupportedError as error:
        raise UnusualBuildError(str(error)) from error


def _num_bytes(weight: torch.Tensor) -> int:
    return weight.numel() if is_int8(weight) else weight.nbytes


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    bias = linear._parameters.get("bias")
    return None if bias is None else bias.detach()


def _qkv(attention: Any, memory: HugePages) -> PackedLinear:
    if hasattr(attention, "qkv_proj"):
        linear = _linear(attention.qkv_proj)
        return pack(_weights(linear), _bias(linear), memory)
    projections = [_linear(getattr(attention, name, None)) for name in ("q_proj", "k_proj", "v_proj")]
    biases = _biases(projections)
    bias = None if biases is None else torch.cat(biases)
    return pack(Weights.rows(_alike(projections)), bias, memory)


def _alike(projections: Sequence[nn.Linear]) -> list[Weights]:
    """The weights of projections that become one product. Raises UnusualBuildError where some are quantized."""
    found = [_weights(p) for p in projections]
    if len({(w.numbers.dtype, w.dtype, w.dynamic) for w in found}) > 1:
        raise UnusualBuildError("of projections of the same rows some are quantized, or in another way")
    return found


def _biases(projections: Sequence[nn.Linear]) -> list[torch.Tensor] | None:
    """The biases of projections that become one, with zeros for those that have none; None if none has."""
    biases = [_bias(p) for p in projections]
    if all(b is None for b in biases):
        return None
    zeros = [torch.zeros(p.weight.shape[0], **PLAIN) for p in projections]
    return [z if b is None else b for z, b in zip(zeros, biases, strict=True)]


def _mlp(mlp: Any, memory: HugePages) -> tuple[PackedLinear | None, PackedLinear | None, str]:
    """A gated MLP packed; nothing where it is something else, which then runs as it is."""
    if mlp is None:
        raise UnusualBuildError("a layer has no mlp")
    act = _gate_of(mlp)
    if act is None:
        return None, None, "silu"
    down = _linear(mlp.down_proj)
    if hasattr(mlp, "gate_up_proj"):
        both = _linear(mlp.gate_up_proj)
        gate, up = _weights(both).chunk()
        bias = _bias(both)
        biases = None if bias is None else list(bias.chunk(2))
    else:
        parts = [_linear(mlp.gate_proj), _linear(mlp.up_proj)]
        gate, up = _alike(parts)
        biases = _biases(parts)
    gate_bias, up_bias = biases or (None, None)
    packed = pack_gated(gate, up, gate_bias, up_bias, memory)
    return packed, pack(_weights(down), _bias(down), memory), act


def _gate_of(mlp: Any) -> str | None:
    """The activation of an MLP that is made of a gate, what it gates, a way back, and nothing else; None of others."""
    act = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    names = {name for name, child in mlp.named_children() if child is not act}
    gated = names in ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"})
    return _activation(act) if gated and not _limits(mlp) else None


def _limits(module: Any) -> list[str]:
    """What a module has that may cut off large numbers, which small ones would not show."""
    return [
        name for name, value in vars(module).items()
        if _LIMIT.search(name) and isinstance(value, int | float) and not isinstance(value, bool)
    ]  # fmt: skip


def _activation(function: Any) -> str | None:
    """The kernels' name of an activation, told by what it computes."""
    if function is None:
        return None
    x = torch.linspace(-40, 40, 641, **PLAIN)  # far enough for those that are cut off somewhere
    known = {
        "silu": nn.functional.silu(x),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
        "gelu": nn.functional.gelu(x),
        "relu": nn.functional.relu(x),
    }
    try:
        y = function(x)
    except Exception:  # whatever it is, it is not a function of single numbers
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    return next((name for name, want in known.items() if torch.allclose(y, want, rtol=1e-6, atol=1e-6)), None)


def norm_of(module: Any, size: int) -> Norm | None:
    """A root mean square norm, told by what it computes; None where there is none. Raises UnusualBuildError."""
    if module is None:
        return None
    weight: Any = getattr(module, "weight", None)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or weight.shape != (size,):
        raise UnusualBuildError(f"a norm is a {type(module).__name__} of another size")
    probe = torch.linspace(-1, 1, size, **PLAIN) * torch.tensor([[1.0], [1e-3]], **PLAIN)
    plain = probe * torch.rsqrt(probe.square().mean(-1, keepdim=True) + float(eps))
    got = asked(module, probe.to(weight.dtype)).detach().float()
    for factor in (weight.detach().float(), 1 + weight.detach().float()):  # Gemma stores what is added to one
        allowed = 1e-5 if weight.dtype == torch.float32 else 2e-2
        if bool(((got - plain * factor).abs() <= allowed * (plain * factor).abs().max()).all()):
            return Norm(factor.contiguous(), float(eps))
    raise UnusualBuildError(f"a norm ({type(module).__name__}) is not a root mean square")
