"""What choosing tokens costs: microseconds per row, next to transformers' processors run row by row.

    python benchmarks/sampling.py [--rows 64] [--vocab 49152] [--repeats 7]

Both sides get the same logits and choose the same tokens in one run; each time is the median of the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import SamplingParams
from hf_paged.sampling.processors import processors_for
from hf_paged.sampling.sampler import Sampled, SamplerState, sample, uniform

SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "temperature + top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "temperature + top_k": SamplingParams(temperature=0.8, top_k=50),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    "all of them": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
}
PROMPT, OUTPUT = 256, 64


def row_by_row(logits: torch.Tensor, states: Sequence[SamplerState], tokens: Sequence[Sequence[int]]) -> list[int]:
    """The same choice with each processor as it is, and a draw from the row's float64 softmax."""
    chosen = []
    for row, state, own in zip(logits, states, tokens, strict=True):
        scores = row[None].clone()
        ids = torch.tensor([own]) if state.processors else None
        for processor in state.processors:
            scores = processor(ids, scores)
        if state.params.greedy:
            chosen.append(int(scores.argmax()))
            continue
        mass = scores[0].double().softmax(dim=-1).cumsum(dim=-1)
        chosen.append(int(torch.searchsorted(mass, uniform(state.seed, state.row, len(own)) * mass[-1], right=True)))
    return chosen


def median(work: Callable[[], object], repeats: int) -> float:
    """Seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=args.vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=1)
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(args.rows, args.vocab, generator=generator) * 3
    tokens = torch.randint(args.vocab, (args.rows, PROMPT + OUTPUT), generator=generator).tolist()
    for name, params in SETTINGS.items():
        states = [
            SamplerState(params, processors_for(model, params, own[:PROMPT], [2]), seed)
            for seed, own in enumerate(tokens)
        ]
        found = sample(logits, states, tokens)
        want = row_by_row(logits, states, tokens)
        if [result.token if isinstance(result, Sampled) else result for result in found] != want:
            raise SystemExit(f"{name}: the two sides chose different tokens")
        ours = median(lambda states=states: sample(logits, states, tokens), args.repeats) / args.rows * 1e6
        theirs = median(lambda states=states: row_by_row(logits, states, tokens), args.repeats) / args.rows * 1e6
        print(f"{name:20} {ours:8.1f} us per row   row by row {theirs:8.1f} us   {theirs / ours:5.1f}x")


if __name__ == "__main__":
    main()
