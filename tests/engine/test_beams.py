"""Beam search on the engine gives what ``generate(num_beams=...)`` gives for the row alone, whatever runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import LLM, SamplingParams
from tests import zoo
from tests.engine.fake import AdmitAll
from tests.engine.test_llm_parity import alone, check_clean, prompts

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "three": ({"num_beams": 3}, {}),
    "all of four": ({"num_beams": 4, "n": 4}, {}),
    "long is good": ({"num_beams": 3, "length_penalty": 2.0}, {"eos": 3}),
    "short is good": ({"num_beams": 3, "length_penalty": -1.0, "n": 2}, {"eos": 2}),
    "stop early": ({"num_beams": 4, "early_stopping": True, "n": 3}, {"eos": 4}),
    "never stop early": ({"num_beams": 2, "early_stopping": "never"}, {"eos": 3}),
    "processors": ({"num_beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_tokens": 3}, {"eos": 2}),
    "criteria": ({"num_beams": 3, "stopping_criteria": [lambda ids, scores: ids[:, -1] % 7 == 0]}, {}),
}


def ends(model: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that end hypotheses of the prompt at different lengths."""
    return sorted(set(alone(model, prompt, max_new_tokens=12)[1::3][:count])) if count else []


def stock_beams(
    model: Any, prompt: list[int], ours: dict[str, Any], eos: list[int]
) -> tuple[list[list[int]], list[float]]:
    options = {k: v for k, v in ours.items() if k not in ("n", "min_tokens")}
    if "min_tokens" in ours:
        options["min_new_tokens"] = ours["min_tokens"]
    row = torch.tensor([prompt])
    out = model.generate(
        row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=10,
        num_return_sequences=ours.get("n", 1), eos_token_id=eos or None, return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip
    rows = [sequence[len(prompt) :].tolist() for sequence in out.sequences]
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    return [tokens[:n] for tokens, n in zip(rows, lengths, strict=True)], out.sequences_scores.tolist()


@pytest.mark.versions
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom", "jamba"])
def test_every_kind_of_search_in_one_batch(name: str) -> None:
    model = zoo.build(name)
    batch = prompts()[: len(KINDS)]
    eos = [ends(model, p, extra.get("eos", 0)) for p, (_, extra) in zip(batch, KINDS.values(), strict=True)]
    want = [stock_beams(model, p, ours, e) for p, (ours, _), e in zip(batch, KINDS.values(), eos, strict=True)]
    params = [
        SamplingParams(temperature=0, max_tokens=10, stop_token_ids=e, **ours)
        for (ours, _), e in zip(KINDS.values(), eos, strict=True)
    ]
    llm = LLM(model, block_size=4, num_blocks=400)
    outputs = llm.generate([*batch, prompts()[9]], [*params, SamplingParams(temperature=0, max_tokens=10)])
    for kind, output, (tokens, scores) in zip(KINDS, outputs, want, strict=False):
        assert [c.token_ids for c in output.outputs] == tokens, kind
        penalty = KINDS[kind][0].get("length_penalty", 1.0)
        got = [c.cumulative_logprob / len(c.token_ids) ** penalty for c in output.outputs]
        assert got == pytest.approx(scores, rel=1e-5, abs=1e-4), kind
    assert outputs[-1].outputs[0].token_ids == alone(model, prompts()[9])
    assert [tokens for tokens, _ in want] != [[alone(model, p)] for p in batch], "beams must differ from greedy"
    check_clean(llm)


@pytest.mark.parametrize(
    "tight",
    [
        {"num_blocks": 16},
        {"num_blocks": 16, "preemption": "swap", "host_memory": "1MiB", "overlap": True},
        {"num_blocks": 60, "max_num_seqs": 2},
        {"num_blocks": 60, "max_num_batched_tokens": 3, "overlap": True},
    ],
    ids=["preempted", "swapped", "fewer places than beams", "a small budget"],
)
@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_beams_that_cannot_all_run_at_once(name: str, tight: dict[str, Any]) -> None:
    model, batch = zoo.build(name), prompts()[2:6]
    want = [stock_beams(model, p, {"num_beams": 4, "n": 2}, [])[0] for p in batch]
    llm = LLM(model, block_size=4, **{"max_num_batched_tokens": 16, **tight})
    llm.core.scheduler.ratio = AdmitAll()
    outputs = llm.generate(batch, SamplingParams(temperature=0, num_beams=4, n=2, max_tokens=10))
    assert [[c.token_ids for c in o.outputs] for o in outputs] == want
    assert bool(llm.stats()["preemptions"]) or tight["num_blocks"] == 60
    check_clean(llm)


def test_the_prompt_is_computed_and_stored_once() -> None:
    model, prompt = zoo.build("llama"), prompts()[9]
    llm = LLM(model, block_size=4, num_blocks=200)
    llm.generate([prompt], SamplingParams(temperature=0, num_beams=6, max_tokens=1))
    assert llm.stats()["computed_tokens"] == len(prompt)
    assert llm.stats()["cached_blocks"] == -(-len(prompt) // 4)


def test_a_search_that_is_aborted_or_fails_leaves_nothing() -> None:
    model = zoo.build("llama")
    llm = LLM(model, block_size=4, num_blocks=200)

    def explode(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(prompts()[2]) + 3:
            raise RuntimeError("boom")
        return scores

    bad = SamplingParams(temperature=0, num_beams=3, max_tokens=9, logits_processors=[explode])
    good = SamplingParams(temperature=0, max_tokens=6)
    outputs = llm.generate([prompts()[2], prompts()[3]], [bad, good])
    assert isinstance(outputs[0].error, RuntimeError) and outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == alone(model, prompts()[3], max_new_tokens=6)
    check_clean(llm)
    group = llm.frontend.add(prompts()[2], SamplingParams(temperature=0, num_beams=3, max_tokens=9))
    for _ in range(3):
        llm.frontend.step()
    assert llm.core.manager.stats().owned_blocks > 0
    llm.frontend.abort(group)
    assert group.output.finished and [c.finish_reason for c in group.output.outputs] == ["abort"]
    check_clean(llm)
    with pytest.raises(hf_paged.ConfigError, match="beam search does not sample"):
        SamplingParams(temperature=0.7, num_beams=3)


def test_stop_texts_end_hypotheses(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    text = "List three colours of the rainbow:"
    row = tokenizer(text, return_tensors="pt")
    out = model.generate(
        **row, num_beams=3, do_sample=False, max_new_tokens=16, stop_strings=["yell", "\n2"], tokenizer=tokenizer,
        num_return_sequences=2, pad_token_id=0,
    )  # fmt: skip
    want = [s[row["input_ids"].shape[1] :].tolist() for s in out]
    llm = LLM(model, tokenizer, num_blocks=64)
    params = SamplingParams(temperature=0, num_beams=3, n=2, max_tokens=16, stop=["yell", "\n2"])
    got = llm.generate([text], params)[0].outputs
    for completion, tokens in zip(got, want, strict=True):
        assert tokens[: len(completion.token_ids)] == completion.token_ids
        assert set(tokens[len(completion.token_ids) :]) <= {tokenizer.eos_token_id}
        assert "yell" not in completion.text and "\n2" not in completion.text


def test_a_beam_without_any_token_left_gives_way_to_the_others() -> None:
    model, prompt = zoo.build("llama"), prompts()[4]
    firsts = stock_beams(model, prompt, {"num_beams": 3, "n": 3}, [])[0]
    dead = firsts[1][0] if firsts[1][0] != firsts[0][0] else firsts[0][0]

    def dry(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = (
            ids[:, len(prompt)] == dead if ids.shape[1] > len(prompt) + 1 else torch.zeros(len(ids), dtype=torch.bool)
        )
        return scores.masked_fill(ends[:, None], float("-inf"))

    row = torch.tensor([prompt])
    want = model.generate(row, num_beams=3, do_sample=False, max_new_tokens=8, logits_processor=[dry])
    llm = LLM(model, block_size=4, num_blocks=200)
    params = SamplingParams(temperature=0, num_beams=3, max_tokens=8, logits_processors=[dry])
    got = llm.generate([prompt], params, use_tqdm=False)[0]
    assert got.error is None and got.outputs[0].token_ids == want[0, len(prompt) :].tolist()
    assert got.outputs[0].token_ids[0] != dead
    none = SamplingParams(
        temperature=0, num_beams=3, max_tokens=8, logits_processors=[lambda ids, s: torch.full_like(s, float("-inf"))]
    )
    ended = llm.generate([prompt], none, use_tqdm=False)[0]
    assert isinstance(ended.error, hf_paged.InvalidRequestError) and "no token to choose" in str(ended.error)
    check_clean(llm)
