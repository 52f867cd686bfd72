"""End to end: ``generate()`` on SmolLM2-135M-Instruct, paged beside stock, alternating in one process.

    python benchmarks/generate.py [--dtype float32 bfloat16] [--repeats 5] [--threads 2] [--quick]

Prints seconds (median of the repeats) and the ratio stock / paged: above 1 means paged is faster. The ratio is the
median of the ratios of neighbouring runs, so that a machine that slows down in between does not decide it. Every run
computes its prompts: prefix reuse is off, or the prompts are new each time, except in the line that shows the reuse.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import hf_paged
from hf_paged.model.loader import load

LENGTHS = [24 + (i * 83) % 456 for i in range(32)]


def prompts(lengths: list[int], vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids of these lengths, left-padded."""
    width, generator = max(lengths), torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (len(lengths), width), generator=generator)
    mask = (torch.arange(width)[None, :] >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def seconds(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **options: Any) -> float:
    start = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **options)
    assert out.shape[1] == inputs["input_ids"].shape[1] + new_tokens
    return time.perf_counter() - start


def compare(
    model: Any,
    name: str,
    lengths: list[int],
    new_tokens: int,
    repeats: int,
    *,
    new_prompts: bool = False,
    **config: Any,
) -> None:
    paged = {"cache_implementation": "paged", "cache_config": {"prefix_caching": False, **config}}
    vocab = model.config.vocab_size
    inputs = prompts(lengths, vocab)
    seconds(model, inputs, min(new_tokens, 4))
    seconds(model, inputs, min(new_tokens, 4), **paged)
    a, b = [], []
    for i in range(repeats):
        if new_prompts:
            inputs = prompts(lengths, vocab, seed=i + 1)
        runs = [(a, {}), (b, paged)]
        for out, options in runs if i % 2 == 0 else reversed(runs):
            out.append(seconds(model, inputs, new_tokens, **options))
    report(name, a, b)


def report(name: str, stock: list[float], paged: list[float]) -> None:
    """One line: seconds of neighbouring runs, and the median of their ratios."""
    ratios = [x / y for x, y in zip(stock, paged, strict=True)]
    print(
        f"  {name:42s} stock {statistics.median(stock):7.3f} s   paged {statistics.median(paged):7.3f} s   "
        f"ratio {statistics.median(ratios):5.2f}  ({min(ratios):.2f} .. {max(ratios):.2f})",
        flush=True,
    )


def ragged_ends(model: Any, lengths: list[int], new_tokens: int, repeats: int) -> None:
    """Rows that end at different lengths, as a list of end tokens makes them; also with a quarter of the blocks."""
    inputs = prompts(lengths, model.config.vocab_size, seed=7)
    width = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    free = model.generate(**inputs, **options, eos_token_id=None)[:, width:]
    chosen = {int(free[row, (row * 5 + 3) % new_tokens]) for row in range(0, len(lengths), 2)}
    options["eos_token_id"] = sorted(chosen)
    ends = [next((i + 1 for i, t in enumerate(row) if t in chosen), new_tokens) for row in free.tolist()]
    want = model.generate(**inputs, **options)
    demand = sum(-(-(length + end) // 16) for length, end in zip(lengths, ends, strict=True))
    for name, config in (
        ("rows that end at different lengths", {}),
        (
            "the same, pool for a quarter of them",
            {"num_blocks": max(demand // 4, -(-(max(lengths) + new_tokens) // 16))},
        ),
    ):
        paged = {"cache_implementation": "paged", "cache_config": {"prefix_caching": False, **config}}
        same = torch.equal(model.generate(**inputs, **options, **paged), want)
        a, b = [], []
        for i in range(repeats):
            runs = [(a, {}), (b, paged)]
            for out, extra in runs if i % 2 == 0 else reversed(runs):
                start = time.perf_counter()
                model.generate(**inputs, **options, **extra)
                out.append(time.perf_counter() - start)
        report(name, a, b)
        mean = sum(ends) / len(ends)
        print(f"    {'identical' if same else 'NOT identical'}; new tokens {min(ends)} .. {max(ends)}, mean {mean:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer rows, tokens and repeats")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hf_paged.register()
    lengths, new_tokens, repeats = (LENGTHS[:8], 16, 2) if args.quick else (LENGTHS, 64, args.repeats)
    print(f"torch {torch.__version__}, {args.threads} threads, {torch.backends.cpu.get_cpu_capability()}")
    for dtype in args.dtype:
        model, _ = load("demo", dtype=getattr(torch, dtype))
        print(f"{dtype}:")
        ragged_ends(model, [16 + (i * 83) % 497 for i in range(len(lengths))], new_tokens, repeats)
        for batch in (lengths, [224]):
            name = f"batch {len(batch)} ragged" if len(batch) > 1 else "batch 1, prompt 224"
            compare(model, f"{name}, {new_tokens} new tokens", batch, new_tokens, repeats)
            compare(
                model,
                "the same, default settings, new prompts",
                batch,
                new_tokens,
                repeats,
                new_prompts=True,
                prefix_caching=True,
            )
        compare(model, "batch 1, prompt 1024, 1 new token", [1024], 1, repeats)
        compare(model, "the same, its prefix reused", [1024], 1, repeats, prefix_caching=True)


if __name__ == "__main__":
    main()
