"""What the tables say of a peer."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged.bench.results import Figures, PeerResult, Repeat
from hf_paged.bench.table import _beyond

TOLD = {"rss_model": 500, "weight_bytes": 200, "kv_bytes": 100}


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ([TOLD, {**TOLD, "kv_bytes": 300}], "2.00x"),
        ([TOLD, {"rss_model": 1, "weight_bytes": 1}], "2.00x"),  # the second one's blocks are not known
        ([{"rss_model": 500, "weight_bytes": 200}], "-"),
        ([], "-"),
    ],
)
def test_memory_beyond_model_and_blocks_is_said_where_all_is_known(details: list[dict[str, Any]], said: str) -> None:
    repeats = [Repeat(1.0, (1.0,), 0.0, False, 1000, found) for found in details]
    peer = PeerResult("peer")
    peer.cases = {str(i): Figures(repeats=[repeat]) for i, repeat in enumerate(repeats)}
    assert _beyond(peer) == said
