"""Text out of tokens as they come, and stop texts found across their borders.

The incremental decoder is the tokenizers library's DecodeStream, which holds back bytes that are not yet a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Text of one completion.

    Args:
        tokenizer: a fast transformers tokenizer.
        prompt: the ids before the first token, so that it is decoded as a continuation.
        stop: texts that end the output.
        include_stop: whether the text that ended it is part of it.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str], include_stop: bool, skip_special_tokens: bool
    ) -> None:
        self.text = ""
        self._fast, self._stop, self._include = tokenizer._tokenizer, tuple(stop), include_stop
        self._stream = DecodeStream(list(prompt[-8:]), skip_special_tokens)
        self._longest = max(map(len, self._stop), default=0)

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Take one token; returns the stop text it completed, if any and if it may. ``text`` then ends there."""
        piece = self._stream.step(self._fast, token)
        if not piece:
            return None
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
