"""What every test may rely on: no network, two threads, and the demo model loaded once a session."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct in fp32 with its tokenizer (left padding). Tests must leave both as they found them."""
    pytest.importorskip("gguf", reason="the demo model needs the `demo` extra")
    from hf_paged.model.loader import load

    return load("demo", dtype=torch.float32)
