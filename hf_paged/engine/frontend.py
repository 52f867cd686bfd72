"""Between callers and the engine's core: prompts become requests, tokens become text, and what belongs to one prompt is
put together in one RequestOutput. The core below knows token ids only; ``LLM`` and ``EngineLoop`` are its faces.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hf_paged.compat import GenerationConfig
from hf_paged.engine.beams import BeamGroup
from hf_paged.engine.core import EngineCore
from hf_paged.engine.detokenizer import Detokenizer, backend_of
from hf_paged.engine.outputs import CompletionOutput, Explanation, RequestMetrics, RequestOutput
from hf_paged.engine.request import FinishReason, Request
from hf_paged.engine.stepper import Event, PromptScores
from hf_paged.errors import ConfigError, InvalidRequestError
from hf_paged.sampling.generation_config import sampling_params_from
from hf_paged.sampling.logprobs import Logprob
from hf_paged.sampling.processors import num_scored_tokens
from hf_paged.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | GenerationConfig

#: requests that are remembered to be explained
EXPLAINED = 1000


@dataclass
class Part:
    """One completion on its way. ``lead`` is what its text begins with (the prompt's, with ``echo``)."""

    request: Request
    output: CompletionOutput
    decoder: Detokenizer | None
    lead: str = ""


@dataclass(eq=False)
class Group:
    """A prompt and its completions, by request id; ``open`` of them have not ended."""

    output: RequestOutput
    params: SamplingParams
    parts: dict[str, Part] = field(default_factory=dict)
    beams: BeamGroup | None = None
    open: int = 0
    #: log-probabilities of the prompt's tokens so far
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])


def is_conversation(prompt: Any) -> bool:
    """Whether it is a list of chat messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def _check_names(priority: Any, salt: Any, request_id: Any) -> None:
    """What callers may pass on from their own clients, and what would only fail much later."""
    if not isinstance(priority, int | float) or priority != priority:  # NaN is not in any order
        raise InvalidRequestError(f"priority={priority!r} must be a number; lower is more urgent")
    for name, value in (("salt", salt), ("request_id", request_id)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name}={value!r} must be a text or None")


def snapshot(output: RequestOutput) -> RequestOutput:
    """A copy of an output that does not change when more tokens come."""
    parts = [
        replace(part, token_ids=list(part.token_ids), logprobs=None if part.logprobs is None else list(part.logprobs))
        for part in output.outputs
    ]
    scores = None if output.prompt_logprobs is None else list(output.prompt_logprobs)
    return replace(output, outputs=parts, prompt_logprobs=scores, metrics=replace(output.metrics))


class Frontend:
    """Requests of one engine.

    Args:
        core: the engine.
        tokenizer: a fast transformers tokenizer, or None: then prompts are token ids, and outputs have no text.
    """

    def __init__(self, core: EngineCore, tokenizer: Any) -> None:
        self.core, self.tokenizer = core, tokenizer
        self.groups: dict[str, Group] = {}
        self._group_of: dict[str, Group] = {}
        #: requests that are over, the latest last
        self._ended: dict[str, list[Request]] = {}
        self._numbers = itertools.count()

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(
        self, prompt: Prompt, params: Params, priority: int = 0, salt: str | None = None, request_id: str | None = None
    ) -> Group:
        """Queue a prompt; none of its completions stays behind when one is refused.

        Raises ConfigError, InvalidRequestError or OutOfBlocksError.
        """
        if not isinstance(params, SamplingParams | GenerationConfig):
            raise ConfigError(f"SamplingParams are wanted, not {type(params).__name__}")
        _check_names(priority, salt, request_id)
        text, ids = self._tokenize(prompt, isinstance(params, GenerationConfig) or params.add_special_tokens)
        if isinstance(params, GenerationConfig):
            params = sampling_params_from(params, self.core.model, len(ids))
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        params = self._in_numbers(params, len(ids))
        if params.stop:
            self.need_tokenizer("a stop text")
        name = str(next(self._numbers)) if request_id is None else request_id
        if name in self.groups:
            raise InvalidRequestError(f"request id {name!r} is in use; ids must be unique while they run")
        group = Group(RequestOutput(name, text, ids, []), params)
        group.output.metrics = RequestMetrics(arrival_time=time.monotonic())
        if params.prompt_logprobs is not None:
            group.output.prompt_logprobs = group.prompt_logprobs
        seed = self.core.new_seed() if params.seed is None else params.seed
        try:
            if params.num_beams > 1:
                group.beams = self.core.add_beams(name, ids, params, self.tokenizer, priority=priority, salt=salt)
                for request in group.beams.requests:
                    self._open(group, request)
            else:
                requests: list[Request] = []
                for row in range(params.best_of or params.n):
                    parent = requests[0] if requests else None
                    request = self.core.add(
                        f"{name}-{row}", ids, params, row=row, seed=seed, priority=priority, salt=salt, parent=parent
                    )
                    requests.append(request)
                    self._open(group, request)
        except Exception:  # whatever it is: none of its completions may stay behind
            self.drop(group)
            raise
        if group.beams is None and len(group.parts) == params.n:
            group.output.outputs = [part.output for part in group.parts.values()]
        self.groups[name] = group
        return group

    def _in_numbers(self, params: SamplingParams, length: int) -> SamplingParams:
        """``params`` of a request with a prompt of ``length`` tokens, with numbers for "all there is"."""
        numbers: dict[str, Any] = {}
        if params.max_tokens is None:
            longest = self.core.scheduler.max_model_len
            if longest is None:
                raise InvalidRequestError(
                    "max_tokens=None goes on to max_model_len, and neither the engine nor the model's config has one: "
                    "give max_tokens, or LLM(..., max_model_len=...)"
                )
            numbers["max_tokens"] = room = max(1, longest - length)  # a longer prompt is refused by the scheduler
            if params.min_tokens > room:
                raise InvalidRequestError(
                    f"min_tokens={params.min_tokens} is more than max_model_len={longest} leaves room for after a "
                    f"prompt of {length} tokens"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) == -1:
                numbers[name] = num_scored_tokens(self.core.model)
        return replace(params, **numbers) if numbers else params

    def _open(self, group: Group, request: Request) -> None:
        params, ids = group.params, group.output.prompt_token_ids
        part = Part(request, CompletionOutput(len(group.parts), "", []), None)
        if self.tokenizer is not None:
            part.decoder = Detokenizer(
                self.tokenizer, ids, tuple(params.stop), params.include_stop_str_in_output, params.skip_special_tokens
            )
        if params.echo:
            part.output.token_ids.extend(ids)
            if self.tokenizer is not None:
                given = group.output.prompt
                skip = params.skip_special_tokens
                part.lead = given if given is not None else self.tokenizer.decode(ids, skip_special_tokens=skip)
                part.output.text = part.lead
        if params.logprobs is not None:
            part.output.logprobs = [None] if params.echo else []
        if params.logprobs is not None or params.best_of is not None:
            part.output.cumulative_logprob = 0.0
        group.parts[request.request_id] = part
        self._group_of[request.request_id] = group
        group.open += 1

    def abort(self, group: Group) -> None:
        """End what still runs of a group, as aborted."""
        for name, part in group.parts.items():
            if name in self._group_of:
                self.core.abort(name)
                self._end(part.request)

    def drop(self, group: Group) -> None:
        """Forget a group; what still runs of it is ended."""
        for name in group.parts:
            if self._group_of.pop(name, None) is not None:
                self.core.abort(name)
        name = group.output.request_id
        if self.groups.pop(name, None) is not None:
            self._ended.pop(name, None)  # an id that is used again moves to the end
            self._ended[name] = [part.request for part in group.parts.values()]
            if len(self._ended) > EXPLAINED:
                del self._ended[next(iter(self._ended))]

    def explain(self, request_id: str) -> list[Explanation]:
        """What became of each completion of a request, and why; the last EXPLAINED requests are remembered.

        Raises InvalidRequestError for an id that is not known (any more).
        """
        group = self.groups.get(request_id)
        found = self._ended.get(request_id) if group is None else [part.request for part in group.parts.values()]
        if found is None:
            raise InvalidRequestError(
                f"request id {request_id!r} is not known; of requests that ended, the last {EXPLAINED} are remembered"
            )
        return [self.core.explain(request) for request in found]

    # -- prompts -------------------------------------------------------------------------------------------------

    def templated(self, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation under the tokenizer's chat template."""
        self.need_tokenizer("chat()")
        text = self.tokenizer.apply_chat_template(
            list(conversation), tokenize=False, **{"add_generation_prompt": True, **options}
        )
        # the template writes special tokens itself
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def need_tokenizer(self, what: str) -> None:
        """Raise ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(f"{what} needs a tokenizer: LLM(model, tokenizer)")

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if given is None:
                raise InvalidRequestError(f"a prompt with keys {sorted(prompt)}: give prompt_token_ids or prompt")
            prompt = given
        if is_conversation(prompt):
            return None, self.templated(cast("Any", prompt), {})
        if isinstance(prompt, str):
            self.need_tokenizer("a text prompt")
            ids = self.tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
            if not ids and self.tokenizer.bos_token_id is not None:
                ids = [self.tokenizer.bos_token_id]
            return prompt, list(ids)
        if not hasattr(prompt, "__iter__"):
            raise InvalidRequestError(f"a prompt must be a text or a flat list of token ids, not {prompt!r}")
        ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise InvalidRequestError("a prompt must be a text or a flat list of token ids")
        return None, ids

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, drain: bool = False) -> list[Group]:
        """One step of the engine, or with ``drain`` the end of one under way; returns the groups it brought something
        for. A fault of the engine or the model ends every request and is raised."""
        try:
            events = self.core.drain() if drain else self.core.step()
        except Exception as error:  # whatever it is: nothing that runs can go on
            for request in self.core.fail_all(error):
                self._end(request)
            raise
        now = time.monotonic()
        touched: dict[Group, None] = {}  # a set that keeps its order
        for event in events:
            group = self._group_of.get(event.request.request_id)
            if group is not None:
                self._take(group, event, now)
                touched[group] = None
        return list(touched)

    def _take(self, group: Group, event: Event, now: float) -> None:
        request, sampled = event.request, event.sampled
        part, metrics = group.parts[request.request_id], group.output.metrics
        metrics.first_scheduled_time = metrics.first_scheduled_time or request.scheduled_at
        if event.prompt is not None:
            self._take_prompt(group, event.prompt)
        if sampled is not None:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            output = part.output
            output.token_ids.append(sampled.token)
            if sampled.logprobs is not None:
                if output.logprobs is not None:
                    output.logprobs.append(self._named(sampled.logprobs))
                if output.cumulative_logprob is not None:
                    output.cumulative_logprob += sampled.logprobs[sampled.token].logprob
            self._take_text(request, part, sampled.token)
        if request.finished and event.prompt is None:  # the event of its end is still to come
            self._end(request)

    def _take_prompt(self, group: Group, scores: PromptScores) -> None:
        """Prompt scores come in order, some again after a preemption."""
        known, params = group.prompt_logprobs, group.params
        for position, logprobs in enumerate(scores.logprobs, scores.start):
            if position == len(known):
                known.append(self._named(logprobs))
                if params.echo and params.logprobs is not None:
                    for part in group.parts.values():
                        assert part.output.logprobs is not None
                        part.output.logprobs.insert(position, known[position])

    def _named(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        """With the text of each token, where there is a tokenizer."""
        if self.tokenizer is None:
            return logprobs
        decode = backend_of(self.tokenizer).decode  # as the text is decoded, and five times as fast as the tokenizer's
        return {i: Logprob(found.logprob, found.rank, decode([i], False)) for i, found in logprobs.items()}

    def _take_text(self, request: Request, part: Part, token: int) -> None:
        if part.decoder is None:
            return
        ended_by_token = request.finish_reason is FinishReason.STOP and token in request.stop_token_ids
        if not ended_by_token or not self._is_special(token):
            stop = part.decoder.push(token, may_stop=request.num_output >= request.min_tokens)
            if stop is not None:
                self.core.finish(request, FinishReason.STOP, stop)
        part.output.text = part.lead + (part.decoder.text if request.finished else part.decoder.settled())

    def _is_special(self, token: int) -> bool:
        return token in self.tokenizer.all_special_ids

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, request: Request) -> None:
        group = self._group_of.pop(request.request_id, None)
        if group is None:
            return
        part = group.parts[request.request_id]
        if part.decoder is not None:
            if not isinstance(request.stop_reason, str):  # else the text ends where the stop text was found
                by_itself = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                stop = part.decoder.finish(may_stop=by_itself and request.num_output >= request.min_tokens)
                if stop is not None:
                    self.core.finish(request, FinishReason.STOP, stop)
            part.output.text = part.lead + part.decoder.text
        assert request.finish_reason is not None
        part.output.finish_reason = request.finish_reason.value
        stop_reason = request.stop_reason
        part.output.stop_reason = None if stop_reason in self.core.eos_token_ids else stop_reason
        group.output.error = group.output.error or request.error
        group.output.num_cached_tokens = max(group.output.num_cached_tokens, request.num_cached, 0)
        group.output.metrics.num_preemptions += len(request.preemptions)
        group.open -= 1
        if not group.open:
            self._choose(group)
            group.output.finished = True
            group.output.metrics.finished_time = time.monotonic()

    def _choose(self, group: Group) -> None:
        """The outputs of a finished group: all, the likeliest of ``best_of``, or what a beam search found."""
        found = [part.output for part in group.parts.values()]
        if group.beams is not None and found[0].finish_reason == FinishReason.STOP.value:
            found = self._hypotheses(group, group.beams)
        elif group.beams is None and len(found) > group.params.n:
            found.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        group.output.outputs = found[: group.params.n]
        for index, output in enumerate(group.output.outputs):
            output.index = index

    def _hypotheses(self, group: Group, beams: BeamGroup) -> list[CompletionOutput]:
        outputs = []
        for part, found in zip(group.parts.values(), beams.search.best(group.params.n), strict=False):
            output, request = part.output, part.request
            output.cumulative_logprob = found.cumulative_logprob
            ended = bool(found.tokens) and found.tokens[-1] in request.stop_token_ids
            stop = None
            for token in found.tokens:
                output.token_ids.append(token)
                if part.decoder is not None and stop is None:
                    if token in request.stop_token_ids and self._is_special(token):
                        continue
                    stop = part.decoder.push(token)
            if part.decoder is not None:
                if stop is None:
                    stop = part.decoder.finish()
                output.text = part.lead + part.decoder.text
            full = len(found.tokens) >= beams.search.max_new_tokens
            reason = FinishReason.LENGTH if full and not ended and stop is None else FinishReason.STOP
            output.finish_reason = reason.value
            last = found.tokens[-1] if ended and found.tokens[-1] not in self.core.eos_token_ids else None
            output.stop_reason = stop if stop is not None else last
            outputs.append(output)
        return outputs
