"""On a GPU the reference backend serves until kernels of its own come; it must be as exact there as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import generation
from tests import zoo
from tests.parity import modes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Any:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    hf_paged.register(memory="64MiB")
    yield
    hf_paged.unregister()
    torch.backends.cuda.matmul.allow_tf32 = allowed


def _moved(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _moved(v) for k, v in value.items()}
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("mode", ["padded", "beams", "sample", "prompt_lookup", "chunked_prefill", "ragged_ends"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "gpt2", "deepseek_v3", "llama4", "bart"])
def test_paged_equals_stock_on_cuda(name: str, mode: str) -> None:
    model = zoo.fresh(name).cuda()
    call = modes.MODES[mode](name)
    options = {
        "max_new_tokens": modes.NEW_TOKENS,
        "return_dict_in_generate": True,
        "output_scores": True,
        **call.options,
    }

    def run(**paging: Any) -> Any:
        torch.manual_seed(call.seed or 0)
        return model.generate(**_moved(call.inputs), **options, **paging)

    want = run()
    for _ in range(3):  # probe, native, native with prefixes
        got = run(cache_implementation="paged")
        assert torch.equal(got.sequences, want.sequences)
        for a, b in zip(got.scores, want.scores, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
        del got
    generation.check_invariants(model)
    assert hf_paged.cache_stats(model).used_blocks == 0


def test_a_changed_weight_is_noticed_on_cuda() -> None:
    model = zoo.fresh("llama").cuda()
    prompt = modes.prompt(rows=1)["input_ids"].cuda()
    options = {"max_new_tokens": 8, "do_sample": False}
    model.generate(prompt, cache_implementation="paged", **options)
    model.generate(prompt, cache_implementation="paged", **options)
    hits = hf_paged.cache_stats(model).hit_tokens
    assert hits > 0
    model.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 3.0
    got = model.generate(prompt, cache_implementation="paged", **options)
    assert torch.equal(got, model.generate(prompt, **options))
    assert hf_paged.cache_stats(model).hit_tokens == hits
