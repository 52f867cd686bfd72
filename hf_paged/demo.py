"""Paged ``generate()`` beside stock ``generate()`` on one real model: what ``hf-paged demo`` measures.

Owns the prompts, the comparisons and their verdicts, as plain functions that return dataclasses. Prints nothing; the
command line shows progress and tables. Uses only what a user of the package has: ``register``, ``cache_stats``,
``clear`` and the model's own ``generate``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_paged
from hf_paged.compat import CACHE_KWARG
from hf_paged.errors import ConfigError, UnsupportedError
from hf_paged.model.loader import load

#: called before each step that takes a moment, with one short sentence
Step = Callable[[str], None]

QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write one sentence about the moon.",
    "How many days are there in a week?",
    "What does a baker do in the morning?",
)
OPENINGS = (
    "The first thing she noticed about the harbour was",
    "def fibonacci(n):\n    ",
    "To make a good cup of tea, you need",
    "In 1969, two people walked",
    "1, 2, 4, 8, 16,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees Celsius because",
)
TURNS = (
    "Hello! I am planning a small vegetable garden. What should I grow first?",
    "How often should I water it?",
    "What if there is not much sun?",
    "Which of these can I also grow in a pot?",
    "Thank you. Sum it up in one sentence.",
)
PASSAGE = (
    "A lighthouse keeper writes down the weather four times a day. The wind comes from the west and smells of salt. "
    "Gulls stand on the railing and wait for the boat that brings bread on Thursdays. When the fog rolls in, the horn "
    "sounds every thirty seconds, and ships that cannot see the rocks know how far away they are. At night the lamp "
    "turns once in ten seconds. Its lens was ground by hand more than a hundred years ago and has never been replaced. "
)


@dataclass(frozen=True)
class Settings:
    """What ``hf-paged demo`` can be told. ``quick`` cuts prompts and answers to what proves the point."""

    model: str = "demo"
    dtype: str = "float32"
    max_new_tokens: int = 32
    quick: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype={self.dtype!r} must be float32, bfloat16 or float16")


@dataclass(frozen=True)
class Subject:
    """The model under demonstration, its tokenizer and the settings."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: Settings


@dataclass(frozen=True)
class Generated:
    """One ``generate()`` call: ``sequences [rows, width]`` with the prompt, seconds for all its steps (one for each new
    column), and bytes of keys and values held at its end. ``scores [rows]`` only for beams."""

    sequences: torch.Tensor
    seconds: float
    steps: int
    kv_bytes: int
    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """The same call, stock and paged.

    ``gap`` is 0 when every token is equal. Otherwise it is how far apart stock's own logits put the two tokens at the
    worst first difference; below ``tolerance`` the model was undecided and rounding chose.
    """

    title: str
    answer: str
    tokens: int
    stock: Generated
    paged: Generated
    gap: float
    tolerance: float

    @property
    def identical(self) -> bool:
        return torch.equal(self.stock.sequences, self.paged.sequences)

    @property
    def holds(self) -> bool:
        return self.identical or self.gap <= self.tolerance


@dataclass(frozen=True)
class Turn:
    """One turn of the chat: tokens in its prompt, and those that were computed with reuse (without reuse: all)."""

    user: str
    comparison: Comparison
    prompt_tokens: int
    prefilled_tokens: int


def prepare(settings: Settings, step: Step) -> Subject:
    """Load the model, register, and run both ways once so that nothing measured later is a first time."""
    model, tokenizer = load(settings.model, settings.dtype, progress=step)
    hf_paged.register()
    subject = Subject(model, tokenizer, settings)
    step("warming up")
    inputs = encode(subject, ["Hello"])
    for paged in (False, True):
        generate(subject, inputs, paged, max_new_tokens=4)
    return subject


def compare_answers(subject: Subject, step: Step) -> list[Comparison]:
    """Chat questions, one call each."""
    questions = QUESTIONS[:2] if subject.settings.quick else QUESTIONS
    found = []
    for question in questions:
        step(question)
        inputs = encode_chat(subject, [{"role": "user", "content": question}])
        found.append(compare(subject, question, inputs, max_new_tokens=subject.settings.max_new_tokens))
    return found


def compare_openings(subject: Subject, step: Step) -> list[Comparison]:
    """Texts to go on with, one call each, half as long as the answers."""
    openings = OPENINGS[:2] if subject.settings.quick else OPENINGS
    found = []
    for opening in openings:
        step(opening.strip().splitlines()[0])
        length = max(1, subject.settings.max_new_tokens // 2)
        found.append(compare(subject, opening, encode(subject, [opening]), max_new_tokens=length))
    return found


def compare_chat(subject: Subject, step: Step) -> list[Turn]:
    """A conversation in which each prompt is the one before, its answer and one line more."""
    hf_paged.clear(subject.model)
    history: list[dict[str, str]] = []
    turns = []
    for user in TURNS[:3] if subject.settings.quick else TURNS:
        step(user)
        history.append({"role": "user", "content": user})
        inputs = encode_chat(subject, history)
        before = hf_paged.cache_stats(subject.model)
        found = compare(
            subject, user, inputs, reuse=True, max_new_tokens=max(1, subject.settings.max_new_tokens * 2 // 3)
        )
        after = hf_paged.cache_stats(subject.model)
        prompt = after.prompt_tokens - before.prompt_tokens
        turns.append(Turn(user, found, prompt, prompt - (after.hit_tokens - before.hit_tokens)))
        history.append({"role": "assistant", "content": found.answer})
    return turns


def compare_ragged(subject: Subject, step: Step) -> Comparison:
    """A left-padded batch of prompts of very different lengths."""
    lengths = (
        (7, 40, 160)
        if subject.settings.quick
        else (5, 12, 16, 23, 31, 48, 64, 77, 90, 128, 150, 190, 240, 300, 380, 480)
    )
    step(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens in one batch")
    inputs = encode(subject, [passage(subject, length) for length in lengths])
    title = f"{len(lengths)} rows, {min(lengths)}-{max(lengths)} tokens, left-padded"
    return compare(subject, title, inputs, max_new_tokens=max(1, subject.settings.max_new_tokens // 2))


def compare_beams(subject: Subject, step: Step) -> Comparison:
    """Beam search over one long prompt. Beams whose scores are equal may swap: then the scores are compared."""
    beams, length = (3, 64) if subject.settings.quick else (8, 512)
    step(f"{beams} beams over {length} tokens")
    return compare(
        subject,
        f"{beams} beams over {length} tokens",
        encode(subject, [passage(subject, length)]),
        max_new_tokens=max(1, subject.settings.max_new_tokens // 3),
        num_beams=beams,
        num_return_sequences=2,
    )


# -- how a comparison is made -----------------------------------------------------------------------------------------


def compare(
    subject: Subject, title: str, inputs: dict[str, torch.Tensor], *, reuse: bool = False, **options: Any
) -> Comparison:
    """Run one call both ways. Without ``reuse`` the paged call may not profit from the ones before."""
    stock = generate(subject, inputs, False, **options)
    paged = generate(subject, inputs, True, reuse=reuse, **options)
    width = inputs["input_ids"].shape[1]
    new = paged.sequences[:, width:]
    return Comparison(
        title=title,
        answer=_text(subject, new[0]),
        tokens=sum(_length(subject, row) for row in new),
        stock=stock,
        paged=paged,
        gap=_gap(subject, stock, paged, inputs),
        tolerance=_tolerance(subject, stock),
    )


def generate(
    subject: Subject, inputs: dict[str, torch.Tensor], paged: bool, *, reuse: bool = False, **options: Any
) -> Generated:
    """One greedy (or beam) call."""
    if paged:
        options |= {"cache_implementation": "paged", "cache_config": {"prefix_caching": reuse}}
    started = time.perf_counter()
    out: Any = subject.model.generate(  # type: ignore[operator]
        **inputs,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=options.get("num_beams", 1) > 1,
        pad_token_id=subject.tokenizer.pad_token_id,
        **options,
    )
    seconds = time.perf_counter() - started
    cache = getattr(out, CACHE_KWARG, None)
    if paged and not isinstance(cache, hf_paged.PagedCache):
        kind = subject.model.config.model_type
        raise UnsupportedError(f"{kind} models keep no plain keys and values, so there is nothing to page; try another")
    steps = out.sequences.shape[1] - inputs["input_ids"].shape[1]
    return Generated(out.sequences, seconds, steps, kv_bytes(cache), getattr(out, "sequences_scores", None))


def kv_bytes(cache: Any) -> int:
    """Bytes of keys and values that a cache holds, whichever kind it is."""
    if isinstance(cache, hf_paged.PagedCache):
        return cache.nbytes
    tensors = (getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def encode(subject: Subject, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Texts as one left-padded batch."""
    encoded = subject.tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1)
    return _inputs(subject, encoded)


def encode_chat(subject: Subject, messages: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """A conversation as the model was trained to see it; plain lines for a model without a chat template."""
    if subject.tokenizer.chat_template is None:
        return encode(subject, ["\n".join(message["content"] for message in messages) + "\n"])
    encoded = subject.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return _inputs(subject, encoded)


def passage(subject: Subject, tokens: int) -> str:
    """Text of about ``tokens`` tokens."""
    once = len(subject.tokenizer.encode(PASSAGE, add_special_tokens=False))
    ids = subject.tokenizer.encode(PASSAGE * (tokens // once + 1), add_special_tokens=False)[:tokens]
    return _text(subject, torch.tensor(ids))


def _inputs(subject: Subject, encoded: Any) -> dict[str, torch.Tensor]:
    return {name: encoded[name].to(subject.model.device) for name in ("input_ids", "attention_mask")}


def _text(subject: Subject, ids: torch.Tensor) -> str:
    return str(subject.tokenizer.decode(ids, skip_special_tokens=True))


def _length(subject: Subject, new: torch.Tensor) -> int:
    """Generated tokens in a row, up to and with the first end token; what follows is padding."""
    ends = (new == subject.tokenizer.eos_token_id).nonzero()
    return int(ends[0]) + 1 if len(ends) else len(new)


def _tolerance(subject: Subject, stock: Generated) -> float:
    """How far apart two choices may be and still count as a tie. In fp32 only beams may tie; in half precision a
    logit near 16 has a step of 1/8 (bf16), and a few roundings meet in one logit."""
    if subject.model.dtype == torch.float32:
        return 1e-3 if stock.scores is not None else 0.0
    return 0.5


def _gap(subject: Subject, stock: Generated, paged: Generated, inputs: dict[str, torch.Tensor]) -> float:
    if torch.equal(stock.sequences, paged.sequences):
        return 0.0
    if stock.scores is not None and paged.scores is not None:
        return float((stock.scores - paged.scores).abs().max())
    return max(
        _row_gap(subject, a, b, mask)
        for a, b, mask in zip(stock.sequences, paged.sequences, inputs["attention_mask"], strict=True)
    )


def _row_gap(subject: Subject, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> float:
    """The difference of stock's logits for the two tokens where rows ``a`` and ``b`` part; a batch pads the shorter
    row, so both are cut to the shorter length."""
    common = min(len(a), len(b))
    apart = (a[:common] != b[:common]).nonzero()
    if not len(apart):
        return 0.0
    first = int(apart[0])
    pads = int((mask == 0).sum())
    with torch.no_grad():
        logits = subject.model(input_ids=a[None, pads:first]).logits[0, -1].float()
    return float((logits[a[first]] - logits[b[first]]).abs())
