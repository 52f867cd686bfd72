"""From a name to a model and its tokenizer.

Owns what a model's name may be and the dtype it is loaded in; the name ``demo`` it hands to ``demo_model``. Knows
nothing of KV caches, backends or engines. Called by the command line, by the engine's constructors and by tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_paged.errors import ConfigError
from hf_paged.model.demo_model import demo_path

#: the name that stands for the bundled model everywhere a model is named
DEMO = "demo"


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    dtype: torch.dtype | str | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model for inference, and its tokenizer with left padding.

    Args:
        model: ``"demo"``, a model id or a folder; or a loaded model, which is returned as it is.
        dtype: a torch dtype or its name; None keeps what the checkpoint holds.
        progress: called with one short sentence when a step begins that takes seconds.

    Raises:
        ConfigError: the dtype does not exist.
        UnsupportedError: ``"demo"`` was asked for and a package it needs is missing; the message says how to get it.
    """
    if isinstance(model, PreTrainedModel):
        source = model.name_or_path
        if not source:
            raise ConfigError("this model does not say where it came from; load its tokenizer yourself")
        return model, load_tokenizer(source)

    report = progress or (lambda _: None)
    source = str(demo_path(report)) if str(model) == DEMO else str(model)
    report(f"loading {model}")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=_torch_dtype(dtype) or "auto")
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"cannot load {model!r} ({first}); give a folder, a hub id, or {DEMO!r}") from error
    return loaded.eval(), load_tokenizer(source)


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, ready for batches: pads on the left, and with the end token where no pad token is."""
    name = str(demo_path()) if str(source) == DEMO else str(source)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} is not a torch dtype; try 'float32' or 'bfloat16'")
    return found
