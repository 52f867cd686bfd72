"""Every request of a batch gets the tokens that stock ``generate()`` gives for its row alone."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import LLM, SamplingParams
from tests import zoo
from tests.engine.fake import AdmitAll
from tests.regressions.helpers import ids

PACKED = [
    "llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "opt", "mixtral", "qwen3_moe", "gpt_neox",
    "gptj", "phi3", "granite", "olmo2", "llama4", "gemma3n",
]  # fmt: skip
DENSE = ["deepseek_v3", "bloom", "falcon", "mpt"]
RECURRENT = ["qwen3_next", "qwen3_5", "mamba2", "jamba", "bamba", "lfm2"]


def prompts() -> list[list[int]]:
    """Twelve of mixed lengths; every second one begins with the same 13 tokens."""
    head = ids(1, 13, seed=50)[0].tolist()
    own = [ids(1, 3 + 2 * i, seed=i)[0].tolist() for i in range(12)]
    return [[*head, *p] if i % 2 else p for i, p in enumerate(own)]


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    row = torch.tensor([prompt])
    out = model.generate(
        row, attention_mask=torch.ones_like(row), **{"do_sample": False, "max_new_tokens": 10, **options}
    )
    return out[0, len(prompt) :].tolist()


def check_clean(llm: LLM) -> None:
    llm.core.manager.check_invariants()
    assert llm.core.manager.stats().owned_blocks == 0, "blocks are still owned after every request ended"


SMOKE = ("llama", "gpt2", "gemma3", "bloom", "mamba2", "qwen3_next")
NAMES = [
    pytest.param(n, marks=pytest.mark.versions) if n in SMOKE else n for n in (*PACKED, *DENSE, *RECURRENT)
]  # fmt: skip


#: every pair of two values is in one of these; the rest of the product is slow
PAIRS = [
    ("fcfs", "recompute", False), ("fcfs", "swap", True), ("lpm", "recompute", True), ("lpm", "swap", False),
    ("priority", "swap", True), ("priority", "recompute", False),
]  # fmt: skip
MODES = [
    pytest.param(
        *mode,
        id="-".join([*mode[:2], "overlap" if mode[2] else "serial"]),
        marks=[] if mode in PAIRS else pytest.mark.slow,
    )
    for mode in itertools.product(["fcfs", "lpm", "priority"], ["recompute", "swap"], [False, True])
]  # fmt: skip


@functools.cache
def wanted(name: str) -> list[list[int]]:
    return [alone(zoo.build(name), p) for p in prompts()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("policy", "preemption", "overlap"), MODES)
def test_staggered_requests_under_memory_pressure(name: str, policy: str, preemption: str, overlap: bool) -> None:
    llm = LLM(
        zoo.build(name), block_size=4, num_blocks=16, max_num_batched_tokens=16, policy=policy, preemption=preemption,
        overlap=overlap, host_memory="1MiB" if preemption == "swap" else None,
    )  # fmt: skip
    assert llm.core.runner.packed == (name in PACKED)
    llm.core.scheduler.ratio = AdmitAll()
    urgencies = [i % 3 for i in range(12)]
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=10), priority=urgencies)
    assert [o.outputs[0].token_ids for o in outputs] == wanted(name)
    stats = llm.stats()
    if name != "mamba2":  # it has no blocks to run out of
        assert stats["preemptions"] >= 3
        assert (stats["swaps"] >= 1) == (preemption == "swap")
    assert stats["free_host_blocks"] == stats["host_blocks"]
    assert any(o.num_cached_tokens for o in outputs) == (name != "jamba"), "jamba computes prompts in one piece"
    check_clean(llm)


def test_the_users_model_is_not_touched() -> None:
    model = zoo.fresh("llama")
    model.train()
    state = {name: p.clone() for name, p in model.state_dict().items()}
    before = {**vars(model.config)}
    llm = LLM(model, block_size=4, num_blocks=64)
    got = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=6))[0]
    assert model.training and all(m.training for m in model.modules())
    assert vars(model.config) == before
    assert all(torch.equal(p, state[name]) for name, p in model.state_dict().items())
    model.eval()
    assert got.outputs[0].token_ids == alone(model, [5, 6, 7, 8], max_new_tokens=6)


def test_changed_weights_are_seen_and_old_prefixes_are_not() -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 20)[0].tolist()
    llm = LLM(model, block_size=4, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=6)
    first = llm.generate([prompt], params)[0]
    again = llm.generate([prompt], params)[0]
    assert again.num_cached_tokens == 19 and again.outputs[0].token_ids == first.outputs[0].token_ids
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(-1.5)
    changed = llm.generate([prompt], params)[0]
    assert changed.num_cached_tokens == 0
    assert changed.outputs[0].token_ids == alone(model, prompt, max_new_tokens=6)
    assert changed.outputs[0].token_ids != first.outputs[0].token_ids, "the test needs a change that matters"


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "no_repeat_ngram": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "bad_words": ({"bad_words_ids": [[5], [7, 9]]}, {"bad_words_ids": [[5], [7, 9]]}),
    "suppress": ({"suppress_tokens": [4, 5, 6]}, {"suppress_tokens": [4, 5, 6]}),
    "begin_suppress": ({"begin_suppress_tokens": list(range(40))}, {"begin_suppress_tokens": list(range(40))}),
    "sequence_bias": ({"sequence_bias": [[[8], 4.0]]}, {"sequence_bias": [[[8], 4.0]]}),
    "forced_eos": ({"forced_eos_token_id": 9}, {"forced_eos_token_id": 9}),
    "encoder_penalty": ({"encoder_repetition_penalty": 1.4}, {"encoder_repetition_penalty": 1.4}),
    "prefix_fn": (
        {"prefix_allowed_tokens_fn": lambda _, row: [3 + len(row) % 5, 11]},
        {"prefix_allowed_tokens_fn": lambda _, row: [3 + len(row) % 5, 11]},
    ),
}


@pytest.mark.versions
def test_every_row_has_options_of_its_own() -> None:
    model = zoo.build("llama")
    params = [SamplingParams(temperature=0, max_tokens=10, **ours) for ours, _ in OPTIONS.values()]
    batch = prompts()[: len(params)]
    want = [alone(model, p, **theirs) for p, (_, theirs) in zip(batch, OPTIONS.values(), strict=True)]
    plain = [alone(model, p) for p in batch]
    llm = LLM(model, block_size=4, num_blocks=24, max_num_batched_tokens=16)
    llm.core.scheduler.ratio.value = 0.1
    got = [o.outputs[0].token_ids for o in llm.generate(batch, params)]
    assert dict(zip(OPTIONS, got, strict=True)) == dict(zip(OPTIONS, want, strict=True))
    assert sum(a != b for a, b in zip(want, plain, strict=True)) >= 6, "the options must matter"
    check_clean(llm)


def test_sampling_is_reproducible_whatever_else_runs() -> None:
    model = zoo.build("llama")
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, max_tokens=12, seed=7, n=3)
    prompt = prompts()[3]
    alone_ = LLM(model, block_size=4, num_blocks=64).generate([prompt], params)[0]
    texts = [tuple(c.token_ids) for c in alone_.outputs]
    assert len(set(texts)) == 3
    llm = LLM(model, block_size=4, num_blocks=24, max_num_batched_tokens=8)
    llm.core.scheduler.ratio.value = 0.1
    others = [SamplingParams(temperature=1.0, max_tokens=10) for _ in range(6)]
    crowd = llm.generate([*prompts()[4:10], prompt], [*others, params])
    assert [tuple(c.token_ids) for c in crowd[-1].outputs] == texts
    assert llm.stats()["preemptions"] >= 1
    check_clean(llm)


def test_sampled_tokens_follow_the_distribution_stock_would_sample_from() -> None:
    model, prompt = zoo.build("llama"), prompts()[0]
    row = torch.tensor([prompt])
    scores = model(row).logits[0, -1] / 0.7
    kept = scores.topk(5)
    want = torch.zeros(zoo.VOCAB).index_add(0, kept.indices, kept.values.softmax(-1))
    llm = LLM(model, block_size=4, num_blocks=400)
    params = SamplingParams(temperature=0.7, top_k=5, max_tokens=1, n=2000, seed=3)
    found = torch.bincount(
        torch.tensor([c.token_ids[0] for c in llm.generate([prompt], params)[0].outputs]), minlength=zoo.VOCAB
    )
    assert set(found.nonzero().flatten().tolist()) <= set(kept.indices.tolist())
    assert float((found / 2000 - want).abs().max()) < 0.05


@pytest.mark.parametrize("bad", ["processor", "ids", "empty", "too long"])
def test_a_bad_request_ends_alone(bad: str) -> None:
    model = zoo.build("llama")
    llm = LLM(model, block_size=4, num_blocks=24)
    good, params = prompts()[:3], SamplingParams(temperature=0, max_tokens=6)
    want = [alone(model, p, max_new_tokens=6) for p in good]

    def explode(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 6:
            raise RuntimeError("boom")
        return scores

    if bad == "processor":
        failing = SamplingParams(temperature=0, max_tokens=6, logits_processors=[explode])
        outputs = llm.generate([*good, [5, 6, 7, 8]], [params, params, params, failing])
        assert isinstance(outputs[-1].error, RuntimeError) and outputs[-1].outputs[0].finish_reason == "error"
        assert len(outputs[-1].outputs[0].token_ids) == 3
        assert [o.outputs[0].token_ids for o in outputs[:3]] == want
    else:
        prompt = {"ids": [3, zoo.VOCAB], "empty": [], "too long": [5] * 120}[bad]
        kind = hf_paged.OutOfBlocksError if bad == "too long" else hf_paged.InvalidRequestError
        with pytest.raises(kind):
            llm.generate([*good, prompt], params)
        assert [o.outputs[0].token_ids for o in llm.generate(good, params)] == want
    check_clean(llm)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_models_the_engine_cannot_run_yet_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(hf_paged.UnsupportedError, match="cache_implementation='paged'"):
        LLM(zoo.build(name), block_size=4, num_blocks=24)
