"""What a step consists of: chunks of requests, transfers of blocks, and the making of them.

The scheduler makes plans; whoever runs the model reads them. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hf_paged.cache.block import Transfer
from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.engine.request import Request


@dataclass(slots=True, eq=False)  # frozen would cost more than a microsecond for each, at every step
class Chunk:
    """The part of a request that runs in one step: positions ``start : start + count``. Nobody changes it.

    ``blocks`` are its physical blocks, logical index 0 first, enough for ``start + count`` tokens. With ``samples`` the
    last position's logits give the next token, and the first of each request in ``also``, which go on from a copy of
    its table. With ``scores`` the logits of all its positions are wanted. Where requests have a state besides blocks,
    it goes on from that in ``resumes``, if there is one, and leaves a copy of its own in ``keeps``.
    """

    request: Request
    start: int
    count: int
    blocks: tuple[int, ...]
    samples: bool
    also: tuple[Request, ...] = ()
    scores: bool = False
    residency: int = 0
    resumes: Checkpoint | None = None
    keeps: Checkpoint | None = None

    @property
    def key(self) -> str:
        return self.request.request_id

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens; one that the step before failed to sample is replaced by 0, for a result that nobody takes."""
        found = self.request.tokens[self.start : self.start + self.count]
        return found if len(found) == self.count else [*found, *([0] * (self.count - len(found)))]

    @property
    def num_logits(self) -> int:
        """Positions at its end whose logits are wanted."""
        return self.count if self.scores else int(self.samples)

    @property
    def forks(self) -> Sequence[str]:
        return [request.request_id for request in self.also]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. ``transfers`` have to be executed, in order, before anything is written. ``ended`` are requests that
    could not go on and ended with an error while the step was planned. ``moves`` are ids of requests, source and
    target, whose state besides blocks is to be copied, all at once, before anything else; ``saves`` are ids of requests
    that have ended, and where to put their states, before those of the chunks are used."""

    step: int
    chunks: tuple[Chunk, ...]
    transfers: tuple[Transfer, ...]
    ended: tuple[Request, ...]
    moves: tuple[tuple[str, str], ...] = ()
    saves: tuple[tuple[str, Checkpoint], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def runs(self) -> bool:
        """Whether there is anything to do: chunks of requests that have not ended since, or what others rely on."""
        return bool(self.transfers or self.moves or self.saves) or any(
            not chunk.request.finished for chunk in self.chunks
        )


class Plan:
    """A step in the making. With ``keeps_states`` every piece of a prompt leaves a checkpoint."""

    def __init__(self, budget: int, under_way: Iterable[SchedulerOutput] = (), *, keeps_states: bool = False) -> None:
        self.budget, self._keeps_states = budget, keeps_states
        self.chunks: dict[str, Chunk] = {}
        self.transfers: list[Transfer] = []
        self.ended: list[Request] = []
        self.preempted = 0
        #: pieces of prompts, those of steps under way among them, that will soon be stored for others
        self.prompts = [chunk for output in under_way for chunk in output.chunks if chunk.count > 1]
        #: blocks kept back for what running requests are expected to need, once somebody asked
        self.reserved: int | None = None

    def reserved_for(self, running: Iterable[Request], expected: Callable[[Request], int]) -> int:
        """Blocks that ``running`` are expected to need besides those they have."""
        if self.reserved is None:
            self.reserved = sum(max(0, expected(r) - len(r.table.blocks)) for r in running if r.table is not None)
        return self.reserved

    def add(self, request: Request, count: int, resumes: Checkpoint | None = None) -> None:
        """Let a request that has room for them compute ``count`` more tokens, from a checkpoint if one is given."""
        assert request.table is not None
        self.budget -= count
        start = request.num_computed + request.num_in_flight
        samples = count == request.num_missing and request.max_tokens > 0
        # while its first token is pending, its siblings are as good as on their way
        forks = samples and bool(request.siblings) and not request.num_pending
        chunk = self.chunks[request.request_id] = Chunk(
            request,
            start,
            count,
            tuple(request.table.blocks),
            samples,
            tuple(request.siblings) if forks else (),
            request.scores_prompt and max(request.num_scored, start) < len(request.prompt) - 1,
            request.residency,
            resumes,
            Checkpoint() if self._keeps_states and (count > 1 or not samples) else None,
        )
        if count > 1:
            self.prompts.append(chunk)

    def drop(self, request: Request) -> None:
        """Take a request out again."""
        chunk = self.chunks.pop(request.request_id, None)
        if chunk is not None:
            self.budget += chunk.count
            if chunk.count > 1:
                self.prompts.remove(chunk)
