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


class Turns:
    """Turns for steps, turns between steps, and pauses, in which there are only the latter."""

    def __init__(self) -> None:
        self._free = threading.Condition(threading.RLock())
        #: one for each thread that waits for a turn between two steps
        self._asking: list[None] = []
        self._paused_by: threading.Thread | None = None

    def check(self) -> None:
        """Raise EnginePausedError in the thread that paused the engine, which would wait for itself."""
        if self._paused_by is threading.current_thread():
            raise EnginePausedError("the engine is paused, by this very thread: call resume() before it is to go on")

    @contextmanager
    def step(self) -> Iterator[None]:
        """A turn for a step, once the engine is not paused. Raises as :meth:`check`."""
        with self._free:
            self.check()
            if self._paused_by is not None:
                logger.info("a call waits: the engine was paused by thread %r", self._paused_by.name)
            self._free.wait_for(lambda: self._paused_by is None and not self._asking)
            yield

    @contextmanager
    def between(self) -> Iterator[None]:
        """A turn between two steps, paused or not."""
        self._asking.append(None)
        try:
            self._free.acquire()
        finally:
            self._asking.pop()
        try:
            yield
        finally:
            self._free.notify_all()
            self._free.release()

    def pause(self) -> None:
        """In a turn: no step after it before :meth:`resume`."""
        self._paused_by = threading.current_thread()

    def resume(self) -> None:
        """In a turn: steps may go on after it."""
        self._paused_by = None
