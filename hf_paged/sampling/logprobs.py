"""Log-probabilities of tokens, as reported to the caller. Used for sampled tokens and for those of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token; ``rank`` 1 is the most likely.

    It is taken from the model's own logits, before any processor, unless ``logprobs_mode="processed"`` was asked for.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """For each row of ``logits`` (float32 ``[n, vocab]``): its ``count`` most likely tokens, and ``tokens[row]``.

    Tokens with a score of minus infinity are alternatives to nobody and are left out, unless one is ``tokens[row]``.
    """
    if not len(tokens):
        return []
    scores = logits.log_softmax(dim=-1)
    chosen = scores.gather(1, torch.as_tensor(tokens, dtype=torch.long, device=scores.device)[:, None])
    ranks = ((scores > chosen).sum(dim=-1) + 1).tolist()
    found: list[dict[int, Logprob]] = [{} for _ in tokens]
    if count:
        values, ids = scores.topk(min(count, scores.shape[1]))
        for row, alternatives, logprobs in zip(found, ids.tolist(), values.tolist(), strict=True):
            for rank, (token, logprob) in enumerate(zip(alternatives, logprobs, strict=True), start=1):
                if logprob > float("-inf"):
                    row[token] = Logprob(logprob, rank)
    for row, token, logprob, rank in zip(found, tokens, chosen[:, 0].tolist(), ranks, strict=True):
        row.setdefault(int(token), Logprob(logprob, rank))
    return found
