"""``explain()``: what became of a request, and why."""

from __future__ import annotations

import pytest

import hf_paged
from hf_paged import LLM, SamplingParams
from tests import zoo
from tests.engine.fake import AdmitAll
from tests.engine.test_llm_parity import prompts

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_cached_tokens_and_why_not_more() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=64)
    prompt = prompts()[3]
    why = []
    for tokens, options in [
        (prompt, {}), (prompt, {}), ([*prompt[:9], 1, 2, 3], {}), (prompt, {"salt": "other"}),
        (prompt, {"logprobs": 1}),
    ]:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=options.pop("logprobs", None))
        output = llm.generate([tokens], params, **options)[0]
        (found,) = llm.explain(output.request_id)
        assert (found.status, found.output_tokens, found.blocks) == ("finished", 2, 0)
        assert found.finish_reason == "length"
        assert found.cached_tokens == output.num_cached_tokens and found.queue_time >= 0
        why.append((found.cached_tokens, found.why_not_more))
    assert [cached for cached, _ in why] == [0, len(prompt) - 1, 9, 0, 0]
    for (_, reason), wanted in zip(why, ["token 0", "last token", "token 9", "another salt", "log-prob"], strict=True):
        assert wanted in reason
    cold = LLM(zoo.build("llama"), block_size=4, num_blocks=64, prefix_caching=False)
    assert "off" in cold.explain(cold.generate([prompt], GREEDY)[0].request_id)[0].why_not_more


def test_who_gave_way_to_whom() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=16, max_num_batched_tokens=16)
    llm.core.scheduler.ratio = AdmitAll()
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=10))
    found = {e.request_id: e for output in outputs for e in llm.explain(output.request_id)}
    assert sum(len(e.preemptions) for e in found.values()) == llm.stats()["preemptions"] >= 3
    assert sum(e.evicted_blocks for e in found.values()) <= llm.stats()["evicted_blocks"]
    assert any(e.evicted_blocks for e in found.values())
    for name, explanation in found.items():
        for preemption in explanation.preemptions:
            assert preemption.how == "recompute"
            assert preemption.needed_by == name or name in found[preemption.needed_by].preempted


def test_requests_under_way_and_unknown_ones() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=64, max_num_seqs=1)
    groups = [llm.frontend.add(prompts()[i], SamplingParams(temperature=0, max_tokens=9, n=i + 1)) for i in range(2)]
    llm.frontend.step()
    (running,), waiting = llm.explain("0"), llm.explain("1")
    assert (running.status, running.blocks) == ("running", -(-len(prompts()[0]) // 4))
    assert [w.status for w in waiting] == ["waiting"] * 2 and waiting[0].cached_tokens is None
    assert running.finish_reason is None and waiting[0].finish_reason is None
    for group in groups:
        llm.frontend.drop(group)
    assert {e.finish_reason for e in [*llm.explain("0"), *llm.explain("1")]} == {"abort"}


def test_a_request_that_failed_says_so() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=4, logits_processors=[lambda ids, scores: None])
    output = llm.generate([prompts()[0]], params)[0]
    assert isinstance(output.error, hf_paged.InvalidRequestError)
    assert "returned a NoneType: it has to return scores of shape [1, 97]" in str(output.error)
    assert llm.explain(output.request_id)[0].finish_reason == "error"


def test_unknown_requests() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=64)
    with pytest.raises(hf_paged.InvalidRequestError, match="'7' is not known"):
        llm.explain("7")
