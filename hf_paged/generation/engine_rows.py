"""The rows of one ``generate()`` call, run on the engine to their ends.

A row is one request, or as many as a beam search has beams. Blocks and the way into the model are shared with other
calls, which may run at the same time in other threads; scheduler, samplers and states are the call's own. Whether a
call can run like this, and what becomes of the tokens, is the business of ``on_engine``.
"""

from __future__ import annotations

import functools
import itertools
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged import compat
from hf_paged.attention.obstacles import Obstacle
from hf_paged.cache.manager import Namespace
from hf_paged.engine.beams import Beam, BeamGroup, add_beams
from hf_paged.engine.request import Request
from hf_paged.engine.scheduler import Scheduler
from hf_paged.engine.stepper import Event, Stepper
from hf_paged.errors import InternalError, UnsupportedError
from hf_paged.generation.prompts import Call
from hf_paged.model.runner import ModelRunner
from hf_paged.sampling.beams import BeamSearch
from hf_paged.sampling.processors import Processor
from hf_paged.sampling.sampler import SamplerState
from hf_paged.sampling_params import SamplingParams

#: tokens that run in one step, and rows
_MAX_BATCHED_TOKENS, _MAX_SEQS = 512, 256
#: how often a call looks whether others have given blocks back, when it cannot go on without
_WAIT_S = 0.002
_private = itertools.count()


class ModelChangedError(UnsupportedError):
    """The model cannot run on the engine, as it could when it was tried out."""


@dataclass(frozen=True)
class Rows:
    """What of a call is to be run.

    ``prompts`` are the token ids of the rows without padding, ``columns`` the ids ``[rows, columns]`` that they come
    from; of a beam search only one row for each prompt. ``namespace`` is where prefixes are shared, or None: nowhere.
    ``criteria`` are stopping criteria as ``generate()`` has them.
    """

    call: Call
    runner: ModelRunner
    prompts: Sequence[Sequence[int]]
    columns: torch.Tensor
    generation_config: Any
    namespace: Namespace | None
    criteria: Sequence[Any] = ()

    @functools.cached_property
    def _ends(self) -> tuple[int | None, frozenset[int], list[Any]]:
        return compat.ends(self.criteria)

    @property
    def max_length(self) -> int:
        """Columns that a row may have."""
        longest = self._ends[0]
        return int(self.generation_config.max_length) if longest is None else longest

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a row."""
        return self._ends[1]

    @property
    def others(self) -> list[Any]:
        """Criteria that are more than a length or end tokens."""
        return self._ends[2]

    @property
    def num_beams(self) -> int:
        return int(self.generation_config.num_beams or 1)

    @property
    def new_tokens(self) -> int:
        """Tokens that a row may get."""
        return self.max_length - int(self.columns.shape[1])

    def padding(self, row: int) -> int:
        return int(self.columns.shape[1]) - len(self.prompts[row])

    def processors(self, row: int) -> list[Processor]:
        """The processors of one row. A function for allowed prefixes is told the prompt's place in the call."""
        given = self.call.given
        allowed = given.prefix_allowed_tokens_fn
        if allowed is not None:
            repeats = 1 if self.num_beams > 1 else int(self.generation_config.num_return_sequences or 1)
            allowed = _of_prompt(allowed, row // repeats)
        found: list[Processor] = compat.processors_of_row(
            self.call.model, self.generation_config, self.columns, self.prompts[row], given.processors, allowed
        )
        return found


def _of_prompt(allowed: Any, index: int) -> Any:
    return lambda _, input_ids: allowed(index, input_ids)


def run(rows: Rows) -> list[list[list[int]]]:
    """The tokens generated for each row: the best hypotheses of a beam search, else one sequence.

    Raises the error of the first row that fails, and ModelChangedError.
    """
    call, runner = rows.call, rows.runner
    assert call.cache is not None
    kv, manager = call.kv, call.cache.state.shared.manager
    assert kv is not None
    assert manager is not None
    namespace = rows.namespace if rows.namespace is not None else (("private", next(_private)),)
    scheduler = Scheduler(
        manager,
        max_num_seqs=_MAX_SEQS,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        whole_prompts=not runner.continues,
        stateful=runner.recurrent,
        others=lambda: any(other.running for other in kv.schedulers if other is not scheduler),
    )
    samplers: dict[str, SamplerState | Beam] = {}
    stepper = Stepper(scheduler, runner, samplers, shared=True)
    with kv.lock:
        kv.schedulers = [*kv.schedulers, scheduler]  # a new list: others may be going through the old one
    try:
        if rows.num_beams > 1:
            groups = [_add_search(rows, i, namespace, scheduler, samplers) for i in range(len(rows.prompts))]
            requests = [request for group in groups for request in group.requests]
            _to_the_end(call, scheduler, stepper)
            count = int(rows.generation_config.num_return_sequences or 1)
            found = [[hypothesis.tokens for hypothesis in group.search.best(count)] for group in groups]
        else:
            requests = _add_rows(rows, namespace, scheduler, samplers)
            _to_the_end(call, scheduler, stepper)
            found = [[list(request.tokens[len(request.prompt) :])] for request in requests]
    finally:
        with kv.lock:
            kv.schedulers = [other for other in kv.schedulers if other is not scheduler]
        for request in scheduler.unfinished:
            scheduler.abort(request.request_id)
        if rows.namespace is None:
            manager.drop(namespace)
    _count(rows, requests)
    return found


def _add_rows(
    rows: Rows, namespace: Namespace, scheduler: Scheduler, samplers: dict[str, SamplerState | Beam]
) -> list[Request]:
    sampling = bool(rows.generation_config.do_sample)
    seed = int(torch.randint(1 << 62, (1,))) if sampling else 0
    params = SamplingParams(
        temperature=1.0 if sampling else 0.0,
        max_tokens=rows.new_tokens,
        stopping_criteria=[compat.without_scores(criterion) for criterion in rows.others],
    )
    requests = []
    for i, prompt in enumerate(rows.prompts):
        request = _request(rows, str(i), prompt, namespace)
        scheduler.add(request)
        requests.append(request)
        samplers[request.request_id] = SamplerState(params, rows.processors(i), seed, i)
    return requests


def _add_search(
    rows: Rows, row: int, namespace: Namespace, scheduler: Scheduler, samplers: dict[str, SamplerState | Beam]
) -> BeamGroup:
    config, prompt, padding = rows.generation_config, rows.prompts[row], rows.padding(row)
    search = BeamSearch(
        prompt,
        num_beams=rows.num_beams,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        max_length=config.max_length - padding,
        stop_token_ids=compat.eos_tokens(config),
        criteria=compat.criteria_of_row(rows.criteria, padding),
    )
    requests = [_request(rows, f"{row}-{beam}", prompt, namespace) for beam in range(rows.num_beams)]
    params = SamplingParams(temperature=0.0, max_tokens=rows.new_tokens)
    return add_beams(scheduler, samplers, search, requests, params, lambda _: rows.processors(row))


def _request(rows: Rows, name: str, prompt: Sequence[int], namespace: Namespace) -> Request:
    return Request(name, array("q", prompt), rows.new_tokens, stop_token_ids=rows.eos, namespace=namespace)


def _to_the_end(call: Call, scheduler: Scheduler, stepper: Stepper) -> None:
    while scheduler.has_work:
        events = _step(call, stepper)
        for event in events:
            if event.request.error is not None:
                raise event.request.error
        if not events and not scheduler.running:
            time.sleep(_WAIT_S)  # for blocks that another call is to give back


def _step(call: Call, stepper: Stepper) -> list[Event]:
    try:
        return stepper.step()
    except UnsupportedError as error:
        raise ModelChangedError(str(error)) from error
    except InternalError as error:  # its attention is not what it was when it was tried out
        assert call.kv is not None
        assert call.cache is not None
        call.kv.no_engine = str(error)
        for layer in call.cache.paged_layers:
            call.cache.profile.record(layer.layer_idx, Obstacle("its attention was once not called"))
        raise


def _count(rows: Rows, requests: Sequence[Request]) -> None:
    """For ``cache_stats()``."""
    kv, runner = rows.call.kv, rows.runner
    assert kv is not None
    with kv.lock:
        kv.prompt_tokens += sum(len(request.prompt) for request in requests)
        kv.hit_tokens += sum(max(request.num_cached, 0) for request in requests)
        kv.paged_layers = sorted(runner.pool.layers)
        kv.obstacles = dict.fromkeys(
            kv.paged_layers, None if runner.packed else "its own attention runs on gathered keys"
        )
