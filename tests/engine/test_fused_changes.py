"""What becomes of the native decoder as models, weights and memory change under it, in the engine and in generate()."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

import hf_paged
from hf_paged.kernels import cpu
from hf_paged.model import parts
from hf_paged.model.fused import FusedDecoder
from hf_paged.model.runner import ModelRunner
from tests import zoo
from tests.engine.test_fused import GREEDY, assert_stock_and, generate, is_fused, make
from tests.engine.test_llm_parity import alone, prompts
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

pytestmark = [
    pytest.mark.skipif(cpu.unavailable() is not None, reason="the CPU kernels are not built"),
    pytest.mark.usefixtures("told"),
]


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each time that a model's weights were packed."""
    made, found = ModelRunner._made_fused, []

    def counted(self: ModelRunner) -> FusedDecoder:
        found.append(None)
        return made(self)

    monkeypatch.setattr(ModelRunner, "_made_fused", counted)
    return found


# -- what goes wrong in it -----------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_into_memory_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.fresh("llama")

    def full(*args: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "hf_paged"):
        patch.setattr(parts, "pack", full)
        llm = assert_stock_and(False, model)
    assert "can't allocate" in caplog.text
    caplog.clear()
    llm.weights_changed()  # which is looked at anew
    assert is_fused(llm)


def test_a_model_that_does_not_name_its_head(monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture) -> None:
    model = zoo.fresh("llama")

    def unnamed(self: Any) -> Any:
        raise NotImplementedError("which head?")

    monkeypatch.setattr(type(model), "get_output_embeddings", unnamed)
    assert_stock_and(False, model, num_blocks=None, memory="1MiB")
    assert "which head?" in told.text
    told.clear()


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16], ids=str)
def test_whatever_dtype_torch_makes_by_default(kind: torch.dtype) -> None:
    model, batch = zoo.fresh("qwen3"), prompts()[:3]
    want = [alone(model, p) for p in batch]
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        llm = make(model)
        got = generate(llm, batch)
    finally:
        torch.set_default_dtype(before)
    assert got == want
    assert is_fused(llm)


@pytest.mark.parametrize("what", ["class", "function"])
def test_code_that_was_changed_is_seen_once_it_was_said(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("llama")
    llm = assert_stock_and(True, model)
    mlp = type(model.model.layers[0].mlp)
    with monkeypatch.context() as patch:
        if what == "class":
            patch.setattr(
                mlp, "forward", lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
            )
        else:
            patch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *args: (q, k))
        llm.weights_changed()
        assert generate(llm, prompts()[:3]) == [alone(model, p) for p in prompts()[:3]]
        assert not is_fused(llm)
    llm.weights_changed()
    assert generate(llm, prompts()[:3]) == [alone(model, p) for p in prompts()[:3]]
    assert is_fused(llm)


def test_a_config_that_was_changed_is_looked_at_without_being_told() -> None:
    model = zoo.fresh("llama")
    llm = assert_stock_and(True, model)
    model.config.clip_qkv = 1e4
    assert generate(llm, prompts()[:3]) == [alone(model, p) for p in prompts()[:3]]
    assert not is_fused(llm)


@pytest.mark.parametrize("block_size", [32, 256])
def test_blocks_of_other_sizes(block_size: int) -> None:
    assert_stock_and(True, zoo.fresh("llama"), block_size=block_size)


def narrowed(model: Any) -> None:
    model.model.embed_tokens.weight = nn.Parameter(torch.randn(zoo.VOCAB, 31))


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("change", [lambda model: model.to("meta"), narrowed], ids=["meta", "narrowed"])
@pytest.mark.parametrize("running", [True, False])
def test_a_model_that_becomes_another_one_ends_the_call(
    change: Any, running: bool, optimize: bool, told: pytest.LogCaptureFixture
) -> None:
    """Also where nobody looks at weights, while requests run."""
    model = zoo.fresh("llama")
    llm = make(model, optimize=optimize)
    stream = llm.stream(prompts()[0], GREEDY)
    if running:
        next(stream)
    change(model)
    with pytest.raises((hf_paged.UnsupportedError, RuntimeError), match=r"make a new engine|size of tensor"):
        list(stream)
    assert not llm.core.has_work
    told.clear()  # a model that cannot run cannot be tried out


def test_a_model_found_unusual_is_not_packed_again_for_other_weights(packings: list[None]) -> None:
    model = zoo.fresh("llama")
    model.model.layers[1].clip_value = 1e4
    llm = make(model)
    for _ in range(3):
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.5)
        assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert len(packings) == 1
    del model.model.layers[1].clip_value
    generate(llm, prompts()[:2])
    assert len(packings) == 2 and is_fused(llm)


def test_weights_that_seemed_to_compute_something_else_are_not_held_against_others(
    packings: list[None], told: pytest.LogCaptureFixture
) -> None:
    model = zoo.fresh("llama")
    llm = make(model)
    weight = model.model.layers[1].mlp.down_proj.weight
    good = weight.detach().clone()

    def write(value: Any) -> None:
        with torch.no_grad():
            weight.copy_(value)

    def bad(times: int) -> None:
        """So many weights, one after the other, with each of which it is tried out once."""
        for _ in range(times):
            write(float("nan") * good)
            model.lm_head.weight.data.mul_(2)  # other weights than before, whatever the tree holds
            before = len(packings)
            for _ in range(2):
                llm.generate(prompts()[0], GREEDY, use_tqdm=False)
                assert not is_fused(llm)
            assert len(packings) == before + 1

    for _ in range(3):  # now and then they are bad, as in training
        bad(2)
        write(good)
        assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
        assert is_fused(llm)
    bad(3)
    assert "not tried again before weights_changed()" in told.text
    write(good)
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert not is_fused(llm), "after three in a row it is believed"
    llm.weights_changed()
    assert is_fused(llm)
    bad(2)
    write(good)
    generate(llm, prompts()[:2])
    assert is_fused(llm), "what was found before is forgotten"


def test_what_a_trial_found_that_began_before_it_was_to_be_reconsidered_does_not_count() -> None:
    model = zoo.fresh("llama")
    found = make(model).core.runner
    found.view.model.layers[1].clip_value = 1e4
    made = found._made_fused

    def reconsidered() -> FusedDecoder:
        found.reconsider()
        return made()

    found._made_fused = reconsidered
    found.follow_weights((("weights", 99), ("else", 1)))
    assert found.packed_bytes == 0
    found._made_fused = made
    del found.view.model.layers[1].clip_value
    found.follow_weights((("weights", 100), ("else", 1)))
    assert found.packed_bytes > 0


def test_the_head_is_read_where_it_is_in_bfloat16() -> None:
    model = zoo.fresh("llama").bfloat16()
    llm, head = make(model), model.lm_head.weight
    whole = sum(p.nbytes for p in model.parameters() if p.ndim == 2)
    own = head.nbytes + model.model.embed_tokens.weight.nbytes
    assert parts.Parts.of(llm.core.runner.view).packable_bytes == whole - own
    padding = llm.stats()["packed_bytes"] - (whole - own)
    assert 0 <= padding < head.nbytes
    assert parts.Parts.of(make(zoo.build("llama")).core.runner.view).packable_bytes == 2 * (whole - own + head.nbytes)
    before = generate(llm, prompts()[:3])
    with torch.no_grad():
        head.neg_()
    after = generate(llm, prompts()[:3])
    assert is_fused(llm) and after != before
    assert after == generate(make(model), prompts()[:3])


def test_nothing_is_set_aside_for_calls_that_pack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.cache.pool.free_memory", lambda device: 1 << 20)
    blocks = []
    for optimize in (True, False):
        model, batch = zoo.fresh("llama"), left_padded([11, 7])
        with registered(block_size=16, num_blocks=None, memory="50%"):
            paged(model, **batch, max_new_tokens=2, cache_config={"optimize": optimize})
            blocks.append(hf_paged.cache_stats(model).total_blocks)
    assert blocks[0] < blocks[1]


# -- under generate() ----------------------------------------------------------------------------------------------


def test_calls_in_several_threads_pack_once(packings: list[None]) -> None:
    model, batch = zoo.fresh("llama"), left_padded([11, 7, 19])
    want = stock(model, **batch, max_new_tokens=12)
    found: list[Any] = []
    with registered(block_size=16):
        start = threading.Barrier(4)

        def call() -> None:
            start.wait()
            found.append(paged(model, **batch, max_new_tokens=12))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert all(torch.equal(out, want) for out in found)
    assert len(packings) == 1


def test_a_look_at_the_model_while_it_is_tried_out_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("llama")
    found = make(model).core.runner
    view, watching = found.view, parts.Parts.watching
    others: list[threading.Thread] = []

    def watched(self: Any, run: Any) -> Any:
        def run_beside() -> Any:
            others.append(threading.Thread(target=found.refresh))
            others[-1].start()
            others[-1].join(0.2)
            return run()

        return watching(self, run_beside)

    monkeypatch.setattr(parts.Parts, "watching", watched)
    found.follow_weights((("weights", 99), ("else", 1)))
    others[0].join()
    assert found.view is view and found.packed_bytes > 0


def test_a_call_keeps_the_weights_it_began_with_while_others_follow_theirs() -> None:
    found = make(zoo.fresh("llama")).core.runner
    twin, plain = (found.for_call((("weights", 7), ("else", 1)), optimize) for optimize in (True, False))
    decoder = twin._native.decoder
    assert decoder is not None
    assert found._native.decoder is decoder
    assert plain._native.decoder is None
    found.follow_weights(None)
    assert found._native.decoder is None
    assert twin._native.decoder is decoder


def test_calls_with_and_without_share_one_pool(packings: list[None]) -> None:
    model, batch = zoo.fresh("llama"), left_padded([11, 7, 19])
    want = stock(model, **batch, max_new_tokens=12)
    with registered(block_size=16):
        for optimize in (False, True, False, True):
            hits = hf_paged.cache_stats(model).hit_tokens
            out = paged(model, **batch, max_new_tokens=12, cache_config={"optimize": optimize})
            assert torch.equal(out, want)
            stats = hf_paged.cache_stats(model)
            assert (stats.hit_tokens > hits) == (stats.calls > 1), "the pool stays"
            assert (stats.packed_bytes > 0) == (stats.calls > 1)
    assert len(packings) == 1


def test_a_call_without_runs_module_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = zoo.fresh("llama"), left_padded([11, 7, 19])
    calls: list[None] = []
    run = FusedDecoder.__call__
    monkeypatch.setattr(FusedDecoder, "__call__", lambda *args: (calls.append(None), run(*args))[1])
    with registered(block_size=16):
        for optimize in (True, False):
            calls.clear()
            paged(model, **batch, max_new_tokens=4, cache_config={"optimize": optimize})
            assert bool(calls) is optimize


def test_calls_side_by_side_have_states_of_their_own() -> None:
    """Each step of one waits for a step of the other, and their requests have the same names."""
    model = zoo.build("mamba2")
    batches = [ids(2, 9, seed=seed) for seed in (1, 2)]
    want = [stock(model, b, attention_mask=torch.ones_like(b), max_new_tokens=8) for b in batches]
    turn = threading.Barrier(2, timeout=30)

    def meet(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        turn.wait()
        return scores

    found: dict[int, Any] = {}
    with registered(block_size=16):
        paged(
            model,
            batches[0],
            attention_mask=torch.ones_like(batches[0]),
            max_new_tokens=2,
            cache_config={"engine": True},
        )

        def call(i: int) -> None:
            found[i] = paged(
                model, batches[i], attention_mask=torch.ones_like(batches[i]), max_new_tokens=8,
                logits_processor=[meet], cache_config={"engine": True},
            )  # fmt: skip

        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[i], want[i]) for i in range(2))


def test_the_right_amount_is_set_aside_beside_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.cache.pool.free_memory", lambda device: 1 << 20)
    for name in ("llama", "qwen3_moe", "phi3"):
        llm = make(zoo.build(name), num_blocks=None, memory="50%")
        packed = llm.stats()["packed_bytes"]
        assert 0.6 * packed <= llm.core.runner.pool.set_aside <= packed, name
