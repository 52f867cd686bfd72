"""The sampler: what a row gets is what transformers' processors and one fixed draw make of its logits alone."""

from __future__ import annotations

import dataclasses
import re
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    TopPLogitsWarper,
)

import hf_paged
from hf_paged import SamplingParams
from hf_paged.sampling import sampler as sampler_module
from hf_paged.sampling import stages
from hf_paged.sampling.processors import processors_for
from hf_paged.sampling.sampler import Sampled, SamplerState, draw, sample, token_logprobs, uniform
from hf_paged.sampling.stages import STAGES
from tests import zoo

VOCAB, EOS = zoo.VOCAB, 2


def state_for(params: SamplingParams, prompt: Sequence[int], seed: int = 0, row: int = 0) -> SamplerState:
    processors = processors_for(zoo.build("llama"), params, prompt, [EOS, *params.stop_token_ids])
    return SamplerState(params, processors, seed, row)


def by_definition(logits: torch.Tensor, state: SamplerState, tokens: Sequence[int]) -> tuple[int, torch.Tensor]:
    """The token of one row and its scores: each processor as it is, then the draw as it is defined."""
    scores, ids = logits[None].clone(), torch.tensor([list(tokens)])
    for processor in state.processors:
        scores = processor(ids, scores)
    if state.params.greedy:
        return int(scores.argmax()), scores[0]
    mass = np.cumsum(torch.softmax(scores[0].double(), dim=-1).numpy())
    return int(np.searchsorted(mass, uniform(state.seed, state.row, len(tokens)), side="right")), scores[0]


@dataclasses.dataclass(frozen=True)
class Row:
    logits: torch.Tensor
    params: SamplingParams
    prompt: list[int]
    output: list[int]

    @property
    def tokens(self) -> array[int]:
        return array("q", [*self.prompt, *self.output])

    def state(self, seed: int = 0) -> SamplerState:
        return state_for(self.params, self.prompt, seed)


def maybe(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(st.just({}), st.fixed_dictionaries({name: values}))


tokens_of = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    "top_k": st.sampled_from([1, 2, 5, 40, VOCAB, 500]),
    "top_p": st.sampled_from([0.01, 0.3, 0.9, 0.999]),
    "min_p": st.sampled_from([0.02, 0.5, 1.0]),
    "top_h": st.just(0.6),
    "typical_p": st.sampled_from([0.2, 0.9]),
    "epsilon_cutoff": st.just(0.01),
    "eta_cutoff": st.just(0.02),
    "repetition_penalty": st.sampled_from([0.7, 1.3, 2]),
    "encoder_repetition_penalty": st.sampled_from([0.6, 1.4]),
    "presence_penalty": st.sampled_from([-2.0, 0.5]),
    "frequency_penalty": st.sampled_from([-0.3, 1.1]),
    "no_repeat_ngram_size": st.sampled_from([1, 2]),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), min_size=1, max_size=4),
    "allowed_token_ids": tokens_of,
    "bad_words_ids": st.lists(tokens_of.map(lambda t: t[:2]), min_size=1, max_size=3),
    "sequence_bias": st.sampled_from([{(5,): 3.0, (9,): -2.5}, {(5, 6): 3.0, (9,): 4.0}]),
    "suppress_tokens": tokens_of.map(lambda tokens: [t for t in tokens if t != 7] or [8]),  # 7 is forced below
    "begin_suppress_tokens": tokens_of,
    "min_tokens": st.just(3),
    "forced_eos_token_id": st.just(7),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
}
params_of = st.tuples(*(maybe(name, values) for name, values in OPTIONS.items())).map(
    lambda found: SamplingParams(max_tokens=6, logprobs=3, **{k: v for one in found for k, v in one.items()})
)


@st.composite
def rows(draw_: Any) -> Row:
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 1000)))
    logits = torch.randn(VOCAB, generator=generator) * draw_(st.sampled_from([0.1, 2.0, 20.0]))
    if draw_(st.booleans()):
        logits = logits.bfloat16().float()  # many equal scores
    return Row(logits, draw_(params_of), draw_(tokens_of), draw_(st.lists(st.integers(0, VOCAB - 1), max_size=6)))


def outcome(result: Sampled | Exception) -> Any:
    return repr(result) if isinstance(result, Exception) else result


@pytest.mark.versions
@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(rows(), min_size=1, max_size=9),
    size=st.sampled_from([VOCAB, 3 * VOCAB, 1 << 18]),
    numpy=st.booleans(),
)
def test_a_row_gets_the_same_alone_in_a_batch_and_by_definition(batch: list[Row], size: int, numpy: bool) -> None:
    """Also without numpy, as on an accelerator."""
    logits = torch.stack([row.logits for row in batch])
    kept = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_CHUNK", size)
        patch.setattr(stages, "in_numpy", lambda scores: numpy)
        together = sample(logits, [row.state() for row in batch], [row.tokens for row in batch])
    assert torch.equal(logits, kept), "the logits are somebody else's"
    for row, result in zip(batch, together, strict=True):
        (alone,) = sample(row.logits[None], [row.state()], [row.tokens])
        assert outcome(result) == outcome(alone)
        if isinstance(result, ValueError) and not isinstance(result, hf_paged.HfPagedError):
            with pytest.raises(ValueError, match=re.escape(str(result))):  # a processor's own
                by_definition(row.logits, row.state(), row.tokens)
            continue
        token, scores = by_definition(row.logits, row.state(), row.tokens)
        if not scores.isfinite().any() or scores.isnan().any():
            assert isinstance(result, hf_paged.InvalidRequestError)
        else:
            assert isinstance(result, Sampled), result
            assert result.token == token


@pytest.mark.versions
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=5), numpy=st.booleans())
def test_scores_equal_the_processors_own_bit_for_bit(batch: list[Row], numpy: bool) -> None:
    states = [row.state() for row in batch]
    together = sampler_module._Batch(torch.stack([row.logits for row in batch]), states, [row.tokens for row in batch])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "in_numpy", lambda scores: numpy)
        together._process()
    for i, (row, state) in enumerate(zip(batch, states, strict=True)):
        if i in together.errors:
            with pytest.raises(type(together.errors[i])):
                by_definition(row.logits, state, row.tokens)
            continue
        _, scores = by_definition(row.logits, state, row.tokens)
        assert torch.equal(together._processed([i])[0].nan_to_num(nan=5e30), scores.nan_to_num(nan=5e30))


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.625])
def test_equal_scores_at_the_border_of_top_p(top_p: float) -> None:
    """The mass to be left out is reached exactly, in the middle of equal scores."""
    state = SamplerState(SamplingParams(), [TopPLogitsWarper(top_p)], 0)
    logits = torch.zeros(1, 8)
    batch = sampler_module._Batch(logits, [state], [[5]])
    batch._process()
    assert torch.equal(batch.scores, by_definition(logits[0], state, [5])[1][None])
    assert int(batch.scores.isfinite().sum()) == 8 * top_p


def test_every_stage_is_taken_by_the_property_tests() -> None:
    """Else a stage could be wrong and nobody would see."""
    params = SamplingParams(
        temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.2, encoder_repetition_penalty=1.2,
        presence_penalty=1, frequency_penalty=1, logit_bias={3: 1.0}, allowed_token_ids=[3, 4], bad_words_ids=[[5]],
        sequence_bias={(7,): 1.0}, suppress_tokens=[3], begin_suppress_tokens=[4], min_tokens=2,
        renormalize_logits=True,
    )  # fmt: skip
    steps = state_for(params, [5, 6]).steps(VOCAB)
    assert all(step.stage is not None for step in steps)
    assert [step.rank for step in steps] == sorted(step.rank for step in steps)
    missing = set(STAGES) - {type(step.processor) for step in steps}
    assert {kind.__name__ for kind in missing} == {"MinLengthLogitsProcessor"}  # of generate(min_length=)
    mixed = state_for(SamplingParams(temperature=0, bad_words_ids=[[5, 6]], no_repeat_ngram_size=2), [5, 6])
    assert all(step.stage is None for step in mixed.steps(VOCAB))


def test_a_minimum_of_tokens_ends_at_its_border() -> None:
    """Counted with the prompt, as generate(min_length=) does, and without it."""
    logits = torch.zeros(4, VOCAB)
    logits[:, EOS], logits[:, 9] = 5.0, 4.0
    greedy = SamplingParams(temperature=0)
    processors = [
        *(MinLengthLogitsProcessor(n, torch.tensor([EOS])) for n in (4, 3)),
        *(MinNewTokensLengthLogitsProcessor(1, n, torch.tensor([EOS])) for n in (3, 2)),
    ]
    found = sample(logits, [SamplerState(greedy, [one], 0) for one in processors], [[5, 6, 7]] * 4)
    assert [result.token for result in found if isinstance(result, Sampled)] == [9, EOS, 9, EOS]


def test_the_same_state_serves_a_growing_sequence() -> None:
    """Ids and counts are kept from step to step; each step must equal one that is made from scratch."""
    seen: list[list[int]] = []

    def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.7, no_repeat_ngram_size=3, max_tokens=300,
        logits_processors=[record],
    )  # fmt: skip
    prompt = [5, 6, 7, 5]
    state, tokens, wanted = state_for(params, prompt), array("q", prompt), []
    for step in range(200):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step)) * 3
        wanted.append(list(tokens))
        (kept,) = sample(logits, [state], [tokens])
        (anew,) = sample(logits, [state_for(params, prompt)], [tokens])
        assert isinstance(kept, Sampled) and kept == anew
        tokens.append(kept.token)
    assert seen[::2] == seen[1::2] == wanted


def test_a_sequence_that_is_not_the_one_before_is_an_internal_error() -> None:
    params = SamplingParams(temperature=0, no_repeat_ngram_size=2)
    state = state_for(params, [5, 6, 7])
    sample(torch.zeros(1, VOCAB), [state], [[5, 6, 7]])
    for other in ([5, 6], [5, 6, 8, 9]):
        (found,) = sample(torch.zeros(1, VOCAB), [state], [other])
        assert isinstance(found, hf_paged.InternalError)


def test_a_processor_may_keep_what_it_saw_and_write_into_it() -> None:
    kept: list[torch.Tensor] = []

    class Keeps(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            kept.append(scores)
            return scores

    def writes(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 3] = 1e6
        return scores

    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.5, top_k=2, logits_processors=[Keeps()])
    sample(logits, [state_for(params, [5])], [[5]])
    assert torch.equal(kept[0], logits)
    params = SamplingParams(temperature=0, logprobs=0, logits_processors=[writes])
    (found,) = sample(logits, [state_for(params, [5])], [[5]])
    assert isinstance(found, Sampled) and found.token == 3 and found.logprobs is not None
    assert found.logprobs[3].logprob == pytest.approx(float(logits.log_softmax(-1)[0, 3]))


def _raises(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("boom")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processors": [_raises]}, "boom"),
        ({"logits_processors": [lambda input_ids, scores: scores[:, :5]]}, "shape"),
        ({"logits_processors": [lambda input_ids, scores: None]}, "shape"),
        ({"logits_processors": [lambda input_ids, scores: scores * float("nan")]}, "none to choose|not numbers"),
        ({"logits_processors": [lambda input_ids, scores: scores - float("inf")]}, "none to choose|not numbers"),
        ({"logit_bias": {VOCAB - 1: 1.0}}, f"logit_bias names the token ids \\[{VOCAB - 1}\\]"),
        ({"allowed_token_ids": [3, VOCAB - 1]}, f"allowed_token_ids names the token ids \\[{VOCAB - 1}\\]"),
        ({"sequence_bias": {(VOCAB - 1,): 1.0}}, "vocabulary size"),
        ({"suppress_tokens": range(VOCAB)}, "none to choose|not numbers"),
        ({"stopping_criteria": [_raises]}, "boom"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, dict) else "",
)
def test_a_row_that_fails_ends_alone(options: dict[str, Any], message: str, temperature: float) -> None:
    # one token fewer than the model says it scores, as ids beyond those do not get here
    logits = torch.randn(3, VOCAB - 1, generator=torch.Generator().manual_seed(3))
    good = SamplingParams(temperature=temperature, top_p=0.8, repetition_penalty=1.3)
    bad = SamplingParams(temperature=temperature, top_p=0.8, repetition_penalty=1.3, **options)
    first, failed, last = sample(logits, [state_for(p, [5, 6]) for p in (good, bad, good)], [[5, 6]] * 3)
    assert isinstance(failed, Exception)
    with pytest.raises(type(failed), match=message):
        raise failed
    for i, result in ((0, first), (2, last)):
        assert [result] == sample(logits[i : i + 1], [state_for(good, [5, 6])], [[5, 6]])


def test_stopping_criteria_see_the_new_token_and_the_scores_it_came_from() -> None:
    seen: list[tuple[list[int], torch.Tensor]] = []

    def criterion(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((input_ids[0].tolist(), scores))
        return torch.tensor([input_ids.shape[1] == 4])

    params = SamplingParams(temperature=0, suppress_tokens=[8], stopping_criteria=[criterion, lambda *_: False])
    state = state_for(params, [5, 6])
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 3.0, 2.0
    (first,) = sample(logits, [state], [[5, 6]])
    (again,) = sample(logits, [state], [[5, 6]])  # the token was not taken: the next one is in its place
    (second,) = sample(logits, [state], [[5, 6, 9]])
    assert [r.stopped for r in (first, again, second) if isinstance(r, Sampled)] == [False, False, True]
    assert [ids for ids, _ in seen] == [[5, 6, 9], [5, 6, 9], [5, 6, 9, 9]]
    assert all(scores.shape == (1, VOCAB) and scores[0, 8] == -float("inf") for _, scores in seen)


# -- the draw ----------------------------------------------------------------------------------------------------------


def test_numbers_for_a_draw_are_fixed_for_all_time() -> None:
    """Seeded outputs must survive an upgrade."""
    found = [uniform(*at) for at in ((0, 0, 0), (7, 0, 1), (7, 1, 0), (-1, 0, 5))]
    assert found == [0.13870941014555427, 0.9633517225922468, 0.43775600474440823, 0.04128990405587518]
    numbers = torch.tensor([uniform(3, 1, position) for position in range(4000)])
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert float((numbers.sort().values - torch.arange(4000) / 4000).abs().max()) < 0.03
    pairs = numbers[:-1] * numbers[1:]
    assert abs(float(pairs.mean()) - 0.25) < 0.02


def test_a_draw_does_not_depend_on_how_many_tokens_are_excluded_beside_it() -> None:
    scores = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 4
    scores[:3].masked_fill_(scores[:3] < 6, -float("inf"))
    numbers = [uniform(1, 0, i) for i in range(6)]
    dense = draw(scores, numbers)
    assert dense == [draw(scores[i : i + 1], numbers[i : i + 1])[0] for i in range(6)]
    assert dense[:3] == draw(scores[:3], numbers[:3])


def test_the_ends_of_a_distribution() -> None:
    inf = float("inf")
    scores = torch.tensor([[-inf, 0.0, 0.0, -inf], [0.0, -inf, -inf, -inf], [1.0, inf, 0.0, 0.0], [-inf] * 4])
    assert draw(scores, [0.0] * 4) == [1, 0, None, None]
    nearly = 1 - 2**-53
    assert draw(scores, [nearly] * 4) == [2, 0, None, None]
    assert draw(torch.tensor([[0.0, float("nan")]]), [0.5]) == [None]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_log_probabilities_of_many_tokens_at_once() -> None:
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(5))
    tokens = [3, 90, 12, 0, 44, 5, int(logits[6].argmax())]
    found = token_logprobs(logits, tokens, 4)
    scores = logits.log_softmax(-1)
    for row, token, own in zip(scores, tokens, found, strict=True):
        best = row.sort(descending=True)
        assert [t for t in own if own[t].rank <= 4] == best.indices[:4].tolist()
        for t, entry in own.items():
            assert entry.logprob == float(row[t])
            assert best.indices[entry.rank - 1] == t
        assert token in own and len(own) == 4 + (own[token].rank > 4)
    assert token_logprobs(logits[:0], [], 4) == []
    assert [list(own) for own in token_logprobs(logits, tokens, 0)] == [[token] for token in tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_and_processed_log_probabilities(temperature: float) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6)) * 2
    params = SamplingParams(temperature=temperature, top_k=0 if temperature == 0 else 3, repetition_penalty=1.5,
                            suppress_tokens=[int(logits[0].argmax())], logprobs=5)  # fmt: skip
    processed = dataclasses.replace(params, logprobs_mode="processed")
    states = [state_for(params, [5, 6]), state_for(processed, [5, 6])]
    raw, changed = sample(logits[[0, 0]], states, [[5, 6]] * 2)
    assert isinstance(raw, Sampled) and isinstance(changed, Sampled) and raw.logprobs and changed.logprobs
    assert raw.token == changed.token
    _, scores = by_definition(logits[0], states[1], [5, 6])
    for result, want in ((raw, logits[0].log_softmax(-1)), (changed, scores.log_softmax(-1))):
        assert result.logprobs is not None
        assert all(entry.logprob == float(want[t]) for t, entry in result.logprobs.items())
    assert len(changed.logprobs) == (5 if temperature == 0 else 3), "excluded tokens are no alternatives"


def test_best_of_is_told_how_likely_each_token_was() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    (found,) = sample(logits, [state_for(SamplingParams(n=1, best_of=3), [5])], [[5]])
    assert isinstance(found, Sampled) and found.logprobs is not None and list(found.logprobs) == [found.token]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of=2 must be at least n=3"),
        ({"best_of": 2, "temperature": 0}, "would all be the same"),
        ({"best_of": 4, "num_beams": 4, "temperature": 0}, "best_of=4 must be None"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 4}, "num_beams=4 with temperature=1.0"),
        ({"num_beams": 2, "n": 3, "temperature": 0}, "n=3 must be at most num_beams=2"),
        ({"num_beams": 2, "temperature": 0, "early_stopping": "soon"}, "early_stopping='soon'"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 must be left at 1.0"),
        ({"early_stopping": True}, "early_stopping=True must be left at False"),
        ({"max_tokens": 0}, "max_tokens=0 asks for nothing"),
        ({"max_tokens": -1, "echo": True}, "max_tokens=-1"),
        ({"max_tokens": 0, "echo": True, "num_beams": 2, "temperature": 0}, "max_tokens=0"),
        ({"prompt_logprobs": -2}, "prompt_logprobs=-2"),
        ({"logprobs": True}, "logprobs=True"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode='cooked'"),
        ({"echo": "yes"}, "echo='yes'"),
        ({"stopping_criteria": [5]}, "stopping_criteria"),
        ({"stopping_criteria": lambda *_: True}, "stopping_criteria"),
        ({"top_h": 0}, "top_h=0"),
        ({"num_beams": 2, "temperature": 0, "logprobs": 0}, "logprobs=0 must be None with num_beams above 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_work_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf_paged.ConfigError, match=message):
        SamplingParams(**options)


def test_a_length_penalty_without_an_end_token_says_that_it_needs_one() -> None:
    params = SamplingParams(temperature=0, exponential_decay_length_penalty=(3, 1.5))
    assert processors_for(zoo.build("llama"), params, [5], [EOS])
    with pytest.raises(hf_paged.InvalidRequestError, match="end tokens, and this request has none"):
        processors_for(zoo.build("llama"), params, [5], [])


def test_settings_that_can() -> None:
    SamplingParams(max_tokens=0, echo=True)
    SamplingParams(max_tokens=0, prompt_logprobs=0)
    SamplingParams(num_beams=4, n=4, top_k=1, early_stopping="never", length_penalty=-1)
    SamplingParams(n=2, best_of=2, temperature=0)


@pytest.mark.parametrize("options", [{"temperature": 0.8, "top_p": 0.95}, {"temperature": 0}], ids=["top_p", "greedy"])
def test_a_batch_is_faster_than_processors_row_by_row(options: dict[str, Any]) -> None:
    """The ratio is several times what is asked for here; benchmarks/sampling.py prints it."""
    logits = torch.randn(16, 30_000, generator=torch.Generator().manual_seed(0)) * 3
    states, tokens = [state_for(SamplingParams(**options), [5])] * 16, [[5]] * 16

    def best(work: Any) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    ours = best(lambda: sample(logits, states, tokens))
    theirs = best(lambda: [by_definition(*one) for one in zip(logits, states, tokens, strict=True)])
    assert ours < theirs


def test_rows_that_want_more_than_a_token_beside_those_that_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, VOCAB, generator=generator)
    logits[2] = float("nan")  # ends its own request, whatever is beside it
    ends = [lambda ids, scores: torch.tensor([True])]
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {},
        {"stopping_criteria": ends},
        {"temperature": 1.0, "seed": 3},
        {},
    ]
    rows = [SamplingParams(max_tokens=4, **{"temperature": 0.0, **kinds[i % len(kinds)]}) for i in range(9)]
    states = [state_for(params, [1, 5]) for params in rows]
    alone = [sample(logits[i : i + 1], [states[i]], [[1, 5]])[0] for i in range(9)]
    for chosen in (range(9), (0, 2, 5, 6), (0, 5, 6), (1, 3)):
        got = sample(logits[list(chosen)], [states[i] for i in chosen], [[1, 5]] * len(chosen))
        for i, result in zip(chosen, got, strict=True):
            assert repr(result) == repr(alone[i])
    assert isinstance(alone[0], Sampled) and alone[0] == Sampled(int(logits[0].argmax()))
    assert isinstance(alone[1], Sampled) and alone[1].logprobs is not None
    assert isinstance(alone[3], Sampled) and alone[3].stopped
