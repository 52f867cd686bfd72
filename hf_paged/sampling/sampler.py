"""From logits to tokens, for rows that each have settings of their own.

Common options run for all rows that use them at once, the others row by row on the request's own ids. What a row gets
does not depend on the rows beside it: randomness is a function of (seed, row, position) and of nothing else, so a
request draws the same tokens in any batch and however often it is preempted. Called by the engine's stepper, in the
thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_paged.errors import InvalidRequestError
from hf_paged.sampling import stages
from hf_paged.sampling.history import History
from hf_paged.sampling.logprobs import Logprob as Logprob
from hf_paged.sampling.logprobs import token_logprobs as token_logprobs
from hf_paged.sampling.processors import Processor, called
from hf_paged.sampling.stages import Part, Stage
from hf_paged.sampling_params import SamplingParams

_MASK = (1 << 64) - 1
_EXCLUDED = float("-inf")
#: scores worked on at once on a CPU: what its cache holds
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Sampled:
    """A chosen token, with the log-probabilities asked for (the chosen one among them), or None.

    ``stopped`` says that one of the request's stopping criteria is met.
    """

    token: int
    logprobs: dict[int, Logprob] | None = None
    stopped: bool = False


@dataclass(frozen=True)
class _Step:
    """A processor, and the stage that stands for it at its place in the order, if there is one."""

    processor: Processor
    rank: int = -1
    stage: Stage | None = None
    prepared: Any = None


@dataclass
class SamplerState:
    """What the sampler keeps for one row of a request."""

    params: SamplingParams
    processors: Sequence[Processor]
    seed: int
    row: int = 0
    _history: History = field(init=False, repr=False, compare=False, default_factory=History)
    _steps: list[_Step] | None = field(init=False, repr=False, compare=False, default=None)

    @property
    def plain(self) -> bool:
        """Whether the most likely token is the answer."""
        return self.params.greedy and not self.processors

    @property
    def says_no_more(self) -> bool:
        """Whether the token is all that is wanted."""
        return self.num_logprobs is None and not self.params.stopping_criteria

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report; 0 also where only the likelihood of the chosen token is wanted, to rank outputs."""
        if self.params.logprobs is None and self.params.best_of is not None:
            return 0
        return self.params.logprobs

    def steps(self, vocab: int) -> list[_Step]:
        """The processors in order, each with its stage. Raises InvalidRequestError for ids beyond the vocabulary."""
        if self._steps is None:
            self._steps = [_step(processor, vocab) for processor in self.processors]
        return self._steps


def _step(processor: Processor, vocab: int) -> _Step:
    stage = stages.STAGES.get(type(processor))
    prepared = None if stage is None else stage.prepare(processor, vocab)
    if prepared is None:
        return _Step(processor)
    return _Step(processor, stages.RANKS[type(processor)], stage, prepared)


@torch.no_grad()
def sample(
    logits: torch.Tensor, states: Sequence[SamplerState], tokens: Sequence[Sequence[int]]
) -> list[Sampled | Exception]:
    """One token for each row of ``logits`` (float32 ``[n, vocab]``); ``tokens[i]`` is the row's prompt and output.

    A row whose processors or criteria fail, or leave nothing to choose from, gives the exception instead; others go
    on.
    """
    plain = [row for row, state in enumerate(states) if state.plain]
    likely = dict(zip(plain, _most_likely(logits, plain), strict=True))  # of all at once
    if len(likely) == len(states) and all(state.says_no_more for state in states):
        return [Sampled(token) for token in likely.values()]
    found: list[Sampled | Exception] = []
    for rows in _chunks(logits):
        batch = _Batch(logits[rows], states[rows], tokens[rows])
        found += batch.run({row - rows.start: likely[row] for row in plain if rows.start <= row < rows.stop})
    return found


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


class _Batch:
    """Rows that are sampled together. ``errors`` are those that have failed so far."""

    def __init__(self, logits: torch.Tensor, states: Sequence[SamplerState], tokens: Sequence[Sequence[int]]) -> None:
        self.logits, self.states, self.tokens = logits, states, tokens
        self.errors: dict[int, Exception] = {}
        self.chosen: dict[int, int] = {}
        #: rows whose scores are not simply their logits, and where they are in ``scores``
        self.place = {row: place for place, row in enumerate(r for r, s in enumerate(states) if not s.plain)}
        self.scores = logits[list(self.place)] if len(self.place) < len(logits) else logits.clone()

    def run(self, likely: Mapping[int, int]) -> list[Sampled | Exception]:
        """``likely`` are the most likely tokens of plain rows."""
        self.chosen.update(likely)
        if self.place:
            self._process()
            self._take_most_likely()
            self._draw()
        stopped = {row: self._stopped(row) for row in list(self.chosen) if self.states[row].params.stopping_criteria}
        logprobs = self._logprobs()
        return [
            self.errors[row]
            if row in self.errors
            else Sampled(self.chosen[row], logprobs.get(row), stopped.get(row, False))
            for row in range(len(self.states))
        ]

    # -- processors ------------------------------------------------------------------------------------------------

    def _process(self) -> None:
        """Run every row's processors in its own order; rows wait for each other where a stage does them together."""
        steps: dict[int, list[_Step]] = {}
        for row in self.place:
            try:
                steps[row] = self.states[row].steps(self.logits.shape[1])
            except Exception as error:  # what processors are made of may be anybody's: it ends its own request
                self.errors[row] = error
        done = dict.fromkeys(steps, 0)
        while True:
            waiting: dict[int, list[int]] = {}
            for row, own in steps.items():
                while done[row] < len(own) and own[done[row]].stage is None and row not in self.errors:
                    self._call(row, own[done[row]].processor)
                    done[row] += 1
                if done[row] < len(own) and row not in self.errors:
                    waiting.setdefault(own[done[row]].rank, []).append(row)
            if not waiting:
                return
            rows = waiting[min(waiting)]
            stage = steps[rows[0]][done[rows[0]]].stage
            assert stage is not None
            stage.apply(self.scores, [self._part(row, steps[row][done[row]]) for row in rows])
            for row in rows:
                done[row] += 1

    def _part(self, row: int, step: _Step) -> Part:
        return Part(self.place[row], step.processor, step.prepared, self.states[row]._history, self.tokens[row])

    def _call(self, row: int, processor: Processor) -> None:
        own = self.scores[self.place[row]][None].clone()  # which the processor may keep
        try:
            scores = called(processor, self.states[row]._history.ids(self.tokens[row], own.device), own)
            self.scores[self.place[row]] = scores[0]
        except Exception as error:  # a processor may be anybody's code: it ends its own request
            self.errors[row] = error

    # -- choosing --------------------------------------------------------------------------------------------------

    def _ready(self, greedy: bool) -> list[int]:
        return [row for row in self.place if row not in self.errors and self.states[row].params.greedy is greedy]

    def _take_most_likely(self) -> None:
        rows = self._ready(greedy=True)
        places = [self.place[row] for row in rows]
        tokens = _most_likely(self.scores, places)
        best = self.scores[places, tokens].tolist() if rows else []
        for row, token, score in zip(rows, tokens, best, strict=True):
            if score > _EXCLUDED:  # nor is a NaN a choice
                self.chosen[row] = token
            else:
                self.errors[row] = InvalidRequestError(
                    "every token is excluded by the request's processors; there is none to choose"
                )

    def _draw(self) -> None:
        rows = self._ready(greedy=False)
        if not rows:
            return
        places = [self.place[row] for row in rows]
        scores = self.scores if len(places) == len(self.scores) else self.scores[places]
        numbers = [uniform(self.states[r].seed, self.states[r].row, len(self.tokens[r])) for r in rows]
        for row, token in zip(rows, draw(scores, numbers), strict=True):
            if token is None:
                self.errors[row] = InvalidRequestError(
                    "the scores left by the request's processors are not numbers to sample from"
                )
            else:
                self.chosen[row] = token

    # -- what is reported with a token -----------------------------------------------------------------------------

    def _processed(self, rows: Sequence[int]) -> torch.Tensor:
        """Scores after all processors, ``[rows, vocab]``."""
        return torch.stack([self.scores[self.place[row]] if row in self.place else self.logits[row] for row in rows])

    def _logprobs(self) -> dict[int, dict[int, Logprob]]:
        groups: dict[tuple[str, int], list[int]] = {}
        for row in self.chosen:
            state = self.states[row]
            if state.num_logprobs is not None and row not in self.errors:
                groups.setdefault((state.params.logprobs_mode, state.num_logprobs), []).append(row)
        found: dict[int, dict[int, Logprob]] = {}
        for (mode, count), rows in groups.items():
            scores = self._processed(rows) if mode == "processed" else self.logits[rows]
            found.update(zip(rows, token_logprobs(scores, [self.chosen[r] for r in rows], count), strict=True))
        return found

    def _stopped(self, row: int) -> bool:
        """Whether a stopping criterion is met; each is asked, as in ``generate()``."""
        state, scores = self.states[row], self._processed([row])
        try:
            ids = state._history.ids(self.tokens[row], scores.device, more=self.chosen[row])
            met = [bool(torch.as_tensor(ends(ids, scores)).any()) for ends in state.params.stopping_criteria]
        except Exception as error:  # a criterion may be anybody's code: it ends its own request
            self.errors[row] = error
            return False
        return any(met)


def _most_likely(scores: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """The token with the highest score in each of ``rows``; the lowest id where several have it."""
    if stages.in_numpy(scores):
        found = scores.numpy()
        return [int(found[row].argmax()) for row in rows]
    best = scores.argmax(dim=-1).tolist()
    return [best[row] for row in rows]


def draw(scores: torch.Tensor, numbers: Sequence[float]) -> list[int | None]:
    """A token for each row of ``scores`` (float32 ``[n, vocab]``), None where they are no distribution.

    The token drawn for a number from [0, 1) is the first one, in vocabulary order, at which the cumulative softmax in
    float64 exceeds the number.
    """
    scores, ids = _without_excluded(scores) if stages.in_numpy(scores) else (scores, None)
    exponents = scores.double()
    mass = exponents.sub_(exponents.amax(dim=-1, keepdim=True)).exp_().cumsum(dim=-1)
    total = mass[:, -1:]
    # less than the total even for the largest number, 1 - 2**-53, so that there is always a token
    at = torch.tensor(numbers, dtype=torch.float64)[:, None].to(scores.device) * total
    places = torch.searchsorted(mass, at, right=True)[:, 0].tolist()
    found: list[int | None] = []
    for row, (place, whole) in enumerate(zip(places, total[:, 0].tolist(), strict=True)):
        if not whole > 0:
            found.append(None)
        else:
            found.append(place if ids is None else int(ids[row, place]))
    return found


def _without_excluded(scores: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Scores without those of excluded tokens, rows filled up at their ends, and which token each belongs to; the
    scores as they are, and None, where few are excluded."""
    found = scores.numpy()
    count, vocab = found.shape
    kept = np.flatnonzero(found != _EXCLUDED)
    if len(kept) > found.size // 4:
        return scores, None
    rows, tokens = np.divmod(kept, vocab)
    starts = np.searchsorted(rows, np.arange(count))
    places = np.arange(len(kept)) - starts[rows]
    width = int(places.max()) + 1 if len(kept) else 1
    compact = np.full((count, width), _EXCLUDED, dtype=found.dtype)
    ids = np.zeros((count, width), dtype=np.int64)
    compact[rows, places], ids[rows, places] = found[rows, tokens], tokens
    return torch.from_numpy(compact), ids


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
