"""Shared by the engine's regression tests: models that stop before every step, and scripted text.

``stepped`` gives a model whose forwards pass a ``Gate``, so that a test can look at an engine between two steps and
act there, or make the model fail. With ``tokenizer_of`` and ``says`` a model says exactly the pieces a case needs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_paged import AsyncLLM, SamplingParams
from tests import zoo

#: seconds after which a test that waits for the engine gives up
PATIENCE = 20


class Gate:
    """What every forward of a model passes: it can be held there, counted, and made to fail."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed, self._arrived, self.passed = float("inf"), 0, 0
        self.fault: Exception | None = None
        self.last_thread = 0

    def enter(self) -> None:
        """Called by the model, in whatever thread runs it."""
        with self._changed:
            self._arrived += 1
            self.last_thread = threading.get_ident()
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed > self.passed, PATIENCE), "nobody opened the gate"
            self.passed += 1
            if self.fault is not None:
                raise self.fault

    def hold(self) -> None:
        """From now on no forward passes."""
        with self._changed:
            self._allowed = self.passed

    def open(self) -> None:
        with self._changed:
            self._allowed = float("inf")
            self._changed.notify_all()

    def wait_for_arrival(self) -> None:
        """Until a forward waits to pass; what came before it is done and published."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._arrived > self.passed, PATIENCE), "no step came"

    def step(self) -> None:
        """Let one forward pass and wait until the next one is there."""
        self.wait_for_arrival()
        with self._changed:
            self._allowed = self.passed + 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.passed == self._allowed, PATIENCE)
        self.wait_for_arrival()

    def step_until(self, reached: Callable[[], bool], limit: int = 400) -> None:
        """Steps until ``reached()``; the engine is then held between two steps."""
        for _ in range(limit):
            self.wait_for_arrival()
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in {limit} steps")


def stepped(name: str = "llama") -> tuple[Any, Gate]:
    """A model of its own, with the weights of ``zoo.build(name)``, and the gate its forwards pass (open at first)."""
    model, gate = zoo.fresh(name), Gate()
    kind = type(model)

    class Stepped(kind):  # type: ignore[misc, valid-type]
        @functools.wraps(kind.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            gate.enter()
            return super().forward(*args, **kwargs)

    model.__class__ = Stepped
    return model, gate


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=2 * PATIENCE))


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    """The finished output of a request."""
    return [output async for output in llm.generate(prompt, params, **options)][-1]


async def becomes(reached: Callable[[], bool]) -> None:
    """Until something another thread does has happened."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)


def owned_blocks(llm: AsyncLLM) -> int:
    """Blocks in use by requests, once the books have been checked."""
    llm._llm.core.manager.check_invariants()
    return llm._llm.core.manager.stats().owned_blocks


def tokenizer_of(pieces: Sequence[str] = (), *, bos: bool = False) -> Any:
    """A tokenizer with these pieces, then the printable ASCII characters as far as the vocabulary of the zoo goes.

    Text is read character by character and decoded by putting pieces together. ``bos``: a text begins with ``<s>``.
    """
    words = ["<pad>", "<s>", "</s>", *pieces]
    words += [c for c in map(chr, range(97, 127)) if c not in words] + list(map(chr, range(32, 97)))
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words)) if i < zoo.VOCAB}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", bos_token="<s>" if bos else None
    )


def says(tokenizer: Any, pieces: Sequence[str], prompt_length: int, **options: Any) -> SamplingParams:
    """Parameters under which the model can only say these pieces, one token each."""
    script = tokenizer.convert_tokens_to_ids(list(pieces))

    def allowed(_: int, row: torch.Tensor) -> list[int]:
        return [script[len(row) - prompt_length]]

    return SamplingParams(temperature=0, max_tokens=len(script), prefix_allowed_tokens_fn=allowed, **options)


def run_program(path: Path, *args: object, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a Python file as a user would, with ``text`` to read."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), *map(str, args)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=280, env=environment)
