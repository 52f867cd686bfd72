"""Peer: ``generate(cache_implementation="paged")``, in the same batches as stock."""

from __future__ import annotations

import hf_paged
from hf_paged.bench.adapters.stock_generate import StockGenerate
from hf_paged.bench.wire.hf_paged_peer import Work, serve


class PagedGenerate(StockGenerate):
    packages = ("hf-paged", *StockGenerate.packages)

    def load(self) -> None:
        super().load()
        hf_paged.register()
        self.options = {"cache_implementation": "paged"}

    def reset(self, work: Work) -> None:
        hf_paged.clear(self.model)


if __name__ == "__main__":
    serve(PagedGenerate())
