"""Decode steps of sequences that begin with the same blocks: which are read once, and that nobody's bits tell."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hf_paged.attention.backends import cpu_native
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.kernels.cpu import native
from tests.unit.attention_cases import Case, make_case
from tests.unit.test_cpu_kernel import BF16, CPU, FP16, FP32, ISAS, _alone, check, every_feature, needs_library, scaled

pytestmark = needs_library

#: sequences that begin with the blocks of the first of them, and how many of these
Sharing = Sequence[tuple[Sequence[int], int]]


def shared_case(lengths: Sequence[tuple[int, int]], sharing: Sharing, **options: Any) -> Case:
    """``make_case``, in which sequences begin with the blocks, keys and values of another."""
    case = make_case(lengths, **options)
    for members, blocks in sharing:
        leader, tokens = members[0], blocks * case.block_size
        for seq in members[1:]:
            assert tokens <= min(lengths[seq][1], lengths[leader][1])
            case.tables[seq][:blocks] = case.tables[leader][:blocks]
            case.metadata.block_tables[seq, :blocks] = case.metadata.block_tables[leader, :blocks]
            case.keys[seq][:tokens] = case.keys[leader][:tokens]
            case.values[seq][:tokens] = case.values[leader][:tokens]
            positions = torch.arange(lengths[seq][1] - lengths[seq][0], lengths[seq][1])
            rows = slice(*case.metadata.cu_seqlens_q[seq : seq + 2].tolist())
            case.metadata.slot_mapping[rows] = case.slots(seq)[positions]
    return case


def found_groups(metadata: AttentionMetadata) -> list[tuple[list[int], int]]:
    """(members, shared blocks) as the kernel will be told them."""
    struct = native.BatchStruct.from_address(cpu_native.batch_address(metadata))
    pointer = ctypes.POINTER(ctypes.c_int32)
    members, starts, blocks = (
        ctypes.cast(address, pointer) for address in (struct.group_members, struct.group_starts, struct.group_blocks)
    )
    return sorted(
        (sorted(members[i] for i in range(starts[g], starts[g + 1])), blocks[g]) for g in range(struct.num_groups)
    )


def assert_same_bits_as_alone(case: Case, **features: Any) -> None:
    params, kv = scaled(case, **features), case.pool(CPU)
    together = CPU.attend(case.query, kv, case.metadata, params)
    for seq in range(case.metadata.num_seqs):
        metadata, rows = _alone(case, seq)
        assert torch.equal(CPU.attend(case.query[rows], kv, metadata, params), together[rows]), seq


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


#: two groups of different lengths, sequences of their own between them, prefill and padding
MIXED = [(1, 700), (1, 530), (40, 600), (1, 40), (1, 1100), (1, 513), (3, 0), (1, 900), (1, 1030), (1, 577), (90, 90)]
MIXED_SHARING: Sharing = [([0, 1, 5, 9], 32), ([4, 7, 8], 40)]


# ---------------------------------------------------------------------------------------------------- which groups


def groups_of(tables: Sequence[Sequence[int]], lengths: Sequence[int] = (), queries: Sequence[int] = ()) -> Any:
    """``found_groups`` for tables alone; sequences fill their tables and have one query each unless told otherwise."""
    width = max(len(table) for table in tables)
    counts = list(queries or [1] * len(tables))
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return found_groups(
        AttentionMetadata(
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(list(lengths or [16 * len(t) for t in tables]), dtype=torch.int32),
            block_tables=torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32),
            slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
            max_query_len=max(counts),
            max_seq_len=16 * width,
        )
    )


def test_what_begins_alike_is_a_group() -> None:
    assert groups_of([[1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 9], [8, 2, 3], [5, 6, 1]]) == [([0, 2], 3), ([1, 4], 2)]
    assert groups_of([[1, 2], [3, 4], [5, 6]]) == []
    assert groups_of([[1, 2, 3]]) == []
    assert groups_of([[2, 1, 4], [3, 1, 4]]) == []


def test_the_cut_through_nested_prefixes_spares_the_most_blocks() -> None:
    pair, other = [1, 2, 3, 4, 5, 6], [1, 9, 8, 7, 5, 4]
    # One block in common of four, or five each of two.
    assert groups_of([[*pair, 20], [*other, 21], [*pair, 22], [*other, 23]]) == [([0, 2], 6), ([1, 3], 6)]
    # Two blocks in common of five, or three of two of them.
    assert groups_of([[1, 2, n, n + 1, n + 2] for n in (10, 20, 30)] + [[1, 2, 3, 50], [1, 2, 3, 60]]) == [
        ([0, 1, 2, 3, 4], 2)
    ]


def test_a_group_has_one_query_each_and_keys_before_it() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 7]]
    assert groups_of(tables, queries=[1, 2, 1, 0]) == [([0, 2], 3)]
    assert groups_of(tables, lengths=[0, 64, 0, 64]) == [([1, 3], 3)]
    # The same table throughout: the last block is the query's own, and what comes after a sequence is not compared.
    assert groups_of([[1, 2, 3], [1, 2, 3]]) == [([0, 1], 2)]
    assert groups_of([[1, 2, 3, 4], [1, 2, 3, 4]], lengths=[33, 33]) == [([0, 1], 2)]
    assert groups_of([[1, 2, 3, 4], [1, 2, 3, 4]], lengths=[16, 60]) == []


def test_a_thousand_sequences_are_sorted_out() -> None:
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(1000, generator=g).tolist()
    tables = [[n % 100 + 1, *range(5), 2000 + n] for n in order]
    want = sorted((sorted(i for i, n in enumerate(order) if n % 100 == rest), 6) for rest in range(100))
    assert groups_of(tables) == want


def test_switched_off_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_native, "GROUP_SEQUENCES", False)
    assert groups_of([[1, 2, 3, 4], [1, 2, 3, 5]]) == []


# ---------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_groups_are_right_and_have_the_bits_of_each_alone_with_every_feature(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    case = shared_case(MIXED, MIXED_SHARING, heads=(6, 2), dtype=dtype)
    assert found_groups(case.metadata) == [([0, 1, 5, 9], 32), ([4, 7, 8], 40)]
    features = {
        **every_feature(6),
        "window-over-everything": {"sliding_window": 2000, "chunk_size": 4000},
        "window-over-one-group": {"sliding_window": 710},
        "all-without-a-window": {
            "softcap": 5.0,
            "sinks": torch.linspace(-2, 4, 6),
            "alibi_slopes": torch.linspace(0.01, 0.2, 6),
        },
    }
    for extra in features.values():
        check(case, scaled(case, **extra))
        assert_same_bits_as_alone(case, **extra)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("members", [2, 3, 5, 16, 33])
def test_groups_of_any_size(isa: str, members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    lengths = [(1, 520 + 37 * n % 300) for n in range(members)]
    for dtype in (FP32, BF16, FP16):
        case = shared_case(lengths, [(range(members), 32)], heads=(6, 2), dtype=dtype)
        check(case, scaled(case))
        assert_same_bits_as_alone(case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2), (8, 1), (40, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_groups_of_any_shape(isa: str, heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    for dtype in (FP32, BF16, FP16):
        for lengths, blocks in (([(1, 600), (1, 420), (1, 401), (1, 1)], 25), ([(1, 600), (1, 1030), (1, 580)], 36)):
            case = shared_case(lengths, [([0, 1, 2], blocks)], heads=heads, head_dim=head_dim, dtype=dtype)
            check(case, scaled(case))
            assert_same_bits_as_alone(case)


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 7, 8, 9, 31, 32, 33, 36, 40, 63, 64, 65])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_common_parts_that_end_around_block_chunk_and_split_boundaries(blocks: int, dtype: torch.dtype) -> None:
    shared = 16 * blocks
    lengths = [(1, shared + more) for more in (1, 15, 16, 17, 64, 65, 500, 513)]
    case = shared_case(lengths, [(range(8), blocks)], heads=(6, 2), dtype=dtype)
    assert found_groups(case.metadata) == [(list(range(8)), blocks)]
    check(case, scaled(case))
    assert_same_bits_as_alone(case)


@pytest.mark.parametrize("block_size", [32, 48, 256])
def test_groups_with_any_block_size(block_size: int) -> None:
    case = shared_case([(1, 900), (1, 800), (1, 777)], [([0, 1, 2], 768 // block_size)], block_size=block_size)
    check(case, scaled(case))
    assert_same_bits_as_alone(case)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("isa", ISAS)
def test_groups_have_the_same_bits_with_any_number_of_threads(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    for dtype in (FP32, BF16, FP16):
        case = shared_case(MIXED, MIXED_SHARING, heads=(6, 2), dtype=dtype)
        kv = case.pool(CPU)
        results = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(CPU.attend(case.query, kv, case.metadata, scaled(case)))
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [3e-20, 1e-37])
def test_subnormal_numbers_do_not_tell_either(isa: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    for dtype in (FP32, BF16):
        case = shared_case([(1, 1100), (1, 600), (1, 540)], [([0, 1, 2], 33)], heads=(6, 2), dtype=dtype, scale=scale)
        assert_same_bits_as_alone(case)


def test_the_same_table_twice_is_read_no_further_than_the_shorter_sequence() -> None:
    case = shared_case([(1, 200), (1, 200), (1, 129)], [([0, 1, 2], 8)], heads=(4, 2))
    case.metadata.block_tables[1] = case.metadata.block_tables[0]
    case.keys[1], case.values[1], case.tables[1] = case.keys[0], case.values[0], case.tables[0]
    check(case, scaled(case))
    assert_same_bits_as_alone(case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("blocks", [16, 32, 40])
def test_a_wrong_group_shows(isa: str, dtype: torch.dtype, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads a group's first table for all: told of a group that is none, it is wrong, so it does group."""
    monkeypatch.setenv("HF_PAGED_CPU_ISA", isa)
    lengths = [(1, 700), (1, 720), (1, 690)]
    case = make_case(lengths, heads=(6, 2), dtype=dtype)
    kv = case.pool(CPU)
    want = CPU.attend(case.query, kv, case.metadata, scaled(case))
    struct = native.BatchStruct.from_address(cpu_native.batch_address(case.metadata))
    assert struct.num_groups == 0
    members, starts, counts = (torch.tensor(x, dtype=torch.int32) for x in ([1, 2], [0, 2], [blocks]))
    struct.group_members, struct.group_starts, struct.group_blocks = (x.data_ptr() for x in (members, starts, counts))
    struct.num_groups = 1
    got = CPU.attend(case.query, kv, case.metadata, scaled(case))
    assert torch.equal(got[:2], want[:2])
    assert (got[2] - want[2]).abs().max() > 0.01
