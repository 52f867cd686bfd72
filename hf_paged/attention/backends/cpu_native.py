"""The native CPU backend: hands pointers and strides to the kernels in ``hf_paged.kernels.cpu``.

It owns the interleaved layout described in ``hfp_abi.h`` and the argument structs; it knows nothing of threads beyond
their number and nothing of instruction sets beyond asking for one. Called for every layer of every step, so the path
through ``write`` and ``attend`` stays within a few microseconds: pointers that do not change are taken once, per layer
in ``LayerKV.aux`` and per forward on the metadata object.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from hf_paged.attention.backends.base import AttentionBackend
from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerKV, LayerSpec
from hf_paged.errors import InternalError
from hf_paged.kernels.cpu import native

_AUX = "cpu_native"
_BATCH = "_cpu_native_batch"

#: whether the blocks with which several sequences of a decode step begin are read once for all of them; the results are
#: the same bits either way
GROUP_SEQUENCES = True


class _Layer:
    """What a call needs to know about a LayerKV, in the form the kernels take."""

    __slots__ = ("address", "attend", "dtype", "head_dim", "num_kv_heads", "params", "struct", "v_head_dim", "write")

    def __init__(self, kv: LayerKV) -> None:
        spec, lib = kv.spec, native.library()
        self.struct = native.LayerStruct(
            k=kv.k.data_ptr(),
            v=kv.v.data_ptr(),
            num_blocks=kv.num_blocks,
            num_kv_heads=spec.num_kv_heads,
            dk=spec.head_dim,
            dv=spec.v_head_dim,
            block_size=kv.block_size,
            dtype=native.DTYPE_CODES[spec.dtype],
            isa=native.isa_level(),
        )
        self.address = ctypes.addressof(self.struct)
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.v_head_dim = spec.v_head_dim
        self.dtype = spec.dtype
        self.attend = lib.attend
        self.write = lib.write
        #: (scaling, window, softcap, chunk) -> struct; a layer sees one or two in its life
        self.params: dict[tuple[float, int | None, float | None, int | None], _Params] = {}

    def params_for(self, params: AttentionParams) -> _Params:
        key = (params.scaling, params.sliding_window, params.softcap, params.chunk_size)
        known = self.params.get(key)
        if known is None:
            known = self.params[key] = _Params(params)
        return known


class _Params:
    __slots__ = ("address", "struct")

    def __init__(self, params: AttentionParams) -> None:
        self.struct = native.ParamsStruct(
            scaling=params.scaling,
            softcap=params.softcap or 0.0,
            window=params.sliding_window or 0,
            chunk=params.chunk_size or 0,
        )
        self.address = ctypes.addressof(self.struct)


class _Batch:
    """Pointers into an AttentionMetadata, whose tensors live at least as long because it hangs on the same object."""

    __slots__ = ("address", "keep", "struct")

    def __init__(self, metadata: AttentionMetadata) -> None:
        starts = metadata.cu_seqlens_q.to(torch.int32).contiguous()
        lens = metadata.seq_lens.to(torch.int32).contiguous()
        tables = metadata.block_tables.to(torch.int32)
        if tables.stride(1) != 1:
            tables = tables.contiguous()
        if starts.shape[0] != lens.shape[0] + 1 or tables.shape[0] != lens.shape[0]:
            raise InternalError("cu_seqlens_q, seq_lens and block_tables disagree about the number of sequences")
        self.struct = native.BatchStruct(
            cu_seqlens_q=starts.data_ptr(),
            seq_lens=lens.data_ptr(),
            block_tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            num_seqs=lens.shape[0],
            table_width=tables.shape[1],
        )
        self.address = ctypes.addressof(self.struct)
        groups = torch.empty(2 * lens.shape[0] + 1, dtype=torch.int32, device="cpu")
        #: where there are converted copies, those, and the groups
        self.keep = (starts, lens, tables, groups)
        if GROUP_SEQUENCES and lens.shape[0] > 1:
            native.check(native.library().find_groups(self.address, groups.data_ptr()))


def _layer(kv: LayerKV) -> _Layer:
    layer = kv.aux.get(_AUX)
    if not isinstance(layer, _Layer):
        layer = kv.aux[_AUX] = _Layer(kv)
    return layer


def addresses(kv: LayerKV, params: AttentionParams) -> tuple[int, int]:
    """``hfp_layer`` and ``hfp_params`` for calls of a layer; both live as long as ``kv``."""
    layer = _layer(kv)
    return layer.address, layer.params_for(params).address


def batch_address(metadata: AttentionMetadata) -> int:
    """``hfp_batch`` of a forward; it lives as long as ``metadata``."""
    batch = metadata.__dict__.get(_BATCH)
    if batch is None:
        # The metadata is frozen for its users; this is our note in the margin, and dies with it.
        batch = metadata.__dict__[_BATCH] = _Batch(metadata)
    address: int = batch.address
    return address


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """``torch.empty`` that starts on a huge page where it is large enough to be made of some."""
    elements = math.prod(shape)
    if elements * dtype.itemsize < 2 * native.HUGE_PAGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.empty(elements + native.HUGE_PAGE // dtype.itemsize, dtype=dtype, device="cpu")
    skipped = -flat.data_ptr() % native.HUGE_PAGE // dtype.itemsize
    return flat[skipped : skipped + elements].view(shape)


class CpuNativeBackend(AttentionBackend):
    """Vectorised paged attention for x86-64 and, without hand-tuned instructions, any other CPU."""

    name: ClassVar[str] = "cpu"
    priority: ClassVar[int] = 10

    def unavailable(self) -> str | None:
        return native.unavailable()

    def unsupported(self, spec: LayerSpec, block_size: int) -> str | None:
        if spec.device.type != "cpu":
            return f"the native CPU kernels cannot reach tensors on {spec.device.type}"
        if spec.dtype not in native.DTYPE_CODES:
            return f"{spec.dtype} is not one of float32, bfloat16, float16"
        if block_size % native.GROUP:
            return f"block_size {block_size} is not a multiple of {native.GROUP}"
        if spec.head_dim % 8 or spec.v_head_dim % 8:
            return f"head sizes {spec.head_dim} and {spec.v_head_dim} are not both multiples of 8"
        return None

    def allocate(self, spec: LayerSpec, num_blocks: int, block_size: int) -> LayerKV:
        groups = (num_blocks, spec.num_kv_heads, block_size // native.GROUP)
        v_width = -(-spec.v_head_dim // native.GROUP) * native.GROUP
        k = _reserve((*groups, native.GROUP * spec.head_dim), spec.dtype)
        v = _reserve((*groups, native.GROUP * v_width), spec.dtype)
        kv = LayerKV(spec=spec, num_blocks=num_blocks, block_size=block_size, k=k, v=v, backend=self.name)
        _layer(kv)
        return kv

    def write(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        layer = kv.aux.get(_AUX) or _layer(kv)
        assert isinstance(layer, _Layer)
        num_tokens, heads = slot_mapping.shape[0], layer.num_kv_heads
        if key.shape != (num_tokens, heads, layer.head_dim) or value.shape != (num_tokens, heads, layer.v_head_dim):
            raise InternalError(
                f"{num_tokens} slots for keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit {kv.spec}"
            )
        if key.dtype is not layer.dtype or value.dtype is not layer.dtype:
            key, value = key.to(layer.dtype), value.to(layer.dtype)
        k_token, k_head, k_dim = key.stride()
        v_token, v_head, v_dim = value.stride()
        if k_dim != 1 or v_dim != 1:
            key, value = key.contiguous(), value.contiguous()
            k_token, k_head, _ = key.stride()
            v_token, v_head, _ = value.stride()
        if slot_mapping.dtype is not torch.int64 or not slot_mapping.is_contiguous():
            slot_mapping = slot_mapping.to(torch.int64).contiguous()
        status = layer.write(
            layer.address,
            key.data_ptr(),
            value.data_ptr(),
            slot_mapping.data_ptr(),
            num_tokens,
            k_token,
            k_head,
            v_token,
            v_head,
            torch.get_num_threads(),
        )
        if status:
            native.check(status)

    def gather(self, kv: LayerKV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots.to(torch.int64).contiguous()
        k = torch.empty((slots.shape[0], kv.spec.num_kv_heads, kv.spec.head_dim), dtype=kv.spec.dtype, device="cpu")
        v = torch.empty((slots.shape[0], kv.spec.num_kv_heads, kv.spec.v_head_dim), dtype=kv.spec.dtype, device="cpu")
        native.check(
            native.library().gather(
                _layer(kv).address,
                k.data_ptr(),
                v.data_ptr(),
                slots.data_ptr(),
                slots.shape[0],
                torch.get_num_threads(),
            )
        )
        return k, v

    def copy_blocks(self, layers: Sequence[LayerKV], src: Sequence[int], dst: Sequence[int]) -> None:
        if len(src) != len(dst):
            raise InternalError(f"{len(src)} source blocks for {len(dst)} destinations")
        if not layers or not src:
            return
        pairs = ctypes.c_int64 * len(src)
        native.check(
            native.library().copy_blocks(
                (ctypes.c_void_p * len(layers))(*(_layer(kv).address for kv in layers)),
                len(layers),
                pairs(*src),
                pairs(*dst),
                len(src),
                torch.get_num_threads(),
            )
        )

    def touched_bytes(self, kv: LayerKV) -> int:
        """Up to the highest block that was ever written; whole huge pages, once the first one is full."""
        parts = [t.nbytes * _layer(kv).struct.used_blocks // kv.num_blocks for t in (kv.k, kv.v)]
        page = native.HUGE_PAGE
        return sum(-(-part // page) * page if part > page else part for part in parts)

    def attend(
        self, query: torch.Tensor, kv: LayerKV, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        layer = kv.aux.get(_AUX) or _layer(kv)
        assert isinstance(layer, _Layer)
        batch = batch_address(metadata)
        known = layer.params_for(params)
        if query.dtype is not layer.dtype:
            return self.attend(query.to(layer.dtype), kv, metadata, params).to(query.dtype)
        token_stride, head_stride, dim_stride = query.stride()
        if dim_stride != 1:
            query = query.contiguous()
            token_stride, head_stride, _ = query.stride()
        num_tokens, num_heads, head_dim = query.shape
        if num_heads % layer.num_kv_heads or head_dim != layer.head_dim:
            raise InternalError(f"query heads {num_heads} x {head_dim} do not fit the layer {kv.spec}")
        sinks = alibi = None
        if params.sinks is not None:
            sinks = params.sinks.detach().to("cpu", torch.float32).contiguous()
        if params.alibi_slopes is not None:
            alibi = params.alibi_slopes.detach().to("cpu", torch.float32).contiguous()
        if layer.v_head_dim == head_dim:  # half the time of the general case
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        else:
            out = query.new_empty((num_tokens, num_heads, layer.v_head_dim))
        status = layer.attend(
            layer.address,
            batch,
            known.address,
            out.data_ptr(),
            query.data_ptr(),
            num_tokens,
            token_stride,
            head_stride,
            num_heads,
            torch.get_num_threads(),
            None if sinks is None else sinks.data_ptr(),
            None if alibi is None else alibi.data_ptr(),
        )
        if status:
            native.check(status)
        return out
