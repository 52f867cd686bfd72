"""Recurrent and convolutional state of single sequences, put together for a forward and taken apart after it.

A stock cache layer holds the state of a batch, one row a sequence. Here every sequence keeps a layer of its own with
one row; for a forward the rows are stacked in a new layer, which the model updates as ever. What a layer holds is not
known here: tensors are stacked along their first dimension, everything else is taken to be alike.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch


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
    rows = []
    for i in range(count):
        row = copy.copy(layer)
        for name, value in vars(layer).items():
            setattr(row, name, _row(value, i))
        rows.append(row)
    return rows


def _stack(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values), dim=0)
    if isinstance(first, dict):
        return {key: _stack([value[key] for value in values]) for key in first}
    return first


def _row(value: Any, i: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[i : i + 1].clone()
    if isinstance(value, dict):
        return {key: _row(inner, i) for key, inner in value.items()}
    return value
