"""Cases 2, 3, 4, 22, 24, 37 and 42: what goes wrong with one request, or with the loop, and who learns of it."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import LLM, AsyncLLM, SamplingParams
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.engine_helpers import becomes, last, owned_blocks, run, stepped
from tests.regressions.helpers import ids

SMALL = {"block_size": 4, "num_blocks": 8}
ROOMY = {"block_size": 4, "num_blocks": 64}


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def test_results_of_every_call_are_found_and_in_order() -> None:
    """Case 2: the second call on one engine lost its results, which were looked up by numbers counted anew.

    https://github.com/huggingface/transformers/pull/45943
    """
    model, batch = zoo.build("llama"), prompts()[:4]
    llm = LLM(model, **ROOMY)
    lengths = [9, 1, 5, 2]  # those that come later in the call are done first
    seen = set()
    for call in (batch, batch[::-1], batch):
        outputs = llm.generate(call, [greedy(n) for n in lengths])
        want = [alone(model, p, max_new_tokens=n) for p, n in zip(call, lengths, strict=True)]
        assert [o.outputs[0].token_ids for o in outputs] == want
        assert [o.prompt_token_ids for o in outputs] == call
        seen |= {o.request_id for o in outputs}
    assert len(seen) == 12
    check_clean(llm)


def test_numbers_given_by_the_engine_do_not_meet_those_given_by_callers() -> None:
    """Case 2: a caller's request id that looks like the engine's own must not take another request's result.

    https://github.com/huggingface/transformers/pull/45943
    """
    model, batch = zoo.build("llama"), prompts()[:4]
    want = [alone(model, p) for p in batch]

    async def work() -> None:
        async with AsyncLLM(model, **ROOMY) as llm:
            probe = await last(llm, [3, 4], greedy(1))
            head, number = re.fullmatch(r"(.*?)(\d*)", probe.request_id).groups()  # type: ignore[union-attr]
            names: list[str | None] = [f"{head}{int(number or 0) + 1}", None, None, None]
            outputs = await asyncio.gather(
                *(last(llm, p, greedy(10), request_id=name) for p, name in zip(batch, names, strict=True))
            )
            assert [o.outputs[0].token_ids for o in outputs] == want
            assert len({o.request_id for o in outputs}) == 4

    run(work())


def test_everybody_learns_at_once_when_the_loop_dies() -> None:
    """Case 3: the background thread died, and callers timed out or took a short result for a whole one.

    https://github.com/huggingface/transformers/pull/48301
    """
    model, gate = stepped()

    async def work() -> None:
        async with AsyncLLM(model, **ROOMY) as llm:
            llm.pause()
            gate.hold()
            latest: dict[int, Any] = {}

            async def follow(i: int) -> None:
                async for output in llm.generate(prompts()[i], greedy(60)):
                    latest[i] = output

            tasks = [asyncio.create_task(follow(i)) for i in range(3)]
            await becomes(lambda: len(llm._llm.core.scheduler.waiting) == 3)
            llm.resume()
            gate.step()
            gate.step()
            gate.fault = ZeroDivisionError("a fault in the model")
            gate.open()
            start = time.monotonic()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - start < 1
            assert [type(r) for r in results] == [hf_paged.EngineDeadError] * 3
            assert all(isinstance(r, Exception) and r.__cause__ is gate.fault for r in results)
            assert latest and not any(output.finished for output in latest.values())
            start = time.monotonic()
            with pytest.raises(hf_paged.EngineDeadError, match="a fault in the model") as caught:
                await last(llm, [3, 4], greedy(2))
            assert time.monotonic() - start < 1 and caught.value.__cause__ is gate.fault

    run(work())


def test_a_call_never_returns_a_part_of_its_results() -> None:
    """Case 3: after a fault ``generate_batch`` returned what it had, as if that were all; here the call raises, and
    the engine of a caller's own thread goes on once the fault is gone.

    https://github.com/huggingface/transformers/pull/48301
    """
    model, gate = stepped()
    llm = LLM(model, **ROOMY)
    gate.fault = ZeroDivisionError("a fault in the model")
    with pytest.raises(ZeroDivisionError):
        llm.generate(prompts()[:3], [greedy(n) for n in (1, 5, 9)])
    check_clean(llm)
    gate.fault = None
    outputs = llm.generate(prompts()[:3], greedy(6))
    assert [o.outputs[0].token_ids for o in outputs] == [
        alone(zoo.build("llama"), p, max_new_tokens=6) for p in prompts()[:3]
    ]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_model_that_cannot_run_is_refused_when_the_engine_is_made(name: str) -> None:
    """Case 3: layers that the engine does not know ended its thread later, and nobody was told.

    https://github.com/huggingface/transformers/pull/48301
    """
    with pytest.raises(hf_paged.UnsupportedError, match="encoder-decoder"):
        AsyncLLM(zoo.build(name), **ROOMY)


def test_a_prompt_larger_than_the_pool_is_refused_alone() -> None:
    """Case 4: one request larger than the pool ended every other, or hung for ever.

    transformers 5.24 ``prepare_next_batch``; https://github.com/huggingface/transformers/pull/43150,
    https://github.com/vllm-project/vllm/issues/35541
    """
    model, short = zoo.build("llama"), [ids(1, n, seed=n)[0].tolist() for n in (3, 5, 6)]

    async def work() -> None:
        async with AsyncLLM(model, **SMALL) as llm:
            huge = last(llm, ids(1, 40)[0].tolist(), greedy(4))
            results: list[Any] = await asyncio.gather(
                huge, *(last(llm, p, greedy(6)) for p in short), return_exceptions=True
            )
            assert isinstance(results[0], hf_paged.OutOfBlocksError)
            assert (results[0].needed, results[0].available) == (11, 8)
            assert "11" in str(results[0]) and "8" in str(results[0])
            want = [alone(model, p, max_new_tokens=6) for p in short]
            assert [o.outputs[0].token_ids for o in results[1:]] == want
            assert owned_blocks(llm) == 0

    run(work())


def test_a_call_with_a_prompt_larger_than_the_pool_runs_nothing_and_leaves_nothing() -> None:
    """Case 4, for a list of prompts: the call raises at submission, and the next one is served.

    https://github.com/huggingface/transformers/pull/43150
    """
    model, short = zoo.build("llama"), ids(1, 5)[0].tolist()
    llm = LLM(model, **SMALL)
    with pytest.raises(hf_paged.OutOfBlocksError, match=r"needs 11 blocks.*has 8"):
        llm.generate([short, ids(1, 40)[0].tolist(), short], greedy(4))
    assert llm.stats()["computed_tokens"] == 0 and not llm.core.has_work
    assert llm.generate(short, greedy(4))[0].outputs[0].token_ids == alone(model, short, max_new_tokens=4)
    check_clean(llm)


@pytest.mark.parametrize(("length", "new", "fits"), [(32, 1, True), (32, 2, False), (31, 2, True), (33, 1, False)])
def test_the_largest_prompt_that_fits_is_served(length: int, new: int, fits: bool) -> None:
    """Case 4: a prompt and the tokens that have to be stored after it fill the pool to the last slot, or one too many.

    https://github.com/vllm-project/vllm/issues/1607
    """
    model, prompt = zoo.build("llama"), ids(1, length)[0].tolist()
    llm = LLM(model, **SMALL)
    if fits:
        output = llm.generate(prompt, greedy(new))[0]
        assert output.outputs[0].token_ids == alone(model, prompt, max_new_tokens=new) and output.error is None
    else:
        with pytest.raises(hf_paged.OutOfBlocksError, match=r"needs 9 blocks.*has 8"):
            llm.generate(prompt, greedy(new))
    check_clean(llm)


def test_the_last_request_that_outgrows_the_pool_ends_alone() -> None:
    """Case 22: when not even the last running request fitted, the scheduler crashed.

    https://github.com/sgl-project/sglang/pull/19881
    """
    model, grows, others = zoo.build("llama"), ids(1, 20)[0].tolist(), prompts()[:3]

    async def work() -> None:
        async with AsyncLLM(model, **SMALL) as llm:
            results = await asyncio.gather(last(llm, grows, greedy(60)), *(last(llm, p, greedy(6)) for p in others))
            failed = results[0]
            assert isinstance(failed.error, hf_paged.OutOfBlocksError) and failed.outputs[0].finish_reason == "error"
            # 8 blocks hold 32 tokens; the 33rd is known without a place in them
            assert failed.outputs[0].token_ids == alone(model, grows, max_new_tokens=13)
            assert [o.outputs[0].token_ids for o in results[1:]] == [alone(model, p, max_new_tokens=6) for p in others]
            assert owned_blocks(llm) == 0
            llm.check_health()
            after = await last(llm, others[0], greedy(6))
            assert after.error is None and after.outputs[0].token_ids == alone(model, others[0], max_new_tokens=6)

    run(work())


def test_an_over_long_prompt_is_answered_with_both_numbers() -> None:
    """Case 24: a prompt as long as the model's limit, or longer, was dropped with a log line, and its client hung.

    https://github.com/vllm-project/vllm/issues/1607
    """
    model, limit = zoo.build("llama"), 16

    async def work() -> None:
        async with AsyncLLM(model, **ROOMY, max_model_len=limit) as llm:
            for length in (limit, limit + 1, 10 * limit):
                with pytest.raises(hf_paged.InvalidRequestError, match=rf"{length} tokens.*max_model_len={limit}"):
                    await last(llm, ids(1, length)[0].tolist(), greedy(4))
            longest = ids(1, limit - 1)[0].tolist()
            output = await last(llm, longest, greedy(4))
            assert output.outputs[0].token_ids == alone(model, longest, max_new_tokens=1)
            assert output.outputs[0].finish_reason == "length"

    run(work())


def test_the_models_own_limit_holds_without_an_option() -> None:
    """Case 24: positions beyond ``max_position_embeddings`` do not exist; nobody has to name the limit.

    https://github.com/vllm-project/vllm/issues/1607
    """
    model = zoo.build("gpt2")
    limit = model.config.max_position_embeddings
    llm = LLM(model, block_size=4, num_blocks=100)
    with pytest.raises(hf_paged.InvalidRequestError, match=rf"{limit} tokens.*max_model_len={limit}"):
        llm.generate(ids(1, limit)[0].tolist(), greedy(4))
    output = llm.generate(ids(1, limit - 3)[0].tolist(), greedy(9))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


def _nothing(_: int, row: torch.Tensor) -> list[int]:
    return [] if len(row) > 5 else list(range(zoo.VOCAB))


def _minus_infinity(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, float("-inf"))


def _nan(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * float("nan")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "constraint",
    [
        {"prefix_allowed_tokens_fn": _nothing},
        {"logits_processors": [_minus_infinity]},
        {"logits_processors": [_nan]},
        {"suppress_tokens": list(range(zoo.VOCAB))},
    ],
    ids=["prefix_allowed_tokens_fn", "minus infinity", "nan", "suppress_tokens"],
)
def test_a_mask_that_allows_nothing_ends_its_request_only(constraint: dict[str, Any], temperature: float) -> None:
    """Case 37, without grammars: a mask with no legal token gave NaN, crashed the server, or let everything through.

    https://github.com/huggingface/text-generation-inference/issues/2280,
    https://github.com/ggml-org/llama.cpp/issues/19051
    """
    model, good = zoo.build("llama"), prompts()[:3]
    llm = LLM(model, **ROOMY)
    constrained = SamplingParams(temperature=temperature, max_tokens=6, **constraint)
    outputs = llm.generate([[5, 6, 7], *good], [constrained, *[greedy(6)] * 3])
    assert outputs[0].error is not None and outputs[0].outputs[0].finish_reason == "error"
    begun = 3 if "prefix_allowed_tokens_fn" in constraint else 0
    assert len(outputs[0].outputs[0].token_ids) == begun
    assert [o.outputs[0].token_ids for o in outputs[1:]] == [alone(model, p, max_new_tokens=6) for p in good]
    check_clean(llm)


def test_health_tells_a_dead_loop_from_a_live_one() -> None:
    """Case 42: health was fine while the loop was dead.

    https://github.com/theroyallab/tabbyAPI/issues/428
    """
    model, gate = stepped()

    async def work() -> None:
        async with AsyncLLM(model, **ROOMY) as llm:
            llm.check_health()
            await last(llm, [3, 4, 5], greedy(3))
            llm.check_health()
            gate.fault = ZeroDivisionError("a fault in the model")
            with pytest.raises(hf_paged.EngineDeadError):
                await last(llm, [3, 4, 5], greedy(3))
            with pytest.raises(hf_paged.EngineDeadError, match="a fault in the model") as caught:
                llm.check_health()
            assert caught.value.__cause__ is gate.fault

    run(work())


def test_health_tells_a_wedged_loop_from_one_that_has_nothing_to_do() -> None:
    """Case 42: health was fine while the loop hung in a step; and a long idle time is no fault.

    https://github.com/openvinotoolkit/model_server/issues/4503
    """
    model, gate = stepped()

    async def work() -> None:
        async with AsyncLLM(model, **ROOMY) as llm:
            await last(llm, [3, 4, 5], greedy(3))
            await asyncio.sleep(0.4)
            llm.check_health(stalled_after=0.3)
            gate.hold()
            task = asyncio.create_task(last(llm, [3, 4, 5], greedy(3)))
            await becomes(lambda: llm._llm.core.has_work)
            gate.wait_for_arrival()
            llm.check_health(stalled_after=0.3)  # a step has only just begun
            await asyncio.sleep(0.4)
            with pytest.raises(hf_paged.EngineDeadError, match="no step"):
                llm.check_health(stalled_after=0.3)
            gate.open()
            assert (await task).finished
            llm.check_health(stalled_after=0.3)

    run(work())
