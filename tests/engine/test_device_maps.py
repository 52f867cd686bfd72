"""Models whose weights accelerate has put somewhere else run on the engine as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged import LLM, SamplingParams
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts

accelerate = pytest.importorskip("accelerate", reason="needs the `accelerate` extra")


def parts(model: Any, elsewhere: str) -> dict[str, str]:
    """A device map by module, with the second layer on ``elsewhere``."""
    found = {}
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            found[name] = elsewhere if ".1." in name else "cpu"
    return found


@pytest.mark.parametrize("kind", ["hooks", "cpu_offload", "disk"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_dispatched_models(name: str, kind: str, tmp_path: Path) -> None:
    model, batch = zoo.fresh(name), prompts()[:4]
    want = [alone(model, p) for p in batch]
    if kind == "hooks":
        accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    elif kind == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.parameters()).device.type == "meta"
    else:
        accelerate.dispatch_model(model, parts(model, "disk"), main_device="cpu", offload_dir=tmp_path)
        assert any(p.device.type == "meta" for p in model.parameters())
    llm = LLM(model, block_size=4, num_blocks=24, max_num_batched_tokens=16)
    outputs = llm.generate([*batch, batch[0]], SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.0))
    assert [o.outputs[0].token_ids for o in outputs] == [*want, want[0]]
    check_clean(llm)
