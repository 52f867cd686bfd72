"""Case 12 and the table of transformers' cache callers: every edit of a PagedCache gives what it gives on DynamicCache.

The API moved between releases (``crop(max_length)`` became ``crop(tokens_to_remove)``), so outcomes are tested, by
running a model on both caches after the same edits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import compat
from tests import zoo
from tests.regressions.helpers import ids, registered, stock

pytestmark = pytest.mark.versions

Rows = list[list[int]]

#: name -> (the edit of a cache, the same edit of the rows of tokens it holds)
EDITS: dict[str, tuple[Callable[[Any], Any], Callable[[Rows], Rows]]] = {
    "crop": (lambda c: c.crop(-3), lambda r: [x[:-3] for x in r]),
    "crop nothing": (lambda c: c.crop(0), lambda r: r),
    "reorder": (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), lambda r: [r[1], r[1], r[0]]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), lambda r: [x for x in r for _ in range(2)]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), lambda r: [r[2], r[0]]),
    "select by mask": (
        lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
        lambda r: [r[0], r[2]],
    ),
    "reorder then crop": (
        lambda c: (c.reorder_cache(torch.tensor([2, 2, 2])), c.crop(-1)),
        lambda r: [r[2][:-1]] * 3,
    ),
}


@pytest.mark.parametrize("backend", ["gather", "auto"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["llama", "mistral", "llama4", "gpt_neox", "deepseek_v3", "gemma3n"])
def test_after_an_edit_the_cache_answers_like_the_edited_tokens(name: str, edit: str, backend: str) -> None:
    """The truth is a forward without any cache over the tokens that the rows are left with."""
    model, prompt = zoo.build(name), ids(3, 11)
    on_cache, on_rows = EDITS[edit]
    cache = hf_paged.PagedCache(
        model.config,
        cache_config={
            "memory": "8MiB",
            "block_size": 16 if backend == "auto" else 4,  # native kernels want 16
            "attention_backend": backend,
        },
    )
    rows = on_rows(prompt.tolist())
    with torch.no_grad():
        for _ in range(2):  # the second time the model is known, and native where it can be
            cache.reset()
            model(prompt, past_key_values=cache)
        on_cache(cache)
        assert cache.get_seq_length() == len(rows[0])
        more = [ids(len(rows), n, seed=n) for n in (1, 3, 1)]
        got = torch.cat([model(step, past_key_values=cache).logits for step in more], dim=1)
        whole = torch.cat([torch.tensor(rows), *more], dim=1)
        want = model(whole, use_cache=False).logits[:, -5:]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    cache.free()
    cache.state.shared.manager.check_invariants()
    assert cache.state.shared.manager.stats().owned_blocks == 0


def test_positive_crop_is_refused_as_in_stock() -> None:
    model = zoo.build("llama")
    cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})
    with torch.no_grad():
        model(ids(1, 5), past_key_values=cache)
    with pytest.raises(ValueError, match=r"crop\(3\)"):
        cache.crop(3)


def test_crop_returns_blocks_at_once_and_reset_all() -> None:
    model = zoo.build("llama")
    cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB", "block_size": 4})
    with torch.no_grad():
        model(ids(2, 12), past_key_values=cache)
    assert cache.num_blocks == 6
    cache.crop(-5)
    assert cache.num_blocks == 4
    cache.reset()
    assert cache.num_blocks == 0 and cache.get_seq_length() == 0
    with torch.no_grad():
        again = model(ids(1, 4), past_key_values=cache).logits
        assert torch.allclose(again, model(ids(1, 4)).logits, atol=1e-5)


def test_keys_and_values_read_back_as_written() -> None:
    model, prompt = zoo.build("llama"), ids(2, 11)
    stock_cache = compat.DynamicCache(config=model.config)
    cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB", "attention_backend": "gather"})
    with torch.no_grad():
        model(prompt, past_key_values=stock_cache)
        model(prompt, past_key_values=cache)
    for got, want in zip(cache.layers, stock_cache.layers, strict=True):
        assert torch.equal(got.keys, want.keys) and torch.equal(got.values, want.values)


def test_masks_that_are_not_left_padding_are_honoured() -> None:
    """Right padding, and holes from an earlier turn: stored in full and left to the stock mask."""
    model, prompt = zoo.build("llama"), ids(2, 10)
    for mask in ([[1] * 10, [1] * 7 + [0] * 3], [[1] * 4 + [0] * 2 + [1] * 4, [0] * 2 + [1] * 8]):
        attention_mask = torch.tensor(mask)
        with registered():
            for _ in range(2):
                got = model.generate(
                    prompt,
                    attention_mask=attention_mask,
                    max_new_tokens=6,
                    do_sample=False,
                    cache_implementation="paged",
                )
                assert torch.equal(got, stock(model, prompt, attention_mask=attention_mask, max_new_tokens=6))


def test_a_hole_that_appears_later_is_honoured() -> None:
    model = zoo.build("llama")
    first, more = ids(2, 6), ids(2, 3, seed=1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 3:5] = 0
    logits = []
    with torch.no_grad():
        for cache in (
            compat.DynamicCache(config=model.config),
            hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"}),
        ):
            model(first, past_key_values=cache)
            logits.append(model(more, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_users_4d_mask_is_honoured() -> None:
    model = zoo.build("llama")
    first, more = ids(1, 6), ids(1, 3, seed=1)
    mask = torch.zeros(1, 1, 3, 9)
    mask[..., 2:4] = torch.finfo(torch.float32).min
    mask[0, 0, 0, 7:] = mask[0, 0, 1, 8:] = torch.finfo(torch.float32).min
    logits = []
    with torch.no_grad():
        for _ in range(2):  # the second round finds the model probed
            for cache in (
                compat.DynamicCache(config=model.config),
                hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"}),
            ):
                model(first, past_key_values=cache)
                logits.append(model(more, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(logits[3], logits[2], rtol=1e-4, atol=1e-4)


def test_gradients_flow_through_a_first_forward() -> None:
    model, batch = zoo.fresh("llama"), ids(2, 8)
    grads = []
    for cache in (
        compat.DynamicCache(config=model.config),
        *(hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"}) for _ in range(2)),
    ):
        model.zero_grad()
        model(batch, labels=batch, past_key_values=cache).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):  # gradients of up to 14
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6 * float(a.abs().max()))


def test_attention_weights_are_returned_after_the_model_was_probed() -> None:
    model = zoo.fresh("llama")
    model.set_attn_implementation("eager")
    first, more = ids(2, 6), ids(2, 2, seed=1)
    out = []
    with torch.no_grad():
        for make in (
            lambda: compat.DynamicCache(config=model.config),
            *[lambda: hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})] * 2,
        ):
            cache = make()
            model(first, past_key_values=cache)
            out.append(model(more, past_key_values=cache, output_attentions=True))
    for other in out[1:]:
        assert len(other.attentions) == len(out[0].attentions)
        for got, want in zip(other.attentions, out[0].attentions, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
