"""A peer's side of a measurement: the loop that reads orders and answers them, one JSON object a line.

Owns the protocol and the clock around a run. Knows no engine: an adapter derives from :class:`Peer` and calls
:func:`serve`. Python's own library only, in one file, since it also runs in environments that have nothing of hf_paged;
the runner puts this folder on their path.

    {"do": "load", "job": {...}}   {"ok": true, "prepare_s": .., "load_s": .., "versions": {..}, "details": {..}}
    {"do": "reset", "work": {...}} {"ok": true}
    {"do": "run", "work": {...}}   {"ok": true, "wall_s": .., "outputs": [[[ids], ..], ..], "details": {..}}
    {"do": "stop"}                 {"ok": true}, and the process ends

An order that fails is answered ``{"ok": false, "error": sentence, "traceback": text}`` and the process goes on. What
libraries print goes to standard error: standard output is the protocol's alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What to load, and what it must be able to hold.

    Attributes:
        model: a Hugging Face folder.
        dtype: "float32", "bfloat16" or "float16".
        threads: for computing.
        scratch: a folder of this peer and this model, where converted weights may be kept between runs.
        max_len: tokens of the longest sequence, output included.
        max_seqs: sequences of the largest piece of work.
        kv_tokens: tokens of all sequences of the largest piece of work, as if nothing were shared.
    """

    model: str
    dtype: str
    threads: int
    scratch: str
    max_len: int
    max_seqs: int
    kv_tokens: int


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt, and the exact number of tokens to generate."""

    prompt: list[int]
    out: int


@dataclass(frozen=True)
class Work:
    """Requests that are given together. ``samples`` above 1 draws so many completions of each prompt, at temperature 1
    from the whole vocabulary; 1 is greedy."""

    requests: list[Request]
    samples: int = 1
    seed: int = field(default=0)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Work:
        requests = [Request(**request) for request in message["requests"]]
        return cls(requests, message["samples"], message["seed"])

    def shared_prefix(self) -> int:
        """Tokens that all prompts begin with, when there is more than one."""
        first, *others = (request.prompt for request in self.requests)
        return min((common_length(first, prompt) for prompt in others), default=0)


def common_length(a: list[int], b: list[int]) -> int:
    """Tokens that both begin with."""
    pairs = zip(a, b, strict=False)  # the shorter one decides
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(a), len(b)))


class Peer:
    """One engine under measurement. Lengths are exact: an end-of-sequence token is a token like others, which ends
    nothing and is not suppressed (suppressing would change what is generated, and engines differ in how they do it)."""

    #: distributions whose versions are reported
    packages: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.job: Job

    def prepare(self) -> None:
        """Convert weights into ``self.job.scratch`` where this has not been done. Its time is no start-up time."""

    def load(self) -> None:
        """Get ready for requests."""
        raise NotImplementedError

    def reset(self, work: Work) -> None:
        """Forget every prompt seen, so that a repeat computes what the first run did, and get ready for ``work``. Not
        timed."""

    def run(self, work: Work) -> list[list[list[int]]]:
        """Generate; returns for each request its completions, each a list of token ids. Timed."""
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """Figures of this engine's own to report with a run, such as bytes of keys and values."""
        return {}

    def stop(self) -> None:
        """End threads and processes of the engine's own."""


def serve(peer: Peer) -> None:
    """Answer orders until told to stop, or until the runner is gone."""
    _end_with_the_runner()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            order = json.loads(line)
            answer = {"ok": True, **_carry_out(peer, order)}
        except Exception as error:  # any failure is this peer's result; the runner shows it
            order = {}
            told = str(error).strip() or "no message"
            answer = {"ok": False, "error": f"{type(error).__name__}: {told}", "traceback": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if order.get("do") == "stop":
            break


def _end_with_the_runner() -> None:
    """A halted process would not see that its input has ended: Linux can end it with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _carry_out(peer: Peer, order: dict[str, Any]) -> dict[str, Any]:
    name = order["do"]
    if name == "load":
        return _load(peer, Job(**order["job"]))
    if name == "reset":
        peer.reset(Work.from_message(order["work"]))
        return {}
    if name == "run":
        work = Work.from_message(order["work"])
        start = time.perf_counter()
        outputs = peer.run(work)
        wall = time.perf_counter() - start
        return {"wall_s": wall, "outputs": outputs, "details": peer.details()}
    if name == "stop":
        peer.stop()
        return {}
    raise ValueError(f"unknown order {name!r}")


def _load(peer: Peer, job: Job) -> dict[str, Any]:
    peer.job = job
    Path(job.scratch).mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    peer.prepare()
    prepared = time.perf_counter()
    peer.load()
    loaded = time.perf_counter()
    return {
        "prepare_s": prepared - start,
        "load_s": loaded - prepared,
        "versions": {name: _version(name) for name in ("python", *peer.packages)},
        "details": peer.details(),
    }


def _version(package: str) -> str:
    if package == "python":
        return ".".join(str(part) for part in sys.version_info[:3])
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
