"""How a decode step's time grows: with the batch, the context, the queue, and what the cache holds.

    python benchmarks/growth.py [--dtype bfloat16] [--model demo] [--threads 2] [--out FOLDER]

Medians of single steps, all requests decoding. Nothing may grow with what merely waits or lies in the cache: their
lines have to be flat. Writes growth.json and growth.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hf_paged import LLM, EngineConfig, SamplingParams
from hf_paged.model.loader import load

HERE = Path(__file__).parent
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8000)
QUEUES = (0, 10, 100, 1_000, 10_000)
CACHED = (0, 10, 100, 1_000, 4_000)
STEPS = 24
#: prompts of their own, of any two of the same run
_fresh = itertools.count()


def prompt_of(length: int, vocab: int) -> list[int]:
    draw = random.Random(next(_fresh))
    return [draw.randrange(3, vocab) for _ in range(length)]


def step_time(llm: LLM, vocab: int, batch: int, context: int, waiting: int = 0) -> float:
    """Median milliseconds of a step of ``batch`` requests with about ``context`` tokens while others wait."""
    params = SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True)
    frontend = llm.frontend
    groups = [frontend.add(prompt_of(context - STEPS, vocab), params) for _ in range(batch)]
    while any(part.request.num_output < 2 for group in groups for part in group.parts.values()):
        frontend.step()
    queue = [frontend.add(prompt_of(24, vocab), params) for _ in range(waiting)]
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        frontend.step()
        times.append(time.perf_counter() - start)
    for group in [*groups, *queue]:
        frontend.drop(group)
    return 1000 * statistics.median(times)


def made(model: Any, sequences: int, tokens: int, **options: Any) -> LLM:
    config = EngineConfig(
        max_num_seqs=sequences, num_blocks=tokens // 16 + 64, overlap=False, **{"prefix_caching": False, **options}
    )
    return LLM(model, config=config)


def measure(model: Any) -> dict[str, dict[int, float]]:
    vocab, longest = model.config.vocab_size, model.config.max_position_embeddings
    found: dict[str, dict[int, float]] = {}

    def note(name: str, at: int, milliseconds: float) -> None:
        found.setdefault(name, {})[at] = milliseconds
        print(f"{name:36} {at:6d}  {milliseconds:8.2f} ms", flush=True)

    for batch in BATCHES:
        note("requests, context 256", batch, step_time(made(model, batch, batch * 320), vocab, batch, 256))
    for context in CONTEXTS:
        if context + STEPS <= longest:
            note("context, 4 requests", context, step_time(made(model, 4, 4 * (context + 64)), vocab, 4, context))
    for waiting in QUEUES:
        note("waiting, 8 requests run", waiting, step_time(made(model, 8, 8 * 320), vocab, 8, 256, waiting))
    llm, held = made(model, 8, CACHED[-1] * 32 + 8 * 320, prefix_caching=True, max_num_batched_tokens=2048), 0
    filler = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for cached in CACHED:
        llm.generate([prompt_of(16, vocab) for _ in range(cached - held)], filler, use_tqdm=False)
        held = cached
        note("prefixes in the cache, 8 requests run", cached, step_time(llm, vocab, 8, 256))
    return found


def draw(found: dict[str, dict[int, float]], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(found), 3.2), layout="constrained")
    for panel, (name, points) in zip(
        figure.subplots(1, len(found), squeeze=False).flatten(), found.items(), strict=True
    ):
        panel.plot(range(len(points)), list(points.values()), "o-", color="#d1495b")
        panel.set_xticks(range(len(points)), [f"{at:,}" for at in points], fontsize=7)
        panel.set_xlabel(name, fontsize=8)
        panel.set_ylabel("ms a step", fontsize=8)
        panel.set_ylim(0, 1.15 * max(points.values()))
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "local")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, _ = load(options.model, dtype=getattr(torch, options.dtype))
    found = measure(model)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"model": options.model, "dtype": options.dtype, "threads": options.threads}
    (options.out / "growth.json").write_text(json.dumps({"settings": settings, "milliseconds": found}, indent=1) + "\n")
    draw(
        found, options.out / "growth.png", f"A decode step: {options.model}, {options.dtype}, {options.threads} threads"
    )


if __name__ == "__main__":
    main()
