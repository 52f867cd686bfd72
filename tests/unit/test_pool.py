"""KVPool's questions to the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_paged.attention.backends.torch_reference import TorchReferenceBackend
from hf_paged.cache import pool
from hf_paged.config import CacheConfig
from hf_paged.errors import ConfigError


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"memory.max": "max\n", "memory.current": "5000\n", "memory.stat": "anon 1\n"}, None),
        ({"memory.max": "8000\n", "memory.current": "5000\n", "memory.stat": "anon 5000\n"}, 3000),
        ({"memory.max": "8000\n", "memory.current": "9000\n", "memory.stat": ""}, 0),
        (
            {
                "memory.max": "8000\n",
                "memory.current": "7900\n",
                "memory.stat": "anon 900\ninactive_file 5000\nactive_file 2000\n",
            },
            7100,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "8000",
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "cache 3\n",
            },
            7000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "",
            },
            None,
        ),
    ],
)
def test_what_a_containers_limit_leaves(tmp_path: Path, files: dict[str, str], want: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert pool._cgroup_memory(tmp_path) == want


def test_free_memory_is_the_smaller_of_machine_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_machine_memory", lambda: 10)
    monkeypatch.setattr(pool, "_cgroup_memory", lambda: 7)
    assert pool.free_memory(torch.device("cpu")) == 7
    monkeypatch.setattr(pool, "_cgroup_memory", lambda: None)
    assert pool.free_memory(torch.device("cpu")) == 10


def test_memory_may_be_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "free_memory", lambda device: 1 << 20)
    spec = pool.LayerSpec(2, 8, 8, torch.float32, torch.device("cpu"))
    share = CacheConfig(memory="25%").memory
    assert share == 0.25 and CacheConfig(memory=0.25).memory == 0.25
    made = pool.KVPool(16, 1, lambda spec, block_size: TorchReferenceBackend(), memory=share)
    assert made.size_for(spec) == (1 << 18) // (spec.bytes_per_token * 16) + 1
    for bad in ("0%", "96%", "x%", 0.0, 1.5, -0.1):
        with pytest.raises(ConfigError, match="share"):
            CacheConfig(memory=bad)
