"""How one request's tokens are chosen and when it ends. Plain values with checks; no torch, no models.

Names are vLLM's where it has them and GenerationConfig's elsewhere, and mean what they mean there. An option that
cannot be honoured is an error when the request is made, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_paged.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request.

    Attributes:
        n: completions to return for the prompt, each from its own stream of random numbers.
        max_tokens: tokens to generate at most.
        min_tokens: tokens to generate before an end-of-sequence token, a stop token or a stop text may end it.
        temperature: 0 takes the most likely token; else scores are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all. 1 is greedy.
        top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff: truncations as in transformers; their neutral values are
            1, 0, 1, 0 and 0.
        repetition_penalty, encoder_repetition_penalty, no_repeat_ngram_size: as in transformers, prompt included.
        presence_penalty, frequency_penalty: as in OpenAI's API, output only, subtracted from the scores first.
        bad_words_ids, sequence_bias, suppress_tokens, begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id,
        remove_invalid_values, exponential_decay_length_penalty, renormalize_logits: as in transformers.
        logit_bias: token id -> what is added to its score, from -100 to 100.
        allowed_token_ids: no other token can be chosen.
        stop: texts that end the output; ``include_stop_str_in_output`` keeps the one that did.
        stop_token_ids: ids that end it, besides the model's own unless ``ignore_eos``.
        seed: makes sampling reproducible whatever else is in the batch; None draws one.
        logprobs: alternatives to report per token, besides the chosen one; raw log-softmax of the model's logits.
        skip_special_tokens: leave special tokens out of the text.
        logits_processors: called as in transformers, ``(input_ids [1, tokens], scores [1, vocab]) -> scores``.
        prefix_allowed_tokens_fn: ``(0, input_ids [tokens]) -> list of ids``, as in transformers.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words_ids: Sequence[Sequence[int]] | None = None
    sequence_bias: Any = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    renormalize_logits: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., Any]] = field(default_factory=tuple)
    prefix_allowed_tokens_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            self._check(name, isinstance(value, int | float) and not isinstance(value, bool), "a number")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        listed = isinstance(self.stop, list | tuple) and all(isinstance(text, str) for text in self.stop)
        self._check("stop", listed, "a text or a list of texts")
        if any(not text for text in self.stop):
            raise ConfigError("stop holds an empty text, which every output contains")
        for name in ("n", "max_tokens"):
            self._check(name, _is_int(getattr(self, name)) and getattr(self, name) >= 1, "an int of at least 1")
        for name in ("min_tokens", "no_repeat_ngram_size"):
            self._check(name, _is_int(getattr(self, name)) and getattr(self, name) >= 0, "an int of at least 0")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        self._check("temperature", 0 <= self.temperature < float("inf"), "a number of at least 0")
        self._check(
            "top_k", _is_int(self.top_k) and self.top_k >= -1, "an int of at least 1, or 0 or -1 for all tokens"
        )
        for name in ("top_p", "typical_p"):
            self._check(name, 0 < getattr(self, name) <= 1, "more than 0 and at most 1")
        for name in ("min_p", "epsilon_cutoff", "eta_cutoff"):
            self._check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        for name in ("repetition_penalty", "encoder_repetition_penalty"):
            self._check(name, 0 < getattr(self, name) < float("inf"), "more than 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2 <= getattr(self, name) <= 2, "from -2 to 2")
        if self.logprobs is not None:
            self._check("logprobs", _is_int(self.logprobs) and self.logprobs >= 0, "an int of at least 0, or None")
        if self.seed is not None:
            self._check("seed", _is_int(self.seed), "an int or None")
        for token, bias in (self.logit_bias or {}).items():
            if not _is_int(token) or not -100 <= bias <= 100:
                raise ConfigError(f"logit_bias[{token!r}]={bias!r} must be a number from -100 to 100 for a token id")

    def _check(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ConfigError(f"{name}={getattr(self, name)!r} must be {wanted}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, the lowest id where several are."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Whether greedy search needs nothing but the logits."""
        return self.greedy and self._neutral == _NEUTRAL and not self.logits_processors

    @property
    def _neutral(self) -> tuple[Any, ...]:
        return (
            self.min_tokens,
            self.repetition_penalty,
            self.encoder_repetition_penalty,
            self.no_repeat_ngram_size,
            self.presence_penalty,
            self.frequency_penalty,
            self.bad_words_ids,
            self.sequence_bias,
            self.suppress_tokens,
            self.begin_suppress_tokens,
            self.forced_bos_token_id,
            self.forced_eos_token_id,
            self.remove_invalid_values,
            self.exponential_decay_length_penalty,
            self.logit_bias,
            self.allowed_token_ids,
            self.prefix_allowed_tokens_fn,
        )


_NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_NEUTRAL = (0, 1.0, 1.0, 0, 0.0, 0.0, *(None,) * 6, False, *(None,) * 4)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
