"""How one request's tokens are chosen and when it ends. Plain values with checks; no torch, no models.

Names are vLLM's where it has them and GenerationConfig's elsewhere, and mean what they mean there. An option that
cannot be honoured is an error when the request is made, never dropped.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hf_paged.errors import ConfigError, UnknownOptionError

#: what other libraries call an option whose name here is not like it
_OTHER_NAMES = {
    "do_sample": "temperature", "eos_token_id": "stop_token_ids", "num_return_sequences": "n", "stop_strings": "stop",
    "use_beam_search": "num_beams",
}  # fmt: skip
_Options = TypeVar("_Options", bound=type)


def _says_what_is_known(cls: _Options) -> _Options:
    """Let a dataclass refuse keywords that are no fields of it with the nearest one that is."""
    known = [f.name for f in dataclasses.fields(cls)]
    make = cls.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                close = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                raise UnknownOptionError(
                    f"unknown option {name!r} of {cls.__name__}{hint} Known options: {', '.join(known)}"
                )
        make(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


@_says_what_is_known
@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request.

    Attributes:
        n: completions to return for the prompt, each from its own stream of random numbers; with beams, the best n.
        best_of: completions to sample, of which the n with the highest cumulative log-probability are returned; None
            samples n.
        num_beams: more than 1 is beam search, which is greedy, as in transformers.
        length_penalty, early_stopping: of beam search, as in transformers.
        max_tokens: tokens to generate at most; 0, with ``echo`` or ``prompt_logprobs``, only looks at the prompt. None
            goes on until the sequence has ``max_model_len`` tokens.
        min_tokens: tokens to generate before an end-of-sequence token, a stop token or a stop text may end it.
        temperature: 0 takes the most likely token; else scores are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all. 1 is the same as temperature 0.
        top_p, min_p, top_h, typical_p, epsilon_cutoff, eta_cutoff: truncations as in transformers; their neutral
            values are 1, 0, None, 1, 0 and 0.
        repetition_penalty, no_repeat_ngram_size: as in transformers, prompt included.
        encoder_repetition_penalty, encoder_no_repeat_ngram_size: as in transformers, where the prompt of a model
            without encoder takes the part of the encoder's input.
        presence_penalty, frequency_penalty: as in OpenAI's API, output only, subtracted from the scores first.
        bad_words_ids, sequence_bias, suppress_tokens, begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id,
        remove_invalid_values, exponential_decay_length_penalty, renormalize_logits: as in transformers.
        logit_bias: token id -> what is added to its score, from -100 to 100.
        allowed_token_ids: no other token can be chosen.
        stop: texts that end the output; ``include_stop_str_in_output`` keeps the one that did.
        stop_token_ids: ids that end it, besides the model's own unless ``ignore_eos``.
        seed: makes sampling reproducible whatever else is in the batch; None draws one.
        logprobs: alternatives to report per token, besides the chosen one; -1 reports every token that has a chance.
            None with beams, which have no one path.
        prompt_logprobs: the same for the tokens of the prompt.
        logprobs_mode: "raw" reports the log-softmax of the model's logits, "processed" that of the scores after all
            processors.
        echo: begin the output with the prompt.
        add_special_tokens: let the tokenizer add its special tokens (a BOS, as a rule) to a text prompt.
        truncate_prompt_tokens: keep only the last so many tokens of the prompt; None keeps all.
        skip_special_tokens: leave special tokens out of the text.
        logits_processors: called as in transformers, ``(input_ids [1, tokens], scores [1, vocab]) -> scores``.
        prefix_allowed_tokens_fn: ``(0, input_ids [tokens]) -> list of ids``, as in transformers.
        stopping_criteria: called as in transformers, ``(input_ids [1, tokens], scores [1, vocab]) -> whether to stop``,
            after each token, with the processed scores it was chosen from; in addition to all other ends.

    Token ids may come as a list, tuple, set or range of ints or as a tensor or array of one dimension; they are kept as
    a tuple. None for ``stop``, ``stop_token_ids``, ``logits_processors`` or ``stopping_criteria`` is none of them, ().

    Raises ConfigError for a value of the wrong kind or out of range, and for options that exclude one another; it is
    also a TypeError for a name that is no option.
    """

    n: int = 1
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    max_tokens: int | None = 16  # never None once the engine's front has taken the request
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words_ids: Sequence[Sequence[int]] | None = None
    sequence_bias: Any = None
    suppress_tokens: Collection[int] | None = None
    begin_suppress_tokens: Collection[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    renormalize_logits: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    echo: bool = False
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., Any]] = field(default_factory=tuple)
    prefix_allowed_tokens_fn: Callable[..., Any] | None = None
    stopping_criteria: Sequence[Callable[..., Any]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "logits_processors", "stopping_criteria"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        for name in _NUMBERS:
            value = getattr(self, name)
            self._check(name, _is_number(value), "a number")
        for name in _FLAGS:
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            self._check(name, _is_int(value) and value >= least, f"an int of at least {least}")
        if self.max_tokens is not None:
            self._check(
                "max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 0, "an int of at least 0, or None"
            )
        self._check("best_of", self.best_of is None or _is_int(self.best_of), "an int or None")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            wanted = "an int of at least 0, -1 for the whole vocabulary, or None"
            self._check(name, value is None or (_is_int(value) and value >= -1), wanted)
        self._check("seed", self.seed is None or _is_int(self.seed), "an int or None")
        self._check_ids()
        self._check_callables()
        self._check_scores()
        self._check_ends()
        self._check_beams()

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens"):
            value = getattr(self, name)
            if value is not None:
                ids = _token_ids(value)
                self._check(name, ids is not None, "a list of token ids")
                object.__setattr__(self, name, ids)
        words = self.bad_words_ids
        listed = words is None or (isinstance(words, list | tuple) and all(_token_ids(w) is not None for w in words))
        self._check("bad_words_ids", listed, "a list of lists of token ids")
        first, last = self.forced_bos_token_id, self.forced_eos_token_id
        self._check("forced_bos_token_id", first is None or _is_int(first), "a token id or None")
        known = last is None or _is_int(last) or _token_ids(last) is not None
        self._check("forced_eos_token_id", known, "a token id, a list of them, or None")

    def _check_callables(self) -> None:
        for name, wanted in (("logits_processors", "LogitsProcessor"), ("stopping_criteria", "StoppingCriteria")):
            value = getattr(self, name)
            listed = isinstance(value, list | tuple) and all(map(callable, value))
            self._check(name, listed, f"a list of {wanted}")
        allowed = self.prefix_allowed_tokens_fn
        self._check("prefix_allowed_tokens_fn", allowed is None or callable(allowed), "a function or None")

    def _check_scores(self) -> None:
        self._check("temperature", 0 <= self.temperature < float("inf"), "a number of at least 0")
        self._check(
            "top_k", _is_int(self.top_k) and self.top_k >= -1, "an int of at least 1, or 0 or -1 for all tokens"
        )
        for name in ("top_p", "typical_p"):
            self._check(name, 0 < getattr(self, name) <= 1, "more than 0 and at most 1")
        if self.top_h is not None:
            self._check("top_h", _is_number(self.top_h) and 0 < self.top_h <= 1, "more than 0 and at most 1, or None")
        for name in ("min_p", "epsilon_cutoff", "eta_cutoff"):
            self._check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        for name in ("repetition_penalty", "encoder_repetition_penalty"):
            self._check(name, 0 < getattr(self, name) < float("inf"), "more than 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2 <= getattr(self, name) <= 2, "from -2 to 2")
        known = self.logit_bias is None or isinstance(self.logit_bias, Mapping)
        self._check("logit_bias", known, "a dict of numbers by token id")
        for token, bias in (self.logit_bias or {}).items():
            if not _is_int(token) or not _is_number(bias) or not -100 <= bias <= 100:
                raise ConfigError(f"logit_bias[{token!r}]={bias!r} must be a number from -100 to 100 for a token id")
        self._check("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids), "token ids")
        decay = self.exponential_decay_length_penalty
        known = decay is None or _is_decay(decay)
        self._check("exponential_decay_length_penalty", known, "a pair (first token, factor) or None")
        self._check("logprobs_mode", self.logprobs_mode in ("raw", "processed"), "'raw' or 'processed'")
        if self.best_of is not None:
            self._check("best_of", self.best_of >= self.n, f"at least n={self.n}")
            if self.best_of > self.n and self.greedy and self.num_beams == 1:
                raise ConfigError(
                    f"best_of={self.best_of} completions would all be the same: give a temperature above 0, or "
                    "num_beams for a search"
                )

    def _check_ends(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        listed = isinstance(self.stop, list | tuple) and all(isinstance(text, str) for text in self.stop)
        self._check("stop", listed, "a text or a list of texts")
        if any(not text for text in self.stop):
            raise ConfigError("stop holds an empty text, which every output contains")
        keep = self.truncate_prompt_tokens
        self._check(
            "truncate_prompt_tokens", keep is None or (_is_int(keep) and keep >= 1), "an int of at least 1, or None"
        )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ConfigError("max_tokens=0 asks for nothing: give at least 1, or echo=True or prompt_logprobs as well")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")

    def _check_beams(self) -> None:
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        self._check("early_stopping", known, "True, False or 'never'")
        if self.num_beams == 1:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                self._check(name, getattr(self, name) == neutral, f"left at {neutral} without num_beams above 1")
            return
        if not self.greedy:
            raise ConfigError(
                f"num_beams={self.num_beams} with temperature={self.temperature}: beam search does not sample; set "
                "temperature=0"
            )
        self._check("n", self.n <= self.num_beams, f"at most num_beams={self.num_beams}")
        self._check("best_of", self.best_of is None, "None with num_beams above 1: the beams are what n is chosen from")
        self._check(
            "logprobs", self.logprobs is None,
            "None with num_beams above 1: a search reports cumulative_logprob and prompt_logprobs only",
        )  # fmt: skip
        self._check("max_tokens", self.max_tokens != 0, "an int of at least 1 with num_beams above 1")

    def _check(self, name: str, good: object, wanted: str) -> None:
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
            self.encoder_no_repeat_ngram_size,
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
    "encoder_repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty",
)  # fmt: skip
_FLAGS = (
    "remove_invalid_values", "renormalize_logits", "include_stop_str_in_output", "ignore_eos", "echo",
    "skip_special_tokens", "add_special_tokens",
)  # fmt: skip
#: their smallest values
_COUNTS = {
    "n": 1, "num_beams": 1, "min_tokens": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip
_NEUTRAL = (0, 1.0, 1.0, 0, 0, 0.0, 0.0, *(None,) * 6, False, *(None,) * 4)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_decay(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and _is_int(value[0]) and _is_number(value[1])


def _token_ids(value: object) -> tuple[int, ...] | None:
    """The ints of a list, tuple, set, range, tensor or array, or None where ``value`` is not that."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset | range) and all(map(_is_int, value)):
        return tuple(value)
    return None
