"""A transformers GenerationConfig as settings of a request: what ``generate()`` would do with it for this model.

What the config leaves unset comes from the model's own config and then from transformers' defaults. Whatever the engine
cannot do is an error that names the field. The engine's front calls it, once the length of the prompt is known.
"""

from __future__ import annotations

from typing import Any

from hf_paged import compat
from hf_paged.errors import ConfigError, InvalidRequestError
from hf_paged.sampling_params import SamplingParams

_UNSET: tuple[Any, ...] = (None, False)
#: fields that ask for what the engine does not do, unless they have one of these values
_REFUSED: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": _UNSET,
    "assistant_ensemble_weight": _UNSET,
    "constraints": _UNSET,
    "diversity_penalty": (None, 0),
    "dola_layers": _UNSET,
    "force_words_ids": _UNSET,
    "guidance_scale": (None, 1),
    "is_assistant": _UNSET,
    "max_time": _UNSET,
    "num_beam_groups": (None, 1),
    "output_attentions": _UNSET,
    "output_hidden_states": _UNSET,
    "output_logits": _UNSET,
    "output_scores": _UNSET,
    "penalty_alpha": (None, 0),
    "prompt_lookup_num_tokens": _UNSET,
    "return_dict_in_generate": _UNSET,
    "speculation_type": _UNSET,
    "token_healing": _UNSET,
    "use_mtp": _UNSET,
    "watermarking_config": _UNSET,
}
#: fields that mean the same in SamplingParams
_COPIED = (
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size",
    "repetition_penalty", "sequence_bias", "suppress_tokens",
)  # fmt: skip
#: the same, of no account unless tokens are sampled
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def sampling_params_from(config: compat.GenerationConfig, model: Any, prompt_length: int) -> SamplingParams:
    """Settings with which a request gets what ``model.generate(prompt, generation_config=config)`` gives.

    ``stop_strings`` become stop texts that stay in the output. Unlike in ``generate()``, one that begins in the prompt
    does not count.

    Raises InvalidRequestError, naming the field, for what the engine cannot do or transformers refuses, and for a
    prompt that is longer than the config allows.
    """
    try:
        found = compat.resolved_generation_config(model, config, prompt_length)
    except ValueError as error:
        raise InvalidRequestError(f"the generation config is refused: {error}") from error
    for name, neutral in _REFUSED.items():
        if getattr(found, name, None) not in neutral:
            raise _refusal(found, name)
    if found.cache_implementation == "quantized":
        raise _refusal(found, "cache_implementation")
    try:
        return SamplingParams(**_options(found, prompt_length))
    except ConfigError as error:
        raise InvalidRequestError(f"the generation config is refused: {error}") from error


def _refusal(config: Any, name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}={getattr(config, name)!r} of the generation config is nothing the engine does; model.generate() does"
    )


def _options(config: Any, prompt_length: int) -> dict[str, Any]:
    max_tokens = config.max_length - prompt_length
    if max_tokens < 1:
        raise InvalidRequestError(
            f"the prompt has {prompt_length} tokens and max_length is {config.max_length}: raise it, or set "
            "max_new_tokens"
        )
    min_tokens = max(0, (config.min_length or 0) - prompt_length)
    stop = _listed(config.stop_strings)
    if stop and min_tokens:
        raise InvalidRequestError(
            f"stop_strings={stop!r} with a minimum of {min_tokens} new tokens: give a StopStringCriteria in "
            "SamplingParams(stopping_criteria=...), which does not wait for the minimum, or leave it out"
        )
    options = {name: value for name in _COPIED if (value := getattr(config, name)) is not None}
    return {
        **options,
        **_strategy(config),
        "n": config.num_return_sequences,
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens),
        "remove_invalid_values": config.remove_invalid_values is True,
        "renormalize_logits": config.renormalize_logits is True,
        "stop": tuple(stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": tuple(_listed(config.eos_token_id)),
        "ignore_eos": True,  # the model's own are among them, unless the config names others
    }


def _strategy(config: Any) -> dict[str, Any]:
    """Greedy search, sampling or beam search."""
    beams = config.num_beams
    if not config.do_sample:
        if beams == 1:
            return {"temperature": 0}
        return {
            "temperature": 0,
            "num_beams": beams,
            "length_penalty": float(config.length_penalty),
            "early_stopping": config.early_stopping,
        }
    if beams > 1:
        raise InvalidRequestError(f"num_beams={beams} with do_sample=True: the engine's beam search does not sample")
    if not config.temperature > 0:
        raise InvalidRequestError(
            f"temperature={config.temperature} with do_sample=True: it must be more than 0, or do_sample False"
        )
    if config.top_k < 0:
        raise InvalidRequestError(f"top_k={config.top_k}: it must be at least 1, or 0 to keep every token")
    return {name: value for name in _SAMPLING if (value := getattr(config, name)) is not None}


def _listed(value: Any) -> list[Any]:
    """One value or several or none, as a list."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else [value]
