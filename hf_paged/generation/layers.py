"""Paged stand-ins for transformers' dynamic cache layers, and the tag that leads a stock attention call to its blocks.

A layer owns its storage handle and its column count. It asks ``BatchState`` where things go, and an attention backend
to put them there and to attend. It never touches block tables.

Native or gathered? In a *native* forward ``update()`` returns only the new keys, tagged; the attention dispatcher finds
the tag (the layer itself) and calls :meth:`PagedLayer.attend`, which reads everything else through the block tables.
In a *gathered* forward ``update()`` returns what the stock layer would have returned, and stock attention runs as ever.

Under ``torch.compile`` the same two ways are the two operators of ``attention.ops``: what they do to blocks happens
outside the graph, when it runs. A native layer then stores its keys in the attention call rather than in ``update()``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hf_paged import compat
from hf_paged.attention import ops
from hf_paged.attention.backends.torch_reference import attend_dense
from hf_paged.attention.interface import TAG, AttentionFn, AttentionOutput
from hf_paged.attention.metadata import AttentionParams, LayerKV, LayerSpec
from hf_paged.attention.obstacles import Obstacle, attention_params, call_obstacle, mask_obstacle, wants_weights
from hf_paged.errors import InternalError, UnsupportedError
from hf_paged.generation.shared import Profile, SharedKV
from hf_paged.generation.state import BatchState, StepPlan


class PagedLayer(compat.DynamicLayer):
    """A full-attention layer whose keys and values live in blocks.

    Shapes are stock's: ``update`` takes ``[batch, kv_heads, width, head_dim]`` and returns such tensors.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        state: BatchState,
        layer_idx: int,
        profile: Profile,
        *,
        window: int | None = None,
        chunk: int | None = None,
    ) -> None:
        self.state = state
        self.layer_idx = layer_idx
        self.profile = profile
        self.window, self.chunk = window, chunk
        self.is_initialized = False
        self.length = 0
        self.kv: LayerKV | None = None
        self._call: tuple[Any, ...] | None = None
        self._params: tuple[AttentionParams, Obstacle | None] | None = None
        self._spec: tuple[Any, ...] | None = None
        #: the values returned by the last update; attention must receive them unchanged
        self._values: weakref.ref[torch.Tensor] | None = None
        self._graph: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: a native update whose attention has not been seen yet
        self.unattended = False
        #: the last update was a traced one: its attention call has to store the keys
        self.traced = False
        state.opaque_layers[layer_idx] = self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(columns={self.length})"

    # -- writing -------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, kv_heads, _, head_dim = key_states.shape
        spec = LayerSpec(kv_heads, head_dim, value_states.shape[-1], key_states.dtype, key_states.device)
        joined = self.state.shared.join(self.layer_idx, spec)
        if joined is None and self.state.length == 0:
            # what other calls stored does not fit (heads were resized, say): this cache gets a pool of its own
            self.state.move_to(SharedKV(self.state.shared.config, self.state.shared.pool.num_layers))
            joined = self.state.shared.join(self.layer_idx, spec)
        if joined is None:
            raise UnsupportedError(
                f"layer {self.layer_idx} stores {spec.num_kv_heads} heads of {spec.head_dim}/{spec.v_head_dim} in "
                f"{spec.dtype} on {spec.device} here, but other calls that share this pool stored something else. "
                "Call hf_paged.clear(model) after changing a model's dtype, device or heads."
            )
        self.kv, self.backend = joined
        self.device, self.dtype = key_states.device, key_states.dtype
        self._spec = (kv_heads, head_dim, key_states.dtype, key_states.device)
        self.is_initialized = True
        self.profile.stores(self.layer_idx)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            return self._update_traced(key_states, value_states)
        return self._update(key_states, value_states)

    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_attended()
        self.traced = False
        start = self.length
        plan = self._store(key_states, value_states, start)
        self._keep_graph(start, key_states, value_states)
        if plan.native:
            self.unattended = True
            keys = key_states.view_as(key_states)
            setattr(keys, TAG, self)
            self._values = weakref.ref(value_states)
            return keys, value_states
        keys, values = self.gathered(key_states, value_states)
        if self.layer_idx not in self.profile.obstacles:
            keys = keys.view_as(keys)
            setattr(keys, TAG, self)
            self._values = weakref.ref(values)
        return keys, values

    #: with gradients on, the states have to stay in the graph: one break per layer
    _update_uncompiled = ops.outside_graphs(_update)

    def _update_traced(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``update()`` while torch.compile traces it: bookkeeping here, blocks when the graph runs."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return self._update_uncompiled(key_states, value_states)
        if self.unattended:
            self.check_attended()
        start, width = self.length, key_states.shape[-2]
        self.length = start + width
        probed = self.layer_idx in self.profile.obstacles
        if probed and self.profile.native and not self.state.force_gather:
            self.unattended = self.traced = True
            keys = key_states.view_as(key_states)
            setattr(keys, TAG, self)
            return keys, value_states
        gathered: tuple[torch.Tensor, torch.Tensor] = ops.gathered(
            key_states,
            value_states,
            self.state.token,
            self.layer_idx,
            start,
            self.length - self._first_column(start),
        )
        return gathered

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> StepPlan:
        """Write the states as columns ``start : start + width`` and return the plan of this forward."""
        if self.kv is None:
            self.lazy_initialization(key_states, value_states)
        kv, state = self.kv, self.state
        assert kv is not None
        batch, kv_heads, width, head_dim = key_states.shape
        if (kv_heads, head_dim, key_states.dtype, key_states.device) != self._spec:
            raise UnsupportedError(
                f"layer {self.layer_idx} holds {self._spec}, the new keys are {kv_heads} heads of {head_dim} in "
                f"{key_states.dtype} on {key_states.device}: one cache cannot mix them (autocast toggled?)"
            )
        plan = state.plan_for(start, width, batch)
        slots = plan.slot_mapping(key_states.device)
        with torch.no_grad():
            if width == 1:
                self.backend.write(kv, key_states[:, :, 0], value_states[:, :, 0], slots)
            else:
                self.backend.write(kv, _packed(key_states), _packed(value_states), slots)
        self.length = start + width
        return plan

    def check_attended(self) -> None:
        """Raise InternalError when the last native update was not followed by its attention; later calls gather."""
        if self.unattended:
            self.unattended = self.traced = False
            self.profile.record(self.layer_idx, Obstacle("its attention was once not called"))
            raise InternalError(
                f"layer {self.layer_idx}: its keys were read without calling its attention interface, so that step "
                "was wrong. Its attention was replaced after an earlier paged call; later calls gather."
            )

    # -- reading -------------------------------------------------------------------------------------------------

    def _first_column(self, before: int) -> int:
        """First column whose keys a query after column ``before`` may need; what ``get_mask_sizes`` advertises."""
        return 0

    def gathered(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the stock layer returns for the update that just wrote these states: past and new, by column.

        Padding columns come back as zeros: the stock mask hides them, and they weigh exactly nothing.
        """
        before = self.length - key_states.shape[-2]
        first = self._first_column(before)
        if before == first:
            return key_states.contiguous(), value_states.contiguous()
        if self._graph and sum(k.shape[-2] for k, _ in self._graph) == self.length:
            parts_k, parts_v = zip(*self._graph, strict=True)
            return torch.cat(parts_k, dim=-2)[:, :, first:], torch.cat(parts_v, dim=-2)[:, :, first:]
        past_k, past_v = self.columns(first, before)
        return torch.cat([past_k, key_states], dim=-2), torch.cat([past_v, value_states], dim=-2)

    def _keep_graph(self, start: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Blocks carry no autograd graph. With gradients on, the states are kept beside them, as stock does."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            if sum(k.shape[-2] for k, _ in self._graph) == start:
                self._graph.append((key_states, value_states))
        elif self._graph:
            self._graph.clear()

    def drop_graph(self) -> None:
        """Forget states kept for autograd; what was computed from them keeps its gradients."""
        self._graph.clear()

    def columns(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of columns ``start : end`` as ``[batch, kv_heads, end - start, width]``."""
        assert self.kv is not None
        slots = self.state.slots(start, end)
        batch, count = slots.shape
        with torch.no_grad():
            k, v = self.backend.gather(self.kv, torch.from_numpy(slots.reshape(-1)).to(self.device))
        return (
            k.view(batch, count, *k.shape[1:]).transpose(1, 2).contiguous(),
            v.view(batch, count, *v.shape[1:]).transpose(1, 2).contiguous(),
        )

    # read-only: there is no tensor to replace
    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """Keys by column, gathered on each access: ``[batch, kv_heads, columns, head_dim]``, zeros where padding is."""
        return self.columns(0, self.length)[0] if self.kv is not None and self.length else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """Values by column, gathered on each access: ``[batch, kv_heads, columns, v_head_dim]``."""
        return self.columns(0, self.length)[1] if self.kv is not None and self.length else None

    def twin(self, state: BatchState) -> PagedLayer:
        """The same layer over a forked state."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.state, other._graph = state, []
        state.opaque_layers[other.layer_idx] = other
        return other

    # -- what transformers asks ----------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_column(self.length)
        return self.length + query_length - first, first

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name that transformers before 5.20 also uses
        return -1

    # -- per-layer edits; PagedCache does the whole-cache versions in one go --------------------------------------

    @ops.outside_graphs
    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give a negative number of tokens to remove, as transformers 5 does"
            )
        if not self.length:
            return  # one that the model does not use (its config counts others) has no say in the rows' lengths
        self.length = max(self.length + int(tokens_to_remove), 0)  # 5.17 passes a tensor
        self._graph.clear()
        self.unattended = self.traced = False
        self.state.truncate(self.length)

    @ops.outside_graphs
    def reset(self) -> None:
        self.forget()
        self.state.truncate(0)

    def forget(self) -> None:
        """Start again at column 0; the rows' blocks are the state's to give back."""
        self.length, self.unattended, self.traced = 0, False, False
        self._graph.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        _whole_cache_only("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _whole_cache_only("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        _whole_cache_only("batch_select_indices")

    def offload(self) -> None:
        _whole_cache_only("offload")

    def prefetch(self) -> None:
        _whole_cache_only("prefetch")

    # -- native attention ----------------------------------------------------------------------------------------

    def _options(
        self, impl: str | None, module: torch.nn.Module, query: torch.Tensor, kwargs: dict[str, Any]
    ) -> tuple[AttentionParams, Obstacle | None]:
        """The mathematics this call asks for, and why no kernel can do it, if so. Remembered: most calls are alike."""
        call = (kwargs.get("scaling"), kwargs.get("softcap"), id(kwargs.get("s_aux")), module)
        if call != self._call or self._params is None:
            assert self.kv is not None
            params = attention_params(module, query, kwargs, self.window, self.chunk)
            reason = self.backend.unsupported_call(self.kv.spec, params)
            self._call, self._params = call, (params, None if reason is None else Obstacle(reason))
        params, obstacle = self._params
        return params, call_obstacle(impl, module, kwargs, self.window, self.chunk) or obstacle

    def _probe(
        self, impl: str | None, query: torch.Tensor, attention_mask: Any, unchanged: bool, mask_known: bool | None
    ) -> Obstacle | None:
        """What only the first forward can show: whether values and mask reach attention as the cache left them."""
        if not unchanged:
            return Obstacle("the model changes the values between cache and attention")
        if mask_known is None:
            return Obstacle("the model builds its masks without transformers' functions")
        if impl not in ("sdpa", "eager"):
            return None if attention_mask is None else Obstacle(f"masks of {impl} attention cannot be checked")
        return mask_obstacle(attention_mask, self.stock_mask("sdpa", query))

    def stock_mask(self, impl: str | None, query: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """The mask stock would have built for the columns ``gathered`` returns: ``[batch, 1, width, columns]``,
        bool for sdpa, additive otherwise. For the rare call that turns out not native after its mask was skipped."""
        width, device = query.shape[2], query.device
        before = self.length - width
        k = torch.arange(self._first_column(before), self.length, device=device)[None, None, None, :]
        q = torch.arange(before, self.length, device=device)[None, None, :, None]
        pads = torch.from_numpy(self.state.pads_np).to(device)[:, None, None, None]
        seen = (k <= q) & (k >= pads)
        if self.chunk is not None:
            seen &= (k - pads) // self.chunk == (q - pads) // self.chunk
        for limit in (self.window, window):
            if limit is not None:
                seen &= k > q - limit
        if impl == "sdpa":
            return seen
        hidden = torch.tensor(torch.finfo(query.dtype).min, dtype=query.dtype, device=device)
        return torch.where(seen, torch.zeros((), dtype=query.dtype, device=device), hidden)

    # -- called by the attention dispatcher, through the tag on the keys -------------------------------------------

    def attend(
        self,
        impl: str | None,
        stock: AttentionFn,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> AttentionOutput:
        if self.traced:  # KV-sharing layers come again and find the keys stored
            return self._attend_traced(impl, stock, module, query, key, value, attention_mask, kwargs)
        plan = self.state.plan
        unchanged = self._values is not None and self._values() is value
        if plan is None or not plan.native:
            if plan is not None and plan.mask_known is not False:  # an unusual mask says nothing about the model
                obstacle = self._options(impl, module, query, kwargs)[1]
                if obstacle is None:
                    obstacle = self._probe(impl, query, attention_mask, unchanged, plan.mask_known)
                self.profile.record(self.layer_idx, obstacle)
            return stock(module, query, key, value, attention_mask, **kwargs)
        self.unattended = False
        if not unchanged:
            raise InternalError(
                f"layer {self.layer_idx}: the model changed the values between cache and attention, which it did not "
                "do when it was probed. Use attention_backend='gather' and report the model."
            )
        params, obstacle = self._options(impl, module, query, kwargs)
        if self.layer_idx not in self.profile.obstacles:
            self.profile.record(self.layer_idx, obstacle)
        if (
            attention_mask is not None
            or query.shape[2] != plan.width
            or (torch.is_grad_enabled() and _needs_graph(query, key, value, kwargs.get("s_aux")))
            or (impl == "eager" and wants_weights(module, kwargs))
            or obstacle is not None
        ):
            keys, values = self.gathered(key, value)
            window = kwargs.get("sliding_window") if self.chunk is None else None
            mask = attention_mask if attention_mask is not None else self.stock_mask(impl, query, window)
            self.profile.gathered_calls += 1
            return stock(module, query, keys, values, mask, **kwargs)
        self.profile.native_calls += 1
        return self._attend_blocks(query, plan, params), None

    def _attend_blocks(self, query: torch.Tensor, plan: StepPlan, params: AttentionParams) -> torch.Tensor:
        """``query [B, Hq, W, D]`` over the rows' blocks, as ``[B, W, Hq, Dv]``."""
        batch, heads, width, _ = query.shape
        packed = query[:, :, 0] if width == 1 else _packed(query)
        assert self.kv is not None
        with torch.no_grad():
            out = self.backend.attend(packed, self.kv, plan.metadata(query.device), params)
        return out.view(batch, width, heads, -1)

    # -- the same under torch.compile ----------------------------------------------------------------------------

    def _attend_traced(
        self,
        impl: str | None,
        stock: AttentionFn,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> AttentionOutput:
        """The attention of keys that a traced ``update()`` tagged: one operator, or two when a kernel cannot do it.

        Traced as a rule; run as it stands where the graph broke between the two. A mask of None may mean that none is
        needed, or that the mask hook saw to it outside the graph: only the run knows.
        """
        self.unattended = False
        width = key.shape[2]
        start = self.length - width
        if (
            query.shape[2] == width
            and impl in ("sdpa", "eager")
            and (attention_mask is None or attention_mask.ndim == 4)
            and not (torch.is_grad_enabled() and _needs_graph(query, kwargs.get("s_aux")))
            and not (impl == "eager" and wants_weights(module, kwargs))
            and call_obstacle(impl, module, kwargs, self.window, self.chunk) is None
        ):
            params = attention_params(module, query, kwargs, self.window, self.chunk)
            out = ops.attention(
                query, key, value, attention_mask, self.state.token, self.layer_idx, start, params.scaling,
                params.softcap, params.sinks,
            )  # fmt: skip
            return out, None
        if attention_mask is None:
            return self._attend_without_mask(impl, stock, module, query, key, value, kwargs)
        columns = self.length - self._first_column(start)
        keys, values = ops.gathered(key, value, self.state.token, self.layer_idx, start, columns)
        return stock(module, query, keys, values, attention_mask, **kwargs)

    @ops.outside_graphs
    def _attend_without_mask(
        self,
        impl: str | None,
        stock: AttentionFn,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> AttentionOutput:
        """Stock attention after a traced update, with the mask that was left out, if one was."""
        keys, values = self.run_gathered(key, value, self.length - key.shape[2])
        plan = self.state.plan
        mask = self.stock_mask(impl, query, kwargs.get("sliding_window")) if plan is not None and plan.native else None
        return stock(module, query, keys, values, mask, **kwargs)

    def run_gathered(self, key: torch.Tensor, value: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``hf_paged::gathered`` when the graph runs."""
        self._store(key, value, start)
        self._graph.clear()
        self.profile.gathered_calls += 1
        return self.gathered(key, value)

    def run_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        start: int,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """``hf_paged::attention`` when the graph runs: by the kernel when the mask is the usual one."""
        plan = self._store(key, value, start)
        self._graph.clear()
        window = None if self.chunk is not None else self.window
        params = AttentionParams(scaling, window, softcap, self.chunk, sinks)
        left_out = mask is None and plan.native  # the mask hook ran outside the graph and found the mask usual
        assert self.kv is not None
        if (left_out or self._is_usual(mask, query, plan)) and self.backend.unsupported_call(
            self.kv.spec, params
        ) is None:
            self.profile.native_calls += 1
            return self._attend_blocks(query, plan, params)
        self.profile.gathered_calls += 1
        keys, values = self.gathered(key, value)
        return attend_dense(query, keys, values, self.stock_mask("sdpa", query) if left_out else mask, params)

    def _is_usual(self, mask: torch.Tensor | None, query: torch.Tensor, plan: StepPlan) -> bool:
        """Whether a mask hides what positions, padding and window hide. Looked at for each layer: compiled code may
        write the next layer's mask into the same memory."""
        kind = (self.window, self.chunk)
        seen = plan.masks.get(kind)
        if seen is None:
            seen = plan.masks[kind] = self.stock_mask("sdpa", query)
        if mask is not None and mask.dtype == torch.bool and mask.shape == seen.shape and torch.equal(mask, seen):
            return True
        return mask_obstacle(mask, seen) is None


class PagedSlidingLayer(PagedLayer):
    """A sliding-window or chunked layer. Blocks keep every token; reads are confined to the window."""

    is_sliding = True

    def __init__(
        self, state: BatchState, layer_idx: int, profile: Profile, *, sliding_window: int, chunked: bool
    ) -> None:
        super().__init__(
            state,
            layer_idx,
            profile,
            window=None if chunked else sliding_window,
            chunk=sliding_window if chunked else None,
        )
        self.sliding_window = sliding_window
        self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.long)
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Nothing to do: every token is kept, so any crop can be undone."""

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        return self.length

    def _first_column(self, before: int) -> int:
        return max(before - self.sliding_window + 1, 0)

    def get_max_length(self) -> int:
        return self.sliding_window

    def get_max_cache_shape(self) -> int:
        return self.sliding_window


def _whole_cache_only(method: str) -> None:
    raise UnsupportedError(f"the rows of a PagedCache are shared by its layers: call {method}() on the cache itself")


def _packed(states: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, width, dim]`` as ``[batch * width, heads, dim]``, a view where strides allow."""
    batch, heads, width, dim = states.shape
    return states.transpose(1, 2).reshape(batch * width, heads, dim)


def _needs_graph(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
