"""A request's processors: transformers' own, built as ``generate()`` builds them, and the few it has no equal for.

Every option that changes scores is one of these, so its meaning and its place in the order are stock's by construction.
They see the request alone: ids ``[1, tokens]``, scores ``[1, vocab]``. The sampler runs them, the common ones for many
rows at once (see stages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from hf_paged import compat
from hf_paged.errors import InvalidRequestError
from hf_paged.model.view import input_device
from hf_paged.sampling_params import SamplingParams

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def processors_for(
    model: Any, params: SamplingParams, prompt: Sequence[int], stop_ids: Sequence[int]
) -> list[Processor]:
    """What is applied to the scores of a request, in order. ``stop_ids`` are all the tokens that end it.

    Raises InvalidRequestError for a penalty on missing end tokens and for token ids that the model does not score, and
    what transformers raises for values it refuses (ValueError as a rule).
    """
    device = input_device(model)
    if params.plain:
        return []
    decay = params.exponential_decay_length_penalty
    if decay is not None and not stop_ids:
        raise InvalidRequestError(
            f"exponential_decay_length_penalty={decay!r} raises the scores of end tokens, and this request has none: "
            "give stop_token_ids, or leave it out"
        )
    assert params.max_tokens is not None
    config = compat.GenerationConfig(
        do_sample=not params.greedy,
        num_beams=1,
        num_return_sequences=1,
        max_length=len(prompt) + params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        **({} if params.greedy else _truncations(params)),
        # these have to be of type float
        repetition_penalty=float(params.repetition_penalty),
        encoder_repetition_penalty=float(params.encoder_repetition_penalty),
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        encoder_no_repeat_ngram_size=params.encoder_no_repeat_ngram_size,
        bad_words_ids=None if params.bad_words_ids is None else [list(w) for w in params.bad_words_ids],
        sequence_bias=params.sequence_bias,
        suppress_tokens=_listed(params.suppress_tokens),
        begin_suppress_tokens=_listed(params.begin_suppress_tokens),
        forced_bos_token_id=params.forced_bos_token_id,
        forced_eos_token_id=params.forced_eos_token_id,
        remove_invalid_values=params.remove_invalid_values,
        exponential_decay_length_penalty=params.exponential_decay_length_penalty,
        renormalize_logits=params.renormalize_logits,
        eos_token_id=sorted(stop_ids) or None,
    )
    custom: list[Any] = list(params.logits_processors)
    ids = torch.tensor([list(prompt)], device=device)
    own = compat.logits_processors(model, config, ids, device, custom, params.prefix_allowed_tokens_fn)
    first: list[Processor] = []
    if params.logit_bias:
        first.append(LogitBias(params.logit_bias))
    if params.presence_penalty or params.frequency_penalty:
        first.append(OutputPenalty(len(prompt), params.presence_penalty, params.frequency_penalty))
    if params.allowed_token_ids is not None:
        first.append(AllowedTokens(params.allowed_token_ids))
    found = [*first, *own]
    for name, token_ids in _named_ids(found, custom, len(prompt)):
        _check(name, token_ids, num_scored_tokens(model))
    return found


def called(processor: Processor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What a processor, which may be anybody's code, makes of ``scores``. Raises InvalidRequestError unless these are
    scores of the same shape, and whatever it raises."""
    found: Any = processor(ids, scores)
    if isinstance(found, torch.Tensor) and found.shape == scores.shape:
        return found
    name = getattr(processor, "__name__", type(processor).__name__)
    got = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
    raise InvalidRequestError(
        f"the logits processor {name} returned {got}: it has to return scores of shape {list(scores.shape)}"
    )


def num_scored_tokens(model: Any) -> int:
    """Tokens that the model scores, the width of its logits."""
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None)
    return int(model.get_input_embeddings().num_embeddings if width is None else width)


def _named_ids(
    processors: Iterable[Any], custom: Sequence[Any], prompt_length: int
) -> Iterator[tuple[str, Collection[int]]]:
    """Options that processors were made from, each with the token ids at which these would fail sooner or later if the
    model did not score them. Transformers passes over such ids in ``suppress_tokens`` and among the end tokens, and in
    ``forced_bos_token_id`` where the prompt is longer than one token."""
    for processor in processors:
        if any(processor is one for one in custom):
            continue
        if isinstance(processor, LogitBias):
            yield "logit_bias", processor.bias
        elif isinstance(processor, AllowedTokens):
            yield "allowed_token_ids", processor.token_ids
        elif isinstance(processor, SequenceBiasLogitsProcessor):
            bad = isinstance(processor, NoBadWordsLogitsProcessor)
            ids = {token for sequence in processor.sequence_bias for token in sequence}
            yield "bad_words_ids" if bad else "sequence_bias", ids
        elif isinstance(processor, ForcedBOSTokenLogitsProcessor) and prompt_length == 1:
            yield "forced_bos_token_id", _from_zero([processor.bos_token_id])
        elif isinstance(processor, ForcedEOSTokenLogitsProcessor):
            yield "forced_eos_token_id", processor.eos_token_id.tolist()
        elif isinstance(processor, ExponentialDecayLengthPenalty):
            yield "stop_token_ids under exponential_decay_length_penalty", _from_zero(processor.eos_token_id.tolist())


def _from_zero(token_ids: Sequence[int]) -> list[int]:
    """Without negative ones, where these count from the end of the vocabulary, as transformers has it."""
    return [token for token in token_ids if token >= 0]


def _truncations(params: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": float(params.temperature),
        "top_h": params.top_h,
        "top_k": None if params.top_k <= 0 else params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
        "typical_p": params.typical_p,
        "epsilon_cutoff": params.epsilon_cutoff,
        "eta_cutoff": params.eta_cutoff,
    }


def _listed(ids: Collection[int] | None) -> list[int] | None:
    return None if ids is None else list(ids)


def _check(name: str, token_ids: Iterable[int], vocab: int) -> None:
    bad = sorted({token for token in token_ids if not 0 <= token < vocab})
    if bad:
        raise InvalidRequestError(f"{name} names the token ids {bad}; the model scores the tokens 0..{vocab - 1}")


class LogitBias:
    """Adds a number to the scores of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.bias = bias

    def check(self, vocab: int) -> None:
        """Raise InvalidRequestError for tokens that the model does not score."""
        _check("logit_bias", self.bias, vocab)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.check(scores.shape[1])
        ids = torch.tensor(list(self.bias), device=scores.device)
        values = torch.tensor(list(self.bias.values()), dtype=scores.dtype, device=scores.device)
        return scores.index_add(1, ids, values[None])


class OutputPenalty:
    """OpenAI's penalties: ``presence`` off the score of each token in the output, ``frequency`` for each time it is."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_length :], minlength=scores.shape[1])[: scores.shape[1]]
        return scores - self.presence * (counts > 0) - self.frequency * counts


class AllowedTokens:
    """Leaves only some tokens to choose from."""

    def __init__(self, token_ids: Collection[int]) -> None:
        self.token_ids = list(token_ids)

    def check(self, vocab: int) -> None:
        """Raise InvalidRequestError for tokens that the model does not score."""
        _check("allowed_token_ids", self.token_ids, vocab)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.check(scores.shape[1])
        masked = torch.full_like(scores, float("-inf"))
        masked[:, self.token_ids] = scores[:, self.token_ids]
        return masked
