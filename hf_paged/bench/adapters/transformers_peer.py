"""What peers on a transformers model have in common: loading it, and nothing that ends at an end token."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_paged.bench.wire.hf_paged_peer import Peer


class TransformersPeer(Peer):
    """``self.model`` is loaded, in eval mode, and stock."""

    packages: tuple[str, ...] = ("torch", "transformers")

    def load(self) -> None:
        torch.set_num_threads(self.job.threads)
        torch.set_grad_enabled(False)
        dtype = getattr(torch, self.job.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(self.job.model, dtype=dtype).eval()
        for weights in self.model.parameters():
            weights.sum()  # files are mapped, and in memory only once they are read
        self.model_bytes = psutil.Process().memory_info().rss

    def details(self) -> dict[str, Any]:
        weights = sum(tensor.nbytes for tensor in self.model.parameters())
        return {"rss_model": self.model_bytes, "weight_bytes": weights}

    def generation_config(self, samples: int, **options: Any) -> GenerationConfig:
        """Greedy for one sample, else from the whole vocabulary; without end tokens."""
        sampling = {"do_sample": True, "num_return_sequences": samples, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        chosen: dict[str, Any] = sampling if samples > 1 else {"do_sample": False}
        return GenerationConfig(**chosen, **options)
