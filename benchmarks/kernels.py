"""Paged attention on CPU against torch's own attention, as ratios within one run.

    python benchmarks/kernels.py [--quick] [--shared] [--threads N]

Decode: the paged kernel reads K and V through shuffled block tables; the other side gathers them with index_select and
calls scaled_dot_product_attention. Both rotate over enough layers that nothing is found in the last-level cache, and
take turns, so that a disturbed machine disturbs both. The batch fills half of its pool: in use, too, a pool goes on
behind the last block that is taken, and its last huge page is one. The other side's tensors are as torch makes them.
Bandwidth is what the K and V of a call come to in bytes over its time, compared with the fastest plain read of a large
buffer, of huge pages where there are any, that this run could do.
Prefill: the paged kernel against scaled_dot_product_attention on contiguous tensors, the faster of enable_gqa and
repeated heads (the repetition itself is not counted).
Shared (with --shared, and then nothing else): decode steps of sequences with SHARED tokens in common and 32 to 64 of
their own, told which blocks they share against not told. Both read the same blocks of the same layers in turn, and must
come to the same bits.

Every result is also compared with the float32 reference. The exit status tells right from wrong, never fast from slow.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from hf_paged.attention.backends import cpu_native
from hf_paged.attention.backends.cpu_native import CpuNativeBackend
from hf_paged.attention.backends.torch_reference import TorchReferenceBackend
from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerKV, LayerSpec
from hf_paged.kernels.cpu import native

CPU = CpuNativeBackend()
BLOCK = 16
BATCH = 32
SHARED = 512
RUNS = 5
#: a sample takes at least this long: clocks and schedulers are coarse
MIN_SAMPLE_S = 0.03
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
FAKE_TOKENS = 5003  # prime, so that no two blocks of a pool are alike


@dataclass(frozen=True)
class Shape:
    label: str
    q_heads: int
    kv_heads: int
    head_dim: int

    def spec(self, dtype: torch.dtype) -> LayerSpec:
        return LayerSpec(self.kv_heads, self.head_dim, self.head_dim, dtype, torch.device("cpu"))


SHAPES = [Shape("SmolLM2 9/3x64", 9, 3, 64), Shape("Llama-3-8B 32/8x128", 32, 8, 128)]


# ------------------------------------------------------------------------------------------------------- machine


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def caches() -> dict[str, int]:
    """Name -> bytes of each cache of the first core, as the system reports them."""
    found: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level = (index / "type").read_text().strip(), (index / "level").read_text().strip()
        size = (index / "size").read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 1)
        if kind != "Instruction":
            found[f"L{level}"] = int(size.rstrip("KMG")) * factor
    return found


def available_memory() -> int:
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) << 10
    return 8 << 30


def working_set() -> int:
    """More than four last-level caches, within a sixth of the free memory (there are two copies, and scratch)."""
    return min(int(4.1 * max(caches().values(), default=32 << 20)), available_memory() // 6)


def read_bandwidth(num_bytes: int, threads: int) -> float:
    """GB/s of plain reads of one large buffer, in pieces of the size of a layer: the best quarter of many."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    read, start_of = native.library().read, buffer.data_ptr()
    piece = min(32 << 20, num_bytes)
    times = []
    for _ in range(RUNS):
        for offset in range(0, num_bytes - piece + 1, piece):
            start = time.perf_counter()
            read(start_of + offset, piece, threads)
            times.append(time.perf_counter() - start)
    return piece / sorted(times)[len(times) // 4] / 1e9


# -------------------------------------------------------------------------------------------------------- timing


def sample(call: Callable[[], object], calls: int) -> float:
    """The median time of at least ``calls`` calls, and of as many as fill MIN_SAMPLE_S."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < calls or time.perf_counter() - begin < MIN_SAMPLE_S:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def medians(*calls: tuple[Callable[[], object], int]) -> list[float]:
    """The median over RUNS samples of each call, given with the least number of calls a sample; they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call, _ in calls:
        call()
    for _ in range(RUNS):
        for (call, least), collected in zip(calls, times, strict=True):
            collected.append(sample(call, least))
    return [sorted(collected)[RUNS // 2] for collected in times]


# -------------------------------------------------------------------------------------------------------- decode


def fake_kv(num_tokens: int, spec: LayerSpec, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(FAKE_TOKENS, spec.num_kv_heads, spec.head_dim, generator=g).to(spec.dtype)
    return base.repeat(-(-num_tokens // FAKE_TOKENS), 1, 1)[:num_tokens]


def reference(
    query: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor, seq_len: int, scaling: float
) -> torch.Tensor:
    """One sequence in float32: query [Q, Hq, D], pools [blocks, BLOCK, Hkv, D], table [n]."""
    k, v = k_pool[table.long()].float(), v_pool[table.long()].float()
    spec = LayerSpec(k.shape[2], k.shape[3], v.shape[3], torch.float32, torch.device("cpu"))
    kv = LayerKV(spec, k.shape[0], BLOCK, k, v, "torch")
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, query.shape[0]], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=torch.arange(k.shape[0], dtype=torch.int32)[None],
        slot_mapping=torch.zeros(query.shape[0], dtype=torch.int64),
        max_query_len=query.shape[0],
        max_seq_len=seq_len,
    )
    return TorchReferenceBackend().attend(query.float(), kv, metadata, AttentionParams(scaling=scaling))


@dataclass(frozen=True)
class DecodeResult:
    paged_s: float
    gathered_s: float
    bandwidth: float
    error: float


def decode(shape: Shape, dtype: torch.dtype, context: int) -> DecodeResult:
    spec = shape.spec(dtype)
    num_blocks = BATCH * context // BLOCK
    bytes_per_layer = num_blocks * BLOCK * spec.bytes_per_token
    num_layers = max(2, -(-working_set() // bytes_per_layer))
    slots = torch.arange(num_blocks * BLOCK)
    paged: list[LayerKV] = []
    row_major: list[tuple[torch.Tensor, torch.Tensor]] = []
    k, v = fake_kv(len(slots), spec, 1), fake_kv(len(slots), spec, 2)
    for _ in range(num_layers):
        kv = CPU.allocate(spec, 2 * num_blocks, BLOCK)
        CPU.write(kv, k, v, slots)
        paged.append(kv)
        pool_shape = (num_blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
        row_major.append((k.clone().view(pool_shape), v.clone().view(pool_shape)))
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).view(BATCH, -1)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(BATCH + 1, dtype=torch.int32),
        seq_lens=torch.full((BATCH,), context, dtype=torch.int32),
        block_tables=tables.int(),
        slot_mapping=torch.zeros(BATCH, dtype=torch.int64),
        max_query_len=1,
        max_seq_len=context,
    )
    params = AttentionParams(scaling=shape.head_dim**-0.5)
    query = torch.randn(BATCH, shape.q_heads, shape.head_dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    flat, q4 = tables.flatten(), query[:, :, None]
    gathered_shape = (BATCH, context, spec.num_kv_heads, spec.head_dim)

    turns = {"paged": 0, "gathered": 0}

    def next_layer(who: str) -> int:
        turns[who] += 1
        return turns[who] % num_layers

    def run_paged() -> None:
        CPU.attend(query, paged[next_layer("paged")], metadata, params)

    def run_gathered() -> None:
        k_pool, v_pool = row_major[next_layer("gathered")]
        gk = k_pool.index_select(0, flat).view(gathered_shape).transpose(1, 2)
        gv = v_pool.index_select(0, flat).view(gathered_shape).transpose(1, 2)
        F.scaled_dot_product_attention(q4, gk, gv, scale=params.scaling, enable_gqa=True)

    paged_s, gathered_s = medians((run_paged, num_layers), (run_gathered, 1))
    out = CPU.attend(query, paged[-1], metadata, params)
    error = 0.0
    for i in (0, BATCH - 1):
        want = reference(query[i : i + 1], *row_major[0], tables[i], context, params.scaling)
        error = max(error, (out[i : i + 1].float() - want).abs().max().item())
    return DecodeResult(paged_s, gathered_s, bytes_per_layer / paged_s / 1e9, error)


# -------------------------------------------------------------------------------------------------------- shared


@dataclass(frozen=True)
class SharedResult:
    grouped_s: float
    apart_s: float
    same: bool
    error: float


def shared(shape: Shape, dtype: torch.dtype, batch: int, prefix: int) -> SharedResult:
    spec = shape.spec(dtype)
    own = [32 + 32 * i // max(1, batch - 1) for i in range(batch)]
    own_blocks = 64 // BLOCK
    prefix_blocks = prefix // BLOCK
    num_blocks = prefix_blocks + batch * own_blocks
    num_layers = max(2, -(-working_set() // (2 * num_blocks * BLOCK * spec.bytes_per_token)))
    num_layers = min(num_layers, 100)
    k, v = fake_kv(num_blocks * BLOCK, spec, 1), fake_kv(num_blocks * BLOCK, spec, 2)
    layers: list[LayerKV] = []
    for _ in range(num_layers):
        layers.append(CPU.allocate(spec, 2 * num_blocks, BLOCK))
        CPU.write(layers[-1], k, v, torch.arange(num_blocks * BLOCK))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
    own_part = order[prefix_blocks:].view(batch, own_blocks)
    tables = torch.cat([order[:prefix_blocks].expand(batch, -1), own_part], dim=1)

    def told(groups: bool) -> AttentionMetadata:
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32),
            seq_lens=torch.tensor([prefix + n for n in own], dtype=torch.int32),
            block_tables=tables.int(),
            slot_mapping=torch.zeros(batch, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=prefix + max(own),
        )
        cpu_native.GROUP_SEQUENCES = groups
        cpu_native.batch_address(metadata)
        cpu_native.GROUP_SEQUENCES = True
        return metadata

    grouped, apart = told(True), told(False)
    params = AttentionParams(scaling=shape.head_dim**-0.5)
    query = torch.randn(batch, shape.q_heads, shape.head_dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    turns = {"grouped": 0, "apart": 0}

    def run(who: str, metadata: AttentionMetadata) -> torch.Tensor:
        turns[who] += 1
        return CPU.attend(query, layers[turns[who] % num_layers], metadata, params)

    grouped_s, apart_s = medians(
        (lambda: run("grouped", grouped), num_layers), (lambda: run("apart", apart), num_layers)
    )
    out = CPU.attend(query, layers[0], grouped, params)
    same = torch.equal(out, CPU.attend(query, layers[0], apart, params))
    k_pool, v_pool = (x.view(num_blocks, BLOCK, spec.num_kv_heads, spec.head_dim) for x in (k, v))
    error = 0.0
    for i in (0, batch - 1):
        want = reference(query[i : i + 1], k_pool, v_pool, tables[i], prefix + own[i], params.scaling)
        error = max(error, (out[i : i + 1].float() - want).abs().max().item())
    return SharedResult(grouped_s, apart_s, same, error)


# ------------------------------------------------------------------------------------------------------- prefill


@dataclass(frozen=True)
class PrefillResult:
    paged_s: float
    sdpa_s: float
    error: float


def prefill(shape: Shape, dtype: torch.dtype, new: int, cached: int) -> PrefillResult:
    spec = shape.spec(dtype)
    total = new + cached
    num_blocks = total // BLOCK
    k, v = fake_kv(total, spec, 1), fake_kv(total, spec, 2)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
    t = torch.arange(total)
    slots = table[t // BLOCK] * BLOCK + t % BLOCK
    kv = CPU.allocate(spec, num_blocks, BLOCK)
    CPU.write(kv, k, v, slots)
    query = torch.randn(new, shape.q_heads, shape.head_dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, new], dtype=torch.int32),
        seq_lens=torch.tensor([total], dtype=torch.int32),
        block_tables=table[None].int(),
        slot_mapping=slots[cached:],
        max_query_len=new,
        max_seq_len=total,
    )
    params = AttentionParams(scaling=shape.head_dim**-0.5)
    q4, k4, v4 = (x.transpose(0, 1)[None].contiguous() for x in (query, k, v))
    group = shape.q_heads // shape.kv_heads
    k_all, v_all = k4.repeat_interleave(group, 1), v4.repeat_interleave(group, 1)
    mask = torch.ones(new, total, dtype=torch.bool).tril(cached) if cached else None

    def run_paged() -> torch.Tensor:
        return CPU.attend(query, kv, metadata, params)

    def run_sdpa() -> None:
        F.scaled_dot_product_attention(q4, k4, v4, mask, is_causal=mask is None, enable_gqa=True)

    def run_sdpa_repeated() -> None:
        F.scaled_dot_product_attention(q4, k_all, v_all, mask, is_causal=mask is None)

    paged_s, gqa_s, repeated_s = medians((run_paged, 1), (run_sdpa, 1), (run_sdpa_repeated, 1))
    k_pool, v_pool = (x.view(num_blocks, BLOCK, spec.num_kv_heads, spec.head_dim) for x in (k, v))
    want = reference(query, k_pool, v_pool, torch.arange(num_blocks), total, params.scaling)
    error = (run_paged().float() - want).abs().max().item()
    return PrefillResult(paged_s, min(gqa_s, repeated_s), error)


# ---------------------------------------------------------------------------------------------------------- main


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


Judge = Callable[[str, float, torch.dtype], str]


def print_shared(quick: bool, judge: Judge) -> None:
    print(f"\ndecode over a shared prefix and 32-64 tokens of each one's own, one layer, median of {RUNS}")
    print(
        f"{'shape':<20} {'dtype':<5} {'prefix':>6} {'batch':>5} {'grouped ms':>11} {'apart ms':>9} {'ratio':>7}", end=""
    )
    print(f" {'max err':>8}")
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for prefix in [SHARED] if quick else [SHARED, 8 * SHARED]:
                for batch in (2, 8, 32, 64):
                    r = shared(shape, dtype, batch, prefix)
                    gc.collect()
                    # Other bits are wrong, however close.
                    error = r.error if r.same else float("nan")
                    error_text = judge(f"shared {shape.label} {short(dtype)} {prefix} x {batch}", error, dtype)
                    print(
                        f"{shape.label:<20} {short(dtype):<5} {prefix:>6} {batch:>5} {r.grouped_s * 1e3:>11.3f} "
                        f"{r.apart_s * 1e3:>9.3f} {r.apart_s / r.grouped_s:>6.2f}x {error_text:>8}",
                        flush=True,
                    )


def report(wrong: list[str]) -> int:
    for line in wrong:
        print(f"WRONG {line}", file=sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one context length and one prompt per shape and dtype")
    parser.add_argument("--shared", action="store_true", help="decode steps over a shared prefix, and nothing else")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reason = CPU.unavailable()
    if reason:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 2

    sizes = ", ".join(f"{name} {size / (1 << 20):.4g} MiB" for name, size in caches().items())
    isa = native.ISA_LEVELS[native.isa_level()]
    print(
        f"machine: {cpu_name()}; caches {sizes or 'unknown'}; {args.threads} threads; ISA {isa}; "
        f"torch {torch.__version__}; working set {working_set() / 1e9:.2f} GB"
    )

    wrong: list[str] = []

    def judge(what: str, error: float, dtype: torch.dtype) -> str:
        if not error <= MAX_ERROR[dtype]:
            wrong.append(f"{what}: error {error:.2g} against float32, allowed {MAX_ERROR[dtype]:.2g}")
        return f"{error:.1e}"

    if args.shared:
        print_shared(args.quick, judge)
        return report(wrong)

    contexts = [1024] if args.quick else [256, 1024, 4096]
    print(f"\ndecode, batch {BATCH}, one layer, median of {RUNS}")
    print(f"{'shape':<20} {'dtype':<5} {'context':>7} {'paged ms':>9} {'gather+sdpa ms':>15} {'ratio':>7}", end="")
    print(f" {'GB/s':>6} {'of read':>16} {'max err':>8}")
    rate = read_bandwidth(working_set(), args.threads)
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for context in contexts:
                d = decode(shape, dtype, context)
                gc.collect()
                # beside each row: what memory gives may change twofold within the run on a machine that others share
                before, rate = rate, read_bandwidth(working_set(), args.threads)
                read = max(before, rate)
                error_text = judge(f"decode {shape.label} {short(dtype)} {context}", d.error, dtype)
                print(
                    f"{shape.label:<20} {short(dtype):<5} {context:>7} {d.paged_s * 1e3:>9.3f} "
                    f"{d.gathered_s * 1e3:>15.2f} {d.gathered_s / d.paged_s:>6.1f}x {d.bandwidth:>6.1f} "
                    f"{d.bandwidth / read:>7.0%} of {read:>5.1f} {error_text:>8}",
                    flush=True,
                )

    prompts = [(2048, 0)] if args.quick else [(2048, 0), (1024, 1024), (2048, 2048)]
    print(f"\nprefill, one sequence, one layer, median of {RUNS}")
    print(f"{'shape':<20} {'dtype':<5} {'new':>5} {'cached':>7} {'paged ms':>9} {'sdpa ms':>8} {'ratio':>7}", end="")
    print(f" {'max err':>8}")
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for new, cached in prompts:
                p = prefill(shape, dtype, new, cached)
                gc.collect()
                error_text = judge(f"prefill {shape.label} {short(dtype)} {new}+{cached}", p.error, dtype)
                print(
                    f"{shape.label:<20} {short(dtype):<5} {new:>5} {cached:>7} {p.paged_s * 1e3:>9.2f} "
                    f"{p.sdpa_s * 1e3:>8.2f} {p.sdpa_s / p.paged_s:>6.2f}x {error_text:>8}",
                    flush=True,
                )
    return report(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
