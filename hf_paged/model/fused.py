"""Decoders of the usual build, recognised in a model and run by the native decoder instead of module by module.

A layer of the usual build is: norm, one or three projections to queries, keys and values, perhaps a norm of those,
rotary positions in halves, attention on blocks, a projection back, the sum, norm, a gated MLP (or whatever the model
has in its place, which then runs as it is), the sum; with norms behind attention and MLP where the model has them. What
modules are called is only how parts are found: each layer is then run beside the model's own on what the model itself
fed it, and so is the head, and where they differ the model runs as ever.

Weights are packed once more for the kernels (the model's own stay as they are); whoever owns a FusedDecoder makes
another one when they change. The residual stream is fp32 whatever the model's dtype.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_paged.attention.backends import cpu_native
from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerKV, LayerSpec
from hf_paged.errors import UnsupportedError
from hf_paged.kernels import cpu
from hf_paged.kernels.cpu.decoder import PANEL, Decoder, DecoderLayer, Norm, PackedLinear, pack, pack_gated

_DTYPES = (torch.float32, torch.bfloat16)
#: of tensors made here, whatever torch's defaults are
_PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
#: what rounding may make of one number, as a share of it
_ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}
#: and beyond that, of all that is added to a token, as a share: of most tokens, and of any. A token may attend to one
#: of two others by a hair's breadth. So what is wrong at few tokens only, by less than this, is not seen in bfloat16
_ALLOWED = {torch.float32: (1e-5, 1e-3), torch.bfloat16: (0.04, 0.5)}
_MOST = 0.9
#: settings that change nothing before numbers are large
_LIMITS = ("final_logit_softcapping", "clip_qkv")
_LIMIT = re.compile(r"limit|clip|clamp|cap(?:ping)?(?:_|$)", re.IGNORECASE)
#: positions that rotary tables begin with
_LEAST_POSITIONS = 256


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
    seen: list[Seen] = field(default_factory=list)

    @property
    def packable_bytes(self) -> int:
        """Bytes of the weights that a FusedDecoder packs."""
        packed: list[nn.Module] = [self.head]
        for layer in self.layers:
            attention, mlp = (getattr(layer, name, None) for name in ("self_attn", "mlp"))
            packed += [attention] if isinstance(attention, nn.Module) else []
            packed += [mlp] if isinstance(mlp, nn.Module) and _gate_of(mlp) is not None else []
        linears = {m for module in packed for m in module.modules() if type(m) is nn.Linear}
        return sum(p.nbytes for linear in linears for p in linear.parameters())

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
        for name in _LIMITS:
            if getattr(config, name, None) is not None:
                raise UnusualBuildError(f"it has a {name}, which small numbers would not show")
        return cls(embed, list(layers), norm, rotary, _linear(head))

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
        seen.mlp.append((fed, _rows(output).clone()))
        return output

    return noting


def _first(output: Any) -> torch.Tensor:
    """Some modules return more than what goes on."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _rows(output: Any) -> torch.Tensor:
    """What an MLP returned as float32 ``[tokens, hidden]``."""
    found = _first(output).detach().float()
    return found.reshape(-1, found.shape[-1])


class FusedDecoder:
    """A model from token ids to logits. Packs the weights as they are now.

    Args:
        parts: with what a forward of the model's own has shown.
        params: what each layer's attention asked for in that forward.
        spec: what each layer stores of a token.

    Raises UnusualBuildError.
    """

    def __init__(self, parts: Parts, params: Sequence[AttentionParams], spec: LayerSpec) -> None:
        self.parts, self._params, self._spec = parts, list(params), spec
        self.dtype: torch.dtype = parts.head.weight.dtype
        rotaries = [seen.rotary for seen in parts.seen]
        if any(r is None or r is not rotaries[0] for r in rotaries) or rotaries[0] is None:
            raise UnusualBuildError("its layers do not share one rotary embedding")
        self.rotary_dim = int(rotaries[0][0].shape[-1])
        #: whether the model's rotary tables are of half a rotation, both halves being alike (GPT-OSS)
        self._doubled = False
        self.hidden = parts.embed.weight.shape[1]
        self._cos = self._sin = torch.empty(0, self.rotary_dim, **_PLAIN)
        self.layers = [
            self._layer(layer, params) for layer, params in zip(self.parts.layers, self._params, strict=True)
        ]
        self._heads = self.layers[0].o.k // spec.head_dim
        self._norm = _norm(parts.norm, self.hidden)
        self._head = pack(parts.head.weight, _bias(parts.head))
        self._check_sizes()
        self._decoder: Decoder | None = None

    # -- making it ---------------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        """Raise UnusualBuildError unless every size and dtype is what the kernels will take it to be."""
        spec, inner = self._spec, self._heads * self._spec.head_dim
        attended = inner + 2 * spec.num_kv_heads * spec.head_dim
        if spec.head_dim != spec.v_head_dim or spec.dtype != self.dtype or self.rotary_dim > spec.head_dim:
            raise UnusualBuildError(f"what its layers store is {spec}, its rotation {self.rotary_dim} wide")
        if self._heads * spec.head_dim != self.layers[0].o.k or self._heads % spec.num_kv_heads:
            raise UnusualBuildError("its heads do not add up")
        wanted = {"qkv": (attended, self.hidden), "o": (self.hidden, inner)}
        for i, layer in enumerate(self.layers):
            sizes = {name: (linear.n, linear.k) for name, linear in (("qkv", layer.qkv), ("o", layer.o))}
            if layer.gate_up is not None and layer.down is not None:
                gated = -(-layer.down.k // 16) * 32
                wanted |= {"gate_up": (gated, self.hidden), "down": (self.hidden, layer.down.k)}
                sizes |= {"gate_up": (layer.gate_up.n, layer.gate_up.k), "down": (layer.down.n, layer.down.k)}
            for name, size in sizes.items():
                if size != wanted[name]:
                    raise UnusualBuildError(f"{name} of layer {i} is {size} where {wanted[name]} is usual")
            if layer.sinks is not None and layer.sinks.shape != (self._heads,):
                raise UnusualBuildError(f"layer {i} has sinks of shape {list(layer.sinks.shape)}")
        if self._head.k != self.hidden:
            raise UnusualBuildError(f"its head reads {self._head.k} numbers of {self.hidden}")
        dtypes = {p.dtype for p in self._linears()}
        if dtypes != {self.dtype}:
            raise UnusualBuildError(f"its weights are {', '.join(sorted(map(str, dtypes)))}")

    def _linears(self) -> list[PackedLinear]:
        return [p for x in self.layers for p in (x.qkv, x.o, x.gate_up, x.down) if p is not None] + [self._head]

    @property
    def nbytes(self) -> int:
        """Bytes of packed copies."""
        return sum(p.nbytes for p in self._linears())

    def bind(self, storage: Sequence[LayerKV]) -> None:
        """Read and write blocks of these layers from now on. Raises UnusualBuildError."""
        bound = []
        for layer, params, kv in zip(self.layers, self._params, storage, strict=True):
            if kv.backend != cpu_native.CpuNativeBackend.name or kv.spec != self._spec:
                raise UnusualBuildError(f"its blocks are of the backend {kv.backend!r} and hold {kv.spec}")
            addresses = cpu_native.addresses(kv, params)
            bound.append(dataclasses.replace(layer, kv=addresses[0], params=addresses[1], keep=kv))
        self._decoder = self._made(bound)

    def _made(self, layers: Sequence[DecoderLayer]) -> Decoder:
        return Decoder(
            layers, hidden=self.hidden, heads=self._heads, kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim, rotary_dim=self.rotary_dim, dtype=self.dtype,
        )  # fmt: skip

    def _layer(self, layer: nn.Module, params: AttentionParams) -> DecoderLayer:
        attention = _attention(layer)
        dim = self._spec.head_dim
        o = _linear(getattr(attention, "o_proj", None))
        if params.alibi_slopes is not None:
            raise UnusualBuildError("its attention has slopes")  # the kernels could; no such model is of this build
        if o.weight.shape[1] % PANEL and self.dtype == torch.bfloat16:
            raise UnusualBuildError(
                f"its heads have {o.weight.shape[1]} dimensions together, not a multiple of {PANEL}"
            )
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        inner, kv_inner = o.weight.shape[1], self._spec.num_kv_heads * dim
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
        gate_up, down, act = _mlp(getattr(layer, "mlp", None))
        sinks = None if params.sinks is None else params.sinks.detach().float().contiguous()
        return DecoderLayer(
            qkv=_qkv(attention),
            o=pack(o.weight, _bias(o)),
            kv=0,
            params=0,
            before_attn=_norm(getattr(layer, "input_layernorm", None), self.hidden),
            after_attn=_norm(after_attn, self.hidden),
            before_mlp=_norm(before_mlp, self.hidden),
            after_mlp=_norm(after_mlp, self.hidden),
            q_norm=_norm(q_norm, sizes[0]),
            k_norm=_norm(k_norm, sizes[1]),
            whole_qk_norm=whole,
            gate_up=gate_up,
            down=down,
            act=act,
            sinks=sinks,
        )

    def check(
        self, metadata: AttentionMetadata, positions: torch.Tensor, ids: torch.Tensor, want: torch.Tensor
    ) -> None:
        """Raise UnusualBuildError unless each layer and the head compute what the model's own forward has shown.
        ``want`` are its logits for all of ``ids``; blocks are written again. What was shown is forgotten after it."""
        shown, self.parts.seen = self.parts.seen, []
        reason = self._difference(shown, metadata, positions, ids, want)
        if reason is None:
            return
        if 2 * self.rotary_dim <= self._spec.head_dim:
            assert self._decoder is not None
            self._doubled, self.rotary_dim = True, 2 * self.rotary_dim
            self.bind([layer.keep for layer in self._decoder.layers])
            if self._difference(shown, metadata, positions, ids, want) is None:
                return
        raise DifferenceError(reason)

    def _difference(
        self, shown: Sequence[Seen], metadata: AttentionMetadata, positions: torch.Tensor, ids: torch.Tensor,
        want: torch.Tensor,
    ) -> str | None:  # fmt: skip
        """Where it computes something else than was shown."""
        assert self._decoder is not None
        rotary = self._tables(positions)  # not by way of tables up to the largest position
        halves = self._made([dataclasses.replace(layer, gate_up=None, down=None) for layer in self._decoder.layers])
        for i, seen in enumerate(shown):
            reason = self._layer_difference(i, seen, halves, metadata, rotary)
            if reason is not None:
                return f"layer {i} {reason}"
        x = self._embedded(ids)
        if not torch.equal(x, torch.as_tensor(shown[0].hidden)):
            return "its embeddings are changed on their way to the first layer"
        # from what the model's own last layer gave: at odd positions rounding grows from layer to layer
        got = self._logits(torch.as_tensor(shown[-1].output))
        if got.shape != want.shape:
            return f"its logits are of shape {list(want.shape)} where its head gives {list(got.shape)}"
        off = self._off(got, want, want - want.mean(-1, keepdim=True), want.abs())
        return None if off <= 1 else f"its logits are something else ({off:.2g} times what is rounding)"

    def _layer_difference(
        self, index: int, seen: Seen, halves: Decoder, metadata: AttentionMetadata,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> str | None:  # fmt: skip
        """``halves`` are the layers up to where their MLPs begin."""
        fed, gave = seen.hidden, seen.output
        assert fed is not None
        assert gave is not None
        if len(seen.mlp) != 1:
            return f"calls its MLP {len(seen.mlp)} times"
        mlp_fed, mlp_gave = seen.mlp[0]
        if mlp_fed.shape != (1, *fed.shape) or mlp_fed.dtype != self.dtype or mlp_gave.shape != fed.shape:
            return f"feeds {mlp_fed.dtype} {list(mlp_fed.shape)} to its MLP, which gives {list(mlp_gave.shape)}"
        added, size = self._after_mlp(index, mlp_gave), torch.maximum(fed.abs(), gave.abs())
        x = fed.clone()
        halves.decode(x, *rotary, cpu_native.batch_address(metadata), metadata.slot_mapping, index, index + 1)
        middle, normed = gave - added, mlp_fed[0].float()
        off = {"attention": self._off(x, middle, middle - fed, torch.maximum(size, added.abs()))}
        rows = halves.project(self.layers[index].before_mlp, None, x).float()
        off["norm before its MLP"] = self._off(rows, normed, normed, normed.abs())
        if self.layers[index].gate_up is None:
            # on just what it was fed: it may choose its experts by numbers that are rounded
            off["MLP"] = self._off(self._own_mlp(index, mlp_fed[0]), mlp_gave, mlp_gave, mlp_gave.abs())
        else:
            x = fed.clone()
            self._run(x, metadata, rotary, index, index + 1)
            off["MLP"] = self._off(x, gave, gave - fed, size)
        for part, times in off.items():
            if not times <= 1:
                return f"computes something else in its {part} ({times:.2g} times what is rounding)"
        return None

    def _off(self, got: torch.Tensor, want: torch.Tensor, change: torch.Tensor, size: torch.Tensor) -> float:
        """How far ``got`` is off, beyond the rounding of numbers as large as ``size``, as a share of ``change``, the
        root mean square of a token's numbers. Each token by itself: some of real models' have numbers a thousand times
        larger than all others have. Above one means that more is off than rounding explains."""
        excess = ((got - want).abs() - size * _ROUNDING[self.dtype]).clamp_min(0)
        off, whole = (x.square().mean(-1).sqrt() for x in (excess, change))
        shares = torch.where(off == 0, off, off / whole)
        most, any_ = _ALLOWED[self.dtype]
        # the first sees only itself, and has nothing to choose from
        return float(torch.stack([shares.quantile(_MOST) / most, shares[0] / most, shares.max() / any_]).max())

    # -- running it --------------------------------------------------------------------------------------------------

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Logits, float32 ``[len(wanted), vocab]``, of the tokens with the indices ``wanted`` (int64).

        ``ids`` and ``positions`` are int64 ``[tokens]``, as ``metadata`` packs them.
        """
        x = self._embedded(ids)
        self._run(x, metadata, self._rotary(positions, metadata.max_seq_len), 0, len(self.layers))
        if not len(wanted):
            return x.new_empty(0, self._head.n)
        return self._logits(x if len(wanted) == len(x) else x.index_select(0, wanted))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        assert self._decoder is not None
        return self._decoder.project(self._norm, self._head, x)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.parts.embed(ids)
        if rows.shape != (len(ids), self.hidden) or rows.device.type != "cpu":
            raise UnsupportedError(
                f"the embeddings of {len(ids)} tokens are now {list(rows.shape)} on {rows.device}: make a new engine "
                "after changing a model's device or sizes"
            )
        # somebody's own module may keep what it returns
        return (
            rows.clone(memory_format=torch.contiguous_format)
            if rows.dtype == torch.float32
            else rows.float().contiguous()
        )

    def _run(
        self, x: torch.Tensor, metadata: AttentionMetadata, rotary: tuple[torch.Tensor, torch.Tensor], first: int,
        last: int,
    ) -> None:  # fmt: skip
        """Layers ``first`` to ``last - 1`` on ``x``, in place."""
        decoder = self._decoder
        assert decoder is not None
        cos, sin = rotary
        batch, slots = cpu_native.batch_address(metadata), metadata.slot_mapping
        while first < last:  # up to a layer whose MLP is the model's own
            end = next((i + 1 for i in range(first, last) if self.layers[i].gate_up is None), last)
            decoder.decode(x, cos, sin, batch, slots, first, end)
            layer = self.layers[end - 1]
            if layer.gate_up is None:
                normed = decoder.project(layer.before_mlp, None, x)
                x += self._after_mlp(end - 1, self._own_mlp(end - 1, normed))
            first = end

    def _own_mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.parts.layers[index].mlp
        return _rows(mlp(normed[None]))

    def _after_mlp(self, index: int, out: torch.Tensor) -> torch.Tensor:
        norm = self.layers[index].after_mlp
        if norm is None:
            return out
        return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm.eps) * norm.weight

    def _rotary(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 ``[tokens, rotary_dim]``, of positions below ``longest``."""
        if longest > len(self._cos):
            length = max(_LEAST_POSITIONS, 1 << (longest - 1).bit_length())
            self._cos, self._sin = self._tables(torch.arange(length, device="cpu"))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from the model's own module."""
        x = torch.empty(1, 1, 1, **_PLAIN).expand(1, len(positions), self.hidden)  # of which it may read the shape
        found = _asked(self.parts.rotary, x, position_ids=positions[None])
        cos, sin = (torch.cat([t[0], t[0]], -1) if self._doubled else t[0] for t in found)
        for table in (cos, sin):
            if table.shape != (len(positions), self.rotary_dim) or table.device.type != "cpu":
                raise UnusualBuildError(f"its rotary tables of {len(positions)} positions are {list(table.shape)}")
        return cos.float().contiguous(), sin.float().contiguous()


def _asked(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What a module of the model's makes of ``args``. Raises UnusualBuildError where it does not know them."""
    try:
        return module(*args, **kwargs)
    except Exception as error:  # it may be anybody's code
        raise UnusualBuildError(f"its {type(module).__name__} is called in another way ({error!r})") from error


def _attention(layer: nn.Module) -> Any:
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        raise UnusualBuildError("a layer has no self_attn")
    return attention


def _linear(module: Any) -> nn.Linear:
    """The module, if its forward is a plain product with weights that can be read. Raises UnusualBuildError."""
    if type(module) is not nn.Linear:
        raise UnusualBuildError(f"a projection is a {type(module).__name__}")
    weight: Any = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        raise UnusualBuildError("the weights of a projection are not plain parameters on the CPU")
    if weight.layout is not torch.strided or weight.dtype not in _DTYPES:
        raise UnusualBuildError(f"the weights of a projection are {weight.dtype}, {weight.layout}")
    bias: Any = module._parameters.get("bias")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device.type != "cpu"):
        raise UnusualBuildError(f"the bias of a projection is of shape {list(bias.shape)} on {bias.device}")
    return module


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    bias = linear._parameters.get("bias")
    return None if bias is None else bias.detach()


def _qkv(attention: Any) -> PackedLinear:
    if hasattr(attention, "qkv_proj"):
        linear = _linear(attention.qkv_proj)
        return pack(linear.weight, _bias(linear))
    projections = [_linear(getattr(attention, name, None)) for name in ("q_proj", "k_proj", "v_proj")]
    biases = _biases(projections)
    bias = None if biases is None else torch.cat(biases)
    return pack(torch.cat([p.weight.detach() for p in projections]), bias)


def _biases(projections: Sequence[nn.Linear]) -> list[torch.Tensor] | None:
    """The biases of projections that become one, with zeros for those that have none; None if none has."""
    biases = [_bias(p) for p in projections]
    if all(b is None for b in biases):
        return None
    zeros = [p.weight.new_zeros(p.weight.shape[0]) for p in projections]
    return [z if b is None else b for z, b in zip(zeros, biases, strict=True)]


def _mlp(mlp: Any) -> tuple[PackedLinear | None, PackedLinear | None, str]:
    """A gated MLP packed; nothing where it is something else, which then runs as it is."""
    if mlp is None:
        raise UnusualBuildError("a layer has no mlp")
    act = _gate_of(mlp)
    if act is None:
        return None, None, "silu"
    down = _linear(mlp.down_proj)
    if hasattr(mlp, "gate_up_proj"):
        both = _linear(mlp.gate_up_proj)
        gate, up = both.weight.detach().chunk(2)
        bias = _bias(both)
        biases = None if bias is None else list(bias.chunk(2))
    else:
        parts = [_linear(mlp.gate_proj), _linear(mlp.up_proj)]
        gate, up = (p.weight for p in parts)
        biases = _biases(parts)
    packed = pack_gated(gate, up) if biases is None else pack_gated(gate, up, *biases)
    return packed, pack(down.weight, _bias(down)), act


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
    x = torch.linspace(-40, 40, 641, **_PLAIN)  # far enough for those that are cut off somewhere
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


def _norm(module: Any, size: int) -> Norm | None:
    """A root mean square norm, told by what it computes; None where there is none. Raises UnusualBuildError."""
    if module is None:
        return None
    weight: Any = getattr(module, "weight", None)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or weight.shape != (size,):
        raise UnusualBuildError(f"a norm is a {type(module).__name__} of another size")
    probe = torch.linspace(-1, 1, size, **_PLAIN) * torch.tensor([[1.0], [1e-3]], **_PLAIN)
    plain = probe * torch.rsqrt(probe.square().mean(-1, keepdim=True) + float(eps))
    got = _asked(module, probe.to(weight.dtype)).detach().float()
    for factor in (weight.detach().float(), 1 + weight.detach().float()):  # Gemma stores what is added to one
        allowed = 1e-5 if weight.dtype == torch.float32 else 2e-2
        if bool(((got - plain * factor).abs() <= allowed * (plain * factor).abs().max()).all()):
            return Norm(factor.contiguous(), float(eps))
    raise UnusualBuildError(f"a norm ({type(module).__name__}) is not a root mean square")
