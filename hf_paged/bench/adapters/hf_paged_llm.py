"""Peer: ``hf_paged.LLM``, as a user gets it without options, or with the quantization named on the command line."""

from __future__ import annotations

import sys
from typing import Any

from hf_paged import LLM, SamplingParams
from hf_paged.bench.adapters.transformers_peer import TransformersPeer
from hf_paged.bench.wire.hf_paged_peer import Work, serve


class PagedLLM(TransformersPeer):
    packages = ("hf-paged", *TransformersPeer.packages)

    def __init__(self, quantization: str | None = None) -> None:
        super().__init__()
        self.quantization = quantization
        if quantization is not None:
            self.packages = (*self.packages, "torchao")

    def load(self) -> None:
        super().load()
        self.llm = LLM(self.model, quantization=self.quantization)

    def reset(self, work: Work) -> None:
        self.llm.reset_prefix_cache()

    def details(self) -> dict[str, Any]:
        """Also the bytes of RAM that blocks have taken: a pool on CPU costs nothing before it is used."""
        blocks = self.llm.core.runner.pool.touched_bytes
        found = {**super().details(), "hit_tokens": self.llm.stats()["hit_tokens"]}
        return found if blocks is None else {**found, "kv_bytes": blocks}

    def run(self, work: Work) -> list[list[list[int]]]:
        prompts = [request.prompt for request in work.requests]
        greedy = work.samples == 1
        params = [
            SamplingParams(
                n=work.samples,
                temperature=0 if greedy else 1,
                max_tokens=request.out,
                ignore_eos=True,
                seed=None if greedy else work.seed,
            )
            for request in work.requests
        ]
        done = self.llm.generate(prompts, params, use_tqdm=False)
        for output in done:
            if output.error is not None:
                raise output.error
        return [[list(completion.token_ids) for completion in output.outputs] for output in done]


if __name__ == "__main__":
    serve(PagedLLM(*sys.argv[1:]))
