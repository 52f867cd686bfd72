"""The one place that knows which transformers this is and touches names it does not promise to keep.

Everything else in the package imports transformers' cache, mask and generation internals from here, so a release
that moves one of them is a change to this file. Measured on 5.17, 5.23 and 5.24; the API broke between the last two
(``past_key_values`` became ``cache``, and ``update`` gained ``kwargs=``).
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers import masking_utils as masking_utils
from transformers import modeling_utils as modeling_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.generation import configuration_utils as generation_configuration_utils
from transformers.generation.continuous_batching import continuous_api, requests
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface

from hf_paged.errors import UnsupportedError

__all__ = [
    "ASSISTED_DECODING",
    "CACHE_KWARG",
    "CACHE_KWARGS",
    "AttentionInterface",
    "Cache",
    "CacheLayerMixin",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "ContinuousMixin",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "EncoderDecoderCache",
    "GenerationConfig",
    "GenerationMixin",
    "GenerationOutput",
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "LogitsProcessorList",
    "RequestStatus",
    "cache_in_kwargs",
    "check_supported",
    "generation_configuration_utils",
    "masking_utils",
    "transformers_version",
]

OLDEST = (5, 17)
#: first major version that is not supported
TOO_NEW = (6, 0)

#: how models, outputs and ``model_kwargs`` call the cache in this version
CACHE_KWARG: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
#: every name under which a cache can travel in ``model_kwargs`` (mamba-like models have their own in 5.17)
CACHE_KWARGS: tuple[str, ...] = ("cache", "past_key_values", "cache_params")

#: methods of GenerationMixin: what makes the cache of a call, what runs the prompt, and the loop that has no prefill
PREPARE_CACHE = "_prepare_cache_for_generation"
PREFILL = "_prefill"
ASSISTED_DECODING = "_assisted_decoding"
#: greedy search and sampling, and the search with several beams
SAMPLE = "_sample"
BEAM_SEARCH = "_beam_search"
#: transformers' continuous batching: what drives it, what every model inherits of it, and what it delivers
ContinuousBatchingManager: Any = continuous_api.ContinuousBatchingManager
ContinuousMixin: Any = continuous_api.ContinuousMixin
GenerationOutput: Any = requests.GenerationOutput
RequestStatus: Any = requests.RequestStatus
#: where a model keeps a manager of continuous batching from one session to the next
CACHED_MANAGER = "_cached_continuous_batching_manager"
#: the function of masking_utils that every mask builder calls first
MASK_ARGUMENTS = "_preprocess_mask_arguments"


def transformers_version() -> tuple[int, int]:
    """(major, minor) of the imported transformers."""
    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


def check_supported() -> None:
    """Raise :class:`UnsupportedError` unless this transformers is one the package was made for."""
    version = transformers_version()
    if not OLDEST <= version < TOO_NEW:
        raise UnsupportedError(
            f"hf_paged supports transformers {OLDEST[0]}.{OLDEST[1]} up to, not including, {TOO_NEW[0]}.{TOO_NEW[1]}; "
            f"this is {transformers.__version__}. Install a supported one: pip install 'transformers>=5.17,<6'"
        )


def cache_in_kwargs(model_kwargs: dict[str, Any]) -> tuple[str, Any] | None:
    """The (name, cache) under which a transformers cache travels in ``model_kwargs``, or None."""
    for name in CACHE_KWARGS:
        value = model_kwargs.get(name)
        if isinstance(value, Cache | EncoderDecoderCache):
            return name, value
    return None


def self_attention_cache(cache: Any) -> Any:
    """The part of ``cache`` that holds the decoder's own keys and values."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def attention_implementation(config: Any) -> str:
    """The name of the attention function that models with this config call."""
    return str(getattr(config, "_attn_implementation", None))


def attention_function(config: Any) -> tuple[str, int]:
    """Its name, and which function stands for it now; 0 where each model has its own."""
    name = attention_implementation(config)
    found = modeling_utils.ALL_ATTENTION_FUNCTIONS.get(name)
    return name, 0 if found is None else id(found)


def pad_token(generation_config: Any) -> int | None:
    """What finished rows of a running ``generate()`` are filled up with."""
    pad = getattr(generation_config, "_pad_token_tensor", None)
    return None if pad is None else int(pad)


def remember_prompt_length(generation_config: Any, length: int) -> None:
    """Tell a running ``generate()`` without attention mask that ``input_ids`` is the whole prompt, cached part too.

    From 5.20 on it slices by this; before, it needs the mask itself.
    """
    generation_config._mask_length = length


def drafts_from_hidden_states(generation_config: Any) -> bool:
    """Whether assisted decoding drafts with heads or layers of the model itself, from its hidden states."""
    return bool(getattr(generation_config, "use_mtp", None) or getattr(generation_config, "assistant_early_exit", None))


def chunked_without_types(config: Any) -> bool:
    """Without ``layer_types``, a windowed layer is chunked exactly when only a chunk size is configured."""
    return getattr(config, "sliding_window", None) is None and getattr(config, "attention_chunk_size", None) is not None


def logits_processors(
    model: Any, generation_config: Any, prompt: Any, device: Any, custom: Any, prefix_allowed_tokens_fn: Any
) -> Any:
    """The processors that ``generate()`` would run for one row with this prompt (ids ``[1, tokens]``), in its order."""
    model._prepare_special_tokens(generation_config, True, device=device)
    return model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=prompt.shape[1],
        encoder_input_ids=prompt,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        logits_processor=LogitsProcessorList(custom),
        device=device,
        model_kwargs={},
    )


def resolved_generation_config(model: Any, generation_config: Any, prompt_length: int) -> Any:
    """A copy of ``generation_config`` with what is unset taken from the model's own and then from transformers'
    defaults, as ``generate()`` does it; ``max_length`` and ``min_length`` count the prompt's tokens.

    Raises ValueError for combinations that transformers refuses.
    """
    own = model.generation_config
    unset = {
        f"has_default_{name}": getattr(generation_config, name) is None and getattr(own, name) is None
        for name in ("max_length", "min_length")
    }
    resolved, _ = model._prepare_generation_config(generation_config)
    return model._prepare_generated_length(
        generation_config=resolved,
        **unset,
        model_input_name="input_ids",
        input_ids_length=prompt_length,
        inputs_tensor=None,
    )


#: parameters of ``generate()`` in order, without the model
_GENERATE_PARAMETERS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]
#: what ``generate()`` passes on to its loops besides what the model is given
LOOP_KWARGS = frozenset({"tokenizer", "assistant_tokenizer"})


def arguments_of_generate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a ``generate()`` call by name."""
    return {**dict(zip(_GENERATE_PARAMETERS, args, strict=False)), **kwargs}


def takes_positions(model: Any) -> bool:
    """Whether ``generate()`` makes ``position_ids`` for the model, in which padding does not count; others count
    columns, if they count at all."""
    return "position_ids" in inspect.signature(model.forward).parameters


def ends(criteria: Any) -> tuple[int | None, frozenset[int], list[Any]]:
    """What the stopping criteria of a running ``generate()`` say: columns a row may have, tokens that end it, and the
    criteria that are more than one of the two."""
    lengths: list[int] = []
    eos: set[int] = set()
    others: list[Any] = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        elif type(criterion) is EosTokenCriteria:
            eos.update(int(i) for i in criterion.eos_token_id.reshape(-1))
        else:
            others.append(criterion)
    return min(lengths, default=None), frozenset(eos), others


def criteria_of_row(criteria: Any, padding: int) -> Any:
    """The stopping criteria of a running ``generate()`` for a row without its ``padding``, all in one function of ids
    ``[candidates, tokens]`` and scores. What stock counts in columns, it counts in columns here too."""
    found = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            criterion = copy.copy(criterion)
            criterion.max_length -= padding
        found.append(criterion)
    return without_scores(found)


def without_scores(criterion: Any) -> Any:
    """A stopping criterion that is called as by ``generate()``: with None for scores, unless these are returned."""
    return lambda input_ids, scores: criterion(input_ids, None)


def eos_tokens(generation_config: Any) -> list[int]:
    """What ends a row of a running ``generate()``, if no criterion of the user's takes the place of that."""
    eos = getattr(generation_config, "_eos_token_tensor", None)
    return [] if eos is None else [int(i) for i in eos.reshape(-1)]


def beam_filling(generation_config: Any) -> int:
    """What the sequences of a running beam search are filled up with."""
    eos = eos_tokens(generation_config)
    return (pad_token(generation_config) or eos[0]) if eos else -1


def processors_of_row(
    model: Any, generation_config: Any, prompt: torch.Tensor, row: Any, custom: Any = (), allowed: Any = None
) -> Any:
    """The processors of a running ``generate()`` over ``prompt`` (ids ``[rows, columns]``), for one ``row`` without its
    padding; ``custom`` are the user's own, ``allowed`` is a ``prefix_allowed_tokens_fn``, and both see only that row.
    What stock counts in columns, it counts in columns here too."""
    ids = torch.tensor([list(row)], device=prompt.device)
    padding = prompt.shape[1] - ids.shape[1]
    generation_config = copy.copy(generation_config)
    generation_config.num_beams = generation_config.num_return_sequences = 1
    generation_config.max_length -= padding
    if generation_config.min_length is not None:
        generation_config.min_length = max(generation_config.min_length - padding, 0)
    return list(
        model._get_logits_processor(
            generation_config=generation_config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=allowed,
            logits_processor=LogitsProcessorList(custom),
            device=prompt.device,
            model_kwargs={},
        )
    )


def stopping_criteria(max_length: int, eos: list[int], stop: list[str], tokenizer: Any, custom: Any) -> Any:
    """The stopping criteria that ``generate()`` would build; called with ids ``[rows, tokens]`` and scores."""
    found = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    if stop:
        found.append(StopStringCriteria(tokenizer, stop))
    if eos:
        found.append(EosTokenCriteria(eos))
    found.extend(custom)
    return found


_ANY: Any = GenerationMixin
#: before 5.24 it wants to be told what it can see
_TOLD_VOCAB_SIZE = "vocab_size" in inspect.signature(_ANY._get_top_k_continuations).parameters


class BeamRules:
    """The functions that ``generate()``'s beam search is made of."""

    @staticmethod
    def top_continuations(**arguments: Any) -> Any:
        if _TOLD_VOCAB_SIZE:
            arguments["vocab_size"] = arguments["accumulated_log_probs"].shape[-1] // arguments["num_beams"]
        return _ANY._get_top_k_continuations(_ANY, **arguments)

    @staticmethod
    def running_beams(**arguments: Any) -> Any:
        return _ANY._get_running_beams_for_next_iteration(_ANY, **arguments)

    @staticmethod
    def ended_beams(**arguments: Any) -> Any:
        return _ANY._update_finished_beams(_ANY, **arguments)

    @staticmethod
    def may_improve(**arguments: Any) -> Any:
        return GenerationMixin._check_early_stop_heuristic(**arguments)

    @staticmethod
    def goes_on(*arguments: Any) -> bool:
        return bool(GenerationMixin._beam_search_has_unfinished_sequences(*arguments))


#: built-in processors that hold something about each row of the batch they were made for
_MADE_FOR_A_BATCH = (
    "AlternatingCodebooksLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor", "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)  # fmt: skip


def made_for_a_batch(processor: Any) -> bool:
    """Whether a built-in processor, passed to ``generate()`` as one of the user's own, may not see its rows alone."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        return True
    return is_built_in(processor) and type(processor).__name__ in _MADE_FOR_A_BATCH


def is_built_in(processor: Any) -> bool:
    """Whether a processor is of a kind that transformers has."""
    return type(processor).__module__.startswith("transformers.")


#: processors that do the same for a row with left padding and without
_BLIND_TO_PADDING = (
    "ExponentialDecayLengthPenalty", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
    "LogitNormalization", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor",
)  # fmt: skip


def looks_at_padding(processor: Any) -> bool:
    """Whether a built-in processor may do something else for a padded row than for the row alone."""
    if type(processor).__name__ == "RepetitionPenaltyLogitsProcessor":
        # from 5.24 on it is told where each row begins
        return not isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    return type(processor).__name__ not in _BLIND_TO_PADDING


def is_split(model: Any) -> bool:
    """Whether a model's weights are split over several processes (tensor parallel)."""
    return getattr(model, "_device_mesh", None) is not None


def keeps_nothing(layer: Any) -> bool:
    """Whether a cache layer is a placeholder: its attention shares another layer's keys (not there before 5.20)."""
    return type(layer).__name__ == "DummyLayer"


def page_size(config: ContinuousBatchingConfig) -> tuple[int, bool]:
    """Tokens in one of the blocks that ``config`` counts, and whether somebody chose it (named block_size in 5.17)."""
    name = "page_size" if hasattr(config, "page_size") else "block_size"
    size = int(getattr(config, name))
    return size, size != type(config).__dataclass_fields__[name].default


def serving_utils() -> Any:
    """The module that ``transformers serve`` keeps its generation managers in.

    None where what it needs (fastapi, uvicorn, openai) is not installed, so that nobody can run it.
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        return None
    from transformers.cli.serving import utils

    return utils
