"""Models whose attention, masks or caches are code of their own, and ids that only such a model understands.

Values changed between cache and attention (DiffLlama), a bias computed from all values so far (Doge), a window that the
attention ignores (Moshi), prompts of the model's own (CPM-Ant), a mask token appended at every step (XLM), two streams
of queries (ProphetNet): all of them once generated other tokens than stock, padded or in a second call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import hf_paged
from hf_paged import errors
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

_PROPHETNET: dict[str, Any] = dict(
    vocab_size=zoo.VOCAB, hidden_size=32, encoder_ffn_dim=48, num_encoder_layers=2, num_encoder_attention_heads=4,
    decoder_ffn_dim=48, num_decoder_layers=2, num_decoder_attention_heads=4, max_position_embeddings=256, num_buckets=8,
    relative_max_distance=32,
)  # fmt: skip

#: name -> (model class, config class, arguments)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "diffllama": ("DiffLlamaForCausalLM", "DiffLlamaConfig", {**zoo._BASE}),
    "doge": ("DogeForCausalLM", "DogeConfig", {**zoo._BASE, "keep_window_size": 5}),
    "moshi": (
        "MoshiForCausalLM",
        "MoshiConfig",
        dict(
            vocab_size=zoo.VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, ffn_dim=48, max_position_embeddings=256, sliding_window=7,
        ),
    ),
    "cpmant": (
        "CpmAntForCausalLM",
        "CpmAntConfig",
        dict(
            vocab_size=zoo.VOCAB, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=3,
            position_bias_num_buckets=16, position_bias_max_distance=64, prompt_types=4, prompt_length=4,
            segment_types=4,
        ),
    ),
    "xlm": (
        "XLMWithLMHeadModel",
        "XLMConfig",
        dict(
            vocab_size=zoo.VOCAB, emb_dim=32, n_layers=3, n_heads=4, max_position_embeddings=256,
            pad_token_id=zoo.PAD, bos_token_id=1, eos_token_id=2, mask_token_id=5,
        ),
    ),
    "prophetnet": ("ProphetNetForConditionalGeneration", "ProphetNetConfig", _PROPHETNET),
    "prophetnet decoder": (
        "ProphetNetForCausalLM",
        "ProphetNetConfig",
        {**_PROPHETNET, "is_encoder_decoder": False, "is_decoder": True, "add_cross_attention": False},
    ),
}  # fmt: skip


def _scaled(model: Any) -> Any:
    """As in the zoo: weights large enough that greedy tokens vary and a wrong cache shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name and "norm" not in name:
                parameter.normal_(0.0, 0.25)
            elif name.endswith(".A"):  # Doge's gate
                parameter.normal_(0.0, 1.0)
    model.generation_config.pad_token_id = zoo.PAD
    model.generation_config.eos_token_id = None
    return model.eval()


@functools.cache
def _build(name: str) -> Any:
    torch.manual_seed(0)
    model, config, arguments = MODELS[name]
    return _scaled(getattr(tf, model)(getattr(tf, config)(**arguments)))


def _assert_stocks(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tokens and logits of one paged call are stock's; the sequences."""
    options = {"output_logits": True, "return_dict_in_generate": True}
    got, want = paged(model, **inputs, **options), stock(model, **inputs, **options)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    return got.sequences


@pytest.mark.parametrize("lengths", [[13, 13], [13, 8]], ids=["full", "left-padded"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_of_a_models_own_gives_stocks_tokens(name: str, lengths: list[int]) -> None:
    model, batch = _build(name), left_padded(lengths)
    with registered():
        answer = _assert_stocks(model, batch)
        _assert_stocks(model, batch)
        # which of two equal tokens Doge looks at depends on how a prompt is cut into parts, in stock too
        if not model.config.is_encoder_decoder and name != "doge":
            turn = torch.cat([answer, ids(2, 4, seed=3)], dim=1)
            mask = torch.cat([batch["attention_mask"], torch.ones(2, turn.shape[1] - 13, dtype=torch.long)], dim=1)
            _assert_stocks(model, {"input_ids": turn, "attention_mask": mask})
        assert hf_paged.cache_stats(model).calls > 1, "the test needs calls that were paged"


# -- images -----------------------------------------------------------------------------------------------------------

IMAGE = zoo.VOCAB + 3
_VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
    vision_use_head=False,
)  # fmt: skip


def _gemma3() -> Any:
    text = tf.Gemma3TextConfig(**zoo.CONFIGS["gemma3"][1])
    config = tf.Gemma3Config(
        text_config=text, vision_config=tf.SiglipVisionConfig(**_VISION), mm_tokens_per_image=4,
        image_token_index=IMAGE, boi_token_index=3, eoi_token_index=4,
    )  # fmt: skip
    return tf.Gemma3ForConditionalGeneration(config)


def _paligemma() -> Any:
    text = tf.GemmaConfig(**zoo._BASE, head_dim=8)
    config = tf.PaliGemmaConfig(
        text_config=text, vision_config=tf.SiglipVisionConfig(**_VISION, projection_dim=32), image_token_index=IMAGE,
        projection_dim=32, hidden_size=32, vocab_size=zoo.VOCAB,
    )  # fmt: skip
    return tf.PaliGemmaForConditionalGeneration(config)


#: Gemma 3 and 4 call transformers' preparation of masks themselves, by keyword
VISION = [pytest.param(_gemma3, id="gemma3"), pytest.param(_paligemma, id="paligemma")]


def _see(model_class: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return _scaled(model_class())


def _with_image(seed: int) -> dict[str, torch.Tensor]:
    """A prompt with the placeholders of one image, all of them outside the text vocabulary."""
    tokens = torch.cat([ids(1, 2, seed=1), torch.full((1, 4), IMAGE), ids(1, 6, seed=2)], dim=1)
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "pixel_values": pixels, "token_type_ids": (tokens == IMAGE).long()}


@pytest.mark.parametrize("model_class", VISION)
def test_placeholders_outside_the_vocabulary_come_with_their_image(model_class: Callable[[], Any]) -> None:
    model = _see(model_class)
    with registered():
        answers = [_assert_stocks(model, _with_image(seed)) for seed in (0, 1, 0)]
        assert not torch.equal(answers[0], answers[1]), "the test needs images that matter"
        assert torch.equal(answers[0], answers[2])
        text = {"input_ids": ids(1, 12)}
        for _ in range(2):
            _assert_stocks(model, text)


@pytest.mark.parametrize("model_class", VISION)
def test_a_padded_batch_of_images(model_class: Callable[[], Any]) -> None:
    model, one, two = _see(model_class), _with_image(0), _with_image(1)
    head = torch.tensor([[5, 6, 7], [zoo.PAD] * 3])
    tokens = torch.cat([head, torch.cat([one["input_ids"], two["input_ids"]])], dim=1)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    batch = {
        "input_ids": tokens, "attention_mask": mask, "token_type_ids": (tokens == IMAGE).long(),
        "pixel_values": torch.cat([one["pixel_values"], two["pixel_values"]]),
    }  # fmt: skip
    with registered():
        for _ in range(2):
            _assert_stocks(model, batch)


@pytest.mark.parametrize("model_class", VISION)
def test_a_placeholder_without_its_image_is_what_stock_makes_of_it(model_class: Callable[[], Any]) -> None:
    model, prompt = _see(model_class), ids(1, 10)
    prompt[0, 3] = IMAGE
    with registered():
        for _ in range(2):
            _assert_stocks(model, {"input_ids": prompt})


@pytest.mark.parametrize("model_class", VISION)
@pytest.mark.parametrize("bad", [-1, zoo.VOCAB, IMAGE + 5])
def test_ids_outside_the_vocabulary_need_an_image(model_class: Callable[[], Any], bad: int) -> None:
    model, prompt = _see(model_class), ids(1, 10)
    prompt[0, 3] = bad
    with registered(), pytest.raises(errors.InvalidRequestError, match=f"token id {bad}, the model's vocabulary is"):
        paged(model, prompt)
