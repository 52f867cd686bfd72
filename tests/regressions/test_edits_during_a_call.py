"""Ids that the user's code edits while or after they are generated, and weights said to have changed meanwhile.

What a call leaves for later ones belongs to the tokens that were run, not to those that were returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import hf_paged
from tests import zoo
from tests.regressions.helpers import ids, paged, registered, stock

PROMPT = ids(2, 14)


def _other(tokens: torch.Tensor) -> torch.Tensor:
    """Different ids, none of them special."""
    return (tokens + 4) % (zoo.VOCAB - 3) + 3


def _assert_later_calls_are_stocks(model: Any, *prompts: torch.Tensor) -> None:
    for prompt in prompts:
        assert torch.equal(paged(model, prompt), stock(model, prompt))


@pytest.mark.parametrize("column", [2, 13, 14, 17, -1])
def test_ids_edited_by_a_custom_loop_are_not_what_was_run(column: int) -> None:
    def loop(model: Any, *args: Any, **kwargs: Any) -> Any:
        out = model._sample(*args, **kwargs)
        out[:, column] = _other(out[:, column])
        return out

    model = zoo.fresh("llama")
    with registered():
        answer = paged(model, PROMPT.clone(), custom_generate=loop)
        assert torch.equal(answer, stock(model, PROMPT.clone(), custom_generate=loop))
        turn = torch.cat([answer, ids(2, 3, seed=4)], dim=1)
        _assert_later_calls_are_stocks(model, PROMPT, answer, turn)
        assert hf_paged.cache_stats(model).hit_tokens > 0, "what the loop left alone can be reused"


def test_rows_returned_in_another_order_by_a_custom_loop() -> None:
    def loop(model: Any, *args: Any, **kwargs: Any) -> Any:
        return model._sample(*args, **kwargs).flip(0)

    model = zoo.fresh("llama")
    with registered():
        answer = paged(model, PROMPT, custom_generate=loop)
        assert torch.equal(answer, stock(model, PROMPT, custom_generate=loop))
        _assert_later_calls_are_stocks(model, PROMPT, answer, answer.flip(0))


class _EditAt:
    """Edits one column of ``input_ids`` in place when it is called for the ``at``-th time."""

    def __init__(self, column: int, at: int) -> None:
        self.column, self.at, self.calls = column, at, 0

    def edit(self, input_ids: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == self.at:
            input_ids[:, self.column] = _other(input_ids[:, self.column])


class _EditingCriterion(_EditAt, tf.StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.edit(input_ids)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _EditingProcessor(_EditAt, tf.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.edit(input_ids)
        return scores


def _criterion(column: int, at: int = 3) -> dict[str, Any]:
    return {"stopping_criteria": tf.StoppingCriteriaList([_EditingCriterion(column, at)])}


def _processor(column: int, at: int = 3) -> dict[str, Any]:
    return {"logits_processor": tf.LogitsProcessorList([_EditingProcessor(column, at)])}


@pytest.mark.parametrize("editor", [_criterion, _processor])
@pytest.mark.parametrize("column", [2, 13, 14, -1])
@pytest.mark.parametrize("at", [2, 4])
def test_ids_edited_in_place_leave_the_prompt_right(editor: Callable[..., Any], column: int, at: int) -> None:
    model = zoo.fresh("llama")
    with registered():
        answer = paged(model, PROMPT.clone(), **editor(column, at))
        assert torch.equal(answer, stock(model, PROMPT.clone(), **editor(column, at)))
        _assert_later_calls_are_stocks(model, PROMPT, stock(model, PROMPT))


@pytest.mark.parametrize("editor", [_criterion, _processor])
def test_a_prompt_edited_in_place_is_not_the_one_that_was_run(editor: Callable[..., Any]) -> None:
    model = zoo.fresh("llama")
    with registered():
        answer = paged(model, PROMPT.clone(), **editor(2))
        assert not torch.equal(answer[:, :14], PROMPT)
        _assert_later_calls_are_stocks(model, answer, torch.cat([answer, ids(2, 3, seed=4)], dim=1))


@pytest.mark.parametrize("editor", [_criterion, _processor])
def test_a_token_edited_after_it_ran_is_not_the_one_that_was_run(editor: Callable[..., Any]) -> None:
    model = zoo.fresh("llama")
    with registered():
        answer = paged(model, PROMPT.clone(), **editor(14))
        _assert_later_calls_are_stocks(model, answer, torch.cat([answer, ids(2, 3, seed=4)], dim=1))


def test_an_edit_of_a_token_that_has_not_run_is_what_runs() -> None:
    model = zoo.fresh("llama")
    with registered():
        answer = paged(model, PROMPT, **_criterion(-1))  # the criterion sees a token before the model does
        _assert_later_calls_are_stocks(model, answer, torch.cat([answer, ids(2, 3, seed=4)], dim=1))
        assert hf_paged.cache_stats(model).hit_tokens > 0


# -- weights_changed() meanwhile --------------------------------------------------------------------------------------


def _with_a_hidden_gain(gain: list[float]) -> Any:
    """A model that multiplies by a number which nothing about the model shows."""

    class Gain(torch.nn.SiLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * gain[0]

    model = zoo.fresh("llama")
    model.model.layers[0].mlp.act_fn = Gain()
    return model


def test_weights_changed_in_the_middle_of_a_call() -> None:
    gain = [1.0]
    model, prompt = _with_a_hidden_gain(gain), PROMPT[:1]

    class Change(tf.LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                gain[0] = 4.0
                other = threading.Thread(target=hf_paged.weights_changed, args=(model,))
                other.start()
                other.join()
            return scores

    want = stock(model, prompt, logits_processor=[Change()])
    gain[0] = 1.0
    with registered():
        before = paged(model, prompt)
        assert torch.equal(paged(model, prompt, logits_processor=[Change()]), want)
        hits = hf_paged.cache_stats(model).hit_tokens
        assert hits == 13
        assert not torch.equal(stock(model, prompt), before), "the test needs a change that matters"
        _assert_later_calls_are_stocks(model, prompt, want)
        assert hf_paged.cache_stats(model).hit_tokens == hits + 14  # the prompt, computed anew by the call before


def test_weights_changed_again_and_again_by_another_thread() -> None:
    model, prompt = zoo.fresh("llama"), PROMPT[:1]
    want, stop, failures, count = stock(model, prompt), threading.Event(), [], [0]

    def work() -> None:
        try:
            while not stop.wait(1e-4):
                hf_paged.weights_changed(model)
                count[0] += 1
        except BaseException as error:
            failures.append(error)

    with registered():
        paged(model, prompt)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(6):
                assert torch.equal(paged(model, prompt), want)
        finally:
            stop.set()
            thread.join()
        assert count[0] > 6 and not failures
        before = hf_paged.cache_stats(model).hit_tokens
        for _ in range(2):
            assert torch.equal(paged(model, prompt), want)
        assert hf_paged.cache_stats(model).hit_tokens > before, "prefixes are kept again afterwards"
