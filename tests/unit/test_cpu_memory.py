"""Pools of the CPU kernels on huge pages, and checksums of memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_paged.attention.metadata import LayerKV, LayerSpec
from hf_paged.kernels import cpu
from hf_paged.kernels.cpu import native
from tests.unit.test_cpu_kernel import BF16, CPU, FP32, needs_library

# ---------------------------------------------------------------------------------------------------- huge pages

#: of a layer of 2 x 64 in float32 with blocks of 16
BLOCK_BYTES, BLOCKS_PER_HUGE_PAGE = 8 << 10, 256


def _large_pool(num_blocks: int = 17 * BLOCKS_PER_HUGE_PAGE) -> LayerKV:
    """By default more than 32 MiB a tensor, which malloc always takes from the system: nothing in it was touched."""
    return CPU.allocate(LayerSpec(2, 64, 64, FP32, torch.device("cpu")), num_blocks, 16)


def _fill(kv: LayerKV, first: int, end: int) -> None:
    slots = torch.arange(first * 16, end * 16)
    CPU.write(kv, *_content(slots), slots)


def _content(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.arange(128.0).view(2, 64)
    return slots[:, None, None] + row, row - slots[:, None, None]


def _assert_intact(kv: LayerKV, end: int) -> None:
    slots = torch.arange(end * 16)
    k, v = CPU.gather(kv, slots)
    want_k, want_v = _content(slots)
    assert torch.equal(k, want_k)
    assert torch.equal(v, want_v)


def _resident_bytes(tensor: torch.Tensor) -> int:
    page = os.sysconf("SC_PAGESIZE")
    first = tensor.data_ptr() // page * page
    pages = -(-(tensor.data_ptr() + tensor.nbytes - first) // page)
    states = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(first, pages * page, states) == 0
    return sum(state & 1 for state in states) * page


def _is_advised(tensor: torch.Tensor, at: int) -> bool:
    """Whether the system was asked for huge pages at this byte of the tensor."""
    address, found = tensor.data_ptr() + at, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("not mapped")


def _has_huge_pages() -> bool:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    return mode.exists() and "[never]" not in mode.read_text() and size.read_text().strip() == str(native.HUGE_PAGE)


needs_huge_pages = pytest.mark.skipif(not _has_huge_pages(), reason="no transparent huge pages of 2 MiB here")


@needs_library
@needs_huge_pages
@pytest.mark.parametrize("check", ["_asks_as_it_fills", "_asks_for_its_own"])
def test_a_pool_asks_for_huge_pages(check: str) -> None:
    """In a process of its own: here a pool may get memory that was in use, and advised, before."""
    program = f"from {__name__} import {check}; {check}()"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _asks_as_it_fills() -> None:
    """Only as it fills."""
    kv = _large_pool()
    assert kv.k.data_ptr() % native.HUGE_PAGE == kv.v.data_ptr() % native.HUGE_PAGE == 0
    _fill(kv, 0, 1)
    for tensor in (kv.k, kv.v):
        assert _resident_bytes(tensor) < 64 << 10
        assert not _is_advised(tensor, 0)
    _fill(kv, 1, BLOCKS_PER_HUGE_PAGE)
    for tensor in (kv.k, kv.v):
        assert _resident_bytes(tensor) == native.HUGE_PAGE
        assert not _is_advised(tensor, 0)
    _fill(kv, BLOCKS_PER_HUGE_PAGE, BLOCKS_PER_HUGE_PAGE + 1)
    for tensor in (kv.k, kv.v):
        assert _resident_bytes(tensor) <= 2 * native.HUGE_PAGE
        assert _is_advised(tensor, 0)
        assert _is_advised(tensor, 2 * native.HUGE_PAGE - 1)
        assert not _is_advised(tensor, 2 * native.HUGE_PAGE)
    _assert_intact(kv, BLOCKS_PER_HUGE_PAGE + 1)
    CPU.copy_blocks([kv], [0], [3 * BLOCKS_PER_HUGE_PAGE])
    for tensor in (kv.k, kv.v):
        assert _is_advised(tensor, 4 * native.HUGE_PAGE - 1)
        assert not _is_advised(tensor, 4 * native.HUGE_PAGE)
        assert torch.equal(tensor[0], tensor[3 * BLOCKS_PER_HUGE_PAGE])


def _asks_for_its_own() -> None:
    """Not for memory beyond it."""
    blocks = 17 * BLOCKS_PER_HUGE_PAGE - 1
    kv = _large_pool(blocks)
    _fill(kv, 0, blocks)
    for tensor in (kv.k, kv.v):
        assert _is_advised(tensor, 16 * native.HUGE_PAGE - 1)
        assert not _is_advised(tensor, 16 * native.HUGE_PAGE)
        assert _resident_bytes(tensor) == blocks * BLOCK_BYTES
    _assert_intact(kv, blocks)


@needs_library
@pytest.mark.parametrize("num_blocks", [100, 2 * BLOCKS_PER_HUGE_PAGE - 1, 3 * BLOCKS_PER_HUGE_PAGE + 7])
def test_a_pool_of_any_size_filled_by_several_threads_keeps_its_contents(num_blocks: int) -> None:
    kv = _large_pool(num_blocks)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda first: _fill(kv, first, min(first + 3, num_blocks)), range(0, num_blocks, 3)))
    _assert_intact(kv, num_blocks)


@needs_library
def test_touched_memory_is_that_of_the_blocks_written_so_far() -> None:
    spec = LayerSpec(2, 64, 64, torch.float32, torch.device("cpu"))
    kv = CPU.allocate(spec, 2000, 16)
    block = 16 * spec.bytes_per_token
    assert CPU.touched_bytes(kv) == 0
    _write_block(kv, 2)
    assert CPU.touched_bytes(kv) == 3 * block
    _write_block(kv, 1)
    assert CPU.touched_bytes(kv) == 3 * block
    _write_block(kv, 700)  # 5.5 MiB each of keys and values
    assert CPU.touched_bytes(kv) == 2 * (6 << 20)


def _write_block(kv: LayerKV, block: int) -> None:
    states = torch.randn(16, kv.spec.num_kv_heads, kv.spec.head_dim)
    CPU.write(kv, states, states, torch.arange(16 * block, 16 * (block + 1)))


# ------------------------------------------------------------------------------------------------------ checksum


def checksum(x: torch.Tensor) -> int:
    found = cpu.checksums([x])
    assert found is not None
    return found[0]


@needs_library
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads_used", [1, 3])
def test_many_checksums_are_those_of_each(threads_used: int) -> None:
    torch.set_num_threads(threads_used)
    sizes = [0, 1, 5, 1 << 16, 0, (1 << 16) + 1, 300_000, 64]  # none, part of a piece, whole pieces, several
    tensors = [torch.randn(n) for n in sizes]
    assert cpu.checksums(tensors) == [checksum(x) for x in tensors]
    assert cpu.checksums([]) == []


@needs_library
def test_checksum_sees_every_element_and_its_place() -> None:
    x = torch.randn(300, 1000)
    want = checksum(x)
    assert checksum(x.clone()) == want
    for at in (0, 63, 64, 299_999, 131_072):
        y = x.clone()
        y.view(-1)[at] = torch.nextafter(y.view(-1)[at], torch.tensor(9e9))
        assert checksum(y) != want
    assert checksum(-x) != want
    assert checksum(x.flip(0)) != want
    swapped = x.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    assert checksum(swapped) != want
    one = torch.randn(64, 64)
    pieces = torch.cat([one.view(-1)] * 64)  # equal pieces: a sum of equal terms must still see one of them change
    other = pieces.clone()
    other[5] += 1
    assert checksum(pieces) != checksum(other)


@needs_library
def test_checksum_of_zeros_depends_on_the_size() -> None:
    assert len({checksum(torch.zeros(n)) for n in range(40)}) == 40


@needs_library
@pytest.mark.usefixtures("threads")
def test_checksum_does_not_depend_on_threads_or_strides() -> None:
    x = torch.randn(1 << 18, 3)
    torch.set_num_threads(1)
    want = checksum(x)
    torch.set_num_threads(4)
    assert checksum(x) == want
    assert checksum(x.t().contiguous().t()) == want


@needs_library
@pytest.mark.parametrize("dtype", [BF16, torch.int8, torch.float64, torch.bool], ids=str)
def test_checksum_takes_any_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(777).mul(10).to(dtype)
    assert checksum(x) == checksum(x.clone())
    assert isinstance(checksum(x), int)
    y = x.clone()
    y[400] = not y[400]
    assert checksum(x) != checksum(y)
