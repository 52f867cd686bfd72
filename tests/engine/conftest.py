"""After every engine test, whatever it tested: the books of every engine it made have to balance."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_paged.engine.core import EngineCore
from hf_paged.engine.invariants import check_books
from hf_paged.engine.scheduler import Scheduler
from tests import zoo
from tests.regressions.engine_helpers import tokenizer_of


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
        check_books(scheduler)
        stats, alive = scheduler.manager.stats(), scheduler.unfinished
        assert stats.num_tables == sum(r.table is not None for r in alive), "blocks are in use by nobody"
        moved = sum(len(r.swapped.blocks) for r in alive if r.swapped is not None)
        assert stats.host_blocks - stats.free_host_blocks == moved, "blocks of the host tier are in use by nobody"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that loads faster than the demo model."""
    folder = tmp_path_factory.mktemp("model")
    zoo.fresh("llama").save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log. Whatever model is not run natively is refused for a reason, and not because something went wrong."""
    caplog.set_level(logging.INFO, "hf_paged")
    yield caplog
    assert not any("packing its weights failed" in r.getMessage() for r in caplog.get_records("call"))
