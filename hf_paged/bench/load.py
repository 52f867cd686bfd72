"""CPU time that anybody but the measured process tree used while something was timed.

Owns one comparison: what the machine's processors spent working, less what the tree spent, over a stretch of time. Time
the hypervisor took away (steal) counts as others'. Knows no peers; called by the runner.

The system counts in ticks of 10 ms, one for each processor and process, so a stretch is only called disturbed when the
others' time is beyond ``limit`` of one core plus a few ticks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

#: seconds by which ticks alone can make the difference wrong
_GRAIN = 0.04


@dataclass(frozen=True)
class Load:
    """What others used: CPU ``seconds`` within ``wall`` seconds; ``share`` is of one core."""

    seconds: float
    wall: float

    @property
    def share(self) -> float:
        return self.seconds / self.wall if self.wall > 0 else 0.0

    def disturbs(self, limit: float) -> bool:
        return self.seconds > limit * self.wall + _GRAIN


class LoadWatch:
    """From its making to :meth:`stop`.

    Args:
        tree: gives the processes that are measured, asked at both ends, since a run may start some. Those that end in
            between are counted when their parent waits for them, as an engine's do.
    """

    def __init__(self, tree: Callable[[], list[psutil.Process]]) -> None:
        self._tree = tree
        self._start = time.perf_counter()
        self._own, self._all = _used_by(tree()), _used_by_all()

    def stop(self) -> Load:
        wall = time.perf_counter() - self._start
        own, everyone = _used_by(self._tree()) - self._own, _used_by_all() - self._all
        return Load(max(0.0, everyone - own), wall)


def wait_until_quiet(limit: float, patience: float, stretch: float = 0.5) -> bool:
    """Wait until all processes together use less than ``limit`` of one core, for ``patience`` seconds at most; whether
    that came."""
    until = time.perf_counter() + patience
    while True:
        watch = LoadWatch(list)
        time.sleep(stretch)
        if not watch.stop().disturbs(limit):
            return True
        if time.perf_counter() >= until:
            return False


def _used_by_all() -> float:
    times = psutil.cpu_times()
    # guest time is in user's already; idle and iowait are no work
    working = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times, name, 0.0) for name in working)


def _used_by(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += sum(getattr(times, name, 0.0) for name in ("user", "system", "children_user", "children_system"))
    return total
