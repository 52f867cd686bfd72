"""The tokens of one sequence in the forms that processors read, kept up to date instead of built anew at every step.

A sequence only grows, also when it is preempted and resumed, so each form takes in what is new since it was last asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_paged.errors import InternalError

Ints = npt.NDArray[Any]

#: tokens that the first buffer of a sequence has room for beyond its prompt
_ROOM = 64


class History:
    """Forms of a sequence's tokens. Every method takes the whole sequence, prompt and output."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.long, device="cpu")
        self._length = 0
        self._last = -1
        self._counts: dict[int, _Counts] = {}

    def ids(self, tokens: Sequence[int], device: torch.device, more: int | None = None) -> torch.Tensor:
        """Token ids as a view ``[1, tokens]`` of a buffer, followed by the token ``more`` if there is one."""
        known, length = self._length, len(tokens)
        if known and (length < known or tokens[known - 1] != self._last):
            raise InternalError(f"a sequence of {known} tokens was replaced by another of {length}")
        if self._buffer.device != device or len(self._buffer) <= length:
            grown = torch.empty(2 * length + _ROOM, dtype=torch.long, device=device)
            grown[:known] = self._buffer[:known]
            self._buffer = grown
        if length > known:
            self._buffer[known:length] = torch.tensor(list(tokens[known:]), device=device)
            self._length, self._last = length, tokens[length - 1]
        if more is None:
            return self._buffer[None, :length]
        self._buffer[length] = more  # not counted: it may yet be refused, and is written over then
        return self._buffer[None, : length + 1]

    def counts(self, tokens: Sequence[int], start: int) -> tuple[Ints, Ints]:
        """The distinct tokens from position ``start`` on (int64), and how often each occurs there (int64)."""
        if start not in self._counts:
            self._counts[start] = _Counts(start)
        return self._counts[start].of(tokens)


class _Counts:
    def __init__(self, start: int) -> None:
        self._upto = start
        self._place: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("q")

    def of(self, tokens: Sequence[int]) -> tuple[Ints, Ints]:
        for token in tokens[self._upto :]:
            place = self._place.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += 1
        self._upto = max(self._upto, len(tokens))
        return np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64)
