"""Case 1. Paging belongs to the call: forwards, backwards, training and compiled models do not notice it.

https://github.com/huggingface/transformers/pull/48735
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import compat
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock


def _train(model: Any, steps: int, every: int, generate: Any) -> dict[str, torch.Tensor]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch = ids(2, 12, seed=step)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 and generate is not None:
            generate(model, step)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_300_training_steps_with_paged_generate_between_give_the_same_weights() -> None:
    def generate(model: Any, step: int) -> None:
        model.eval()
        prompt = left_padded([9, 5], seed=1)
        with_cache, without = paged(model, **prompt), stock(model, **prompt)
        assert torch.equal(with_cache, without), f"stale keys were used after step {step}"
        model.train()

    plain = _train(zoo.fresh("llama"), 300, 10, None)
    with registered():
        model = zoo.fresh("llama")
        mixed = _train(model, 300, 10, generate)
        assert hf_paged.cache_stats(model).calls == 30
    for name, weights in plain.items():
        assert torch.equal(weights, mixed[name]), name


def test_config_and_plain_forward_are_untouched() -> None:
    model, batch = zoo.build("llama"), ids(2, 11)
    before_impl = model.config._attn_implementation
    with torch.no_grad():
        before = model(batch).logits
    with registered():
        paged(model, batch)
        assert model.config._attn_implementation == before_impl
        with torch.no_grad():
            assert torch.equal(model(batch).logits, before)
    with torch.no_grad():
        assert torch.equal(model(batch).logits, before)


def test_plain_forwards_in_another_thread_see_no_bit_change() -> None:
    model, batch = zoo.build("llama"), ids(2, 11)
    with torch.no_grad():
        want = model(batch).logits
    stop, wrong, count = threading.Event(), [], [0]

    def forwards() -> None:
        with torch.no_grad():
            while not stop.is_set():
                count[0] += 1
                if not torch.equal(model(batch).logits, want):
                    wrong.append(count[0])

    with registered():
        thread = threading.Thread(target=forwards)
        thread.start()
        try:
            for _ in range(8):
                paged(model, batch, max_new_tokens=16)
        finally:
            stop.set()
            thread.join()
    assert count[0] > 5 and not wrong


def test_concurrent_paged_calls_on_one_model_do_not_mix() -> None:
    model = zoo.build("llama")
    prompts = [left_padded([13, 9 + i], seed=i) for i in range(4)]
    want = [stock(model, **p) for p in prompts]
    got: dict[int, list[torch.Tensor]] = {i: [] for i in range(4)}
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(4):
                got[i].append(paged(model, **prompts[i]))
        except BaseException as error:
            failures.append(error)

    with registered():
        paged(model, **prompts[0])
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    for i in range(4):
        assert len(got[i]) == 4 and all(torch.equal(out, want[i]) for out in got[i])


def test_gradient_checkpointing_in_train_mode_gives_the_same_gradients() -> None:
    def gradients(between: bool) -> list[torch.Tensor]:
        model = zoo.fresh("llama")
        model.gradient_checkpointing_enable()
        model.train()
        batch = ids(2, 12)
        if between:
            model.eval()
            paged(model, batch)
            model.train()
        model(input_ids=batch, labels=batch).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    want = gradients(False)
    with registered():
        got = gradients(True)
    assert len(want) == len(got) and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_users_own_fullgraph_compile_keeps_working() -> None:
    model, batch = zoo.fresh("llama"), ids(2, 12)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, use_cache=False).logits

    with torch.no_grad():
        want = torch.compile(forward, fullgraph=True, backend="eager")(batch)
        torch.compiler.reset()
        with registered():
            paged(model, batch)
            compiled = torch.compile(forward, fullgraph=True, backend="eager")
            assert torch.equal(compiled(batch), want)
            paged(model, batch)
            assert torch.equal(compiled(batch), want)
    torch.compiler.reset()


def test_a_compiled_model_can_generate_paged() -> None:
    model, prompt = zoo.fresh("llama"), left_padded([11, 7])
    want = stock(model, **prompt)
    model.forward = torch.compile(model.forward, backend="eager")
    with registered():
        assert torch.equal(paged(model, **prompt), want)
        assert torch.equal(paged(model, **prompt), want)
    torch.compiler.reset()


def test_unregister_restores_every_attribute() -> None:
    mixin, names = compat.GenerationMixin, compat.generation_configuration_utils
    before = {**mixin.__dict__}, names.ALL_CACHE_IMPLEMENTATIONS
    hf_paged.register()
    hf_paged.register()
    assert mixin.generate is not before[0]["generate"]
    hf_paged.unregister()
    hf_paged.unregister()
    assert {**mixin.__dict__} == before[0] and names.ALL_CACHE_IMPLEMENTATIONS is before[1]


def test_unregister_lets_a_running_call_finish() -> None:
    model, batch = zoo.build("llama"), ids(2, 9)
    want = stock(model, batch, max_new_tokens=12)

    class UnregisterMidway:
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 4:
                hf_paged.unregister()
            return scores

    hf_paged.register(memory="32MiB", block_size=4)
    try:
        assert torch.equal(paged(model, batch, max_new_tokens=12, logits_processor=[UnregisterMidway()]), want)
    finally:
        hf_paged.unregister()


def test_the_pool_dies_with_the_model() -> None:
    import gc
    import weakref

    with registered():
        model = zoo.fresh("llama")
        paged(model, ids(1, 9))
        shared = hf_paged.generation.models._models[model].shared
        pool, ref = weakref.ref(shared.pool), weakref.ref(model)
        del model, shared
        gc.collect()
        assert ref() is None, "something of ours keeps the model alive"
        assert pool() is None


@pytest.mark.parametrize("kwarg", ["past_key_values", compat.CACHE_KWARG])
def test_a_cache_made_by_hand_needs_no_register(kwarg: str) -> None:
    model, prompt = zoo.build("llama"), left_padded([11, 7])
    want = stock(model, **prompt)
    cache = hf_paged.PagedCache(model.config, cache_config={"block_size": 4, "memory": "8MiB"})
    assert not hf_paged.generation.is_registered()
    assert torch.equal(stock(model, **prompt, **{kwarg: cache}), want)
