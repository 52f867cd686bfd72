"""The thread that owns an engine: commands between steps, pauses, the end by wish or by a fault."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import hf_paged
from hf_paged import LLM, SamplingParams
from hf_paged.engine.loop import EngineLoop
from tests import zoo
from tests.engine.test_llm_parity import alone, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(params=[False, True], ids=["steps in turn", "steps overlap"])
def loop(request: pytest.FixtureRequest) -> Iterator[EngineLoop]:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=24, max_num_batched_tokens=16, overlap=request.param)
    loop = EngineLoop(llm)
    yield loop
    loop.close()
    llm.core.close()
    llm.core.manager.check_invariants()
    assert llm.core.manager.stats().owned_blocks == 0 and not llm.frontend.groups and not loop._submissions


def ask(loop: EngineLoop, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> queue.Queue[Any]:
    told: queue.Queue[Any] = queue.Queue()
    loop.submit(prompt, params, told.put, **options)
    return told


def end_of(told: queue.Queue[Any]) -> Any:
    """The last thing told of a request."""
    while True:
        item = told.get(timeout=30)
        if isinstance(item, BaseException) or item.finished:
            return item


def test_every_step_is_told_or_the_end_alone(loop: EngineLoop) -> None:
    model, prompt = loop.llm.model, prompts()[1]
    want = alone(model, prompt)
    every, once = ask(loop, prompt), ask(loop, prompt, every_step=False)
    seen = [every.get(timeout=30) for _ in want]
    assert [o.outputs[0].token_ids for o in seen] == [want[: i + 1] for i in range(len(want))]
    assert once.get(timeout=30).outputs[0].token_ids == want and once.empty() and every.empty()


def test_it_begins_paused_where_that_is_asked_for() -> None:
    llm = LLM(zoo.build("llama"), block_size=4, num_blocks=24)
    loop = EngineLoop(llm, paused=True)
    told = ask(loop, prompts()[0])
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    loop.resume()
    assert end_of(told).outputs[0].token_ids == alone(llm.model, prompts()[0])
    loop.close()


def test_a_call_runs_between_steps_and_its_error_is_the_callers(loop: EngineLoop) -> None:
    told = ask(loop, [3, 4], SamplingParams(temperature=0, max_tokens=40))
    assert loop.call(lambda: threading.current_thread().name) == "hf_paged engine"
    assert loop.call(lambda: loop.call(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0)
    assert end_of(told).finished


def test_whoever_fails_when_told_loses_its_own_request_only(loop: EngineLoop) -> None:
    def fail(item: Any) -> None:
        raise RuntimeError("a listener's own fault")

    loop.submit([3, 4], SamplingParams(temperature=0, max_tokens=200), fail)
    other = ask(loop, prompts()[0])
    assert end_of(other).outputs[0].token_ids == alone(loop.llm.model, prompts()[0])
    assert loop.call(lambda: len(loop.llm.frontend.groups)) == 0


def test_a_fault_wakes_everybody_within_a_second(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ZeroDivisionError("a fault in the model")
    held = threading.Event()

    def fail(*args: Any) -> None:
        held.wait(10)
        raise fault

    monkeypatch.setattr(loop.llm.core.runner, "run", fail)
    told = [ask(loop, p) for p in prompts()[:3]]
    time.sleep(0.1)
    late: queue.Queue[Any] = queue.Queue()

    def pause() -> None:
        try:
            loop.pause()
        except hf_paged.EngineDeadError as error:
            late.put(error)

    pausing = threading.Thread(target=pause)
    pausing.start()
    told.append(ask(loop, prompts()[3]))
    held.set()
    start = time.monotonic()
    ends = [*(end_of(t) for t in told), late.get(timeout=30)]
    assert time.monotonic() - start < 1
    assert all(isinstance(end, hf_paged.EngineDeadError) and end.__cause__ is fault for end in ends)
    pausing.join()
    with pytest.raises(hf_paged.EngineDeadError, match="ZeroDivisionError") as caught:
        ask(loop, [1, 2])
    assert caught.value.__cause__ is fault and loop.cause is fault
    with pytest.raises(hf_paged.EngineDeadError):
        loop.check_health()
    loop.abort("unknown")


def test_a_fault_in_the_step_that_a_pause_waits_for_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(LLM(zoo.build("llama"), block_size=4, num_blocks=24, overlap=True), paused=True)
    fault = ZeroDivisionError("a fault in the model")

    def fail(*args: Any) -> None:
        raise fault

    monkeypatch.setattr(loop.llm.core.runner, "run", fail)
    told = ask(loop, [3, 4])
    loop.call(loop._step)  # begins a step
    with pytest.raises(hf_paged.EngineDeadError) as caught:
        loop.pause()
    assert caught.value.__cause__ is fault and end_of(told).__cause__ is fault
    assert loop.close()
    loop.llm.core.close()


def test_a_draining_loop_finishes_what_it_has_and_takes_no_more(loop: EngineLoop) -> None:
    told = [ask(loop, p) for p in prompts()[:4]]
    long = ask(loop, [3, 4], SamplingParams(temperature=0, max_tokens=80), request_id="long")
    assert not loop.close(drain=True, timeout=0)
    with pytest.raises(hf_paged.EngineDeadError, match="closed"):
        ask(loop, [1, 2])
    loop.abort("long")
    assert end_of(long).outputs[0].finish_reason == "abort"
    assert loop.close(drain=True)
    assert [end_of(t).outputs[0].token_ids for t in told] == [alone(loop.llm.model, p) for p in prompts()[:4]]


def test_closing_tells_whoever_still_waits(loop: EngineLoop) -> None:
    told = ask(loop, [3, 4], SamplingParams(temperature=0, max_tokens=80))
    told.get(timeout=30)
    assert loop.close()
    assert isinstance(end_of(told), hf_paged.EngineDeadError)
    assert loop.close() and not loop.is_alive and loop.cause is None


def test_weights_change_in_a_pause_while_steps_are_under_way(loop: EngineLoop) -> None:
    """No step runs inside a pause, also not one that was begun before it."""
    told = ask(loop, [3, 4], SamplingParams(temperature=0, max_tokens=60))
    told.get(timeout=30)
    loop.pause()
    assert not loop.llm.core._stepper.busy
    steps = loop.llm.stats()["steps"]
    time.sleep(0.1)
    assert loop.llm.stats()["steps"] == steps
    loop.resume()
    assert end_of(told).outputs[0].token_ids == alone(loop.llm.model, [3, 4], max_new_tokens=60)
