"""How far a peer's greedy tokens are those of fp32 stock. ``reference`` has their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.bench.wire.hf_paged_peer import common_length


@dataclass(frozen=True)
class Agreement:
    """Of ``requests``, so many are ``identical``; ``prefix`` is the mean share of a request's tokens before the first
    that differs."""

    requests: int
    identical: int
    prefix: float


def compare(reference: list[list[int]], outputs: list[list[int]]) -> Agreement:
    """Request by request; both have the same lengths."""
    shares = [common_length(want, got) / len(want) for want, got in zip(reference, outputs, strict=True)]
    return Agreement(len(shares), sum(share == 1.0 for share in shares), sum(shares) / len(shares))
