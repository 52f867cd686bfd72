"""Ways to call ``generate()``, each as a function from a model to (inputs, keyword arguments, seed).

Every mode asks for scores, so that "identical" can mean bit for bit and not only the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf

from tests import zoo

WIDTH = 21
NEW_TOKENS = 10


class Recorder(tf.generation.streamers.BaseStreamer):
    """A streamer that remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


class StopAt(tf.StoppingCriteria):
    """Stops each row at its own length and remembers the ids it was shown."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.flatten().tolist())
        return input_ids.shape[1] >= torch.tensor(self.lengths[: input_ids.shape[0]])


@dataclass
class Call:
    inputs: dict[str, Any]
    options: dict[str, Any]
    seed: int | None = None
    #: objects whose state after the call is part of the result
    witnesses: list[Any] = field(default_factory=list)


def prompt(rows: int = 3, width: int = WIDTH, padded: bool = False, seed: int = 5) -> dict[str, torch.Tensor]:
    """Random ids; with ``padded``, row 0 has 7 columns of left padding and row 1 has 3."""
    ids = torch.randint(3, zoo.VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :7] = 0
        if rows > 1:
            mask[1, :3] = 0
        ids[mask == 0] = zoo.PAD
    return {"input_ids": ids, "attention_mask": mask}


def _greedy(name: str) -> Call:
    return Call(prompt(), {"do_sample": False})


def _padded(name: str) -> Call:
    return Call(prompt(padded=True), {"do_sample": False})


def _beams(name: str) -> Call:
    return Call(prompt(padded=True), {"num_beams": 3, "num_return_sequences": 2, "do_sample": False})


def _sample(name: str) -> Call:
    return Call(
        prompt(padded=True), {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "temperature": 0.8}, seed=11
    )


def _beam_sample(name: str) -> Call:
    return Call(prompt(padded=True), {"do_sample": True, "num_beams": 3, "temperature": 1.1}, seed=12)


def _prompt_lookup(name: str) -> Call:
    inputs = prompt(rows=1, width=8)
    inputs = {k: v.repeat(1, 3) for k, v in inputs.items()}  # repeats, so that lookups hit and some drafts are rejected
    return Call(inputs, {"do_sample": False, "prompt_lookup_num_tokens": 3})


def _assisted(name: str) -> Call:
    # the draft is the model with other noise: it agrees now and then, so that both accept and reject happen
    draft = zoo.build(name, seed=1)
    return Call(prompt(rows=1), {"do_sample": False, "assistant_model": draft})


def _chunked(name: str) -> Call:
    return Call(prompt(padded=True), {"do_sample": False, "prefill_chunk_size": 4})


def _streamer(name: str) -> Call:
    streamer = Recorder()
    return Call(prompt(rows=1), {"do_sample": False, "streamer": streamer}, witnesses=[streamer])


def _logits(name: str) -> Call:
    return Call(
        prompt(padded=True),
        {"do_sample": False, "output_logits": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    )


def _hidden(name: str) -> Call:
    return Call(prompt(padded=True), {"do_sample": False, "output_hidden_states": True})


def _attentions(name: str) -> Call:
    return Call(prompt(padded=True), {"do_sample": False, "output_attentions": True})


def _stopping(name: str) -> Call:
    base = 1 if name in zoo.ENCODER_DECODER else WIDTH
    stop = StopAt([base + 3, base + 6, base + 9])
    return Call(
        prompt(padded=True),
        {"do_sample": False, "stopping_criteria": tf.StoppingCriteriaList([stop])},
        witnesses=[stop],
    )


def _prefix_fn(name: str) -> Call:
    seen: list[Any] = []

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        seen.append((row, ids.tolist()))
        return [(int(ids[-1]) * 7 + k) % (zoo.VOCAB - 3) + 3 for k in range(5)]

    return Call(
        prompt(padded=True), {"do_sample": False, "num_beams": 2, "prefix_allowed_tokens_fn": allowed}, witnesses=[seen]
    )


def _guidance(name: str) -> Call:
    inputs = prompt(padded=True)
    negative = prompt(padded=True, seed=6)
    return Call(
        inputs,
        {
            "do_sample": False, "guidance_scale": 1.7, "negative_prompt_ids": negative["input_ids"],
            "negative_prompt_attention_mask": negative["attention_mask"],
        },
    )  # fmt: skip


def _embeds(name: str) -> Call:
    inputs = prompt(padded=True)
    table = zoo.build(name).get_input_embeddings()
    with torch.no_grad():
        return Call(
            {"inputs_embeds": table(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]},
            {"do_sample": False},
        )


def _exact_blocks(name: str) -> Call:
    return Call(prompt(width=16), {"do_sample": False})


def _stop_ragged(name: str) -> Call:
    """Rows that end at different lengths through a list of end-of-sequence ids."""
    return Call(
        prompt(padded=True), {"do_sample": False, "eos_token_id": list(range(3, zoo.VOCAB, 4)), "pad_token_id": zoo.PAD}
    )


MODES: dict[str, Callable[[str], Call]] = {
    "greedy": _greedy,
    "padded": _padded,
    "beams": _beams,
    "sample": _sample,
    "beam_sample": _beam_sample,
    "prompt_lookup": _prompt_lookup,
    "assisted": _assisted,
    "chunked_prefill": _chunked,
    "streamer": _streamer,
    "logits": _logits,
    "hidden_states": _hidden,
    "attentions": _attentions,
    "stopping_criteria": _stopping,
    "prefix_allowed_tokens_fn": _prefix_fn,
    "guidance_scale": _guidance,
    "inputs_embeds": _embeds,
    "exact_blocks": _exact_blocks,
    "ragged_ends": _stop_ragged,
}


@dataclass
class Outcome:
    """Everything a call produced that a user can see."""

    sequences: torch.Tensor
    tensors: dict[str, Any]
    witnesses: list[Any]


def run(model: Any, name: str, mode: str, **paging: Any) -> Outcome:
    """Make the call afresh and run it; ``paging`` are extra arguments of ``generate()``."""
    call = MODES[mode](name)
    if call.seed is not None:
        torch.manual_seed(call.seed)
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": True, **call.options}
    result = model.generate(**call.inputs, **options, **paging)
    tensors = {k: v for k, v in result.items() if k not in ("sequences", "cache", "past_key_values") and v is not None}
    return Outcome(result.sequences, tensors, [getattr(w, "__dict__", w) for w in call.witnesses])


def flat(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested tuples, each with its path."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in flat(v, f"{path}.{k}")]
    if isinstance(value, list | tuple):
        return [x for i, v in enumerate(value) for x in flat(v, f"{path}[{i}]")]
    return []
