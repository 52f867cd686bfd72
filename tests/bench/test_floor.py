"""The floor's arithmetic, by hand."""

from __future__ import annotations

import pytest
import transformers as tf

from hf_paged.bench import floor, workload
from hf_paged.bench.floor import ModelShape, Rates
from hf_paged.bench.wire.hf_paged_peer import Request, Work
from tests import zoo

#: 10 weights active of 14 stored, a head of 6, 2 attention numbers, 3 numbers of keys and values a token
SHAPE = ModelShape(active=10, stored=14, head=6, attention=2, kv=3, hidden=1, inner=1)


def test_rates_are_the_best_of_all_rounds():
    rounds = [
        {"gflops": {"a": 1.0, "b": 3.0}, "read_gb_s": {"x": 7.0}},
        {"gflops": {"a": 2.0}, "read_gb_s": {"x": 5.0, "y": 9.0}},
    ]
    assert Rates.best(rounds) == Rates(3e9, 9e9)


def test_one_request():
    amount = floor.work_amount(Work([Request([1, 2, 3], 3)]), SHAPE, itemsize=2)
    # tokens 3 + 2, sampled 3, pairs 1 + 2 + 3 and 4 + 5
    assert amount.operations == 2 * 10 * 5 + 2 * 6 * 3 + 4 * 2 * (6 + 9)
    # three passes over 20 weights; the second and third look at 4 and 5 tokens
    assert amount.bytes == 3 * 20 * 2 + (4 + 5) * 3 * 2


def test_a_shared_prefix_is_computed_and_read_once():
    work = Work([Request([1, 2, 3, 4], 1), Request([1, 2, 3, 5, 6], 2)])
    amount = floor.work_amount(work, SHAPE, itemsize=4)
    # tokens 1 2 3 4, then 5 6, and one generated; pairs 1..4, 4 + 5, 6
    assert amount.operations == 2 * 10 * 7 + 2 * 6 * 3 + 4 * 2 * (10 + 9 + 6)
    assert amount.bytes == 2 * 20 * 4 + (3 + 2 + 1) * 3 * 4


def test_samples_share_their_prompt_and_its_logits():
    amount = floor.work_amount(Work([Request([1, 2], 3)], samples=4), SHAPE, itemsize=1)
    # tokens 2 + 4 * 2, sampled 1 + 4 * 2, pairs 1 + 2 and 4 * (3 + 4)
    assert amount.operations == 2 * 10 * 10 + 2 * 6 * 9 + 4 * 2 * (3 + 28)
    assert amount.bytes == 3 * 20 + (2 + 4 * 1) * 3 + (2 + 4 * 2) * 3


def test_a_step_is_the_middle_one():
    work = Work([Request([1, 2, 3], 4), Request([4, 5, 6], 4)])
    amount = floor.step_amount(work, SHAPE, itemsize=1)
    assert amount.operations == 2 * 16 * 2 + 4 * 2 * 2 * 5
    assert amount.bytes == 20 + 2 * 5 * 3


def test_what_takes_longer_decides():
    amount = floor.Amount(operations=100, bytes=30)
    assert amount.seconds(Rates(10, 10)) == 10
    assert amount.seconds(Rates(100, 10)) == 3


@pytest.mark.parametrize(
    ("case", "dtype_bytes", "rate", "published"),
    [("W3 b=1", 2, 402e9, 10.0), ("W3 b=8", 2, 402e9, 11.5), ("W3 b=32", 2, 402e9, 21.3), ("W3 b=32", 4, 183e9, 47.1)],
)
def test_published_floors_of_smollm2(case, dtype_bytes, rate, published):
    """Milliseconds that another estimate from the same rates gave (27 GB/s): within a tenth."""
    config = tf.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    shape = ModelShape.of(config)
    assert (shape.active, shape.head) == (106_168_320, 49152 * 576)
    cases = {case.name: case for case in workload.read(workload.DEFAULT).cases}
    assert floor.floor_of(cases[case], shape, dtype_bytes, Rates(rate, 27e9)) == pytest.approx(published, rel=0.1)


def test_figures_are_in_the_case_s_unit():
    cases = {case.name: case for case in workload.read(workload.DEFAULT).cases}
    fast, slow = Rates(1e15, 1e15), Rates(1e12, 1e12)
    for name, factor in (("W1", 1e-3), ("W4", 1e3), ("W5", 1e3)):
        assert floor.floor_of(cases[name], SHAPE, 2, slow) == pytest.approx(
            factor * floor.floor_of(cases[name], SHAPE, 2, fast)
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "mixtral"])
def test_the_shape_of_a_model_counts_its_matrices(name):
    shape = ModelShape.of(zoo.config_of(name))
    model = zoo.build(name)
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    if name == "gpt2":
        tables.add(id(model.transformer.wpe.weight))
    weights = {n: w.numel() for n, w in model.named_parameters() if w.ndim > 1 and id(w) not in tables}
    assert shape.stored == sum(weights.values())
    assert shape.head == 97 * 32
    experts = sum(count for n, count in weights.items() if ".experts." in n)
    assert shape.active == pytest.approx(shape.stored - experts / 2)  # two of four experts are chosen
    assert (experts > 0) == (name in ("qwen3_moe", "mixtral"))
