"""From a plan to logits: builds a step's tensors, runs the stock forward on a view of the model, executes copies.

It owns the view, the pool and the choice of how requests share a forward. It keeps nothing about requests between
steps: all it needs is in the SchedulerOutput. The engine's core calls it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_paged import compat
from hf_paged.attention import interface, registry
from hf_paged.attention.metadata import AttentionMetadata, LayerKV, LayerSpec
from hf_paged.cache.block import BlockCopy, SwapOut, Transfer
from hf_paged.cache.checkpoints import Checkpoint
from hf_paged.cache.offload import HostTier
from hf_paged.cache.pool import KVPool
from hf_paged.errors import HfPagedError, InternalError, UnsupportedError
from hf_paged.model.engine_cache import EngineCache, Step
from hf_paged.model.fused import SCORED_ROWS, FusedDecoder, Native
from hf_paged.model.packing import Probe, Work, flat_ids, pack, tables_of
from hf_paged.model.parts import Parts, UnusualBuildError
from hf_paged.model.quantized import AS_FOUND, Quantization, quantizes_rows, shares_row_scale
from hf_paged.model.recurrent import State, cloned, num_bytes, rows_of, stacked
from hf_paged.model.view import input_device, same_structure, static_rope_length, view_of

logger = logging.getLogger("hf_paged")

#: blocks of a pool that stores nothing
_BLOCKS_OF_NOTHING = 1 << 20
#: tokens of the two sequences that a new model is tried out with
_PROBE_LENGTHS = (9, 5)
#: where a recurrent model's prompt is cut to see whether it can go on with several tokens
_PIECES = (14, 17, 33)
#: tokens in a block, at most, where the native decoder is tried out
_TRIAL_BLOCK = 16
#: share of what a lost state costs that going on from one may differ by
_ROUNDING = 0.25


@dataclass(frozen=True)
class Prepared:
    """A step's work, and what can be made of it before its token ids are known (None for padded rows): the step, the
    positions int64 ``[tokens]``, and the indices of the tokens whose logits are wanted, int64.

    ``transfers`` come first, in order. ``keep`` are the keys of all requests that have a state besides blocks, and
    ``moves`` keys, source and target, between which such states are copied before; those of the keys in ``saves`` go to
    the checkpoints there, before.
    """

    work: Sequence[Work]
    transfers: Sequence[Transfer] = ()
    keep: Collection[str] = ()
    moves: Sequence[tuple[str, str]] = ()
    saves: Sequence[tuple[str, Checkpoint]] = ()
    packed: tuple[Step, torch.Tensor, torch.Tensor] | None = None


class ModelRunner:
    """Runs steps of a causal language model over one KV pool.

    Args:
        model: a loaded causal LM; it stays its user's. Its weights are read at every step, but for those that are
            packed: see follow_weights.
        block_size, memory, num_blocks, attention_backend: as in CacheConfig.
        optimize: run decoders of the usual build by the native decoder, on packed copies of their weights.
        quantization: as in EngineConfig.
        pool, join: a pool that others use too, and how a layer gets its storage there; without them it has its own.

    Raises:
        ConfigError: ``quantization`` needs torchao, which is not there.
        UnsupportedError: the model is encoder-decoder, keeps layers that cannot be paged, or gives other logits in
            company than alone.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        block_size: int = 16,
        memory: int | float | None = None,
        num_blocks: int | None = None,
        attention_backend: str = registry.AUTO,
        optimize: bool = True,
        quantization: str | None = None,
        pool: KVPool | None = None,
        join: Callable[[int, LayerSpec], tuple[LayerKV, Any] | None] | None = None,
    ) -> None:
        interface.install()
        if any(map(shares_row_scale, model.parameters())):
            raise UnsupportedError(
                "the weights are quantized in a way that gives all rows of a forward one scale, so that requests would "
                "change each other: quantize with a granularity of PerRow, or use "
                "model.generate(cache_implementation='paged')"
            )
        self._lock = threading.Lock()
        #: weakly, so that whoever keeps a runner for a model does not keep the model
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._weights = Quantization(view_of(model), quantization)
        self.config: Any = self.view.config
        if getattr(self.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{type(model).__name__} is an encoder-decoder model; "
                "model.generate(cache_implementation='paged') serves it"
            )
        self.block_size = block_size
        self._choose = functools.partial(registry.select, name=attention_backend)
        accepted = inspect.signature(type(model).forward).parameters
        # whoever passes on what it is given may take them, and may not
        unnamed = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        self._takes_positions = "position_ids" in accepted or unnamed
        named = "position_ids" in accepted or not unnamed
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        # mamba-like models have a name of their own before 5.24
        self._cache_name = next((n for n in compat.CACHE_KWARGS if n in accepted), compat.CACHE_KWARG)
        #: state of recurrent layers: request key -> layer index -> a stock layer with one row
        self._states: dict[str, State] = {}
        self._optimize = optimize
        self._native = Native()
        #: whether prompts can be computed in pieces; bytes of one state of recurrent layers
        self.continues, self.state_bytes = True, 0
        try:
            self.packed, specs = self._try_out(attention_backend)
        except UnsupportedError:
            if named:
                raise
            self._takes_positions = False
            self.packed, specs = self._try_out(attention_backend)
        self._states.clear()
        self._weights.make(AS_FOUND)  # only now: what rounding does to rows in 8 bits would hide what company does
        if pool is None:
            pool = KVPool(block_size, len(specs), self._choose, memory=memory, num_blocks=num_blocks)
        pool.set_aside = self._will_pack()  # counts until the first layer joins
        self.pool, self._join = pool, join if join is not None else pool.layer
        #: where requests that give way may keep their blocks, if there is such a place
        self.host: HostTier | None = None
        self.cache = EngineCache(self.config, self._storage, self.packed)
        self.cache.join(specs)

    @property
    def source(self) -> Any:
        """A view of the model with its weights as they are."""
        return self._weights.source

    @property
    def view(self) -> Any:
        """The one that steps run with; its weights may be quantized."""
        return self._weights.view

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return input_device(self.view)

    @property
    def recurrent(self) -> bool:
        """Whether layers keep state that is not in blocks."""
        return bool(self.cache.recurrent)

    @property
    def num_blocks(self) -> int:
        """Physical blocks of the pool; for a model without attention, which needs none, as many as anybody wants."""
        return self.pool.num_blocks or _BLOCKS_OF_NOTHING

    @property
    def vocab_size(self) -> int:
        return int(self.view.get_input_embeddings().num_embeddings)

    def refresh(self) -> None:
        """Look whether modules of the model were exchanged (an adapter was added, say), and follow."""
        model = self._model()
        with self._lock:  # while the model is tried out, its view differs
            if model is not None and not same_structure(model, self.source):
                self._native, self._weights = Native(), Quantization(view_of(model), self._weights.kind)
                self._weights.make(AS_FOUND)

    def _will_pack(self) -> int:
        """Bytes of weights that will be packed, as far as can be told without trying."""
        if not self._optimize or not self.packed:
            return 0
        try:
            return Parts.of(self.view).packable_bytes
        except Exception:  # a model may be anybody's code; Native.follow meets it again and tells
            return 0

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed and quantized copies of weights."""
        return self._weights.nbytes + (0 if self._native.decoder is None else self._native.decoder.nbytes)

    def follow_weights(self, epoch: tuple[Any, ...] | None, weights: int | None = None) -> None:
        """Pack the weights of ``epoch``, which is of everything that decides what a model computes, and quantize those
        of the epoch ``weights`` before, if that was not done yet: see Native.follow and Quantization."""
        with self._lock:
            if self._weights.outdated(weights):
                self._native.forget()  # first: it holds the old ones
                self._weights.make(weights)
            self._weights.epoch = weights
            if self._optimize and self.packed:
                self._native.follow(epoch, self._made_fused)

    def forget_weights(self) -> None:
        """Use nothing that was packed or quantized any more."""
        with self._lock:
            self._native.forget()
            self._weights.forget()

    def reconsider(self) -> None:
        """Try the native decoder out again, whatever was found before."""
        self._native.reconsider()

    def for_call(self, epoch: tuple[Any, ...] | None, optimize: bool) -> ModelRunner:
        """The same runner for a call that has requests, and states of them, of its own, while other calls follow other
        weights: with those of ``epoch`` packed, or without ``optimize`` with none."""
        with self._lock:
            if optimize and self.packed:
                self._native.follow(epoch, self._made_fused)
            twin = copy.copy(self)
            twin._weights = copy.copy(self._weights)
            twin._native = copy.copy(self._native) if optimize else Native()
        twin._states = {}
        return twin

    @torch.no_grad()
    def _made_fused(self) -> FusedDecoder:
        """The model by the native decoder, tried out on a pool of its own. Raises UnusualBuildError."""
        parts = Parts.of(self.view)
        block_size = min(self.block_size, _TRIAL_BLOCK)
        ids = [(3 + 5 * i) % self.vocab_size for i in range(2 * block_size + 5)]
        blocks = list(range(1, 2 + len(ids) // block_size))
        pool = KVPool(block_size, len(self.pool.layers), self._choose, num_blocks=len(blocks) + 1)
        cache = EngineCache(self.config, pool.layer, packed=True)  # type: ignore[arg-type] # it has room for all
        work = [Probe("a", ids, 0, blocks, num_logits=SCORED_ROWS)]
        step, positions, wanted = pack(work, block_size)
        # half of them far away: some models do more than to rotate there
        positions[len(ids) // 2 :] += max(0, self._longest() - len(ids))
        want = parts.watching(lambda: self._packed(cache, work, step, positions, wanted))
        if len(cache.layers) != len(parts.layers) or any(layer.params is None for layer in cache.layers):
            raise UnusualBuildError("its layers are not those of its cache")
        params, storage = [layer.params for layer in cache.layers], [layer.kv for layer in cache.layers]
        fused = FusedDecoder(parts, params, storage[0].spec)
        fused.bind(storage)
        fused.check(step.metadata, positions, torch.tensor(ids, device="cpu"), want)
        fused.bind([self.pool.layers[i] for i in range(len(fused.layers))])
        return fused

    def _longest(self) -> int:
        """Tokens that a sequence may have, as far as is known."""
        static = static_rope_length(self.view)
        named = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(static or named or 4096)

    def prepare(
        self,
        work: Sequence[Work],
        transfers: Sequence[Transfer] = (),
        keep: Collection[str] = (),
        moves: Sequence[tuple[str, str]] = (),
        saves: Sequence[tuple[str, Checkpoint]] = (),
    ) -> Prepared:
        """Everything about a step that does not depend on token ids; the step before may still be running."""
        packed = pack(work, self.block_size) if self.cache.packed and work else None
        return Prepared(work, transfers, keep, moves, saves, packed)

    # not inference_mode: some weights (sparse ones, say) cannot be used in it
    @torch.no_grad()
    def run(self, prepared: Prepared) -> torch.Tensor:
        """Execute the transfers, then compute every part; returns float32 logits ``[n, vocab]``, the rows wanted of
        each part in order. Threads wait for each other."""
        with self._lock:
            if self._weights.pending:  # failed when it was due; now that is the requests' failure
                self._weights.make(None)  # nobody has looked at them, so the next to look does it once more
            self.transfer(prepared.transfers)
            return self._run(prepared)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy blocks, in order."""
        for kind, found in itertools.groupby(transfers, type):
            pairs: Any = list(found)
            if kind is BlockCopy:
                self.pool.copy_blocks(pairs)
            elif self.host is None:
                raise InternalError("blocks are to be moved to a host tier, but there is none")
            elif kind is SwapOut:
                self.host.swap_out(pairs)
            else:
                self.host.swap_in(pairs)

    def _run(self, prepared: Prepared) -> torch.Tensor:
        if self.recurrent:
            for key, checkpoint in prepared.saves:
                checkpoint.state = self._states.pop(key)
            self._states.update({target: cloned(self._states[source]) for source, target in prepared.moves})
            for key in [key for key in self._states if key not in prepared.keep]:
                del self._states[key]
        if not prepared.work:
            return torch.empty(0, self.vocab_size, device="cpu")
        if prepared.packed is None:
            return self._forward(self.cache, prepared.work)
        return self._packed(self.cache, prepared.work, *prepared.packed)

    # -- building steps ------------------------------------------------------------------------------------------

    def _forward(self, cache: EngineCache, work: Sequence[Work]) -> torch.Tensor:
        if cache.packed:
            return self._packed(cache, work, *pack(work, self.block_size))
        rows: dict[int, torch.Tensor] = {}
        groups: dict[tuple[int, int], list[int]] = {}
        for i, part in enumerate(work):
            # new sequences and those with a state do not share a forward of a recurrent model; pieces of prompts would
            # have to be padded, which such models do not expect once there is a state
            alone = i if part.start and part.count > 1 else -1 if part.start else -2
            groups.setdefault((part.count, alone if cache.recurrent else -1), []).append(i)
        for members in groups.values():
            logits = self._dense(cache, [work[i] for i in members])
            rows.update({i: logits[row, logits.shape[1] - work[i].num_logits :] for row, i in enumerate(members)})
        return torch.cat([rows[i] for i in range(len(work))]).float()

    def _packed(
        self, cache: EngineCache, work: Sequence[Work], step: Step, positions: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        cache.step, cache.past = step, 0
        ids = flat_ids(work)
        fused = self._native.decoder
        if fused is not None and cache is self.cache:
            return fused(ids, positions, step.metadata, wanted)
        device = self.device
        inputs = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
        if self._takes_logits_to_keep and len(wanted):
            logits = self._call(cache, inputs, logits_to_keep=wanted.to(device))[0]
        else:
            logits = self._call(cache, inputs)[0][wanted.to(device)]
        return logits.float()

    def _dense(self, cache: EngineCache, work: Sequence[Work]) -> torch.Tensor:
        width, past = work[0].count, max(part.start for part in work)
        starts = np.array([part.start for part in work])[:, None]
        tables, size = tables_of(work), self.block_size
        rows = np.arange(len(work))[:, None]
        positions = starts + np.arange(width)[None, :]
        before = np.arange(past)[None, :] - (past - starts)
        known = np.maximum(before, 0)
        gather = tables[rows, known // size].astype(np.int64) * size + known % size
        gather[before < 0] = -1
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        cache.step = Step(
            AttentionMetadata(
                cu_seqlens_q=torch.arange(0, len(work) * width + 1, width, dtype=torch.int32, device="cpu"),
                seq_lens=torch.from_numpy((starts[:, 0] + width).astype(np.int32)),
                block_tables=torch.from_numpy(tables),
                slot_mapping=torch.from_numpy(slots.reshape(-1)),
                max_query_len=width,
                max_seq_len=past + width,
            ),
            gather_slots=torch.from_numpy(gather),
        )
        cache.past = past
        device = self.device
        ids = np.array([list(part.token_ids) for part in work], dtype=np.int64)
        mask = np.arange(past + width)[None, :] >= past - starts
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)).to(device),
        }
        if self._takes_positions:
            inputs["position_ids"] = torch.from_numpy(positions.astype(np.int64)).to(device)
        options = {"logits_to_keep": max(1, *(w.num_logits for w in work))} if self._takes_logits_to_keep else {}
        states = [self._state(cache, part) for part in work]
        for layer_idx in cache.recurrent:
            cache.layers[layer_idx] = stacked([state[layer_idx] for state in states])
        logits = self._call(cache, inputs, **options)
        for layer_idx in cache.recurrent:
            for state, row in zip(states, rows_of(cache.layers[layer_idx], len(work)), strict=True):
                state[layer_idx] = row
        for part, state in zip(work, states, strict=True) if cache.recurrent else ():
            self._states.update({key: cloned(state) for key in part.forks})
            if part.keeps is not None:
                part.keeps.state = cloned(state)
        return logits

    def _state(self, cache: EngineCache, part: Work) -> State:
        """The recurrent state a part goes on from; a new one at the beginning of a sequence."""
        if not cache.recurrent:
            return {}
        if part.start == 0:
            self._states[part.key] = cloned(cache.recurrent)
        elif part.resumes is not None:
            if part.resumes.state is None:
                raise InternalError(f"request {part.key!r} goes on from a checkpoint that holds nothing")
            self._states[part.key] = cloned(part.resumes.state)
        found = self._states.get(part.key)
        if found is None:
            raise InternalError(f"request {part.key!r} goes on at position {part.start}, but its state is gone")
        return found

    def _call(self, cache: EngineCache, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        logits: torch.Tensor = self.view(
            **inputs, **{self._cache_name: cache}, use_cache=True, return_dict=True, **options
        ).logits
        cache.check_attended()
        return logits

    # -- storage and the first look at a model --------------------------------------------------------------------

    def _storage(self, layer_idx: int, spec: LayerSpec) -> tuple[LayerKV, Any]:
        found = self._join(layer_idx, spec)
        if found is None:
            raise UnsupportedError(
                f"layer {layer_idx} now stores {spec}, which is not what the engine was made for: make a new engine "
                "after changing a model's dtype, device or heads"
            )
        return found

    @torch.no_grad()
    def _try_out(self, attention_backend: str) -> tuple[bool, dict[int, LayerSpec]]:
        """Whether requests can be packed, and what each layer stores; tried with two short sequences."""
        ids = [[(3 + 5 * i + n) % self.vocab_size for i in range(n)] for n in _PROBE_LENGTHS]
        outputs = [self.view(input_ids=torch.tensor([x], device=self.device)) for x in ids]
        if not hasattr(outputs[0], "logits") or outputs[0].logits.ndim != 3:
            raise UnsupportedError(f"{type(self.view).__name__} gives no logits for every token: a causal LM is wanted")
        want = [output.logits[0, -1].float() for output in outputs]
        if any(bool(logits.isnan().any()) for logits in want):
            raise UnsupportedError(f"{type(self.view).__name__} gives logits that are NaN: its weights may be damaged")
        reasons = []
        for packed in (True, False):
            if packed and (attention_backend == registry.GATHER or not self._takes_positions):
                continue
            per_sequence = -(-max(_PROBE_LENGTHS) // self.block_size)
            room = max(len(ids) * per_sequence, -(-_PIECES[-1] // self.block_size))
            pool = KVPool(self.block_size, 1, self._choose, num_blocks=room)
            specs: dict[int, LayerSpec] = {}

            def storage(layer_idx: int, spec: LayerSpec, pool: KVPool = pool, specs: Any = specs) -> Any:
                specs[layer_idx] = spec
                return pool.layer(layer_idx, spec)

            try:
                cache = EngineCache(self.config, storage, packed)
                got = self._in_company(cache, ids)
            except (HfPagedError, ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
                # whatever a model raises at a shape it does not know means the same: not in this way
                reasons.append(f"{'packed' if packed else 'as padded rows'}: {error}")
                continue
            tolerance = _tolerance(self.view)
            worst = max(_distance(a, b) for a, b in zip(got, want, strict=True))
            if worst <= tolerance:
                if cache.recurrent:
                    self.state_bytes = num_bytes(self._states["a"])
                    self.continues = self._in_pieces(cache, tolerance)
                if not packed:
                    logger.info("engine: requests run as padded rows (%s)", "; ".join(reasons) or "as asked")
                return packed, specs
            reasons.append(f"{'packed' if packed else 'as padded rows'}: logits differ from those alone by {worst:.2g}")
        raise UnsupportedError(
            f"{type(self.view).__name__} cannot run several requests at once ({'; '.join(reasons)}); "
            "model.generate(cache_implementation='paged') serves it"
        )

    def _in_company(self, cache: EngineCache, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits behind the last token of two sequences, which run together, the longer one's prompt in pieces."""
        per_row = -(-max(_PROBE_LENGTHS) // self.block_size)
        blocks = [list(range(1 + i * per_row, 1 + (i + 1) * per_row)) for i in range(len(ids))]
        # recurrent models may take a prompt in one piece only, and go on by one token at a time
        ends = [len(x) - 1 for x in ids]
        half = ends[0] if cache.recurrent else ends[0] // 2
        first = [Probe("a", ids[0][:half], 0, blocks[0], 0), Probe("b", ids[1][: ends[1]], 0, blocks[1], 0)]
        self._forward(cache, first)
        if half < ends[0]:
            self._forward(cache, [Probe("a", ids[0][half : ends[0]], half, blocks[0], 0)])
        last = [Probe(key, x[end:], end, b) for key, x, end, b in zip("ab", ids, ends, blocks, strict=True)]
        return list(self._forward(cache, last))

    def _in_pieces(self, cache: EngineCache, tolerance: float) -> bool:
        """Whether a recurrent model that has seen a part of a prompt can go on with several tokens at once."""
        ids = [(7 + 11 * i) % self.vocab_size for i in range(_PIECES[-1])]
        want = self.view(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1].float()
        try:
            kept = _distance(self._pieces(cache, ids, forget=False), want)
            lost = _distance(self._pieces(cache, ids, forget=True), want)
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            logger.info("engine: prompts are computed in one piece (%s)", error)
            return False
        # rounding alone does not tell: in bfloat16 a state that was lost may matter less than the tolerance
        if kept > min(tolerance, _ROUNDING * lost):
            logger.info("engine: prompts are computed in one piece (in several the model gives other logits)")
            return False
        return True

    def _pieces(self, cache: EngineCache, ids: Sequence[int], forget: bool) -> torch.Tensor:
        """Logits behind a prompt that is computed in pieces, each going on from the state of the one before, or, as a
        control, from none."""
        blocks = list(range(1, 1 + -(-len(ids) // self.block_size)))
        got, start = torch.empty(0, device="cpu"), 0
        for end in _PIECES:
            if forget and start:
                self._states["a"] = cloned(cache.recurrent)
            got = self._forward(cache, [Probe("a", ids[start:end], start, blocks)])[0]
            start = end
        return got


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two rows of logits, in terms of the largest logit."""
    return float((a - b).abs().max() / b.abs().max())


def _tolerance(model: torch.nn.Module) -> float:
    """How far logits may differ between ways to compute them, in terms of the largest."""
    floating = [p for p in model.parameters() if p.is_floating_point()]
    if any(map(quantizes_rows, floating)):
        return 0.3
    return 1e-3 if all(p.dtype in (torch.float32, torch.float64) for p in floating) else 0.1
