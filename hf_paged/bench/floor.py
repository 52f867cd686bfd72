"""The least time that the machine's own rates allow for a piece of work: an estimate, not a strict bound.

Owns the arithmetic; the rates are measured by ``adapters/machine_rates`` in the same run. With

    R = the fastest of the measured matrix products, in operations a second (a multiply and an add are two), in the
        dtype under test or in float32
    B = the fastest of the measured reads of memory, in bytes a second

a piece of work takes at least ``max(operations / R, bytes / B)``, as if computing and reading overlapped without loss.

    operations = 2 * body * tokens            body: weights a token is multiplied with; of experts, those chosen
               + 2 * head * sampled           the LM head, only where a token is sampled
               + 4 * layers * heads * head_dim * pairs
                                              attention: 2 for scores and 2 for values, for each pair of a token and one
                                              that it looks at (itself included)
    bytes      = steps * (weights with all experts and the head)
               + keys and values that the steps after the first look at

    tokens  = prompt tokens, those of a common prefix once, and all generated ones but the last of each completion
    sampled = generated tokens; the first ones of several samples of one prompt need the head once
    steps   = the longest output: one pass can take every prompt, and each further token needs another

A step reads a prefix that all requests share, and a prompt that several samples share, once. For a decode step alone
(W3), tokens = sampled = the batch, steps = 1, and the context is that of the middle step. Reading the first step's
keys, activations, norms, the embedding's rows and all writes are left out; windows of attention are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_paged.bench.wire.hf_paged_peer import Work, common_length
from hf_paged.bench.workload import Case
from hf_paged.errors import UnsupportedError


@dataclass(frozen=True)
class Rates:
    """Operations a second and bytes a second."""

    operations: float
    bytes: float

    @classmethod
    def best(cls, measured: Iterable[Mapping[str, Mapping[str, float]]]) -> Rates:
        """The fastest of all rounds of ``machine_rates``."""
        rounds = list(measured)
        return cls(
            1e9 * max(rate for one in rounds for rate in one["gflops"].values()),
            1e9 * max(rate for one in rounds for rate in one["read_gb_s"].values()),
        )


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic needs of a model; weights in numbers, not bytes.

    Attributes:
        active: weights a token is multiplied with, without the head; ``stored`` counts every expert.
        head: vocabulary times hidden size, tied or not.
        attention: layers * heads * head_dim; ``kv``: numbers of keys and values kept for a token.
        hidden, inner: sides of a typical product.
    """

    active: float
    stored: int
    head: int
    attention: int
    kv: int
    hidden: int
    inner: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """From a config. Raises UnsupportedError for one that lacks the usual names."""
        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings().weight
        tables = {id(head), *(id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding))}
        active, stored = 0.0, 0
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or id(weight) in tables:
                continue
            stored += weight.numel()
            active += weight.numel() * (_expert_share(text) if ".experts." in name else 1.0)
        try:
            heads, layers, hidden = text.num_attention_heads, text.num_hidden_layers, text.hidden_size
        except AttributeError as error:
            raise UnsupportedError(f"a {config.model_type} model's config has other names ({error})") from error
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(
            active=active,
            stored=stored,
            head=head.numel(),
            attention=layers * heads * head_dim,
            kv=2 * layers * kv_heads * head_dim,
            hidden=hidden,
            inner=getattr(text, "intermediate_size", None) or 4 * hidden,
        )

    def weight_bytes(self, itemsize: int) -> int:
        return (self.stored + self.head) * itemsize


@dataclass(frozen=True)
class Amount:
    """Operations, and bytes read."""

    operations: float
    bytes: float

    def seconds(self, rates: Rates) -> float:
        return max(self.operations / rates.operations, self.bytes / rates.bytes)


def floor_of(case: Case, shape: ModelShape, itemsize: int, rates: Rates) -> float:
    """The case's figure, in its unit, if nothing but the rates held it back."""
    if case.kind == "step":
        return 1000 * step_amount(case.works[0], shape, itemsize).seconds(rates)
    return case.figure([work_amount(work, shape, itemsize).seconds(rates) for work in case.works])


def work_amount(work: Work, shape: ModelShape, itemsize: int) -> Amount:
    """What requests given together need."""
    spans = [*_new_spans([request.prompt for request in work.requests])]
    sampled = 0
    for request in work.requests:
        start, more = len(request.prompt), request.out - 1
        spans += [(start, start + more)] * work.samples
        sampled += 1 + more * work.samples
    tokens = sum(end - start for start, end in spans)
    pairs = sum(_triangle(end) - _triangle(start) for start, end in spans)
    steps = max(request.out for request in work.requests)
    operations = 2 * shape.active * tokens + 2 * shape.head * sampled + 4 * shape.attention * pairs
    contexts = sum(_context(work, step) for step in range(1, steps))
    return Amount(operations, steps * shape.weight_bytes(itemsize) + contexts * shape.kv * itemsize)


def step_amount(work: Work, shape: ModelShape, itemsize: int) -> Amount:
    """What the middle one of the steps after the first needs."""
    batch, step = len(work.requests) * work.samples, work.requests[0].out // 2
    pairs = sum((len(request.prompt) + step) * work.samples for request in work.requests)
    operations = 2 * (shape.active + shape.head) * batch + 4 * shape.attention * pairs
    return Amount(operations, shape.weight_bytes(itemsize) + _context(work, step) * shape.kv * itemsize)


def _context(work: Work, step: int) -> int:
    """Tokens whose keys and values step ``step`` looks at, counting those that requests share once."""
    shared = work.shared_prefix()
    running = [request for request in work.requests if request.out > step]
    return shared + sum(len(request.prompt) - shared + step * work.samples for request in running)


def _new_spans(prompts: list[list[int]]) -> Iterable[tuple[int, int]]:
    """From where to where each prompt has tokens that no prompt before it in order begins with."""
    before: list[int] = []
    for prompt in sorted(prompts):
        yield common_length(before, prompt), len(prompt)
        before = prompt


def _triangle(n: int) -> int:
    """Pairs of the first n tokens with those they look at."""
    return n * (n + 1) // 2


def _expert_share(config: Any) -> float:
    chosen = getattr(config, "num_experts_per_tok", None)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if chosen and (there := getattr(config, name, None)):
            return float(chosen / there)
    return 1.0
