"""Packed weights and layers for the native decoder; the mirror of ``hfp_decoder.h``.

It owns the packed copies, the structs that point to them and the workspace. It knows no models and no caches: whoever
recognises a model's layers describes them with the dataclasses here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.errors import InternalError
from hf_paged.kernels.cpu import native
from hf_paged.kernels.cpu.memory import HugePages, LentPages

#: outputs whose weights lie side by side; rows and columns of buffers are padded to whole ones
PANEL = 32
#: names of activations as the kernels number them
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")

_pointer, _i32, _i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class NormStruct(ctypes.Structure):
    """``hfp_norm``"""

    _fields_ = [("w", _pointer), ("eps", ctypes.c_float)]


class LinearStruct(ctypes.Structure):
    """``hfp_linear``"""

    _fields_ = [
        *[(name, _pointer) for name in ("w", "bias", "scale", "offsets")],
        *[(name, _i32) for name in ("n", "k", "as_they_are")],
    ]


class DecoderLayerStruct(ctypes.Structure):
    """``hfp_decoder_layer``"""

    _fields_ = [
        *[(name, NormStruct) for name in ("before_attn", "after_attn", "before_mlp", "after_mlp", "q_norm", "k_norm")],
        *[(name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")],
        ("kv", _pointer),
        ("params", _pointer),
        ("sinks", _pointer),
        ("act", _i32),
        ("whole_qk_norm", _i32),
    ]


class DecoderStruct(ctypes.Structure):
    """``hfp_decoder``"""

    _fields_ = [
        ("layers", _pointer),
        *[(n, _i32) for n in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "dtype", "isa", "num_threads")],
    ]


class WorkspaceStruct(ctypes.Structure):
    """``hfp_workspace``"""

    _fields_ = [(name, _pointer) for name in ("a", "h", "q", "k", "v", "o", "y", "q8", "scales")]


class DecodeStruct(ctypes.Structure):
    """``hfp_decode_args``"""

    _fields_ = [
        *[(name, _pointer) for name in ("decoder", "work", "batch", "slots", "x", "cos", "sin")],
        ("tokens", _i64),
        ("first", _i32),
        ("last", _i32),
    ]


class ProjectStruct(ctypes.Structure):
    """``hfp_project_args``"""

    _fields_ = [*[(name, _pointer) for name in ("decoder", "norm", "linear", "work", "x", "out")], ("rows", _i64)]


@dataclass(frozen=True)
class Norm:
    """A root mean square norm: ``weight`` float32 ``[n]``."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Weights:
    """Weights of a product ``y = x W^T``.

    Attributes:
        numbers: ``[n, k]``, float32 or bfloat16, or int8 with a scale.
        dtype: what products with them are given and what they stand for, float32 or bfloat16.
        scale: float32 ``[n]`` of weights in 8 bits, which are ``numbers * scale``; None of others.
        dynamic: rows are brought to 8 bits too before they are multiplied, each with a scale of its own.
    """

    numbers: torch.Tensor
    dtype: torch.dtype
    scale: torch.Tensor | None = None
    dynamic: bool = False

    @classmethod
    def plain(cls, weight: torch.Tensor) -> Weights:
        return cls(weight.detach(), weight.dtype)

    @classmethod
    def rows(cls, parts: Sequence[Weights]) -> Weights:
        """Of several products of the same rows, one behind the other. Raises InternalError unless they are alike."""
        return cls._joined(parts, torch.cat)

    @classmethod
    def gated(cls, gate: Weights, up: Weights) -> Weights:
        """Of two products of the same rows, 16 outputs of the first and the 16 of the second that belong to them."""
        return cls._joined([gate, up], _interleaved)

    @classmethod
    def _joined(cls, parts: Sequence[Weights], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Weights:
        if len({(p.numbers.dtype, p.dtype, p.scale is None, p.dynamic) for p in parts}) > 1:
            raise InternalError("weights that are packed together are of different kinds")
        scales = [p.scale for p in parts if p.scale is not None]
        scale = join(scales) if scales else None
        return cls(join([p.numbers for p in parts]), parts[0].dtype, scale, parts[0].dynamic)

    def chunk(self) -> tuple[Weights, Weights]:
        """The first half of the outputs and the second."""
        scales = (None, None) if self.scale is None else self.scale.chunk(2)
        first, second = (
            Weights(n, self.dtype, s, self.dynamic) for n, s in zip(self.numbers.chunk(2), scales, strict=True)
        )
        return first, second


@dataclass(frozen=True)
class PackedLinear:
    """Weights of a product in panels, or, where ``as_they_are``, somebody's own, which are packed nowhere. ``bias`` is
    float32, padded like the outputs where those are gated; ``scale`` and ``offsets`` (int32, where rows are in 8 bits
    too) are padded to whole panels."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    n: int
    k: int
    dtype: torch.dtype
    scale: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    as_they_are: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of what was made."""
        packed = None if self.as_they_are else self.packed
        return sum(t.nbytes for t in (packed, self.bias, self.scale, self.offsets) if t is not None)

    def address(self) -> int:
        """Of the weights. Raises InternalError if whoever owns them has taken their memory away."""
        end = (self.packed.storage_offset() + self.packed.numel()) * self.packed.itemsize
        if self.as_they_are and self.packed.untyped_storage().nbytes() < end:
            raise InternalError(f"the memory of weights [{self.n}, {self.k}] in use is gone")
        return self.packed.data_ptr()


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; what it has not is None. Without ``gate_up`` and ``down`` it ends after its attention.

    ``kv`` and ``params`` are addresses of structs of ``native``; ``keep`` holds what they point to.
    """

    qkv: PackedLinear
    o: PackedLinear
    kv: int
    params: int
    before_attn: Norm | None = None
    after_attn: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    whole_qk_norm: bool = False
    gate_up: PackedLinear | None = None
    down: PackedLinear | None = None
    act: str = "silu"
    sinks: torch.Tensor | None = None
    keep: Any = None


#: of a product of rows in 8 bits, whose sums are int32: 128 * 255 times this is less than 2^31
MAX_DEPTH_OF_BYTES = 1 << 16


def pack(
    weights: Weights | torch.Tensor, bias: torch.Tensor | None = None, memory: HugePages | None = None
) -> PackedLinear:
    """Pack the weights ``[n, k]`` of ``y = x W^T + b``, in ``memory`` where that is given."""
    if isinstance(weights, torch.Tensor):
        weights = Weights.plain(weights)
    n, k = weights.numbers.shape
    if weights.dynamic and k > MAX_DEPTH_OF_BYTES:
        raise InternalError(f"rows of {k} numbers in 8 bits, of which sums would overflow")
    memory = memory or HugePages()
    padded = -(-n // PANEL) * PANEL
    scale = offsets = None
    if weights.scale is not None:
        scale = memory.zeros((padded,), torch.float32)
        scale[:n] = weights.scale
        if weights.dynamic:
            offsets = memory.zeros((padded,), torch.int32)
            for rows, sums in zip(weights.numbers.split(256), offsets[:n].split(256), strict=True):
                torch.sum(rows, 1, dtype=torch.int32, out=sums)  # by way of a copy in int32
            offsets *= 128
    return PackedLinear(
        _panels(weights.numbers, memory),
        None if bias is None else bias.detach().float().contiguous(),
        n,
        k,
        weights.dtype,
        scale,
        offsets,
    )


def can_stay(weight: torch.Tensor) -> bool:
    """Whether weights ``[n, k]`` can be multiplied as they are: that takes no memory and, by processor and number of
    rows, up to 1.3 times as long."""
    return weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] % 32 == 0


def as_they_are(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """The product ``y = x W^T + b`` with weights ``[n, k]`` that :func:`can_stay`, and whose changes it sees."""
    n, k = weight.shape
    bias = None if bias is None else bias.detach().float().contiguous()
    return PackedLinear(weight.detach(), bias, n, k, weight.dtype, as_they_are=True)


def pack_gated(
    gate: Weights | torch.Tensor, up: Weights | torch.Tensor, gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None, memory: HugePages | None = None,
) -> PackedLinear:  # fmt: skip
    """Pack two products of the same rows, ``[n, k]`` each, so that the two outputs that belong together are summed by
    the same thread: 16 of the first and 16 of the second in a panel."""
    if (gate_bias is None) != (up_bias is None):
        raise InternalError("of a gate and what it gates, one has a bias and one has not")
    first, second = (Weights.plain(w) if isinstance(w, torch.Tensor) else w for w in (gate, up))
    bias = None
    if gate_bias is not None and up_bias is not None:
        bias = _interleaved([gate_bias.detach().float(), up_bias.detach().float()])
    return pack(Weights.gated(first, second), bias, memory)


def _interleaved(pair: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of two tensors ``[n, ...]``, 16 rows of the first and 16 of the second by turns; zeros where ``n`` ends."""
    a, b = pair
    half, (n, *rest) = PANEL // 2, a.shape
    groups = -(-n // half)
    both = a.new_zeros(2, groups * half, *rest)
    both[0, :n], both[1, :n] = a, b
    return both.view(2, groups, half, *rest).transpose(0, 1).reshape(groups * PANEL, *rest)


def _panels(weight: torch.Tensor, memory: HugePages) -> torch.Tensor:
    n, k = weight.shape
    panels = -(-n // PANEL)
    together = 4 // weight.itemsize  # numbers that travel as one
    depth = k if together == 1 else -(-k // (16 * together)) * 16 * together
    if (panels * PANEL, depth) != (n, k):
        weight = torch.nn.functional.pad(weight, (0, depth - k, 0, panels * PANEL - n))
    if together == 1:
        return memory.zeros((panels, depth, PANEL), weight.dtype).copy_(
            weight.view(panels, PANEL, depth).transpose(1, 2)
        )
    weight = weight.contiguous()
    weight = weight.clone() if weight.storage_offset() % together else weight
    tiles = weight.view(torch.int32).view(panels, 2, 16, -1, 16).permute(0, 3, 1, 4, 2)
    return memory.zeros(tiles.shape, torch.int32).copy_(tiles)


class Decoder:
    """Layers that one call runs, and the buffers they work in.

    Args:
        layers: in order.
        hidden, heads, kv_heads, head_dim, rotary_dim: sizes, the same in all layers.
        dtype: float32 or bfloat16, of the weights, the blocks and what products read. The stream is float32.

    Not thread-safe: calls share buffers.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], *, hidden: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._lib = native.library()
        self.layers = list(layers)
        self.hidden, self.dtype = hidden, dtype
        structs = (DecoderLayerStruct * len(layers))(*map(_layer_struct, layers))
        self._layers = structs
        self.struct = DecoderStruct(
            ctypes.addressof(structs), hidden, heads, kv_heads, head_dim, rotary_dim, native.DTYPE_CODES[dtype],
            native.isa_level(), torch.get_num_threads(),
        )  # fmt: skip
        self._widths = {
            "a": -(-hidden // PANEL) * PANEL,
            "h": max((-(-layer.down.k // PANEL) * PANEL for layer in layers if layer.down is not None), default=0),
            "q": heads * head_dim,
            "k": kv_heads * head_dim,
            "v": kv_heads * head_dim,
            "o": heads * head_dim,
            "y": max((heads + 2 * kv_heads) * head_dim, hidden),
        }
        self._dtypes = dict.fromkeys(self._widths, dtype) | {"y": torch.float32}
        #: the most that a product of rows in 8 bits reads, rounded up; 0 where there is none
        self._bytes = 0
        for layer in layers:
            self._will_multiply(layer.qkv, layer.o, layer.gate_up, layer.down)
        self._rows = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._pages = LentPages()
        self._work = WorkspaceStruct()
        self._decode = DecodeStruct(decoder=ctypes.addressof(self.struct), work=ctypes.addressof(self._work))
        self._decode_at = ctypes.addressof(self._decode)
        self._project = ProjectStruct(decoder=ctypes.addressof(self.struct), work=ctypes.addressof(self._work))
        self._project_at = ctypes.addressof(self._project)
        #: what was projected with before, by identity, and kept so that it stays the same
        self._projected: dict[tuple[int, int], tuple[NormStruct, LinearStruct | None, Any]] = {}

    def _will_multiply(self, *linears: PackedLinear | None) -> None:
        """Have room for the rows of these products in 8 bits, those of which are."""
        most = max((-(-p.k // 64) * 64 for p in linears if p is not None and p.offsets is not None), default=0)
        if most > self._bytes:
            self._bytes, self._rows = most, 0
            self._widths |= {"q8": most, "scales": 1}
            self._dtypes |= {"q8": torch.int8, "scales": torch.float32}

    def _reserve(self, rows: int) -> None:
        if rows <= self._rows:
            return
        rows, dtypes = -(-rows // PANEL) * PANEL, self._dtypes
        # rows come in 32, so that each buffer ends with a cache line
        memory = HugePages(sum(rows * width * dtypes[name].itemsize for name, width in self._widths.items()))
        buffers = {name: memory.zeros((rows, width), dtypes[name]) for name, width in self._widths.items()}
        # only now: where memory ended on the way, shorter calls go on with what there was
        self._rows = 0
        for name, buffer in buffers.items():
            setattr(self._work, name, buffer.data_ptr())
        self._buffers, self._rows = buffers, rows

    def decode(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: int, slots: torch.Tensor, first: int,
        last: int,
    ) -> None:  # fmt: skip
        """Run layers ``first`` to ``last - 1`` on ``x`` (float32 ``[tokens, hidden]``), in place.

        ``cos`` and ``sin`` are float32 ``[tokens, rotary_dim]``, ``slots`` int64 ``[tokens]``, all contiguous;
        ``batch`` is the address of an ``hfp_batch``.
        """
        tokens = x.shape[0]
        self._reserve(tokens)
        args = self._decode
        args.batch, args.slots, args.tokens = batch, slots.data_ptr(), tokens
        args.x, args.cos, args.sin = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.first, args.last = first, last
        self.struct.num_threads = torch.get_num_threads()
        status = self._lib.decode(self._decode_at)
        if status:
            native.check(status)

    def project(self, norm: Norm | None, linear: PackedLinear | None, x: torch.Tensor) -> torch.Tensor:
        """``linear`` of the norm of ``x`` (float32 ``[rows, hidden]``): float32 ``[rows, n]``. Without ``linear`` the
        normed rows, in the decoder's dtype."""
        rows = x.shape[0]
        self._will_multiply(linear)
        self._reserve(rows)
        if linear is None:
            out = torch.empty(rows, self.hidden, dtype=self.dtype, device="cpu")
        else:
            out = self._pages.empty((rows, linear.n), torch.float32)
        known = self._projected.get((id(norm), id(linear)))
        if known is None:
            structs = _norm_struct(norm), None if linear is None else _linear_struct(linear)
            known = self._projected[id(norm), id(linear)] = (*structs, (norm, linear))
        if linear is not None and known[1] is not None:
            known[1].w = linear.address()
        args = self._project
        args.norm = ctypes.addressof(known[0])
        args.linear = None if known[1] is None else ctypes.addressof(known[1])
        args.x, args.out, args.rows = x.data_ptr(), out.data_ptr(), rows
        self.struct.num_threads = torch.get_num_threads()
        native.check(self._lib.project(self._project_at))
        return out


def _norm_struct(norm: Norm | None) -> NormStruct:
    return NormStruct() if norm is None else NormStruct(norm.weight.data_ptr(), norm.eps)


def _linear_struct(linear: PackedLinear | None) -> LinearStruct:
    if linear is None:
        return LinearStruct()
    bias, scale, offsets = (None if t is None else t.data_ptr() for t in (linear.bias, linear.scale, linear.offsets))
    return LinearStruct(linear.address(), bias, scale, offsets, linear.n, linear.k, linear.as_they_are)


def _layer_struct(layer: DecoderLayer) -> DecoderLayerStruct:
    norms = ("before_attn", "after_attn", "before_mlp", "after_mlp", "q_norm", "k_norm")
    return DecoderLayerStruct(
        *[_norm_struct(getattr(layer, name)) for name in norms],
        *[_linear_struct(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")],
        layer.kv,
        layer.params,
        None if layer.sinks is None else layer.sinks.data_ptr(),
        ACTIVATIONS.index(layer.act),
        layer.whole_qk_norm,
    )
