"""How long sequences may be: rotary embeddings that depend on the longest one of a forward, and tables of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

import hf_paged
from hf_paged import LLM, SamplingParams
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.helpers import ids

LIMIT = 24
CONFIGS: dict[str, Any] = {
    "longrope": lambda: Phi3Config(
        **{**zoo._BASE, "sliding_window": None},
        original_max_position_embeddings=LIMIT,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": LIMIT,
        },
    ),
    "dynamic": lambda: LlamaConfig(
        **{**zoo._BASE, "max_position_embeddings": LIMIT},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
}  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("kind", CONFIGS)
def test_sequences_stay_below_the_length_at_which_they_would_change_each_other(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0, 0.25)
    model.generation_config.eos_token_id = None
    llm = LLM(model, block_size=4, num_blocks=64)
    short = [p[:n] for p, n in zip(prompts(), (3, 5, 7, 9, 11, 13), strict=False)]
    outputs = llm.generate([*short, [7] * (LIMIT - 3)], SamplingParams(temperature=0, max_tokens=10))
    assert [o.outputs[0].token_ids for o in outputs[:-1]] == [alone(model, p) for p in short]
    assert (len(outputs[-1].outputs[0].token_ids), outputs[-1].outputs[0].finish_reason) == (3, "length")
    with pytest.raises(hf_paged.InvalidRequestError, match=f"max_model_len={LIMIT}"):
        llm.generate([[7] * LIMIT])
    check_clean(llm)
    with pytest.raises(hf_paged.UnsupportedError, match=f"at most {LIMIT}"):
        LLM(model, block_size=4, num_blocks=64, max_model_len=LIMIT + 1)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj"])
def test_no_more_tokens_than_a_table_has_positions_for(name: str) -> None:
    model = zoo.build(name)
    limit = model.config.get_text_config().max_position_embeddings
    with pytest.raises(hf_paged.UnsupportedError, match=f"give at most {limit}"):
        LLM(model, block_size=4, num_blocks=128, max_model_len=limit + 1)
    llm = LLM(model, block_size=4, num_blocks=128, max_model_len=limit)
    prompt = ids(1, limit - 2)[0].tolist()
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)[0]
    assert output.error is None and len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_neox"])
def test_positions_that_are_computed_have_no_such_limit(name: str) -> None:
    assert LLM(zoo.build(name), block_size=4, num_blocks=128, max_model_len=5000).core.scheduler.max_model_len == 5000
