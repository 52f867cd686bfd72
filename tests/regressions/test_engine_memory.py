"""Cases 19, 20, 21 and 28: requests that give way and come back, and slots that belong to nobody."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hf_paged import LLM, SamplingParams
from hf_paged.engine.invariants import check_books
from hf_paged.engine.request import Status
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.engine.test_scheduler import POLICIES
from tests.regressions.engine_helpers import says, stepped, tokenizer_of
from tests.regressions.helpers import ids

BS = 4
#: every way to give way, with steps one after the other and overlapping
WAYS = [
    pytest.param({"preemption": how, "overlap": overlap, **more}, id=f"{how}{' overlap' * overlap}")
    for how, more in (("recompute", {}), ("swap", {"host_memory": "1MiB"}))
    for overlap in (False, True)
]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return ids(1, length, seed=seed)[0].tolist()


def admits_too_many(llm: LLM) -> LLM:
    """The engine's own caution would avoid most preemptions; here they are wanted."""
    llm.core.scheduler.ratio.value = llm.core.scheduler.ratio.LEAST
    return llm


# -- case 19 -----------------------------------------------------------------------------------------------------------

STATEFUL: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 1.5, "logprobs": 3},
    "sampling": {"logprobs": 1},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "encoder_repetition_penalty": {"temperature": 0, "encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, zoo.VOCAB, 2))},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", STATEFUL.values(), ids=STATEFUL)
def test_a_request_that_gave_way_goes_on_where_it_was(options: dict[str, Any], way: dict[str, Any]) -> None:
    """Case 19: after a preemption the output so far counted as prompt: penalties, minimal lengths, the random numbers
    and the text began anew.

    https://github.com/vllm-project/vllm/pull/5349, https://github.com/vllm-project/vllm/issues/16832,
    https://github.com/vllm-project/vllm/issues/11805
    """
    model, batch = zoo.build("llama"), [prompt(6, seed) for seed in range(4)]
    params = SamplingParams(seed=5, max_tokens=24, **options)
    calm = LLM(model, block_size=BS, num_blocks=200).generate(batch, params)
    llm = admits_too_many(LLM(model, block_size=BS, num_blocks=14, max_num_batched_tokens=16, **way))
    lengths: list[int] = []
    preempt = llm.core.scheduler._preempt

    def preempt_and_tell(request: Any, *args: Any) -> None:
        lengths.append(request.num_output)
        preempt(request, *args)

    llm.core.scheduler._preempt = preempt_and_tell  # type: ignore[method-assign]
    pressed = llm.generate(batch, params)
    assert max(lengths) >= 6, "somebody must give way in the middle of its output"
    for a, b in zip(calm, pressed, strict=True):
        assert (b.outputs[0].token_ids, b.outputs[0].finish_reason) == (
            a.outputs[0].token_ids,
            a.outputs[0].finish_reason,
        )
        assert b.num_cached_tokens == a.num_cached_tokens, "what it finds again of its own is no hit"
        if a.outputs[0].logprobs is not None:
            assert b.outputs[0].cumulative_logprob == pytest.approx(a.outputs[0].cumulative_logprob, abs=1e-3)
            assert [x.keys() for x in a.outputs[0].logprobs] == [x.keys() for x in b.outputs[0].logprobs]
    assert sum(o.metrics.num_preemptions for o in pressed) == len(lengths)
    assert llm.stats()["swaps"] == (len(lengths) if way["preemption"] == "swap" else 0)
    check_clean(llm)


@pytest.mark.parametrize("way", WAYS)
def test_the_text_of_a_request_that_gave_way_goes_on(way: dict[str, Any]) -> None:
    """Case 19, for text: a stop text that began before the preemption ends the request after it, and nothing is said
    twice.

    https://github.com/vllm-project/vllm/issues/16832
    """
    tokenizer = tokenizer_of()
    llm = admits_too_many(LLM(zoo.build("llama"), tokenizer, block_size=BS, num_blocks=9, **way))
    words = ["the quick brown fox!!", "a lazy dog and no cat", "jumped over some wall"]
    stops = ["brown fox", "and no", "over some"]
    params = [says(tokenizer, list(w), 5, stop=s) for w, s in zip(words, stops, strict=True)]
    outputs = llm.generate([prompt(5, seed) for seed in range(3)], params)
    assert [o.outputs[0].text for o in outputs] == [w[: w.index(s)] for w, s in zip(words, stops, strict=True)]
    assert [o.outputs[0].stop_reason for o in outputs] == stops
    assert llm.stats()["preemptions"] >= 2
    check_clean(llm)


# -- case 20 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_long_requests_do_not_push_each_other_out_for_ever(policy: str, way: dict[str, Any]) -> None:
    """Case 20: a resumed request was let in with its first chunk only and had to give way again at the next step.

    https://github.com/vllm-project/vllm/issues/25538, https://github.com/vllm-project/vllm/issues/41951
    """
    model, batch = zoo.build("llama"), [prompt(30, seed) for seed in range(3)]
    # each needs 18 blocks in the end, all of them 54
    llm = LLM(model, block_size=BS, num_blocks=24, max_num_batched_tokens=8, policy=policy, **way)
    scheduler = admits_too_many(llm).core.scheduler
    outputs_when_preempted: dict[str, list[int]] = {}
    admitted: list[bool] = []
    preempt, admit = scheduler._preempt, scheduler._admit

    def preempt_and_tell(request: Any, *args: Any) -> None:
        outputs_when_preempted.setdefault(request.request_id, []).append(request.num_tokens)
        preempt(request, *args)

    def admit_and_look(request: Any, *args: Any) -> bool:
        found: bool = admit(request, *args)
        if found and request.status is Status.RUNNING and request.preemptions:
            # what is still to be recomputed fits as it is, without anybody else giving way
            admitted.append(
                scheduler.manager.can_append([request.table], [request.num_tokens - request.table.num_tokens])
            )
        return found

    scheduler._preempt, scheduler._admit = preempt_and_tell, admit_and_look  # type: ignore[method-assign]
    outputs = llm.generate(batch, greedy(40))
    assert [o.outputs[0].token_ids for o in outputs] == [alone(model, p, max_new_tokens=40) for p in batch]
    assert admitted and all(admitted)
    for lengths in outputs_when_preempted.values():
        assert lengths == sorted(set(lengths)), "a request gave way twice without progress in between"
    assert sum(map(len, outputs_when_preempted.values())) <= 6
    # whatever was computed twice, it is a fraction of the work
    needed = sum(len(o.prompt_token_ids) + 39 for o in outputs)
    assert llm.stats()["computed_tokens"] < 2.5 * needed
    check_clean(llm)


# -- case 21 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS[1::2])
def test_blocks_of_steps_under_way_are_given_back_once(way: dict[str, Any]) -> None:
    """Case 21: with overlapping steps and a full pool, a request that ended or gave way while a step ran was freed
    twice, or its blocks went to another before that step was done.

    https://github.com/sgl-project/sglang/issues/14972, https://github.com/sgl-project/sglang-jax/pull/994
    """
    model, batch = zoo.build("llama"), [*prompts(), *prompts()[::-1]]
    lengths = [6 + (7 * i) % 29 for i in range(len(batch))]  # ends by length come at every step
    llm = admits_too_many(LLM(model, block_size=BS, num_blocks=24, max_num_batched_tokens=16, **way))
    llm.core.scheduler.ratio.preempted = lambda _: None  # type: ignore[method-assign]  # and learns nothing from it
    step = llm.core.step

    def step_and_check() -> Any:
        events = step()
        check_books(llm.core.scheduler)  # while the next step is under way
        return events

    llm.core.step = step_and_check  # type: ignore[method-assign]
    outputs = llm.generate(batch, [greedy(n) for n in lengths])
    want = [alone(model, p, max_new_tokens=n) for p, n in zip(batch, lengths, strict=True)]
    assert [o.outputs[0].token_ids for o in outputs] == want
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * len(batch)
    assert llm.stats()["preemptions"] >= 3
    assert llm.stats()["num_tables"] == 0
    check_clean(llm)


@pytest.mark.parametrize("way", WAYS[1::2])
def test_the_token_after_the_end_is_seen_by_nobody(way: dict[str, Any]) -> None:
    """Case 21: the end of a sequence is learned when the next step has been planned; what that step computes for it
    is neither given to the caller nor stored for others.

    https://github.com/sgl-project/sglang/issues/14972
    """
    model, batch = zoo.build("llama"), prompts()[:6]
    whole = [alone(model, p, max_new_tokens=20) for p in batch]
    stops = [w[3 + i] for i, w in enumerate(whole)]
    llm = LLM(model, block_size=BS, num_blocks=60, **way)
    outputs = llm.generate(batch, [greedy(20, stop_token_ids=[s]) for s in stops])
    ends = [w[: w.index(s) + 1] for w, s in zip(whole, stops, strict=True)]
    assert [o.outputs[0].token_ids for o in outputs] == ends
    assert all(o.outputs[0].finish_reason == "stop" for o in outputs)
    for p, end in zip(batch, ends, strict=True):
        turn = [*p, *end, 5]
        found = llm.generate([turn], greedy(4))[0]
        assert found.outputs[0].token_ids == alone(model, turn, max_new_tokens=4)
        assert found.num_cached_tokens == len(turn) - 2, "the last token was never run; what came before it was"
    check_clean(llm)


def test_steps_overlap_where_they_are_asked_to() -> None:
    """Case 21, for the tests above: with ``overlap`` the model runs in a thread of its own, without it in ours."""
    for overlap in (True, False):
        model, gate = stepped()
        LLM(model, block_size=BS, num_blocks=60, overlap=overlap).generate(prompts()[:2], greedy(4))
        assert (gate.last_thread != threading.get_ident()) is overlap


# -- case 28 -----------------------------------------------------------------------------------------------------------


def _tensors(llm: LLM) -> list[torch.Tensor]:
    return [t for kv in llm.core.runner.pool.layers.values() for t in (kv.k, kv.v) if t.numel()]


def _poison(llm: LLM) -> None:
    """NaN in every slot of every block."""
    for tensor in _tensors(llm):
        tensor.fill_(float("nan"))


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "falcon", "bloom", "mpt"])
@pytest.mark.parametrize("backend", ["auto", "torch", "gather"])
def test_padding_reads_and_writes_nobodys_slots(name: str, backend: str) -> None:
    """Case 28: padding rows wrote to slot -1, which is the last slot of the pool, or read blocks of others.

    https://github.com/vllm-project/vllm/pull/43869, https://github.com/InternLM/lmdeploy/pull/4569
    """
    model, batch = zoo.build(name), [prompts()[i] for i in (0, 5, 2)]  # three rows of different lengths
    llm = LLM(model, block_size=BS, num_blocks=40, attention_backend=backend)
    _poison(llm)
    outputs = llm.generate(batch, greedy(8))
    assert [o.outputs[0].token_ids for o in outputs] == [alone(model, p, max_new_tokens=8) for p in batch]
    used = sum(-(-(len(p) + 7) // BS) for p in batch)
    untouched = 40 - used  # blocks with low numbers are handed out first
    for tensor in _tensors(llm):
        blocks = tensor.reshape(41, -1)
        assert bool(blocks[0].isnan().all()), "something was written to the null block"
        assert bool(blocks[41 - untouched :].isnan().all()), "something was written to a block that nobody had"
    check_clean(llm)


def test_the_null_block_is_never_handed_out() -> None:
    """Case 28: the target of padding is reserved from the first day, not taken when the pool is already full.

    https://github.com/NVIDIA/TensorRT-LLM/pull/16072
    """
    model = zoo.build("llama")
    llm = LLM(model, block_size=BS, num_blocks=8)
    _poison(llm)
    stream = llm.stream(prompt(29), greedy(3))
    next(stream)
    assert llm.stats()["owned_blocks"] == 8 and llm.stats()["free_blocks"] == 0
    assert 0 not in llm.core.scheduler.running[0].table.blocks  # type: ignore[union-attr]
    stream.close()
    assert all(bool(t.reshape(9, -1)[0].isnan().all()) for t in _tensors(llm))
    check_clean(llm)
