"""Where the tokens of fp32 stock come from, and each peer's agreement with them.

Stock runs once for a model and a piece of work, untimed; its tokens are kept beside what peers converted, under the
versions they were made with. When stock in fp32 is itself measured, its first repeat is taken.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from hf_paged.bench import peers
from hf_paged.bench.agreement import compare
from hf_paged.bench.contestant import Contestant
from hf_paged.bench.process import PeerError
from hf_paged.bench.results import Results
from hf_paged.bench.wire.hf_paged_peer import Job, Work
from hf_paged.bench.workload import Case

_Tokens = list[list[list[int]]]


def judge(found: Results, job: Job, timeout: float, logs: Path, say: Callable[[str], None]) -> str:
    """Fill in the agreement of every peer's throughput cases; returns why some have none, or "".

    Args:
        job: what the reference has to load, in fp32.
    """
    cases = [case for case in found.cases if case.kind == "throughput"]
    measured = next((peer for peer in found.peers if peer.name == peers.REFERENCE), None)
    log = logs / "reference.log"
    log.unlink(missing_ok=True)
    stock = Contestant(peers.builtin(peers.REFERENCE), job, log, None, 3 * timeout, timeout)
    try:
        for case in cases:
            having = [peer.cases[case.name] for peer in found.peers if case.name in peer.cases]
            having = [figures for figures in having if figures.outputs is not None]
            if not having:
                continue
            tokens = None
            if found.settings["dtype"] == "float32" and measured is not None and case.name in measured.cases:
                tokens = measured.cases[case.name].outputs
            if tokens is None:
                tokens = _reference(stock, job, case, say)
            for figures in having:
                figures.agreement = compare(_completions(tokens), _completions(figures.outputs))
    except PeerError as error:
        return f"no agreement beyond this: fp32 stock failed: {error}"
    except KeyboardInterrupt:
        return "no agreement beyond this: fp32 stock was interrupted"
    finally:
        stock.stop()
    return ""


def _completions(tokens: _Tokens | None) -> list[list[int]]:
    return [completions[0] for completions in tokens or []]


def _reference(stock: Contestant, job: Job, case: Case, say: Callable[[str], None]) -> _Tokens:
    work = case.works[0]
    kept = Path(job.scratch) / f"tokens-{_key(work)}.json"
    if kept.is_file():
        tokens: _Tokens = json.loads(kept.read_text(encoding="ascii"))
        return tokens
    say(f"{case.name}: running fp32 stock for its tokens")
    tokens = stock.checked(work).outputs
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = kept.with_suffix(".part")
    scratch.write_text(json.dumps(tokens), encoding="ascii")
    scratch.rename(kept)  # a run that is interrupted leaves no half of it
    return tokens


def _key(work: Work) -> str:
    versions = [metadata.version(package) for package in ("torch", "transformers")]
    content = json.dumps([versions, dataclasses.asdict(work)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
