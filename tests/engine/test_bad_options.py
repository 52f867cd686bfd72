"""Options and prompts that cannot work: one clear error each, and the engine serves the next request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import LLM, SamplingParams
from tests import zoo


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
        ({"cache_config": {"memory": "1GiB"}}, "options of their own"),
        ({"attention_backend": "cuda"}, "choose one of: auto"),
        ({"dtype": "bfloat16"}, "is for loading"),
        ({"policy": "sjf"}, "fcfs, lpm, priority"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"memory": "1GiB", "num_blocks": 3}, "not both"),
        ({"memory": "lots"}, "is not a size"),
    ],
)
def test_engine_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf_paged.ConfigError, match=message):
        LLM(
            zoo.build("llama"), **{"block_size": 4, "num_blocks": 24, **options} if "memory" not in options else options
        )


@pytest.mark.parametrize("model", [None, 5, ["demo"]])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(hf_paged.ConfigError, match=type(model).__name__):
        LLM(model)


def test_what_is_no_tokenizer() -> None:
    with pytest.raises(hf_paged.ConfigError, match="tokenizer is wanted, not str"):
        LLM(zoo.build("llama"), "x", num_blocks=24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"stop": 5}, "stop=5"),
        ({"stop": [""]}, "empty text"),
        ({"n": 0}, "n=0"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens=5"),
        ({"logit_bias": {3: 1000}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"seed": "x"}, "seed='x'"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of token ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids="),
        ({"stop_token_ids": [True]}, "stop_token_ids="),
        ({"stop_token_ids": torch.tensor([1.5])}, "stop_token_ids="),
        ({"stop_token_ids": torch.tensor(5)}, "stop_token_ids="),
        ({"stop_token_ids": "5"}, "stop_token_ids='5'"),
        ({"logit_bias": [1]}, "logit_bias=\\[1\\] must be a dict"),
        ({"logit_bias": {1: "a"}}, "logit_bias\\[1\\]='a'"),
        ({"top_h": "a"}, "top_h='a'"),
        ({"allowed_token_ids": 3}, "allowed_token_ids=3"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids="),
        ({"suppress_tokens": ["a"]}, "suppress_tokens="),
        ({"begin_suppress_tokens": 3}, "begin_suppress_tokens=3"),
        ({"bad_words_ids": [5]}, "bad_words_ids=\\[5\\]"),
        ({"bad_words_ids": 5}, "bad_words_ids=5"),
        ({"forced_bos_token_id": "a"}, "forced_bos_token_id='a'"),
        ({"forced_eos_token_id": ["a"]}, "forced_eos_token_id="),
        ({"exponential_decay_length_penalty": (1,)}, "exponential_decay_length_penalty=\\(1,\\)"),
        ({"exponential_decay_length_penalty": 2}, "exponential_decay_length_penalty=2"),
        ({"logits_processors": [5]}, "logits_processors=\\[5\\]"),
        ({"logits_processors": 5}, "logits_processors=5"),
        ({"prefix_allowed_tokens_fn": 7}, "prefix_allowed_tokens_fn=7"),
    ],
)
def test_sampling_params(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf_paged.ConfigError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "ids", [[3, 4], (3, 4), {3, 4}, torch.tensor([3, 4]), range(3, 5)], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens"])
def test_token_ids_come_in_any_collection(name: str, ids: Any) -> None:
    assert getattr(SamplingParams(**{name: ids}), name) == (3, 4)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logits_processors", "stopping_criteria"])
def test_none_is_an_empty_list(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) == ()


def test_a_tensor_of_stop_tokens_ends_a_row() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=24)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    token = llm.generate([3, 4], params)[0].outputs[0].token_ids[2]
    stopped = dataclasses.replace(params, stop_token_ids=torch.tensor([token]))
    assert llm.generate([3, 4], stopped)[0].outputs[0].token_ids[-1] == token
    assert llm.generate([3, 4], stopped)[0].outputs[0].finish_reason == "stop"


def test_prompts_and_params_of_other_kinds() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=24)
    for prompts in (None, 5, [None], [[1.5]], [[True]], {"text": 1}):
        with pytest.raises(hf_paged.InvalidRequestError):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(hf_paged.ConfigError, match="SamplingParams are wanted, not dict"):
        llm.generate([3, 4], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(hf_paged.ConfigError, match="2 sampling_params for 1 prompts"):
        llm.generate([[3, 4]], [SamplingParams(), SamplingParams()])
    assert llm.generate([]) == []
    assert len(llm.generate([3, 4])[0].outputs[0].token_ids) == 16
    output = llm.generate([[3, 4]], SamplingParams(temperature=0, logprobs=1))[0]
    assert output.metrics.first_scheduled_time is not None and output.metrics.finished_time is not None
    llm.core.manager.check_invariants()
    assert llm.core.manager.stats().owned_blocks == 0


def test_a_model_without_a_language_head_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(hf_paged.UnsupportedError, match="a causal LM is wanted"):
        hf_paged.LLM(transformers.AutoModel.from_config(config))
