"""The order of a measurement: who runs when, what is thrown away and repeated, and what is asked at the end.

    for each case:  machine  A B C  A B C  A B C

Every peer is loaded before the first case and halted between its runs. A repeat that others disturbed is thrown away
and had again, a few times; when it cannot be had, the peer has no number for that case. Knows neither files nor tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoConfig

from hf_paged.bench import peers, results
from hf_paged.bench.contestant import Contestant, Run
from hf_paged.bench.floor import ModelShape, Rates, floor_of
from hf_paged.bench.load import wait_until_quiet
from hf_paged.bench.model import Subject
from hf_paged.bench.peers import PeerSpec
from hf_paged.bench.process import PeerError
from hf_paged.bench.reference import judge
from hf_paged.bench.results import DISTURBED, FAILED, Figures, Repeat, Results
from hf_paged.bench.wire.hf_paged_peer import Job, Work
from hf_paged.bench.workload import Case, Workloads
from hf_paged.errors import ConfigError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        dtype, threads: of every peer.
        repeats: of each case.
        timeout: seconds for one run; loading, with its conversions, may take three times as long.
        load_limit: share of one core that others may use.
        patience: seconds to wait for others to be quiet before a repeat; ``retries``: how often a repeat is had again.
        accept_load: keep and print disturbed repeats, marked.
        agreement: compare greedy tokens with fp32 stock's, which has to run for it.
    """

    dtype: str = "bfloat16"
    threads: int = 2
    repeats: int = 3
    timeout: float = 900.0
    load_limit: float = 0.1
    patience: float = 60.0
    retries: int = 3
    accept_load: bool = False
    agreement: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        for name in ("threads", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.timeout <= 0:
            raise ConfigError("timeout must be more than 0 seconds")


def measure(
    subject: Subject,
    workloads: Workloads,
    specs: list[PeerSpec],
    settings: Settings,
    logs: Path,
    say: Callable[[str], None],
) -> Results:
    """Run everything; failures of peers are in the results, with their reasons. An interrupt from the keyboard ends it
    with what there is."""
    found = Results(
        model=subject.name,
        settings=asdict(settings),
        workloads=workloads.name,
        note=workloads.note,
        cases=workloads.cases,
        machine=results.describe_machine(),
        date=results.now(),
    )
    with _contestants(subject, workloads, specs, settings, logs) as (machine, contestants):
        found.peers = [contestant.result for contestant in contestants]
        try:
            _Measurement(settings, found, machine, contestants, say).run()
        except KeyboardInterrupt:
            found.interrupted = True
            say("interrupted; what was measured is kept")
    _floors(found, subject, settings)
    if settings.agreement and not found.interrupted:
        job = job_for(subject, workloads, peers.REFERENCE, "float32", settings.threads)
        found.agreement_note = judge(found, job, settings.timeout, logs, say)
    return found


@contextmanager
def _contestants(
    subject: Subject, workloads: Workloads, specs: list[PeerSpec], settings: Settings, logs: Path
) -> Iterator[tuple[Contestant, list[Contestant]]]:
    """The process that measures the machine, and the peers; none outlives the block."""
    first = workloads.cases[0].works[0].requests[0]

    def contestant(spec: PeerSpec, with_token: bool) -> Contestant:
        job = job_for(subject, workloads, spec.name, settings.dtype, settings.threads)
        log = logs / f"{spec.name}.log"
        log.unlink(missing_ok=True)
        return Contestant(spec, job, log, first if with_token else None, 3 * settings.timeout, settings.timeout)

    machine, everyone = contestant(peers.machine(), False), [contestant(spec, True) for spec in specs]
    try:
        yield machine, everyone
    finally:
        for one in (machine, *everyone):
            one.stop()


def job_for(subject: Subject, workloads: Workloads, peer: str, dtype: str, threads: int) -> Job:
    """What this peer has to load for these cases."""
    works = [work for case in workloads.cases for work in case.works]
    return Job(
        model=str(subject.folder),
        dtype=dtype,
        threads=threads,
        scratch=str(subject.scratch / peer),
        max_len=max(len(r.prompt) + r.out for work in works for r in work.requests),
        max_seqs=max(len(work.requests) * work.samples for work in works),
        kv_tokens=max(sum(len(r.prompt) + r.out for r in work.requests) * work.samples for work in works),
    )


class _Measurement:
    """The loops. ``say`` gets one line when something begins or ended."""

    def __init__(
        self,
        settings: Settings,
        found: Results,
        machine: Contestant,
        contestants: list[Contestant],
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._found, self._machine, self._say = settings, found, machine, say
        self._contestants = contestants

    def run(self) -> None:
        for contestant in self._contestants:
            if contestant.usable:
                self._load(contestant)
            else:
                self._say(f"{contestant.name}: {contestant.result.reason}")
        for case in self._found.cases:
            self._rates()
            self._case(case)

    def _load(self, contestant: Contestant) -> None:
        self._say(f"{contestant.name}: loading")
        try:
            contestant.warm_up(self._found.cases[0].works[0])
        except PeerError as error:
            contestant.result.reason = f"cannot be loaded: {error}"
            self._say(f"{contestant.name}: {contestant.result.reason}")

    def _case(self, case: Case) -> None:
        running = [contestant for contestant in self._contestants if contestant.usable]
        for contestant in running:
            figures = contestant.result.cases[case.name] = Figures()
            try:
                contestant.warm_up(case.works[0])
            except PeerError as error:
                self._failed(contestant, case, figures, error)
        for number in range(1, self._settings.repeats + 1):
            for contestant in running:
                figures = contestant.result.cases[case.name]
                if figures.state == results.OK:
                    self._repeat(contestant, case, figures, number)

    def _repeat(self, contestant: Contestant, case: Case, figures: Figures, number: int) -> None:
        """One repeat that counts; or the state of the figures says why there is none."""
        accept = self._settings.accept_load
        for _ in range(1 + self._settings.retries):
            quiet = wait_until_quiet(self._settings.load_limit, 0 if accept else self._settings.patience)
            if not quiet and not accept:
                break  # patience has been had; retries are for load that comes later
            try:
                runs = [contestant.checked(work) for work in case.works]
            except PeerError as error:
                self._failed(contestant, case, figures, error)
                return
            repeat = self._as_repeat(case, runs, quiet)
            told = f"{case.name}, repeat {number}: {contestant.name} {repeat.figure:.4g} {case.unit}"
            if not repeat.disturbed or accept:
                self._say(told + (f" (others used {repeat.outside:.0%} of a core)" if repeat.disturbed else ""))
                figures.repeats.append(repeat)
                figures.outputs = figures.outputs or runs[0].outputs
                return
            figures.thrown_away += 1
            self._say(f"{told}, thrown away: others used {repeat.outside:.0%} of a core")
        figures.state = DISTURBED
        figures.reason = (
            f"others used more than {self._settings.load_limit:.0%} of a core; run it on a quiet machine, or with "
            "--accept-load"
        )
        self._say(f"{case.name}: {contestant.name} disturbed")

    def _as_repeat(self, case: Case, runs: list[Run], quiet: bool) -> Repeat:
        walls = tuple(run.wall for run in runs)
        return Repeat(
            figure=case.figure(walls),
            walls=walls,
            outside=max(run.load.share for run in runs),
            disturbed=not quiet or any(run.load.disturbs(self._settings.load_limit) for run in runs),
            peak_rss=max(run.peak_rss for run in runs),
            details=runs[-1].details,
        )

    def _failed(self, contestant: Contestant, case: Case, figures: Figures, error: PeerError) -> None:
        figures.state, figures.reason = FAILED, str(error)
        self._say(f"{case.name}: {contestant.name} failed: {str(error).splitlines()[0]}")

    def _rates(self) -> None:
        """A round of the machine's rates, held to the same quiet as repeats; a disturbed one is kept and marked."""
        if self._found.floor_note:
            return
        limit, accept = self._settings.load_limit, self._settings.accept_load
        for _ in range(1 if accept else 1 + self._settings.retries):
            quiet = wait_until_quiet(limit, 0 if accept else self._settings.patience)
            if not quiet and not accept:
                break  # patience has been had; retries are for load that comes later
            try:
                run = self._machine.run(Work([]))
            except PeerError as error:
                self._found.floor_note = f"no floor: {error}"
                self._say(self._found.floor_note)
                return
            disturbed = not quiet or run.load.disturbs(limit)
            self._found.rates.append({**run.details, "outside": run.load.share, "disturbed": disturbed})
            if not disturbed:
                return


def _floors(found: Results, subject: Subject, settings: Settings) -> None:
    """From the quiet rounds; from disturbed ones only where load is accepted, and then with a note."""
    rounds = [one for one in found.rates if not one["disturbed"]]
    if not rounds and settings.accept_load and found.rates:
        rounds = found.rates
        found.floor_note = "the floor's rates were measured while others used the processors: it may be too slow"
    if rounds:
        rates, shape = Rates.best(rounds), ModelShape.of(AutoConfig.from_pretrained(subject.folder))
        found.floors = {case.name: floor_of(case, shape, DTYPES[settings.dtype], rates) for case in found.cases}
    elif not found.floor_note:
        found.floor_note = "no floor: others used the processors whenever the machine's rates were measured"
