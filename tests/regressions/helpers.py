"""Shared by the regression tests: a registered package around each test and a small padded batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as tf

import hf_paged
from hf_paged import generation
from tests import zoo


@contextmanager
def registered(**options: Any) -> Iterator[None]:
    """``register()`` for the duration; on leaving, every pool's books must balance and no block may be owned."""
    hf_paged.register(**{"memory": "32MiB", "block_size": 4, **options})
    try:
        yield
        for model in list(generation.models._models):
            generation.check_invariants(model)
            assert generation.cache_stats(model).used_blocks == 0, "blocks are still owned after every call returned"
    finally:
        hf_paged.unregister()


def ids(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, zoo.VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of random prompts of these lengths, padded on the left."""
    width = max(lengths)
    tokens, mask = ids(len(lengths), width, seed), torch.ones(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
    tokens[mask == 0] = zoo.PAD
    return {"input_ids": tokens, "attention_mask": mask}


def decoder_of_an_encoder_decoder(name: str, encoder_layers: int) -> Any:
    """Two layers of the family ``name`` as a model of their own, which takes no position_ids."""
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(
        vocab_size=zoo.VOCAB, d_model=32, encoder_layers=encoder_layers, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=64, is_decoder=True, is_encoder_decoder=False, pad_token_id=zoo.PAD, bos_token_id=1,
        eos_token_id=None, forced_eos_token_id=None, max_position_embeddings=128, init_std=0.3,
    )  # fmt: skip
    return getattr(tf, f"{name}ForCausalLM")(config).eval()


def paged(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.generate(*args, cache_implementation="paged", **{"do_sample": False, "max_new_tokens": 8, **kwargs})


def stock(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.generate(*args, **{"do_sample": False, "max_new_tokens": 8, **kwargs})
