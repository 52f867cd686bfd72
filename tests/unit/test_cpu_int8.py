"""Products with weights in 8 bits beside the arithmetic that torchao does with them, for every instruction set here."""

from __future__ import annotations

import pytest
import torch

from hf_paged.errors import InternalError
from hf_paged.kernels.cpu import native
from hf_paged.kernels.cpu.decoder import MAX_DEPTH_OF_BYTES, Norm, Weights, pack, pack_gated
from tests.unit.test_cpu_decoder import ISAS, decoder

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="the CPU kernels are not built")

ROWS = (1, 2, 3, 11, 12, 13, 16, 17, 31, 32, 33, 70)
DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(64, 96), (50, 40), (1, 32), (97, 72), (320, 33), (96, 320)]


def weights(n: int, k: int, dtype: torch.dtype, dynamic: bool) -> Weights:
    numbers = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    return Weights(numbers, dtype, torch.rand(n) * 0.01 + 0.001, dynamic)


def in_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What torchao makes of rows: symmetric, the largest number being 127.5 steps."""
    scale = (x.abs().amax(-1, keepdim=True) / 127.5).clamp_min(torch.finfo(torch.float32).eps)
    return (x * (1 / scale)).round().clamp(-128, 127), scale


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_as_they_are(
    isa: str, dtype: torch.dtype, n: int, k: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    torch.manual_seed(n + k)
    w, b = weights(n, k, dtype, dynamic=False), torch.randn(n) if bias else None
    made, linear, whole = decoder(k, dtype), pack(w, b), torch.randn(70, k)
    assert w.scale is not None
    results = []
    for rows in ROWS:
        x = whole[:rows].contiguous()
        want = (x.to(dtype).double() @ w.numbers.double().T) * w.scale + (0 if b is None else b)
        got = made.project(None, linear, x)
        assert (got - want).abs().max() / want.abs().max() < 2e-6, f"{rows} rows"
        results.append(got)
    for got in results:  # a row gets the same bits in any company
        assert torch.equal(got, results[-1][: len(got)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_in_bytes(
    isa: str, dtype: torch.dtype, n: int, k: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    torch.manual_seed(n + k)
    w, b = weights(n, k, dtype, dynamic=True), torch.randn(n) if bias else None
    made, linear, whole = decoder(k, dtype), pack(w, b), torch.randn(70, k) * torch.rand(70, 1) * 100
    assert w.scale is not None
    results = []
    for rows in ROWS:
        x = whole[:rows].contiguous()
        q, scale = in_bytes(x)
        want = (q.double() @ w.numbers.double().T).float() * scale * w.scale
        want = want if b is None else want + b
        got = made.project(None, linear, x)
        # sums are of whole numbers, so they are exact
        assert (got - want).abs().max() / want.abs().max() < 1e-6, f"{rows} rows"
        results.append(got)
    for got in results:
        assert torch.equal(got, results[-1][: len(got)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits_of_rows_in_bytes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    linear, x = pack(weights(200, 1000, dtype, dynamic=True)), torch.randn(40, 1000)
    results = []
    for isa in native.ISA_LEVELS[: native.library().best_isa + 1]:
        monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
        results.append(decoder(1000, dtype).project(None, linear, x))
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_numbers_do_not_overflow(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    k = MAX_DEPTH_OF_BYTES
    for sign in (1, -1):
        numbers = torch.full((32, k), -128, dtype=torch.int8)
        linear = pack(Weights(numbers, torch.float32, torch.ones(32), dynamic=True))
        got = decoder(k, torch.float32).project(None, linear, torch.full((1, k), 255.0 * sign))
        step = 255 / 127.5
        assert got[0, 0].item() == pytest.approx(-128.0 * k * step * (127 if sign > 0 else -128), rel=1e-6)
    with pytest.raises(InternalError, match="would overflow"):
        pack(Weights(torch.ones(1, k + 1, dtype=torch.int8), torch.float32, torch.ones(1), dynamic=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 99])
def test_what_is_no_number_stays_so_in_its_row_alone(
    isa: str, bad: float, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    made, linear = decoder(100, torch.bfloat16), pack(weights(64, 100, torch.bfloat16, dynamic=True))
    for rows in (3, 40):
        x = torch.randn(rows, 100)
        want = made.project(None, linear, x)
        x[1, at] = bad
        got = made.project(None, linear, x)
        assert got[1].isnan().all()
        keep = [i for i in range(rows) if i != 1]
        assert torch.equal(got[keep], want[keep])


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_zeros_and_normed_rows(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    torch.manual_seed(0)
    made, w = decoder(96, torch.bfloat16), weights(64, 96, torch.bfloat16, dynamic=True)
    linear, norm = pack(w), Norm(torch.rand(96) + 0.5, 1e-5)
    assert not made.project(None, linear, torch.zeros(2, 96)).any()
    x = torch.randn(5, 96)
    q, scale = in_bytes(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight)
    assert w.scale is not None
    want = (q @ w.numbers.float().T) * scale * w.scale
    got = made.project(norm, linear, x)
    # a number between two may fall to the other
    assert (got - want).abs().max() < 2e-2 * want.abs().max()


def test_panels_of_bytes_hold_every_weight_once_and_zeros_elsewhere() -> None:
    w = weights(40, 70, torch.float32, dynamic=True)
    packed = pack(w)
    assert packed.packed.numel() * 4 == 64 * 128 and packed.dtype == torch.float32
    # panel, 64 of the depth, half of the outputs, quad, output
    tiles = packed.packed.view(torch.int8).view(2, 2, 2, 16, 16, 4)
    found = tiles.permute(0, 2, 4, 1, 3, 5).reshape(64, 128)
    assert torch.equal(found[:40, :70], w.numbers)
    assert not found[40:].any() and not found[:, 70:].any()
    assert packed.scale is not None and packed.offsets is not None and w.scale is not None
    assert torch.equal(packed.scale[:40], w.scale) and not packed.scale[40:].any()
    assert torch.equal(packed.offsets[:40], w.numbers.int().sum(1).int() * 128)
    assert packed.nbytes == 64 * 128 + 64 * 4 + 64 * 4


def test_gates_and_what_they_gate_keep_their_scales() -> None:
    gate, up = (weights(20, 64, torch.bfloat16, dynamic=False) for _ in range(2))
    packed = pack_gated(gate, up)
    assert packed.scale is not None and gate.scale is not None and up.scale is not None
    assert torch.equal(packed.scale[:16], gate.scale[:16]) and torch.equal(packed.scale[16:32], up.scale[:16])
    assert torch.equal(packed.scale[32:36], gate.scale[16:]) and not packed.scale[36:48].any()
    with pytest.raises(InternalError, match="different kinds"):
        pack_gated(gate, weights(20, 64, torch.bfloat16, dynamic=True))
    halves = Weights.rows([gate, up]).chunk()
    for half, whole in zip(halves, (gate, up), strict=True):
        assert half.scale is not None and whole.scale is not None
        assert torch.equal(half.numbers, whole.numbers) and torch.equal(half.scale, whole.scale)
