"""``LLM``: continuous batching for a list of prompts, in the caller's thread.

It owns text: tokenizing prompts, decoding outputs, stop texts, and putting the completions of a prompt together. The
engine below it knows token ids only.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_paged.compat import GenerationConfig
from hf_paged.config import EngineConfig
from hf_paged.engine.core import EngineCore
from hf_paged.engine.detokenizer import Detokenizer
from hf_paged.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from hf_paged.engine.request import FinishReason, Request
from hf_paged.errors import ConfigError, InvalidRequestError
from hf_paged.sampling.generation_config import sampling_params_from
from hf_paged.sampling.sampler import Logprob
from hf_paged.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | GenerationConfig


@dataclass
class _Part:
    """One completion on its way."""

    request: Request
    output: CompletionOutput
    decoder: Detokenizer | None


@dataclass(eq=False)
class _Group:
    """A prompt and its completions."""

    output: RequestOutput
    parts: dict[str, _Part] = field(default_factory=dict)
    open: int = 0


class LLM:
    """A model under continuous batching over paged, shared KV blocks.

    Args:
        model: a loaded causal LM (it stays yours: its mode, config and attention are not touched), or an id, a folder
            or ``"demo"``.
        tokenizer: needed for text; found by itself where the model is named. Prompts of token ids need none.
        config: an EngineConfig; ``options`` are its fields as keywords.

    Each request gets what ``generate()`` gives for its row alone: with greedy search the same tokens in fp32; with
    sampling the same distribution, reproducible for a seed whatever else is in the batch.

    Raises UnsupportedError for models the engine cannot run, and ConfigError for a bad option.
    """

    def __init__(self, model: Any, tokenizer: Any = None, config: EngineConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise ConfigError("give LLM() either config or keywords, not both")
        self.config = config if config is not None else EngineConfig.from_options(options)
        if not hasattr(model, "forward"):
            if not isinstance(model, str | os.PathLike):
                raise ConfigError(f"a model, its id or its folder is wanted, not {type(model).__name__}")
            from hf_paged.model.loader import load

            model, found = load(model, self.config.dtype)
            tokenizer = tokenizer if tokenizer is not None else found
        elif self.config.dtype is not None:
            raise ConfigError(f"dtype={self.config.dtype!r} is for loading; this model is loaded: use model.to(dtype)")
        if tokenizer is not None and not hasattr(tokenizer, "_tokenizer"):
            raise ConfigError(f"a fast transformers tokenizer is wanted, not {type(tokenizer).__name__}")
        self.model, self.tokenizer = model, tokenizer
        self.core = EngineCore(model, self.config)
        self._numbers = itertools.count()
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}

    # -- calling it ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] = 0,
        salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one RequestOutput for each, in order.

        Args:
            prompts: texts, lists of token ids, or ``{"prompt_token_ids": [...]}`` / ``{"prompt": "..."}``.
            sampling_params: SamplingParams, or a transformers GenerationConfig, which means what it means for
                ``generate()``; one for all, or one for each. Without any: greedy, 16 tokens.
            use_tqdm: show a progress bar.
            priority: for policy "priority": lower is more urgent.
            salt: prefixes are shared only among requests with the same one.

        A request that goes wrong on the way has ``error`` set, and the others finish. Raises InvalidRequestError or
        OutOfBlocksError, before anything runs, for one that can never run.
        """
        listed = _listed(prompts)
        params = _one_for_each("sampling_params", sampling_params or SamplingParams(temperature=0), listed)
        urgencies = _one_for_each("priority", priority, listed)
        groups: list[_Group] = []
        try:
            for prompt, own, urgency in zip(listed, params, urgencies, strict=True):
                groups.append(self._add(prompt, own, urgency, salt))
        except Exception:  # whatever it is: none of this call's requests may stay behind
            for group in groups:
                self._drop(group)
            raise
        self._run(groups, use_tqdm)
        return [group.output for group in groups]

    def stream(self, prompt: Prompt, sampling_params: Params | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt and yield what there is after every step that added to it; the last one is finished.

        Closing the iterator ends the request. Text that a stop text might still take back is not shown.
        """
        params = sampling_params or SamplingParams(temperature=0)
        group = self._add(prompt, params, 0, None)
        try:
            while group.open:
                touched = self._step()
                if group in touched:
                    yield group.output
        finally:
            self._drop(group)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Complete conversations; ``template_options`` go to the tokenizer's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        prompts = [self._templated(conversation, template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix."""
        self.core.manager.clear()

    def weights_changed(self) -> None:
        """Say that the weights changed in a way that cannot be seen from outside; prefixes are forgotten."""
        self.core.weights_changed()

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler and the cache."""
        scheduler, cache = self.core.scheduler.stats(), self.core.manager.stats()
        return {
            **{name: getattr(scheduler, name) for name in scheduler.__slots__},
            **{name: getattr(cache, name) for name in cache.__slots__},
        }

    # -- inside ----------------------------------------------------------------------------------------------------

    def _add(
        self, prompt: Prompt, params: Params, priority: int, salt: str | None, request_id: str | None = None
    ) -> _Group:
        if not isinstance(params, SamplingParams | GenerationConfig):
            raise ConfigError(f"SamplingParams are wanted, not {type(params).__name__}")
        text, ids = self._tokenize(prompt)
        if isinstance(params, GenerationConfig):
            params = sampling_params_from(params, self.model, len(ids))
        if params.stop:
            self._need_tokenizer("a stop text")
        name = str(next(self._numbers)) if request_id is None else request_id
        if name in self._groups:
            raise InvalidRequestError(f"request id {name!r} is in use; ids must be unique while they run")
        group = _Group(RequestOutput(name, text, ids, []))
        group.output.metrics = RequestMetrics(arrival_time=time.monotonic())
        seed = self.core.new_seed() if params.seed is None else params.seed
        first: Request | None = None
        try:
            for row in range(params.n):
                part = f"{name}-{row}"
                request = self.core.add(
                    part, ids, params, row=row, seed=seed, priority=priority, salt=salt, parent=first
                )
                first = first if first is not None else request
                decoder = None
                if self.tokenizer is not None:
                    decoder = Detokenizer(
                        self.tokenizer, ids, tuple(params.stop), params.include_stop_str_in_output,
                        params.skip_special_tokens,
                    )  # fmt: skip
                output = CompletionOutput(row, "", [])
                if params.logprobs is not None:
                    output.logprobs, output.cumulative_logprob = [], 0.0
                group.output.outputs.append(output)
                group.parts[part] = _Part(request, output, decoder)
                self._group_of[part] = group
                group.open += 1
        except Exception:  # whatever it is: none of its completions may stay behind
            self._drop(group)
            raise
        self._groups[name] = group
        return group

    def _templated(self, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        self._need_tokenizer("chat()")
        text = self.tokenizer.apply_chat_template(
            list(conversation), tokenize=False, **{"add_generation_prompt": True, **options}
        )
        # the template writes special tokens itself
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if given is None:
                raise InvalidRequestError(f"a prompt with keys {sorted(prompt)}: give prompt_token_ids or prompt")
            prompt = given
        if isinstance(prompt, str):
            self._need_tokenizer("a text prompt")
            ids = self.tokenizer(prompt)["input_ids"]
            if not ids and self.tokenizer.bos_token_id is not None:
                ids = [self.tokenizer.bos_token_id]
            return prompt, list(ids)
        if not hasattr(prompt, "__iter__"):
            raise InvalidRequestError(f"a prompt must be a text or a flat list of token ids, not {prompt!r}")
        ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise InvalidRequestError("a prompt must be a text or a flat list of token ids")
        return None, ids

    def _need_tokenizer(self, what: str) -> None:
        if self.tokenizer is None:
            raise ConfigError(f"{what} needs a tokenizer: LLM(model, tokenizer)")

    def _run(self, groups: Sequence[_Group], use_tqdm: bool) -> None:
        bar = None
        if use_tqdm:
            from tqdm.auto import tqdm

            bar = tqdm(total=len(groups), desc="requests", unit="req")
        try:
            while any(group.open for group in groups):
                for group in self._step():
                    if bar is not None and not group.open:
                        bar.update()
        finally:
            if bar is not None:
                bar.close()
            for group in groups:
                self._drop(group)

    def _step(self, drain: bool = False) -> list[_Group]:
        """One step of the engine, or with ``drain`` the end of one under way; returns the groups it brought something
        for."""
        try:
            events = self.core.drain() if drain else self.core.step()
        except Exception as error:  # a fault of the engine or the model: nothing that runs can go on
            for request in self.core.fail_all(error):
                self._end(request)
            raise
        now = time.monotonic()
        touched: dict[_Group, None] = {}  # a set that keeps its order
        for event in events:
            request = event.request
            group = self._group_of.get(request.request_id)
            if group is None:
                continue
            part = group.parts[request.request_id]
            metrics = group.output.metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or request.scheduled_at
            if event.sampled is not None:
                if metrics.first_token_time is None:
                    metrics.first_token_time = now
                part.output.token_ids.append(event.sampled.token)
                if part.output.logprobs is not None and event.sampled.logprobs is not None:
                    part.output.logprobs.append(self._named(event.sampled.logprobs))
                    assert part.output.cumulative_logprob is not None
                    part.output.cumulative_logprob += event.sampled.logprobs[event.sampled.token].logprob
                self._take_text(request, part, event.sampled.token)
            if request.finished:
                self._end(request)
            touched[group] = None
        return list(touched)

    def _named(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        """With the text of each token, where there is a tokenizer."""
        if self.tokenizer is None:
            return logprobs
        return {i: replace(found, decoded_token=self.tokenizer.decode([i])) for i, found in logprobs.items()}

    def _take_text(self, request: Request, part: _Part, token: int) -> None:
        if part.decoder is None:
            return
        ended_by_token = request.finish_reason is FinishReason.STOP
        if not ended_by_token or not self._is_special(token):
            stop = part.decoder.push(token, may_stop=len(part.output.token_ids) >= request.min_tokens)
            if stop is not None:
                if not request.finished:
                    self.core.finish(request, FinishReason.STOP, stop)
                request.stop_reason, request.finish_reason = stop, FinishReason.STOP
        part.output.text = part.decoder.text if request.finished else part.decoder.settled()

    def _is_special(self, token: int) -> bool:
        return token in self.tokenizer.all_special_ids

    def _end(self, request: Request) -> None:
        group = self._group_of.pop(request.request_id, None)
        if group is None:
            return
        part = group.parts[request.request_id]
        assert request.finish_reason is not None
        part.output.finish_reason = request.finish_reason.value
        stop_reason = request.stop_reason
        part.output.stop_reason = None if stop_reason in self.core.eos_token_ids else stop_reason
        if part.decoder is not None:
            part.output.text = part.decoder.text
        group.output.error = group.output.error or request.error
        group.output.num_cached_tokens = max(group.output.num_cached_tokens, request.num_cached, 0)
        group.output.metrics.num_preemptions += len(request.preemptions)
        group.open -= 1
        if not group.open:
            group.output.finished = True
            group.output.metrics.finished_time = time.monotonic()

    def _abort(self, group: _Group) -> None:
        """End what still runs of a group, as aborted."""
        for name, part in group.parts.items():
            if name in self._group_of:
                self.core.abort(name)
                self._end(part.request)

    def _drop(self, group: _Group) -> None:
        """Forget a group; what still runs of it is ended."""
        for name in group.parts:
            if self._group_of.pop(name, None) is not None:
                self.core.abort(name)
        self._groups.pop(group.output.request_id, None)


def _listed(prompts: Any) -> list[Any]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping) or getattr(prompts, "ndim", 2) == 1:
        return [prompts]
    if not hasattr(prompts, "__iter__"):
        raise InvalidRequestError(f"prompts must be texts or lists of token ids, not {prompts!r}")
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _one_for_each(name: str, value: Any, prompts: Sequence[Any]) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ConfigError(f"{len(value)} {name} for {len(prompts)} prompts: give one for all or one for each")
    return list(value)
