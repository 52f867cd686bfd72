"""Beam search of one prompt: which beams go on with which token, and which hypotheses have ended.

The rules are transformers' own functions (see ``compat.BeamRules``), called as its ``generate()`` calls them, so that
scores, ties, length penalty and early stopping are stock's by construction. Forwards, blocks and requests are the
engine's business: it brings the log-probabilities of every beam and is told how the beams go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.compat import BeamRules
from hf_paged.errors import InvalidRequestError
from hf_paged.sampling.processors import Processor, called


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation: its tokens, its score (with the length penalty), and its cumulative log-probability."""

    tokens: list[int]
    score: float
    cumulative_logprob: float


def log_probabilities(
    logits: torch.Tensor, processors: Sequence[Processor], tokens: Sequence[int]
) -> torch.Tensor | Exception:
    """What a beam's scores are made from: the log-softmax of ``logits`` (float32 ``[vocab]``) after all processors.

    The exception, where a processor raises one.
    """
    scores = logits[None].log_softmax(dim=-1)
    try:
        if processors:
            ids = torch.tensor([list(tokens)], device=logits.device)
            for processor in processors:
                scores = called(processor, ids, scores)
    except Exception as error:  # a processor may be anybody's code: it ends its own request
        return error
    if bool(scores.isnan().any()):
        return InvalidRequestError("the scores left by the request's processors are no numbers")
    return scores[0]


class BeamSearch:
    """The state of one search.

    Args:
        prompt: its token ids.
        num_beams, length_penalty, early_stopping: as in transformers.
        max_length: tokens of prompt and continuation at most.
        stop_token_ids: the ids that end a hypothesis.
        criteria: transformers' stopping criteria, the one for ``max_length`` among them; called with ids
            ``[candidates, tokens]``.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        num_beams: int,
        length_penalty: float,
        early_stopping: bool | str,
        max_length: int,
        stop_token_ids: Sequence[int],
        criteria: Any,
    ) -> None:
        self.num_beams, self._penalty, self._early = num_beams, length_penalty, early_stopping
        self._max_length, self._criteria = max_length, criteria
        self._start = self._length = len(prompt)
        self._keep = max(2, 1 + len(stop_token_ids)) * num_beams
        self._top = torch.arange(self._keep, device="cpu") < num_beams
        fill = stop_token_ids[0] if stop_token_ids else -1
        self._running = torch.full((1, num_beams, max_length), fill, dtype=torch.int64, device="cpu")
        self._running[:, :, : self._length] = torch.tensor(list(prompt), device="cpu")
        self._ended = self._running.clone()
        # all beams begin alike, so only the first may go on
        self._running_scores = torch.full((1, num_beams), -1e9, device="cpu")
        self._running_scores[:, 0] = 0
        self._scores = torch.full((1, num_beams), -1e9, device="cpu")
        self._is_ended = torch.zeros((1, num_beams), dtype=torch.bool, device="cpu")
        self._may_improve = torch.ones((1, 1), dtype=torch.bool, device="cpu")
        self._parents = torch.full((1, num_beams, max_length - self._length), -1, dtype=torch.int32, device="cpu")
        self._ended_parents = self._parents.clone()

    def advance(self, log_probs: torch.Tensor) -> list[tuple[int, int]] | None:
        """Take the log-probabilities ``[num_beams, vocab]`` of the next token of every beam.

        Returns for each beam of the next step the beam it goes on from and its token; None when the search is over.
        """
        accumulated = (log_probs.to("cpu") + self._running_scores[0, :, None]).reshape(1, -1)
        if not bool((accumulated > float("-inf")).any()):  # one beam may run dry while others go on
            raise InvalidRequestError("the scores left by the request's processors leave no token to choose")
        top, sequences, parents = BeamRules.top_continuations(
            accumulated_log_probs=accumulated,
            running_sequences=self._running,
            running_beam_indices=self._parents,
            cur_len=self._length,
            decoder_prompt_len=self._start,
            do_sample=False,
            beams_to_keep=self._keep,
            num_beams=self.num_beams,
            batch_size=1,
        )
        ends = self._criteria(sequences[0, :, : self._length + 1], ())[None]
        if ends.shape != top.shape or ends.dtype is not torch.bool:
            raise InvalidRequestError(
                f"stopping criteria gave {ends.dtype} of shape {list(ends.shape[1:])} for {top.shape[1]} candidates; "
                "one bool for each is wanted"
            )
        self._running, self._running_scores, self._parents = BeamRules.running_beams(
            topk_log_probs=top,
            topk_running_sequences=sequences,
            topk_running_beam_indices=parents,
            next_token_hits_stopping_criteria=ends,
            num_beams=self.num_beams,
        )
        self._ended, self._scores, self._ended_parents, self._is_ended = BeamRules.ended_beams(
            sequences=self._ended,
            topk_running_sequences=sequences,
            beam_scores=self._scores,
            topk_log_probs=top,
            beam_indices=self._ended_parents,
            topk_running_beam_indices=parents,
            is_early_stop_heuristic_unsatisfied=self._may_improve,
            is_sent_finished=self._is_ended,
            next_token_hits_stopping_criteria=ends,
            top_num_beam_mask=self._top,
            num_beams=self.num_beams,
            cur_len=self._length,
            decoder_prompt_len=self._start,
            length_penalty=self._penalty,
            early_stopping=self._early,
        )
        came_from = self._parents[0, :, self._length - self._start].tolist()
        chosen = self._running[0, :, self._length].tolist()
        self._length += 1
        self._may_improve = BeamRules.may_improve(
            is_early_stop_heuristic_unsatisfied=self._may_improve,
            running_beam_scores=self._running_scores,
            beam_scores=self._scores,
            is_sent_finished=self._is_ended,
            cur_len=self._length,
            max_length=self._max_length,
            decoder_prompt_len=self._start,
            early_stopping=self._early,
            length_penalty=self._penalty,
        )
        if not BeamRules.goes_on(self._may_improve, self._is_ended, ends, self._early):
            return None
        return list(zip(came_from, chosen, strict=True))

    @property
    def max_new_tokens(self) -> int:
        """Tokens a continuation may have."""
        return self._max_length - self._start

    def best(self, n: int) -> list[Hypothesis]:
        """The ``n`` best hypotheses so far, the best first."""
        found = []
        for row in range(n):
            length = int((self._ended_parents[0, row] >= 0).sum())
            score = float(self._scores[0, row])
            tokens = self._ended[0, row, self._start : self._start + length].tolist()
            found.append(Hypothesis(tokens, score, score * length**self._penalty))
        return found
