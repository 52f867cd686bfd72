"""Loads the compiled CPU kernels and declares their C ABI to ctypes; the mirror of ``hfp_abi.h``.

It owns the library handle, the structs and the choice of instruction set. It knows no attention metadata and no caches:
``attention/backends/cpu_native.py`` turns those into the structs here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_paged.errors import ConfigError, InternalError
from hf_paged.kernels.cpu.build import LIBRARY_NAME, SOURCE_DIR

ABI_VERSION = 10

#: HF_PAGED_CPU_ISA takes one of these; without it the best the processor runs is used.
ISA_LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: what pool tensors are aligned to, so that their memory can become huge pages (common.cpp) from the start
HUGE_PAGE = 2 << 20

#: tokens whose keys share one register; a block holds a whole number of such groups
GROUP = 16

_STATUS = {
    1: "a block id lies outside the KV pool",
    2: "a block table is shorter than its sequence, or cu_seqlens_q does not rise from 0 to at most the queries",
    3: "out of memory for scratch space",
    4: "a slot lies outside the KV pool",
}

HOW_TO_GET = "install a C++ compiler and run `python -m hf_paged.kernels.cpu.build`"


class LayerStruct(ctypes.Structure):
    """``hfp_layer``"""

    _fields_ = [
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int32),
        ("dk", ctypes.c_int32),
        ("dv", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("used_blocks", ctypes.c_int64),
    ]


class BatchStruct(ctypes.Structure):
    """``hfp_batch``"""

    _fields_ = [
        ("cu_seqlens_q", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("group_members", ctypes.c_void_p),
        ("group_starts", ctypes.c_void_p),
        ("group_blocks", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
    ]


class ParamsStruct(ctypes.Structure):
    """``hfp_params``"""

    _fields_ = [
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
    ]


class Library:
    """The entry points, bound once. Attributes are plain callables so that the hot path is one attribute away."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

        def bind(name: str, result: Any, *arguments: Any) -> Callable[..., int]:
            function = getattr(handle, name)
            function.restype = result
            function.argtypes = arguments
            return function  # type: ignore[no-any-return]

        abi = bind("hfp_abi_version", i32)()
        if abi != ABI_VERSION:
            raise OSError(f"the library has ABI version {abi}, this package needs {ABI_VERSION}: rebuild it")
        self.attend = bind(
            "hfp_attend", i32, pointer, pointer, pointer, pointer, pointer, i64, i64, i64, i32, i32, pointer, pointer
        )
        self.find_groups = bind("hfp_find_groups", i32, pointer, pointer)
        self.decode = bind("hfp_decode", i32, pointer)
        self.project = bind("hfp_project", i32, pointer)
        self.write = bind("hfp_write", i32, pointer, pointer, pointer, pointer, i64, i64, i64, i64, i64, i32)
        self.gather = bind("hfp_gather", i32, pointer, pointer, pointer, pointer, i64, i32)
        self.copy_blocks = bind("hfp_copy_blocks", i32, pointer, i64, pointer, pointer, i64, i32)
        self.checksums = bind("hfp_checksums", i32, pointer, pointer, pointer, i64, i32)
        self.read = bind("hfp_read", ctypes.c_uint64, pointer, i64, i32)
        self.best_isa = bind("hfp_best_isa", i32)()


def _share_openmp() -> None:
    """Make the symbols of the OpenMP runtime torch already uses visible to the library we are about to load.

    Wheels carry it under different names (``libgomp.so.1``, ``libgomp-<hash>.so.1``), so it is looked up among the
    files mapped into this process, torch's own folder first.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    rows = (line.split(None, 5) for line in maps.read_text().splitlines())
    mapped = {fields[5] for fields in rows if len(fields) == 6}
    runtimes = sorted(path for path in mapped if re.search(r"/lib(gomp|iomp5|omp)[-.]", path))
    site = str(Path(torch.__file__).resolve().parent)
    runtimes.sort(key=lambda path: not path.startswith(site))
    ctypes.CDLL(runtimes[0] if runtimes else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _load() -> tuple[Library | None, str | None]:
    path = SOURCE_DIR / LIBRARY_NAME
    if not path.exists():
        return None, f"the CPU kernels were not compiled when hf_paged was installed; {HOW_TO_GET}"
    try:
        _share_openmp()
        return Library(ctypes.CDLL(str(path))), None
    except (OSError, AttributeError) as error:
        return None, f"the compiled CPU kernels do not load here ({error}); {HOW_TO_GET}"


def library() -> Library:
    """The loaded library. Raises InternalError when there is none: ask ``unavailable()`` first."""
    lib, reason = _load()
    if lib is None:
        raise InternalError(reason or "the CPU kernels are not available")
    return lib


def unavailable() -> str | None:
    """None when the kernels can be used in this process, else why not and how to get them."""
    lib, reason = _load()
    if lib is None:
        return reason
    try:
        isa_level()
    except ConfigError as error:
        return str(error)
    return None


def isa_level() -> int:
    """Index into ISA_LEVELS of what new layers will use: HF_PAGED_CPU_ISA, else the best of this processor."""
    best = library().best_isa
    forced = os.environ.get("HF_PAGED_CPU_ISA")
    if not forced:
        return best
    if forced not in ISA_LEVELS:
        raise ConfigError(f"HF_PAGED_CPU_ISA={forced!r} is not one of {', '.join(ISA_LEVELS)}")
    level = ISA_LEVELS.index(forced)
    if level > best:
        raise ConfigError(
            f"HF_PAGED_CPU_ISA={forced} asks for more than this processor runs; the best here is {ISA_LEVELS[best]}"
        )
    return level


def check(status: int) -> None:
    if status:
        raise InternalError(f"CPU kernel: {_STATUS.get(status, f'status {status}')}")


def checksums(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """A 64-bit digest of each tensor's bytes at about memory speed; None without the library or off the CPU.

    It depends on every bit and its position, and not on the number of threads. It guards against accidents (a changed,
    swapped or negated value), not against adversaries.
    """
    lib, _ = _load()
    if lib is None or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    data = [tensor.detach().contiguous() for tensor in tensors]
    n = len(data)
    sums = (ctypes.c_uint64 * n)()
    check(
        lib.checksums(
            (ctypes.c_void_p * n)(*(t.data_ptr() for t in data)),
            (ctypes.c_int64 * n)(*(t.numel() * t.element_size() for t in data)),
            sums,
            n,
            torch.get_num_threads(),
        )
    )
    return list(sums)
