"""After every engine test, whatever it tested: the books of every engine it made have to balance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hf_paged.engine.core import EngineCore
from hf_paged.engine.scheduler import Scheduler


@pytest.fixture(autouse=True)
def _books_balance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    schedulers: list[Scheduler] = []  # which know no model, so that none is kept by this
    make = EngineCore.__init__

    def make_and_note(core: EngineCore, *args: Any, **kwargs: Any) -> None:
        make(core, *args, **kwargs)
        schedulers.append(core.scheduler)

    monkeypatch.setattr(EngineCore, "__init__", make_and_note)
    yield
    for scheduler in schedulers:
        scheduler.manager.check_invariants()
        assert scheduler.has_work or scheduler.manager.stats().owned_blocks == 0, "blocks are in use by nobody"
