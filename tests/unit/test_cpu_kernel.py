"""The native CPU kernels against the torch reference, in every mode, and what they promise beyond being right."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged.attention.backends.cpu_native import CpuNativeBackend
from hf_paged.attention.backends.torch_reference import TorchReferenceBackend
from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerSpec
from hf_paged.errors import InternalError
from hf_paged.kernels import cpu
from hf_paged.kernels.cpu import native
from tests.unit.attention_cases import Case, make_case

CPU, REFERENCE = CpuNativeBackend(), TorchReferenceBackend()

needs_library = pytest.mark.skipif(CPU.unavailable() is not None, reason=str(CPU.unavailable()))

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
#: absolute and relative; half of the 16-bit ones is the rounding of the result itself
TOLERANCE = {FP32: 2e-5, BF16: 1e-2, FP16: 1.5e-3}

ISAS = native.ISA_LEVELS[: native.library().best_isa + 1] if CPU.unavailable() is None else ()

#: prefill, decode, extend, padding and both sides of block, chunk and split boundaries in one batch
MIXED = [(1, 1), (5, 5), (1, 17), (3, 0), (20, 40), (1, 290), (70, 96), (2, 257), (1, 0)]


def expected(case: Case, params: AttentionParams) -> torch.Tensor:
    """The reference on the same values in float32, not rounded at the end."""
    wide = dataclasses.replace(
        case,
        spec=dataclasses.replace(case.spec, dtype=FP32),
        keys=[k.float() for k in case.keys],
        values=[v.float() for v in case.values],
        query=case.query.float(),
    )
    return wide.run(REFERENCE, params)


def check(case: Case, params: AttentionParams, want: torch.Tensor | None = None) -> None:
    got = case.run(CPU, params)
    assert got.dtype == case.spec.dtype
    assert got.is_contiguous()
    tolerance = TOLERANCE[case.spec.dtype]
    want = expected(case, params) if want is None else want
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


def scaled(case: Case, **extra: Any) -> AttentionParams:
    return AttentionParams(scaling=case.spec.head_dim**-0.5, **extra)


def heads_like(n: int, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    return torch.linspace(low, high, n)


def every_feature(num_heads: int) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "window": {"sliding_window": 21},
        "window-inside-a-group": {"sliding_window": 3},
        "window-over-splits": {"sliding_window": 130},
        "softcap": {"softcap": 3.0},
        "chunk": {"chunk_size": 24},
        "sinks": {"sinks": heads_like(num_heads, -2, 4)},
        "alibi": {"alibi_slopes": heads_like(num_heads, 0.01, 0.5)},
        "negative-scaling": {},
        "all": {
            "sliding_window": 50,
            "softcap": 5.0,
            "chunk_size": 64,
            "sinks": heads_like(num_heads),
            "alibi_slopes": heads_like(num_heads, 0.01, 0.2),
        },
    }


FEATURES = every_feature(6)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_every_instruction_set_computes_every_feature(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    case = make_case(MIXED, heads=(6, 2), head_dim=64, dtype=dtype)
    for name, extra in FEATURES.items():
        params = scaled(case, **extra)
        if name == "negative-scaling":
            params = dataclasses.replace(params, scaling=-params.scaling)
        check(case, params, _cached_expectation(dtype, name, case, params))


_EXPECTED: dict[tuple[torch.dtype, str], torch.Tensor] = {}


def _cached_expectation(dtype: torch.dtype, name: str, case: Case, params: AttentionParams) -> torch.Tensor:
    if (dtype, name) not in _EXPECTED:
        _EXPECTED[dtype, name] = expected(case, params)
    return _EXPECTED[dtype, name]


HEAD_SIZES = [(n, n) for n in (8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 256)] + [(192, 128), (64, 24), (32, 264)]


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), HEAD_SIZES)
def test_every_head_size(isa: str, head_dim: int, v_head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    for dtype in (FP32, BF16, FP16):
        case = make_case(
            [(1, 35), (9, 20), (66, 70)], heads=(2, 1), head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype
        )
        check(case, scaled(case))


@needs_library
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (8, 2), (9, 3), (8, 1), (14, 2), (20, 1), (37, 1)], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_every_number_of_query_heads_per_kv_head(heads: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case([(1, 300), (3, 40), (80, 80)], heads=heads, head_dim=32, dtype=dtype)
    check(case, scaled(case))


@needs_library
@pytest.mark.parametrize("block_size", [16, 32, 48, 256])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_every_block_size_that_is_a_multiple_of_16(block_size: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, block_size=block_size, dtype=dtype)
    check(case, scaled(case))


@needs_library
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_lengths_at_and_around_block_chunk_and_split_boundaries(dtype: torch.dtype) -> None:
    edges = [n + d for n in (16, 32, 128, 256, 512) for d in (-1, 0, 1)]
    case = make_case([(1, n) for n in edges], head_dim=32, dtype=dtype)
    check(case, scaled(case))
    case = make_case([(n, n) for n in edges[:-3]], heads=(2, 1), head_dim=32, dtype=dtype)
    check(case, scaled(case))
    case = make_case([(min(n, 70), n) for n in edges], heads=(2, 1), head_dim=32, dtype=dtype)
    check(case, scaled(case))


@needs_library
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 127, 128, 129, 255, 256, 257, 1000])
def test_window_edges_anywhere(window: int) -> None:
    case = make_case([(1, 300), (90, 150), (3, 16), (1, 257)], heads=(2, 1), head_dim=32, dtype=BF16)
    check(case, scaled(case, sliding_window=window))
    check(case, scaled(case, chunk_size=window))


@needs_library
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    case = make_case([(1, 300), (70, 70)], dtype=dtype, scale=12.0)
    got, want = case.run(CPU, scaled(case)).float(), expected(case, scaled(case))
    torch.testing.assert_close(got / 12, want / 12, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@needs_library
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_any_strides_with_a_dense_last_dimension(dtype: torch.dtype) -> None:
    case = make_case([(4, 20), (1, 33)], heads=(4, 2), dtype=dtype)
    want = case.run(CPU, scaled(case))
    kv = CPU.allocate(case.spec, case.num_blocks, case.block_size)
    for i in range(2):
        n = case.keys[i].shape[0]
        # One fused projection, as models slice it; and heads before tokens, as transformers passes them.
        fused = torch.cat([case.keys[i].flatten(1), case.values[i].flatten(1)], dim=1)
        key = fused[:, : 2 * 64].view(n, 2, 64)
        value = case.values[i].transpose(0, 1).contiguous().transpose(0, 1)
        CPU.write(kv, key, value, case.slots(i))
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    assert torch.equal(CPU.attend(query, kv, case.metadata, scaled(case)), want)
    sparse = case.query.repeat_interleave(2, dim=2)[:, :, ::2]
    assert torch.equal(CPU.attend(sparse, kv, case.metadata, scaled(case)), want)


@needs_library
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (40, 24)])
def test_gather_is_bit_exact_and_minus_one_is_nothing(dtype: torch.dtype, head_dim: int, v_head_dim: int) -> None:
    case = make_case([(1, 333)], head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
    kv = case.pool(CPU)
    slots = case.slots(0)
    # A write with -1 leaves everything as it is, also between real slots.
    skipping = torch.tensor([-1, int(slots[7]), -1])
    key = torch.stack([torch.full_like(case.keys[0][0], 9.0), case.keys[0][7], torch.full_like(case.keys[0][0], 9.0)])
    value = torch.stack(
        [torch.full_like(case.values[0][0], 9.0), case.values[0][7], torch.full_like(case.values[0][0], 9.0)]
    )
    before = kv.k.clone(), kv.v.clone()
    CPU.write(kv, key, value, skipping)
    bits = torch.int32 if dtype == FP32 else torch.int16
    assert torch.equal(kv.k.view(bits), before[0].view(bits))
    assert torch.equal(kv.v.view(bits), before[1].view(bits))

    k, v = CPU.gather(kv, torch.cat([torch.tensor([-1]), slots.flip(0), torch.tensor([-1])]))
    assert torch.equal(k[1:-1].flip(0), case.keys[0])
    assert torch.equal(v[1:-1].flip(0), case.values[0])
    assert not k[[0, -1]].any()
    assert not v[[0, -1]].any()


@needs_library
def test_copied_blocks_attend_like_their_originals() -> None:
    case = make_case([(1, 40)], dtype=BF16)
    layers = [case.pool(CPU), case.pool(CPU)]
    want = CPU.attend(case.query, layers[0], case.metadata, scaled(case))
    free = [b for b in range(case.num_blocks) if b not in case.tables[0]]
    CPU.copy_blocks(layers, case.tables[0], free[:3])
    case.metadata.block_tables[0, :3] = torch.tensor(free[:3], dtype=torch.int32)
    for kv in layers:
        assert torch.equal(CPU.attend(case.query, kv, case.metadata, scaled(case)), want)
    # In order: the second pair copies what the first one brought.
    CPU.copy_blocks(layers, [free[0], free[1]], [free[1], free[2]])
    for kv in layers:
        assert torch.equal(kv.k[free[0]].nan_to_num(), kv.k[free[2]].nan_to_num())
    CPU.copy_blocks([], [1], [2])
    CPU.copy_blocks(layers, [], [])


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_memory_nobody_may_see_is_not_read(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unwritten slot holds NaN (see Case.pool); here also the blocks a window has left behind."""
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    for dtype in (FP32, BF16, FP16):
        case = make_case([(2, 290), (70, 200)], dtype=dtype)
        params = scaled(case, sliding_window=37)
        kv = case.pool(CPU)
        want = CPU.attend(case.query, kv, case.metadata, params)
        assert not want.isnan().any()
        for i, (first, seq_len) in enumerate([(290 - 2 - 36, 290), (200 - 70 - 36, 200)]):
            case.metadata.block_tables[i, : first // 16] = 2**31 - 1
            for block in case.tables[i][: first // 16]:
                kv.k[block] = kv.v[block] = float("nan")
            dead = case.slots(i)[first // 16 * 16 : first]
            nan = torch.full((len(dead), 2, 64), float("nan"), dtype=dtype)
            CPU.write(kv, nan, nan, dead)
            assert seq_len > first
        assert torch.equal(CPU.attend(case.query, kv, case.metadata, params), want)


@needs_library
def test_a_nan_that_is_visible_is_not_hidden() -> None:
    for dtype in (FP32, BF16, FP16):
        case = make_case([(1, 100), (1, 100)], dtype=dtype)
        case.keys[1][50] = float("nan")
        out = case.run(CPU, scaled(case))
        assert not out[0].isnan().any()
        assert out[1].isnan().all()


@needs_library
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_one_changed_value_changes_the_result(dtype: torch.dtype) -> None:
    case = make_case([(1, 600), (80, 100)], dtype=dtype)
    want = case.run(CPU, scaled(case))
    for tensors, seq, token, row in (
        (case.keys, 0, 3, slice(0, 1)),
        (case.values, 0, 599, slice(0, 1)),
        (case.keys, 1, 99, slice(80, 81)),
        (case.values, 1, 0, slice(1, 81)),
    ):
        kept = tensors[seq][token, 1, 5].item()
        tensors[seq][token, 1, 5] += 4.0
        got = case.run(CPU, scaled(case))
        tensors[seq][token, 1, 5] = kept
        changed = (got != want).flatten(1).any(1)
        assert changed[row].all()
        assert not torch.cat([changed[: row.start], changed[row.stop :]]).any()


def _alone(case: Case, seq: int) -> tuple[AttentionMetadata, slice]:
    """The metadata of one sequence of the batch, and its query rows."""
    start, end = case.metadata.cu_seqlens_q[seq : seq + 2].tolist()
    rows = slice(start, end)
    return (
        AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=case.metadata.seq_lens[seq : seq + 1].clone(),
            block_tables=case.metadata.block_tables[seq : seq + 1].clone(),
            slot_mapping=case.metadata.slot_mapping[rows].clone(),
            max_query_len=end - start,
            max_seq_len=int(case.metadata.seq_lens[seq]),
        ),
        rows,
    )


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("threads")
def test_bits_depend_neither_on_batch_mates_nor_on_threads(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    lengths = [(1, 1000), (1, 37), (3, 0), (100, 400), (5, 700), (1, 256)]
    for dtype in (FP32, BF16, FP16):
        case = make_case(lengths, heads=(6, 2), dtype=dtype)
        for extra in ({}, {"sliding_window": 300, "softcap": 9.0}):
            params, kv = scaled(case, **extra), case.pool(CPU)
            torch.set_num_threads(2)
            together = CPU.attend(case.query, kv, case.metadata, params)
            for count in (1, 3, 5):
                torch.set_num_threads(count)
                assert torch.equal(CPU.attend(case.query, kv, case.metadata, params), together)
            for i in range(len(lengths)):
                metadata, rows = _alone(case, i)
                assert torch.equal(CPU.attend(case.query[rows], kv, metadata, params), together[rows])


@needs_library
def test_rows_of_padding_and_rows_past_the_last_sequence_are_zero() -> None:
    case = make_case([(2, 0), (1, 20)])
    kv = case.pool(CPU)
    query = torch.cat([case.query, torch.full((3, 4, 64), 7.0)])
    for _ in range(3):
        torch.empty(6, 4, 64).fill_(5.0)  # dirty what the allocator will hand out next
        out = CPU.attend(query, kv, case.metadata, scaled(case))
        assert not out[:2].any()
        assert not out[3:].any()
        assert out[2].any()


@needs_library
def test_other_integer_types_and_wide_tables_are_accepted() -> None:
    case = make_case([(1, 100), (4, 30)])
    want = case.run(CPU, scaled(case))
    m = case.metadata
    wide = torch.cat([m.block_tables, m.block_tables], dim=1)[:, : m.block_tables.shape[1]]
    other = dataclasses.replace(m, cu_seqlens_q=m.cu_seqlens_q.long(), seq_lens=m.seq_lens.long(), block_tables=wide)
    assert torch.equal(CPU.attend(case.query, case.pool(CPU), other, scaled(case)), want)


@needs_library
def test_bad_indices_are_errors_not_crashes() -> None:
    case = make_case([(1, 40)])
    kv = case.pool(CPU)
    key = torch.zeros(1, 2, 64)
    with pytest.raises(InternalError, match="slot"):
        CPU.write(kv, key, key, torch.tensor([case.num_blocks * 16]))
    with pytest.raises(InternalError, match="slot"):
        CPU.gather(kv, torch.tensor([case.num_blocks * 16]))
    with pytest.raises(InternalError, match="block id"):
        CPU.copy_blocks([kv], [0], [case.num_blocks])
    with pytest.raises(InternalError, match="slots for"):
        CPU.write(kv, key, key, torch.tensor([1, 2]))
    for bad_key, bad_value in [
        ((1, 1, 64), (1, 2, 64)),
        ((1, 2, 64), (1, 2, 48)),
        ((1, 2, 32), (1, 2, 64)),
        ((2, 64),) * 2,
    ]:
        with pytest.raises(InternalError, match="do not fit"):
            CPU.write(kv, torch.zeros(bad_key), torch.zeros(bad_value), torch.tensor([1]))
    with pytest.raises(InternalError, match="do not fit"):
        CPU.attend(torch.zeros(1, 3, 64), kv, case.metadata, scaled(case))
    with pytest.raises(InternalError, match="cu_seqlens_q"):
        CPU.attend(torch.zeros(0, 4, 64), kv, case.metadata, scaled(case))
    for starts in ([1, 1], [-1, 1], [0, -1]):
        crooked = dataclasses.replace(case.metadata, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32))
        with pytest.raises(InternalError, match="cu_seqlens_q"):
            CPU.attend(case.query, kv, crooked, scaled(case))
    short = dataclasses.replace(case.metadata, block_tables=case.metadata.block_tables[:, :2])
    with pytest.raises(InternalError, match="block table"):
        CPU.attend(case.query, kv, short, scaled(case))
    case.metadata.block_tables[0, 1] = case.num_blocks
    with pytest.raises(InternalError, match="block id"):
        CPU.attend(case.query, kv, case.metadata, scaled(case))


@needs_library
def test_nothing_builds_an_autograd_graph() -> None:
    case = make_case([(2, 20)])
    kv = case.pool(CPU)
    key = torch.randn(2, 2, 64, requires_grad=True)
    CPU.write(kv, key * 2, key * 3, torch.tensor([0, 1]))
    out = CPU.attend((case.query * 1).requires_grad_(), kv, case.metadata, scaled(case))
    assert not kv.k.requires_grad
    assert not out.requires_grad
    with torch.inference_mode():
        CPU.write(kv, case.keys[0], case.values[0], case.slots(0))
        CPU.attend(case.query, kv, case.metadata, scaled(case))
    CPU.write(kv, case.keys[0], case.values[0], case.slots(0))


def test_what_is_not_supported_is_said_in_a_sentence() -> None:
    spec = LayerSpec(2, 64, 64, FP32, torch.device("cpu"))
    assert CPU.unsupported(spec, 16) is None
    assert "multiple of 16" in str(CPU.unsupported(spec, 8))
    assert "multiples of 8" in str(CPU.unsupported(dataclasses.replace(spec, head_dim=20), 16))
    assert "float64" in str(CPU.unsupported(dataclasses.replace(spec, dtype=torch.float64), 16))
    assert "meta" in str(CPU.unsupported(dataclasses.replace(spec, device=torch.device("meta")), 16))


def test_a_missing_library_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "SOURCE_DIR", tmp_path)
    native._load.cache_clear()
    try:
        assert "hf_paged.kernels.cpu.build" in str(CPU.unavailable())
        assert cpu.checksums([torch.ones(3)]) is None
        (tmp_path / native.LIBRARY_NAME).write_bytes(b"not a library")
        native._load.cache_clear()
        assert "do not load" in str(CPU.unavailable())
        with pytest.raises(InternalError, match="do not load"):
            native.library()
    finally:
        native._load.cache_clear()


@needs_library
def test_a_forced_instruction_set_that_cannot_be_had_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", "sse9")
    assert "sse9" in str(CPU.unavailable())
    monkeypatch.setenv("HF_PAGED_CPU_ISA", "amx")
    monkeypatch.setattr(native.library(), "best_isa", 1)
    assert "avx2" in str(CPU.unavailable())


@needs_library
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the process's mappings on Linux")
def test_the_process_has_one_openmp_runtime() -> None:
    script = (
        "import torch; from tests.unit.attention_cases import make_case;"
        "from hf_paged.attention.backends.cpu_native import CpuNativeBackend;"
        "from hf_paged.attention.metadata import AttentionParams;"
        "make_case([(80, 80)]).run(CpuNativeBackend(), AttentionParams(scaling=1.0));"
        "torch.ones(2000, 2000).sum();"
        "print(open('/proc/self/maps').read())"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    runtimes = set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[-.]\S*", done.stdout))
    assert len(runtimes) == 1
    assert native.LIBRARY_NAME in done.stdout


@needs_library
def test_structs_are_as_large_as_in_the_header() -> None:
    assert [ctypes.sizeof(s) for s in (native.LayerStruct, native.BatchStruct, native.ParamsStruct)] == [56, 72, 16]
