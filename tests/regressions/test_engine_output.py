"""Cases 25, 31, 32, 34 and 38: from logits to tokens to text, and the shortest requests there are."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import torch
from tokenizers import decoders

import hf_paged
from hf_paged import LLM, AsyncLLM, SamplingParams
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.engine_helpers import last, run, says, tokenizer_of
from tests.regressions.helpers import ids

BS = 4
ROOMY: dict[str, Any] = {"block_size": BS, "num_blocks": 400}


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return ids(1, length, seed=seed)[0].tolist()


def chosen(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# -- case 25 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [True, False], ids=["written by the tokenizer", "only known to it"])
def test_an_empty_text_begins_with_the_bos_token(written: bool) -> None:
    """Case 25: an empty prompt crashed the engine or was answered with nothing.

    https://github.com/vllm-project/vllm/issues/6521, https://github.com/vllm-project/vllm/issues/9336
    """
    model, tokenizer = zoo.build("llama"), tokenizer_of(bos=written)
    tokenizer.bos_token = "<s>"
    assert (tokenizer("")["input_ids"] == [1]) is written
    llm = LLM(model, tokenizer, **ROOMY)
    outputs = llm.generate(["", "ab", {"prompt": ""}], greedy(5))
    assert [o.prompt_token_ids for o in outputs] == [[1], [1, 3, 4] if written else [3, 4], [1]]
    assert [o.outputs[0].token_ids for o in outputs] == [
        alone(model, o.prompt_token_ids, max_new_tokens=5) for o in outputs
    ]
    check_clean(llm)


@pytest.mark.parametrize("empty", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_without_a_bos_token_is_refused(empty: Any) -> None:
    """Case 25: what nothing can follow is an error for that request, and the others do not notice.

    https://github.com/vllm-project/vllm/issues/10432, https://github.com/vllm-project/vllm/pull/2995
    """
    model = zoo.build("llama")

    async def work() -> None:
        async with AsyncLLM(model, tokenizer_of(), **ROOMY) as llm:
            results: list[Any] = await asyncio.gather(
                last(llm, empty, greedy(5)), last(llm, [5, 6, 7], greedy(5)), return_exceptions=True
            )
            assert isinstance(results[0], hf_paged.InvalidRequestError) and "no tokens" in str(results[0])
            assert results[1].outputs[0].token_ids == alone(model, [5, 6, 7], max_new_tokens=5)

    run(work())


@pytest.mark.parametrize(("length", "computed"), [(1, 1 + 1), (4, 4 + 4), (5, 5 + 1)])
def test_a_single_token_needs_no_block_of_its_own(length: int, computed: int) -> None:
    """Case 25: ``max_tokens=1`` gives one token, after one step, from a pool that holds the prompt and no more.

    https://github.com/vllm-project/vllm/issues/6521
    """
    model, tokens = zoo.build("llama"), prompt(length)
    llm = LLM(model, block_size=BS, num_blocks=-(-length // BS))
    for _ in range(2):
        output = llm.generate(tokens, greedy(1))[0]
        assert chosen(output) == [alone(model, tokens, max_new_tokens=1)]
        assert output.outputs[0].finish_reason == "length" and output.error is None
    # the second time its last token, but where this would need a copy of the only block: the whole prompt
    assert llm.stats()["computed_tokens"] == computed
    check_clean(llm)


# -- case 31 -----------------------------------------------------------------------------------------------------------


def test_completions_of_one_seed_differ_and_do_not_depend_on_the_batch() -> None:
    """Case 31: with a seed all n completions were the same, or a request drew other tokens in a batch.

    https://github.com/vllm-project/vllm/issues/10852, https://github.com/Blaizzy/mlx-vlm/issues/1818
    """
    model, tokens = zoo.build("llama"), prompt(9)
    params = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=12)
    llm = LLM(model, **ROOMY)
    by_itself = chosen(llm.generate(tokens, params)[0])
    assert len({tuple(c) for c in by_itself}) == 4, "each completion has a stream of its own"
    assert chosen(llm.generate(tokens, params)[0]) == by_itself, "the seed makes it reproducible"
    others = [SamplingParams(temperature=1.0, max_tokens=5 + i, seed=i) for i in range(7)]
    assert chosen(llm.generate([*prompts()[:7], tokens], [*others, params])[-1]) == by_itself
    pressed = LLM(model, block_size=BS, num_blocks=16, max_num_batched_tokens=8, max_num_seqs=6)
    pressed.core.scheduler.ratio.value = pressed.core.scheduler.ratio.LEAST
    assert chosen(pressed.generate([*prompts()[:7], tokens], [*others, params])[-1]) == by_itself
    assert pressed.stats()["preemptions"] > 0
    check_clean(pressed)


def test_requests_of_one_seed_are_as_independent_as_their_prompts() -> None:
    """Case 31: the i-th completion of a seed is the same however many are asked for, and another seed is another."""
    llm, tokens = LLM(zoo.build("llama"), **ROOMY), prompt(9)

    def drawn(n: int, seed: int | None) -> list[list[int]]:
        return chosen(llm.generate(tokens, SamplingParams(n=n, seed=seed, max_tokens=12))[0])

    assert drawn(2, 1) == drawn(4, 1)[:2]
    assert drawn(1, 1) != drawn(1, 2)


def test_without_a_seed_nothing_repeats() -> None:
    """Case 31: requests without a seed must not all draw the same numbers; an engine's own seed makes them repeatable.

    https://github.com/Blaizzy/mlx-vlm/issues/1818
    """
    model, params = zoo.build("llama"), SamplingParams(temperature=1.0, max_tokens=12)

    def drawn(llm: LLM) -> list[tuple[int, ...]]:
        first = llm.generate([prompt(9)] * 3, params)
        second = llm.generate([prompt(9)] * 3, params)
        return [tuple(o.outputs[0].token_ids) for o in [*first, *second]]

    everything = [drawn(LLM(model, **ROOMY)) for _ in range(2)]
    assert len({tokens for tokens_of in everything for tokens in tokens_of}) == 12
    seeded = [drawn(LLM(model, **ROOMY, seed=5)) for _ in range(2)]
    assert seeded[0] == seeded[1] and len(set(seeded[0])) == 6


# -- case 32 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon"])
def test_greedy_tokens_do_not_depend_on_the_batch(name: str) -> None:
    """Case 32: greedy output was another with other requests beside it. In float32 on a CPU it is not.

    https://github.com/vllm-project/vllm/issues/5898, https://github.com/vllm-project/vllm/issues/5404
    """
    model = zoo.build(name)
    batch = [prompt(3 + 2 * i, seed=i) for i in range(16)]
    want = [alone(model, p, max_new_tokens=10) for p in batch]
    llm = LLM(model, **ROOMY)
    for crowd in (1, 2, 16):
        for start in range(0, 16, crowd):
            outputs = llm.generate(batch[start : start + crowd], greedy(10))
            assert [o.outputs[0].token_ids for o in outputs] == want[start : start + crowd]
        llm.reset_prefix_cache()
    check_clean(llm)


def test_every_way_to_ask_for_the_most_likely_token_is_the_same() -> None:
    """Case 32: ``top_k=1`` and ``temperature=0`` gave different tokens.

    https://github.com/vllm-project/vllm/issues/23138
    """
    model, tokens = zoo.build("llama"), prompt(9)
    llm, want = LLM(model, **ROOMY), alone(model, tokens, max_new_tokens=16)
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_k": 1, "temperature": 5.0}, {"temperature": 0, "seed": 3}):
        assert chosen(llm.generate(tokens, SamplingParams(max_tokens=16, **options))[0]) == [want], options


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"temperature": 0, "presence_penalty": 1e-30}])
def test_of_equal_scores_the_lowest_id_is_taken(options: dict[str, Any]) -> None:
    """Case 32: with ties, ``top_k=1`` sampled among them; the lowest id is everybody's answer.

    https://github.com/vllm-project/vllm/issues/23138
    """
    model = zoo.fresh("llama")
    with torch.no_grad():  # each score occurs four times: 4k, 4k + 1, 4k + 2 and 4k + 3 tie
        for i in range(0, zoo.VOCAB - 3, 4):
            model.lm_head.weight[i + 1 : i + 4] = model.lm_head.weight[i]
    llm = LLM(model, **ROOMY)
    outputs = llm.generate(prompts(), SamplingParams(max_tokens=16, **options))
    tokens = [t for o in outputs for t in o.outputs[0].token_ids]
    assert len(set(tokens)) > 3 and {t % 4 for t in tokens} == {0}


# -- case 34 -----------------------------------------------------------------------------------------------------------

PIECES = ["DEF", "G", "HI", "J", "..", "...", ".", " ", "abc", "stop!", "xstopy", "é", "日本", "🙂", "end"]


def texts(pieces: list[str], **options: Any) -> tuple[list[str], Any]:
    """What a stream shows after each step, and the finished completion."""
    tokenizer = tokenizer_of(PIECES)
    llm = LLM(zoo.build("llama"), tokenizer, **ROOMY)
    outputs = [(o.outputs[0].text, o.outputs[0]) for o in llm.stream(prompt(4), says(tokenizer, pieces, 4, **options))]
    check_clean(llm)
    return [text for text, _ in outputs], outputs[-1][1]


def test_nothing_of_a_stop_text_over_several_tokens_is_shown() -> None:
    """Case 34: the beginning of a stop text was shown before its last token came.

    https://github.com/vllm-project/vllm/issues/3574, https://github.com/huggingface/text-generation-inference/issues/1254
    """
    shown, ended = texts(["abc", " ", "DEF", "G", "HI", "J", "abc"], stop="DEFGHIJ")
    assert shown == ["abc", "abc ", "abc ", "abc ", "abc ", "abc "]
    assert (ended.finish_reason, ended.stop_reason, len(ended.token_ids)) == ("stop", "DEFGHIJ", 6)


def test_no_more_is_held_back_than_could_be_a_stop_text() -> None:
    """Case 34: text that cannot become a stop text any more is shown at once.

    https://github.com/smg-project/smg/pull/2203
    """
    shown, ended = texts(["abc", "DEF", "G", "DEF", "abc", "J"], stop=["DEFGHIJ", "JJ"])
    assert shown == ["abc", "abc", "abc", "abcDEFG", "abcDEFGDEFabc", "abcDEFGDEFabcJ"]
    assert ended.finish_reason == "length", "what was held back is shown when the output ends"


def test_of_several_stop_texts_the_one_that_ends_first_counts() -> None:
    """Case 34: with one stop text inside another, the earliest end decides.

    https://github.com/vllm-project/vllm/issues/57052
    """
    for pieces in (["abc", "..."], ["abc", "..", "."], ["abc", ".", ".", "."]):
        for stops in (["..", "..."], ["...", ".."]):
            shown, ended = texts([*pieces, "end"], stop=stops)
            assert (shown[-1], ended.stop_reason) == ("abc", "..")
    assert texts(["abc", "DEF", "G", "HI"], stop=["DEFGHI", "G"])[0][-1] == "abcDEF"


def test_a_stop_text_inside_a_token_cuts_it() -> None:
    """Case 34: the text before it within the same token is part of the output, what follows is not.

    https://github.com/vllm-project/vllm/issues/57052
    """
    shown, ended = texts(["abc", "xstopy", "end"], stop="stop")
    assert shown == ["abc", "abcx"] and ended.stop_reason == "stop" and len(ended.token_ids) == 2
    shown, ended = texts(["abc", "xstopy", "end"], stop="stop", include_stop_str_in_output=True)
    assert shown == ["abc", "abcxstop"]


def test_a_stop_text_is_kept_where_it_is_wanted() -> None:
    """Case 34: ``include_stop_str_in_output`` over several tokens, and nothing behind it.

    https://github.com/vllm-project/vllm/issues/57052
    """
    shown, ended = texts(["abc", "DEF", "G", "end"], stop="EFG", include_stop_str_in_output=True)
    assert shown[-1] == "abcDEFG" and ended.stop_reason == "EFG"
    assert all("abcDEFG".startswith(text) for text in shown)


def test_stop_texts_of_several_bytes_a_character() -> None:
    """Case 34: characters beyond ASCII in the output and in the stop text.

    https://github.com/huggingface/text-generation-inference/issues/1254
    """
    shown, ended = texts(["é", "日本", " ", "🙂", "end"], stop="本 🙂")
    assert shown == ["é", "é日", "é日", "é日"] and ended.stop_reason == "本 🙂"


@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_text_that_an_unfinished_character_completes(kept: bool) -> None:
    """Case 34: an unfinished character is text only once nothing follows, and was not searched for stop texts then."""
    tokenizer = tokenizer_of([*PIECES, "<0xE4>"])
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    llm = LLM(zoo.build("llama"), tokenizer, **ROOMY)
    options: dict[str, Any] = {"stop": "c\ufffd", "include_stop_str_in_output": kept}
    ended = llm.generate(prompt(4), says(tokenizer, ["abc", "DEF", "abc", "<0xE4>"], 4, **options))[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "c\ufffd")
    assert ended.text == "abcDEFab" + ("c\ufffd" if kept else "")
    ended = llm.generate(prompt(4), says(tokenizer, ["abc", "<0xE4>"], 4, stop="x"))[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("length", None, "abc\ufffd")
    check_clean(llm)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_stop_text_before_an_unfinished_character_in_the_last_token(num_beams: int) -> None:
    """Case 34: so is what comes before it in the same token."""
    tokenizer = tokenizer_of([*PIECES, "stop\ufffd"])
    llm = LLM(zoo.build("llama"), tokenizer, **ROOMY)
    params = says(tokenizer, ["abc", "stop\ufffd"], 4, stop="stop", num_beams=num_beams)
    ended = llm.generate(prompt(4), params)[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", "stop", "abc")
    check_clean(llm)


def test_shown_text_only_grows() -> None:
    """Case 34: whatever the pieces and the stop texts, text once shown is never taken back.

    https://github.com/vllm-project/vllm/issues/3574
    """
    generator = torch.Generator().manual_seed(34)
    tokenizer = tokenizer_of(PIECES)
    llm = LLM(zoo.build("llama"), tokenizer, **ROOMY)
    for _ in range(40):
        pieces = [PIECES[i] for i in torch.randint(0, len(PIECES), (12,), generator=generator)]
        whole = "".join(pieces)
        cuts = torch.randint(0, len(whole), (2, 2), generator=generator).sort().values.tolist()
        stops = [whole[a : b + 1] for a, b in cuts]
        shown = [o.outputs[0].text for o in llm.stream(prompt(4), says(tokenizer, pieces, 4, stop=stops))]
        assert all(b.startswith(a) for a, b in itertools.pairwise(shown))
        ends = [whole.index(stop) + len(stop) for stop in stops]
        first = min(zip(ends, (whole.index(stop) for stop in stops), strict=True))
        assert shown[-1] == whole[: first[1]]
    check_clean(llm)


# -- case 38 -----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def test_a_chat_has_one_bos_token() -> None:
    """Case 38: the template wrote a BOS token and the tokenizer added another.

    https://github.com/vllm-project/vllm/issues/9519, https://github.com/vllm-project/vllm/pull/15695,
    https://github.com/sgl-project/sglang/pull/888
    """
    tokenizer = tokenizer_of(bos=True)
    tokenizer.chat_template = TEMPLATE
    model, messages = zoo.build("llama"), [{"role": "user", "content": "abc"}]
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert want.count(1) == 1 and want[0] == 1, "the template itself writes one"
    assert tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"].count(1) == 2, "the trap"
    offline = LLM(model, tokenizer, **ROOMY).chat(messages, greedy(3))[0]
    assert offline.prompt_token_ids == want

    async def work() -> Any:
        async with AsyncLLM(model, tokenizer, **ROOMY) as llm:
            return [output async for output in llm.chat(messages, greedy(3))][-1]

    online = run(work())
    assert online.prompt_token_ids == want and chosen(online) == chosen(offline)


def test_a_text_is_tokenized_as_its_tokenizer_does_by_default_offline_and_online() -> None:
    """Case 38: a text that begins with the BOS token gets what ``tokenizer(text)`` gives, everywhere the same.

    https://github.com/vllm-project/vllm/pull/55288
    """
    tokenizer, model = tokenizer_of(bos=True), zoo.build("llama")
    written = ["abc", "<s>abc"]
    offline = LLM(model, tokenizer, **ROOMY).generate(written, greedy(3))
    assert [o.prompt_token_ids for o in offline] == [tokenizer(text)["input_ids"] for text in written]

    async def work() -> Any:
        async with AsyncLLM(model, tokenizer, **ROOMY) as llm:
            return await asyncio.gather(*(last(llm, text, greedy(3)) for text in written))

    assert [o.prompt_token_ids for o in run(work())] == [o.prompt_token_ids for o in offline]
    bare = LLM(model, tokenizer, **ROOMY).generate(["<s>abc"], greedy(3, add_special_tokens=False))[0]
    assert bare.prompt_token_ids == tokenizer("<s>abc", add_special_tokens=False)["input_ids"]
    assert bare.prompt_token_ids != offline[1].prompt_token_ids


def test_a_prompt_can_be_cut_to_its_end() -> None:
    """Case 24: an over-long prompt is an error, unless its request says how much of its end to keep."""
    model, tokens = zoo.build("llama"), list(range(3, 43))
    llm = LLM(model, **ROOMY, max_model_len=20)
    with pytest.raises(hf_paged.InvalidRequestError, match=r"40 tokens.*max_model_len=20"):
        llm.generate([tokens], greedy(3))
    kept = llm.generate([tokens], greedy(3, truncate_prompt_tokens=7))[0]
    assert kept.prompt_token_ids == tokens[-7:]
    assert kept.outputs[0].token_ids == alone(model, tokens[-7:], max_new_tokens=3)
    with pytest.raises(hf_paged.ConfigError, match="truncate_prompt_tokens=0"):
        greedy(3, truncate_prompt_tokens=0)
