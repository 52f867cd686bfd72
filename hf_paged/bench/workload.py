"""Files of token ids, and the cases they hold.

Owns the format: one JSON object, a name for each entry, and the form of the entry says what is measured:

    [{"prompt": [ids], "out": n}, ...]           output tokens/s of requests given together
    {"8": [{"prompt": .., "out": n}, ...], ..}   milliseconds of a decode step at batch 8, ..: all have the same n, and
                                                 step = (wall(n) - wall(1)) / (n - 1)
    [{"prompt": [ids], "out": 1}]                seconds to the first token of one prompt
    {"prompt": [ids], "n": k, "out": n}          seconds for k samples of one prompt

Knows no peer and no clock. ``DEFAULT`` is W1-W5: ids of SmolLM2's tokenizer, made from Python's documentation strings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_paged.bench.wire.hf_paged_peer import Request, Work
from hf_paged.errors import ConfigError

DEFAULT = Path(__file__).with_name("workloads.json")


@dataclass(frozen=True)
class Case:
    """One figure to measure.

    Attributes:
        entry: the file's name of it; ``name`` adds the batch size of a step.
        unit: of the figure; ``higher`` says which end is good.
        works: run one after the other in each repeat; ``figure`` makes the number from their seconds.
    """

    entry: str
    name: str
    kind: str
    unit: str
    higher: bool
    works: tuple[Work, ...]
    figure: Callable[[Sequence[float]], float] = field(compare=False)

    @property
    def greedy(self) -> bool:
        return self.works[0].samples == 1


@dataclass(frozen=True)
class Workloads:
    """The cases of a file, in its order. ``note`` says what a reader of the results has to know about the ids."""

    name: str
    cases: tuple[Case, ...]
    note: str = ""

    def only(self, entries: Collection[str]) -> Workloads:
        """The cases of these entries. Raises ConfigError for an entry that is not there."""
        known = list(dict.fromkeys(case.entry for case in self.cases))
        for entry in entries:
            if entry not in known:
                raise ConfigError(f"no entry {entry!r} in {self.name}; it has {', '.join(known)}")
        return replace(self, cases=tuple(case for case in self.cases if case.entry in entries))

    def check(self, vocabulary: int, longest: int | None) -> None:
        """Raise ConfigError where a model of this vocabulary and sequence length cannot run a case."""
        for case in self.cases:
            for number, request in _numbered(case):
                worst = max(request.prompt)
                if worst >= vocabulary:
                    raise ConfigError(
                        f"token id {worst} in {case.name}, request {number}, is outside the model's vocabulary of "
                        f"{vocabulary}; give a file made with this model's tokenizer, or --synthetic for random ids"
                    )
                total = len(request.prompt) + request.out
                if longest is not None and total > longest:
                    raise ConfigError(
                        f"{case.name}, request {number}, needs {total} tokens and the model has positions for "
                        f"{longest}; leave it out with --only, or give a file with shorter prompts"
                    )

    def synthetic(self, vocabulary: int, special: Iterable[int] = ()) -> Workloads:
        """The same lengths and shared prefixes with random ids: each id of the file becomes one of the vocabulary."""
        usable = [token for token in range(vocabulary) if token not in set(special)]
        draw, mapping = random.Random(vocabulary), dict[int, int]()

        def of(token: int) -> int:
            if token not in mapping:
                mapping[token] = draw.choice(usable)
            return mapping[token]

        def changed(work: Work) -> Work:
            requests = [Request([of(token) for token in request.prompt], request.out) for request in work.requests]
            return replace(work, requests=requests)

        cases = [replace(case, works=tuple(changed(work) for work in case.works)) for case in self.cases]
        return replace(self, cases=tuple(cases), note="random token ids; lengths and shared prefixes are the file's")


def read(path: str | Path) -> Workloads:
    """Read a file. Raises ConfigError, which names the entry, where it is not of the form above."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the workload file {path} ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"the workload file {path} is not JSON ({error})") from error
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"the workload file {path} must be a JSON object with one name for each workload")
    cases = [case for name, entry in data.items() for case in _cases(name, entry)]
    return Workloads(path.name, tuple(cases))


def _cases(name: str, entry: Any) -> list[Case]:
    if isinstance(entry, dict) and "prompt" in entry:
        return [_samples(name, entry)]
    if isinstance(entry, dict) and entry:
        return [_step(name, batch, requests) for batch, requests in entry.items()]
    requests = _requests(name, entry)
    if len(requests) == 1 and requests[0].out == 1:
        return [_seconds(name, "first token", Work(requests))]
    tokens = sum(request.out for request in requests)
    return [Case(name, name, "throughput", "tokens/s", True, (Work(requests),), lambda walls: tokens / walls[0])]


def _step(name: str, batch: str, entry: Any) -> Case:
    requests = _requests(f"{name}[{batch!r}]", entry)
    if batch != str(len(requests)):
        raise ConfigError(f"workload {name}[{batch!r}] holds {len(requests)} requests; its name must be their number")
    outs = {request.out for request in requests}
    if len(outs) != 1 or min(outs) < 2:
        raise ConfigError(f"workload {name}[{batch!r}]: all 'out' must be the same number of at least 2")
    steps = min(outs) - 1
    works = (Work(requests), Work([Request(request.prompt, 1) for request in requests]))

    def figure(walls: Sequence[float]) -> float:
        return 1000 * (walls[0] - walls[1]) / steps

    return Case(name, f"{name} b={batch}", "step", "ms/step", False, works, figure)


def _samples(name: str, entry: dict[str, Any]) -> Case:
    n: Any = entry.get("n")
    if not _is_count(n) or n < 2:
        raise ConfigError(f"workload {name}: 'n' must be a number of samples, at least 2, not {n!r}")
    seed: Any = entry.get("seed", 0)
    if not _is_count(seed) or seed >= 1 << 31:
        raise ConfigError(f"workload {name}: 'seed' must be a number from 0 to 2**31 - 1, not {seed!r}")
    requests = _requests(name, [{key: entry.get(key) for key in ("prompt", "out")}])
    return _seconds(name, "samples", Work(requests, samples=n, seed=seed))


def _seconds(name: str, kind: str, work: Work) -> Case:
    return Case(name, name, kind, "s", False, (work,), lambda walls: walls[0])


def _requests(name: str, entry: Any) -> list[Request]:
    if not isinstance(entry, list) or not entry:
        raise ConfigError(f"workload {name} must be a list of requests, a dict of them by batch, or one with 'n'")
    return [_request(f"workload {name}, request {number}", item) for number, item in enumerate(entry)]


def _request(where: str, item: Any) -> Request:
    prompt: Any = item.get("prompt") if isinstance(item, dict) else None
    out: Any = item.get("out") if isinstance(item, dict) else None
    if not isinstance(prompt, list) or not prompt or not all(_is_count(token) for token in prompt):
        raise ConfigError(f"{where}: 'prompt' must be a list of token ids, and not empty")
    if not _is_count(out) or out < 1:
        raise ConfigError(f"{where}: 'out' must be the number of tokens to generate, at least 1, not {out!r}")
    return Request(prompt, out)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _numbered(case: Case) -> Iterable[tuple[int, Request]]:
    return enumerate(case.works[0].requests)
