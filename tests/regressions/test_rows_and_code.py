"""What may differ between rows of one batch, and what may change between calls or during one besides weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.llama import modeling_llama

import hf_paged
from tests import zoo
from tests.regressions.helpers import ids, paged, registered, stock

TWICE = ids(1, 11).repeat(2, 1)


def _assert_stocks(model: Any, batch: torch.Tensor, calls: int = 2, **options: Any) -> None:
    for _ in range(calls):
        assert torch.equal(paged(model, batch, **options), stock(model, batch, **options))


def test_an_adapter_for_each_row_of_one_prompt() -> None:
    peft = pytest.importorskip("peft", reason="needs the `clients` extra")
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(zoo.fresh("llama"), config).eval()
    options = {"input_ids": TWICE, "adapter_names": ["__base__", "default"]}
    want = stock(model, **options)
    assert not torch.equal(want[0], want[1]), "the adapter must matter"
    with registered():
        for _ in range(2):
            assert torch.equal(paged(model, **options), want)


def test_a_hook_that_treats_rows_differently() -> None:
    model, push = zoo.fresh("llama"), torch.randn(32, generator=torch.Generator().manual_seed(1)) * 2

    def steer(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[1] += push
        return output

    model.model.layers[0].mlp.register_forward_hook(steer)
    want = stock(model, TWICE)
    assert not torch.equal(want[0], want[1]), "the hook must matter"
    with registered():
        _assert_stocks(model, TWICE)


def test_dropout_differs_from_row_to_row() -> None:
    model = zoo.fresh("gpt2").train()
    with registered():
        for seed in range(3):
            torch.manual_seed(seed)
            want = stock(model, TWICE)
            torch.manual_seed(seed)
            assert torch.equal(paged(model, TWICE), want)


def _other_mlp(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward
    patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 2 * forward(self, x))


def _other_attention(model: Any, patch: pytest.MonkeyPatch) -> None:
    sdpa = tf.AttentionInterface()["sdpa"]
    tf.AttentionInterface.register("of_mine", lambda *a, **k: (sdpa(*a, **k)[0] * 3, None))


@pytest.mark.parametrize("change", [_other_mlp, _other_attention])
def test_code_that_is_replaced_between_calls(
    change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 19)
    if change is _other_attention:
        sdpa = tf.AttentionInterface()["sdpa"]
        tf.AttentionInterface.register("of_mine", lambda *a, **k: sdpa(*a, **k))
        tf.AttentionMaskInterface.register("of_mine", tf.AttentionMaskInterface()["sdpa"])
        model.config._attn_implementation = "of_mine"
    with registered(attention_backend="gather"):
        before = paged(model, prompt)
        change(model, monkeypatch)
        assert not torch.equal(stock(model, prompt), before), "the test needs a change that matters"
        _assert_stocks(model, prompt)


def _scaling(model: Any, on: bool) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 5 if on else 0.2


def _hook(model: Any, on: bool) -> None:
    if on:
        model.handle = model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * 3)
    else:
        model.handle.remove()


@pytest.mark.parametrize("change", [_scaling, _hook])
def test_a_change_in_the_middle_of_a_call_that_is_taken_back_afterwards(change: Callable[[Any, bool], None]) -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 14)

    class Midway:
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                change(model, True)
            return scores

    with registered():
        paged(model, ids(1, 9, seed=5))
        answer = paged(model, prompt, logits_processor=[Midway()])
        change(model, False)
        turn = torch.cat([answer, ids(1, 3, seed=2)], dim=1)
        options = {
            "attention_mask": torch.ones_like(turn), "output_logits": True, "return_dict_in_generate": True
        }  # fmt: skip
        got, want = paged(model, turn, **options), stock(model, turn, **options)
        assert torch.allclose(got.logits[0], want.logits[0], atol=1e-4)
        del got


def test_sinks_learn_through_a_paged_cache() -> None:
    model, batch = zoo.fresh("gpt_oss"), ids(1, 8)
    model.requires_grad_(False)
    sinks = model.model.layers[0].self_attn.sinks.requires_grad_(True)

    def gradient(cache: Any, forward: Any) -> torch.Tensor:
        sinks.grad = None
        forward(batch, past_key_values=cache).logits.sum().backward()
        assert sinks.grad is not None
        return sinks.grad.clone()

    def new() -> Any:
        return hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})

    want = gradient(tf.DynamicCache(config=model.config), model.forward)
    for _ in range(2):
        assert torch.allclose(gradient(new(), model.forward), want, atol=1e-5)
    assert torch.allclose(gradient(new(), torch.compile(model.forward, backend="aot_eager")), want, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("wrong", [42, None, "llama"])
def test_questions_about_something_that_is_no_model(wrong: Any) -> None:
    for ask in (hf_paged.cache_stats, hf_paged.clear, hf_paged.weights_changed):
        with pytest.raises(hf_paged.ConfigError, match=type(wrong).__name__):
            ask(wrong)
