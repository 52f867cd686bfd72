"""Peer: stock ``generate()`` in the batch order that suits it best, which needs to know output lengths beforehand.

Requests are sorted by output length and run in left-padded batches of 32, each for as long as its longest row; what is
beyond a row's length is thrown away.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.bench.adapters.transformers_peer import TransformersPeer
from hf_paged.bench.wire.hf_paged_peer import Work, serve

BATCH = 32


class StockGenerate(TransformersPeer):
    """``options`` go to every ``generate()`` call."""

    options: dict[str, Any]

    def load(self) -> None:
        super().load()
        self.options = {}
        self.model.generation_config.eos_token_id = None

    def run(self, work: Work) -> list[list[list[int]]]:
        torch.manual_seed(work.seed)
        order = sorted(range(len(work.requests)), key=lambda index: work.requests[index].out)
        outputs: list[list[list[int]]] = [[] for _ in order]
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            for index, completions in zip(rows, self._batch(work, rows), strict=True):
                outputs[index] = [ids[: work.requests[index].out] for ids in completions]
        return outputs

    def _batch(self, work: Work, rows: list[int]) -> list[list[list[int]]]:
        prompts = [work.requests[index].prompt for index in rows]
        new_tokens = max(work.requests[index].out for index in rows)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = self.generation_config(work.samples, max_new_tokens=new_tokens, pad_token_id=0)
        done = self.model.generate(ids, attention_mask=mask, generation_config=config, **self.options)
        return done[:, width:].reshape(len(rows), work.samples, -1).tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    serve(StockGenerate())
