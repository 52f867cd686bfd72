"""Decoders of the usual build, recognised in a model and run by the native decoder instead of module by module.

A layer of the usual build is: norm, one or three projections to queries, keys and values, perhaps a norm of those,
rotary positions in halves, attention on blocks, a projection back, the sum, norm, a gated MLP (or whatever the model
has in its place, which then runs as it is), the sum; with norms behind attention and MLP where the model has them. What
modules are called is only how parts are found: each layer is then run beside the model's own on what the model itself
fed it, and so is the head, and where they differ the model runs as ever.

Weights are packed once more for the kernels (the model's own stay as they are); whoever owns a FusedDecoder makes
another one when they change. The residual stream is fp32 whatever the model's dtype.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged.attention.backends import cpu_native
from hf_paged.attention.metadata import AttentionMetadata, AttentionParams, LayerKV, LayerSpec
from hf_paged.errors import UnsupportedError
from hf_paged.kernels.cpu.decoder import Decoder, DecoderLayer, PackedLinear
from hf_paged.kernels.cpu.memory import HugePages
from hf_paged.model.parts import (
    PLAIN,
    DifferenceError,
    Parts,
    Seen,
    UnusualBuildError,
    asked,
    layer_of,
    norm_of,
    rows_of,
)

logger = logging.getLogger("hf_paged")

#: cosines and sines, float32 ``[tokens, rotary_dim]``, by kind of rotary embedding
Rotary = dict[str | None, tuple[torch.Tensor, torch.Tensor]]

#: weights in a row with which a model is tried out that seems to compute something else, before it is believed
_TRIALS = 3
#: what rounding may make of one number, as a share of it
_ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}
#: and beyond that, of all that is added to a token, as a share: of most tokens, and of any. A token may attend to one
#: of two others by a hair's breadth. So what is wrong at few tokens only, by less than this, is not seen in bfloat16
_ALLOWED = {torch.float32: (1e-5, 1e-3), torch.bfloat16: (0.04, 0.5)}
#: the same of both where rows are brought to 8 bits: a number between two of those may fall to either
_ALLOWED_OF_BYTES = (0.1, 0.5)
_MOST = 0.9
#: rows of logits that are compared: they are long
SCORED_ROWS = 4
#: positions that rotary tables begin with
_LEAST_POSITIONS = 256


@dataclass
class _Verdicts:
    """How often in a row the native decoder gave other numbers, by what epochs are besides weights; and the last epoch
    that it failed with."""

    trials: dict[tuple[Any, ...], int] = field(default_factory=dict)
    failed: tuple[Any, ...] | None = None


class Native:
    """The native decoder of a model's weights as they are, or what it was found not to be possible with.

    Not thread-safe but for :meth:`reconsider`. A copy keeps the decoder that there is while this one follows.
    """

    def __init__(self) -> None:
        self.decoder: FusedDecoder | None = None
        self._packed: tuple[Any, ...] | None = None
        self._verdicts = _Verdicts()

    def reconsider(self) -> None:
        """Try it again, whatever was found before."""
        self._verdicts = _Verdicts()  # others, so that a trial which runs now does not count

    def forget(self) -> None:
        """Have nothing packed."""
        self.decoder = self._packed = None

    def follow(self, epoch: tuple[Any, ...] | None, make: Callable[[], FusedDecoder]) -> None:
        """Have the weights of ``epoch`` packed. None means that nobody can tell whether weights change: then nothing
        packed is used. The first part of an epoch is about weights, the rest about everything else (see
        WeightsWatch.namespace). What goes wrong in ``make()`` is logged, and the model then runs module by module."""
        if epoch == self._packed:
            return
        self.forget()  # the old copies go before the new ones come, and an interrupt leaves nothing half made
        verdicts, start = self._verdicts, time.perf_counter()
        if epoch is None or epoch == verdicts.failed or verdicts.trials.get(epoch[1:], 0) >= _TRIALS:
            return
        try:
            decoder = make()
        except UnusualBuildError as error:
            verdicts.failed = epoch
            # other weights will hardly make a build usual, but they may make numbers what they should be
            seen = verdicts.trials.get(epoch[1:], 0) + 1 if isinstance(error, DifferenceError) else _TRIALS
            verdicts.trials[epoch[1:]] = seen
            last = " (not tried again before weights_changed())" if seen >= _TRIALS else ""
            logger.info("engine: the model runs module by module: %s%s", error, last)
        except Exception as error:  # a model may be anybody's code, and memory short: there is another way to run it
            verdicts.failed = epoch
            logger.warning("engine: the model runs module by module: packing its weights failed (%r)", error)
        else:
            self.decoder, self._packed = decoder, epoch
            verdicts.trials.pop(epoch[1:], None)
            took, size = time.perf_counter() - start, decoder.nbytes / (1 << 20)
            logger.info("engine: the model runs on the native decoder; packing %.0f MiB took %.2f s", size, took)


class FusedDecoder:
    """A model from token ids to logits. Packs the weights as they are now.

    Args:
        parts: with what a forward of the model's own has shown.
        params: what each layer's attention asked for in that forward.
        spec: what each layer stores of a token.

    Raises UnusualBuildError.
    """

    def __init__(self, parts: Parts, params: Sequence[AttentionParams], spec: LayerSpec) -> None:
        self.parts, self._params, self._spec = parts, list(params), spec
        self.dtype: torch.dtype = parts.head.weight.dtype
        #: by layer, what its rotary embedding is asked for with; None where all layers share one
        self._kinds = parts.rotary_kinds()
        self.rotary_dim = int(parts.seen[0].rotary[0].shape[-1])  # type: ignore[index] # or it would have no kinds
        #: whether the model's rotary tables are of half a rotation, both halves being alike (GPT-OSS)
        self._doubled = False
        self.hidden = parts.embed.weight.shape[1]
        #: cosines and sines of positions from 0, by kind, as many as were wanted so far
        self._known: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        memory = HugePages(parts.packable_bytes)
        self.layers = [
            layer_of(layer, params, spec, self.hidden, memory)
            for layer, params in zip(self.parts.layers, self._params, strict=True)
        ]
        self._heads = self.layers[0].o.k // spec.head_dim
        self._run_ends = self._ends_of_runs()
        self._norm = norm_of(parts.norm, self.hidden)
        self._head = parts.head_product(memory)
        self._check_sizes()
        self._allowed = _ALLOWED[self.dtype]
        if any(linear.offsets is not None for linear in self._linears()):
            self._allowed = _ALLOWED_OF_BYTES
        self._decoder: Decoder | None = None

    # -- making it ---------------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        """Raise UnusualBuildError unless every size and dtype is what the kernels will take it to be."""
        spec, inner = self._spec, self._heads * self._spec.head_dim
        attended = inner + 2 * spec.num_kv_heads * spec.head_dim
        if spec.head_dim != spec.v_head_dim or spec.dtype != self.dtype or self.rotary_dim > spec.head_dim:
            raise UnusualBuildError(f"what its layers store is {spec}, its rotation {self.rotary_dim} wide")
        if self._heads * spec.head_dim != self.layers[0].o.k or self._heads % spec.num_kv_heads:
            raise UnusualBuildError("its heads do not add up")
        wanted = {"qkv": (attended, self.hidden), "o": (self.hidden, inner)}
        for i, layer in enumerate(self.layers):
            sizes = {name: (linear.n, linear.k) for name, linear in (("qkv", layer.qkv), ("o", layer.o))}
            if layer.gate_up is not None and layer.down is not None:
                gated = -(-layer.down.k // 16) * 32
                wanted |= {"gate_up": (gated, self.hidden), "down": (self.hidden, layer.down.k)}
                sizes |= {"gate_up": (layer.gate_up.n, layer.gate_up.k), "down": (layer.down.n, layer.down.k)}
            for name, size in sizes.items():
                if size != wanted[name]:
                    raise UnusualBuildError(f"{name} of layer {i} is {size} where {wanted[name]} is usual")
            if layer.sinks is not None and layer.sinks.shape != (self._heads,):
                raise UnusualBuildError(f"layer {i} has sinks of shape {list(layer.sinks.shape)}")
        if self._head.k != self.hidden:
            raise UnusualBuildError(f"its head reads {self._head.k} numbers of {self.hidden}")
        dtypes = {p.dtype for p in self._linears()}
        if dtypes != {self.dtype}:
            raise UnusualBuildError(f"its weights are {', '.join(sorted(map(str, dtypes)))}")

    def _ends_of_runs(self) -> list[int]:
        """For each layer, the end of those that one call runs with it: one whose MLP is the model's own is the last,
        and so is one before another kind of rotations."""
        ends = [len(self.layers)] * len(self.layers)
        for i in range(len(self.layers) - 2, -1, -1):
            alone = self.layers[i].gate_up is None or self._kinds[i + 1] != self._kinds[i]
            ends[i] = i + 1 if alone else ends[i + 1]
        return ends

    def _linears(self) -> list[PackedLinear]:
        return [p for x in self.layers for p in (x.qkv, x.o, x.gate_up, x.down) if p is not None] + [self._head]

    @property
    def nbytes(self) -> int:
        """Bytes of packed copies."""
        return sum(p.nbytes for p in self._linears())

    def bind(self, storage: Sequence[LayerKV]) -> None:
        """Read and write blocks of these layers from now on. Raises UnusualBuildError."""
        bound = []
        for layer, params, kv in zip(self.layers, self._params, storage, strict=True):
            if kv.backend != cpu_native.CpuNativeBackend.name or kv.spec != self._spec:
                raise UnusualBuildError(f"its blocks are of the backend {kv.backend!r} and hold {kv.spec}")
            addresses = cpu_native.addresses(kv, params)
            bound.append(dataclasses.replace(layer, kv=addresses[0], params=addresses[1], keep=kv))
        self._decoder = self._made(bound)

    def _made(self, layers: Sequence[DecoderLayer]) -> Decoder:
        return Decoder(
            layers, hidden=self.hidden, heads=self._heads, kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim, rotary_dim=self.rotary_dim, dtype=self.dtype,
        )  # fmt: skip

    def check(
        self, metadata: AttentionMetadata, positions: torch.Tensor, ids: torch.Tensor, want: torch.Tensor
    ) -> None:
        """Raise UnusualBuildError unless each layer and the head compute what the model's own forward has shown.
        ``want`` are its logits for the last of ``ids``; blocks are written again, and what was shown is forgotten."""
        shown, self.parts.seen = self.parts.seen, []
        reason = self._difference(shown, metadata, positions, ids, want)
        if reason is None:
            return
        if 2 * self.rotary_dim <= self._spec.head_dim:
            assert self._decoder is not None
            self._doubled, self.rotary_dim = True, 2 * self.rotary_dim
            self.bind([layer.keep for layer in self._decoder.layers])
            if self._difference(shown, metadata, positions, ids, want) is None:
                return
        raise DifferenceError(reason)

    def _difference(
        self, shown: Sequence[Seen], metadata: AttentionMetadata, positions: torch.Tensor, ids: torch.Tensor,
        want: torch.Tensor,
    ) -> str | None:  # fmt: skip
        """Where it computes something else than was shown."""
        assert self._decoder is not None
        # not by way of tables up to the largest position
        rotary = {kind: self._tables(positions, kind) for kind in set(self._kinds)}
        halves = self._made([dataclasses.replace(layer, gate_up=None, down=None) for layer in self._decoder.layers])
        for i, seen in enumerate(shown):
            reason = self._layer_difference(i, seen, halves, metadata, rotary)
            if reason is not None:
                return f"layer {i} {reason}"
        fed, gave = shown[0].hidden, shown[-1].output
        assert fed is not None
        assert gave is not None
        if not torch.equal(self._embedded(ids), fed):
            return "its embeddings are changed on their way to the first layer"
        # from what the model's own last layer gave: at odd positions rounding grows from layer to layer
        got = self._logits(gave[-len(want) :])
        if got.shape != want.shape:
            return f"its logits are of shape {list(want.shape)} where its head gives {list(got.shape)}"
        # no token has others to choose from here
        off = float(self._shares(got, want, want - want.mean(-1, keepdim=True), want.abs()).max()) / self._allowed[0]
        return None if off <= 1 else f"its logits are something else ({off:.2g} times what is rounding)"

    def _layer_difference(
        self, index: int, seen: Seen, halves: Decoder, metadata: AttentionMetadata, rotary: Rotary,
    ) -> str | None:  # fmt: skip
        """``halves`` are the layers up to where their MLPs begin."""
        fed, gave = seen.hidden, seen.output
        assert fed is not None
        assert gave is not None
        if len(seen.mlp) != 1:
            return f"calls its MLP {len(seen.mlp)} times"
        mlp_fed, mlp_gave = seen.mlp[0]
        if mlp_fed.shape != (1, *fed.shape) or mlp_fed.dtype != self.dtype or mlp_gave.shape != fed.shape:
            return f"feeds {mlp_fed.dtype} {list(mlp_fed.shape)} to its MLP, which gives {list(mlp_gave.shape)}"
        added, size = self._after_mlp(index, mlp_gave), torch.maximum(fed.abs(), gave.abs())
        x = fed.clone()
        cos, sin = rotary[self._kinds[index]]
        halves.decode(x, cos, sin, cpu_native.batch_address(metadata), metadata.slot_mapping, index, index + 1)
        middle, normed = gave - added, mlp_fed[0].float()
        off = {"attention": self._off(x, middle, middle - fed, torch.maximum(size, added.abs()))}
        rows = halves.project(self.layers[index].before_mlp, None, x).float()
        off["norm before its MLP"] = self._off(rows, normed, normed, normed.abs())
        if self.layers[index].gate_up is None:
            # on just what it was fed: it may choose its experts by numbers that are rounded
            off["MLP"] = self._off(self._own_mlp(index, mlp_fed[0]), mlp_gave, mlp_gave, mlp_gave.abs())
        else:
            x = fed.clone()
            self._run(x, metadata, rotary, index, index + 1)
            off["MLP"] = self._off(x, gave, gave - fed, size)
        for part, times in off.items():
            if not times <= 1:
                return f"computes something else in its {part} ({times:.2g} times what is rounding)"
        return None

    def _off(self, got: torch.Tensor, want: torch.Tensor, change: torch.Tensor, size: torch.Tensor) -> float:
        """How far ``got`` is off; above one means that more is off than rounding explains."""
        return self._worst(self._shares(got, want, change, size))

    def _worst(self, shares: torch.Tensor) -> float:
        """The worst of ``shares`` as a multiple of what rounding explains."""
        most, any_ = self._allowed
        # the first token sees only itself, and has nothing to choose from
        return float(torch.stack([shares.quantile(_MOST) / most, shares[0] / most, shares.max() / any_]).max())

    def _shares(self, got: torch.Tensor, want: torch.Tensor, change: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """How far each token of ``got`` is off, beyond the rounding of numbers as large as ``size``, as a share of
        ``change``, the root mean square of a token's numbers. Each token by itself: some of real models' have numbers a
        thousand times larger than all others have."""
        excess = ((got - want).abs() - size * _ROUNDING[self.dtype]).clamp_min(0)
        off, whole = (x.square().mean(-1).sqrt() for x in (excess, change))
        return torch.where(off == 0, off, off / whole)

    # -- running it --------------------------------------------------------------------------------------------------

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Logits, float32 ``[len(wanted), vocab]``, of the tokens with the indices ``wanted`` (int64).

        ``ids`` and ``positions`` are int64 ``[tokens]``, as ``metadata`` packs them.
        """
        x = self._embedded(ids)
        self._run(x, metadata, self._rotaries(positions, metadata.max_seq_len), 0, len(self.layers))
        if not len(wanted):
            return x.new_empty(0, self._head.n)
        return self._logits(x if len(wanted) == len(x) else x.index_select(0, wanted))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        assert self._decoder is not None
        logits = self._decoder.project(self._norm, self._head, x)
        cap = self.parts.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.parts.embed(ids)
        if rows.shape != (len(ids), self.hidden) or rows.device.type != "cpu":
            raise UnsupportedError(
                f"the embeddings of {len(ids)} tokens are now {list(rows.shape)} on {rows.device}: make a new engine "
                "after changing a model's device or sizes"
            )
        # copied in any case: somebody's own module may keep what it returns
        return rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def _run(self, x: torch.Tensor, metadata: AttentionMetadata, rotary: Rotary, first: int, last: int) -> None:
        """Layers ``first`` to ``last - 1`` on ``x``, in place."""
        decoder = self._decoder
        assert decoder is not None
        batch, slots = cpu_native.batch_address(metadata), metadata.slot_mapping
        while first < last:
            end = min(self._run_ends[first], last)
            cos, sin = rotary[self._kinds[first]]
            decoder.decode(x, cos, sin, batch, slots, first, end)
            layer = self.layers[end - 1]
            if layer.gate_up is None:
                normed = decoder.project(layer.before_mlp, None, x)
                x += self._after_mlp(end - 1, self._own_mlp(end - 1, normed))
            first = end

    def _own_mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.parts.layers[index].mlp
        return rows_of(mlp(normed[None]))

    def _after_mlp(self, index: int, out: torch.Tensor) -> torch.Tensor:
        norm = self.layers[index].after_mlp
        if norm is None:
            return out
        return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm.eps) * norm.weight

    def _rotaries(self, positions: torch.Tensor, longest: int) -> Rotary:
        """Those of ``positions``, which are below ``longest``."""
        found: Rotary = {}
        for kind in set(self._kinds):
            known = self._known.get(kind)
            if known is None or longest > len(known[0]):
                length = max(_LEAST_POSITIONS, 1 << (longest - 1).bit_length())
                known = self._known[kind] = self._tables(torch.arange(length, device="cpu"), kind)
            found[kind] = known[0].index_select(0, positions), known[1].index_select(0, positions)
        return found

    def _tables(self, positions: torch.Tensor, kind: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of one kind from the model's own module."""
        x = torch.empty(1, 1, 1, **PLAIN).expand(1, len(positions), self.hidden)  # of which it may read the shape
        named = {} if kind is None else {"layer_type": kind}
        found = asked(self.parts.rotary, x, position_ids=positions[None], **named)
        cos, sin = (torch.cat([t[0], t[0]], -1) if self._doubled else t[0] for t in found)
        for table in (cos, sin):
            if table.shape != (len(positions), self.rotary_dim) or table.device.type != "cpu":
                raise UnusualBuildError(f"its rotary tables of {len(positions)} positions are {list(table.shape)}")
        return cos.float().contiguous(), sin.float().contiguous()
