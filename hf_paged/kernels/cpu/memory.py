"""Memory of huge pages for what is read or written from end to end in every step.

Packed weights in pages of 4 KiB are read at two thirds of the rate: the processor fetches ahead within a page only, and
looks up tens of thousands of them. It owns mappings and knows not what is put there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.kernels.cpu.native import HUGE_PAGE

#: address space that is mapped at a time; memory is taken as it is written to, a huge page at a time
_CHUNK = 64 << 20
_ALIGNMENT = 64
#: mappings that are kept for the next tensor
_MOST_FREE = 2


class HugePages:
    """Hands out tensors one behind the other. Where the system has no huge pages for us it is memory as any other.

    Memory is given back when the last tensor of a chunk is gone. The first chunk is of ``expected`` bytes, where those
    are known. Not thread-safe.
    """

    def __init__(self, expected: int = 0) -> None:
        self._next = expected or _CHUNK
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of zeros that starts on a cache line. Raises MemoryError."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.zeros(*shape, dtype=dtype, device="cpu")
        if size > len(self._chunk):
            self._chunk, self._next = _mapped(max(size, self._next)), _CHUNK
        taken = -(-size // _ALIGNMENT) * _ALIGNMENT
        found, self._chunk = self._chunk[:size], self._chunk[taken:]
        return found.view(dtype).view(*shape)


class LentPages:
    """Lends the same memory again and again as tensors, each time that nobody has the last one, or a view of it, any
    more: malloc would give it back to the system, or leave gaps, where sizes change from step to step.

    Each tensor takes a mapping of its own, and huge pages as it is written to, so this is for few large ones at a time;
    what takes more than a mapping is memory as any other.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of anything. Raises MemoryError, or RuntimeError as torch does."""
        size = math.prod(shape) * dtype.itemsize
        if not 0 < size <= _CHUNK:
            return torch.empty(*shape, dtype=dtype, device="cpu")
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _mapping(_CHUNK)
        # a tensor keeps the object whose buffer it has, and that is this one
        lent = (ctypes.c_char * size).from_buffer(memory, _skipped(memory))
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return torch.frombuffer(lent, dtype=dtype).view(*shape)

    def _take_back(self, memory: mmap.mmap) -> None:
        if len(self._free) < _MOST_FREE:
            self._free.append(memory)


def return_free_memory() -> None:
    """Give back to the system what malloc keeps for later, where it can be asked to (glibc): hundreds of megabytes
    after many steps in tensors of many sizes."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def _mapped(size: int) -> torch.Tensor:
    """Fresh bytes that start on a huge page, all zero."""
    memory = _mapping(size)
    skipped = _skipped(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)[skipped : skipped + size]


def _mapping(size: int) -> mmap.mmap:
    """Of ``size`` bytes from the first huge page on."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, **private)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _skipped(memory: mmap.mmap) -> int:
    """Bytes of a mapping before its first huge page."""
    return -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
