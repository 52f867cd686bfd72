"""A GenerationConfig as settings of a request: what stock ``generate()`` does with it, or an error with the name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

import hf_paged
from hf_paged import LLM, SamplingParams
from hf_paged.sampling import generation_config as module
from hf_paged.sampling.generation_config import sampling_params_from
from hf_paged.sampling.processors import processors_for
from hf_paged.sampling.sampler import SamplerState, _Batch
from tests import zoo
from tests.regressions.helpers import ids

PROMPT = ids(1, 9, seed=4)[0].tolist()


@pytest.fixture
def model() -> Iterator[Any]:
    """A shared model whose own generation config a test may change."""
    found = zoo.build("llama")
    kept = found.generation_config
    found.generation_config = copy.deepcopy(kept)
    found.generation_config.eos_token_id = [2, 40]
    yield found
    found.generation_config = kept


def stock_loop(model: Any, config: GenerationConfig) -> dict[str, Any]:
    """What ``generate()`` hands to its loop: prepared config, processors and stopping criteria."""
    seen: dict[str, Any] = {}

    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.update(kwargs)
        return input_ids

    row = torch.tensor([PROMPT])
    model.generate(row, attention_mask=torch.ones_like(row), generation_config=config, custom_generate=loop)
    return seen


CONFIGS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 5},
    {"max_length": 14},
    {"max_length": 14, "max_new_tokens": 7},
    {"max_new_tokens": 6, "min_length": 12},
    {"max_new_tokens": 6, "min_new_tokens": 3},
    {"max_new_tokens": 6, "min_new_tokens": 30},
    {"max_new_tokens": 6, "min_length": 4},
    {"eos_token_id": 11},
    {"eos_token_id": [11, 5, 77], "min_new_tokens": 2},
    {"do_sample": True},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "temperature": 0.4, "top_p": 0.7, "top_k": 7, "eos_token_id": 3},
    {"do_sample": True, "min_p": 0.1, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    {"do_sample": True, "top_h": 0.5, "num_return_sequences": 3},
    {"do_sample": False, "temperature": 0.4, "top_p": 0.7},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3},
    {"encoder_repetition_penalty": 1.3, "bad_words_ids": [[5], [6, 7]], "sequence_bias": [[[8], 2.0]]},
    {"suppress_tokens": [3, 4], "begin_suppress_tokens": [5], "remove_invalid_values": True},
    {"forced_eos_token_id": 9, "exponential_decay_length_penalty": (1, 1.5), "renormalize_logits": True},
    {"use_cache": True, "cache_implementation": "dynamic", "pad_token_id": 5, "disable_compile": True},
]
#: what a model's generation_config.json may say
OWN: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
    {"max_length": 17, "suppress_tokens": [30], "min_length": 10},
    {"max_new_tokens": 4, "eos_token_id": None, "num_beams": 1, "early_stopping": True, "length_penalty": 2.0},
]


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("own", OWN, ids=lambda o: next(iter(o), "nothing"))
@pytest.mark.parametrize("given", CONFIGS, ids=lambda o: ",".join(o) or "nothing")
def test_scores_and_ends_are_those_of_the_stock_loop(model: Any, own: dict[str, Any], given: dict[str, Any]) -> None:
    model.generation_config.update(**own)
    config = GenerationConfig(**given)
    if given.get("exponential_decay_length_penalty") and model.generation_config.eos_token_id is None:
        with pytest.raises((TypeError, RuntimeError)):
            stock_loop(model, config)
        return
    stock = stock_loop(model, config)
    params = sampling_params_from(config, model, len(PROMPT))
    prepared = stock["generation_config"]
    assert params.greedy == (not prepared.do_sample)
    assert params.n == prepared.num_return_sequences
    assert params.max_tokens == prepared.max_length - len(PROMPT)
    stop_ids = set(params.stop_token_ids)
    assert params.ignore_eos
    processors = processors_for(model, params, PROMPT, sorted(stop_ids))
    generator = torch.Generator().manual_seed(0)
    for length in range(params.max_tokens):
        tokens = [*PROMPT, *range(20, 20 + length)]
        logits = torch.randn(1, zoo.VOCAB, generator=generator) * 3
        batch = _Batch(logits, [SamplerState(params, processors, 0)], [tokens])
        batch._process()
        want = stock["logits_processor"](torch.tensor([tokens]), logits.clone())
        found = batch._processed([0])  # before 5.23, a forced end and a length penalty make NaN of each other
        assert torch.allclose(found, want, rtol=0, atol=0, equal_nan=True), length
    for token in range(zoo.VOCAB):
        ids_ = torch.tensor([[*PROMPT, token]])
        ends = bool(stock["stopping_criteria"](ids_, None)) or params.max_tokens == 1
        assert ends == (token in stop_ids or params.max_tokens == 1)


@pytest.mark.versions
def test_tokens_are_those_of_generate(model: Any) -> None:
    """One batch of configs, and of prompts as long as each other: what is unset depends on the prompt's length."""
    model.generation_config.update(repetition_penalty=1.2, max_new_tokens=7)
    free = stock_tokens(model, PROMPT, GenerationConfig(eos_token_id=-1))
    prompts = [PROMPT, PROMPT[:4], [*PROMPT, 30], [*PROMPT, 31, 32]]
    configs = [GenerationConfig(**given) for given in CONFIGS[:4]]
    configs[3].eos_token_id = free[3]
    settings: list[Any] = [*configs, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)]
    llm = LLM(model, block_size=4, num_blocks=64)
    outputs = llm.generate([*prompts, PROMPT], settings)
    want = [stock_tokens(model, *one) for one in zip(prompts, configs, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs[:-1]] == want
    assert len({len(tokens) for tokens in want}) > 1
    assert len(outputs[-1].outputs[0].token_ids) == 3
    with pytest.raises(hf_paged.InvalidRequestError, match="max_time"):
        llm.generate([PROMPT], GenerationConfig(max_time=1.0))


def stock_tokens(model: Any, prompt: list[int], config: GenerationConfig) -> list[int]:
    row = torch.tensor([prompt])
    found = model.generate(row, attention_mask=torch.ones_like(row), generation_config=config)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"assistant_early_exit": 2}, "assistant_early_exit"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"use_mtp": True}, "use_mtp"),
        ({"speculation_type": "dflash"}, "speculation_type"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"is_assistant": True}, "is_assistant"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"constraints": ["one"]}, "constraints"),
        ({"force_words_ids": [[5]], "num_beams": 2}, "force_words_ids"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "diversity_penalty"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups"),
        ({"watermarking_config": WatermarkingConfig()}, "watermarking_config"),
        ({"max_time": 2.0}, "max_time"),
        ({"token_healing": True}, "token_healing"),
        ({"output_scores": True}, "output_scores"),
        ({"output_logits": True}, "output_logits"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"cache_implementation": "quantized"}, "cache_implementation"),
        ({"num_beams": 3, "do_sample": True}, "num_beams"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"do_sample": True, "top_k": -1}, "top_k"),
        ({"do_sample": True, "top_p": 0.0}, "top_p"),
        ({"stop_strings": ["x"], "min_new_tokens": 3}, "stop_strings"),
        ({"max_length": 9}, "max_length"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_named(model: Any, given: dict[str, Any], field: str) -> None:
    config = GenerationConfig()
    for name, value in given.items():  # not through the constructor, which refuses some of them itself
        setattr(config, name, value)
        setattr(model.generation_config, name, value)
    with pytest.raises(hf_paged.InvalidRequestError, match=rf"\b{field}\b"):
        sampling_params_from(GenerationConfig(), model, len(PROMPT))
    model.generation_config = GenerationConfig()
    with pytest.raises(hf_paged.InvalidRequestError, match=rf"\b{field}\b"):
        sampling_params_from(config, model, len(PROMPT))


def test_every_field_is_taken_refused_or_known_to_change_nothing() -> None:
    """A field that a new transformers adds must be looked at before it is ignored."""
    used = {*module._REFUSED, *module._COPIED, *module._SAMPLING}
    used |= {
        "cache_implementation", "do_sample", "early_stopping", "eos_token_id", "length_penalty", "max_length",
        "min_length", "num_beams", "num_return_sequences", "remove_invalid_values", "renormalize_logits",
        "stop_strings",
    }  # fmt: skip
    harmless = {
        "_commit_hash", "_from_model_config", "_mask_length", "assistant_confidence_threshold", "assistant_lookbehind",
        "bos_token_id", "cache_config", "compile_config", "continuous_batching_config", "decoder_start_token_id",
        "disable_compile", "low_memory", "max_cache_len", "max_matching_ngram_size", "max_new_tokens",
        "min_new_tokens", "num_assistant_tokens", "num_assistant_tokens_schedule", "pad_token_id",
        "prefill_chunk_size", "target_lookbehind", "transformers_version", "use_cache",
    }  # fmt: skip
    assert set(vars(GenerationConfig())) - used - harmless == set()
    assert not used & harmless


def test_beams_and_stop_texts(model: Any) -> None:
    config = GenerationConfig(num_beams=4, num_return_sequences=2, length_penalty=0.5, early_stopping="never")
    params = sampling_params_from(config, model, 9)
    assert (params.num_beams, params.n, params.length_penalty, params.early_stopping) == (4, 2, 0.5, "never")
    assert params.greedy
    for stop in ("x", ["x"], ["x", "yz"]):
        params = sampling_params_from(GenerationConfig(stop_strings=stop), model, 9)
        assert params.stop == tuple(stop) and params.include_stop_str_in_output


def test_the_users_config_is_not_touched(model: Any) -> None:
    config, own = GenerationConfig(max_new_tokens=3, do_sample=True), copy.deepcopy(vars(model.generation_config))
    before = copy.deepcopy(vars(config))
    assert isinstance(sampling_params_from(config, model, 9), SamplingParams)
    assert vars(config) == before and vars(model.generation_config) == own


@pytest.mark.model
def test_stop_strings_end_where_generate_ends(smollm2: tuple[Any, Any]) -> None:
    lm, tokenizer = smollm2
    text = "Once upon a time, in a small village by the sea,"
    batch = tokenizer(text, return_tensors="pt")
    width = batch["input_ids"].shape[1]
    whole = tokenizer.decode(lm.generate(**batch, do_sample=False, max_new_tokens=24)[0, width:])
    llm = LLM(lm, tokenizer, num_blocks=32)
    for stop in (whole[20:29], [whole[31:36], "never there"], "never there"):  # the first cross the borders of tokens
        config = GenerationConfig(max_new_tokens=24, stop_strings=stop)
        want = lm.generate(**batch, generation_config=config, tokenizer=tokenizer)[0, width:].tolist()
        output = llm.generate(text, config)[0].outputs[0]
        assert output.token_ids == want
        assert output.finish_reason == ("stop" if len(want) < 24 else "length")
        assert tokenizer.decode(want).startswith(output.text)
