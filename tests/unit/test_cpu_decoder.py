"""The native decoder's products and norms beside torch's, for every instruction set that runs here."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from hf_paged.errors import InternalError
from hf_paged.kernels.cpu import native
from hf_paged.kernels.cpu.decoder import PANEL, Decoder, Norm, as_they_are, can_stay, pack, pack_gated
from hf_paged.kernels.cpu.memory import HugePages, LentPages

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="the CPU kernels are not built")

ISAS = [
    pytest.param(
        isa,
        marks=pytest.mark.skipif(
            native.unavailable() is not None or native.ISA_LEVELS.index(isa) > native.library().best_isa,
            reason="this processor has it not",
        ),
    )
    for isa in native.ISA_LEVELS
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def decoder(hidden: int, dtype: torch.dtype) -> Decoder:
    return Decoder([], hidden=hidden, heads=1, kv_heads=1, head_dim=8, rotary_dim=8, dtype=dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 96), (50, 40), (1, 32), (97, 72), (320, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_packed_weights(
    isa: str, dtype: torch.dtype, n: int, k: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    torch.manual_seed(n)
    weight, b = torch.randn(n, k).to(dtype), torch.randn(n) if bias else None
    made, linear = decoder(k, dtype), pack(weight, b)
    norm = Norm(torch.rand(k) + 0.5, 1e-5)
    whole = torch.randn(70, k)
    results = []
    for rows in (*range(1, 34), 47, 48, 49, 70):
        x = whole[:rows]
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight).to(dtype)
        want = normed.double() @ weight.double().T + (0 if b is None else b.double())
        got = made.project(norm, linear, x.contiguous())
        assert got.shape == (rows, n) and got.dtype == torch.float32
        error = (got - want).abs().max() / want.abs().max()
        # in bfloat16 a norm that falls between two numbers may be rounded to the other one
        assert error < TOLERANCE[dtype], f"{rows} rows"
        results.append(got)
    for got in results:  # a row gets the same bits in any company
        assert torch.equal(got, results[-1][: len(got)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_threads_and_what_is_read_beyond_the_rows_change_nothing(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    torch.manual_seed(1)
    made, linear, x = decoder(96, dtype), pack(torch.randn(1600, 96).to(dtype)), torch.randn(130, 96)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7, 200):
            torch.set_num_threads(threads)
            results.append(made.project(None, linear, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)
    made._buffers["a"].fill_(float("nan"))  # left there by longer calls
    made._buffers["a"][:, :96] = float("nan")
    for rows in (5, 40):  # fewer than what is tiled, and more
        assert torch.equal(made.project(None, linear, x[:rows].contiguous()), results[0][:rows])


def test_memory_that_ends_while_buffers_grow_leaves_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made, linear, x = decoder(96, torch.float32), pack(torch.randn(64, 96)), torch.randn(300, 96)
    want = made.project(None, linear, x[:30].contiguous())
    zeros, left = HugePages.zeros, [3]

    def until_full(memory: HugePages, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory")
        return zeros(memory, shape, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(HugePages, "zeros", until_full)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no memory"):
                made.project(None, linear, x)
    assert torch.equal(made.project(None, linear, x[:30].contiguous()), want)
    assert torch.equal(made.project(None, linear, x)[:30], want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("n", "k"), [(64, 96), (50, 32), (1, 64), (97, 160), (1600, 32)])
def test_weights_as_they_are_are_multiplied_as_packed_ones_are(
    isa: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    torch.manual_seed(n)
    # in the middle of others', and not on a cache line
    around = torch.full((n + 2, k), float("nan"), dtype=torch.bfloat16).view(-1)
    weight, b = around[k + 1 : k + 1 + n * k].view(n, k).copy_(torch.randn(n, k)), torch.randn(n)
    made, packed, stays = decoder(k, torch.bfloat16), pack(weight, b), as_they_are(weight, b)
    assert can_stay(weight) and stays.packed.data_ptr() == weight.data_ptr() and stays.nbytes == b.nbytes
    x = torch.randn(100, k)
    want, everything = made.project(None, packed, x), made.project(None, stays, x)
    assert torch.allclose(everything, want, rtol=0, atol=2e-6 * float(want.abs().max()))
    assert isa != "amx" or torch.equal(everything, want)
    for rows in (1, 2, 3, 5, 12, 17, 31, 33, 64):  # a row gets the same bits in any company
        assert torch.equal(made.project(None, stays, x[:rows].contiguous()), everything[:rows])
        assert torch.equal(made.project(None, stays, x[-rows:].contiguous()), everything[-rows:])
    weight[n - 1] += 1
    changed = made.project(None, stays, x)
    assert torch.equal(changed[:, :-1], everything[:, :-1])
    want = made.project(None, pack(weight, b), x)
    assert torch.allclose(changed, want, rtol=0, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_read_beyond_weights_as_they_are(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: whoever reads there dies."""
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    program = f"from {__name__} import _multiply_before_a_forbidden_page; _multiply_before_a_forbidden_page()"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def _multiply_before_a_forbidden_page() -> None:
    page = mmap.PAGESIZE
    for n, k in ((32, 32), (1, 64), (15, 64), (17, 96), (50, 160), (95, 32)):
        size = -(-n * k * 2 // page) * page
        memory = mmap.mmap(-1, size + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
        weight = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2)[-n * k :].view(n, k)
        assert weight.copy_(torch.randn(n, k)).data_ptr() + n * k * 2 == start + size
        for rows in (1, 3, 16, 40):
            decoder(k, torch.bfloat16).project(None, as_they_are(weight), torch.randn(rows, k))
    print("done")


def test_weights_that_cannot_stay_or_that_go() -> None:
    weight = torch.randn(40, 96).bfloat16()
    assert not can_stay(weight.T) and not can_stay(weight[:, :64]) and not can_stay(weight[:, :48].contiguous())
    assert not can_stay(weight.float()) and not can_stay(weight.half())
    made, stays, x = decoder(96, torch.bfloat16), as_they_are(weight), torch.randn(3, 96)
    want = made.project(None, stays, x)
    weight.data = torch.zeros(1)  # somebody else's tensor: the memory stays with whoever reads it
    assert torch.equal(made.project(None, stays, x), want)
    stays.packed.untyped_storage().resize_(0)
    with pytest.raises(InternalError, match=r"memory of weights \[40, 96\] in use is gone"):
        made.project(None, stays, x)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_normed_rows_for_an_mlp_of_the_models_own(dtype: torch.dtype) -> None:
    made, norm, x = decoder(40, dtype), Norm(torch.rand(40), 1e-6), torch.randn(9, 40)
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
    got = made.project(norm, None, x)
    assert got.dtype == dtype and got.shape == x.shape
    assert torch.allclose(got.float(), want.to(dtype).float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_panels_hold_every_weight_once_and_zeros_elsewhere() -> None:
    weight = torch.arange(1, 1 + 50 * 6, dtype=torch.float32).view(50, 6)
    packed = pack(weight)
    assert packed.packed.shape == (2, 6, PANEL) and (packed.n, packed.k) == (50, 6)
    assert torch.equal(packed.packed.transpose(1, 2).reshape(64, 6)[:50], weight)
    assert packed.packed.count_nonzero() == 50 * 6
    bf16 = torch.randn(40, 34, dtype=torch.bfloat16)
    pairs = pack(bf16)
    assert pairs.packed.numel() * 2 == 64 * 64 and pairs.nbytes == 64 * 64 * 2
    # panel, 32 of the depth, half of the outputs, pair, output
    tiles = pairs.packed.view(torch.bfloat16).view(2, 2, 2, 16, 16, 2)
    assert torch.equal(tiles.permute(0, 2, 4, 1, 3, 5).reshape(64, 64)[:40, :34], bf16)
    gated = pack_gated(torch.ones(20, 4), 2 * torch.ones(20, 4), torch.ones(20), 3 * torch.ones(20))
    panel = gated.packed[0, 0]
    assert panel.tolist() == [1.0] * 16 + [2.0] * 16
    assert gated.n == 64 and gated.bias is not None and gated.bias[16:32].tolist() == [3.0] * 16


def test_memory_of_huge_pages_is_zero_and_goes_with_its_tensors() -> None:
    memory = HugePages()
    small, large = memory.zeros((3, 5), torch.bfloat16), memory.zeros((40 << 20,), torch.uint8)
    more = [memory.zeros((40 << 20,), torch.uint8) for _ in range(2)]  # of a chunk each
    for tensor in (small, large, *more):
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 and not tensor.any()
        tensor.fill_(1)
    assert all(bool((tensor == 1).all()) for tensor in (small, large, *more))
    assert memory.zeros((0, 4), torch.float32).shape == (0, 4)
    before = psutil.Process().memory_info().rss
    del memory, small, large, more, tensor
    gc.collect()
    assert before - psutil.Process().memory_info().rss > 100 << 20


def test_lent_memory_is_not_lent_twice_and_comes_back() -> None:
    pages = LentPages()
    first, second = pages.empty((4, 5), torch.float32), pages.empty((3,), torch.float32)
    first.fill_(1)
    second.fill_(2)
    view, where = first[1:3], first.data_ptr()
    del first
    third = pages.empty((100,), torch.float32).fill_(3)  # not where the view is
    assert view.tolist() == [[1.0] * 5] * 2 and second.tolist() == [2.0] * 3 and third.data_ptr() != where
    del view
    assert pages.empty((7, 7), torch.float32).data_ptr() == where
    large = pages.empty((65 << 20,), torch.uint8)  # more than a mapping
    assert large.shape == (65 << 20,) and pages.empty((0, 3), torch.float32).shape == (0, 3)


def test_memory_that_threads_borrow_and_return_is_nobody_elses() -> None:
    pages = LentPages()

    def use(i: int) -> bool:
        lent = pages.empty((20_000,), torch.float32).fill_(i)
        return bool((lent == i).all()) and bool((lent * 1 == i).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(2000)))
    assert 1 <= len(pages._free) <= 2


def test_logits_outlive_the_next_call() -> None:
    made, linear = decoder(96, torch.float32), pack(torch.randn(64, 96))
    x = torch.randn(2, 3, 96)
    kept, other = made.project(None, linear, x[0]), made.project(None, linear, x[1])
    assert torch.equal(kept, made.project(None, linear, x[0])) and not torch.equal(kept, other)
