"""``generate(cache_config={"engine": True})``: the same result as the stock loop, on the engine where it can be."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import hf_paged
from hf_paged import generation
from hf_paged.kernels import cpu
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

LENGTHS = [11, 7, 19, 3, 14, 9]
ON = {"engine": True}


def eos_of(model: Any, batch: dict[str, torch.Tensor]) -> list[int]:
    """Tokens that end the rows of a batch at different lengths."""
    free = stock(model, **batch, max_new_tokens=12)[:, batch["input_ids"].shape[1] :]
    return sorted({int(free[0, 3]), int(free[2, 7]), int(free[4, 1])})


def ran_on_engine(caplog: pytest.LogCaptureFixture) -> bool:
    return any("ran on the engine" in r.message for r in caplog.records)


@pytest.mark.versions
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "gpt_oss", "bloom", "deepseek_v3"])
def test_rows_that_end_at_different_lengths(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = zoo.build(name), left_padded(LENGTHS)
    options = {"eos_token_id": eos_of(model, batch), "max_new_tokens": 12}
    want = stock(model, **batch, **options)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        for _ in range(2):
            assert torch.equal(paged(model, **batch, **options, cache_config=ON), want)
        assert ran_on_engine(caplog)
        assert hf_paged.cache_stats(model).hit_tokens > 0


def test_a_pool_for_a_quarter_of_the_demand(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = zoo.build("llama"), left_padded(LENGTHS)
    want = stock(model, **batch, max_new_tokens=12)
    demand = sum(-(-(n + 12) // 4) for n in LENGTHS)
    with registered(memory=None, num_blocks=demand // 4, prefix_caching=False):
        with pytest.raises(hf_paged.OutOfBlocksError):
            paged(model, **batch, max_new_tokens=12, cache_config={"engine": False})
        assert torch.equal(paged(model, **batch, max_new_tokens=12), want)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6, "eos_token_id": [5, 9, 33, 71]},
        {"suppress_tokens": [4, 8, 15]},
        {"forced_eos_token_id": 9, "eos_token_id": 9},
        {"bad_words_ids": [[5], [7, 9]]},
    ],
    ids=lambda o: next(iter(o)),
)
def test_built_in_processors_give_each_row_what_it_gets_alone(options: dict[str, Any]) -> None:
    model, batch = zoo.build("llama"), left_padded(LENGTHS)
    with registered():
        got = paged(model, **batch, **options, max_new_tokens=10, cache_config=ON)
    width = batch["input_ids"].shape[1]
    for row, (tokens, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        prompt = tokens[mask == 1][None]
        want = stock(model, prompt, attention_mask=torch.ones_like(prompt), **options, max_new_tokens=10)
        alone = want[0, prompt.shape[1] :].tolist()
        assert got[row, width : width + len(alone)].tolist() == alone


def test_sampling_follows_torchs_seed_and_differs_by_row() -> None:
    model, prompt = zoo.build("llama"), ids(1, 9)
    options = {"do_sample": True, "top_k": 20, "temperature": 1.5, "num_return_sequences": 4, "cache_config": ON}
    with registered():
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(paged(model, prompt, **options))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert len({tuple(row) for row in runs[0].tolist()}) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True},
        {"streamer": "a streamer"},
        {"guidance_scale": 1.5},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_the_engine_cannot_express_stays_in_the_stock_loop(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = zoo.build("llama"), {"input_ids": ids(1, 11)}
    if "streamer" in options:
        options = {"streamer": TextStreamer(_Letters())}  # type: ignore[arg-type]
    want = stock(model, **prompt, **options)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        got = paged(model, **prompt, **options, cache_config=ON)
        got = getattr(got, "sequences", got)
    assert torch.equal(got, getattr(want, "sequences", want))
    assert not ran_on_engine(caplog)
    assert any("stock loop" in r.message for r in caplog.records)


class _Letters:
    def decode(self, tokens: Any, **options: Any) -> str:
        return "x" * len(tokens)


def test_by_default_a_recurrent_model_stays_in_the_stock_loop_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = zoo.build("bamba"), left_padded([9, 6])
    want = stock(model, **batch)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        assert torch.equal(paged(model, **batch), want)
    assert any("stock loop" in r.message and "recurrent" in r.message for r in caplog.records)


def test_nothing_of_the_engine_keeps_the_model() -> None:
    with registered():
        model = zoo.fresh("llama")
        paged(model, **left_padded([9, 6]), cache_config=ON)
        assert generation.models._models[model].runner is not None
        ref = weakref.ref(model)
        del model
        gc.collect()
        assert ref() is None


def test_changed_weights_and_processors_that_fail() -> None:
    model, batch = zoo.fresh("llama"), left_padded(LENGTHS)
    with registered():
        paged(model, **batch, cache_config=ON)
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(-1.5)
        assert torch.equal(paged(model, **batch, cache_config=ON), stock(model, **batch))
        with pytest.raises(hf_paged.ConfigError, match="engine"):
            paged(model, **batch, cache_config={"engine": "yes"})
        with pytest.raises(hf_paged.InvalidRequestError):
            paged(model, torch.full((1, 5), zoo.VOCAB + 1), cache_config=ON)


def _steered(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
    return model


@pytest.mark.parametrize(
    "make", [lambda: zoo.fresh("gpt2").train(), lambda: _steered(zoo.fresh("llama"))], ids=["training", "hook"]
)
def test_a_model_nobody_can_tell_about_stays_in_the_stock_loop(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = make(), left_padded([9, 6])
    torch.manual_seed(3)
    want = stock(model, **batch)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        torch.manual_seed(3)
        assert torch.equal(paged(model, **batch, cache_config=ON), want)
    assert not ran_on_engine(caplog)
    assert any("training mode" in r.message for r in caplog.records)


def test_a_cache_made_by_hand_knows_no_engine() -> None:
    with pytest.raises(hf_paged.ConfigError, match="stock loop"):
        hf_paged.PagedCache(zoo.build("llama").config, cache_config=ON)


def test_a_call_on_the_engine_runs_natively_and_says_what_packed_weights_take() -> None:
    model, batch = zoo.fresh("llama"), left_padded([9, 6])
    with registered(memory=None, num_blocks=64, block_size=16):
        want = stock(model, **batch)
        for optimize in (False, True, False):  # the copies stay for later calls
            packed = optimize or hf_paged.cache_stats(model).packed_bytes > 0
            assert torch.equal(paged(model, **batch, cache_config={"optimize": optimize}), want)
            assert (hf_paged.cache_stats(model).packed_bytes > 0) == (packed and not cpu.unavailable())
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(-1.5)
        assert torch.equal(paged(model, **batch), stock(model, **batch))
        hf_paged.clear(model)
        assert hf_paged.cache_stats(model).packed_bytes == 0


def test_windows_that_change_after_a_model_ran_on_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = zoo.fresh("gemma3"), ids(2, 30)

    def change(window: int) -> None:
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = window

    def assert_stock(on_the_engine: bool) -> None:
        for _ in range(2):
            caplog.clear()
            assert torch.equal(paged(model, prompt), stock(model, prompt))
            assert ("rows ran on the engine" in caplog.text) is on_the_engine

    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        assert_stock(True)
        model.config.sliding_window = 5
        change(5)
        assert_stock(True)
        change(7)  # which stock takes from the config, and flash attention from the modules
        assert_stock(False)
        assert "the call names the sliding window 7, the cache layer 5" in caplog.text
        change(5)
        hf_paged.weights_changed(model)
        assert_stock(True)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_ids_in_32_bits(options: dict[str, Any]) -> None:
    model, prompt = zoo.build("llama"), ids(2, 7).int()
    want = stock(model, prompt, **options)
    with registered():
        for engine in (None, True, False):
            got = paged(model, prompt, cache_config={"engine": engine}, **options)
            assert got.dtype == want.dtype == torch.int64 and torch.equal(got, want)


def test_an_unsupported_error_of_a_processor_is_the_users(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise hf_paged.UnsupportedError("my own")

    model, prompt = zoo.fresh("llama"), ids(2, 9)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        with pytest.raises(hf_paged.UnsupportedError, match="my own"):
            paged(model, prompt, logits_processor=[refuse], cache_config={"engine": True})
        assert torch.equal(paged(model, prompt), stock(model, prompt))
        assert "rows ran on the engine" in caplog.text and "my own" not in caplog.text


def test_a_call_that_leaves_the_engine_draws_as_if_it_had_not_been_there() -> None:
    model, prompt = zoo.fresh("gemma3"), ids(2, 30)
    with registered():
        paged(model, prompt, cache_config={"engine": True})
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window += 2
        torch.manual_seed(0)
        want = stock(model, prompt, do_sample=True)
        for _ in range(2):
            torch.manual_seed(0)
            assert torch.equal(paged(model, prompt, do_sample=True, cache_config={"engine": True}), want)
