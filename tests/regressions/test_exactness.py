"""Cases 6, 29, 32: processors see what stock shows, windows are exact at every border, rows do not affect each other.

Case 6: https://github.com/huggingface/transformers/pull/48468
Case 29: https://github.com/vllm-project/vllm/issues/3385 , https://github.com/huggingface/transformers/issues/29623
Case 32: https://github.com/vllm-project/vllm/issues/5898
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import hf_paged
from hf_paged import generation
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(3, 60))},
    "sequence_bias": {"sequence_bias": {(5,): 4.0, (7, 9): 5.0}},
    "bad_words": {"bad_words_ids": [[5], [7, 9]]},
    "suppress": {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8]},
    "forced": {"forced_eos_token_id": 2, "eos_token_id": 2},
}


@pytest.mark.parametrize("options", PROCESSORS)
def test_processors_see_what_stock_shows_them(options: str) -> None:
    model, batch = zoo.build("llama"), left_padded([13, 6, 9])
    with registered():
        for _ in range(2):
            assert torch.equal(
                paged(model, **batch, **PROCESSORS[options]), stock(model, **batch, **PROCESSORS[options])
            )


@pytest.mark.parametrize("backend", ["auto", "torch", "gather"])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 8])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "llama4", "gemma3n"])
def test_windows_are_exact_at_every_border(name: str, chunk: int | None, backend: str) -> None:
    model = zoo.build(name)  # windows of 7, chunks of 8
    with registered(attention_backend=backend):
        for width in (6, 7, 8, 9, 16, 23):
            batch = left_padded([width, max(width - 5, 1)])
            options = {
                "prefill_chunk_size": chunk,
                "max_new_tokens": 5,
                "output_logits": True,
                "return_dict_in_generate": True,
            }
            got, want = paged(model, **batch, **options), stock(model, **batch, **options)
            assert torch.equal(got.sequences, want.sequences)
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
            del got


def test_an_unused_window_in_the_config_is_ignored() -> None:
    """use_sliding_window=False with a sliding_window set: stock uses no window, so must we."""
    config = tf.Qwen2Config(
        vocab_size=zoo.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=False, sliding_window=4, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with registered():
        for _ in range(2):
            prompt = ids(1, 15)
            got = paged(model, prompt, output_logits=True, return_dict_in_generate=True)
            want = stock(model, prompt, output_logits=True, return_dict_in_generate=True)
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
            del got


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_row_does_not_depend_on_its_batch_mates(name: str) -> None:
    model, lengths = zoo.build(name), [13, 6, 9, 21]
    batch = left_padded(lengths)
    with registered():
        together = paged(model, **batch)
        for row, length in enumerate(lengths):
            alone = paged(model, batch["input_ids"][row : row + 1, -length:])
            assert torch.equal(alone[0, length:], together[row, max(lengths) :])


def test_temperature_zero_top_k_one_and_greedy_agree() -> None:
    model, prompt = zoo.build("llama"), ids(2, 9)
    with registered():
        greedy = paged(model, prompt)
        assert torch.equal(paged(model, prompt, do_sample=True, top_k=1), greedy)
        assert torch.equal(paged(model, prompt, do_sample=True, temperature=1e-6), greedy)


@pytest.mark.parametrize("name", [n for n in zoo.ALL if n not in zoo.NO_KV and n != "t5"])
@pytest.mark.parametrize(("backend", "block_size"), [("auto", 16), ("torch", 4), ("gather", 4)])
def test_negative_control_one_corrupted_value_changes_the_logits(name: str, backend: str, block_size: int) -> None:
    """If this fails, the parity tests prove nothing: they would pass on a cache that nobody reads."""
    model, prompt = zoo.build(name), ids(1, 9)
    corrupted = [False]

    class Corrupt:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            cache = generation.prompts.calls_here.calls[-1].cache
            layer = cache.paged_layers[0]
            if not corrupted[0] and layer.length:
                corrupted[0] = True
                slot = torch.from_numpy(cache.state.slots(layer.length - 1, layer.length).reshape(-1).copy())
                keys, values = layer.backend.gather(layer.kv, slot)
                layer.backend.write(layer.kv, keys, values + 3.0, slot)
            return scores

    options = {"output_logits": True, "return_dict_in_generate": True}
    with registered(prefix_caching=False, attention_backend=backend, block_size=block_size):
        paged(model, prompt)
        clean = paged(model, prompt, **options)
        dirty = paged(model, prompt, logits_processor=tf.LogitsProcessorList([Corrupt()]), **options)
        assert corrupted[0]
        assert not torch.allclose(clean.logits[1], dirty.logits[1], rtol=1e-3, atol=1e-3)
        del clean, dirty


def test_poisoned_unused_blocks_are_never_read() -> None:
    """Case 28's cousin: NaN in every block that nobody owns, the null block included, must not show."""
    model, batch = zoo.build("llama"), left_padded([13, 6])
    want = stock(model, **batch)
    with registered(memory=None, num_blocks=40, prefix_caching=False):
        paged(model, **batch)
        pool = generation.models._models[model].shared.pool
        for kv in pool.layers.values():
            kv.k.view(torch.uint8).fill_(0xFF)  # all ones is a NaN in every float format
            kv.v.view(torch.uint8).fill_(0xFF)
        assert torch.equal(paged(model, **batch), want)


def test_stats_say_how_layers_are_served() -> None:
    model = zoo.build("deepseek_v3")
    with registered():
        paged(model, ids(1, 6))
        stats = hf_paged.cache_stats(model)
        assert (
            not stats.native
            and all("never reached" in why for why in stats.gathered.values())
            and len(stats.gathered) == 3
        )
