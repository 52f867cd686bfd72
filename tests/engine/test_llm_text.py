"""Text in and out, on the real model: stop texts, streams, chats, and the batch against stock ``generate()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import hf_paged
from hf_paged import LLM, SamplingParams
from hf_paged.engine.detokenizer import Detokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at",
    "A recipe for pancakes: first,",
    "In 1969, two astronauts",
    "The opposite of hot is",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="session")
def lm(smollm2: tuple[Any, Any]) -> Any:
    return smollm2[0]


@pytest.fixture(scope="session")
def tokenizer(smollm2: tuple[Any, Any]) -> Any:
    return smollm2[1]


@pytest.fixture(scope="session")
def llm(lm: Any, tokenizer: Any) -> LLM:
    return LLM(lm, tokenizer, num_blocks=128, max_num_batched_tokens=64)


def stock(lm: Any, tokenizer: Any, text: str, new: int = 24) -> list[int]:
    batch = tokenizer(text, return_tensors="pt")
    out = lm.generate(**batch, do_sample=False, max_new_tokens=new)
    return out[0, batch["input_ids"].shape[1] :].tolist()


def test_a_batch_of_texts_equals_stock_row_by_row(llm: LLM, lm: Any, tokenizer: Any) -> None:
    outputs = llm.generate(TEXTS, GREEDY)
    for text, output in zip(TEXTS, outputs, strict=True):
        want = stock(lm, tokenizer, text)
        assert output.outputs[0].token_ids == want
        assert output.outputs[0].text == tokenizer.decode(want, skip_special_tokens=True)
        assert output.prompt == text and output.finished
    llm.core.manager.check_invariants()
    assert llm.core.manager.stats().owned_blocks == 0


def test_a_stop_text_across_tokens_ends_the_output_and_is_never_shown(llm: LLM, lm: Any, tokenizer: Any) -> None:
    text = TEXTS[1]
    whole = tokenizer.decode(stock(lm, tokenizer, text), skip_special_tokens=True)
    stop = whole[20:29]  # begins and ends inside words
    expected = whole[: whole.index(stop)]
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop, "never there"])
    seen = [(o.outputs[0].text, o.finished) for o in llm.stream(text, params)]
    assert seen[-1] == (expected, True)
    assert all(expected.startswith(shown) for shown, _ in seen)
    output = llm.generate(text, params)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (expected, "stop", stop)
    kept = SamplingParams(temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert llm.generate(text, kept)[0].outputs[0].text == expected + stop


def test_a_closed_stream_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream(TEXTS[0], SamplingParams(temperature=0, max_tokens=200))
    for _ in range(3):
        next(stream)
    assert llm.core.manager.stats().owned_blocks > 0
    stream.close()
    assert llm.core.manager.stats().owned_blocks == 0 and not llm.core.has_work


def test_a_chat_reuses_its_earlier_turns(llm: LLM) -> None:
    llm.reset_prefix_cache()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    first = llm.chat(messages, params)[0]
    assert "Paris" in first.outputs[0].text and first.outputs[0].finish_reason == "stop"
    assert first.outputs[0].stop_reason is None
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = llm.chat(messages, params)[0]
    assert second.num_cached_tokens >= len(first.prompt_token_ids)


def test_logprobs_are_those_of_a_fresh_forward(llm: LLM, lm: Any, tokenizer: Any) -> None:
    params = SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=6, logprobs=3)
    output = llm.generate(TEXTS[0], params)[0]
    ids = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
    with torch.no_grad():
        scores = lm(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert output.outputs[0].logprobs is not None
    total = 0.0
    for row, token, found in zip(scores, output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert set(row.topk(3).indices.tolist()) <= set(found) and len(found) <= 4
        assert found[token].rank == int((row > row[token]).sum()) + 1
        total += found[token].logprob
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("abc DEFGHIJ tail", ["DEFGHIJ"], "abc ", "DEFGHIJ"),
        ("wait.. no...", ["...", ".."], "wait", ".."),
        ("naïve — 日本語 🙂 end", ["🙂"], "naïve — 日本語 ", "🙂"),
        ("nothing here", ["xyz"], "nothing here", None),
    ],
)
def test_stop_texts_token_by_token(tokenizer: Any, text: str, stop: list[str], shown: str, stopped: str | None) -> None:
    decoder = Detokenizer(tokenizer, [], stop, include_stop=False, skip_special_tokens=True)
    found = None
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        found = decoder.push(token)
        assert shown.startswith(decoder.settled()) or found is None
        assert not any(s in decoder.settled() for s in stop)
        if found:
            break
    assert (decoder.text, found) == (shown, stopped)


@pytest.mark.parametrize("continued", [0, 1], ids=["dropped", "continued"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_prompt_that_ends_inside_a_character_is_no_part_of_the_output(
    tokenizer: Any, cut: int, continued: int
) -> None:
    ids = tokenizer("My favourite emoji is 🤗", add_special_tokens=False)["input_ids"]
    prompt, rest = ids[:-cut], ids[len(ids) - cut :][:continued]
    assert tokenizer.decode(prompt).endswith("\ufffd")
    decoder = Detokenizer(tokenizer, prompt, ["emoji"], include_stop=False, skip_special_tokens=True)
    tokens = rest + tokenizer(" hello there", add_special_tokens=False)["input_ids"]
    assert [decoder.push(token) for token in tokens] == [None] * len(tokens)
    assert decoder.text == tokenizer.decode(tokens) == "\ufffd" * continued + " hello there"


def test_an_unfinished_character_at_the_end_is_shown_as_decode_shows_it(tokenizer: Any) -> None:
    tokens = tokenizer("fine 🤗", add_special_tokens=False)["input_ids"][:-1]
    decoder = Detokenizer(tokenizer, [], [], include_stop=False, skip_special_tokens=True)
    for token in tokens:
        decoder.push(token)
    assert "\ufffd" not in decoder.text
    for _ in range(2):
        decoder.finish()
        assert decoder.text == tokenizer.decode(tokens)


@pytest.mark.parametrize(("stop", "shown"), [("fine ", ""), ("\ufffd", "fine "), ("e \ufffd", "fin"), ("x", None)])
def test_a_stop_text_in_what_was_held_back_is_found_at_the_end(tokenizer: Any, stop: str, shown: str | None) -> None:
    tokens = tokenizer("fine 🤗", add_special_tokens=False)["input_ids"][:-1]
    for may_stop in (True, False):
        decoder = Detokenizer(tokenizer, [], [stop], include_stop=False, skip_special_tokens=True)
        assert [decoder.push(token) for token in tokens] == [None] * len(tokens)
        found = decoder.finish(may_stop)
        assert (found, decoder.finish()) == (stop if may_stop and shown is not None else None, None)
        assert decoder.text == (tokenizer.decode(tokens) if found is None else shown)


def test_nothing_follows_a_stop_text(tokenizer: Any) -> None:
    decoder = Detokenizer(tokenizer, [], ["emo"], include_stop=False, skip_special_tokens=True)
    found = [decoder.push(token) for token in tokenizer("My emoji", add_special_tokens=False)["input_ids"]]
    decoder.finish()
    assert "emo" in found and decoder.text == "My "


def test_a_wrong_byte_does_not_take_back_the_character_before_it() -> None:
    """A decoder with byte fallback reads a run of bytes as wrong from its start when its end is."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁x": 257}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    character = [byte + 1 for byte in "中".encode()]
    decoder = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), [], [], False, True)
    for token in [*character, character[0], 257]:
        decoder.push(token)
    assert decoder.text == "中\ufffd x"
    decoder.push(character[0])
    decoder.finish()
    assert decoder.text == "中\ufffd x\ufffd"


def test_what_needs_a_tokenizer_says_so(lm: Any) -> None:
    bare = LLM(lm, num_blocks=32)
    with pytest.raises(hf_paged.ConfigError, match="tokenizer"):
        bare.generate("text")
    with pytest.raises(hf_paged.ConfigError, match="tokenizer"):
        bare.generate([1, 2, 3], SamplingParams(stop="x"))
    assert bare.generate([1, 2, 3])[0].outputs[0].text == ""


def test_a_stop_text_before_min_tokens_is_text_like_any_other(llm: LLM, lm: Any, tokenizer: Any) -> None:
    whole = stock(lm, tokenizer, TEXTS[1], 24)
    early = tokenizer.decode(whole[:3], skip_special_tokens=True).strip()[-3:]
    params = SamplingParams(temperature=0, max_tokens=24, stop=early)
    assert len(llm.generate(TEXTS[1], params)[0].outputs[0].token_ids) < 10
    patient = SamplingParams(temperature=0, max_tokens=24, min_tokens=24, stop=early)
    output = llm.generate(TEXTS[1], patient)[0].outputs[0]
    text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert len(output.token_ids) == 24 and output.text == (text[: text.rindex(early)] if output.stop_reason else text)
