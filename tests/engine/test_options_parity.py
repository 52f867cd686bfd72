"""Every option, in one batch where each row uses another: a row gets what stock ``generate()`` gives for it alone.

Where stock samples, its draw is replaced by the engine's: a number that depends on seed, row and position, looked up in
the cumulative softmax. Tokens are then equal exactly when the distributions are. For what stock lacks, a processor
written here says what is meant.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria

from hf_paged import LLM, RequestOutput, SamplingParams
from hf_paged.sampling.sampler import uniform
from tests import zoo
from tests.engine.test_llm_parity import check_clean
from tests.regressions.helpers import ids

EOS, SPECIAL, LENGTH = 2, 30, 10


class Plus(LogitsProcessor):
    """Adds ``amount`` to the scores of ``tokens``."""

    def __init__(self, tokens: list[int], amount: float) -> None:
        self.tokens, self.amount = tokens, amount

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.tokens] += self.amount
        return scores


class Only(LogitsProcessor):
    """Excludes all but ``tokens``."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        others = [token for token in range(scores.shape[1]) if token not in self.tokens]
        scores = scores.clone()
        scores[:, others] = -float("inf")
        return scores


class Penalties(LogitsProcessor):
    """OpenAI's: what was generated so far costs ``presence`` once, and ``frequency`` each time."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        output = input_ids[0, self.prompt_length :].tolist()
        for token in set(output):
            scores[:, token] -= self.presence + self.frequency * output.count(token)
        return scores


class Recorder(LogitsProcessor):
    """Leaves scores alone, and excludes the token that came last from being next."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, input_ids[0, -1:], -float("inf"))


class AfterFour(StoppingCriteria):
    """Stops at an id divisible by four, by the scores it was chosen from."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 4 == 0


@dataclasses.dataclass(frozen=True)
class Case:
    """``ours`` are SamplingParams; ``stock`` is what generate() is given, the same where it is None.

    The tokens must differ from those of generate() with ``plain``, unless the option is ``neutral``: has another effect
    than on the tokens.
    """

    ours: dict[str, Any]
    stock: dict[str, Any] | None = None
    sampled: bool = False
    neutral: bool = False
    plain: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: list[int] | None = None


def same(**options: Any) -> Case:
    return Case(options)


def drawn(neutral: bool = False, **options: Any) -> Case:
    return Case(options, sampled=True, neutral=neutral)


def prefix_allowed(batch_id: int, sent: torch.Tensor) -> list[int]:
    return [3 + len(sent) % 5, 11, 12, int(sent[-1])]


FEW = [token for token in range(zoo.VOCAB) if not 69 <= token <= 72]  # what is left ends some outputs soon
WIDE = {"temperature": 1.6}  # flat enough that a truncation matters
CASES: dict[str, Case] = {
    "temperature": drawn(temperature=0.5),
    "top_k": drawn(**WIDE, top_k=3),
    "top_p": drawn(**WIDE, top_p=0.4),
    "min_p": drawn(**WIDE, min_p=0.3),
    "top_h": drawn(**WIDE, top_h=0.4),
    "typical_p": drawn(**WIDE, typical_p=0.3),
    "epsilon_cutoff": drawn(**WIDE, epsilon_cutoff=0.05),
    "eta_cutoff": drawn(**WIDE, eta_cutoff=0.2),
    "all truncations": drawn(temperature=2.5, top_k=9, top_p=0.8, min_p=0.05, typical_p=0.95, eta_cutoff=0.01),
    "top_k of one": Case({"top_k": 1, "temperature": 1.7}, {}, neutral=True),
    "repetition_penalty": Case({"repetition_penalty": 3.0}, prompt=[45, 25, 36, 86, 77, 45, 25]),
    "repetition_penalty, sampled": drawn(repetition_penalty=1.6, top_k=8),
    "encoder_repetition_penalty": same(encoder_repetition_penalty=2.5),
    "no_repeat_ngram_size": same(no_repeat_ngram_size=1),
    "encoder_no_repeat_ngram_size": Case({"encoder_no_repeat_ngram_size": 1}, prompt=list(range(3, 60))),
    "presence_penalty": Case({"presence_penalty": 2.0}, {"processor": lambda n: Penalties(n, 2.0, 0.0)}),
    "frequency_penalty": Case({"frequency_penalty": 1.5}, {"processor": lambda n: Penalties(n, 0.0, 1.5)}),
    "both penalties, sampled": Case(
        {"presence_penalty": 0.5, "frequency_penalty": -1.0, "top_p": 0.9},
        {"processor": lambda n: Penalties(n, 0.5, -1.0), "top_p": 0.9},
        sampled=True,
    ),
    "bad_words_ids": same(bad_words_ids=[[t] for t in range(3, 60)] + [[70, 71], [80, 81]]),
    "sequence_bias": same(sequence_bias={(8,): 6.0, (8, 9): 9.0, (9, 8): 9.0}),
    "suppress_tokens": same(suppress_tokens=list(range(40, 97))),
    "begin_suppress_tokens": same(begin_suppress_tokens=list(range(60))),
    "forced_bos_token_id": Case({"forced_bos_token_id": 44}, prompt=[8]),
    "forced_eos_token_id": same(forced_eos_token_id=9),
    "exponential_decay_length_penalty": same(exponential_decay_length_penalty=(2, 3.0)),
    "remove_invalid_values": drawn(remove_invalid_values=True, sequence_bias={(5,): float("inf")}),
    "renormalize_logits": drawn(neutral=True, renormalize_logits=True, logprobs=2, logprobs_mode="processed"),
    "logit_bias": Case({"logit_bias": {12: 5.0, 13: 5.0}}, {"processor": lambda n: Plus([12, 13], 5.0)}),
    "allowed_token_ids": Case({"allowed_token_ids": [7, 5, 60, 61]}, {"processor": lambda n: Only([5, 7, 60, 61])}),
    "logits_processors": Case({"logits_processors": [Recorder()]}, {"logits_processor": [Recorder()]}),
    "prefix_allowed_tokens_fn": same(prefix_allowed_tokens_fn=prefix_allowed),
    "stopping_criteria": same(stopping_criteria=[AfterFour()]),
    "max_tokens": Case({"max_tokens": 3}, {"max_new_tokens": 3}),
    "min_tokens": Case({"min_tokens": 8, "suppress_tokens": FEW}, {"min_new_tokens": 8, "suppress_tokens": FEW},
                       plain={"suppress_tokens": FEW}),
    "ignore_eos": Case({"ignore_eos": True, "suppress_tokens": FEW}, {"eos_token_id": -1, "suppress_tokens": FEW},
                       plain={"suppress_tokens": FEW}),
    "stop_token_ids": Case({"stop_token_ids": list(range(90))}, {"eos_token_id": [EOS, *range(90)]}),
    "seed": drawn(seed=91),
    "n": drawn(n=4, temperature=1.2),
    "logprobs": drawn(neutral=True, logprobs=4),
    "logprobs_mode": Case({"logprobs": 4, "logprobs_mode": "processed", "repetition_penalty": 1.8},
                          {"repetition_penalty": 1.8}),
}  # fmt: skip
#: options of the text, which are cut from the tokens of the row without them
TEXT = {
    "stop": {"stop": ["w7"]},
    "include_stop_str_in_output": {"stop": ["w7"], "include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
}
#: options of whole outputs, not of single tokens
ELSEWHERE = {
    "best_of", "num_beams", "length_penalty", "early_stopping", "prompt_logprobs", "echo", "add_special_tokens",
    "truncate_prompt_tokens",
}  # fmt: skip


def test_every_option_is_covered() -> None:
    covered = {name for case in CASES.values() for name in case.ours} | {name for own in TEXT.values() for name in own}
    options = {field.name for field in dataclasses.fields(SamplingParams)}
    assert options - covered == ELSEWHERE


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = {"</s>" if i == SPECIAL else f"w{i}": i for i in range(zoo.VOCAB)}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.fixture
def model() -> Iterator[Any]:
    """A shared model with ends of its own."""
    found = zoo.build("llama")
    kept = found.generation_config
    found.generation_config = copy.deepcopy(kept)
    found.generation_config.eos_token_id = EOS
    yield found
    found.generation_config = kept


def prompt_of(number: int) -> list[int]:
    """Mixed lengths; every second one begins with the same 13 tokens."""
    head = ids(1, 13, seed=50)[0].tolist() if number % 2 else []
    return [*head, *ids(1, 3 + number % 11, seed=number)[0].tolist()]


def alone(model: Any, prompt: list[int], case: Case, seed: int, row: int, plain: bool = False) -> Any:
    """Stock ``generate()`` for one row; ``plain`` without the option."""
    options = dict(case.ours if case.stock is None else case.stock)
    for ours in ("seed", "n", "logprobs", "logprobs_mode"):
        options.pop(ours, None)
    if plain:
        options = dict(case.plain)
    make = options.pop("processor", None)
    if make is not None:
        options["logits_processor"] = [make(len(prompt))]
    if case.sampled:
        options = {"do_sample": True, "top_k": 0, **options}
    position = len(prompt)

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        nonlocal position
        mass = np.cumsum(probabilities[0].double().numpy())
        token = int(np.searchsorted(mass, uniform(seed, row, position) * mass[-1], side="right"))
        position += 1
        return torch.tensor([[token]])

    ids_ = torch.tensor([prompt])
    with mock.patch.object(torch, "multinomial", multinomial):
        return model.generate(
            ids_,
            attention_mask=torch.ones_like(ids_),
            **{"do_sample": False, "max_new_tokens": LENGTH, **options},
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )


def params_of(case: Case, seed: int) -> SamplingParams:
    defaults = {"temperature": 1.0 if case.sampled else 0.0, "seed": seed, "max_tokens": LENGTH}
    return SamplingParams(**{**defaults, **case.ours})


@pytest.mark.versions
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"num_blocks": 600}, id="roomy"),
        pytest.param({"num_blocks": 20, "max_num_batched_tokens": 16}, id="tight"),
        pytest.param({"num_blocks": 20, "preemption": "swap", "overlap": True}, id="swapping"),
    ],
)
def test_every_row_has_an_option_of_its_own(
    model: Any, tokenizer: Any, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.generation_config.eos_token_id = [EOS, 70, 71]  # so that some rows end early
    numbers = {name: number for number, name in enumerate(CASES)}
    params = {name: params_of(case, 1100 + numbers[name]) for name, case in CASES.items()}
    llm = LLM(model, tokenizer, block_size=4, **engine)
    llm.core.scheduler.ratio.value = 0.1
    monkeypatch.setattr(llm.core.scheduler.ratio, "preempted", lambda running: None)  # goes on admitting too many
    prompts = {name: case.prompt or prompt_of(numbers[name]) for name, case in CASES.items()}
    outputs = llm.generate(list(prompts.values()), list(params.values()))
    if engine["num_blocks"] < 100:
        assert llm.stats()["preemptions"] >= 6
    for (name, case), output in zip(CASES.items(), outputs, strict=True):
        prompt = prompts[name]
        assert output.error is None, name
        assert len(output.outputs) == params[name].n
        for row, part in enumerate(output.outputs):
            seed = params[name].seed
            assert seed is not None
            want = alone(model, prompt, case, seed, row)
            tokens = want.sequences[0, len(prompt) :].tolist()
            assert part.token_ids == tokens, name
            ended = len(tokens) < params[name].max_tokens or tokens[-1] in model.generation_config.eos_token_id
            assert part.finish_reason == ("stop" if ended and not params[name].ignore_eos else "length"), name
            if params[name].logprobs is not None:
                check_logprobs(part, want, params[name])
            plain = alone(model, prompt, case, 5 if name == "seed" else seed, row, plain=True)
            changed = plain.sequences[0, len(prompt) :].tolist() != tokens
            assert changed or case.neutral or params[name].n > 1, f"{name} must matter here"
    check_clean(llm)


def check_logprobs(part: Any, want: Any, params: SamplingParams) -> None:
    rows = want.scores if params.logprobs_mode == "processed" else want.logits
    assert len(part.logprobs) == len(part.token_ids)
    for token, found, scores in zip(part.token_ids, part.logprobs, rows, strict=True):
        logprobs = scores[0].log_softmax(-1)
        best = logprobs.topk(params.logprobs).indices.tolist()
        assert set(found) == {token, *best}
        for i, entry in found.items():
            assert entry.logprob == pytest.approx(float(logprobs[i]), abs=1e-3)
            assert entry.decoded_token == ("</s>" if i == SPECIAL else f"w{i}")
    chosen = [found[token].logprob for token, found in zip(part.token_ids, part.logprobs, strict=True)]
    assert part.cumulative_logprob == pytest.approx(sum(chosen))


def test_options_of_the_text(model: Any, tokenizer: Any) -> None:
    """The definition is the text of stock's tokens: it ends before the stop text, or behind it where it is kept."""
    bias = {(7,): 4.0, (SPECIAL,): 3.0}
    prompts = [prompt_of(number) for number in (1, 4, 6)]
    llm = LLM(model, tokenizer, block_size=4, num_blocks=200)
    settings = [
        SamplingParams(temperature=0, max_tokens=20, no_repeat_ngram_size=2, sequence_bias=bias, **options)
        for options in TEXT.values()
    ]
    outputs = llm.generate(prompts, settings)
    for prompt, params, output in zip(prompts, settings, outputs, strict=True):
        case = same(no_repeat_ngram_size=2, sequence_bias=bias, max_new_tokens=20)
        tokens = alone(model, prompt, case, 0, 0).sequences[0, len(prompt) :].tolist()
        assert 7 in tokens and SPECIAL in tokens, "the test needs both"
        whole, before = (
            tokenizer.decode(part, skip_special_tokens=params.skip_special_tokens) for part in (prompt + tokens, prompt)
        )
        text = whole[len(before) :]
        part = output.outputs[0]
        if not params.stop:
            assert "</s>" in text and part.text == text and part.token_ids == tokens
            continue
        stop = params.stop[0]
        end = text.index(stop)
        assert part.text == text[: end + len(stop) if params.include_stop_str_in_output else end]
        assert part.token_ids == tokens[: tokens.index(7) + 1]
        assert (part.finish_reason, part.stop_reason) == ("stop", stop)


def test_a_row_without_a_seed_draws_one(model: Any) -> None:
    llm = LLM(model, block_size=4, num_blocks=200, seed=3)
    params = SamplingParams(temperature=1.5, max_tokens=8)

    def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in outputs]

    first = tokens(llm.generate([prompt_of(1)] * 3, params))
    assert len({tuple(row) for row in first}) == 3
    again = LLM(model, block_size=4, num_blocks=200, seed=3)
    assert tokens(again.generate([prompt_of(1)] * 3, params)) == first
