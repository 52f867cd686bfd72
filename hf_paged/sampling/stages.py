"""The common logits processors, for many rows at once.

A stage is one kind of processor. It changes scores as the processor's own ``__call__`` does row by row, bit for bit in
float32 on the CPU: whatever depends on rounding (the softmax under top_p, say) is computed on the same values in the
same order. A processor that no stage knows, or that is set up in a way its stage does not know, stays a callable. The
sampler runs both; nothing here knows requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_paged.sampling.history import History, Ints
from hf_paged.sampling.processors import AllowedTokens, LogitBias, OutputPenalty

_EXCLUDED = float("-inf")


@dataclass(frozen=True)
class Part:
    """One row's processor in a stage.

    Attributes:
        row: its row in the scores.
        processor: the processor it stands for.
        prepared: what the stage made of the processor once.
        history, tokens: of the row's sequence.
    """

    row: int
    processor: Any
    prepared: Any
    history: History
    tokens: Sequence[int]


@dataclass(frozen=True)
class Stage:
    """One kind of processor.

    Attributes:
        prepare: (processor, size of the vocabulary) -> what :attr:`apply` needs, or None if it cannot stand for it.
        apply: changes the scores (float32 ``[n, vocab]``) in place, for each part at its row.
    """

    prepare: Callable[[Any, int], Any]
    apply: Callable[[torch.Tensor, Sequence[Part]], None]


def in_numpy(scores: torch.Tensor) -> bool:
    """Whether numpy may work on them in place: it searches, selects and fills several times as fast as torch."""
    return scores.device.type == "cpu"


# -- a few tokens of each row ------------------------------------------------------------------------------------------


def _within(ids: Any, vocab: int) -> Ints:
    found = np.asarray(ids.tolist() if isinstance(ids, torch.Tensor) else list(ids), dtype=np.int64)
    return found[(found >= 0) & (found < vocab)]


def _places(scores: torch.Tensor, rows: Sequence[int], ids: Sequence[Ints]) -> torch.Tensor:
    """Positions in the flattened scores of ``ids[i]`` in row ``rows[i]``, one after the other."""
    width = scores.shape[1]
    flat = [own + row * width for row, own in zip(rows, ids, strict=True)]
    return torch.from_numpy(np.concatenate(flat)).to(scores.device)


def _spread(scores: torch.Tensor, values: Sequence[float], ids: Sequence[Ints]) -> torch.Tensor:
    """``values[i]`` once for each of ``ids[i]``, float32."""
    spread = np.repeat(np.asarray(values, dtype=np.float32), [len(own) for own in ids])
    return torch.from_numpy(spread).to(scores.device)


def _divided(scores: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    # Processors divide by a Python number, which torch on CUDA computes as a product with the reciprocal.
    return scores * divisors.reciprocal() if scores.is_cuda else scores / divisors


def _add(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    ids = [part.prepared[0] for part in parts]
    values = torch.from_numpy(np.concatenate([part.prepared[1] for part in parts])).to(scores.device)
    flat = scores.view(-1)
    places = _places(scores, [part.row for part in parts], ids)
    flat[places] = flat[places] + values


def _prepare_logit_bias(processor: LogitBias, vocab: int) -> tuple[Ints, Any]:
    processor.check(vocab)
    return np.asarray(list(processor.bias), dtype=np.int64), np.asarray(list(processor.bias.values()), dtype=np.float32)


def _prepare_sequence_bias(processor: Any, vocab: int) -> tuple[Ints, Any] | None:
    bias = processor.sequence_bias
    if any(len(sequence) != 1 or sequence[0] >= vocab for sequence in bias):
        return None
    ids = np.asarray([sequence[0] for sequence in bias], dtype=np.int64)
    return ids, np.asarray(list(bias.values()), dtype=np.float32)


def _penalize_output(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    ids: list[Ints] = []
    counts: list[Ints] = []
    for part in parts:
        own, often = part.history.counts(part.tokens, part.processor.prompt_length)
        inside = own < scores.shape[1]
        ids.append(own[inside])
        counts.append(often[inside])
    flat, places = scores.view(-1), _places(scores, [part.row for part in parts], ids)
    presence = _spread(scores, [part.processor.presence for part in parts], ids)
    frequency = _spread(scores, [part.processor.frequency for part in parts], ids)
    times = torch.from_numpy(np.concatenate(counts).astype(np.float32)).to(scores.device)
    flat[places] = flat[places] - presence - frequency * times


def _allow(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    rows = [part.row for part in parts]
    flat, places = scores.view(-1), _places(scores, rows, [part.prepared for part in parts])
    kept = flat[places]
    scores[rows] = _EXCLUDED
    flat[places] = kept


def _prepare_allowed(processor: AllowedTokens, vocab: int) -> Ints:
    processor.check(vocab)
    return np.asarray(processor.token_ids, dtype=np.int64)


def _penalize(scores: torch.Tensor, parts: Sequence[Part], ids: Sequence[Ints]) -> None:
    penalties = _spread(scores, [part.processor.penalty for part in parts], ids)
    flat, places = scores.view(-1), _places(scores, [part.row for part in parts], ids)
    found = flat[places]
    flat[places] = torch.where(found < 0, found * penalties, _divided(found, penalties))


def _penalize_repetition(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    ids = [part.history.counts(part.tokens, part.processor.prompt_ignore_length or 0)[0] for part in parts]
    _penalize(scores, parts, [own[own < scores.shape[1]] for own in ids])


def _prepare_repetition(processor: Any, vocab: int) -> bool | None:
    ignored = processor.prompt_ignore_length
    return True if ignored is None or isinstance(ignored, int) else None


def _prepare_encoder_penalty(processor: Any, vocab: int) -> Ints | None:
    ids = processor.encoder_input_ids
    return np.unique(ids[0].cpu().numpy()) if len(ids) == 1 and int(ids.max()) < vocab else None


def _exclude(active: Callable[[Any, int], bool]) -> Callable[[torch.Tensor, Sequence[Part]], None]:
    """Excludes the prepared ids of the parts that are ``active`` (processor, number of tokens so far)."""

    def apply(scores: torch.Tensor, parts: Sequence[Part]) -> None:
        now = [part for part in parts if active(part.processor, len(part.tokens))]
        if now:
            places = _places(scores, [part.row for part in now], [part.prepared for part in now])
            scores.view(-1)[places] = _EXCLUDED

    return apply


# -- whole rows --------------------------------------------------------------------------------------------------------


def _on_rows(
    change: Callable[[torch.Tensor, Sequence[Part]], None],
) -> Callable[[torch.Tensor, Sequence[Part]], None]:
    """``change`` for the parts' rows alone, which it gets one for each part."""

    def apply(scores: torch.Tensor, parts: Sequence[Part]) -> None:
        if len(parts) == len(scores) and all(part.row == i for i, part in enumerate(parts)):
            change(scores, parts)
            return
        rows = torch.tensor([part.row for part in parts], device=scores.device)
        own = scores.index_select(0, rows)
        change(own, parts)
        scores.index_copy_(0, rows, own)

    return apply


def _column(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].to(scores.device)


def _exclude_below(scores: torch.Tensor, least: torch.Tensor) -> None:
    """Excludes what is less than its row's ``least`` (``[n, 1]``)."""
    if in_numpy(scores):
        found = scores.numpy()
        np.putmask(found, found < least.numpy(), _EXCLUDED)
    else:
        scores.masked_fill_(scores < least, _EXCLUDED)


def _heat(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    scores.copy_(_divided(scores, _column(scores, [part.processor.temperature for part in parts])))


def _keep_top_k(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    vocab = scores.shape[1]
    ks = [min(part.processor.top_k, vocab) for part in parts]
    if in_numpy(scores):
        places = np.asarray([vocab - k for k in ks])
        found = np.partition(scores.numpy(), np.unique(places), axis=-1)
        least = torch.from_numpy(found[np.arange(len(ks)), places])[:, None]
    else:
        best = scores.topk(max(ks)).values
        least = best.gather(1, torch.tensor(ks, device=scores.device)[:, None] - 1)
    _exclude_below(scores, least)


def _keep_top_p(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    if in_numpy(scores):  # of values alone, which is many times as fast as with their indices
        ascending = torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    else:
        ascending = scores.sort(dim=-1).values
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    limits = _column(scores, [1 - part.processor.top_p for part in parts])
    removed = torch.searchsorted(mass, limits, right=True).clamp_(max=scores.shape[1] - 1)
    least = ascending.gather(1, removed)
    ties = (removed - torch.searchsorted(ascending, least))[:, 0].tolist()
    _exclude_below(scores, least)
    for row, count in enumerate(ties):
        if count:  # of equal scores, those with the lowest ids come first in the order
            scores[row, (scores[row] == least[row]).nonzero()[:count, 0]] = _EXCLUDED


def _keep_min_p(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    probabilities = scores.softmax(dim=-1)
    least = _column(scores, [part.processor.min_p for part in parts]) * probabilities.amax(dim=-1, keepdim=True)
    scores.masked_fill_(probabilities < least, _EXCLUDED)


def _normalize(scores: torch.Tensor, parts: Sequence[Part]) -> None:
    scores.copy_(scores.log_softmax(dim=-1))


def _prepare_nothing(processor: Any, vocab: int) -> bool:
    return True


def _prepare_filter(processor: Any, vocab: int) -> bool | None:
    return True if processor.filter_value == _EXCLUDED and processor.min_tokens_to_keep == 1 else None


#: by processor, in the order that ``generate()`` runs them, so that rows meet at each stage once
STAGES: dict[type, Stage] = {
    LogitBias: Stage(_prepare_logit_bias, _add),
    OutputPenalty: Stage(_prepare_nothing, _penalize_output),
    AllowedTokens: Stage(_prepare_allowed, _allow),
    SequenceBiasLogitsProcessor: Stage(_prepare_sequence_bias, _add),
    EncoderRepetitionPenaltyLogitsProcessor: Stage(
        _prepare_encoder_penalty, lambda scores, parts: _penalize(scores, parts, [part.prepared for part in parts])
    ),
    RepetitionPenaltyLogitsProcessor: Stage(_prepare_repetition, _penalize_repetition),
    NoBadWordsLogitsProcessor: Stage(_prepare_sequence_bias, _add),
    MinLengthLogitsProcessor: Stage(
        lambda processor, vocab: _within(processor.eos_token_id, vocab),
        _exclude(lambda processor, length: length < processor.min_length),
    ),
    MinNewTokensLengthLogitsProcessor: Stage(
        lambda processor, vocab: _within(processor.eos_token_id, vocab),
        _exclude(lambda processor, length: length - processor.prompt_length_to_skip < processor.min_new_tokens),
    ),
    SuppressTokensLogitsProcessor: Stage(
        lambda processor, vocab: _within(processor.suppress_tokens, vocab),
        _exclude(lambda processor, length: True),
    ),
    SuppressTokensAtBeginLogitsProcessor: Stage(
        lambda processor, vocab: _within(processor.begin_suppress_tokens, vocab),
        _exclude(lambda processor, length: length == processor.begin_index),
    ),
    TemperatureLogitsWarper: Stage(_prepare_nothing, _on_rows(_heat)),
    TopKLogitsWarper: Stage(_prepare_filter, _on_rows(_keep_top_k)),
    TopPLogitsWarper: Stage(_prepare_filter, _on_rows(_keep_top_p)),
    MinPLogitsWarper: Stage(_prepare_filter, _on_rows(_keep_min_p)),
    LogitNormalization: Stage(_prepare_nothing, _on_rows(_normalize)),
}
RANKS = {kind: rank for rank, kind in enumerate(STAGES)}
