"""Whose turn it is with an engine that its callers' own threads step: ``LLM``'s, which has no thread of its own.

One thread at a time has a turn. A step waits while the engine is paused, and for whoever wants a turn between two
steps, who would else get none before a long call ends. It knows threads and nothing of what they do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hf_paged.errors import EnginePausedError

logger = logging.getLogger("hf_paged")

#: how long a step waits before it looks whether it waits for nobody
_LOOK_S = 1.0


class Turns:
    """Turns for steps, turns between steps, and pauses, in which there are only the latter."""

    def __init__(self) -> None:
        self._free = threading.Condition(threading.RLock())
        #: one for each thread that waits for a turn between two steps
        self._asking: set[object] = set()
        #: threads that paused and did not resume, each once
        self._paused_by: list[threading.Thread] = []

    def check(self) -> None:
        """Raise EnginePausedError in the thread that paused the engine, which would wait for itself."""
        if threading.current_thread() in self._paused_by:
            raise EnginePausedError("the engine is paused, by this very thread: call resume() before it is to go on")

    @contextmanager
    def step(self) -> Iterator[None]:
        """A turn for a step, once the engine is not paused. Raises as :meth:`check`."""
        with self._free:
            self.check()
            if self._paused_by:
                logger.info("a call waits: the engine was paused by thread %r", self._paused_by[-1].name)
            # now and then it looks by itself: for threads that ended in a pause, or were interrupted while they asked
            told: set[threading.Thread] = set()
            while not self._free.wait_for(self._may_step, timeout=_LOOK_S):
                ended = {thread for thread in self._paused_by if not thread.is_alive()} - told
                for thread in ended:
                    logger.warning(
                        "a call waits: thread %r paused the engine and ended without resume(), which any thread may "
                        "call", thread.name,
                    )  # fmt: skip
                told |= ended
            yield

    def _may_step(self) -> bool:
        return not self._paused_by and not self._asking

    @contextmanager
    def between(self) -> Iterator[None]:
        """A turn between two steps, paused or not."""
        asked = object()
        try:
            self._asking.add(asked)
            self._free.acquire()
        finally:
            self._asking.discard(asked)
        try:
            yield
        finally:
            self._free.notify_all()
            self._free.release()

    def pause(self) -> None:
        """In a turn: no step after it before this thread, or another one for it, called :meth:`resume`."""
        if threading.current_thread() not in self._paused_by:
            self._paused_by.append(threading.current_thread())

    def resume(self) -> None:
        """In a turn: end this thread's pause; in a thread that did not pause, the latest one."""
        if self._paused_by:
            own = threading.current_thread() in self._paused_by
            self._paused_by.remove(threading.current_thread() if own else self._paused_by[-1])
