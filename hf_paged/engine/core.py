"""The step loop: scheduler, runner and sampler put together, for one model. No text here.

Not thread-safe: whoever owns a core calls it from one thread. A failing request ends alone; what raises out of
``step()`` is a fault of the engine or the model and ends every request.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from array import array
from collections.abc import Sequence
from typing import Any

from hf_paged import compat
from hf_paged.attention import registry
from hf_paged.cache.manager import KVCacheManager
from hf_paged.cache.offload import HostTier
from hf_paged.cache.radix_tree import Namespace
from hf_paged.config import EngineConfig
from hf_paged.engine.beams import Beam, BeamGroup, add_beams
from hf_paged.engine.outputs import Explanation
from hf_paged.engine.policy import SwapCost
from hf_paged.engine.request import FinishReason, Request
from hf_paged.engine.scheduler import Scheduler
from hf_paged.engine.stepper import Event, Stepper
from hf_paged.errors import InvalidRequestError, UnsupportedError
from hf_paged.model.runner import ModelRunner
from hf_paged.model.view import learned_positions, static_rope_length
from hf_paged.model.weights import OptimizerHook, WeightsWatch, namespace_of, runtime_signature
from hf_paged.sampling.beams import BeamSearch
from hf_paged.sampling.processors import Processor, processors_for
from hf_paged.sampling.sampler import SamplerState
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger("hf_paged")

#: the host tier's share when its user named no size
_MAX_HOST_BYTES = 4 << 30
#: what states of recurrent layers may take when their user named no size, or a quarter of the pool if that is more
_LEAST_CHECKPOINT_BYTES = 512 << 20
#: how fast blocks move between an accelerator and main memory, and within main memory
_BYTES_PER_SECOND = {"cuda": 12e9, "cpu": 4e9}


#: tells the engines that are alive of every optimizer step; fused ones leave no other trace
_optimizers = OptimizerHook()


class EngineCore:
    """Runs requests to their ends.

    Args:
        model: a loaded causal LM, which stays its user's.
        config: see EngineConfig.
    """

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self.model, self.config = model, config
        cache = config.cache
        registry.check_name(cache.attention_backend)
        assert not isinstance(cache.memory, str)
        self.runner = ModelRunner(
            model,
            block_size=cache.block_size,
            memory=cache.memory,
            num_blocks=cache.num_blocks,
            attention_backend=cache.attention_backend,
            optimize=config.optimize,
            quantization=config.quantization,
        )
        on_cpu = self.runner.device.type == "cpu"
        bytes_per_block = self.runner.pool.bytes_per_block
        host_blocks = self._host_blocks(bytes_per_block, on_cpu)
        if host_blocks:
            self.runner.host = HostTier(self.runner.pool, host_blocks)
        checkpoints = self._max_checkpoints() if self.runner.recurrent else None
        self.manager = KVCacheManager(
            self.runner.num_blocks,
            cache.block_size,
            prefix_caching=config.prefix_caching and self.runner.continues and checkpoints != 0,
            host_blocks=host_blocks,
            max_checkpoints=checkpoints,
        )
        speed = _BYTES_PER_SECOND["cpu" if on_cpu else "cuda"]
        self.cost = SwapCost(bytes_per_block // cache.block_size, speed)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._max_model_len(),
            policy=config.policy,
            whole_prompts=not self.runner.continues,
            stateful=self.runner.recurrent,
            preemption=config.preemption,
            swap_pays=self.cost.pays,
        )
        self.samplers: dict[str, SamplerState | Beam] = {}
        overlap = not on_cpu if config.overlap is None else config.overlap
        self._stepper = Stepper(self.scheduler, self.runner, self.samplers, overlap=overlap, cost=self.cost)
        self._watch = WeightsWatch()
        _optimizers.watches.add(self._watch)
        _optimizers.install()
        self._namespace: Namespace | None = None
        self._unshared = 0
        self._seeds = random.Random(config.seed) if config.seed is not None else None
        self.eos_token_ids = _eos_of(model)
        self._namespace = self._look()  # now, so that weights are packed before anybody waits for a token

    def _max_model_len(self) -> int | None:
        """Tokens a sequence may have: as configured, or as the model's config says; less where longer sequences would
        change what the others beside them get."""
        wanted, static = self.config.max_model_len, static_rope_length(self.runner.view)
        if static is None:
            text = self.model.config.get_text_config(decoder=True)
            learned = learned_positions(self.runner.view)
            if wanted is not None and learned is not None and wanted > learned:
                raise UnsupportedError(
                    f"max_model_len={wanted}: this model looks positions up in a table for {learned} tokens; give at "
                    f"most {learned}"
                )
            return wanted or getattr(text, "max_position_embeddings", None)
        if wanted is not None and wanted > static:
            raise UnsupportedError(
                f"max_model_len={wanted}: beyond {static} tokens this model's rotary embeddings depend on the longest "
                f"sequence of a batch, so requests would change each other; give at most {static}, or use "
                "model.generate(cache_implementation='paged')"
            )
        return wanted or static

    def _host_blocks(self, bytes_per_block: int, on_cpu: bool) -> int:
        """Blocks of the host tier; see EngineConfig.host_memory."""
        config = self.config
        if config.preemption == "recompute" or not bytes_per_block:
            return 0
        if config.host_memory is not None:
            assert isinstance(config.host_memory, int)
            return max(1, config.host_memory // bytes_per_block)
        if on_cpu and config.preemption == "auto":
            return 0
        return max(1, min(self.runner.num_blocks * bytes_per_block, _MAX_HOST_BYTES) // bytes_per_block)

    def _max_checkpoints(self) -> int:
        """States to keep; see EngineConfig.checkpoint_memory."""
        memory = self.config.checkpoint_memory
        if memory is None:
            memory = max(_LEAST_CHECKPOINT_BYTES, self.runner.pool.num_blocks * self.runner.pool.bytes_per_block // 4)
        assert isinstance(memory, int)
        count = memory // max(1, self.runner.state_bytes)
        if not count:
            logger.warning(
                "checkpoint_memory of %d bytes does not hold one state of %d bytes: no prefix will be reused", memory,
                self.runner.state_bytes,
            )  # fmt: skip
        return count

    # -- requests ------------------------------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, row: int = 0, seed: int | None = None,
        priority: int = 0, salt: str | None = None, parent: Request | None = None,
    ) -> Request:  # fmt: skip
        """Queue one completion of a prompt. ``parent`` is another completion of the same prompt, added just before,
        whose computation of the prompt it may share.

        Raises:
            InvalidRequestError: the prompt is empty, too long or holds ids outside the vocabulary, or an option has a
                value that transformers refuses.
            OutOfBlocksError: it could never fit.
        """
        request = self._request(request_id, prompt, params, priority, salt)
        request.scores_prompt = row == 0 and _scores_prompt(params)
        processors = self._processors(request, params)
        self.scheduler.add(request, parent)
        state = SamplerState(params, processors, self.new_seed() if seed is None else seed, row)
        self.samplers[request_id] = state
        return request

    def add_beams(
        self, name: str, prompt: Sequence[int], params: SamplingParams, tokenizer: Any, *, priority: int = 0,
        salt: str | None = None,
    ) -> BeamGroup:  # fmt: skip
        """Queue the beams of one search, as requests ``name-0`` and so on. ``tokenizer`` is for stop texts.

        Raises as :meth:`add`; then none of the beams stays.
        """
        requests = []
        for i in range(params.num_beams):
            request = self._request(f"{name}-{i}", prompt, params, priority, salt)
            request.scores_prompt = i == 0 and _scores_prompt(params)
            requests.append(request)
        assert params.max_tokens is not None
        longest = len(prompt) + params.max_tokens
        if self.scheduler.max_model_len is not None:
            longest = min(longest, self.scheduler.max_model_len)
        stop_ids = sorted(requests[0].stop_token_ids)
        search = BeamSearch(
            prompt,
            num_beams=params.num_beams,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_length=longest,
            stop_token_ids=stop_ids,
            criteria=compat.stopping_criteria(
                longest, stop_ids, list(params.stop), tokenizer, params.stopping_criteria
            ),
        )
        return add_beams(
            self.scheduler, self.samplers, search, requests, params, lambda request: self._processors(request, params)
        )

    def _request(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, priority: int, salt: str | None
    ) -> Request:
        size = self.runner.vocab_size
        bad = next((t for t in prompt if not 0 <= t < size), None)
        if bad is not None:
            raise InvalidRequestError(
                f"the prompt holds token id {bad}, the model's vocabulary is 0..{size - 1}: was it made with another "
                "model's tokenizer?"
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        assert params.max_tokens is not None
        return Request(
            request_id,
            array("q", prompt),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=stop_ids,
            priority=priority,
            namespace=(*self._present_namespace(), ("salt", salt)),
        )

    def _processors(self, request: Request, params: SamplingParams) -> list[Processor]:
        try:
            stop_ids = sorted(request.stop_token_ids)
            return processors_for(self.model, params, request.prompt, stop_ids) if request.prompt else []
        except (ValueError, TypeError, RuntimeError) as error:
            raise InvalidRequestError(f"an option of the request is refused: {error}") from error

    def new_seed(self) -> int:
        """A seed for a request that names none."""
        return secrets.randbits(62) if self._seeds is None else self._seeds.getrandbits(62)

    def abort(self, request_id: str) -> None:
        """End a completion now. An unknown or finished id is no error."""
        self.scheduler.abort(request_id)
        self.samplers.pop(request_id, None)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a completion for what its text shows."""
        self.scheduler.finish(request, reason, stop_reason)
        self.samplers.pop(request.request_id, None)

    def fail_all(self, error: Exception) -> list[Request]:
        """End every request with ``error``; returns them."""
        self._stepper.forget()
        failed = self.scheduler.unfinished
        for request in failed:
            self.scheduler.fail(request, error)
        self.samplers.clear()
        return failed

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._stepper.busy

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Bring one step to its end; returns what it brought, in the order of its plan."""
        return self._done(self._stepper.step())

    def drain(self) -> list[Event]:
        """Wait for the step under way, where steps overlap, and return what it brought; no other is started."""
        return self._done(self._stepper.drain())

    def close(self) -> None:
        """End the thread that overlapping steps run in."""
        self._stepper.close()

    def _done(self, events: list[Event]) -> list[Event]:
        for event in events:
            if event.request.finished:
                self.samplers.pop(event.request.request_id, None)
        return events

    # -- looking into it -------------------------------------------------------------------------------------------

    def explain(self, request: Request) -> Explanation:
        """What became of a completion so far, and why."""
        until = time.monotonic() if request.scheduled_at is None else request.scheduled_at
        return Explanation(
            request_id=request.request_id,
            status=request.status.value,
            finish_reason=None if request.finish_reason is None else request.finish_reason.value,
            prompt_tokens=len(request.prompt),
            output_tokens=request.num_output,
            cached_tokens=None if request.num_cached < 0 else request.num_cached,
            why_not_more=self._why_not_more(request),
            blocks=0 if request.table is None else len(request.table.blocks),
            host_blocks=0 if request.swapped is None else len(request.swapped.blocks),
            queue_time=until - request.added_at,
            preemptions=list(request.preemptions),
            preempted=list(request.preempted),
            evicted_blocks=request.evicted_blocks,
        )

    def _why_not_more(self, request: Request) -> str:
        found, length = request.num_cached, len(request.prompt)
        if found < 0:
            return "it has not been admitted yet"
        if request.forked:
            return "its prompt was computed once, with the request's first completion"
        if not self.manager.prefix_caching:
            if self.runner.continues:
                return "prefix_caching is off, or checkpoint_memory too small for a state"
            return "the model keeps state that is not in blocks, and computes a prompt only in one piece"
        if found == length - 1:
            return "all but the last token, which has to be computed to have logits"
        if request.scores_prompt:
            return "log-probabilities of the prompt are wanted, so all of it was computed"
        if request.num_stored > found:
            return (
                f"{request.num_stored} tokens were stored, but the state of recurrent layers that belongs to them only "
                f"behind token {found}"
            )
        elsewhere = self.manager.longest_elsewhere(request.namespace, request.prompt)
        if elsewhere > found:
            return f"{elsewhere} tokens are stored for other weights, settings or another salt, where they do not count"
        return f"nothing that was stored then went on with its token {found}"

    # -- what prefixes belong to -----------------------------------------------------------------------------------

    def _present_namespace(self) -> Namespace:
        """Weights and settings that prefixes are computed with; looked at whenever the engine comes out of idleness."""
        if self._namespace is None or not self.has_work:
            self._namespace = self._look()
        return self._namespace

    def look_at_weights(self) -> None:
        """Compare the weights with what running requests were computed with; if they changed, compute those anew, and
        likewise if something goes wrong in it, which is raised."""
        before, found = self._namespace, None
        try:
            found = self._look()
        finally:
            if found is None:
                self.runner.forget_weights()
                found = self._unknown()
            self._namespace = found
            if before is not None and before != found:
                self.scheduler.recompute_all(len(before), found)

    def _look(self) -> Namespace:
        self.runner.refresh()
        source = self.runner.source
        runtime = runtime_signature(source)
        weights = self._watch.observe(source) if runtime is not None or self.config.quantization is not None else None
        found = namespace_of(weights, runtime)
        self.runner.follow_weights(found, weights)
        if found is None:
            return self._unknown()
        if found != self._namespace:
            self.manager.drop(lambda namespace: namespace[: len(found)] != found)
        return found

    def _unknown(self) -> Namespace:
        """A namespace for what nobody can tell about; nothing is shared beyond it."""
        self._unshared += 1
        self.manager.drop(lambda namespace: True)
        return (("unshared", self._unshared),)

    def weights_changed(self) -> None:
        """Forget every prefix, whatever the weights look like; running requests are computed anew."""
        self._watch.changed()
        self.runner.reconsider()
        self.look_at_weights()


def _scores_prompt(params: SamplingParams) -> bool:
    return params.prompt_logprobs is not None or (params.echo and params.logprobs is not None)


def _eos_of(model: Any) -> frozenset[int]:
    config = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
