"""The requests of one beam search: they step like any others, and wait for each other before each token."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from hf_paged.engine.request import FinishReason, Request
from hf_paged.engine.scheduler import Scheduler
from hf_paged.sampling.beams import BeamSearch
from hf_paged.sampling.processors import Processor
from hf_paged.sampling.sampler import SamplerState
from hf_paged.sampling_params import SamplingParams


@dataclass(frozen=True)
class Beam:
    """What is kept to score one beam's next token."""

    group: BeamGroup
    index: int
    params: SamplingParams
    processors: Sequence[Processor]


class BeamGroup:
    """The beams of one prompt, ``search`` deciding how they go on. Beams need not run in the same step: a beam whose
    scores are known stands still until those of all are."""

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.requests: list[Request] = []
        self._offered: dict[int, torch.Tensor] = {}
        self._error: Exception | None = None

    def offer(self, index: int, scores: torch.Tensor | Exception) -> None:
        """Take the log-probabilities ``[vocab]`` of one beam's next token, or why there are none."""
        if isinstance(scores, Exception):
            self._error = scores
        else:
            self._offered[index] = scores

    def go_on(self, scheduler: Scheduler) -> list[Request]:
        """Give every beam its next token if all are known; returns the requests that ended with the search."""
        alive = [request for request in self.requests if not request.finished]
        if len(alive) < len(self.requests):
            return []  # aborted meanwhile
        if self._error is not None:
            for request in alive:
                scheduler.fail(request, self._error)
            return alive
        if len(self._offered) < len(self.requests):
            return []
        scores = torch.stack([self._offered[i] for i in range(len(self.requests))])
        self._offered.clear()
        try:
            origins = self.search.advance(scores)
        except Exception as error:  # stopping criteria may be anybody's code: they end their own request
            for request in alive:
                scheduler.fail(request, error)
            return alive
        if origins is not None:
            scheduler.continue_beams(self.requests, origins)
            return []
        for request in alive:
            scheduler.finish(request, FinishReason.STOP)
        return alive


def add_beams(
    scheduler: Scheduler,
    samplers: MutableMapping[str, SamplerState | Beam],
    search: BeamSearch,
    requests: Sequence[Request],
    params: SamplingParams,
    processors: Callable[[Request], Sequence[Processor]],
) -> BeamGroup:
    """Queue ``requests``, which have the search's prompt, as its beams; the first computes the prompt for all.

    Args:
        samplers: what is kept to choose each request's tokens, by request id, which gets the beams.
        processors: those of one beam.

    Raises what ``Scheduler.add`` and ``processors`` raise; then none of the beams stays.
    """
    group = BeamGroup(search)
    try:
        for i, request in enumerate(requests):
            request.lockstep = True
            beam = Beam(group, i, params, processors(request))
            scheduler.add(request, requests[0] if i else None)
            group.requests.append(request)
            samplers[request.request_id] = beam
    except Exception:  # whatever it is: none of the beams may stay behind
        for request in group.requests:
            scheduler.abort(request.request_id)
            samplers.pop(request.request_id, None)
        raise
    return group
