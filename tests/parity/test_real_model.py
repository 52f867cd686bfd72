"""SmolLM2-135M-Instruct in fp32 on the native kernels: real prompts, the same tokens as stock, 64 each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import generation
from hf_paged.generation.shared import profile_of

pytestmark = pytest.mark.model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Dear hiring manager,\n\nI am writing to",
    "Water boils at 100 degrees Celsius because",
    "Q: What is 17 times 23?\nA:",
    "The three laws of thermodynamics are",
    "SELECT name, COUNT(*) FROM",
    "In 1969, the first humans",
    "A good recipe for bread needs",
    "The difference between TCP and UDP is that",
    "import numpy as np\n\n# compute the mean of each column\n",
    "My favourite season is autumn, since",
    "<html>\n<head>\n<title>",
    "To be, or not to be, that is the question:",
    "Photosynthesis is the process by which",
    "List of prime numbers: 2, 3, 5, 7,",
    "The patient was admitted with",
    "Il était une fois",
    "Roses are red, violets are blue,",
]


@pytest.fixture
def model(smollm2: tuple[Any, Any]) -> Any:
    hf_paged.register(memory="512MiB")
    yield smollm2
    generation.check_invariants(smollm2[0])
    assert hf_paged.cache_stats(smollm2[0]).used_blocks == 0
    hf_paged.unregister()


def test_twenty_prompts_give_the_same_64_tokens(model: Any) -> None:
    lm, tokenizer = model
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    want = lm.generate(**inputs, **options)
    on_engine = lm.generate(**inputs, **options, cache_implementation="paged")
    assert torch.equal(on_engine, want)
    generation.clear(lm)
    profile = profile_of(lm.config)
    before = profile.native_calls
    got = lm.generate(**inputs, **options, cache_implementation="paged", cache_config={"engine": False})
    assert profile.native_calls - before == 64 * lm.config.num_hidden_layers
    assert len(hf_paged.cache_stats(lm).native) == lm.config.num_hidden_layers
    assert torch.equal(got, want)
    again = lm.generate(**inputs, **options, cache_implementation="paged")  # every prompt now comes from the tree
    assert torch.equal(again, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_stay_close_when_teacher_forced(model: Any, dtype: torch.dtype) -> None:
    """Free-running text may part at ties; fed the same tokens, logits must agree with fp32 as well as stock's do."""
    import copy

    lm, tokenizer = model
    half = copy.deepcopy(lm).to(dtype)
    ids = tokenizer(PROMPTS[1] + PROMPTS[14] + PROMPTS[9], return_tensors="pt").input_ids
    split = ids.shape[1] // 2
    with torch.no_grad():
        truth = lm(ids).logits[:, split:].float()
        stock = half(ids).logits[:, split:].float()
        cache = hf_paged.PagedCache(half.config, cache_config={"memory": "256MiB"})
        half(ids[:, :split], past_key_values=cache)
        cache.reset()  # the first forward was the probe
        half(ids[:, :split], past_key_values=cache)
        steps = [half(ids[:, i : i + 1], past_key_values=cache).logits for i in range(split, ids.shape[1])]
        got = torch.cat(steps, dim=1).float()
    assert (got - truth).abs().mean() <= 1.2 * (stock - truth).abs().mean() + 1e-3
    agree, stock_agree = ((x.argmax(-1) == truth.argmax(-1)).float().mean() for x in (got, stock))
    assert agree >= stock_agree - 0.1
