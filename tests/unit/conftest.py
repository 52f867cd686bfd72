"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[None]:
    """What the test makes of torch's number of threads is undone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
