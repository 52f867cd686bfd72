"""Peer: OpenVINO GenAI's continuous batching on CPU; ``make bench-peers`` installs it.

The model is exported once, in fp32; inference and keys and values are in the dtype under test, or in fp32 where the
processor has no instructions for it; dynamic quantisation is off. Prefix caching is on, and the pipeline is made anew
to forget prefixes. It finds a prefix only after a request that has it finished, so where all requests share one, the
first is given alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
from hf_paged_peer import Peer, Request, Work, serve

#: what OpenVINO calls them, as a precision and as what a processor can do
_PRECISIONS = {"float32": ("f32", "FP32"), "bfloat16": ("bf16", "BF16"), "float16": ("f16", "FP16")}
_BLOCK = 32  # tokens in a block of the CPU plugin
#: shorter common beginnings are not worth a request alone
_WORTH_SHARING = 2 * _BLOCK


class OpenVinoPeer(Peer):
    packages = ("openvino", "openvino-genai", "optimum-intel")

    def prepare(self) -> None:
        self.exported = Path(self.job.scratch) / "fp32"
        if self.exported.is_dir():
            return
        part = Path(self.job.scratch) / "part"
        shutil.rmtree(part, ignore_errors=True)
        command = [
            str(Path(sys.executable).with_name("optimum-cli")),
            *("export", "openvino", "--model", self.job.model),
            *("--task", "text-generation-with-past", "--weight-format", "fp32", str(part)),
        ]
        subprocess.run(command, check=True)
        part.rename(self.exported)

    def load(self) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = max(scheduler.max_num_seqs, self.job.max_seqs)
        scheduler.num_kv_blocks = -(-self.job.kv_tokens // _BLOCK) + 2 * self.job.max_seqs
        self.precision, needed = _PRECISIONS[self.job.dtype]
        if needed not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            self.precision = "f32"
        properties = {
            "INFERENCE_NUM_THREADS": self.job.threads,
            "INFERENCE_PRECISION_HINT": self.precision,
            "KV_CACHE_PRECISION": self.precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(self.exported), scheduler_config=scheduler, device="CPU", properties=properties
        )

    def details(self) -> dict[str, object]:
        return {"precision": self.precision}

    def reset(self, work: Work) -> None:
        del self.pipeline
        self.load()

    def run(self, work: Work) -> list[list[list[int]]]:
        first, rest = work.requests[:1], work.requests[1:]
        if rest and work.shared_prefix() >= _WORTH_SHARING:
            return self._generate(first, work) + self._generate(rest, work)
        return self._generate(work.requests, work)

    def _generate(self, requests: list[Request], work: Work) -> list[list[list[int]]]:
        prompts = [ov.Tensor(np.array([request.prompt], dtype=np.int64)) for request in requests]
        done = self.pipeline.generate(prompts, [_generation_config(request, work) for request in requests])
        return [[list(ids) for ids in result.m_generation_ids] for result in done]


def _generation_config(request: Request, work: Work) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.out
    config.ignore_eos = True
    if work.samples > 1:
        config.do_sample, config.temperature, config.top_p = True, 1.0, 1.0
        config.num_return_sequences, config.rng_seed = work.samples, work.seed
    return config


if __name__ == "__main__":
    serve(OpenVinoPeer())
