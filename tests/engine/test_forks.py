"""Several completions of one prompt, the best of them, and what a host tier has to get right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import LLM, SamplingParams
from hf_paged.cache.offload import HostTier
from tests import zoo
from tests.engine.fake import AdmitAll
from tests.engine.test_llm_parity import alone, check_clean, prompts


@pytest.mark.versions
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["llama", "bloom", "mamba2", "jamba", "qwen3_next"])
def test_completions_share_the_computation_of_their_prompt(name: str, overlap: bool) -> None:
    model, prompt = zoo.build(name), prompts()[5]
    llm = LLM(model, block_size=4, num_blocks=200, overlap=overlap)
    greedy = llm.generate([prompt], SamplingParams(temperature=0, n=3, max_tokens=8))[0]
    assert [c.token_ids for c in greedy.outputs] == [alone(model, prompt, max_new_tokens=8)] * 3
    # the prompt once, and each completion's own tokens but the last; overlapping steps compute none too many here
    assert llm.stats()["computed_tokens"] == len(prompt) + 3 * 7
    params = SamplingParams(temperature=1.0, n=4, seed=5, max_tokens=8)
    together = [c.token_ids for c in llm.generate([prompt], params)[0].outputs]
    small = LLM(model, block_size=4, num_blocks=200, max_num_seqs=2, overlap=overlap)  # two have to wait
    assert [c.token_ids for c in small.generate([prompt], params)[0].outputs] == together
    assert len({tuple(tokens) for tokens in together}) == 4
    check_clean(llm)
    check_clean(small)


def test_the_best_of_several_are_the_likeliest() -> None:
    model, prompt = zoo.build("llama"), prompts()[2]
    llm = LLM(model, block_size=4, num_blocks=200)
    options: dict[str, Any] = {"temperature": 1.2, "seed": 3, "max_tokens": 6}
    every = llm.generate([prompt], SamplingParams(n=6, logprobs=0, **options))[0].outputs
    likeliest = sorted(every, key=lambda c: -(c.cumulative_logprob or 0.0))
    best = llm.generate([prompt], SamplingParams(n=2, best_of=6, **options))[0].outputs
    assert [c.token_ids for c in best] == [c.token_ids for c in likeliest[:2]]
    assert [c.index for c in best] == [0, 1] and [c.logprobs for c in best] == [None, None]
    assert [c.cumulative_logprob for c in best] == pytest.approx([c.cumulative_logprob for c in likeliest[:2]])
    rows = model(torch.tensor([[*prompt, *best[0].token_ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    total = float(rows.gather(1, torch.tensor(best[0].token_ids)[:, None]).sum())
    assert best[0].cumulative_logprob == pytest.approx(total, abs=1e-3)
    check_clean(llm)


def test_blocks_that_come_back_wrong_from_the_host_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: without the way back, requests go on from whatever is in their blocks."""
    monkeypatch.setattr(HostTier, "swap_in", lambda self, pairs: None)
    model = zoo.build("llama")
    llm = LLM(model, block_size=4, num_blocks=16, max_num_batched_tokens=16, preemption="swap", host_memory="1MiB")
    llm.core.scheduler.ratio = AdmitAll()
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=10))
    assert llm.stats()["swaps"] >= 3
    assert [o.outputs[0].token_ids for o in outputs] != [alone(model, p) for p in prompts()]
    check_clean(llm)


def test_swapping_is_chosen_where_it_costs_less() -> None:
    swaps = {}
    for seconds in (1e-9, 1e3):
        llm = LLM(zoo.build("llama"), block_size=4, num_blocks=16, max_num_batched_tokens=16, host_memory="1MiB")
        llm.core.scheduler.ratio = AdmitAll()
        llm.core.cost.seconds_per_swap = seconds
        llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=10))
        assert llm.stats()["preemptions"] >= 3
        swaps[seconds] = llm.stats()["swaps"]
    assert swaps[1e-9] >= 3 and swaps[1e3] == 0
