"""The claims that paged engines are known by, measured again with this one.

    python benchmarks/claims.py [--only memory beams policy overlap] [--dtype float32] [--repeats 3] [--out FOLDER]

    memory   what share of a pool holds tokens, how many requests run at once, and tokens/s, where each request
             reserves the longest it may get, its output rounded up to a power of two, just what it will need, or
             nothing (vLLM's paper, 2023: 20-40 % of memory used before paging; 2.4x and 1.8x over the power of two)
    beams    searches of 2, 4 and 6 beams, and as many samples, with every sequence in memory of its own, and shared
    policy   prompts of many tenants in a pool for half of their prefixes: first come, or longest prefix first
             (SGLang's paper, 2024)
    overlap  the next step is prepared while the present one runs, or not

Reservations are a rule of admission on top of the same engine: a request is handed over once what it reserves fits into
what the pool has, in order; so all of them have the same kernels, and none pays for copies that contiguous memory would
need. All runs of a question alternate; printed are medians of the repeats. Writes claims.json and claims.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_paged import AsyncLLM, EngineConfig, SamplingParams
from hf_paged.model.loader import load

HERE = Path(__file__).parent
BLOCK = 16
#: usable blocks of the pools, and the tokens that a request may have at most
POOL_BLOCKS, LONGEST = 320, 1024
SAMPLE_S = 0.02


@dataclass(frozen=True)
class Job:
    """One request: its prompt, how many tokens it will get, and how many sequences of it."""

    prompt: Sequence[int]
    out: int
    width: int = 1
    beams: bool = False

    def params(self) -> SamplingParams:
        if self.beams:
            return SamplingParams(
                num_beams=self.width,
                temperature=0,
                max_tokens=self.out,
                min_tokens=self.out,
                ignore_eos=True,
                early_stopping=False,
            )
        return SamplingParams(
            n=self.width, temperature=1.0 if self.width > 1 else 0.0, seed=7, max_tokens=self.out, ignore_eos=True
        )


Rule = Callable[[Job], int]

#: tokens that each way reserves for a request before it begins
RULES: dict[str, Rule] = {
    "maximum length": lambda job: LONGEST,
    "power of two": lambda job: len(job.prompt) + (1 << (job.out - 1).bit_length()),
    "oracle": lambda job: len(job.prompt) + job.out,
    "paged": lambda job: 0,
}


class Gate:
    """Lets requests in, in order, while what they reserve fits."""

    def __init__(self, tokens: int) -> None:
        self.free, self._waiting = tokens, asyncio.Condition()
        self._turn, self._next = 0, 0

    async def enter(self, tokens: int) -> None:
        async with self._waiting:
            ticket, self._next = self._next, self._next + 1
            await self._waiting.wait_for(lambda: self._turn == ticket and tokens <= self.free)
            self._turn, self.free = self._turn + 1, self.free - tokens
            self._waiting.notify_all()

    async def leave(self, tokens: int) -> None:
        async with self._waiting:
            self.free += tokens
            self._waiting.notify_all()

    @property
    def queue(self) -> int:
        return self._next - self._turn


@dataclass
class Run:
    """What one run of a trace showed. ``held`` (tokens of requests that have begun, as a share of the pool) and
    ``running`` are sampled while requests waited."""

    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    held: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "share_holding_tokens": statistics.fmean(self.held) if self.held else float("nan"),
            "requests_at_once": statistics.fmean(self.running) if self.running else float("nan"),
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "preemptions": float(self.preemptions),
        }


async def run(model: Any, jobs: Sequence[Job], rule: Rule, **options: Any) -> Run:
    """All jobs at once, behind the gate."""
    config = EngineConfig(block_size=BLOCK, **{"num_blocks": POOL_BLOCKS, "max_num_seqs": 256, **options})
    assert config.num_blocks is not None
    pool, found = config.num_blocks * BLOCK, Run()
    alive: dict[int, int] = {}
    async with AsyncLLM(model, config=config) as llm:
        async for _ in llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)):
            pass
        gate, done = Gate(pool), asyncio.Event()

        async def one(number: int, job: Job) -> None:
            reserved = rule(job)
            await gate.enter(reserved)
            last = None
            async for last in llm.generate(job.prompt, job.params()):
                lengths = [len(o.token_ids) for o in last.outputs]
                alive[number] = len(job.prompt) + sum(lengths)
            assert last is not None
            assert last.error is None, last.error
            del alive[number]
            await gate.leave(reserved)
            found.tokens += sum(len(o.token_ids) for o in last.outputs)
            found.prompt_tokens += len(job.prompt)
            found.cached_tokens += last.num_cached_tokens

        async def sample() -> None:
            while not done.is_set():
                stats = await asyncio.to_thread(llm.stats)
                if gate.queue or stats["waiting"]:
                    if not any(job.beams for job in jobs):  # of a search one hears only at its end
                        found.held.append(sum(alive.values()) / pool)
                    found.running.append(stats["running"])
                await asyncio.sleep(SAMPLE_S)

        sampler = asyncio.create_task(sample())
        start = time.perf_counter()
        await asyncio.gather(*(one(i, job) for i, job in enumerate(jobs)))
        found.seconds = time.perf_counter() - start
        done.set()
        await sampler
        found.preemptions = llm.stats()["preemptions"]
    return found


# -- traces --------------------------------------------------------------------------------------------------------


def chat(workloads: Path) -> list[Job]:
    """W1: prompts of 23-512 tokens, outputs of 8-256."""
    entries = json.loads(workloads.read_text(encoding="utf-8"))["W1"]
    return [Job(e["prompt"], e["out"]) for e in entries]


def instructions(vocab: int, count: int = 128) -> list[Job]:
    """Short ones: prompts of 8-40 tokens, outputs of 8-120, many short and few long."""
    draw = random.Random(3)
    return [
        Job([draw.randrange(3, vocab) for _ in range(draw.randint(8, 40))], min(120, 8 + int(draw.expovariate(1 / 40))))
        for _ in range(count)
    ]


def tenants(vocab: int, count: int = 24, prefix: int = 256, each: int = 6) -> list[Job]:
    """Requests of many tenants, each with a prefix of its own, in no order."""
    draw = random.Random(5)
    prefixes = [[draw.randrange(3, vocab) for _ in range(prefix)] for _ in range(count)]
    jobs = [Job([*p, *(draw.randrange(3, vocab) for _ in range(16))], 16) for p in prefixes for _ in range(each)]
    draw.shuffle(jobs)
    return jobs


# -- questions -----------------------------------------------------------------------------------------------------

Contest = dict[str, Callable[[], Any]]


def memory(model: Any, jobs: Sequence[Job]) -> Contest:
    return {
        name: lambda rule=rule: run(model, jobs, rule, prefix_caching=False, max_model_len=LONGEST)
        for name, rule in RULES.items()
    }


def _each_its_own(job: Job) -> int:
    return job.width * (len(job.prompt) + job.out)


def beams(model: Any, width: int, searching: bool) -> Contest:
    draw = random.Random(9)
    vocab = model.config.vocab_size
    jobs = [Job([draw.randrange(3, vocab) for _ in range(200)], 48, width, searching) for _ in range(12)]
    return {
        "each its own": lambda: run(model, jobs, _each_its_own, prefix_caching=False),
        "shared": lambda: run(model, jobs, RULES["paged"], prefix_caching=False),
    }


def policy(model: Any) -> Contest:
    jobs = tenants(model.config.vocab_size)
    distinct = 24 * 256 // BLOCK
    return {
        name: lambda name=name: run(model, jobs, RULES["paged"], policy=name, num_blocks=distinct // 2, max_num_seqs=8)
        for name in ("fcfs", "lpm")
    }


def overlap(model: Any, jobs: Sequence[Job]) -> Contest:
    return {
        name: lambda on=on: run(model, jobs, RULES["paged"], overlap=on, num_blocks=2048)
        for name, on in (("off", False), ("on", True))
    }


def measure(question: str, contest: Contest, repeats: int) -> dict[str, dict[str, float]]:
    """Medians of alternating runs, printed as a table; ratios are the last contestant's to each."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contest}
    for repeat in range(repeats):
        order = list(contest) if repeat % 2 == 0 else list(reversed(contest))
        for name in order:
            runs[name].append(asyncio.run(contest[name]()).figures())
    medians = {
        name: {key: statistics.median(figures[key] for figures in found) for key in found[0]}
        for name, found in runs.items()
    }
    print(f"\n{question}")
    best = medians[list(contest)[-1]]["tokens_per_second"]
    for name, figures in medians.items():
        spread, share = [f["tokens_per_second"] for f in runs[name]], figures["share_holding_tokens"]
        held = "" if math.isnan(share) else f"{share:4.0%} of the pool hold tokens, "
        print(
            f"  {name:16} {figures['tokens_per_second']:7.0f} tokens/s ({min(spread):.0f}-{max(spread):.0f}), "
            f"last is {best / figures['tokens_per_second']:4.2f}x; {held}"
            f"{figures['requests_at_once']:5.1f} at once, {figures['hit_rate']:4.0%} of prompts cached, "
            f"{figures['preemptions']:.0f} preempted",
            flush=True,
        )
    return {name: {k: v for k, v in figures.items() if not math.isnan(v)} for name, figures in medians.items()}


def draw(found: dict[str, dict[str, dict[str, float]]], path: Path, title: str) -> None:
    """A panel for each question, a bar for each contestant."""
    from matplotlib.figure import Figure

    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(5.0 * columns, 0.6 + 2.0 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (question, medians) in zip(panels, found.items(), strict=False):
        names = list(medians)
        speeds = [medians[name]["tokens_per_second"] for name in names]
        bars = panel.barh(names, speeds, color=["#8d99ae"] * (len(names) - 1) + ["#d1495b"])
        panel.bar_label(bars, [f"{s:.0f}  ({s / speeds[0]:.2f}x)" for s in speeds], padding=3, fontsize=8)
        panel.set_title(f"{question}, output tokens/s", fontsize=9)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.35 * max(speeds))
        panel.tick_params(labelsize=8)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("memory", "beams", "policy", "overlap")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "local")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, _ = load(options.model, dtype=getattr(torch, options.dtype))
    jobs = chat(HERE.parent / "hf_paged" / "bench" / "workloads.json")
    short = instructions(model.config.vocab_size)
    questions: dict[str, tuple[str, Contest]] = {
        "chat in one pool": ("memory", memory(model, jobs)),
        "short instructions in one pool": ("memory", memory(model, short)),
        **{f"{n} beams": ("beams", beams(model, n, True)) for n in (2, 4, 6)},
        **{f"{n} samples": ("beams", beams(model, n, False)) for n in (2, 4, 6)},
        "tenants": ("policy", policy(model)),
        "overlap": ("overlap", overlap(model, jobs)),
    }
    found = {
        name: measure(name, contest, options.repeats)
        for name, (kind, contest) in questions.items()
        if kind in options.only
    }
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": options.model, "dtype": options.dtype, "threads": options.threads, "repeats": options.repeats,
        "pool_tokens": POOL_BLOCKS * BLOCK, "longest": LONGEST, "block_size": BLOCK,
    }  # fmt: skip
    (options.out / "claims.json").write_text(json.dumps({"settings": settings, "medians": found}, indent=1) + "\n")
    draw(found, options.out / "claims.png", f"{options.model}, {options.dtype}, pool of {POOL_BLOCKS * BLOCK} tokens")


if __name__ == "__main__":
    main()
