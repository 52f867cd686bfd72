"""A live ``transformers serve --continuous-batching`` in a process of its own, answering through hf_paged's engine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import hf_paged
from hf_paged import compat

openai = pytest.importorskip("openai", reason="the server and its client need the `clients` extra")
pytest.importorskip("fastapi", reason="the server needs the `serve` extra")
pytest.importorskip("uvicorn", reason="the server needs the `serve` extra")

pytestmark = pytest.mark.model

#: serves, and answers every line on standard input with the blocks that requests hold
SERVER = """
import sys, threading
import hf_paged
hf_paged.register(continuous_batching=True, block_size=16, num_blocks=256)
from hf_paged.generation.batching_manager import managers

def watch():
    for _ in sys.stdin:
        print("blocks", *(m.batch_processor.manager.stats().owned_blocks for m in managers()), flush=True)

threading.Thread(target=watch, daemon=True).start()
from transformers.cli.transformers import main
main()
"""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = "1, 2, 3, 4,"


class Server:
    """The process, and a client of it."""

    def __init__(self, model: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-c", SERVER, "serve", model, "--continuous-batching", "--port", str(port)]
        self.model = model
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--dtype", "float32"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        until = time.monotonic() + 120
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < until, "".join(self.log)
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return bool(self.client.get("/../health", cast_to=object))
        except openai.APIConnectionError:
            return False

    def chat(self, **options: Any) -> Any:
        return self.client.chat.completions.create(model=self.model, messages=QUESTION, **{"max_tokens": 12, **options})

    def complete(self, prompt: str = COUNT, **options: Any) -> Any:
        return self.client.completions.create(model=self.model, prompt=prompt, **{"max_tokens": 12, **options})

    def owned_blocks(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        lines = iter(self.process.stdout.readline, "")
        return int(next(line for line in lines if line.startswith("blocks ")).split()[1])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("gguf", reason="the demo model needs the `demo` extra")
    from hf_paged.model.demo_model import demo_path

    found = Server(str(demo_path()))
    yield found
    found.close()


def streamed(chunks: Any) -> tuple[str, str]:
    """The text of a stream of completions, and why it ended."""
    listed = list(chunks)
    return "".join(c.choices[0].text for c in listed), listed[-1].choices[0].finish_reason


def test_chat_completion_stream_and_stop(server: Server, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    batch = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**batch, do_sample=False, max_new_tokens=12)[0, batch["input_ids"].shape[1] :]
    want = tokenizer.decode(out, skip_special_tokens=True)
    answer = server.chat(temperature=0)
    assert answer.choices[0].message.content == want
    assert answer.usage.completion_tokens == len(out) and answer.choices[0].finish_reason == "stop"

    chunks = list(server.chat(temperature=0, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want
    assert chunks[-1].usage.completion_tokens == len(out)

    text = server.complete(temperature=0).choices[0].text
    assert "7" in text
    assert streamed(server.complete(temperature=0, stream=True)) == (text, "length")
    answer = server.complete(temperature=0, stop=["7"])
    cut, cut_tokens = answer.choices[0], answer.usage.completion_tokens
    assert (cut.text, cut.finish_reason) == (text[: text.index("7")], "stop")
    assert streamed(server.complete(temperature=0, stop=["7"], stream=True)) == (cut.text, "stop")
    exact = server.complete(temperature=0, stop=["7"], max_tokens=cut_tokens)
    assert exact.choices[0].finish_reason == "stop", "its last token is the last that was allowed, too"
    assert server.complete(temperature=0, max_tokens=3).usage.completion_tokens == 3

    with pytest.raises(openai.BadRequestError):
        server.complete(n=2)
    assert server.owned_blocks() == 0
    # the patched server's own requests, and not stock's, were what answered
    assert not any("Traceback" in line for line in server.log), "".join(server.log)


@pytest.mark.slow
def test_requests_at_once_have_options_of_their_own(server: Server) -> None:
    """Stock gives every request the sampling options of the first one."""
    text = server.complete(temperature=0).choices[0].text
    calls: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.7, "seed": 3},
        {"temperature": 1.7, "seed": 3},
        {"temperature": 1.7, "seed": 4},
        {"temperature": 0, "max_tokens": 5},
        {"temperature": 0, "stop": ["7"]},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 0, "logit_bias": {"0": -100}},
        {"temperature": 0, "frequency_penalty": 0.0},
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        found = [answer.choices[0].text for answer in pool.map(lambda options: server.complete(**options), calls)]
    assert found[0] == found[6] == found[9] == text
    assert found[1] == found[2] != text and found[3] != found[1]
    assert text.startswith(found[4]) and len(found[4]) < len(text)
    assert found[5] == text[: text.index("7")]
    assert found[7] != text
    assert server.owned_blocks() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prompt": "word " * 9000}, "max_model_len"),
        ({"best_of": 3}, "best_of=3"),
        ({"echo": True}, "echo"),
        ({"temperature": -1.0}, "temperature"),
        ({"presence_penalty": 5.0}, "presence_penalty"),
        ({"extra_body": {"generation_config": '{"num_beams": 3, "num_return_sequences": 3}'}}, "3 completions"),
        ({"extra_body": {"generation_config": '{"guidance_scale": 2.0}'}}, "guidance_scale"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_request_is_refused_and_the_others_do_not_notice(
    server: Server, options: dict[str, Any], text: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(server.complete, temperature=0)
        with pytest.raises(openai.BadRequestError) as caught:
            server.complete(**options)
        assert text in caught.value.response.json()["detail"]
        assert "7" in good.result().choices[0].text


@pytest.mark.slow
def test_a_bad_stream_ends_with_its_error(server: Server) -> None:
    with pytest.raises(openai.APIError) as caught:
        list(server.complete("word " * 9000, stream=True))
    assert "max_model_len" in str(caught.value.body)


@pytest.mark.slow
def test_a_stream_that_its_client_leaves_gives_its_blocks_back(server: Server) -> None:
    stream = server.complete("Once upon a time", temperature=0, max_tokens=2000, stream=True,
                             extra_body={"generation_config": '{"eos_token_id": -1}'})  # fmt: skip
    chunks = iter(stream)
    for _ in range(3):
        next(chunks)
    assert server.owned_blocks() != 0
    stream.close()
    until = time.monotonic() + 20
    while server.owned_blocks() != 0:
        assert time.monotonic() < until, "the request goes on, though nobody reads it"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_responses_endpoint_answers_too(server: Server) -> None:
    answer = server.client.responses.create(
        model=server.model, input="What is the capital of France?", stream=False, temperature=0, max_output_tokens=12
    )
    assert "Paris" in answer.output_text
    with pytest.raises(openai.BadRequestError):
        server.client.responses.create(model=server.model, input="Hi", stream=False, previous_response_id="resp_1")


#: as Qwen's: the answer ends with a special token
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"\s*(?:<\|im_end\|>)", "content": "text"}},
}


class _OneModel:
    """The part of the server that finds models, with one that is loaded already."""

    force_model = None

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.found = model, tokenizer

    def process_model_name(self, name: str) -> str:
        return name

    def load_model_and_processor(self, name: str, **options: Any) -> tuple[Any, Any]:
        return self.found

    def get_model_modality(self, model: Any, processor: Any = None) -> Any:
        return compat.serving_utils().Modality.LLM


async def _answer(handler: Any, **options: Any) -> str:
    """The text of an answer, and of the same streamed, equal but for the space around it."""
    body = {"model": "one", "messages": QUESTION, "temperature": 0, "max_tokens": 12, **options}
    message = json.loads((await handler.handle_request(dict(body), "whole")).body)["choices"][0]["message"]
    stream = await handler.handle_request({**body, "stream": True}, "stream")
    text = ""
    async for part in stream.body_iterator:
        for line in filter(None, part.splitlines()):
            text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    assert text.strip() == message["content"].strip()
    return text.strip()


@pytest.mark.versions
def test_a_models_response_template_reads_the_answer_up_to_a_stop_text(
    smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.cli.serving.chat_completion import ChatCompletionHandler

    monkeypatch.setattr(smollm2[1], "response_template", TEMPLATE, raising=False)
    hf_paged.register(continuous_batching=True, num_blocks=64)
    state = compat.serving_utils().GenerationState(continuous_batching=True)
    handler = ChatCompletionHandler(_OneModel(*smollm2), state)

    async def work() -> list[str]:
        return [await _answer(handler), await _answer(handler, stop=["Par"]), await _answer(handler, stop=["ris is"])]

    try:
        whole, cut, far = asyncio.run(asyncio.wait_for(work(), 120))
    finally:
        state.shutdown()
        hf_paged.unregister()
    assert whole == far == "The capital of France is Paris."
    assert cut == "The capital of France is"
