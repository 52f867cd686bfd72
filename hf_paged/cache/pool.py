"""The tensors that hold keys and values, block by block, for all layers.

KVPool owns memory and nothing else: which block belongs to whom is KVCacheManager's business, how a block is laid out
and read is the storage backend's. Layers join when their first keys arrive, because only then are head counts, widths,
dtype and device known for certain (MLA and heterogeneous models differ from what a config says).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from hf_paged.errors import OutOfBlocksError

#: default share of free memory that a pool reserves
_AUTO_SHARE = 0.5
#: and the least it asks for before it gives up looking for less
_AUTO_LEAST = 1 << 24
#: prefixes that nobody uses may keep this much when the user named no size
_AUTO_PREFIX_BYTES = 1 << 30


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores per token.

    ``head_dim`` is the width of a key (and query) head, ``v_head_dim`` that of a value head; they differ in MLA.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def widths(self) -> tuple[int, int, int]:
        """Heads, and the widths of a key and of a value."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


@dataclass
class LayerKV:
    """Paged storage of one layer. The layout of ``k`` and ``v`` is known only to the backend that allocated them.

    Tensors are reserved once and stay at their address. On CPU, untouched pages cost no memory.
    """

    spec: LayerSpec
    num_blocks: int
    block_size: int
    k: torch.Tensor
    v: torch.Tensor
    backend: str
    #: free space for the backend: cached pointers, strides
    aux: dict[str, object] = field(default_factory=dict)


class KVStorage(Protocol):
    """The part of an attention backend that the pool needs."""

    def allocate(self, spec: LayerSpec, num_blocks: int, block_size: int) -> LayerKV: ...

    def copy_blocks(self, layers: Sequence[LayerKV], src: Sequence[int], dst: Sequence[int]) -> None: ...

    def touched_bytes(self, kv: LayerKV) -> int | None: ...


def free_memory(device: torch.device) -> int:
    """Bytes that a new allocation on ``device`` could take now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [bytes_ for bytes_ in (_machine_memory(), _cgroup_memory()) if bytes_ is not None]
    return min(known, default=8 << 30)  # no way to ask on this system; a reservation costs nothing until used


def _machine_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the container's limit leaves (cgroup v2, then v1), file cache counted as free; None without a limit."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            allowed, taken = (root / limit).read_text().strip(), (root / used).read_text().strip()
            fields = dict(line.split(None, 1) for line in (root / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if allowed.isdigit() and int(allowed) < 1 << 60:  # "max", or a huge number in v1: no limit
            cached = sum(int(fields.get(name, 0)) for name in ("inactive_file", "active_file"))
            return min(int(allowed), max(int(allowed) - int(taken) + cached, 0))
    return None


class KVPool:
    """Storage of one model's layers in blocks of ``block_size`` tokens, sized once from the first layer seen.

    Args:
        block_size: tokens per block.
        num_layers: layers that will store keys here; with the first layer's size it gives the bytes of a block.
        choose: picks the backend that lays out and serves a layer.
        memory: bytes for all layers together, or a share (a float below 1) of what is free; None for half of it.
        num_blocks: usable blocks instead of ``memory``. The null block is extra.

    ``set_aside``, until the first layer is seen: bytes of what is free that others will take; a share is of the rest.
    """

    def __init__(
        self,
        block_size: int,
        num_layers: int,
        choose: Callable[[LayerSpec, int], KVStorage],
        *,
        memory: int | float | None = None,
        num_blocks: int | None = None,
    ) -> None:
        self.set_aside = 0
        self.block_size = block_size
        self.num_layers = max(num_layers, 1)
        self.layers: dict[int, LayerKV] = {}
        self.backends: dict[int, KVStorage] = {}
        self._choose = choose
        self._memory = memory
        self._wanted_blocks = num_blocks
        self.num_blocks = 0 if num_blocks is None else num_blocks + 1
        self._bytes_per_block = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers that have joined (an estimate for the rest until they do)."""
        if not self.layers:
            return 0
        joined = sum(kv.spec.bytes_per_token for kv in self.layers.values()) * self.block_size
        return joined * max(self.num_layers, len(self.layers)) // len(self.layers)

    def size_for(self, spec: LayerSpec) -> int:
        """Physical blocks (the null block included) of a pool whose layers all look like ``spec``.

        Raises OutOfBlocksError when the memory given does not hold a single block.
        """
        if self._wanted_blocks is not None:
            return self._wanted_blocks + 1
        per_block = spec.bytes_per_token * self.block_size * self.num_layers
        memory = self._memory if self._memory is not None else self._reservable(spec.device)
        if isinstance(memory, float):
            memory = int(self._free(spec.device) * memory)
        usable = memory // per_block
        if usable < 1:
            raise OutOfBlocksError(
                f"memory={memory} bytes does not hold one block: a block of {self.block_size} tokens over "
                f"{self.num_layers} layers takes {per_block} bytes. Raise memory or lower block_size.",
                needed=1,
                available=0,
            )
        return int(usable) + 1

    def _free(self, device: torch.device) -> int:
        return max(0, free_memory(device) - self.set_aside)

    def _reservable(self, device: torch.device) -> int:
        """Half of what is free, or less where address space is limited (``ulimit -v``, many models in one process)."""
        memory = wanted = int(self._free(device) * _AUTO_SHARE)
        while memory > _AUTO_LEAST:
            try:
                torch.empty(memory, dtype=torch.uint8, device=device)
                break
            except RuntimeError:  # what every allocator of torch raises when it cannot
                memory //= 4
        # Where room is scarce, leave most of it: layouts may round head sizes up, and the model needs memory too.
        return memory if memory == wanted else memory // 4

    def auto_prefix_blocks(self, spec: LayerSpec) -> int:
        """Blocks that unused prefixes may keep when the user set no limit."""
        return max(1, _AUTO_PREFIX_BYTES // (spec.bytes_per_token * self.block_size * self.num_layers))

    def layer(self, layer_idx: int, spec: LayerSpec) -> tuple[LayerKV, KVStorage] | None:
        """Storage of layer ``layer_idx``, reserved on first use; None when it exists with another spec."""
        kv = self.layers.get(layer_idx)
        if kv is None:
            if self.num_blocks == 0:
                self.num_blocks = self.size_for(spec)
            backend = self._choose(spec, self.block_size)
            # tensors made in inference mode could not be written under no_grad by a later call
            with torch.inference_mode(False), torch.no_grad():
                try:
                    kv = backend.allocate(spec, self.num_blocks, self.block_size)
                except RuntimeError as error:
                    size = spec.bytes_per_token * self.block_size * self.num_blocks
                    raise OutOfBlocksError(
                        f"layer {layer_idx} could not reserve {size} bytes on {spec.device} for {self.num_blocks} "
                        f"blocks ({error}). Lower cache_config['memory'].",
                        needed=self.num_blocks,
                        available=0,  # storage is reserved whole or not at all
                    ) from error
            self.layers[layer_idx], self.backends[layer_idx] = kv, backend
        elif kv.spec != spec:
            return None
        return kv, self.backends[layer_idx]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks ``(src, dst)`` in every layer, in the order given."""
        src, dst = zip(*pairs, strict=True)
        by_backend: dict[int, tuple[KVStorage, list[LayerKV]]] = {}
        for idx, backend in self.backends.items():
            by_backend.setdefault(id(backend), (backend, []))[1].append(self.layers[idx])
        for backend, layers in by_backend.values():
            backend.copy_blocks(layers, src, dst)

    @property
    def touched_bytes(self) -> int | None:
        """Memory that storage has taken so far, where backends know: on a CPU as blocks are written, from the lowest
        up."""
        known = [self.backends[index].touched_bytes(kv) for index, kv in self.layers.items()]
        return None if None in known else sum(size for size in known if size is not None)

    @property
    def reserved_bytes(self) -> int:
        """Address space reserved, whether touched or not."""
        return sum(kv.k.nbytes + kv.v.nbytes for kv in self.layers.values())
