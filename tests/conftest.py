"""What every test may rely on: no network, one thread, and the demo model loaded once a session."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tiny models gain nothing from a second thread, and waiting threads that spin cost a busy machine dearly; tests run
# in parallel processes instead. Tests of threading set their own number.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct in fp32 with its tokenizer (left padding). Tests must leave both as they found them."""
    pytest.importorskip("gguf", reason="the demo model needs the `demo` extra")
    from hf_paged.model.loader import load

    return load("demo", dtype=torch.float32)
