"""The HTTP requests of ``transformers serve --continuous-batching``, each with the options it came with.

Stock's server builds a generation config for every request, but gives its batching only the first one's, and a length.
Here each request's own reaches the engine: temperature, top_p, seed, max_tokens, stop, presence and frequency penalty,
logit_bias, and whatever its ``generation_config`` holds. A field that would change the answer and that nobody honours
is refused with status 400. Used by ``register(continuous_batching=True)``; only requests whose manager is ours are
touched.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_paged.compat import GenerationConfig
from hf_paged.engine.async_llm import call_in
from hf_paged.engine.detokenizer import backend_of
from hf_paged.engine.loop import Submission, Tell
from hf_paged.engine.outputs import RequestOutput
from hf_paged.errors import EngineDeadError, HfPagedError, InternalError, InvalidRequestError, UnsupportedError
from hf_paged.generation.batching_manager import Manager
from hf_paged.sampling_params import SamplingParams

#: fields of OpenAI's APIs that change the answer, with the values that ask for nothing; the server knows no others
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "conversation": (),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "previous_response_id": (),
    "reasoning": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "web_search_options": (),
}


@dataclass(frozen=True)
class _Asked:
    """What an HTTP request asked for: the config made of it, its body, and the repetition penalty without it."""

    config: GenerationConfig
    body: Mapping[str, Any]
    repetition_penalty: float | None


#: of the HTTP request that the present task answers
_asked: contextvars.ContextVar[_Asked | None] = contextvars.ContextVar("hf_paged_asked", default=None)


def replacements(utils: Any) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Classes of the server's helpers, methods of theirs, and what makes the ones to replace them."""
    return [
        (utils.BaseHandler, "_build_generation_config", _wrap_build),
        (utils.CBGenerateManager, "generate_streaming", functools.partial(_wrap_streaming, utils=utils)),
        (utils.CBGenerateManager, "generate_non_streaming", functools.partial(_wrap_whole, utils=utils)),
    ]


def _wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _build_generation_config(
        self: Any, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        config: GenerationConfig = original(self, body, model_generation_config, use_cb=use_cb)
        if use_cb:
            # a field that is set decides whether to sample, as in OpenAI's API; without one the model's config does
            if body.get("temperature") is not None:
                config.do_sample = body["temperature"] != 0
            elif body.get("top_p") is not None and body["top_p"] < 1:
                config.do_sample = True
            if not config.do_sample:
                config.temperature = None
            config.use_cache = True  # stock's own batching wants it off
            _asked.set(_Asked(config, body, config.repetition_penalty))
        return config

    return _build_generation_config


def _wrap_streaming(original: Callable[..., Any], utils: Any) -> Callable[..., Any]:
    streamer_class = _streamer_class(utils)

    @functools.wraps(original)
    def generate_streaming(
        self: Any,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        if not isinstance(self._cb, Manager):
            return original(self, model, processor, inputs, gen_config, request_id, response_parser)
        self._check_alive(request_id)
        tokenizer = getattr(processor, "tokenizer", processor)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        streamer = streamer_class(self._cb, request_id, backend_of(tokenizer), loop, queue, response_parser)
        streamer.tokenizer = tokenizer

        def show(item: RequestOutput | BaseException) -> None:
            error = item if isinstance(item, BaseException) else item.error
            if isinstance(item, RequestOutput):
                streamer.put(item)
            if error is not None:
                # the server writes it between quotation marks
                queue.put_nowait(utils._StreamError(json.dumps(str(error))[1:-1]))
            elif isinstance(item, RequestOutput) and item.finished:
                _tell_reason(gen_config, item)
                streamer.end()

        _submit(
            utils, self._cb, tokenizer, inputs, gen_config, request_id, _in(loop, show),
            skip_special_tokens=response_parser is None,
        )  # fmt: skip
        return queue, streamer

    return generate_streaming


def _wrap_whole(original: Callable[..., Any], utils: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    async def generate_non_streaming(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        if not isinstance(self._cb, Manager):
            return await original(self, model, processor, inputs, gen_config, request_id)
        self._check_alive(request_id)
        tokenizer = getattr(processor, "tokenizer", processor)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RequestOutput] = loop.create_future()

        def keep(item: RequestOutput | BaseException) -> None:
            error = item if isinstance(item, BaseException) else item.error
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            elif isinstance(item, RequestOutput):
                answer.set_result(item)

        submission = _submit(
            utils, self._cb, tokenizer, inputs, gen_config, request_id, _in(loop, keep), every_step=False
        )
        try:
            output = await answer
        except HfPagedError as error:
            raise _http(utils, error) from error
        except asyncio.CancelledError:  # the client has gone
            self._cb.engine().forget(submission)
            raise
        _tell_reason(gen_config, output)
        part = output.outputs[0]
        ids = part.token_ids
        if isinstance(part.stop_reason, str) and utils.get_response_template(processor, model) is not None:
            ids = _ids_of(tokenizer, ids, part.text)
        return part.text, len(output.prompt_token_ids), ids

    return generate_non_streaming


def _submit(
    utils: Any, manager: Manager, tokenizer: Any, inputs: Any, config: Any, request_id: str, tell: Tell, **options: Any
) -> Submission:
    try:
        manager.use_tokenizer(tokenizer)
        params = _params(manager, config, len(inputs["input_ids"]))
        if params.n > 1:
            raise UnsupportedError(f"{params.n} completions of one prompt have no place in this server's answers")
        return manager.engine().submit(
            list(inputs["input_ids"]),
            dataclasses.replace(params, skip_special_tokens=options.pop("skip_special_tokens", True)),
            tell,
            request_id=request_id,
            salt=manager.salt,
            **options,
        )
    except (ValueError, EngineDeadError) as error:  # ours, or what transformers says about a value
        raise _http(utils, error) from error


def _params(manager: Manager, config: Any, prompt_length: int) -> SamplingParams:
    """What a request asked for, in the engine's words.

    Raises UnsupportedError for what cannot be honoured, InternalError for a config that was not made for this request.
    """
    asked = _asked.get()
    if asked is None or asked.config is not config:
        raise InternalError(
            "the generation config is not the one that was made for this HTTP request, whose options are lost with it: "
            "pass on what _build_generation_config(use_cb=True) returned, from the same task"
        )
    body, changes = asked.body, dict[str, Any]()
    for name, harmless in _NOT_HONOURED.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise UnsupportedError(f"{name}={body[name]!r} cannot be honoured here; leave it out")
    if body.get("frequency_penalty") is not None:
        # stock makes a repetition penalty of it, which is another thing
        config.repetition_penalty = asked.repetition_penalty
    for name in ("frequency_penalty", "presence_penalty", "seed"):
        if body.get(name) is not None:
            changes[name] = body[name]
    bias = body.get("logit_bias")
    if bias is not None and not isinstance(bias, Mapping):
        raise InvalidRequestError(f"logit_bias={bias!r} must be an object of token ids and numbers")
    if bias is not None and not config.sequence_bias:
        changes["logit_bias"] = {int(token): value for token, value in bias.items()}
    # an answer ends before its stop text here, unlike generate()'s
    return dataclasses.replace(manager.params_for(config, prompt_length), include_stop_str_in_output=False, **changes)


def _http(utils: Any, error: Exception) -> Exception:
    """What the server makes the right status of."""
    if isinstance(error, EngineDeadError):
        dead: Exception = utils.CBWorkerDeadError(str(error))
        return dead
    from fastapi import HTTPException

    return HTTPException(status_code=400, detail=str(error))


def _tell_reason(config: Any, output: RequestOutput) -> None:
    """The server says "length" where as many tokens came as ``config`` allows; let that be so exactly when it is."""
    part = output.outputs[0]
    config.max_new_tokens = len(part.token_ids) if part.finish_reason == "length" else None


def _in(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None]) -> Tell:
    """``function`` for the engine's thread to call, but run in ``loop``."""

    return functools.partial(call_in, loop, function)


def _ids_of(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """Token ids that read ``text``: as many of ``ids`` as do not go beyond it, and new ones for what is left."""
    for kept in range(len(ids), -1, -1):
        read = tokenizer.decode(ids[:kept], skip_special_tokens=True)
        if text.startswith(read):
            return [*ids[:kept], *tokenizer(text[len(read) :], add_special_tokens=False)["input_ids"]]
    return ids


def _streamer_class(utils: Any) -> Any:
    class Streamer(utils.CBStreamer):  # type: ignore[misc]
        """Stock's streamer, fed with text that ends before a stop text."""

        tokenizer: Any = None
        _shown = 0

        def put(self, output: RequestOutput) -> None:
            part = output.outputs[0]
            self.total_tokens = len(part.token_ids)
            text, self._shown = part.text[self._shown :], len(part.text)
            if self._parser is None:
                items = [text] if text else []
            else:
                if output.finished and part.finish_reason == "stop" and part.token_ids[-1] in self._ends:
                    text += self.tokenizer.decode(part.token_ids[-1:])  # a parser reads the end token, too
                items = utils.response_events_to_chunks(self._parser.feed(text)) if text else []
            for item in items:
                self._queue.put_nowait(item)

        @property
        def _ends(self) -> list[int]:
            special: list[int] = self.tokenizer.all_special_ids
            return special

    return Streamer
