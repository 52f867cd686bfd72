"""Text out of tokens as they come, and stop texts found across their borders.

A token is decoded behind those whose text came last, as decoders treat the first token specially, and is held back
while the text ends inside a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from hf_paged.errors import ConfigError

#: what decoders make of bytes that are no character, or not yet one
_BROKEN = "\ufffd"
#: tokens of the prompt to decode the first token behind
_WINDOW = 8


def backend_of(tokenizer: Any) -> Tokenizer:
    """The tokenizers library's part of a transformers tokenizer. Raises ConfigError for one that has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(f"a fast transformers tokenizer is wanted, not {type(tokenizer).__name__}")
    return backend


class Detokenizer:
    """Text of one completion.

    Args:
        tokenizer: a fast transformers tokenizer.
        prompt: the ids before the first token, so that it is decoded as a continuation. A character that the prompt
            leaves unfinished is not continued; tokens that would finish it read as they do without the prompt.
        stop: texts that end the output.
        include_stop: whether the text that ended it is part of it.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str], include_stop: bool, skip_special_tokens: bool
    ) -> None:
        self.text = ""
        self._fast, self._stop, self._include = backend_of(tokenizer), tuple(stop), include_stop
        self._skip = skip_special_tokens
        self._longest = max(map(len, self._stop), default=0)
        self._context, self._held = list(prompt[-_WINDOW:]), list[int]()
        while (known := self._decode(self._context)).endswith(_BROKEN):
            self._context.pop()
        self._known = known

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Take one token; returns the stop text it completed, if any and if it may. ``text`` then ends there."""
        self._held.append(token)
        piece = self._held_text()
        if not piece or piece.endswith(_BROKEN):
            return None
        self._context, self._held = self._held, []
        self._known = self._decode(self._context)
        return self._append(piece, may_stop)

    def finish(self, may_stop: bool = True) -> str | None:
        """Append what was held back, an unfinished character as U+FFFD; returns the stop text that completes, as
        :meth:`push` does. Only once no token follows; idempotent."""
        piece, self._held = self._held_text(), []
        return self._append(piece, may_stop) if piece else None

    def _append(self, piece: str, may_stop: bool) -> str | None:
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        if not may_stop:
            return None
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := self.text.find(stop, searched)) >= 0]
        if not ends:
            return None
        end, start, stop = min(ends)
        self.text = self.text[: end if self._include else start]
        return stop

    def settled(self) -> str:
        """The part of the text that no stop text can take back any more."""
        held = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:n]):
                    held = n
                    break
        return self.text[: len(self.text) - held]

    def _held_text(self) -> str:
        if not self._held:
            return ""
        whole = self._decode(self._context + self._held)
        if whole.startswith(self._known):
            return whole[len(self._known) :]
        return self._decode(self._held)  # a decoder of bytes gives up a whole run of them for one that is wrong

    def _decode(self, ids: list[int]) -> str:
        text: str = self._fast.decode(ids, self._skip)
        return text
