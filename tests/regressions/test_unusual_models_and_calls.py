"""Models that change under us, calls that look like others, caches used in odd ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import hf_paged
from hf_paged import compat, errors, generation
from tests import zoo
from tests.regressions.helpers import decoder_of_an_encoder_decoder, ids, paged, registered, stock


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3", "bloom"])
def test_equal_rows_with_different_masks_are_different_prompts(name: str) -> None:
    model, prompt = zoo.build(name), ids(1, 9).repeat(2, 1)
    mask = torch.ones_like(prompt)
    mask[1, 4] = 0
    with registered():
        for _ in range(2):
            assert torch.equal(paged(model, prompt, attention_mask=mask), stock(model, prompt, attention_mask=mask))


def _other_depth(model: Any) -> None:
    model.config.num_hidden_layers = 2


def _forward_patched(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(x) * 2


def _scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def _epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 10.0


@pytest.mark.parametrize("change", [_other_depth, _forward_patched, _scaling, _activation, _epsilon])
def test_changes_that_touch_no_weight_are_noticed(change: Callable[[Any], None]) -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 14)
    with registered():
        for _ in range(2):
            paged(model, prompt)
        change(model)
        assert torch.equal(paged(model, prompt), stock(model, prompt))


def test_a_process_wide_hook_stops_reuse() -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 14)
    with registered():
        paged(model, prompt)
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out * 1.5 if isinstance(module, torch.nn.SiLU) else None
        )
        try:
            assert torch.equal(paged(model, prompt), stock(model, prompt))
        finally:
            handle.remove()


def test_rotary_frequencies_that_move_with_the_length_are_not_reused() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        config = tf.LlamaConfig(
            vocab_size=zoo.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, rope_parameters=rope, pad_token_id=0,
        )  # fmt: skip
        model = tf.LlamaForCausalLM(config).eval()
        model.generation_config.eos_token_id = None
        return model

    one, two, long = build(), build(), ids(1, 40)
    with registered():
        for prompt in (long[:, :10], long, long[:, :12], long):
            got = paged(one, prompt, output_logits=True, return_dict_in_generate=True)
            want = stock(two, prompt, output_logits=True, return_dict_in_generate=True)
            assert torch.equal(got.sequences, want.sequences)
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
            del got


def test_a_layer_with_attention_of_its_own_makes_the_model_gather() -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 12)
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # the interface of another family: the keys never meet the dispatcher
        config, attention.config = attention.config, copy.deepcopy(attention.config)
        fn = compat.AttentionInterface.get_interface.__wrapped__
        patched, compat.AttentionInterface.get_interface = compat.AttentionInterface.get_interface, fn
        try:
            return original(*args, **kwargs)
        finally:
            attention.config, compat.AttentionInterface.get_interface = config, patched

    attention.forward = forward
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    with registered():
        for _ in range(3):
            got, want = paged(model, prompt, **options), stock(model, prompt, **options)
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
            del got
        assert 1 in hf_paged.cache_stats(model).gathered


def test_attention_replaced_after_the_probe_raises_once_and_then_gathers() -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 12)
    with registered():
        for _ in range(2):
            paged(model, prompt, max_new_tokens=1)
        original = compat.AttentionInterface.get_interface
        compat.AttentionInterface.get_interface = original.__wrapped__  # whatever hides the dispatcher
        try:
            with pytest.raises(errors.InternalError, match="without calling its attention interface"):
                paged(model, prompt, max_new_tokens=1)
            assert torch.equal(paged(model, prompt), stock(model, prompt))
        finally:
            compat.AttentionInterface.get_interface = original


def test_dropout_once_does_not_demote_a_model() -> None:
    model, prompt = zoo.fresh("gpt2"), ids(1, 12)
    with registered():
        model.train()
        paged(model, prompt)
        model.eval()
        paged(model, prompt)
        before = generation.models.known(model)
        assert hf_paged.cache_stats(model).native == [0, 1, 2] and before is not None


@pytest.mark.parametrize("trained", ["all", "last v_proj"])
def test_gradients_through_several_forwards_are_stocks(trained: str) -> None:
    model, batch = zoo.fresh("llama"), ids(2, 12)
    if trained != "all":
        model.requires_grad_(False)
        model.model.layers[-1].self_attn.v_proj.weight.requires_grad_(True)
    grads = []
    caches = [compat.DynamicCache(config=model.config)]
    caches += [hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"}) for _ in range(2)]
    for cache in caches:
        model.zero_grad()
        model(batch[:, :7], past_key_values=cache)
        model(batch[:, 7:], past_key_values=cache).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert grads[0]
    for other in grads[1:]:
        assert len(other) == len(grads[0])
        for got, want in zip(other, grads[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_keys_follow_every_edit() -> None:
    model, prompt = zoo.build("llama"), ids(3, 9)
    with torch.no_grad():
        cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})
        model(prompt, past_key_values=cache)
        keys = cache.layers[0].keys
        assert torch.equal(copy.deepcopy(cache).layers[0].keys, keys)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert torch.equal(cache.layers[0].keys, keys[[2, 0, 0]])
        cache.batch_select_indices(torch.tensor([1]))
        assert torch.equal(cache.layers[0].keys, keys[[0]])
        cache.crop(-4)
        assert torch.equal(cache.layers[0].keys, keys[[0], :, :5])


@pytest.mark.parametrize("options", [{}, {"attention_backend": "gather"}, {"prefix_caching": False}], ids=str)
def test_candidates_are_cropped_where_the_config_counts_layers_that_the_model_has_not(options: dict[str, Any]) -> None:
    model, prompt = decoder_of_an_encoder_decoder("Bart", encoder_layers=5), ids(1, 21)
    assert model.config.num_hidden_layers == 5
    with registered(**options):
        for _ in range(2):
            assert torch.equal(
                paged(model, prompt, prompt_lookup_num_tokens=3), stock(model, prompt, prompt_lookup_num_tokens=3)
            )


def test_positions_given_once_for_all_rows() -> None:
    model, prompt = zoo.build("llama"), ids(2, 9)
    positions = torch.arange(9)[None]
    with registered():
        for _ in range(2):
            got = paged(model, prompt, position_ids=positions)
            assert torch.equal(got, stock(model, prompt, position_ids=positions))


def test_a_row_without_tokens() -> None:
    for name in ("llama", "bloom", "mpt"):
        model, prompt = zoo.build(name), ids(2, 9)
        mask = torch.ones_like(prompt)
        mask[0] = 0
        with registered():
            for _ in range(2):
                assert torch.equal(paged(model, prompt, attention_mask=mask), stock(model, prompt, attention_mask=mask))


def test_unregister_leaves_a_later_wrapper_in_place() -> None:
    mixin = compat.GenerationMixin
    before = mixin.__dict__["generate"]
    hf_paged.register()
    ours = mixin.generate

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    mixin.generate = theirs
    try:
        hf_paged.unregister()
        assert mixin.generate is theirs
        model, prompt = zoo.build("llama"), ids(1, 5)
        assert model.generate(prompt, max_new_tokens=2).shape == (1, 7)
    finally:
        mixin.generate = before


def test_a_config_that_contradicts_the_cache_passed_in() -> None:
    model, prompt = zoo.build("llama"), ids(1, 5)
    cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})
    with registered(), pytest.raises(errors.ConfigError, match="give one of the two"):
        paged(model, prompt, past_key_values=cache, cache_config={"block_size": 8})


def test_wrong_objects_for_a_config() -> None:
    for wrong in (None, "x", {}, torch.nn.Linear(2, 2)):
        with pytest.raises(errors.ConfigError, match=r"PagedCache\(model\.config\)"):
            hf_paged.PagedCache(wrong)
