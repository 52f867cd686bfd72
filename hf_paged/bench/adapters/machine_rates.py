"""Not an engine: what this machine multiplies and reads, with the threads that the peers have.

Answers a run with ``details``: GFLOP/s of plain matrix products by shape, in the dtype under test or in float32,
whichever is faster, and GB/s read from buffers by size. Each is the best of several tries, since a floor is made of
them. Buffers are as large as the model's weights, which may partly stay in a cache as the weights may, and 1 GiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig

from hf_paged.bench.floor import ModelShape
from hf_paged.bench.wire.hf_paged_peer import Peer, Work, serve

_TRIES, _SECONDS = 3, 0.25
_CUBE = 2048
#: bytes of the smallest and the largest buffer
_SMALL, _LARGE = 1 << 26, 1 << 30


class MachineRates(Peer):
    packages = ("torch",)

    def load(self) -> None:
        torch.set_num_threads(self.job.threads)
        torch.set_grad_enabled(False)
        self.dtype = getattr(torch, self.job.dtype)
        self.shape = ModelShape.of(AutoConfig.from_pretrained(self.job.model))
        self.rates: dict[str, Any] = {}

    def run(self, work: Work) -> list[list[list[int]]]:
        hidden, inner = self.shape.hidden, self.shape.inner
        shapes = [(32, hidden, inner), (512, hidden, inner), (_CUBE, _CUBE, _CUBE)]
        sizes = {min(max(self.shape.weight_bytes(self.dtype.itemsize), _SMALL), _LARGE), _LARGE}
        self.rates = {
            "gflops": {"x".join(map(str, shape)): self._products(*shape) for shape in shapes},
            "read_gb_s": {f"{size / 2**20:.0f} MiB": _read_rate(size) for size in sorted(sizes)},
        }
        return []

    def details(self) -> dict[str, Any]:
        return self.rates

    def _products(self, m: int, k: int, n: int) -> float:
        """In float32 where that is faster: a processor without instructions for 16 bits can widen its operands."""
        seconds = []
        for dtype in {self.dtype, torch.float32}:
            a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            seconds.append(_best(partial(torch.nn.functional.linear, a, b)))
        return 2 * m * k * n / min(seconds) / 1e9


def _read_rate(size: int) -> float:
    """The better of a sum and a matrix-vector product, which torch spreads over threads differently."""
    values = torch.ones(size // 4 // 4096, 4096)
    vector = torch.ones(4096)
    seconds = min(_best(values.sum), _best(lambda: torch.mv(values, vector)))
    return values.numel() * 4 / seconds / 1e9


def _best(function: Callable[[], Any]) -> float:
    """Seconds of the fastest call."""
    function()
    fastest, until, tries = float("inf"), time.perf_counter() + _SECONDS, 0
    while tries < _TRIES or time.perf_counter() < until:
        start = time.perf_counter()
        function()
        fastest = min(fastest, time.perf_counter() - start)
        tries += 1
    return fastest


if __name__ == "__main__":
    serve(MachineRates())
