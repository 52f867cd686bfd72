"""Soak: an engine under pressure for minutes. Random requests, clients that leave at any moment, a pool far too small.

    python benchmarks/soak.py [--requests 2000] [--seconds 600] [--clients 120] [--model demo] [--seed 0]

Lengths, options, priorities and salts are random; half of the prompts begin alike. The pool holds 20 % of what the
clients together would need, so requests wait, give way and come back, from a host tier while that has room. One request
in four is to be ended early: while it waits, in its prompt, in its output, or while it is preempted.

Ends with 0 only when all of this holds:

- every request was run within ``--seconds``, and none had an error or an output that its options do not allow;
- something moved at least every ``--watchdog`` seconds (else every thread's stack is printed and the process ends);
- requests were preempted and, in a run of 1,000 requests and more, clients left in every state there is;
- greedy requests got what stock ``generate()`` gives for them alone;
- the books balance, no block is in use, no request is known any more, and an emptied cache has every block free;
- resident memory is flat over the second half: a line through its samples (least squares) rises by less than
  ``--rss-limit`` MiB from half time to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch

from hf_paged import AsyncLLM, EngineDeadError, SamplingParams
from hf_paged.engine.frontend import EXPLAINED
from hf_paged.engine.request import Request
from hf_paged.model.loader import load

BLOCK = 16
#: greedy requests that are run again on the stock loop
COMPARED = 12
MOST_COMPLETIONS = 3
MIB = 1 << 20

#: where an unfinished request can be
MOMENTS: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda r: r.table is None and not r.preemptions,
    "in its prompt": lambda r: 0 < r.num_computed < len(r.prompt) and not r.num_output,
    "in its output": lambda r: r.table is not None and r.num_output > 1,
    "preempted": lambda r: r.table is None and bool(r.preemptions) and r.swapped is None,
    "swapped": lambda r: r.swapped is not None,
}
#: where a request comes only under pressure, and not by its own doing
VICTIM = ("preempted", "swapped")


@dataclasses.dataclass(frozen=True)
class Job:
    """A request, and when its client leaves, if it does; ``compared`` with the stock loop afterwards."""

    name: str
    prompt: str | list[int]
    params: SamplingParams
    priority: int
    salt: str | None
    leaves: str | None
    compared: bool


@dataclasses.dataclass
class Record:
    """What happened so far."""

    start: float = dataclasses.field(default_factory=time.monotonic)
    done: int = 0
    tokens: int = 0
    moved: float = dataclasses.field(default_factory=time.monotonic)
    left: Counter[str] = dataclasses.field(default_factory=Counter)
    errors: list[str] = dataclasses.field(default_factory=list)
    compared: list[tuple[list[int], SamplingParams, list[int]]] = dataclasses.field(default_factory=list)
    rss: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start


# -- what is asked for -------------------------------------------------------------------------------------------------


def jobs(count: int, seed: int, tokenizer: Any, vocab: int, longest_prompt: int, most_tokens: int) -> Iterator[Job]:
    """``count`` random requests; ``tokenizer`` None: token ids only, no stop texts."""
    draw = random.Random(seed)
    heads = [[draw.randrange(3, vocab) for _ in range(longest_prompt // 2)] for _ in range(3)]
    for number in range(count):
        head = draw.choice(heads)[: draw.choice([0, 0, 5, longest_prompt // 2])]
        own = [draw.randrange(3, vocab) for _ in range(draw.randint(1, longest_prompt - len(head)))]
        prompt: str | list[int] = [*head, *own]
        compared = number % max(1, count // COMPARED) == 0
        leaves = draw.choice([*MOMENTS, *VICTIM]) if draw.random() < 0.25 and not compared else None
        victim = leaves in VICTIM  # it should come to that: long, and nobody's first
        length = most_tokens * (5 if victim or draw.random() < 0.3 else 1)
        if tokenizer is not None and draw.random() < 0.3:
            prompt = tokenizer.decode(prompt)[: 2 * longest_prompt]
        if not prompt or (tokenizer is not None and isinstance(prompt, str) and not tokenizer(prompt)["input_ids"]):
            prompt = own
        yield Job(
            f"soak-{number}",
            prompt,
            _params(draw, tokenizer is not None, length, vocab, compared),
            priority=3 if victim else draw.randint(0, 3),
            salt=draw.choice([None, None, None, "a", "b"]),
            leaves=leaves,
            compared=compared,
        )


def _params(draw: random.Random, texts: bool, most_tokens: int, vocab: int, compared: bool) -> SamplingParams:
    length = draw.randint(1, most_tokens)
    if compared:
        return SamplingParams(temperature=0, max_tokens=length, repetition_penalty=draw.choice([1.0, 1.2]))
    options: dict[str, Any] = {"max_tokens": length, "n": draw.choice([1, 1, 1, 1, 2, MOST_COMPLETIONS])}
    choices: dict[str, Any] = {
        "temperature": draw.choice([0, 0.7, 1.0, 1.5]),
        "top_k": draw.randint(1, 50),
        "top_p": draw.uniform(0.3, 1.0),
        "min_p": draw.uniform(0.0, 0.2),
        "repetition_penalty": draw.uniform(1.0, 1.5),
        "presence_penalty": draw.uniform(-1, 2),
        "frequency_penalty": draw.uniform(-1, 2),
        "no_repeat_ngram_size": draw.randint(2, 4),
        "min_tokens": draw.randint(0, length),
        "logprobs": draw.randint(0, 5),
        "seed": draw.randrange(1000),
        "ignore_eos": True,
        "stop_token_ids": [draw.randrange(3, vocab) for _ in range(vocab // 50)],
        "logit_bias": {draw.randrange(3, vocab): draw.uniform(-5, 5)},
    }
    if texts:
        choices["stop"] = draw.sample([" the", "e", "and ", "\n\n", "ing t", "."], 2)
        choices["include_stop_str_in_output"] = True
    options.update({name: value for name, value in choices.items() if draw.random() < 0.25})
    return SamplingParams(**options)


def pool_size(clients: int, longest_prompt: int, most_tokens: int, share: float) -> int:
    """Blocks: ``share`` of what that many mean requests need, but enough for the longest request alone, five times
    as long as most."""
    mean_completions = 1.5  # of n in (1, 1, 1, 1, 2, 3)
    mean = -(-longest_prompt // 2 // BLOCK) + mean_completions * -(-most_tokens // 2 // BLOCK)
    return max(int(share * clients * mean), -(-(longest_prompt + 5 * most_tokens) // BLOCK) + 1)


# -- clients -----------------------------------------------------------------------------------------------------------


async def client(llm: AsyncLLM, work: Iterator[Job], record: Record, seconds: float, draw: random.Random) -> None:
    """Runs one job after another until there are none, or the time is over."""
    for job in work:
        if record.seconds > seconds:
            record.errors.append(f"{job.name} and those after it were not run in {seconds:.0f} seconds")
            return
        try:
            await _one(llm, job, record, draw)
        except Exception as error:  # whatever it is, the soak has failed and goes on to find more
            record.errors.append(f"{job.name}: {error!r}")
        record.done += 1
        record.moved = time.monotonic()


async def _one(llm: AsyncLLM, job: Job, record: Record, draw: random.Random) -> None:
    reading = asyncio.create_task(_read(llm, job, record))
    moment = None if job.leaves is None else await _reached(llm, job, reading)
    if moment is not None:
        how = draw.choice(["abort", "cancel"])
        record.left[moment] += 1
        if how == "cancel":
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            return
        await llm.abort(job.name)
        await llm.abort(job.name)
    output = await reading
    problem = _problem(job, output)
    if problem is not None:
        record.errors.append(f"{job.name}: {problem} ({job.params})")
    if job.compared and output.outputs[0].finish_reason != "abort":
        record.compared.append((output.prompt_token_ids, job.params, output.outputs[0].token_ids))


async def _read(llm: AsyncLLM, job: Job, record: Record) -> Any:
    seen = 0
    async for output in llm.generate(job.prompt, job.params, request_id=job.name, priority=job.priority, salt=job.salt):
        count = sum(len(completion.token_ids) for completion in output.outputs)
        record.tokens += count - seen
        seen = count
        record.moved = time.monotonic()
    return output


async def _reached(llm: AsyncLLM, job: Job, reading: asyncio.Task[Any]) -> str | None:
    """Wait for the moment at which the client leaves, and name it; None when the request ended without it."""
    scheduler = llm._llm.core.scheduler
    wanted = VICTIM if job.leaves in VICTIM else (job.leaves,)
    while not reading.done():
        parts = [scheduler.find(f"{job.name}-{row}") for row in range(job.params.n)]
        for moment in wanted:
            if any(MOMENTS[moment](part) for part in parts if part is not None):
                return moment
        await asyncio.sleep(0.003)
    return None


def _problem(job: Job, output: Any) -> str | None:
    """What is wrong with a finished output."""
    if output.error is not None:
        return f"ended with {output.error!r}"
    if not output.finished or len(output.outputs) != job.params.n:
        return f"{len(output.outputs)} outputs, finished={output.finished}"
    for completion in output.outputs:
        reasons = ("stop", "length") if job.leaves is None else ("stop", "length", "abort")
        if completion.finish_reason not in reasons:
            return f"ended with reason {completion.finish_reason}"
        if completion.finish_reason == "length" and len(completion.token_ids) != job.params.max_tokens:
            return f"{len(completion.token_ids)} tokens, then reason length"
        if job.params.logprobs is not None and len(completion.logprobs) != len(completion.token_ids):
            return f"{len(completion.token_ids)} tokens with {len(completion.logprobs)} logprobs"
    return None


# -- watching ----------------------------------------------------------------------------------------------------------


async def watch(llm: AsyncLLM, record: Record, watchdog: float, every: float = 10.0) -> None:
    """Samples memory, prints a line now and then, and keeps the watchdog quiet while something moves."""
    process, printed, armed = psutil.Process(), 0.0, 0.0
    ratio = llm._llm.core.scheduler.ratio
    while True:
        ratio.value = 0.0  # what it learned of its preemptions, the engine forgets: whatever fits now is let in
        record.rss.append((record.seconds, process.memory_info().rss / MIB))
        if record.moved > armed:
            armed = record.moved
            faulthandler.dump_traceback_later(watchdog, exit=True)
        if record.seconds - printed >= every:
            printed = record.seconds
            stats = llm.stats()
            print(
                f"{record.seconds:5.0f} s  {record.done:5d} done  {record.tokens / record.seconds:6.1f} tokens/s  "
                f"{stats['running']:3d} running {stats['waiting']:3d} waiting  {stats['preemptions']:5d} preemptions "
                f"({stats['swaps']} to the host)  {record.left.total():4d} left early  {record.rss[-1][1]:7.1f} MiB",
                flush=True,
            )
        await asyncio.sleep(0.1)


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y) samples; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


# -- verdict -----------------------------------------------------------------------------------------------------------


def leftovers(llm: AsyncLLM) -> list[str]:
    """What an idle engine should not have any more; every prefix is dropped for it."""
    core, found = llm._llm.core, []
    core.manager.check_invariants()
    stats = core.manager.stats()
    if stats.owned_blocks or stats.num_tables:
        found.append(f"{stats.owned_blocks} blocks are in use by {stats.num_tables} tables")
    if stats.free_host_blocks != stats.host_blocks:
        found.append(f"{stats.host_blocks - stats.free_host_blocks} blocks of the host tier are in use")
    if core.has_work or core.samplers:
        found.append(f"requests are still known: {core.scheduler.unfinished}, {list(core.samplers)}")
    core.manager.clear()
    if (free := core.manager.stats().free_blocks) != stats.num_blocks - 1:
        found.append(f"{free} of {stats.num_blocks - 1} blocks are free once the cache is empty")
    gc.collect()
    alive = sum(type(thing) is Request for thing in gc.get_objects())
    if alive > MOST_COMPLETIONS * EXPLAINED:
        found.append(f"{alive} completions are still in memory, {EXPLAINED} requests are remembered")
    return found


def differences(model: Any, compared: Sequence[tuple[list[int], SamplingParams, list[int]]]) -> list[str]:
    """Greedy requests that the stock loop answers differently."""
    found = []
    for prompt, params, tokens in compared:
        row = torch.tensor([prompt])
        options = {"max_new_tokens": params.max_tokens, "repetition_penalty": params.repetition_penalty}
        out = model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, **options)
        want = out[0, len(prompt) :].tolist()
        if want != tokens:
            found.append(f"a greedy request gave {tokens}, the stock loop gives {want}")
    return found


def verdict(record: Record, stats: dict[str, Any], rss_limit: float, every_moment: bool = True) -> list[str]:
    """What failed, from what was recorded; prints the memory's slope."""
    found = list(record.errors)
    half = record.rss[-1][0] / 2
    second_half = [sample for sample in record.rss if sample[0] >= half]
    growth = slope(second_half) * (second_half[-1][0] - second_half[0][0])
    print(
        f"resident memory: {record.rss[0][1]:.1f} MiB at the start, {second_half[0][1]:.1f} at half time, "
        f"{record.rss[-1][1]:.1f} at the end; second half: {60 * slope(second_half):+.2f} MiB a minute, "
        f"{growth:+.2f} MiB in all (limit {rss_limit:.0f})"
    )
    if growth > rss_limit:
        found.append(f"resident memory grew by {growth:.1f} MiB over the second half, more than {rss_limit:.0f}")
    if not stats["preemptions"]:
        found.append("nobody was preempted: the pool was too large to test anything")
    missing = [moment for moment in MOMENTS if not record.left[moment]] if every_moment else []
    return found + [f"no client left while {moment}" for moment in missing]


async def soak(args: argparse.Namespace, model: Any, tokenizer: Any) -> list[str]:
    """Run everything; returns what failed."""
    vocab = model.get_input_embeddings().num_embeddings
    blocks = pool_size(args.clients, args.longest_prompt, args.most_tokens, args.pool)
    work = jobs(args.requests, args.seed, tokenizer, vocab, args.longest_prompt, args.most_tokens)
    record, cpu = Record(), time.process_time()
    llm = AsyncLLM(
        model, tokenizer, block_size=BLOCK, num_blocks=blocks, max_num_batched_tokens=args.batched_tokens,
        policy="priority", preemption="swap", host_memory=args.host_memory, overlap=not args.no_overlap,
    )  # fmt: skip
    print(f"{args.requests} requests of {args.clients} clients, a pool of {blocks} blocks", flush=True)
    watching = asyncio.create_task(watch(llm, record, args.watchdog))
    draw = random.Random(args.seed + 1)
    await asyncio.gather(*(client(llm, work, record, args.seconds, draw) for _ in range(args.clients)))
    while llm._llm.core.has_work:  # what the last clients left behind ends with the next step
        await asyncio.sleep(0.01)
    watching.cancel()
    faulthandler.cancel_dump_traceback_later()
    stats = llm.stats()
    print(
        f"{record.done} requests, {record.tokens} tokens in {record.seconds:.0f} s ({time.process_time() - cpu:.0f} s "
        f"of CPU): {record.tokens / record.seconds:.1f} tokens/s; {stats['preemptions']} preemptions, "
        f"{stats['swaps']} to the host; {stats['steps']} steps, {stats['computed_tokens']} tokens computed"
    )
    print("clients left: " + ", ".join(f"{record.left[moment]} {moment}" for moment in MOMENTS))
    failed = verdict(record, stats, args.rss_limit, args.requests >= 1000) + leftovers(llm)
    try:
        llm.check_health()
    except EngineDeadError as error:
        failed.append(str(error))
    await asyncio.to_thread(llm.close)
    print(f"{len(record.compared)} greedy requests are compared with the stock loop")
    return failed + differences(model, record.compared)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600, help="all requests must have run by then")
    parser.add_argument("--clients", type=int, default=120, help="requests at once")
    parser.add_argument("--model", default="demo", help="a folder or a hub id (default: the small demo model)")
    parser.add_argument("--ids", action="store_true", help="token ids only: no tokenizer, no stop texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=float, default=0.2, help="share of the clients' demand that the pool holds")
    parser.add_argument("--longest-prompt", type=int, default=28)
    parser.add_argument("--most-tokens", type=int, default=8)
    parser.add_argument("--batched-tokens", type=int, default=96)
    parser.add_argument("--host-memory", default="2MiB", help="of the host tier, which is meant to be full at times")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--watchdog", type=float, default=60, help="seconds without any progress that end the run")
    parser.add_argument("--rss-limit", type=float, default=16, help="MiB that the second half may add")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of the model")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model, dtype=torch.float32)
    failed = asyncio.run(soak(args, model, None if args.ids else tokenizer))
    for line in failed[:20]:
        print(f"FAILED: {line}")
    print("FAILED" if failed else "passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
