"""Prefixes of models with recurrent layers: requests go on from states others left, and get what they get alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import LLM, SamplingParams
from tests import zoo
from tests.engine.fake import AdmitAll
from tests.engine.test_llm_parity import alone, check_clean, prompts, wanted
from tests.regressions.helpers import ids

GREEDY = SamplingParams(temperature=0, max_tokens=10)
#: jamba takes a prompt in one piece only
NAMES = [
    pytest.param(n, marks=pytest.mark.versions) if n in ("mamba2", "qwen3_next") else n
    for n in zoo.RECURRENT
    if n != "jamba"
]
HEAD = ids(1, 21, seed=60)[0].tolist()


def make(name: str, **options: Any) -> LLM:
    return LLM(zoo.build(name), **{"block_size": 4, "num_blocks": 400, **options})


def generate(llm: LLM, prompt: list[int], **options: Any) -> Any:
    params = SamplingParams(temperature=0, max_tokens=10, **options)
    return llm.generate([prompt], params, use_tqdm=False)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("overlap", [False, True])
def test_batches_go_on_from_what_batches_before_them_left(name: str, overlap: bool) -> None:
    llm = make(name, max_num_batched_tokens=16, overlap=overlap)
    hits = []
    for _ in range(3):
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == wanted(name)
        hits.append([o.num_cached_tokens for o in outputs])
        check_clean(llm)
    # where the first two of those with a common head part, a state is kept, and others have it
    assert set(hits[0][0::2]) == {0} and hits[0][1] == 0 and 13 in hits[0]
    assert overlap or hits[0][3] == 13
    # the same prompt once more parts only before its last token, and finds that place when it comes a third time
    assert sum(hits[2]) > sum(hits[1]) > sum(hits[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_small_pool_and_little_memory_for_states_change_nothing(name: str, preemption: str) -> None:
    llm = make(
        name, num_blocks=16, max_num_batched_tokens=16, preemption=preemption, checkpoint_memory="16KiB",
        host_memory="1MiB" if preemption == "swap" else None,
    )  # fmt: skip
    llm.core.scheduler.ratio = AdmitAll()
    for _ in range(3):
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == wanted(name)
        assert llm.stats()["num_checkpoints"] * llm.core.runner.state_bytes <= 16 << 10
        check_clean(llm)


@pytest.mark.parametrize("name", NAMES)
def test_the_next_turn_of_a_chat_goes_on_from_the_end_of_the_last(name: str) -> None:
    model, llm = zoo.build(name), make(name)
    prompt, total = list(HEAD), 0
    for turn in range(4):
        output = generate(llm, prompt)
        assert output.outputs[0].token_ids == alone(model, prompt)
        assert output.num_cached_tokens == total, f"turn {turn}"
        total = len(prompt) + 9  # the last token of the answer has no keys and values yet
        prompt = [*prompt, *output.outputs[0].token_ids, 5, 6 + turn, 7]
    check_clean(llm)


def test_a_corrupt_state_shows() -> None:
    """The control: what is found is what is gone on from."""
    llm = make("qwen3_next")
    first = generate(llm, HEAD)
    longer = [*HEAD, *first.outputs[0].token_ids, 5, 6, 7]
    generate(llm, [9, 8, 7])  # a step, so that the state that the first one ended with is stored
    states = [node.state.state for node in llm.core.manager._tree.nodes() if node.state is not None]
    layers = [layer for state in states if state is not None for layer in state.values()]
    for value in [value for layer in layers for value in vars(layer).values() if isinstance(value, dict)]:
        for tensor in [t for t in value.values() if isinstance(t, torch.Tensor)]:
            tensor.mul_(-3)
    output = generate(llm, longer)
    assert output.num_cached_tokens == len(HEAD) + 9
    assert output.outputs[0].token_ids != alone(zoo.build("qwen3_next"), longer)


def test_other_weights_do_not_go_on_from_old_states() -> None:
    model = zoo.fresh("qwen3_next")
    llm = LLM(model, block_size=4, num_blocks=400)
    first = generate(llm, HEAD)
    longer = [*HEAD, *first.outputs[0].token_ids, 5]
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(-1.5)
    output = generate(llm, longer)
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == alone(model, longer)


def test_completions_and_beams_of_one_prompt_share_a_stored_state() -> None:
    model, llm = zoo.build("qwen3_next"), make("qwen3_next")
    first = generate(llm, HEAD)
    longer = [*HEAD, *first.outputs[0].token_ids, 5, 6, 7]
    output = generate(llm, longer, n=3)
    assert output.num_cached_tokens == len(HEAD) + 9
    assert [c.token_ids for c in output.outputs] == [alone(model, longer)] * 3
    searched = llm.generate([longer], SamplingParams(temperature=0, num_beams=3, max_tokens=10), use_tqdm=False)[0]
    assert searched.num_cached_tokens > 0
    assert searched.outputs[0].token_ids == alone(model, longer, num_beams=3)
    check_clean(llm)


def test_scores_of_a_prompt_need_all_of_it_computed() -> None:
    llm = make("qwen3_next")
    want = generate(llm, HEAD, prompt_logprobs=2)
    got = generate(llm, HEAD, prompt_logprobs=2)
    assert got.num_cached_tokens == 0 and len(got.prompt_logprobs) == len(HEAD)
    for a, b in zip(want.prompt_logprobs[1:], got.prompt_logprobs[1:], strict=True):
        assert a.keys() == b.keys()


def test_a_failed_step_leaves_no_state_that_was_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, llm = zoo.build("qwen3_next"), make("qwen3_next")
    first = generate(llm, HEAD)  # the state it ends with is kept by the step after it

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "run", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            generate(llm, [9, 8, 7])
    longer = [*HEAD, *first.outputs[0].token_ids, 5]
    assert generate(llm, longer).outputs[0].token_ids == alone(model, longer)
    check_clean(llm)


def test_why_not_more_was_found_is_told() -> None:
    llm = make("qwen3_next")
    generate(llm, HEAD)
    second = generate(llm, [*HEAD[:11], 7, 7, 7])
    assert second.num_cached_tokens == 0
    assert "11 tokens were stored" in llm.explain(second.request_id)[0].why_not_more
    third = generate(llm, [*HEAD[:11], 8, 8, 8])
    assert third.num_cached_tokens == 11
    whole = make("jamba")
    assert "only in one piece" in whole.explain(generate(whole, HEAD).request_id)[0].why_not_more
    off = make("qwen3_next", prefix_caching=False)
    assert "prefix_caching is off" in off.explain(generate(off, HEAD).request_id)[0].why_not_more


def test_a_long_prompt_is_computed_in_pieces_beside_others() -> None:
    model, llm = zoo.build("qwen3_next"), make("qwen3_next", max_num_batched_tokens=16)
    long, short = ids(1, 90, seed=61)[0].tolist(), HEAD[:5]
    outputs = llm.generate([short, long], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [alone(model, short), alone(model, long)]
    assert llm.stats()["steps"] >= 90 // 16
    check_clean(llm)


@pytest.mark.parametrize("name", zoo.RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whether_a_model_goes_on_from_a_state_is_told_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        llm = LLM(zoo.fresh(name).to(dtype), block_size=4, num_blocks=40)
        assert llm.core.runner.continues == (name != "jamba")


def test_memory_that_holds_no_state_keeps_nothing() -> None:
    llm = make("lfm2", checkpoint_memory=64)
    assert not llm.core.manager.prefix_caching
    first = generate(llm, HEAD)
    assert generate(llm, HEAD).outputs[0].token_ids == first.outputs[0].token_ids == alone(zoo.build("lfm2"), HEAD)
    assert "checkpoint_memory" in llm.explain(first.request_id)[0].why_not_more
