"""One peer in a measurement: its process, started again when it died, its timed runs, and the check of what it gave.

Owns the peer's result. Knows nothing of other peers, of the order of runs and of repeats; ``runner`` does.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_paged.bench.load import Load, LoadWatch
from hf_paged.bench.peers import PeerSpec, thread_variables
from hf_paged.bench.process import PeerDiedError, PeerError, PeerProcess
from hf_paged.bench.results import PeerResult
from hf_paged.bench.wire.hf_paged_peer import Job, Request, Work

#: of a request in a warm-up, and how many of them
_WARM_UP_TOKENS, _WARM_UP_REQUESTS = 4, 4


@dataclass(frozen=True)
class Run:
    """One timed run: seconds by the peer's clock, its tokens, others' load meanwhile, and bytes at most in RAM."""

    wall: float
    outputs: list[list[list[int]]]
    load: Load
    peak_rss: int
    details: Mapping[str, Any]


class Contestant:
    """A peer that is loaded when it is first needed, and halted while it is not asked anything.

    Args:
        job: what to load.
        log: file for what its process prints.
        first: the request whose first token is part of the start-up time; None for none.
        load_timeout, run_timeout: seconds for one answer.
    """

    def __init__(
        self, spec: PeerSpec, job: Job, log: Path, first: Request | None, load_timeout: float, run_timeout: float
    ) -> None:
        self.result = PeerResult(spec.name, reason=spec.missing)
        self._spec, self._job, self._log, self._first = spec, job, log, first
        self._load_timeout, self._run_timeout = load_timeout, run_timeout
        self._process: PeerProcess | None = None

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def usable(self) -> bool:
        return not self.result.reason

    def warm_up(self, work: Work) -> None:
        """The work with fewer requests and tokens: threads, caches of kernels and compiled code are then there."""
        requests = [
            Request(request.prompt, min(request.out, _WARM_UP_TOKENS)) for request in work.requests[:_WARM_UP_REQUESTS]
        ]
        self.run(dataclasses.replace(work, requests=requests))

    def run(self, work: Work) -> Run:
        """Reset and run. Raises PeerError for a failure or wrong lengths, PeerDiedError where the process is gone; the
        next call then starts another."""
        process = self._awake()
        try:
            message = dataclasses.asdict(work)
            process.ask("reset", self._run_timeout, work=message)
            process.reset_peak_memory()
            watch = LoadWatch(process.tree)
            answer = process.ask("run", self._run_timeout, work=message)
            load = watch.stop()
            run = Run(answer["wall_s"], answer["outputs"], load, process.peak_memory(), answer["details"])
            process.suspend()
        except PeerDiedError:
            self._process = None
            raise
        return run

    def checked(self, work: Work) -> Run:
        """A run whose lengths are the wanted ones."""
        run = self.run(work)
        check_lengths(work, run.outputs)
        return run

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _awake(self) -> PeerProcess:
        if self._process is None:
            self._process = self._start()
        self._process.resume()
        return self._process

    def _start(self) -> PeerProcess:
        process = PeerProcess(self._spec, self._log, thread_variables(self._job.threads))
        try:
            loaded = process.ask("load", self._load_timeout, job=dataclasses.asdict(self._job))
            ready = time.perf_counter() - process.started - loaded["prepare_s"]
            memory = process.peak_memory()
            first = 0.0
            if self._first is not None:
                message = dataclasses.asdict(Work([dataclasses.replace(self._first, out=1)]))
                process.ask("reset", self._run_timeout, work=message)
                first = process.ask("run", self._run_timeout, work=message)["wall_s"]
        except PeerError:
            process.kill()
            raise
        result = self.result
        if result.start_s is None:  # a later start, after a death, may find caches the first one made
            result.versions, result.prepare_s = loaded["versions"], loaded["prepare_s"]
            result.load_s = loaded["load_s"]
            result.start_s, result.rss_ready = ready, memory
            result.first_token_s = loaded["load_s"] + first
        return process


def check_lengths(work: Work, outputs: list[list[list[int]]]) -> None:
    """Raise PeerError unless there is exactly what was asked for."""
    if len(outputs) != len(work.requests):
        raise PeerError(f"wrong number of outputs: {len(outputs)} for {len(work.requests)} requests")
    for number, (request, completions) in enumerate(zip(work.requests, outputs, strict=True)):
        if len(completions) != work.samples:
            raise PeerError(f"request {number} has {len(completions)} completions, not {work.samples}")
        for ids in completions:
            if len(ids) != request.out:
                raise PeerError(f"wrong length: request {number} has {len(ids)} new tokens, not {request.out}")
