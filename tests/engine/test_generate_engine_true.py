"""``generate(cache_config={"engine": True})``: what the stock loop keeps by default runs on the engine, too, and gives
each row what stock generate() gives it alone."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as tf

import hf_paged
from hf_paged import generation
from hf_paged.generation import engine_rows
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

LENGTHS = [11, 7, 19, 3, 14, 9]
ON = {"engine": True}
Options = dict[str, Any]


def prompt_of(batch: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    return batch["input_ids"][row][batch["attention_mask"][row] == 1][None]


def alone(model: Any, prompt: torch.Tensor, **options: Any) -> list[list[int]]:
    """What stock generates for one prompt; several sequences with ``num_return_sequences``."""
    out = stock(model, prompt, attention_mask=torch.ones_like(prompt), **options)
    return [row[prompt.shape[1] :].tolist() for row in out]


def each_alone(
    model: Any, batch: dict[str, torch.Tensor], make: Callable[[int], Options]
) -> tuple[list[list[int]], int]:
    """The same for every row of a batch, with the options that ``make`` gives it; and how many sequences a row has."""
    found = [alone(model, prompt_of(batch, row), **make(row)) for row in range(len(batch["input_ids"]))]
    return [tokens for row in found for tokens in row], len(found[0])


def assert_on_engine(caplog: pytest.LogCaptureFixture, calls: int = 1) -> None:
    """So many calls, and no others, ran on the engine since the log was cleared."""
    said = [r.message for r in caplog.records]
    assert sum("rows ran on the engine" in message for message in said) == calls, said
    assert not any("stock loop" in message for message in said), said


def generated(
    model: Any, batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture, **options: Any
) -> list[list[int]]:
    """The new tokens of a call that must run on the engine."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_paged"):
        out = paged(model, **batch, **options, cache_config=ON)
    assert_on_engine(caplog)
    repeats = len(out) // len(batch["input_ids"])
    width = batch["input_ids"].shape[1]
    assert torch.equal(out[:, :width], batch["input_ids"].repeat_interleave(repeats, dim=0))
    rows: list[list[int]] = out[:, width:].tolist()
    return rows


def assert_same(got: list[list[int]], want: list[list[int]], filling: int = zoo.PAD) -> None:
    """Equal up to the ends of the rows, which are filled up behind them as far as the longest goes."""
    assert len(got) == len(want)
    for row, tokens in zip(got, want, strict=True):
        assert row == tokens + [filling] * (len(row) - len(tokens))
    assert len(got[0]) == max(map(len, want))


class Ends(tf.StoppingCriteria):
    """Ends a row after some of its tokens, wherever these are; notes the shapes it saw, and what came as scores."""

    def __init__(self, divisor: int = 5) -> None:
        self.divisor, self.shapes, self.scores = divisor, set[tuple[int, ...]](), set[Any]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.shapes.add(tuple(input_ids.shape))
        self.scores.add(scores)
        return (input_ids[:, -3:].sum(dim=1) % self.divisor == 0) & (input_ids.shape[1] % 2 == 0)


class Banned(tf.LogitsProcessor):
    """Takes tokens away, depending on the first token, the last one and the length of a row."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, tokens in enumerate(input_ids.tolist()):
            scores[row, (tokens[0] + tokens[-1] + len(tokens)) % 3 :: 3] = float("-inf")
        return scores


# -- stopping criteria -------------------------------------------------------------------------------------------------


@pytest.mark.versions
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_criterion_of_the_users_judges_each_row_by_itself(
    name: str, beams: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = zoo.build(name), left_padded(LENGTHS)
    options: Options = {"max_new_tokens": 12, "num_beams": beams, "eos_token_id": 5}
    want, _ = each_alone(model, batch, lambda row: {**options, "stopping_criteria": [Ends()]})
    assert len({len(tokens) for tokens in want}) > 1, "rows must end at different lengths"
    ends = Ends()
    with registered():
        got = generated(model, batch, caplog, **options, stopping_criteria=[ends])
    assert_same(got, want, 0 if beams == 1 else 5)
    if beams == 1:
        assert {shape[0] for shape in ends.shapes} == {1}
    assert {shape[1] for shape in ends.shapes} >= {n + 1 for n in LENGTHS}, "ids come without padding"
    assert ends.scores == {None}


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_and_a_criterion_at_once(
    beams: int, smollm2: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = smollm2
    texts = ["List three colours of the rainbow:", "One, two, three,", "The capital of France is"]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    options: Options = {
        "num_beams": beams, "max_new_tokens": 14, "stop_strings": ["yell", " six", ".", "\n2"], "tokenizer": tokenizer
    }  # fmt: skip
    want, _ = each_alone(model, batch, lambda row: options)
    assert len({len(tokens) for tokens in want}) > 1
    with registered(block_size=16, memory="256MiB"):
        got = generated(model, batch, caplog, **options)
    pad = model.generation_config.pad_token_id
    assert_same(got, want, tokenizer.eos_token_id if pad is None else pad)


def test_time_that_is_up_ends_every_row_after_a_token(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = zoo.build("llama"), left_padded(LENGTHS)
    want, _ = each_alone(model, batch, lambda row: {"max_time": 1e-9})
    assert {len(tokens) for tokens in want} == {1}
    with registered():
        assert_same(generated(model, batch, caplog, max_time=1e-9), want)
        assert_same(generated(model, batch, caplog, max_time=1e9), each_alone(model, batch, lambda row: {})[0])


@pytest.mark.parametrize("beams", [1, 2])
def test_a_users_own_length_and_end_tokens_take_the_place_of_the_calls(
    beams: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = zoo.build("llama"), ids(1, 11)
    batch = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    eos = alone(model, prompt, num_beams=beams, max_new_tokens=9)[0][4]
    for criterion, extra in ((tf.MaxLengthCriteria(15), {}), (tf.EosTokenCriteria(eos), {"eos_token_id": 2})):
        options: Options = {"stopping_criteria": [criterion], "num_beams": beams, "max_new_tokens": 9, **extra}
        want = alone(model, prompt, **options)
        assert want != alone(model, prompt, num_beams=beams, max_new_tokens=9)
        with registered():
            assert generated(model, batch, caplog, **options) == want


@pytest.mark.parametrize("beams", [1, 3])
def test_a_criterion_that_raises_ends_the_call_with_its_error(beams: int) -> None:
    model, batch = zoo.build("llama"), left_padded(LENGTHS)

    def explode(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if input_ids.shape[1] == 9 + 3:
            raise ZeroDivisionError("boom")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with registered():
        before = hf_paged.cache_stats(model)
        with pytest.raises(ZeroDivisionError, match="boom"):
            paged(model, **batch, num_beams=beams, stopping_criteria=[explode], cache_config=ON)
        assert hf_paged.cache_stats(model).used_blocks == before.used_blocks == 0
        generation.check_invariants(model)
        want, _ = each_alone(model, batch, lambda row: {"num_beams": beams})
        assert paged(model, **batch, num_beams=beams, cache_config=ON)[:, 19:].tolist() == want


def test_rows_that_end_early_need_something_to_fill_them_up_with(caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = zoo.fresh("llama"), ids(2, 9)
    model.generation_config.pad_token_id = None
    options: Options = {"stopping_criteria": [Ends()]}
    want = stock(model, prompts, **options)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        assert torch.equal(paged(model, prompts, **options, cache_config=ON), want)
    assert any("stock loop" in r.message and "no pad token" in r.message for r in caplog.records)


# -- logits processors -------------------------------------------------------------------------------------------------


@pytest.mark.versions
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "extra", [{}, {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": [5, 9]}], ids=["alone", "others"]
)
def test_a_processor_of_the_users_sees_each_row_by_itself(
    name: str, beams: int, extra: Options, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = zoo.build(name), left_padded(LENGTHS)
    options: Options = {"max_new_tokens": 9, "num_beams": beams, "logits_processor": [Banned()], **extra}
    want, _ = each_alone(model, batch, lambda row: options)
    assert want != each_alone(model, batch, lambda row: {**options, "logits_processor": []})[0]
    with registered():
        assert_same(generated(model, batch, caplog, **options), want, 0 if beams == 1 else 5)


def test_a_processor_of_transformers_own_that_a_user_passes() -> None:
    model, batch = zoo.build("llama"), left_padded(LENGTHS)
    for processor in (tf.RepetitionPenaltyLogitsProcessor(1.9), tf.NoRepeatNGramLogitsProcessor(2)):
        options: Options = {"logits_processor": tf.LogitsProcessorList([processor])}
        want, _ = each_alone(model, batch, lambda row, options=options: options)  # type: ignore[misc]
        with registered():
            got = paged(model, **batch, **options, cache_config=ON)
        assert_same(got[:, 19:].tolist(), want)


@pytest.mark.parametrize("sequences", [1, 3], ids=["one sequence", "three sequences"])
@pytest.mark.parametrize("beams", [1, 3])
def test_allowed_tokens_are_asked_for_by_the_prompts_place_in_the_call(
    beams: int, sequences: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = zoo.build("llama"), left_padded(LENGTHS)
    seen: set[tuple[int, int]] = set()

    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        seen.add((row, len(tokens)))
        return list(range(3 + row, 97, 2 + row))

    options: Options = {"num_beams": beams, "num_return_sequences": sequences}
    if beams < sequences:  # then every token is the only one, so that what is drawn is known
        options["do_sample"] = True
        one = {row: 7 + 5 * row for row in range(6)}
        with registered():
            got = generated(model, batch, caplog, **options, prefix_allowed_tokens_fn=lambda row, tokens: [one[row]])
        assert got == [[one[row]] * 8 for row in range(6) for _ in range(3)]
        return
    want, _ = each_alone(
        model, batch, lambda row: {**options, "prefix_allowed_tokens_fn": lambda _, tokens: allowed(row, tokens)}
    )
    seen.clear()
    with registered():
        assert generated(model, batch, caplog, **options, prefix_allowed_tokens_fn=allowed) == want
    assert seen == {(row, n + more) for row, n in enumerate(LENGTHS) for more in range(8)}


@pytest.mark.parametrize("beams", [1, 3])
def test_a_processor_that_raises_ends_the_call_with_its_error(beams: int) -> None:
    model, batch = zoo.build("llama"), left_padded(LENGTHS)

    def explode(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 14 + 2:
            raise ZeroDivisionError("boom")
        return scores

    with registered(), pytest.raises(ZeroDivisionError, match="boom"):
        paged(model, **batch, num_beams=beams, logits_processor=[explode], cache_config=ON)
    with registered(), pytest.raises(ValueError, match="empty list"):
        paged(
            model,
            **batch,
            num_beams=beams,
            prefix_allowed_tokens_fn=lambda row, _: [] if row == 4 else [3],
            cache_config=ON,
        )


# -- beam search -------------------------------------------------------------------------------------------------------

SEARCHES: dict[str, Options] = {
    "plain": {"num_beams": 4},
    "several": {"num_beams": 4, "num_return_sequences": 3},
    "long": {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 2},
    "short": {"num_beams": 3, "length_penalty": -1.5},
    "early": {"num_beams": 3, "early_stopping": True, "num_return_sequences": 3},
    "never": {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.7},
    "processors": {"num_beams": 3, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
}


@pytest.mark.versions
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma3"])
@pytest.mark.parametrize("kind", SEARCHES)
def test_beam_search_gives_each_row_what_it_gets_alone(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = zoo.build(name), left_padded(LENGTHS)
    free = stock(model, **batch, num_beams=3, max_new_tokens=10)[:, 19:]
    options = {**SEARCHES[kind], "max_new_tokens": 10, "eos_token_id": sorted({int(free[0, 3]), int(free[2, 6])})}
    want, repeats = each_alone(model, batch, lambda row: options)
    assert repeats == options.get("num_return_sequences", 1)
    with registered():
        for _ in range(2):
            got = generated(model, batch, caplog, **options)
            assert_same(got, want, options["eos_token_id"][0])
            assert any("beams each" in r.message for r in caplog.records)
        assert hf_paged.cache_stats(model).hit_tokens > 0, "the second call finds the prompts of the first"


def test_beam_search_of_equal_lengths_is_stocks_tensor(caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = zoo.build("llama"), ids(3, 9)
    for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": [5, 9, 33]}):
        want = stock(model, prompts, **options)
        with registered(), caplog.at_level(logging.INFO, "hf_paged"):
            got = paged(model, prompts, **options, cache_config=ON)
        assert torch.equal(got, want) and got.dtype == want.dtype
    assert_on_engine(caplog, calls=2)


def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The schedulers of the calls to come."""
    made: list[Any] = []

    class Noted(engine_rows.Scheduler):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(engine_rows, "Scheduler", Noted)
    return made


@pytest.mark.parametrize("name", ["llama", "bloom", "bamba"])
def test_beams_in_a_pool_that_is_too_small(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = zoo.build(name), left_padded(LENGTHS)
    options: Options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12}
    want, _ = each_alone(model, batch, lambda row: options)
    schedulers = preemptions(monkeypatch)
    with registered(memory=None, num_blocks=16):
        assert generated(model, batch, caplog, **options) == want
    assert schedulers[0].stats().preemptions > 0


def test_a_search_that_cannot_fit_fails_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = zoo.build("llama"), left_padded([9, 6])
    with registered(memory=None, num_blocks=3), caplog.at_level(logging.INFO, "hf_paged"):
        with pytest.raises(hf_paged.OutOfBlocksError):
            paged(model, **batch, num_beams=3, max_new_tokens=12, cache_config=ON)
        with pytest.raises(hf_paged.OutOfBlocksError):
            paged(model, ids(1, 30), num_beams=3, max_new_tokens=12, cache_config=ON)
    assert_on_engine(caplog, calls=0)  # nor did the stock loop try


# -- recurrent models --------------------------------------------------------------------------------------------------

RECURRENT = [name for name in zoo.RECURRENT if name not in zoo.NO_KV]


@pytest.mark.versions
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_give_each_row_what_it_gets_alone(
    name: str, beams: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = zoo.build(name), left_padded(LENGTHS)
    free = stock(model, **batch, max_new_tokens=10)[:, 19:]
    options: Options = {"num_beams": beams, "max_new_tokens": 10, "eos_token_id": [int(free[1, 2]), int(free[4, 5])]}
    want, _ = each_alone(model, batch, lambda row: options)
    with registered():
        for _ in range(2):
            assert_same(
                generated(model, batch, caplog, **options), want, 0 if beams == 1 else options["eos_token_id"][0]
            )
        assert hf_paged.cache_stats(model).hit_tokens == hf_paged.cache_stats(model).cached_blocks == 0


def test_a_recurrent_model_in_a_pool_for_a_part_of_the_demand(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = zoo.build("bamba"), left_padded(LENGTHS)
    want, _ = each_alone(model, batch, lambda row: {"max_new_tokens": 24})
    schedulers = preemptions(monkeypatch)
    with registered(memory=None, num_blocks=14):
        assert generated(model, batch, caplog, max_new_tokens=24) == want
    assert schedulers[0].stats().preemptions > 0


@pytest.mark.parametrize("name", ["bamba", "qwen3_next"])
def test_calls_of_a_recurrent_model_at_once_keep_their_states_apart(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.build(name)
    batches = [left_padded(LENGTHS[i:] + LENGTHS[:i], seed=i) for i in range(4)]
    want = [each_alone(model, batch, lambda row: {"max_new_tokens": 12})[0] for batch in batches]
    start = threading.Barrier(len(batches))

    def run(batch: dict[str, torch.Tensor]) -> list[list[int]]:
        start.wait()
        found: list[list[int]] = paged(model, **batch, max_new_tokens=12, cache_config=ON)[:, 19:].tolist()
        return found

    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        paged(model, **batches[0], cache_config=ON)  # the model is tried out once
        with ThreadPoolExecutor(len(batches)) as pool:
            assert list(pool.map(run, batches)) == want
        assert_on_engine(caplog, calls=5)
        assert not generation.models._models[model].runner._states, "states go with the call"


def test_one_calls_states_outlive_a_step_of_another(caplog: pytest.LogCaptureFixture) -> None:
    """A call within another one, in the middle of it: its steps say which states they keep, and mean their own."""
    model, outer, inner = zoo.build("bamba"), left_padded([9, 6, 12]), left_padded([7, 5])
    want, _ = each_alone(model, outer, lambda row: {})
    counter = itertools.count()

    def call_again(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if next(counter) == 4:
            paged(model, **inner, cache_config=ON)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        got = paged(model, **outer, stopping_criteria=[call_again], cache_config=ON)
    assert got[:, 12:].tolist() == want
    assert_on_engine(caplog, calls=2)
    assert next(counter) > 4


# -- mixed calls, and what stays as it was -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "bloom", "bamba"])
@pytest.mark.parametrize("beams", [1, 3])
def test_everything_at_once_on_a_ragged_batch(name: str, beams: int, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = zoo.build(name), left_padded([5, 21, 2, 13, 13, 8, 17, 1])
    options: Options = {
        "num_beams": beams, "max_new_tokens": 11, "eos_token_id": [5, 9], "logits_processor": [Banned()],
        "no_repeat_ngram_size": 3, "max_time": 1e9,
    }  # fmt: skip

    def own(row: int) -> Options:
        return {**options, "stopping_criteria": [Ends(4)]}

    want, _ = each_alone(model, batch, own)
    with registered(memory=None, num_blocks=22):
        assert_same(generated(model, batch, caplog, **own(0)), want, 0 if beams == 1 else 5)


@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [Ends()]},
        {"stopping_criteria": [tf.MaxLengthCriteria(13)]},
        {"stopping_criteria": [tf.EosTokenCriteria(list(range(3, 60)))], "eos_token_id": 2},
        {"max_time": 1e-9},
        {"logits_processor": [Banned()]},
        {"logits_processor": [tf.RepetitionPenaltyLogitsProcessor(1.9)]},
        {"prefix_allowed_tokens_fn": lambda row, tokens: list(range(3, 40))},
        {"num_beams": 2},
    ],
    ids=[
        "criterion", "a length of the user's", "end tokens of the user's", "time", "processor",
        "a built-in processor of the user's", "allowed tokens", "beams",
    ],
)  # fmt: skip
def test_by_default_these_stay_in_the_stock_loop(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = zoo.build("llama"), ids(1, 11)
    want = stock(model, prompt, **options)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        assert torch.equal(paged(model, prompt, **options), want)
    assert any("stock loop" in r.message for r in caplog.records)
    assert not any("ran on the engine" in r.message for r in caplog.records)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"logits_processor": [tf.PrefixConstrainedLogitsProcessor(lambda i, t: [3, 4, 5], 1)]}, "as a whole"),
        (
            {"num_beams": 2, "sequence_bias": {(7,): 1.0}, "prefix_allowed_tokens_fn": lambda row, t: [3, 4, 7]},
            "all beams",
        ),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"num_beams": 4, "return_dict_in_generate": True}, "more than tokens"),
    ],
    ids=["made for a batch", "allowed tokens after others", "sampling beams", "more than tokens"],
)
def test_what_rows_cannot_be_asked_alone(options: Options, why: str, caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = zoo.build("llama"), ids(1, 11)
    torch.manual_seed(1)
    want = stock(model, prompt, **options)
    torch.manual_seed(1)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        got = paged(model, prompt, **options, cache_config=ON)
        got = getattr(got, "sequences", got)
    assert torch.equal(got, getattr(want, "sequences", want))
    assert any("stock loop" in r.message and why in r.message for r in caplog.records)
