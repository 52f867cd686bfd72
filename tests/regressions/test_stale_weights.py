"""Case 15 and decision 5. Keys computed with other weights, another adapter or another salt are never reused.

https://github.com/vllm-project/vllm/issues/44701 , /pull/44706 , /pull/42495
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from tests import zoo
from tests.regressions.helpers import ids, paged, registered, stock

PROMPT = ids(1, 14)


def _step(model: Any, fused: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def _data_write(model: Any) -> None:
    model.get_input_embeddings().weight.data[int(PROMPT[0, 3])] += 0.5  # one row, past autograd's back


def _numpy_write(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.detach().numpy()[0, 0] += 3.0


def _load(model: Any, assign: bool) -> None:
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=assign)


def _hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)


CHANGES: dict[str, Callable[[Any], None]] = {
    "optimizer step": lambda m: _step(m, fused=False),
    "fused optimizer step": lambda m: _step(m, fused=True),
    ".data write of one row": _data_write,
    "one element through numpy": _numpy_write,
    "load_state_dict": lambda m: _load(m, assign=False),
    "load_state_dict(assign=True)": lambda m: _load(m, assign=True),
    "all signs flipped": lambda m: m.model.layers[1].mlp.up_proj.weight.data.neg_(),
    "two rows swapped": lambda m: m.get_input_embeddings().weight.data.copy_(
        m.get_input_embeddings().weight.data.flip(0)
    ),
    "a user's forward hook": _hook,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_never_see_old_keys(change: str) -> None:
    model = zoo.fresh("llama")
    with registered():
        paged(model, PROMPT)
        paged(model, PROMPT)
        hits = hf_paged.cache_stats(model).hit_tokens
        assert hits > 0, "the test needs a prefix that would be reused"
        CHANGES[change](model)
        assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))
        assert hf_paged.cache_stats(model).hit_tokens == hits


def test_inference_tensors_have_no_version_and_are_still_watched() -> None:
    with torch.inference_mode():
        model = zoo.fresh("llama")
    with registered():
        paged(model, PROMPT)
        with torch.inference_mode():
            _data_write(model)
        assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))


def test_weights_changed_starts_over_without_evidence() -> None:
    model = zoo.fresh("llama")
    with registered():
        paged(model, PROMPT)
        hf_paged.weights_changed(model)
        paged(model, PROMPT)
        assert hf_paged.cache_stats(model).hit_tokens == 0


def test_prefixes_of_old_weights_give_their_memory_back() -> None:
    model = zoo.fresh("llama")
    with registered():
        for _ in range(5):
            paged(model, PROMPT)
            _step(model, fused=False)
        paged(model, PROMPT)
        assert hf_paged.cache_stats(model).cached_blocks == 6  # 21 of the 22 tokens, in blocks of 4, once


def test_another_optimizer_does_not_cost_this_model_its_prefixes() -> None:
    model, other = zoo.fresh("llama"), zoo.fresh("gpt2")
    with registered():
        paged(model, PROMPT)
        _step(other, fused=True)
        paged(model, PROMPT)
        assert hf_paged.cache_stats(model).hit_tokens > 0


def test_adapter_switch_and_merge() -> None:
    peft = pytest.importorskip("peft", reason="needs the `test` extra")
    model = zoo.fresh("llama")
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config, adapter_name="a")
    model.add_adapter("b", config)
    model.eval()
    prompt = {"input_ids": PROMPT}
    with registered():
        for prepare in (
            lambda: model.set_adapter("a"),
            lambda: model.set_adapter("b"),
            lambda: model.base_model.disable_adapter_layers(),
            lambda: model.base_model.enable_adapter_layers(),
            lambda: model.merge_adapter(["a"]),
            lambda: model.unmerge_adapter(),
        ):
            prepare()
            model.eval()
            assert torch.equal(paged(model, **prompt), stock(model, **prompt))
            assert torch.equal(paged(model, **prompt), stock(model, **prompt))


def test_salt_separates_callers() -> None:
    model = zoo.build("llama")
    with registered():
        paged(model, PROMPT, cache_config={"salt": "x"})
        paged(model, PROMPT, cache_config={"salt": "y"})
        paged(model, PROMPT)
        assert hf_paged.cache_stats(model).hit_tokens == 0
        paged(model, PROMPT, cache_config={"salt": "x"})
        assert hf_paged.cache_stats(model).hit_tokens > 0


def test_dropout_in_training_mode_is_neither_stored_nor_reused() -> None:
    model = zoo.fresh("gpt2")
    with registered():
        model.train()
        torch.manual_seed(0)
        want = stock(model, PROMPT)
        torch.manual_seed(0)
        assert torch.equal(paged(model, PROMPT), want)
        model.eval()
        assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))
        assert hf_paged.cache_stats(model).hit_tokens == 0
