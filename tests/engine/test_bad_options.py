"""Options and prompts that cannot work: one clear error each, and the engine serves the next request."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import LLM, SamplingParams
from hf_paged.sampling.processors import num_scored_tokens
from tests import zoo
from tests.engine.test_llm_parity import alone


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
        ({"best_of": -1}, "best_of=-1"),
        ({"max_tokens": -1}, "max_tokens=-1 must be an int of at least 0, or None"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"logprobs": -2}, "logprobs=-2 must be an int of at least 0, -1 for the whole vocabulary, or None"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs='all'"),
        ({"num_beams": 2, "temperature": 0, "max_tokens": 0, "echo": True}, "max_tokens=0"),
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
    ("name", "meant"),
    [
        ("max_token", "; did you mean 'max_tokens'?"),
        ("max_new_tokens", "; did you mean 'max_tokens'?"),
        ("bad_words", "; did you mean 'bad_words_ids'?"),
        ("eos_token_id", "; did you mean 'stop_token_ids'?"),
        ("num_return_sequences", "; did you mean 'n'?"),
        ("do_sample", "; did you mean 'temperature'?"),
        ("xyz", ". Known options: n, best_of, "),
    ],
)
@pytest.mark.parametrize("kind", [TypeError, hf_paged.ConfigError, hf_paged.UnknownOptionError])
def test_a_name_that_is_no_option(name: str, meant: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=re.escape(f"unknown option {name!r} of SamplingParams{meant}")):
        SamplingParams(**{name: 1})
    with pytest.raises(kind, match=re.escape(f"unknown option {name!r}")):
        dataclasses.replace(SamplingParams(), **{name: 1})


def test_options_are_still_a_dataclass() -> None:
    params = SamplingParams(1, temperature=0, stop="x")
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in dataclasses.fields(SamplingParams)]
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(TypeError, match="multiple values"):
        SamplingParams(1, n=2)


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


OUTSIDE = zoo.VOCAB + 3
#: options that name a token the model does not score, and at which stock generate() fails sooner or later
FAILING: list[tuple[str, dict[str, Any]]] = [
    ("bad_words_ids", {"bad_words_ids": [[5], [7, OUTSIDE]]}),
    ("sequence_bias", {"sequence_bias": {(OUTSIDE,): 1.0}}),
    ("forced_bos_token_id", {"forced_bos_token_id": OUTSIDE}),
    ("forced_eos_token_id", {"forced_eos_token_id": [5, OUTSIDE]}),
    ("stop_token_ids", {"exponential_decay_length_penalty": (0, 1.1), "eos_token_id": [2, OUTSIDE]}),
]
#: and such that it passes over
PASSED_OVER: list[dict[str, Any]] = [
    {"suppress_tokens": [OUTSIDE, 5, 31]},
    {"begin_suppress_tokens": [OUTSIDE, 5]},
    {"eos_token_id": [2, OUTSIDE]},
    {"min_new_tokens": 4, "eos_token_id": [2, OUTSIDE]},
    {"bad_words_ids": [[2]], "forced_eos_token_id": 4},
]


def ours(options: dict[str, Any], new: int) -> SamplingParams:
    """Options of generate() as SamplingParams."""
    options = {"min_tokens": options.get("min_new_tokens", 0), **options}
    options.pop("min_new_tokens", None)
    ends = options.pop("eos_token_id", ())
    return SamplingParams(temperature=0, max_tokens=new, stop_token_ids=ends, **options)


@pytest.mark.parametrize(("name", "options"), FAILING)
@pytest.mark.parametrize("spelling", ["SamplingParams", "GenerationConfig", "beams"])
def test_ids_outside_the_vocabulary_are_refused_before_anything_runs(
    name: str, options: dict[str, Any], spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = zoo.build("llama"), [3]
    with pytest.raises((IndexError, ValueError)):
        alone(model, prompt, **options, max_new_tokens=4)
    llm = LLM(model, block_size=4, num_blocks=24)
    monkeypatch.setattr(llm.core.runner, "run", None)
    params: Any = ours(options, 4)
    if spelling == "GenerationConfig":
        params = transformers.GenerationConfig(**options, max_new_tokens=4)
    elif spelling == "beams":
        params = dataclasses.replace(params, num_beams=2)
    with pytest.raises(hf_paged.InvalidRequestError, match=rf"{name}.*\[{OUTSIDE}\].*0\.\.{zoo.VOCAB - 1}"):
        llm.generate([[3, 4], prompt], [SamplingParams(), params])
    assert not llm.frontend.groups and not llm.core.has_work


@pytest.mark.parametrize(
    "options", [{"logit_bias": {OUTSIDE: 1.0}}, {"logit_bias": {-1: 1.0}}, {"allowed_token_ids": [5, OUTSIDE]}]
)
def test_ids_outside_the_vocabulary_in_options_of_our_own(options: dict[str, Any]) -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=24)
    with pytest.raises(hf_paged.InvalidRequestError, match=rf"{next(iter(options))}.*0\.\.{zoo.VOCAB - 1}"):
        llm.generate([3, 4], SamplingParams(**options))
    assert not llm.frontend.groups


@pytest.mark.parametrize("options", PASSED_OVER)
def test_ids_outside_the_vocabulary_that_stock_passes_over(options: dict[str, Any]) -> None:
    model, prompt = zoo.build("llama"), [3, 4]
    want = alone(model, prompt, **options, max_new_tokens=8)
    llm = LLM(model, block_size=4, num_blocks=24)
    assert llm.generate(prompt, ours(options, 8))[0].outputs[0].token_ids == want
    # which takes no part in it, unlike where the prompt is that one token
    forced = SamplingParams(temperature=0, max_tokens=8, forced_bos_token_id=OUTSIDE)
    stock = alone(model, prompt, forced_bos_token_id=OUTSIDE, max_new_tokens=8)
    assert llm.generate(prompt, forced)[0].outputs[0].token_ids == stock


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma3n", "mamba2", "deepseek_v3"])
def test_how_many_tokens_a_model_scores(name: str) -> None:
    model = zoo.build(name)
    assert num_scored_tokens(model) == model(input_ids=torch.tensor([[3, 4]])).logits.shape[-1]


def test_until_there_is_no_more_room() -> None:
    """vLLM's ``max_tokens=None``."""
    model, prompt = zoo.build("llama"), [3, 4, 5]
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    llm = LLM(model, block_size=4, num_blocks=80)
    want = alone(model, prompt, max_new_tokens=253, eos_token_id=None)
    output = llm.generate(prompt, endless)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (want, "length")
    assert llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None))[0].outputs[0].token_ids == alone(
        model, prompt, max_new_tokens=253
    )
    with pytest.raises(hf_paged.InvalidRequestError, match="max_model_len=256"):
        llm.generate([5] * 256, endless)
    small = LLM(model, block_size=4, num_blocks=80, max_model_len=20)
    assert small.generate(prompt, endless)[0].outputs[0].token_ids == want[:17]
    beams = SamplingParams(temperature=0, num_beams=3, max_tokens=None)
    assert small.generate(prompt, beams)[0].outputs[0].token_ids == alone(model, prompt, num_beams=3, max_new_tokens=17)
    with pytest.raises(hf_paged.InvalidRequestError, match=r"min_tokens=18 .* max_model_len=20 .* prompt of 3"):
        small.generate(prompt, SamplingParams(max_tokens=None, min_tokens=18))
    nowhere = LLM(zoo.build("bloom"), block_size=4, num_blocks=80)
    with pytest.raises(hf_paged.InvalidRequestError, match="give max_tokens, or LLM"):
        nowhere.generate(prompt, endless)


def test_logprobs_of_the_whole_vocabulary() -> None:
    """vLLM's ``logprobs=-1`` and ``prompt_logprobs=-1``."""
    model, prompt = zoo.build("llama"), [3, 4, 5, 9, 8]
    llm = LLM(model, block_size=4, num_blocks=80)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    output = llm.generate(prompt, params)[0]
    tokens = [*prompt, *output.outputs[0].token_ids]
    with torch.no_grad():
        want = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(found) == len(tokens) - 1
    for row, scores in zip(found, want, strict=False):
        assert sorted(row) == list(range(zoo.VOCAB))
        got = torch.tensor([row[token].logprob for token in range(zoo.VOCAB)])
        torch.testing.assert_close(got, scores, rtol=1e-4, atol=1e-4)
        assert sorted(logprob.rank for logprob in row.values()) == list(range(1, zoo.VOCAB + 1))


def test_a_model_without_a_language_head_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(hf_paged.UnsupportedError, match="a causal LM is wanted"):
        hf_paged.LLM(transformers.AutoModel.from_config(config))
