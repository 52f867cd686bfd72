"""What ``hf-paged bench`` and ``benchmarks/compare.py`` do: from what was asked to files and tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console

from hf_paged.bench import chart, table, workload
from hf_paged.bench.model import subject
from hf_paged.bench.peers import ADAPTERS, ENVIRONMENTS, available, choose
from hf_paged.bench.results import Results
from hf_paged.bench.runner import Settings, measure
from hf_paged.errors import ConfigError, UnsupportedError
from hf_paged.model.loader import DEMO


@dataclass(frozen=True)
class Request:
    """What to measure, and where to put it.

    Attributes:
        workloads: a file; None is W1-W5, whose ids are of the demo model's tokenizer and drawn anew for other models.
        synthetic: random ids with the file's lengths.
        only: entries of the file; None is all.
        peers: names; None is every one, with those that are not installed.
        out: folder for ``MODEL-DTYPE.json``, the chart beside it, and ``logs/``.
        adapters, environments: where other engines' adapters and Pythons are.
    """

    model: str = DEMO
    workloads: Path | None = None
    synthetic: bool = False
    only: Sequence[str] | None = None
    peers: Sequence[str] | None = None
    out: Path = Path("hf-paged-bench")
    adapters: Path = ADAPTERS
    environments: Path = ENVIRONMENTS
    settings: Settings = field(default_factory=Settings)


def cores() -> int:
    """Physical cores this process may use: what a peer gets when nothing else is said."""
    physical = psutil.cpu_count(logical=False) or 1
    return min(physical, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else physical


def run(request: Request, console: Console) -> Results:
    """Measure, print, and write the files. Raises ConfigError or UnsupportedError for what cannot be measured."""
    if not hasattr(os, "killpg"):
        raise UnsupportedError("processes are halted by signals while others are measured, which needs Linux or macOS")
    chart.check()
    chosen = choose(request.peers, available(request.adapters, request.environments))
    model = subject(request.model)
    works = workload.read(request.workloads or workload.DEFAULT)
    if request.only is not None:
        works = works.only(request.only)
    if request.synthetic or (request.workloads is None and request.model != DEMO):
        works = works.synthetic(model.vocabulary, model.special)
    works.check(model.vocabulary, model.longest)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {request.out} ({error.strerror}); name another with --out"
        ) from error

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    results = measure(model, works, chosen, request.settings, request.out / "logs", say)
    console.print()
    table.show(results, console)
    name = re.sub(r"[^\w.-]+", "-", f"{results.model}-{request.settings.dtype}")
    written = request.out / f"{name}.json"
    written.write_text(json.dumps(results.as_data(), indent=1) + "\n", encoding="utf-8")
    chart.draw(results, request.out / f"{name}.png")
    say(f"written: {written} and {name}.png beside it")
    return results
