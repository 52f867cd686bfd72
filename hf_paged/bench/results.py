"""What a measurement found, as plain data that becomes one JSON object. Computes medians and ratios; prints nothing."""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from hf_paged import doctor
from hf_paged.bench.agreement import Agreement
from hf_paged.bench.peers import baseline
from hf_paged.bench.workload import Case

#: raised when the JSON changes its shape
FORMAT = 1
#: states of a figure
OK, DISTURBED, FAILED = "ok", "disturbed", "failed"


@dataclass(frozen=True)
class Repeat:
    """One repeat of a case: its figure, the seconds of its runs, what others used of a core meanwhile at most, bytes
    that the peer's processes had in RAM at most, and figures of the engine's own."""

    figure: float
    walls: tuple[float, ...]
    outside: float
    disturbed: bool
    peak_rss: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Figures:
    """A peer's repeats of a case. ``thrown_away`` were disturbed and are not among them, unless the load was accepted.
    ``outputs`` are the first repeat's tokens, for agreement; not in the JSON."""

    state: str = OK
    reason: str = ""
    repeats: list[Repeat] = field(default_factory=list)
    thrown_away: int = 0
    agreement: Agreement | None = None
    outputs: list[list[list[int]]] | None = None

    @property
    def shown(self) -> bool:
        """Whether there is a number that may be printed."""
        return self.state == OK and bool(self.repeats)

    @property
    def marked(self) -> bool:
        """Whether it was measured under load that was accepted."""
        return any(repeat.disturbed for repeat in self.repeats)

    @property
    def median(self) -> float:
        return statistics.median(repeat.figure for repeat in self.repeats)

    @property
    def span(self) -> tuple[float, float]:
        figures = [repeat.figure for repeat in self.repeats]
        return min(figures), max(figures)

    def as_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"state": self.state, "reason": self.reason, "thrown_away": self.thrown_away}
        if self.shown:
            low, high = self.span
            data |= {"median": self.median, "min": low, "max": high, "under_load": self.marked}
        data["repeats"] = [dataclasses.asdict(repeat) for repeat in self.repeats]
        data["agreement"] = dataclasses.asdict(self.agreement) if self.agreement else None
        return data


@dataclass
class PeerResult:
    """A peer and all its figures by case. ``reason`` says why there are none at all: not installed, or not loaded.

    Attributes:
        prepare_s: converting weights, where that had not been done.
        start_s: from starting its process to being ready, without ``prepare_s``.
        load_s: loading alone, without the start of Python and imports that came before it.
        first_token_s: ``load_s`` and one token for the first prompt.
        rss_ready: bytes in RAM when it was ready.
    """

    name: str
    reason: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    prepare_s: float | None = None
    start_s: float | None = None
    load_s: float | None = None
    first_token_s: float | None = None
    rss_ready: int | None = None
    cases: dict[str, Figures] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "cases"}
        return {**data, "cases": {name: figures.as_data() for name, figures in self.cases.items()}}


@dataclass
class Results:
    """Everything. ``floors`` has a figure for each case, or is empty, and ``floor_note`` says why."""

    model: str
    settings: dict[str, Any]
    workloads: str
    note: str
    cases: tuple[Case, ...]
    peers: list[PeerResult] = field(default_factory=list)
    rates: list[dict[str, Any]] = field(default_factory=list)
    floors: dict[str, float] = field(default_factory=dict)
    floor_note: str = ""
    agreement_note: str = ""
    interrupted: bool = False
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""

    def ratio(self, case: Case, peer: PeerResult) -> float | None:
        """How many times as fast as ``peer`` hf_paged is; None where either has no number."""
        ours = self.baseline()
        if ours is None or peer is ours:
            return None
        a, b = ours.cases.get(case.name), peer.cases.get(case.name)
        if a is None or b is None or not a.shown or not b.shown:
            return None
        top, bottom = (a.median, b.median) if case.higher else (b.median, a.median)
        return top / bottom if bottom > 0 else None

    def of_floor(self, case: Case, peer: PeerResult) -> float | None:
        """The floor's time as a share of the peer's."""
        figures, floor = peer.cases.get(case.name), self.floors.get(case.name)
        if figures is None or not figures.shown or not floor or figures.median <= 0:
            return None
        return figures.median / floor if case.higher else floor / figures.median

    def baseline(self) -> PeerResult | None:
        name = baseline([peer.name for peer in self.peers])
        return next((peer for peer in self.peers if peer.name == name), None)

    @property
    def failed(self) -> bool:
        """Whether a peer that is installed lacks a number for another reason than load."""
        return any(f.state == FAILED for peer in self.peers for f in peer.cases.values())

    def as_data(self) -> dict[str, Any]:
        ours = self.baseline()
        return {
            "format": FORMAT,
            "date": self.date,
            "machine": self.machine,
            "model": self.model,
            "settings": self.settings,
            "interrupted": self.interrupted,
            "workloads": {"name": self.workloads, "note": self.note},
            "cases": {c.name: {"kind": c.kind, "unit": c.unit, "higher_is_better": c.higher} for c in self.cases},
            "rates": self.rates,
            "floor": {"figures": self.floors, "note": self.floor_note},
            "agreement_note": self.agreement_note,
            "peers": {peer.name: peer.as_data() for peer in self.peers},
            "ratios": {
                "of": ours.name if ours else None,
                "meaning": "how many times as fast it is as the peer",
                "to": {peer.name: {c.name: self.ratio(c, peer) for c in self.cases} for peer in self.peers},
            },
        }


def describe_machine() -> dict[str, Any]:
    """The machine and the libraries, as ``hf-paged doctor`` sees them; no names of hosts, users or folders."""
    report = doctor.examine()
    return {
        "devices": [dataclasses.asdict(device) for device in report.devices],
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cpus": os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu_kernel": report.cpu_kernel,
        "versions": report.versions,
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
