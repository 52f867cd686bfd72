"""What must be true of a scheduler between two steps. The tests check it after every one."""

from __future__ import annotations

from collections.abc import Iterable

from hf_paged.engine.request import Request, Status
from hf_paged.engine.scheduler import Scheduler
from hf_paged.errors import InternalError


def check_books(scheduler: Scheduler, others: Iterable[Request] = ()) -> None:
    """Raise InternalError unless queue, running list and blocks agree. For tests, after every step."""
    for request in scheduler.running:
        idle = request.stalled or not request.max_tokens
        if request.status is not Status.RUNNING or request.table is None or request.num_missing < (not idle):
            raise InternalError(f"{request!r} is in the running list")
        if request.table.num_tokens < request.num_planned:
            raise InternalError(f"{request!r} has computed more tokens than its table holds")
    for request in [*scheduler.waiting.values(), *scheduler.attached.values(), *others]:
        if request.table is not None:
            raise InternalError(f"{request!r} does not run and holds blocks")
        if request.swapped is not None and request.request_id not in scheduler.waiting:
            raise InternalError(f"{request!r} does not wait and holds blocks of the host tier")
    for request in scheduler.attached.values():
        if request.parent is None or request not in request.parent.siblings or request.parent.finished:
            raise InternalError(f"{request!r} waits for a parent that does not know it")
    scheduler.manager.check_invariants()
