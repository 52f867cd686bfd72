"""One ``generate()`` call and its prompt: what earlier calls computed is taken before the first forward, and what this
one computes is kept.

It knows block tables and the tree through ``BatchState`` and the manager, and of ``generate()`` only its arguments.
``registration`` decides when these functions run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged import compat
from hf_paged.cache.manager import Namespace
from hf_paged.config import CacheConfig
from hf_paged.errors import InvalidRequestError
from hf_paged.generation.models import ModelKV
from hf_paged.generation.paged_cache import PagedCache
from hf_paged.generation.state import BatchState
from hf_paged.model.weights import runtime_signature

logger = logging.getLogger("hf_paged")

#: what may be in ``model_kwargs`` without changing the keys and values of a prompt's tokens
_NEUTRAL_KWARGS = frozenset(
    {
        *compat.CACHE_KWARGS, "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep",
        "output_router_logits", "return_dict",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Given:
    """Functions and objects of the user's that a call brings."""

    processors: Sequence[Any] = ()
    criteria: Sequence[Any] = ()
    prefix_allowed_tokens_fn: Any = None


@dataclass
class Call:
    """One ``generate()`` in progress on this thread."""

    model: Any
    #: a decoding loop of the user's, which may return other tokens than it ran
    custom: bool = False
    given: Given = Given()
    cache: PagedCache | None = None
    kv: ModelKV | None = None
    config: CacheConfig | None = None
    namespace: tuple[Any, ...] | None = None
    #: positions of tokens are those of their columns, whatever is padding
    by_column: bool = False
    #: rows of the returned sequences are rows of the cache, so that generated tokens can be kept too
    rows_stay: bool = False
    #: columns of the prompt that came from earlier calls
    reused: int = 0
    #: of those, how many the next prepared input has to leave out
    skip: int = 0
    #: (first column, ids ``[rows, width]``) of every input prepared so far: what the cache was really filled with
    fed: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    prompt: list[list[int]] | None = None
    #: what finished rows are filled up with
    pad_token: int | None = None


class _CallStack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []
        #: this thread is trying something out with stock calls, which must not be paged
        self.stock_only = False

    def current(self, model: Any) -> Call | None:
        """The innermost call on this thread, if it is one of ``model``."""
        call = self.calls[-1] if self.calls else None
        return call if call is not None and call.model is model else None


calls_here = _CallStack()


def check_ids(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Ids outside the vocabulary end in an IndexError deep inside an embedding, or on a GPU in a dead context."""
    if input_ids.dtype.is_floating_point or model_kwargs.get("inputs_embeds") is not None or not input_ids.numel():
        return
    if any(isinstance(v, torch.Tensor) for k, v in model_kwargs.items() if k not in _NEUTRAL_KWARGS):
        return  # placeholders of images and the like may lie outside the vocabulary
    embeddings = model.get_input_embeddings()
    size = getattr(embeddings, "num_embeddings", None)
    if size is None or model.config.is_encoder_decoder:
        return
    if int(input_ids.min()) >= 0 and int(input_ids.max()) < size:
        return
    # a placeholder may also come without its image; the model then embeds something else in its place
    named = (v for k, v in vars(model.config).items() if k.endswith(("_token_id", "_token_index")))
    placeholders = {i for i in named if isinstance(i, int) and i >= size}
    bad = [i for i in input_ids.unique().tolist() if not 0 <= i < size and i not in placeholders]
    if bad:
        raise InvalidRequestError(
            f"input_ids holds token id {bad[-1]}, the model's vocabulary is 0..{size - 1}: was the prompt made with "
            "another model's tokenizer?"
        )


def begin_prompt(
    call: Call, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], reuse: bool = True
) -> None:
    """Before the first forward: share identical rows and, with ``reuse``, take what earlier calls computed."""
    cache, kv, config = call.cache, call.kv, call.config
    assert cache is not None
    assert kv is not None
    assert config is not None
    state, model = cache.state, call.model
    rows = plain_rows(call, input_ids, model_kwargs)
    if rows is None:
        return
    batch, width = input_ids.shape
    pads = state.pads_np.tolist()
    first: dict[tuple[int, ...], int] = {}
    leaders = [first.setdefault((pads[i], *row), i) for i, row in enumerate(rows)]
    gathers = state.force_gather or any(cache.profile.obstacles.values())
    caches = config.prefix_caching and not any(cache.is_linear) and len(cache.paged_layers) == _attending(cache)
    shares = len(first) < batch and not gathers
    runtime = runtime_signature(model) if caches or shares else None
    if shares and runtime is not None:
        # Equal rows of one batch can differ in the last bit (a matrix kernel treats its edge rows differently), so
        # where the result must be stock's to the bit, every row keeps its own; and while nothing is known yet, as well.
        # Where nobody can tell what the model does (hooks, dropout, an adapter per row), rows may differ altogether.
        state.share_prompts(leaders, now=cache.profile.native)
    call.prompt = rows
    with kv.lock:
        kv.prompt_tokens += sum(len(row) for row in rows)
    if not caches:
        return
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return  # the first step's outputs would lack the columns that were not computed
    if generation_config.prefill_chunk_size is not None and compat.transformers_version() < (5, 23):
        return  # before, chunked prefill takes its positions from the first column whatever the cache holds
    call.namespace = prompt_namespace(call, runtime)
    if call.namespace is None:
        return
    call.by_column = not compat.takes_positions(model)  # which may be given some, and have no use for them
    manager = cache.state.shared.manager
    if manager is None or not reuse:
        return
    # The matches are pinned, so nothing they hold can go while the model is tried out.
    found = [
        manager.match_prefix(_namespace_of_row(call, pad), row, max_tokens=max(len(row) - 1, 0))
        for pad, row in zip(pads, rows, strict=True)
    ]
    columns = min([width - 1, *(pad + match.num_tokens for pad, match in zip(pads, found, strict=True))])
    useful = columns > min(pads)
    if useful and cache.profile.continues is None:
        cache.profile.continues = _can_continue(model, max(rows, key=len))
    if not useful or not cache.profile.continues:
        for match in found:
            manager.release(match)
        return
    state.adopt(found, columns)
    for layer in cache.paged_layers:
        if layer.layer_idx in state.shared.pool.layers:  # the config may count others, which stay empty
            layer.length = columns
    with kv.lock:
        kv.hit_tokens += sum(max(columns - pad, 0) for pad in pads)


def plain_rows(call: Call, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]] | None:
    """Each row's tokens without its left padding; None when token ids and padding are not all there is."""
    assert call.cache is not None
    state = call.cache.state
    if call.model.config.is_encoder_decoder or input_ids.dtype.is_floating_point or input_ids.ndim != 2:
        return None
    if not input_ids.numel():
        return None  # stock's error, or stock's answer to an empty prompt
    if not state.pads_known:
        state.keep_padding(input_ids.shape[0])
    if len(state.pads_np) != input_ids.shape[0]:
        return None
    if not _prompt_decides(model_kwargs, input_ids) or _mask_has_holes(model_kwargs, state):
        return None
    return [row[pad:] for row, pad in zip(input_ids.tolist(), state.pads_np.tolist(), strict=True)]


def prompt_namespace(call: Call, runtime: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Weights, settings (``runtime``) and salt that this call's keys and values are computed with; None when nobody can
    tell. Prefixes that weights of before computed are forgotten."""
    assert call.cache is not None
    assert call.kv is not None
    assert call.config is not None
    manager = call.cache.state.shared.manager
    with call.kv.lock:
        before = call.kv.watch.epoch
        known = call.kv.watch.namespace(call.model, runtime)
        if known is not None and manager is not None and call.kv.watch.epoch != before:
            manager.drop(lambda namespace: namespace[0] != known[0])  # can never be matched again
    return None if known is None else (*known, ("salt", call.config.salt))


def _namespace_of_row(call: Call, pad: int) -> Namespace:
    assert call.namespace is not None
    return (*call.namespace, ("first column", pad)) if call.by_column and pad else call.namespace


def _can_continue(model: Any, tokens: list[int]) -> bool:
    """Try, with stock calls on a stock cache, whether the model gives the same logits for a prompt in two parts.

    Some models do not: they count positions from zero again, or take one token at a time after the first forward.
    Costs three short forwards, once per model.
    """
    ids = torch.tensor([tokens[:12]], device=model.device)
    options = {
        "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1, "use_cache": True,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    calls_here.stock_only = True
    try:
        with torch.compiler.set_stance("force_eager"):  # the user's compiled forward need not learn these shapes
            return _same_in_two_parts(model, ids, options)
    except Exception as error:  # whatever stock raises means the same: it cannot
        logger.info(
            "paged: prefixes are not reused for %s, it cannot go on from a cache: %s", type(model).__name__, error
        )
        return False
    finally:
        calls_here.stock_only = False


def _same_in_two_parts(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> bool:
    whole = model.generate(ids, **options).logits[0].float()
    head = model.generate(ids[:, : ids.shape[1] // 2], **options)
    cache = getattr(head, compat.CACHE_KWARG)
    rest = model.generate(ids, **{compat.CACHE_KWARG: cache}, **options).logits[0].float()
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if float((whole - rest).abs().max()) <= tolerance * float(whole.abs().max()):
        return True
    logger.info(
        "paged: prefixes are not reused for %s, its logits differ when it goes on from a cache", type(model).__name__
    )
    return False


def prompt_done(call: Call) -> None:
    """After the first forward: rows go their own ways, and the prompt is kept."""
    assert call.cache is not None
    call.cache.state.end_prompt(merge=call.cache.profile.native)
    keep(call, call.prompt)


def _attending(cache: PagedCache) -> int:
    """Layers that hold anything between calls; all must be paged for a prefix to be complete."""
    return sum(not dummy for dummy in getattr(cache, "is_dummy", [False] * len(cache.layers)))


def _prompt_decides(model_kwargs: dict[str, Any], input_ids: torch.Tensor) -> bool:
    """Whether the token ids alone decide the keys and values: no images, no custom embeddings or positions."""
    for name, value in model_kwargs.items():
        if name not in _NEUTRAL_KWARGS and value is not None and not isinstance(value, bool):
            return False
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return True
    if positions.ndim != 2 or positions.shape[-1] != input_ids.shape[1]:
        return False
    positions = positions.expand(input_ids.shape)
    if mask is None:
        usual = torch.arange(input_ids.shape[1], device=positions.device).expand_as(positions)
        return bool(torch.equal(positions, usual))
    if mask.ndim != 2 or mask.shape != input_ids.shape:
        return False
    usual = mask.long().cumsum(-1) - 1
    seen = mask != 0
    return bool(torch.equal(positions[seen.to(positions.device)], usual[seen].to(positions.device)))


def _mask_has_holes(model_kwargs: dict[str, Any], state: BatchState) -> bool:
    mask = model_kwargs.get("attention_mask")
    return mask is not None and not state.observe_mask(mask, 0, mask.shape[1])


def keep(call: Call, rows: list[list[int]] | None) -> None:
    """Put the rows' tokens that the cache holds into the tree, if the weights are still those that computed them."""
    cache, kv = call.cache, call.kv
    if cache is None or kv is None or rows is None or call.namespace is None:
        return
    state = cache.state
    manager = state.shared.manager
    if manager is None or len(rows) != len(state.tables) or not kv.watch.unchanged_since_observed(call.model):
        return
    if kv.shared is not state.shared or call.namespace[0] != ("weights", kv.watch.epoch):
        return  # cleared or resized meanwhile
    with manager.lock:
        for pad, row, table in zip(state.pads_np.tolist(), rows, state.tables, strict=True):
            count = min(len(row), table.num_tokens)
            if count:
                manager.commit(_namespace_of_row(call, pad), row[:count], table)


def keep_generated(call: Call, result: Any) -> None:
    """After the loop: the tokens generated are part of the next turn's prompt, so keep them too."""
    if call.cache is None or call.namespace is None or call.prompt is None or not call.rows_stay:
        return
    sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    state = call.cache.state
    if not isinstance(sequences, torch.Tensor) or sequences.ndim != 2 or sequences.shape[0] != len(state.tables):
        return
    fed = _fed(call, min(state.length, sequences.shape[1]))
    if fed is None or runtime_signature(call.model) != call.namespace[1:-1]:
        return  # what was run is not known, or something about the model changed meanwhile
    rows = []
    for row, computed, pad, prompt in zip(
        sequences.tolist(), fed.tolist(), state.pads_np.tolist(), call.prompt, strict=True
    ):
        tokens, read = _without_filling(row, pad + len(prompt), call.pad_token)[pad:], computed[pad:]
        # A processor or criterion may have edited the sequences after the model read them.
        same = next((i for i, (a, b) in enumerate(zip(tokens, read, strict=False)) if a != b), len(read))
        rows.append(tokens[:same])
    keep(call, rows)


def _fed(call: Call, columns: int) -> torch.Tensor | None:
    """The ids behind the first ``columns`` columns of the cache, int64 ``[rows, columns]``; None when not known."""
    assert call.prompt is not None
    state = call.cache.state if call.cache is not None else None
    if state is None or not call.fed or any(ids.ndim != 2 for _, ids in call.fed):
        return None
    known = torch.full((len(call.prompt), columns), -1, dtype=torch.int64)
    for row, (pad, prompt) in enumerate(zip(state.pads_np.tolist(), call.prompt, strict=True)):
        known[row, pad : pad + len(prompt)] = torch.tensor(prompt[: max(columns - pad, 0)])
    for start, ids in call.fed:  # later inputs replace what was cropped
        width = min(ids.shape[1], columns - start)
        if width > 0:
            known[:, start : start + width] = ids[:, :width].to("cpu")
    return known


def _without_filling(row: list[int], prompt: int, pad_token: int | None) -> list[int]:
    """Drop the padding that a finished row collects while the rest of its batch goes on."""
    end = len(row)
    while end > prompt and row[end - 1] == pad_token:
        end -= 1
    return row[:end]
