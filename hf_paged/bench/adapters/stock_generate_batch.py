"""Peer: transformers' own continuous batching, through the manager that ``generate_batch()`` uses, so that each request
can have its own length. Making and ending the manager, about a second, is not timed. Pages of 32 and 512 tokens a step
are what suited it best on a CPU."""

from __future__ import annotations

import contextlib

import torch
from transformers import ContinuousBatchingConfig

from hf_paged.bench.adapters.transformers_peer import TransformersPeer
from hf_paged.bench.wire.hf_paged_peer import Work, serve

_PAGE, _STEP_TOKENS = 32, 512
#: a token id that no model has: the manager takes it for "no end token"
_NO_END = -1


class StockGenerateBatch(TransformersPeer):
    def load(self) -> None:
        super().load()
        self.running = contextlib.ExitStack()

    def reset(self, work: Work) -> None:
        self.running.close()
        torch.manual_seed(work.seed)
        room = self.job.kv_tokens + self.job.max_seqs * _PAGE
        settings = ContinuousBatchingConfig(
            page_size=_PAGE, num_blocks=-(-room // _PAGE), max_batch_tokens=_STEP_TOKENS, seed=work.seed
        )
        config = self.generation_config(work.samples, eos_token_id=_NO_END, max_new_tokens=self.job.max_len)
        manager = self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings, timeout=5
        )
        self.manager = self.running.enter_context(manager)

    def run(self, work: Work) -> list[list[list[int]]]:
        names = [
            self.manager.add_request(request.prompt, max_new_tokens=request.out, eos_token_id=_NO_END)
            for request in work.requests
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(names) * work.samples:
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("the manager's thread ended before the requests did")
            elif result.error is not None:
                raise RuntimeError(f"request {result.request_id} failed: {result.error}")
            elif result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        children = range(work.samples - 1)
        return [[found[name], *(found[f"{name}__child#{i}"] for i in children)] for name in names]

    def stop(self) -> None:
        self.running.close()


if __name__ == "__main__":
    serve(StockGenerateBatch())
