"""The engine under asyncio: many requests, aborts at any time, a loop that dies, weights that change in a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import AsyncLLM, SamplingParams
from tests import zoo
from tests.engine.test_llm_parity import alone, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=10)
OPTIONS = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 16}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=120))


async def last(llm: AsyncLLM, prompt: Any, params: Any = GREEDY, **options: Any) -> Any:
    return [output async for output in llm.generate(prompt, params, **options)][-1]


def clean(llm: AsyncLLM) -> None:
    llm._llm.core.manager.check_invariants()
    assert llm._llm.core.manager.stats().owned_blocks == 0
    assert not llm._llm.frontend.groups and not llm._loop._submissions


def test_many_at_once_get_what_each_gets_alone() -> None:
    model = zoo.build("llama")
    want = [alone(model, p) for p in prompts()]

    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            outputs = await asyncio.gather(*(last(llm, p) for p in prompts()))
            assert [o.outputs[0].token_ids for o in outputs] == want
            clean(llm)

    run(work())


@pytest.mark.parametrize("seen", [0, 1, 4])
@pytest.mark.parametrize("how", ["abort", "leave", "cancel"])
def test_a_request_can_be_ended_at_any_time_and_the_others_go_on(seen: int, how: str) -> None:
    model, others = zoo.build("llama"), prompts()[:4]
    want = [alone(model, p) for p in others]

    async def victim(llm: AsyncLLM) -> Any:
        seen_outputs: list[Any] = []
        if how == "abort" and seen == 0:
            await llm.abort("victim")  # not there yet: no error
        params = SamplingParams(temperature=0, max_tokens=80)
        async for output in llm.generate([9, 8, 7], params, request_id="victim"):
            seen_outputs.append(output)
            if len(seen_outputs) > seen:
                if how == "abort":
                    await llm.abort("victim")
                    await llm.abort("victim")
                elif how == "leave":
                    break
                else:
                    await asyncio.sleep(60)
        return seen_outputs[-1]

    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            task = asyncio.create_task(victim(llm))
            rest = asyncio.gather(*(last(llm, p) for p in others))
            if how == "cancel":
                await asyncio.sleep(0.2)
                task.cancel()
            outputs = await rest
            assert [o.outputs[0].token_ids for o in outputs] == want
            if how == "abort":
                ended = await task
                assert ended.finished and ended.outputs[0].finish_reason == "abort"
            for _ in range(100):
                if not llm._llm.frontend.groups:
                    break
                await asyncio.sleep(0.02)
            clean(llm)

    run(work())


def test_bad_requests_raise_where_they_are_made() -> None:
    model = zoo.build("llama")

    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            good = asyncio.create_task(last(llm, prompts()[0]))
            with pytest.raises(hf_paged.InvalidRequestError, match="vocabulary"):
                await last(llm, [zoo.VOCAB])
            with pytest.raises(hf_paged.OutOfBlocksError, match="24"):
                await last(llm, [5] * 120)
            with pytest.raises(hf_paged.ConfigError, match="tokenizer"):
                await last(llm, "text")
            long = SamplingParams(temperature=0, max_tokens=60)
            first = asyncio.create_task(last(llm, [3, 4, 5], long, request_id="same"))
            await asyncio.sleep(0.05)
            with pytest.raises(hf_paged.InvalidRequestError, match="in use"):
                await last(llm, [3, 4, 5], request_id="same")
            assert (await good).outputs[0].token_ids == alone(model, prompts()[0])
            assert (await first).finished
            clean(llm)

    run(work())


def test_the_request_id_comes_third_as_in_vllm() -> None:
    async def work() -> None:
        async with AsyncLLM(zoo.build("llama"), **OPTIONS) as llm:
            outputs = [output async for output in llm.generate(prompts()[0], GREEDY, "mine")]
            assert {output.request_id for output in outputs} == {"mine"}
            clean(llm)

    run(work())


def test_a_loop_that_dies_wakes_everybody_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")

    async def work() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        runner, steps = llm._llm.core.runner, []
        run_step = runner.run

        def fail(*args: Any) -> torch.Tensor:
            steps.append(1)
            if len(steps) > 3:
                raise ZeroDivisionError("a fault in the model")
            return run_step(*args)

        monkeypatch.setattr(runner, "run", fail)
        start = time.monotonic()
        tasks = [asyncio.create_task(last(llm, p)) for p in prompts()[:5]]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 10
        assert all(isinstance(r, hf_paged.EngineDeadError) for r in results)
        assert all(isinstance(r.__cause__, ZeroDivisionError) for r in results)
        with pytest.raises(hf_paged.EngineDeadError, match="ZeroDivisionError"):
            await last(llm, [1, 2, 3])
        with pytest.raises(hf_paged.EngineDeadError):
            llm.check_health()
        assert llm._llm.core.manager.stats().owned_blocks == 0
        llm.close()
        llm.close()

    run(work())


def test_closing_ends_what_still_runs() -> None:
    model = zoo.build("llama")

    async def work() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        task = asyncio.create_task(last(llm, [3, 4], SamplingParams(temperature=0, max_tokens=80)))
        await asyncio.sleep(0.1)
        await asyncio.get_running_loop().run_in_executor(None, llm.close)
        with pytest.raises(hf_paged.EngineDeadError, match="closed"):
            await task
        with pytest.raises(hf_paged.EngineDeadError, match="closed"):
            await last(llm, [3, 4])

    run(work())


def test_weights_that_change_in_a_pause_are_followed_from_there_on() -> None:
    """What was generated before stays; what comes after is what the new weights make of it."""
    model, prompt = zoo.fresh("llama"), prompts()[3]

    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            stream = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30))
            output = await anext(stream)
            while len(output.outputs[0].token_ids) < 4:
                output = await anext(stream)
            llm.pause()
            output_before = list(llm._llm.frontend.groups[output.request_id].output.outputs[0].token_ids)
            llm.check_health(stalled_after=0.0)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(-1.5)
            await asyncio.sleep(0.1)
            llm.resume()
            got = [output async for output in stream][-1].outputs[0].token_ids
            assert got[: len(output_before)] == output_before
            rest = alone(model, [*prompt, *output_before], max_new_tokens=30 - len(output_before))
            assert got[len(output_before) :] == rest
            clean(llm)

    run(work())


def test_weights_that_changed_unseen_are_said_to_have_changed() -> None:
    model, prompt = zoo.fresh("llama"), prompts()[5]

    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            await last(llm, prompt)
            assert (await last(llm, prompt)).num_cached_tokens > 0
            llm.weights_changed()
            assert (await last(llm, prompt)).num_cached_tokens == 0
            clean(llm)

    run(work())


def test_a_generation_config_means_what_it_means_for_generate() -> None:
    model, batch = zoo.build("llama"), prompts()[:4]
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3, no_repeat_ngram_size=2)
    want = [alone(model, p, max_new_tokens=9, repetition_penalty=1.3, no_repeat_ngram_size=2) for p in batch]

    async def work() -> None:
        async with AsyncLLM(model, **OPTIONS) as llm:
            outputs = await asyncio.gather(*(last(llm, p, config) for p in batch))
            assert [o.outputs[0].token_ids for o in outputs] == want
            with pytest.raises(hf_paged.InvalidRequestError, match="guidance_scale"):
                await last(llm, batch[0], GenerationConfig(guidance_scale=2.0))
            clean(llm)

    run(work())


@pytest.mark.model
def test_a_chat_is_what_the_template_makes_of_it(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**batch, do_sample=False, max_new_tokens=10)[0, batch["input_ids"].shape[1] :].tolist()

    async def work() -> None:
        async with AsyncLLM(model, tokenizer, num_blocks=32) as llm:
            output = [o async for o in llm.chat(messages, GREEDY)][-1]
            assert output.outputs[0].token_ids == out
            again = [o async for o in llm.chat(messages, GREEDY, add_generation_prompt=False)][-1]
            assert len(again.prompt_token_ids) < len(output.prompt_token_ids)
        async with AsyncLLM(model, num_blocks=32) as llm:
            with pytest.raises(hf_paged.ConfigError, match="tokenizer"):
                llm.chat(messages)

    run(work())
