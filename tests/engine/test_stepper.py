"""What is planned is done, also where it computes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.cache.block import SwapOut
from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.cache.manager import KVCacheManager
from hf_paged.engine.plan import SchedulerOutput
from hf_paged.engine.scheduler import Scheduler
from hf_paged.engine.stepper import Stepper
from hf_paged.model.runner import Prepared


class Runner:
    """Notes what it is to do; there is no model."""

    recurrent = False

    def __init__(self) -> None:
        self.done: list[Prepared] = []

    def prepare(self, work: Any, transfers: Any, keep: Any, moves: Any, saves: Any) -> Prepared:
        return Prepared(work, transfers, keep, moves, saves)

    def run(self, prepared: Prepared) -> torch.Tensor:
        self.done.append(prepared)
        return torch.empty(0, 8)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        SchedulerOutput(1, chunks=(), transfers=(SwapOut(3, 1),), ended=()),
        SchedulerOutput(1, chunks=(), transfers=(), ended=(), moves=(("a", "b"),)),
        SchedulerOutput(1, chunks=(), transfers=(), ended=(), saves=(("a", Checkpoint()),)),
    ],
    ids=["transfers", "moves", "saves"],
)
def test_a_step_without_tokens_still_moves_what_others_rely_on(
    plan: SchedulerOutput, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, runner = Scheduler(KVCacheManager(8, 4)), Runner()
    stepper = Stepper(scheduler, runner, {}, overlap=overlap)  # type: ignore[arg-type]
    monkeypatch.setattr(scheduler, "schedule", lambda: plan)
    assert stepper.step() == [] and stepper.drain() == []
    want = [(plan.transfers, plan.moves, plan.saves)]
    assert [(found.transfers, found.moves, found.saves) for found in runner.done] == want
    monkeypatch.setattr(scheduler, "schedule", lambda: SchedulerOutput(2, (), (), ()))
    stepper.step()
    assert len(runner.done) == 1, "an empty step is none"
    stepper.close()
