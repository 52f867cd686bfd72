"""LLM.pause() and resume(): between calls, under a call of another thread, and where nobody else could resume."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import LLM, SamplingParams
from hf_paged.engine.turns import Turns
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.engine_helpers import PATIENCE, stepped, tokenizer_of

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 64}


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def change(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.5)


class Call(threading.Thread):
    """A call in a thread of its own; ``result()`` waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function, self._found = function, []
        self.start()

    def run(self) -> None:
        try:
            self._found.append(self._function())
        except BaseException as error:  # it belongs to whoever asks for the result
            self._found.append(error)

    def result(self) -> Any:
        self.join(PATIENCE)
        assert self._found, "the call hangs"
        if isinstance(self._found[0], BaseException):
            raise self._found[0]
        return self._found[0]


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def paused_in_the_middle(llm: LLM, gate: Any, batch: list[list[int]], new: int) -> tuple[Call, list[list[int]]]:
    """A call that runs in another thread, paused by a third; and what it has generated so far, four tokens or more."""
    gate.hold()
    others = set(llm.frontend.groups)
    call = Call(lambda: llm.generate(batch, greedy(new), use_tqdm=False))

    def requests() -> list[Any]:
        groups = [group for name, group in llm.frontend.groups.items() if name not in others]
        return [part.request for group in groups for part in group.parts.values()]

    def in_the_middle() -> bool:  # forwards that come with a request are not steps of all
        return len(requests()) == len(batch) and all(request.num_output >= 4 for request in requests())

    gate.step_until(in_the_middle)
    begun = requests()
    pause = Call(llm.pause)
    wait_until(lambda: bool(llm._turns._asking))
    assert pause.is_alive(), "the present step is not done"
    gate.open()
    pause.result()
    before = [list(request.tokens[len(request.prompt) :]) for request in begun]
    assert all(4 <= len(b) < new for b in before), "they are in the middle"
    return call, before


def test_weights_may_change_in_a_pause_between_two_calls() -> None:
    model, prompt = zoo.fresh("llama"), prompts()[3]
    llm = LLM(model, **OPTIONS)
    old = alone(model, prompt)
    assert llm.generate(prompt, greedy(10))[0].outputs[0].token_ids == old
    assert llm.generate(prompt, greedy(10))[0].num_cached_tokens == len(prompt) - 1
    llm.pause()
    change(model)
    llm.resume()
    output = llm.generate(prompt, greedy(10))[0]
    assert output.outputs[0].token_ids == alone(model, prompt) != old
    assert output.num_cached_tokens == 0, "what the old weights computed is not used"
    check_clean(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_call_in_another_thread_waits_and_goes_on_with_the_new_weights(overlap: bool) -> None:
    model, gate = stepped()
    llm, batch = LLM(model, overlap=overlap, **OPTIONS), prompts()[:3]
    call, before = paused_in_the_middle(llm, gate, batch, 40)
    steps, used = gate.passed, time.process_time()
    time.sleep(0.3)
    assert gate.passed == steps, "no step in a pause"
    assert time.process_time() - used < 0.15, "who waits does not spin"
    change(model)
    llm.resume()
    outputs = call.result()
    for prompt, begun, output in zip(batch, before, outputs, strict=True):
        rest = alone(model, [*prompt, *begun], max_new_tokens=40 - len(begun), eos_token_id=None)
        assert output.outputs[0].token_ids == [*begun, *rest]
    again = llm.generate(batch[0], greedy(40), use_tqdm=False)[0]
    assert again.outputs[0].token_ids == alone(model, batch[0], max_new_tokens=40, eos_token_id=None)
    check_clean(llm)


def test_weights_changed_comes_between_two_steps_of_a_call_that_runs() -> None:
    model, gate = stepped()
    llm, batch = LLM(model, **OPTIONS), prompts()[:3]
    gate.hold()
    call = Call(lambda: llm.generate(batch, greedy(40), use_tqdm=False))
    gate.step_until(lambda: llm.core.scheduler.step > 1)
    say = Call(llm.weights_changed)
    wait_until(lambda: bool(llm._turns._asking))
    assert say.is_alive()
    gate.open()
    say.result()
    assert call.is_alive(), "it did not have to wait for the end"
    want = [alone(model, p, max_new_tokens=40, eos_token_id=None) for p in batch]
    assert [output.outputs[0].token_ids for output in call.result()] == want
    check_clean(llm)


def test_who_paused_is_told_instead_of_waiting_for_itself() -> None:
    model, prompt = zoo.build("llama"), prompts()[1]
    llm = LLM(model, tokenizer_of(), **OPTIONS)
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    llm.pause()
    llm.pause()
    for ask in (
        lambda: llm.generate(prompt, greedy(10)),
        lambda: next(llm.stream(prompt, greedy(10))),
        lambda: llm.chat([{"role": "user", "content": "hello"}], greedy(10)),
    ):
        with pytest.raises(hf_paged.EnginePausedError, match=r"call resume\(\)"):
            ask()
    assert not llm.frontend.groups
    llm.resume()
    llm.resume()
    assert llm.generate(prompt, greedy(10))[0].outputs[0].token_ids == alone(model, prompt, eos_token_id=None)
    check_clean(llm)


def test_calls_of_other_threads_wait_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = zoo.build("llama"), prompts()[1]
    llm = LLM(model, **OPTIONS)
    llm.pause()
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        first = Call(lambda: llm.generate(prompt, greedy(10), use_tqdm=False))
        wait_until(lambda: "a call waits" in caplog.text)
        second = Call(lambda: list(llm.stream(prompt, greedy(10)))[-1])
        time.sleep(0.1)
    assert first.is_alive() and second.is_alive() and not llm.frontend.groups
    assert threading.current_thread().name in caplog.text
    with pytest.raises(hf_paged.EnginePausedError):  # and not a wait for the call that waits for this thread
        llm.generate(prompt, greedy(10))
    Call(llm.resume).result()  # anybody may
    want = alone(model, prompt, eos_token_id=None)
    assert first.result()[0].outputs[0].token_ids == second.result().outputs[0].token_ids == want
    check_clean(llm)


def test_a_stream_goes_on_after_a_pause() -> None:
    model, prompt = zoo.fresh("llama"), prompts()[3]
    llm = LLM(model, **OPTIONS)
    stream = llm.stream(prompt, greedy(20))
    begun = [next(stream) for _ in range(4)][-1].outputs[0].token_ids
    llm.pause()
    change(model)
    llm.resume()
    got = list(stream)[-1].outputs[0].token_ids
    assert got == [*begun, *alone(model, [*prompt, *begun], max_new_tokens=16, eos_token_id=None)]
    check_clean(llm)


def test_a_stream_can_be_closed_in_a_pause_and_is_ended_by_going_on_in_it() -> None:
    model, gate = stepped()
    llm, prompt = LLM(model, **OPTIONS), prompts()[1]
    closed, asked = llm.stream(prompt, greedy(20)), llm.stream(prompt, greedy(20))
    next(closed), next(asked)
    call, _ = paused_in_the_middle(llm, gate, prompts()[2:4], 40)  # a call that holds what streams wait for
    closing = Call(closed.close)
    closing.result()
    llm.pause()  # by this thread, too
    with pytest.raises(hf_paged.EnginePausedError):
        next(asked)
    assert len(llm.frontend.groups) == 2
    llm.resume()
    llm.resume()  # for the thread that paused before, too
    assert len(call.result()) == 2
    check_clean(llm)


def test_what_the_last_step_before_a_pause_brought_is_there_to_be_had() -> None:
    model, prompt = zoo.build("llama"), prompts()[3]
    llm = LLM(model, overlap=True, **OPTIONS)
    stream = llm.stream(prompt, greedy(2))
    assert len(next(stream).outputs[0].token_ids) == 1
    llm.pause()  # which waits for the second token
    last = next(stream)
    assert last.finished and last.outputs[0].token_ids == alone(model, prompt, max_new_tokens=2)
    assert list(stream) == []
    llm.resume()
    check_clean(llm)


def test_a_fault_in_the_step_that_a_pause_waits_for_is_raised_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = zoo.build("llama"), prompts()[3]
    llm = LLM(model, overlap=True, **OPTIONS)
    run, calls = llm.core.runner.run, []

    def fail_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("a fault in the model")
        return run(*args)

    monkeypatch.setattr(llm.core.runner, "run", fail_once)
    stream = llm.stream(prompt, greedy(5))
    assert not next(stream).finished  # and the step that fails is under way
    with pytest.raises(ZeroDivisionError):
        llm.pause()
    last = next(stream)
    assert last.finished and isinstance(last.error, ZeroDivisionError)
    assert llm.generate(prompt, greedy(5))[0].outputs[0].token_ids == alone(model, prompt, max_new_tokens=5)
    check_clean(llm)


def test_of_two_threads_that_pause_each_has_to_resume() -> None:
    llm = LLM(zoo.build("llama"), **OPTIONS)
    llm.pause()
    Call(llm.pause).result()  # by a thread that ends without resuming
    other = threading.Event()
    paused = Call(lambda: (llm.pause(), other.wait(PATIENCE), llm.resume()))
    wait_until(lambda: len(llm._turns._paused_by) == 3)
    call = Call(lambda: llm.generate([prompts()[0]], greedy(4), use_tqdm=False))
    llm.resume()
    time.sleep(0.3)
    assert call.is_alive(), "two of them have not resumed"
    other.set()
    paused.result()
    time.sleep(0.3)
    assert call.is_alive(), "one of them has not resumed"
    llm.resume()  # for it
    assert call.result()[0].outputs[0].finish_reason == "length"


def test_a_pause_outlives_its_thread_and_whoever_waits_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """As with ``run_in_executor(None, llm.pause)``: whoever asked for the pause still believes in it."""
    model, gate = stepped()
    llm, batch = LLM(model, **OPTIONS), prompts()[:3]
    with caplog.at_level(logging.WARNING, "hf_paged"):
        call, before = paused_in_the_middle(llm, gate, batch, 40)
        wait_until(lambda: "ended without resume()" in caplog.text)
    steps = gate.passed
    change(model)
    assert gate.passed == steps and call.is_alive()
    llm.resume()
    for prompt, begun, output in zip(batch, before, call.result(), strict=True):
        rest = alone(model, [*prompt, *begun], max_new_tokens=40 - len(begun), eos_token_id=None)
        assert output.outputs[0].token_ids == [*begun, *rest]
    check_clean(llm)


@pytest.mark.parametrize("say", ["resume", "weights_changed"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_nothing_old_is_used_when_looking_at_the_weights_fails(
    say: str, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, gate = stepped()
    llm, batch = LLM(model, **OPTIONS), prompts()[:3]
    llm.generate(batch[0], greedy(4), use_tqdm=False)  # leaves a prefix
    call, before = paused_in_the_middle(llm, gate, batch, 40)
    change(model)

    def interrupted(*args: Any) -> Any:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr("hf_paged.engine.core.runtime_signature", interrupted)
        with pytest.raises(fault):
            getattr(llm, say)()
    if say == "weights_changed":
        llm.resume()
    later = Call(lambda: llm.generate(batch[0], greedy(40), use_tqdm=False))  # joins the one that runs
    for prompt, begun, output in zip(batch, before, call.result(), strict=True):
        rest = alone(model, [*prompt, *begun], max_new_tokens=40 - len(begun), eos_token_id=None)
        assert output.outputs[0].token_ids == [*begun, *rest]
    want = alone(model, batch[0], max_new_tokens=40, eos_token_id=None)
    assert later.result()[0].outputs[0].token_ids == want
    check_clean(llm)


def test_an_interrupt_while_a_turn_is_asked_for_leaves_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(turns._free, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt), turns.between():
        pass
    monkeypatch.undo()
    assert not turns._asking
