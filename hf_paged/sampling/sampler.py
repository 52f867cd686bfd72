"""From logits to tokens, for rows that each have settings of their own.

Randomness is a function of (seed, row, position) and of nothing else, so a request draws the same tokens whatever is
beside it in the batch and however often it is preempted. Called by the engine's core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_paged.errors import InvalidRequestError
from hf_paged.sampling.processors import Processor
from hf_paged.sampling_params import SamplingParams

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model's own logits, before any processor; ``rank`` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class Sampled:
    """A chosen token, with the log-probabilities asked for (the chosen one among them), or None."""

    token: int
    logprobs: dict[int, Logprob] | None = None


@dataclass
class SamplerState:
    """What the sampler keeps for one row of a request."""

    params: SamplingParams
    processors: Sequence[Processor]
    seed: int
    row: int = 0

    @property
    def plain(self) -> bool:
        """Whether the most likely token is the answer."""
        return self.params.greedy and not self.processors


def sample(
    logits: torch.Tensor, states: Sequence[SamplerState], tokens: Sequence[Sequence[int]]
) -> list[Sampled | Exception]:
    """One token for each row of ``logits`` (float32 ``[n, vocab]``); ``tokens[i]`` is the row's prompt and output.

    A row whose processors fail, or leave nothing to choose from, gives the exception instead; others go on.
    """
    best = logits.argmax(dim=-1).tolist() if len(states) else []
    found: list[Sampled | Exception] = []
    for i, state in enumerate(states):
        try:
            token = best[i] if state.plain else _choose(logits[i], state, tokens[i])
            found.append(Sampled(token, _logprobs(logits[i], token, state.params.logprobs)))
        except Exception as error:  # a processor may be anybody's code: it ends its own request
            found.append(error)
    return found


def _choose(logits: torch.Tensor, state: SamplerState, tokens: Sequence[int]) -> int:
    scores = logits[None].clone()
    if state.processors:
        ids = torch.tensor([list(tokens)], device=logits.device)
        for processor in state.processors:
            scores = processor(ids, scores)
    if state.params.greedy:
        token = int(scores[0].argmax())
        if scores[0, token] == float("-inf"):
            raise InvalidRequestError("every token is excluded by the request's processors; there is none to choose")
        return token
    probabilities = scores[0].double().softmax(dim=-1)
    total = probabilities.cumsum(dim=-1)
    if not bool(total[-1] > 0):
        raise InvalidRequestError("the scores left by the request's processors are not numbers to sample from")
    at = uniform(state.seed, state.row, len(tokens)) * total[-1]
    token = int(torch.searchsorted(total, at, right=True))
    return min(token, int(probabilities.nonzero()[-1]))


def uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1) that depends on the three alone: counter-based, after SplitMix64's finaliser."""
    x = 0
    for part in (seed, row, position):
        x = _mix((x ^ (part & _MASK)) + 0x9E3779B97F4A7C15)
    return (x >> 11) / (1 << 53)


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _logprobs(logits: torch.Tensor, token: int, count: int | None) -> dict[int, Logprob] | None:
    if count is None:
        return None
    scores = logits.log_softmax(dim=-1)
    chosen = float(scores[token])
    values, ids = scores.topk(min(count, len(scores)))
    found = {int(i): Logprob(float(v), rank + 1) for rank, (v, i) in enumerate(zip(values, ids, strict=True))}
    found.setdefault(token, Logprob(chosen, int((scores > chosen).sum()) + 1))
    return found
