"""Cases 13, 25 and 40: what is reported about tokens, those of the prompt among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

import hf_paged
from hf_paged import LLM, SamplingParams
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.engine_helpers import says, tokenizer_of
from tests.regressions.helpers import ids

BS = 4
ROOMY: dict[str, Any] = {"block_size": BS, "num_blocks": 64}


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return ids(1, length, seed=seed)[0].tolist()


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of a fresh forward; row i is about token i + 1."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def same(found: dict[int, Any], want: torch.Tensor, token: int, count: int) -> None:
    """``found`` are the ``count`` best of ``want`` (log-probabilities) and ``token``, with their ranks."""
    best = {t for t in want.topk(count).indices.tolist() if want[t] > float("-inf")} if count else set()
    assert set(found) == best | {token}
    for t, logprob in found.items():
        assert logprob.logprob == pytest.approx(float(want[t]), abs=1e-4)
        assert logprob.rank == int((want > want[t]).sum()) + 1


# -- case 40 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("count", [0, 3, 8])
def test_logprobs_are_those_that_were_asked_for(mode: str, count: int) -> None:
    """Case 40: log-probabilities after temperature and top_k were reported where those of the model were needed.

    https://github.com/huggingface/trl/pull/5765
    """
    model = zoo.build("llama")
    llm = LLM(model, **ROOMY)
    params = SamplingParams(temperature=0.7, top_k=5, seed=3, max_tokens=8, logprobs=count, logprobs_mode=mode)
    others = [SamplingParams(temperature=1.3, seed=i, max_tokens=9, logprobs=1) for i in range(3)]
    output = llm.generate([prompt(9), *prompts()[:3]], [params, *others])[0].outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 8
    rows = logits_of(model, [*prompt(9), *output.token_ids])[8:]
    total = 0.0
    for i, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        scores = rows[i][None]
        if mode == "processed":
            scores = TopKLogitsWarper(5)(None, TemperatureLogitsWarper(0.7)(None, scores))  # type: ignore[arg-type]
            assert len(found) <= 5, "nobody outside of the top 5 has a probability"
        same(found, scores[0].log_softmax(-1), token, count)
        total += found[token].logprob
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_the_model_s_own_logprobs_are_the_default() -> None:
    """Case 40: without a mode, what is reported does not depend on how tokens are sampled.

    https://github.com/huggingface/trl/pull/5765
    """
    model = zoo.build("llama")
    for options in ({}, {"temperature": 0}, {"temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.5}):
        params = SamplingParams(max_tokens=1, logprobs=4, seed=1, **options)
        output = LLM(model, **ROOMY).generate(prompt(9), params)[0].outputs[0]
        same(output.logprobs[0], logits_of(model, prompt(9))[-1].log_softmax(-1), output.token_ids[0], 4)
    with pytest.raises(hf_paged.ConfigError, match="logprobs_mode"):
        SamplingParams(logprobs_mode="scaled")


# -- case 13 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 8, 9])
@pytest.mark.parametrize("budget", [64, 3])
def test_logprobs_of_a_cached_prompt_are_those_of_a_new_one(length: int, budget: int) -> None:
    """Case 13: with the prompt cached, its log-probabilities were missing, or whatever was in memory.

    https://github.com/vllm-project/vllm/issues/3251, https://github.com/vllm-project/vllm/issues/8268,
    https://github.com/vllm-project/vllm/pull/42245
    """
    model, tokens = zoo.build("llama"), prompt(length)
    llm = LLM(model, **ROOMY, max_num_batched_tokens=budget)
    want = logits_of(model, tokens).log_softmax(-1)
    llm.generate(tokens, greedy(4))
    for _ in range(2):
        output = llm.generate(tokens, greedy(4, prompt_logprobs=1))[0]
        assert output.outputs[0].token_ids == alone(model, tokens, max_new_tokens=4)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == length
        assert output.prompt_logprobs[0] is None, "nothing comes before the first token"
        for i, found in enumerate(output.prompt_logprobs[1:]):
            same(found, want[i], tokens[i + 1], 1)
    check_clean(llm)


def test_a_prompt_with_logprobs_is_kept_for_others() -> None:
    """Case 13: a request that may not read the cache still writes it.

    https://github.com/vllm-project/vllm/issues/3914
    """
    model, tokens = zoo.build("llama"), prompt(9)
    llm = LLM(model, **ROOMY)
    assert llm.generate(tokens, greedy(2, prompt_logprobs=0))[0].num_cached_tokens == 0
    output = llm.generate([*tokens, 5], greedy(2))[0]
    assert output.num_cached_tokens == 9
    assert output.outputs[0].token_ids == alone(model, [*tokens, 5], max_new_tokens=2)


def test_prompt_logprobs_in_a_batch_and_under_pressure() -> None:
    """Case 13: rows beside it, chunks, siblings and preemptions change no value.

    https://github.com/vllm-project/vllm/issues/8268
    """
    model, batch = zoo.build("llama"), prompts()[:8]
    llm = LLM(model, block_size=BS, num_blocks=20, max_num_batched_tokens=8)
    llm.core.scheduler.ratio.value = llm.core.scheduler.ratio.LEAST
    params = [greedy(16, prompt_logprobs=2, n=1 + i % 2) if i % 3 else greedy(16) for i in range(8)]
    outputs = llm.generate(batch, params)
    assert llm.stats()["preemptions"] > 0
    for i, (tokens, output) in enumerate(zip(batch, outputs, strict=True)):
        assert output.outputs[0].token_ids == alone(model, tokens, max_new_tokens=16)
        if i % 3 == 0:
            assert output.prompt_logprobs is None
            continue
        want = logits_of(model, tokens).log_softmax(-1)
        for at, found in enumerate(output.prompt_logprobs[1:]):
            same(found, want[at], tokens[at + 1], 2)
    check_clean(llm)


# -- case 25 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("cached", [False, True])
def test_no_tokens_at_all_gives_the_prompt_and_its_logprobs(length: int, cached: bool) -> None:
    """Case 25: ``max_tokens=0`` with ``echo`` crashed, or sampled a token and a block for it.

    https://github.com/vllm-project/vllm/issues/9336, https://github.com/vllm-project/vllm/issues/10432
    """
    model, tokenizer = zoo.build("llama"), tokenizer_of()
    text = "abcdefgh"[:length]
    tokens = tokenizer(text)["input_ids"]
    llm = LLM(model, tokenizer, block_size=BS, num_blocks=-(-length // BS))  # not one block more than the prompt
    if cached:
        llm.generate(text, greedy(1))
    before = llm.stats()["computed_tokens"]
    output = llm.generate(text, greedy(0, echo=True, prompt_logprobs=1, logprobs=1))[0]
    assert output.error is None and output.finished
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == (text, "length")
    assert completion.token_ids in ([], tokens), "nothing was sampled"
    assert llm.stats()["computed_tokens"] - before <= length
    want = logits_of(model, tokens).log_softmax(-1)
    assert len(output.prompt_logprobs) == length and output.prompt_logprobs[0] is None
    for i, found in enumerate(output.prompt_logprobs[1:]):
        same(found, want[i], tokens[i + 1], 1)
    check_clean(llm)


def test_an_echo_comes_before_the_output() -> None:
    """Case 25: ``echo`` with tokens to follow, beside a request without it.

    https://github.com/vllm-project/vllm/issues/6521
    """
    llm = LLM(zoo.build("llama"), tokenizer_of(), **ROOMY)
    with_echo, without = llm.generate(["abc", "abc"], [greedy(6, echo=True), greedy(6)])
    assert with_echo.outputs[0].text == "abc" + without.outputs[0].text
    assert with_echo.outputs[0].finish_reason == without.outputs[0].finish_reason == "length"


def test_no_tokens_and_nothing_else_asked_for_is_refused() -> None:
    """Case 25: a request for nothing is an error where it is made, not an empty answer.

    https://github.com/vllm-project/vllm-metal/issues/680
    """
    with pytest.raises(hf_paged.ConfigError, match="max_tokens=0 asks for nothing"):
        SamplingParams(max_tokens=0)


def test_the_text_of_an_alternative_is_its_part_of_the_text() -> None:
    """A tokenizer that tidies up spaces did so in each token, and pieces did not add up to the text any more."""
    tokenizer = tokenizer_of(["abc", " ."])
    tokenizer.clean_up_tokenization_spaces = True
    llm = LLM(zoo.build("llama"), tokenizer, block_size=4, num_blocks=24)
    output = llm.generate([5, 6], says(tokenizer, ["abc", " .", "abc"], 2, logprobs=1))[0].outputs[0]
    pieces = [row[token].decoded_token for token, row in zip(output.token_ids, output.logprobs, strict=True)]
    assert pieces == ["abc", " .", "abc"] and "".join(pieces) == output.text
    check_clean(llm)
