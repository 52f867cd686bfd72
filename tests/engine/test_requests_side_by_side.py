"""Requests, streams and threads that must not notice each other."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import LLM, AsyncLLM, SamplingParams
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.engine_helpers import tokenizer_of
from tests.regressions.helpers import ids, paged, registered, stock

ROOMY: dict[str, Any] = {"block_size": 4, "num_blocks": 200}


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_scored_prompt_does_not_cost_the_only_token(overlap: bool) -> None:
    model, prompt = zoo.build("llama"), prompts()[2]
    want = alone(model, prompt, max_new_tokens=1)
    llm = LLM(model, **ROOMY, overlap=overlap)
    output = llm.generate([prompt], greedy(1, prompt_logprobs=1, n=2))[0]
    assert [c.token_ids for c in output.outputs] == [want, want]
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    echoed = llm.generate([prompt], greedy(1, echo=True, logprobs=1))[0].outputs[0]
    assert echoed.token_ids == [*prompt, *want] and len(echoed.logprobs or []) == len(prompt) + 1
    check_clean(llm)


def test_two_streams_step_one_engine() -> None:
    model = zoo.build("llama")
    llm = LLM(model, **ROOMY)
    first, second = llm.stream(prompts()[2], greedy(4)), llm.stream(prompts()[3], greedy(10))
    begun = next(first)
    assert list(second)[-1].outputs[0].token_ids == alone(model, prompts()[3], max_new_tokens=10)
    rest = list(first)
    assert rest[-1].finished and rest[-1].outputs[0].token_ids == alone(model, prompts()[2], max_new_tokens=4)
    assert len(begun.outputs[0].token_ids) == 1, "what was yielded does not change any more"
    check_clean(llm)


def test_threads_share_one_llm() -> None:
    model, got = zoo.build("llama"), dict[int, Any]()
    llm = LLM(model, **ROOMY)

    def work(i: int) -> None:
        got[i] = [o.outputs[0].token_ids for o in llm.generate(prompts()[i : i + 3], greedy(10), use_tqdm=False)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: [alone(model, p) for p in prompts()[i : i + 3]] for i in range(4)}
    check_clean(llm)


def test_paged_calls_in_threads_wait_for_each_others_blocks() -> None:
    model = zoo.build("llama")
    batch = [ids(1, 30, seed=i) for i in range(4)]
    want = [stock(model, p, max_new_tokens=40) for p in batch]
    got: dict[int, Any] = {}
    with registered(memory=None, num_blocks=20, prefix_caching=False):
        paged(model, batch[0], max_new_tokens=2)

        def work(i: int) -> None:
            try:
                got[i] = paged(model, batch[i], max_new_tokens=40)
            except hf_paged.HfPagedError as error:
                got[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(4):
        assert isinstance(got[i], torch.Tensor), got[i]
        assert torch.equal(got[i], want[i])


def test_calls_that_wait_for_nobody_fail_instead_of_waiting() -> None:
    """Blocks that a user's own cache keeps do not come back, however many calls there are."""
    model, errors = zoo.build("llama"), list[Exception]()
    with registered(memory=None, num_blocks=20, prefix_caching=False):
        kept = paged(model, ids(1, 50), max_new_tokens=4, return_dict_in_generate=True)

        def work(i: int) -> None:
            try:
                paged(model, ids(1, 30, seed=i), max_new_tokens=20)
            except hf_paged.OutOfBlocksError as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"
        assert len(errors) == 3
        del kept


@pytest.mark.parametrize(
    "criterion",
    [lambda tokens, scores: 1 / 0, lambda tokens, scores: None, lambda tokens, scores: torch.ones(3)],
    ids=["raises", "nothing", "another shape"],
)
def test_a_beam_search_that_fails_ends_alone(criterion: Any) -> None:
    model = zoo.build("llama")
    llm = LLM(model, **ROOMY)
    bad = greedy(6, num_beams=2, stopping_criteria=[criterion])
    outputs = llm.generate([prompts()[2], prompts()[3]], [bad, greedy(6)])
    assert outputs[0].error is not None and outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == alone(model, prompts()[3], max_new_tokens=6)
    check_clean(llm)


@pytest.mark.parametrize(
    "bad", [{"salt": ["x"]}, {"priority": "high"}, {"priority": float("nan")}, {"request_id": ["x"]}], ids=str
)
def test_what_a_client_hands_over_cannot_end_the_loop(bad: dict[str, Any]) -> None:
    model = zoo.build("llama")

    async def work() -> Any:
        async with AsyncLLM(model, **ROOMY, policy="priority") as llm:

            async def good() -> Any:
                return [o async for o in llm.generate(prompts()[3], greedy(8))][-1]

            neighbour = asyncio.create_task(good())
            with pytest.raises(hf_paged.InvalidRequestError, match=next(iter(bad))):
                async for _ in llm.generate(prompts()[2], greedy(4), **bad):
                    pass
            with pytest.raises(hf_paged.InvalidRequestError, match="one by one"):
                await llm.abort(["a", "b"])  # type: ignore[arg-type]
            return (await neighbour).outputs[0].token_ids, (await good()).outputs[0].token_ids

    want = alone(model, prompts()[3], max_new_tokens=8)
    assert asyncio.run(work()) == (want, want)


@pytest.mark.parametrize("said", [False, True])
def test_weights_that_change_in_a_pause_are_used_from_then_on(said: bool) -> None:
    model, prompt = zoo.fresh("llama"), prompts()[3]

    async def work() -> list[int]:
        async with AsyncLLM(model, **ROOMY) as llm:
            stream = llm.generate(prompt, greedy(12))
            assert not (await anext(stream)).finished
            llm.pause()
            begun = list(next(iter(llm._llm.frontend.groups.values())).output.outputs[0].token_ids)
            with torch.no_grad():
                for p in model.parameters():
                    p.data.mul_(-1.3)
            if said:
                llm.weights_changed()
            llm.resume()
            async for output in stream:
                last = output.outputs[0].token_ids
            assert last[: len(begun)] == begun
            want = alone(model, [*prompt, *begun], max_new_tokens=12 - len(begun))
            assert last[len(begun) :] == want
            return last

    assert len(asyncio.run(work())) == 12


def test_beams_cut_by_the_longest_length_say_so() -> None:
    llm = LLM(zoo.build("llama"), **ROOMY, max_model_len=10)
    found = llm.generate([[5, 6, 7]], greedy(30, num_beams=2))[0].outputs[0]
    assert (len(found.token_ids), found.finish_reason) == (7, "length")


def test_chat_messages_are_a_prompt_like_others() -> None:
    tokenizer, model = tokenizer_of(bos=True), zoo.build("llama")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    llm = LLM(model, tokenizer, **ROOMY)
    conversation = [{"role": "user", "content": "abc"}]
    want = llm.chat(conversation, greedy(4))[0]
    alone_, mixed = llm.generate(conversation, greedy(4)), llm.generate([conversation, "abc", [5, 6]], greedy(4))
    assert [o.prompt_token_ids for o in alone_] == [want.prompt_token_ids]
    assert mixed[0].outputs[0].token_ids == alone_[0].outputs[0].token_ids == want.outputs[0].token_ids
    assert mixed[2].prompt_token_ids == [5, 6]
