"""The reference backend against attention written out, one query and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch

from hf_paged.attention.backends import torch_reference
from hf_paged.attention.backends.torch_reference import TorchReferenceBackend
from hf_paged.attention.metadata import AttentionParams
from tests.unit.attention_cases import Case, make_case

BACKEND = TorchReferenceBackend()


def by_the_book(case: Case, params: AttentionParams) -> torch.Tensor:
    """Scalar loops straight from the docstrings of AttentionParams and AttentionMetadata."""
    heads = case.query.shape[1]
    group = heads // case.spec.num_kv_heads
    out = torch.zeros(case.query.shape[0], heads, case.spec.v_head_dim, dtype=torch.float64)
    starts = case.metadata.cu_seqlens_q.tolist()
    for i, seq_len in enumerate(case.metadata.seq_lens.tolist()):
        q_len = starts[i + 1] - starts[i]
        for j in range(q_len if seq_len else 0):
            p = seq_len - q_len + j
            for h in range(heads):
                q = case.query[starts[i] + j, h].double()
                logits, values = [], []
                for k in range(p + 1):
                    if params.sliding_window is not None and k <= p - params.sliding_window:
                        continue
                    if params.chunk_size is not None and k // params.chunk_size != p // params.chunk_size:
                        continue
                    score = params.scaling * float(q @ case.keys[i][k, h // group].double())
                    if params.softcap is not None:
                        score = params.softcap * math.tanh(score / params.softcap)
                    if params.alibi_slopes is not None:
                        score += float(params.alibi_slopes[h]) * (k - p)
                    logits.append(score)
                    values.append(case.values[i][k, h // group].double())
                if params.sinks is not None:
                    logits.append(float(params.sinks[h]))
                    values.append(torch.zeros(case.spec.v_head_dim, dtype=torch.float64))
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                out[starts[i] + j, h] = weights @ torch.stack(values)
    return out


PARAMS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window-of-one": {"sliding_window": 1},
    "softcap": {"softcap": 2.0},
    "chunk": {"chunk_size": 6},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "all": {
        "sliding_window": 7,
        "softcap": 3.0,
        "chunk_size": 10,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    },
}

LENGTHS = [(1, 1), (6, 6), (2, 0), (1, 16), (4, 19), (1, 9)]


@pytest.mark.parametrize("extra", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_it_does_what_the_metadata_says(extra: dict[str, object], block_size: int) -> None:
    case = make_case(LENGTHS, heads=(4, 2), head_dim=12, v_head_dim=7, block_size=block_size)
    params = AttentionParams(scaling=0.3, **extra)  # type: ignore[arg-type]
    torch.testing.assert_close(case.run(BACKEND, params).double(), by_the_book(case, params), atol=2e-6, rtol=1e-5)


def test_it_agrees_with_scaled_dot_product_attention() -> None:
    case = make_case([(33, 33)], heads=(6, 2), head_dim=16)
    q, k, v = (x.transpose(0, 1)[None] for x in (case.query, case.keys[0], case.values[0]))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(case.run(BACKEND, AttentionParams(scaling=0.25)), want[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_result_has_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    case = make_case([(3, 20)], dtype=dtype)
    out = case.run(BACKEND, AttentionParams(scaling=0.125))
    assert out.dtype == dtype
    assert out.is_contiguous()
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5}.get(dtype, 0.02)
    want = by_the_book(case, AttentionParams(scaling=0.125))
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


def test_long_queries_taken_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(40, 70), (1, 33)])
    params = AttentionParams(scaling=0.125, sliding_window=21)
    whole = case.run(BACKEND, params)
    monkeypatch.setattr(torch_reference, "_MAX_SCORE_ELEMENTS", 70 * 4 * 7)
    torch.testing.assert_close(case.run(BACKEND, params), whole, atol=1e-6, rtol=1e-6)


def test_blocks_before_the_window_are_not_read() -> None:
    case = make_case([(2, 64)])
    params = AttentionParams(scaling=0.125, sliding_window=16)
    kv = case.pool(BACKEND)
    want = BACKEND.attend(case.query, kv, case.metadata, params)
    for freed in case.tables[0][:2]:
        kv.k[freed] = kv.v[freed] = float("nan")
    case.metadata.block_tables[0, :2] = 2**31 - 1
    assert torch.equal(BACKEND.attend(case.query, kv, case.metadata, params), want)


def test_gather_returns_what_was_written_and_zeros_for_minus_one() -> None:
    case = make_case([(1, 37)])
    kv = case.pool(BACKEND)
    slots = torch.cat([torch.tensor([-1]), case.slots(0), torch.tensor([-1])])
    k, v = BACKEND.gather(kv, slots)
    assert torch.equal(k[1:-1], case.keys[0])
    assert torch.equal(v[1:-1], case.values[0])
    assert not k[[0, -1]].any()
    assert not v[[0, -1]].any()


def test_slot_minus_one_is_skipped() -> None:
    case = make_case([(1, 4)])
    kv = case.pool(BACKEND)
    before = kv.k.clone()
    BACKEND.write(kv, torch.ones(2, 2, 64), torch.ones(2, 2, 64), torch.tensor([-1, -1]))
    assert torch.equal(kv.k.nan_to_num(), before.nan_to_num())


def test_copy_blocks_goes_in_order() -> None:
    kv = BACKEND.allocate(make_case([(1, 1)]).spec, 4, 16)
    for block in range(4):
        kv.k[block] = kv.v[block] = float(block)
    BACKEND.copy_blocks([kv], [0, 1, 3], [1, 2, 0])
    assert [int(kv.k[b].unique()) for b in range(4)] == [3, 0, 0, 3]
    assert [int(kv.v[b].unique()) for b in range(4)] == [3, 0, 0, 3]


def test_nothing_builds_an_autograd_graph() -> None:
    case = make_case([(2, 20)])
    kv = case.pool(BACKEND)
    key = torch.randn(2, 2, 64, requires_grad=True)
    BACKEND.write(kv, key * 2, key * 3, torch.tensor([0, 1]))
    out = BACKEND.attend((case.query * 1).requires_grad_(), kv, case.metadata, AttentionParams(scaling=0.1))
    assert not kv.k.requires_grad
    assert not out.requires_grad


@pytest.mark.parametrize("kind", ["bool", "additive", "causal"])
@pytest.mark.parametrize("name", ["plain", "softcap", "sinks"])
def test_dense_attention_under_a_mask_equals_the_paged_one(name: str, kind: str) -> None:
    q_len, seq_len = (20, 20) if kind == "causal" else (7, 20)
    case, params = make_case([(q_len, seq_len)]), AttentionParams(scaling=0.3, **PARAMS[name])
    causal = torch.ones(q_len, seq_len, dtype=torch.bool).tril(seq_len - q_len)[None, None]
    mask = {
        "bool": causal,
        "additive": torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min),
        "causal": None,
    }[kind]
    query, k, v = (x.transpose(0, 1)[None] for x in (case.query, case.keys[0], case.values[0]))
    got = torch_reference.attend_dense(query, k, v, mask, params)
    assert torch.allclose(got[0], case.run(BACKEND, params), atol=1e-5)
