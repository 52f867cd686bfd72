"""``LLM``: continuous batching for a list of prompts, in the caller's thread.

It owns the engine's parts and the model's loading; requests are the frontend's, steps the core's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hf_paged.config import EngineConfig
from hf_paged.engine.core import EngineCore
from hf_paged.engine.detokenizer import backend_of
from hf_paged.engine.frontend import Frontend, Group, Params, Prompt, is_conversation, snapshot
from hf_paged.engine.outputs import Explanation, RequestOutput
from hf_paged.engine.turns import Turns
from hf_paged.errors import ConfigError, InvalidRequestError
from hf_paged.sampling_params import SamplingParams


class LLM:
    """A model under continuous batching over paged, shared KV blocks.

    Args:
        model: a loaded causal LM (it stays yours: its mode, config and attention are not touched), or an id, a folder
            or ``"demo"``.
        tokenizer: needed for text; found by itself where the model is named. Prompts of token ids need none.
        config: an EngineConfig; ``options`` are its fields as keywords.

    Each request gets what ``generate()`` gives for its row alone: with greedy search the same tokens in fp32; with
    sampling the same distribution, reproducible for a seed whatever else is in the batch. Calls from several threads
    wait for each other; AsyncLLM runs any number at once. Weights may change between calls, and while one runs in
    another thread between :meth:`pause` and :meth:`resume`; while a stream is open, pause as well or say so with
    :meth:`weights_changed`.

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
        if tokenizer is not None:
            backend_of(tokenizer)  # raises where there is none
        self.model, self.tokenizer = model, tokenizer
        self.core = EngineCore(model, self.config)
        self.frontend = Frontend(self.core, tokenizer)
        #: one call at a time; who has it may have to wait for a turn, and who has a turn never waits for it
        self._calls = threading.RLock()
        self._turns = Turns()

    # -- calling it ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one RequestOutput for each, in order.

        Args:
            prompts: texts, lists of token ids, lists of chat messages, or ``{"prompt_token_ids": [...]}`` /
                ``{"prompt": "..."}``.
            sampling_params: SamplingParams, or a transformers GenerationConfig, which means what it means for
                ``generate()``; one for all, or one for each. Without any: greedy, 16 tokens.
            use_tqdm: show a progress bar.
            priority: for policy "priority": lower is more urgent.
            salt: prefixes are shared only among requests with the same one.

        A request that goes wrong on the way has ``error`` set, and the others finish. Raises InvalidRequestError or
        OutOfBlocksError, before anything runs, for one that can never run, and EnginePausedError in the thread that
        paused the engine.
        """
        listed = _listed(prompts)
        params = _one_for_each("sampling_params", _or_greedy(sampling_params), listed)
        urgencies = _one_for_each("priority", priority, listed)
        groups: list[Group] = []
        self._turns.check()  # the call that has the lock may be waiting for this thread
        with self._calls:
            with self._turns.step():
                try:
                    for prompt, own, urgency in zip(listed, params, urgencies, strict=True):
                        groups.append(self.frontend.add(prompt, own, urgency, salt))
                except Exception:  # whatever it is: none of this call's requests may stay behind
                    for group in groups:
                        self.frontend.drop(group)
                    raise
            self._run(groups, use_tqdm)
        return [group.output for group in groups]

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, *, priority: int = 0, salt: str | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt and yield what there is after every step that added to it; the last one is finished.

        Closing the iterator ends the request. Text that a stop text might still take back is not shown. Raises as
        :meth:`generate`.
        """
        with self._turn():
            group = self.frontend.add(prompt, _or_greedy(sampling_params), priority, salt)
        try:
            while group.open:
                with self._turn():
                    output = snapshot(group.output) if group in self.frontend.step() else None
                if output is not None:
                    yield output
                    if output.finished:
                        return
            yield snapshot(group.output)  # it ended while somebody else had a turn
        finally:
            with self._turns.between():
                self.frontend.drop(group)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Complete conversations; ``template_options`` go to the tokenizer's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        prompts = [self.frontend.templated(conversation, template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    # -- the engine as a whole -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop stepping, once the present step is done; requests stay where they are. Weights may change then.

        To be called between two calls, or in another thread while one runs. A call that runs waits, without using the
        processor, and goes on after :meth:`resume`; so does one that another thread makes meanwhile, and a line of the
        logger ``hf_paged`` says so. In the thread that paused, ``generate()``, ``stream()`` and ``chat()`` raise
        EnginePausedError instead of waiting for themselves; a stream that is open there ends by that. Pausing again is
        no error; of several threads that pause, each has to resume, or another one for it: the pause of a thread that
        ended stays (a line of the logger says that a call waits for it). A processor or criterion of a request, being
        part of a step, cannot pause.

        Raises what the present step raises; the engine is not paused then.
        """
        with self._turns.between():
            self.frontend.step(drain=True)
            self._turns.pause()

    def resume(self) -> None:
        """End this thread's pause, or in a thread that did not pause the latest one; without any it is no error.
        Requests that had begun are recomputed if the weights changed meanwhile, and nothing that was computed with
        other weights is used again; nor is anything if looking at the weights fails, and that is raised."""
        with self._turns.between():
            try:
                self.core.look_at_weights()
            finally:
                self._turns.resume()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix."""
        self.core.manager.clear()

    def weights_changed(self) -> None:
        """Say that the weights changed, in a way that cannot be seen from outside or while requests run; prefixes are
        forgotten, and what runs goes on from its tokens."""
        with self._turns.between():
            self.core.weights_changed()

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler and the cache, and the bytes that packed copies of weights take."""
        scheduler, cache = self.core.scheduler.stats(), self.core.manager.stats()
        return {
            **{name: getattr(scheduler, name) for name in scheduler.__slots__},
            **{name: getattr(cache, name) for name in cache.__slots__},
            "packed_bytes": self.core.runner.packed_bytes,
        }

    def explain(self, request_id: str) -> list[Explanation]:
        """What became of each completion of a request, and why: blocks, cached tokens and why not more, time in the
        queue, preemptions, and who gave way to whom. Requests that ended are remembered for a while.

        Raises InvalidRequestError for an id that is not known.
        """
        return self.frontend.explain(request_id)

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A turn for a step, when no other call runs and the engine is not paused."""
        self._turns.check()
        with self._calls, self._turns.step():
            yield

    def _run(self, groups: Sequence[Group], use_tqdm: bool) -> None:
        bar, own = None, set(groups)
        if use_tqdm:
            from tqdm.auto import tqdm

            bar = tqdm(total=len(groups), desc="requests", unit="req")
        try:
            while any(group.open for group in groups):
                with self._turns.step():
                    touched = self.frontend.step()
                if bar is not None:
                    bar.update(sum(group in own and not group.open for group in touched))
            if bar is not None:
                bar.update(len(groups) - bar.n)  # some may have ended in the step that a pause waited for
        finally:
            if bar is not None:
                bar.close()
            with self._turns.between():
                for group in groups:
                    self.frontend.drop(group)


def _or_greedy(params: Any) -> Any:
    return SamplingParams(temperature=0) if params is None else params


def _listed(prompts: Any) -> list[Any]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping) or is_conversation(prompts) or getattr(prompts, "ndim", 2) == 1:
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
