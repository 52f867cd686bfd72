"""Cases 23 and 43: clients that leave at any moment, and weights that change under a living engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import LLM, AsyncLLM, SamplingParams
from hf_paged.engine.request import Request
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.engine_helpers import becomes, last, owned_blocks, run, stepped
from tests.regressions.helpers import ids

BS = 4


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return ids(1, length, seed=seed)[0].tolist()


# -- case 23 -----------------------------------------------------------------------------------------------------------

#: where the leaving client's request is when it leaves
MOMENTS: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda r: r.table is None and not r.preemptions,
    "computing its prompt": lambda r: 0 < r.num_computed < len(r.prompt) and not r.num_output,
    "generating": lambda r: r.num_output == 2,
    "preempted": lambda r: r.table is None and bool(r.preemptions) and r.swapped is None,
    "swapped": lambda r: r.table is None and r.swapped is not None,
}


OTHERS = [prompt(20, seed=1), prompt(9, seed=2)]


@functools.cache
def want_of_others() -> list[list[int]]:
    return [alone(zoo.build("llama"), p, max_new_tokens=60) for p in OTHERS]


#: who has seen nothing yet cannot stop reading, only be cancelled
ENDS = [(moment, how) for moment in MOMENTS for how in ("abort", "cancel")]
ENDS += [(moment, "stop reading") for moment in ("generating", "preempted", "swapped")]


def options_for(moment: str) -> dict[str, Any]:
    options: dict[str, Any] = {"block_size": BS, "num_blocks": 100, "max_num_batched_tokens": 8}
    if moment == "waiting":
        return {**options, "max_num_seqs": 2}
    if moment in ("preempted", "swapped"):
        options |= {"num_blocks": 26, "preemption": "swap" if moment == "swapped" else "recompute"}
    return options


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("moment", "how"), ENDS)
def test_a_client_that_leaves_costs_nothing_any_more(moment: str, how: str, overlap: bool) -> None:
    """Case 23: requests of clients that had gone were computed to their ends, or their blocks, also those in the
    host tier, were never given back.

    https://github.com/huggingface/text-generation-inference/issues/1040,
    https://github.com/vllm-project/vllm/issues/27073, https://github.com/sgl-project/sglang/issues/18701
    """
    model, gate = stepped()
    victim = prompt(30, seed=3)

    async def work() -> None:
        async with AsyncLLM(model, **options_for(moment), overlap=overlap) as llm:
            scheduler = llm._llm.core.scheduler
            scheduler.ratio.value = scheduler.ratio.LEAST
            llm.pause()
            gate.hold()
            rest = [asyncio.create_task(last(llm, p, greedy(60))) for p in OTHERS]
            await becomes(lambda: len(llm._llm.frontend.groups) == 2)
            leaving = asyncio.create_task(read(llm, victim, whole=how != "stop reading"))
            await becomes(lambda: len(llm._llm.frontend.groups) == 3)
            request = next(r for r in scheduler.unfinished if list(r.prompt) == victim)
            llm.resume()
            gate.step_until(lambda: MOMENTS[moment](request))
            await leave(llm, leaving, how)
            for _ in range(1 + overlap):  # with overlap, the next step is already planned
                gate.step()
            assert request.finished
            assert request.table is None and request.swapped is None, "what it held is given back"
            llm._llm.core.manager.check_invariants()
            if how == "abort":
                ended = await leaving
                assert ended.finished and ended.outputs[0].finish_reason == "abort"
            await llm.abort("leaving")  # which is over: no error
            gate.open()
            outputs = await asyncio.gather(*rest)
            assert [o.outputs[0].token_ids for o in outputs] == want_of_others()
            assert owned_blocks(llm) == 0 and not llm._llm.frontend.groups
            stats = llm._llm.core.manager.stats()
            assert stats.num_tables == 0 and stats.free_host_blocks == stats.host_blocks

    run(work())


async def read(llm: AsyncLLM, tokens: list[int], whole: bool) -> Any:
    """The last output seen of a request that is read as a whole, or only until there is something."""
    seen: Any = None
    async with contextlib.aclosing(llm.generate(tokens, greedy(60), request_id="leaving")) as outputs:
        async for output in outputs:
            seen = output
            if not whole:
                break
    return seen


async def leave(llm: AsyncLLM, leaving: asyncio.Task[Any], how: str) -> None:
    """End the request in one way; the engine has been told when this returns."""
    if how == "abort":
        await llm.abort("leaving")
        await llm.abort("leaving")
        await llm.abort("nobody")
    elif how == "cancel":
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
    else:
        assert not (await leaving).finished


def test_aborting_a_request_ends_all_its_completions() -> None:
    """Case 23, for n > 1: every completion of the request ends, those that run and those that wait.

    https://github.com/vllm-project/vllm/issues/27073
    """
    model, gate = stepped()

    async def work() -> None:
        async with AsyncLLM(model, block_size=BS, num_blocks=40, max_num_seqs=3) as llm:
            gate.hold()
            params = SamplingParams(n=5, max_tokens=60, seed=1)
            task = asyncio.create_task(last(llm, prompt(9), params, request_id="many"))
            await becomes(lambda: llm._llm.core.has_work)
            gate.step_until(lambda: len(llm._llm.core.scheduler.running) == 3)
            await llm.abort("many")
            gate.open()
            output = await task
            assert [o.finish_reason for o in output.outputs] == ["abort"] * 5
            await becomes(lambda: not llm._llm.core.has_work)
            assert owned_blocks(llm) == 0 and not llm._llm.frontend.groups

    run(work())


# -- case 43 -----------------------------------------------------------------------------------------------------------


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    batch = ids(4, 12, seed=7)
    for _ in range(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_generations_between_training_steps_use_the_weights_of_that_moment(fused: bool) -> None:
    """Case 43: training wants rollouts from the model as it is, without a copy, with logprobs of the very policy.

    https://github.com/huggingface/trl/pull/5765, https://github.com/huggingface/transformers/pull/48294
    """
    model, tokens = zoo.fresh("llama"), prompt(13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    llm = LLM(model, block_size=BS, num_blocks=64)
    storage = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in llm.core.runner.view.parameters()} == storage, "the engine has a copy of the weights"
    found: list[tuple[int, ...]] = []
    for _ in range(4):
        model.train()
        train(model, optimizer, steps=3)
        assert model.training, "the engine must not switch the user's model"
        outputs = llm.generate([tokens, [*tokens, 5]], greedy(8, logprobs=0))
        model.eval()
        assert [o.outputs[0].token_ids for o in outputs] == [
            alone(model, o.prompt_token_ids, max_new_tokens=8) for o in outputs
        ]
        assert outputs[0].num_cached_tokens == 0, "keys of older weights were used"
        _same_logprobs(model, outputs[0])
        found.append(tuple(outputs[0].outputs[0].token_ids))
    assert len(set(found)) > 1, "the training must matter"
    check_clean(llm)


def _same_logprobs(model: Any, output: Any) -> None:
    """The logprobs reported are those of a fresh forward."""
    generated = output.outputs[0].token_ids
    with torch.no_grad():
        rows = model(torch.tensor([[*output.prompt_token_ids, *generated]])).logits[0].log_softmax(-1)
    for i, (token, logprobs) in enumerate(zip(generated, output.outputs[0].logprobs, strict=True)):
        want = float(rows[len(output.prompt_token_ids) - 1 + i, token])
        assert logprobs[token].logprob == pytest.approx(want, abs=1e-4)


def test_training_is_not_changed_by_an_engine_on_the_model() -> None:
    """Case 43: the weights after training with generations in between are those of training alone, bit for bit.

    https://github.com/huggingface/transformers/pull/48294
    """
    results = []
    for with_engine in (False, True):
        model = zoo.fresh("llama").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        llm = LLM(model, block_size=BS, num_blocks=64) if with_engine else None
        for _ in range(5):
            train(model, optimizer)
            if llm is not None:
                llm.generate(prompts()[:3], SamplingParams(max_tokens=5))
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_pause_lets_weights_change_under_requests_that_run() -> None:
    """Case 43: what was generated before the pause stays, what comes after is the new weights'; keys of the old ones
    are never read again.

    https://github.com/huggingface/trl/pull/5765, https://github.com/huggingface/transformers/issues/46516
    """
    model, gate = stepped()
    batch = prompts()[:3]

    async def work() -> None:
        async with AsyncLLM(model, block_size=BS, num_blocks=64) as llm:
            llm.pause()
            gate.hold()
            tasks = [asyncio.create_task(last(llm, p, greedy(20))) for p in batch]
            await becomes(lambda: len(llm._llm.frontend.groups) == 3)
            llm.resume()
            parts = [part for group in llm._llm.frontend.groups.values() for part in group.parts.values()]
            gate.step_until(lambda: all(part.request.num_output >= 4 for part in parts))
            gate.open()
            llm.pause()
            before = [list(part.request.tokens[len(part.request.prompt) :]) for part in parts]
            assert all(4 <= len(b) < 20 for b in before), "they are in the middle"
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(-1.5)
            llm.resume()
            outputs = await asyncio.gather(*tasks)
            for p, b, output in zip(batch, before, outputs, strict=True):
                rest = alone(model, [*p, *b], max_new_tokens=20 - len(b))
                assert output.outputs[0].token_ids == [*b, *rest]
            assert owned_blocks(llm) == 0

    run(work())


def test_weights_changed_says_what_cannot_be_seen() -> None:
    """Case 43: a change the engine has no way to notice is announced, and every prefix is forgotten.

    https://github.com/huggingface/trl/pull/5765
    """
    model, tokens = zoo.build("llama"), prompt(13)
    llm = LLM(model, block_size=BS, num_blocks=64)
    llm.generate(tokens, greedy(2))
    assert llm.generate(tokens, greedy(2))[0].num_cached_tokens == 12
    llm.weights_changed()
    assert llm.generate(tokens, greedy(2))[0].num_cached_tokens == 0
    check_clean(llm)


def test_the_pool_is_as_large_as_it_was_asked_to_be() -> None:
    """Case 43: beside a training loop, memory for keys and values has to be bounded by its user.

    https://github.com/huggingface/trl/pull/5765
    """
    model = zoo.build("llama")
    for memory in (1 << 18, 1 << 20):
        llm = LLM(model, memory=memory, attention_backend="torch")  # which does not round up the heads of 8
        pool = llm.core.runner.pool
        assert memory - pool.bytes_per_block < pool.reserved_bytes <= memory + pool.bytes_per_block
        assert llm.stats()["num_blocks"] - 1 == memory // pool.bytes_per_block
    with pytest.raises(hf_paged.OutOfBlocksError, match="does not hold one block"):
        LLM(model, memory=100)


@pytest.mark.parametrize("optimize", [True, False])
def test_a_default_device_that_holds_nothing_changes_nothing(optimize: bool) -> None:
    model, prompt = zoo.build("llama"), ids(1, 9)[0].tolist()
    params = SamplingParams(temperature=0, max_tokens=4)
    with torch.device("meta"):
        llm = LLM(model, num_blocks=16, optimize=optimize)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == alone(model, prompt, max_new_tokens=4)
