"""``register(continuous_batching=True)``: transformers' own calls for continuous batching, on hf_paged's engine."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching import ContinuousMixin, RequestStatus

import hf_paged
from hf_paged import compat
from hf_paged.generation import batching_manager, transformers_serve
from tests import zoo
from tests.engine.test_llm_parity import alone, prompts

POOL = {"block_size": 4, "num_blocks": 64}
#: stock's own batching fails or is wrong on those after llama, and cannot keep a recurrent state
MODELS = ["llama", "opt", "bloom", "falcon", "gemma2", "gpt_neox", "deepseek_v3", "mamba2", "qwen3_next"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    hf_paged.register(continuous_batching=True, **POOL)
    yield
    hf_paged.unregister()


def tokens(outputs: dict[str, Any]) -> list[list[int]]:
    assert all(o.status == RequestStatus.FINISHED and o.error is None for o in outputs.values())
    assert list(outputs) == [o.request_id for o in outputs.values()]
    return [o.generated_tokens for o in outputs.values()]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "hf_paged engine"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.versions) if n in ("llama", "bloom") else n
                                  for n in MODELS])  # fmt: skip
def test_every_row_equals_stock_generate_twice_in_a_row(name: str) -> None:
    """transformers pull 45943: results are lost on the second call."""
    model = zoo.build(name)
    want = [alone(model, p) for p in prompts()]
    for _ in range(2):
        assert tokens(model.generate_batch(prompts(), max_new_tokens=10)) == want
    assert not threads(), "a session leaves a thread behind"


@pytest.mark.versions
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 8, "eos_token_id": [5, 60, 61, 62, 63]},
        {"sequence_bias": [[[8], 4.0]], "suppress_tokens": [4, 5, 6]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_are_stocks_and_none_is_dropped(options: dict[str, Any]) -> None:
    """transformers pulls 48468, 43457: processors see one token, or are left out with a warning."""
    model = zoo.build("llama")
    want = [alone(model, p, **options) for p in prompts()]
    assert want != [alone(model, p) for p in prompts()], "the option must matter"
    config = GenerationConfig(max_new_tokens=10, **options)
    assert tokens(model.generate_batch(prompts(), generation_config=config)) == want
    assert tokens(model.generate_batch(prompts(), max_new_tokens=10, **options)) == want


@pytest.mark.model
def test_stop_strings_end_a_row(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    texts = ["The capital of France is", "Once upon a time, in a small village by the sea,"]
    config = GenerationConfig(max_new_tokens=16, stop_strings=["Paris", " the"], do_sample=False)
    want = []
    for text in texts:
        batch = tokenizer(text, return_tensors="pt")
        out = model.generate(**batch, generation_config=copy.deepcopy(config), tokenizer=tokenizer)
        want.append(out[0, batch["input_ids"].shape[1] :].tolist())
    assert all(len(row) < 16 for row in want)
    ids = tokenizer(texts)["input_ids"]
    assert tokens(model.generate_batch(ids, generation_config=config, tokenizer=tokenizer)) == want
    with pytest.raises(hf_paged.ConfigError, match="tokenizer"):
        model.generate_batch(ids, generation_config=config)


def test_several_sequences_a_prompt_come_one_after_the_other_and_are_reproducible() -> None:
    model, batch = zoo.build("llama"), prompts()[:3]
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=1.5, num_return_sequences=3)
    found = []
    for _ in range(2):
        torch.manual_seed(11)
        outputs = model.generate_batch(batch, generation_config=config)
        assert [o.prompt_ids for o in outputs.values()] == [p for p in batch for _ in range(3)]
        found.append(tokens(outputs))
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) > 6
    torch.manual_seed(12)
    assert tokens(model.generate_batch(batch, generation_config=config)) != found[0]


def test_beams_are_searched_as_stock_searches() -> None:
    model, batch = zoo.build("llama"), prompts()[:3]
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    outputs = model.generate_batch(batch, generation_config=GenerationConfig(**options))
    rows = [torch.tensor([p]) for p in batch]
    stock = [model.generate(r, attention_mask=torch.ones_like(r), do_sample=False, **options) for r in rows]
    want = [row[len(p) :].tolist() for p, out in zip(batch, stock, strict=True) for row in out]
    assert tokens(outputs) == want and len({tuple(row) for row in want}) == 6


@pytest.mark.versions
def test_a_bad_prompt_fails_alone_and_says_why() -> None:
    """transformers 5.24 fails every request of the batch when one token id is outside the vocabulary, and for one
    prompt that is larger than the pool (vllm issue 35541 hangs)."""
    model, good = zoo.build("llama"), prompts()[0:8:2]
    batch = [good[0], [3, zoo.VOCAB], good[1], [5] * 40, [], *good[2:]]
    pool = ContinuousBatchingConfig(num_blocks=8, block_size=4)
    outputs = list(model.generate_batch(batch, max_new_tokens=10, continuous_batching_config=pool).values())
    assert [o.status == RequestStatus.FAILED for o in outputs] == [False, True, False, True, True, False, False]
    assert "vocabulary" in outputs[1].error and "has 8" in outputs[3].error and "no tokens" in outputs[4].error
    assert [o.prompt_ids for o in outputs] == batch
    fine = [o.generated_tokens for o in outputs if o.error is None]
    assert fine == [alone(model, p) for p in good]
    outputs = list(model.generate_batch(good, max_length=12).values())
    assert [o.status == RequestStatus.FAILED for o in outputs] == [len(p) >= 12 for p in good] != [False] * 4
    assert all("max_length" in o.error for o in outputs if o.error is not None)


def test_an_option_that_cannot_be_honoured_is_an_error_of_the_call() -> None:
    model = zoo.build("llama")
    with pytest.raises(hf_paged.ConfigError, match="max_new_token"):
        model.generate_batch(prompts(), max_new_token=3)
    with pytest.raises(hf_paged.InvalidRequestError, match="guidance_scale"):
        model.generate_batch(prompts(), max_new_tokens=3, guidance_scale=1.5)
    with pytest.raises(hf_paged.ConfigError, match="mine"):
        model.generate_batch(prompts(), continuous_batching_config=ContinuousBatchingConfig(scheduler_type="mine"))
    assert not threads()


def test_a_fault_in_the_model_is_raised_with_its_cause_not_returned_as_a_short_dict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers pull 48301: whoever waits times out in silence, and what is there is returned as if it were all."""
    model = zoo.build("llama")
    with model.continuous_batching_context_manager() as manager:
        runner, steps, run = manager.batch_processor.runner, [], manager.batch_processor.runner.run

        def fail(*args: Any) -> Any:
            steps.append(1)
            if len(steps) > 3:
                raise ZeroDivisionError("a fault in the model")
            return run(*args)

        monkeypatch.setattr(runner, "run", fail)
        names = manager.add_requests(prompts(), max_new_tokens=30)
        start = time.monotonic()
        outputs = [manager.get_result() for _ in names]
        assert all(o.status == RequestStatus.FAILED and "ZeroDivisionError" in o.error for o in outputs)
        with pytest.raises(hf_paged.EngineDeadError) as caught:
            manager.get_result()
        assert isinstance(caught.value.__cause__, ZeroDivisionError) and time.monotonic() - start < 5
        with pytest.raises(hf_paged.EngineDeadError):
            manager.add_request([3, 4])
        assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)
        assert not manager.is_running()
    monkeypatch.setattr("hf_paged.model.runner.ModelRunner.run", fail)
    with pytest.raises(hf_paged.EngineDeadError) as caught:
        model.generate_batch(prompts(), max_new_tokens=30)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.versions
def test_streaming_delivers_what_there_is_after_every_token() -> None:
    model, prompt = zoo.build("llama"), prompts()[1]
    want = alone(model, prompt)
    with model.continuous_batching_context_manager() as manager:
        other = manager.add_request(prompts()[2], max_new_tokens=5)
        name = manager.add_request(prompt, max_new_tokens=10, streaming=True, record_timestamps=True)
        seen = list(manager.request_id_iter(name))
        assert [o.generated_tokens for o in seen] == [want[: i + 1] for i in range(len(want))]
        assert [o.is_finished() for o in seen] == [False] * (len(want) - 1) + [True]
        assert seen[-1].timestamps == sorted(seen[-1].timestamps) and len(seen[-1].timestamps) == len(want)
        begun, ended = seen[-1].lifespan
        assert seen[-1].created_time <= begun <= seen[-1].timestamps[0] and ended >= seen[-1].timestamps[-1]
        assert manager.get_result(other).generated_tokens == alone(model, prompts()[2], max_new_tokens=5)
        assert manager.get_result(other) is None and manager.get_result("unknown") is None
        assert manager.get_result(timeout=0.05) is None
    assert not manager.is_running() and not threads()


def test_requests_have_options_of_their_own() -> None:
    model, prompt = zoo.build("llama"), prompts()[3]
    before = model.generation_config.to_dict()
    with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=12)) as manager:
        plain = manager.add_request(prompt)
        short = manager.add_request(prompt, max_new_tokens=3)
        penalty = manager.add_request(prompt, repetition_penalty=1.4)
        config = GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=1)
        ngram = manager.add_request(prompt, generation_config=config)
        ends = manager.add_request(prompt, eos_token_id=alone(model, prompt)[2])
        endless = manager.add_request(prompt, eos_token_id=-1)
        found = {name: manager.get_result(name).generated_tokens for name in (plain, short, penalty, ngram, ends)}
        assert found == {
            plain: alone(model, prompt, max_new_tokens=12),
            short: alone(model, prompt, max_new_tokens=3),
            penalty: alone(model, prompt, max_new_tokens=12, repetition_penalty=1.4),
            ngram: alone(model, prompt, max_new_tokens=6, no_repeat_ngram_size=1),
            ends: alone(model, prompt, max_new_tokens=12, eos_token_id=alone(model, prompt)[2]),
        }
        assert len(manager.get_result(endless).generated_tokens) == 12
    assert config.to_dict() == GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=1).to_dict()
    assert model.generation_config.to_dict() == before


def test_without_any_limit_a_row_goes_on_to_the_models_largest_length() -> None:
    model, batch = zoo.build("llama"), prompts()[3:0:-1]  # the longest first
    config = ContinuousBatchingConfig(num_blocks=200, block_size=4)
    outputs = model.generate_batch(batch, continuous_batching_config=config)
    assert [len(row) for row in tokens(outputs)] == [256 - len(p) for p in batch]
    with pytest.raises(hf_paged.InvalidRequestError, match="max_new_tokens"):
        zoo.build("bloom").generate_batch(batch)


def test_logprobs_are_delivered_where_asked_for() -> None:
    model, prompt = zoo.build("llama"), prompts()[0]
    config = ContinuousBatchingConfig(return_logprobs=True)
    found = next(iter(model.generate_batch([prompt], max_new_tokens=4, continuous_batching_config=config).values()))
    row = torch.tensor([prompt + found.generated_tokens])
    scores = model(row).logits.detach()[0, len(prompt) - 1 : -1].log_softmax(-1)
    want = [float(scores[i, token]) for i, token in enumerate(found.generated_tokens)]
    assert found.logprobs == pytest.approx(want, abs=1e-4)


def test_a_cancelled_request_gives_its_blocks_back_and_is_told() -> None:
    model = zoo.build("llama")
    with model.continuous_batching_context_manager() as manager:
        name = manager.add_request([3, 4, 5], max_new_tokens=200, streaming=True, eos_token_id=-1)
        assert manager.get_result(name).generated_tokens
        manager.cancel_request(name)
        manager.cancel_request("unknown")
        last = list(manager.request_id_iter(name))[-1]
        assert last.status == RequestStatus.FAILED and "cancelled" in last.error and len(last.generated_tokens) < 200
        cache = manager.batch_processor.manager
        assert cache.stats().owned_blocks == 0
        cache.check_invariants()
        assert manager.get_result(manager.add_request([3, 4], request_id=name)).request_id == name


def test_handlers_are_called_in_their_event_loop_whenever_they_register() -> None:
    model, prompt = zoo.build("llama"), prompts()[0]
    want = alone(model, prompt)

    async def work(manager: Any) -> None:
        early, late = [], []
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler("early", early.append)
        manager.add_request(prompt, request_id="early", max_new_tokens=10, streaming=True)
        manager.add_request(prompt, request_id="late", max_new_tokens=10, streaming=True)
        while manager.get_result("other", timeout=0.05) is None and "late" in manager.outbox._requests:
            await asyncio.sleep(0.02)

        def keep(output: Any) -> None:
            late.append(output)
            if output.is_finished():
                done.set_result(None)

        manager.register_result_handler("late", keep)
        await done
        for seen in (early, late):
            assert [o.generated_tokens for o in seen] == [want[: i + 1] for i in range(len(want))]
        assert not manager.outbox._results and not manager.outbox._handlers

    with model.continuous_batching_context_manager() as manager:
        asyncio.run(asyncio.wait_for(work(manager), timeout=60))


@pytest.mark.versions
def test_a_kept_manager_knows_prefixes_and_follows_each_calls_config() -> None:
    model, batch = zoo.build("llama"), prompts()
    want = [alone(model, p) for p in batch]
    assert tokens(model.generate_batch(batch, max_new_tokens=10, persistent_manager=True)) == want
    kept = getattr(model, compat.CACHED_MANAGER)
    assert not kept.is_running() and not threads()
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.3)
    outputs = model.generate_batch(batch, generation_config=config, persistent_manager=True)
    assert tokens(outputs) == [alone(model, p, max_new_tokens=7, repetition_penalty=1.3) for p in batch]
    assert getattr(model, compat.CACHED_MANAGER) is kept
    before = kept.batch_processor.manager.stats().hit_tokens
    assert tokens(model.generate_batch(batch[-1:], max_new_tokens=10, persistent_manager=True)) == want[-1:]
    assert kept.batch_processor.manager.stats().hit_tokens >= before + len(batch[-1]) // 2
    session = model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=3), persistent_manager=True)
    with session as manager:
        assert manager is kept
        assert manager.get_result(manager.add_request(batch[1])).generated_tokens == want[1][:3]
    other = ContinuousBatchingConfig(num_blocks=100, block_size=4)
    model.generate_batch(batch, max_new_tokens=2, persistent_manager=True, continuous_batching_config=other)
    assert getattr(model, compat.CACHED_MANAGER) is not kept
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, compat.CACHED_MANAGER)


def test_a_stopped_manager_takes_nothing_holds_nothing_and_can_start_again() -> None:
    model = zoo.build("llama")
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=10))
    early = manager.add_request(prompts()[0])  # computed once it is started
    assert manager.get_result(early, timeout=0.1) is None and not manager.is_running()
    manager.start()
    manager.start()
    late = manager.add_request(prompts()[1])
    engine = weakref.ref(manager.batch_processor)
    manager.stop()
    for name, prompt in zip((early, late), prompts(), strict=False):
        assert manager.get_result(name).generated_tokens == alone(model, prompt), "a stop lets requests finish"
    assert manager.get_result(timeout=5) is None
    with pytest.raises(hf_paged.EngineDeadError, match="stopped"):
        manager.add_request([3, 4])
    gc.collect()
    assert engine() is None and manager.batch_processor is None and not threads()
    manager.start()
    endless = manager.add_request([3, 4], max_new_tokens=250, eos_token_id=-1)
    manager.stop(hard_stop=True)
    output = manager.get_result(endless)
    assert output.status == RequestStatus.FAILED and "closed" in output.error
    manager.destroy()
    manager.destroy()


def test_threads_that_add_before_the_start_share_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = zoo.build("llama"), []

    class Slow(batching_manager.EngineLoop):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(self)
            time.sleep(0.05)
            super().__init__(*args, **options)

    monkeypatch.setattr(batching_manager, "EngineLoop", Slow)
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=3))
    names: list[str] = []
    adding = [threading.Thread(target=lambda: names.append(manager.add_request([3, 4]))) for _ in range(4)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert len(made) == 1 and len(set(names)) == 4
    manager.start()
    want = alone(model, [3, 4], max_new_tokens=3)
    assert all(manager.get_result(name, timeout=20).generated_tokens == want for name in names)
    manager.destroy()
    assert not threads()


def test_a_name_that_is_given_is_none_of_those_in_use() -> None:
    model = zoo.build("llama")
    with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=2)) as manager:
        manager.add_request([3, 4], request_id="req_0")
        while manager.outbox._requests:
            time.sleep(0.01)
        assert manager.add_request([5, 6]) == "req_1", "an output of req_0 waits"
        assert manager.get_result("req_0").prompt_ids == [3, 4]
        manager.add_request([7, 8], request_id="req_0")
        assert manager.get_result("req_0").prompt_ids == [7, 8], "an id may be given again once its request has ended"
        assert manager.get_result("req_1").prompt_ids == [5, 6]


def test_an_id_that_is_refused_leaves_nothing_behind() -> None:
    model = zoo.build("llama")
    with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=2)) as manager:
        with pytest.raises(hf_paged.InvalidRequestError, match="request_id=5"):
            manager.add_request([3, 4], request_id=5)
        assert not manager.outbox._requests


def test_a_served_request_with_the_config_of_another_is_an_error_not_an_assertion() -> None:
    manager = zoo.build("llama").init_continuous_batching()
    with pytest.raises(hf_paged.InternalError, match="made for this HTTP request"):
        transformers_serve._params(manager, GenerationConfig(), 3)
    other = transformers_serve._Asked(GenerationConfig(), {}, None)
    token = transformers_serve._asked.set(other)
    try:
        with pytest.raises(hf_paged.InternalError, match="made for this HTTP request"):
            transformers_serve._params(manager, GenerationConfig(), 3)
    finally:
        transformers_serve._asked.reset(token)
        manager.destroy()


def test_several_may_pause_and_the_last_one_out_resumes() -> None:
    model = zoo.build("llama")
    with model.continuous_batching_context_manager() as manager:
        name = manager.add_request([3, 4], max_new_tokens=100, eos_token_id=-1, streaming=True)
        manager.get_result(name)
        first, second = manager.pause(), manager.pause()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        while manager.get_result(name, timeout=0.1) is not None:
            pass
        steps = manager.batch_processor.scheduler.step
        time.sleep(0.1)
        assert manager.batch_processor.scheduler.step == steps
        second.__exit__(None, None, None)
        last = list(manager.request_id_iter(name))[-1]
        assert last.generated_tokens == alone(model, [3, 4], max_new_tokens=100)


def test_the_model_stays_the_users() -> None:
    model = zoo.fresh("llama").train()
    row = torch.tensor([prompts()[0]])
    before = model.config._attn_implementation
    model(row, labels=row).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with model.continuous_batching_context_manager() as manager:
        name = manager.add_request([3, 4], max_new_tokens=60, eos_token_id=-1)
        model(row, labels=row).loss.backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
        assert model.config._attn_implementation == before and model.training
        found = manager.get_result(name).generated_tokens
        with manager.pause(), torch.no_grad():
            with pytest.raises(RuntimeError, match="paused"):
                manager.stop()
            for p in model.parameters():
                p.mul_(-1.5)
        again = manager.get_result(manager.add_request([3, 4], max_new_tokens=20, eos_token_id=-1)).generated_tokens
    assert model.training and model.config._attn_implementation == before
    assert again == alone(model.eval(), [3, 4], max_new_tokens=20, eos_token_id=None) != found[:20]


def test_the_config_of_stock_is_honoured_where_it_means_something() -> None:
    model = zoo.build("llama")
    config = ContinuousBatchingConfig(
        num_blocks=10, block_size=8, max_batch_tokens=32, max_requests_per_batch=3, allow_block_sharing=False,
        scheduler_type="lpm", seed=5,
    )  # fmt: skip
    manager = model.init_continuous_batching(continuous_batching_config=config)
    ours = manager.config
    assert (ours.block_size, ours.num_blocks, ours.max_num_batched_tokens, ours.max_num_seqs) == (8, 10, 32, 3)
    assert (ours.prefix_caching, ours.policy, ours.seed) == (False, "lpm", 5)
    default = model.init_continuous_batching().config
    assert (default.block_size, default.num_blocks, default.prefix_caching) == (4, 64, True)
    counted = model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(num_blocks=2)).config
    assert counted.block_size * counted.num_blocks == 2 * 256, "stock's blocks hold 256 tokens unless somebody says so"
    assert not threads(), "a manager that was not started has a thread"


def test_register_and_unregister_leave_no_trace() -> None:
    hf_paged.unregister()
    utils = compat.serving_utils()
    owners = [GenerationMixin, ContinuousMixin, *(utils.BaseHandler, utils.CBGenerateManager)]
    before = [dict(vars(owner)) for owner in owners]
    batching = [vars(owner) for owner in owners[1:]]
    hf_paged.register()
    assert [dict(names) for names in batching] == before[1:], "nobody asked for continuous batching"
    hf_paged.register(continuous_batching=True)
    assert all(dict(names) != old for names, old in zip(batching, before[1:], strict=True))
    hf_paged.register()
    assert dict(batching[0]) != before[1], "a second register() that does not speak of it leaves it as it is"
    hf_paged.register(continuous_batching=False)
    assert [dict(names) for names in batching] == before[1:]
    hf_paged.register(continuous_batching=True, **POOL)
    model = zoo.build("llama")
    model.generate_batch(prompts()[:1], max_new_tokens=2, persistent_manager=True)
    hf_paged.unregister()
    assert [dict(vars(owner)) for owner in owners] == before
    assert not hasattr(model, compat.CACHED_MANAGER), "stock would take the kept manager for its own"
