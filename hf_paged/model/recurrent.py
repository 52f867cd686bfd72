"""Recurrent and convolutional state of single sequences, put together for a forward and taken apart after it.

A stock cache layer holds the state of a batch, one row a sequence. Here every sequence keeps a layer of its own with
one row; for a forward the rows are stacked in a new layer, which the model updates as ever. What a layer holds is not
known here: tensors are stacked along their first dimension, everything else is taken to be alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: of one sequence: layer index -> a stock layer with one row
State = dict[int, Any]


def stacked(layers: Sequence[Any]) -> Any:
    """One layer whose rows are those of ``layers``, which must be in the same condition (all new, or none)."""
    if len(layers) == 1:
        return layers[0]
    found = copy.copy(layers[0])
    for name in vars(found):
        setattr(found, name, _stack([vars(layer)[name] for layer in layers]))
    return found


def rows_of(layer: Any, count: int) -> list[Any]:
    """A layer for each of the ``count`` rows of ``layer``."""
    if count == 1:
        return [layer]

    def row(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: tensor[i : i + 1].clone()

    return [_with_tensors(layer, row(i)) for i in range(count)]


def cloned(state: State) -> State:
    """A state of its own that begins as ``state`` is now."""
    return {layer_idx: _with_tensors(layer, torch.Tensor.clone) for layer_idx, layer in state.items()}


def num_bytes(state: State) -> int:
    """What a state takes."""
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    for layer in state.values():
        _with_tensors(layer, count)
    return sum(sizes)


def _stack(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values), dim=0)
    if isinstance(first, dict):
        return {key: _stack([value[key] for value in values]) for key in first}
    if type(first) in (list, tuple):
        return type(first)(map(_stack, zip(*values, strict=True)))
    return first


def _with_tensors(layer: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a layer with each of its tensors changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, dict):
            return {key: changed(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(changed, value))
        return value

    found = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(found, name, changed(value))
    return found
