"""A compiled model with a paged cache: one opaque operator per layer, no graph break, and the same tokens.

The backend is "eager" except where the generated code matters: what is tested is tracing, not Inductor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.attention import ops
from hf_paged.generation.shared import Profile, profile_of
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

NATIVE = ["llama", "mistral", "gemma2", "gemma3", "gemma3n", "gpt_oss", "llama4", "gpt2"]
GATHERED = ["deepseek_v3", "bloom", "falcon"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Any, **options: Any) -> Profile:
    model.forward = torch.compile(model.forward, **{"backend": "eager", "fullgraph": True, **options})
    return profile_of(model.config)


#: compiling is slow; these cover windows, sinks, softcap, shared keys and a model that gathers
QUICK = ("llama", "gemma3n", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "arch", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in (*NATIVE, *GATHERED)]
)
def test_one_graph_without_breaks_gives_stocks_tokens(arch: str) -> None:
    model, prompt = zoo.fresh(arch), left_padded([11, 7])
    want = stock(model, **prompt)
    with registered():
        paged(model, **prompt)  # probes the model, uncompiled
        profile = compiled(model, fullgraph=arch in NATIVE)
        before = profile.native_calls, profile.gathered_calls
        assert torch.equal(paged(model, **prompt), want)
        native, gathered = profile.native_calls - before[0], profile.gathered_calls - before[1]
        assert (native > 0, gathered > 0) == ((True, False) if arch in NATIVE else (False, True))
        hf_paged.generation.check_invariants(model)


def test_a_model_that_was_never_probed_gathers_and_is_right() -> None:
    model, prompt = zoo.fresh("llama"), left_padded([11, 7])
    want = stock(model, **prompt)
    profile = compiled(model)
    with registered():
        assert torch.equal(paged(model, **prompt), want)
        assert torch.equal(paged(model, **prompt), want)
    assert profile.gathered_calls and not profile.native_calls


def test_new_caches_and_lengths_do_not_recompile_for_ever() -> None:
    model = zoo.fresh("llama")
    with registered():
        paged(model, ids(2, 9))
        compiled(model)
        for _ in range(2):
            paged(model, ids(2, 9))
            paged(model, ids(2, 13, seed=1))
        with torch.compiler.set_stance("fail_on_recompile"):
            paged(model, ids(2, 12, seed=2))


def test_inductor_keeps_the_order_of_the_layers() -> None:
    model, prompt = zoo.fresh("llama"), left_padded([11, 7])
    want = stock(model, **prompt)
    with registered():
        paged(model, **prompt)
        profile = compiled(model, backend="inductor")
        before = profile.native_calls
        assert torch.equal(paged(model, **prompt), want)
        assert profile.native_calls > before


def test_beams_and_reused_prefixes_under_fullgraph() -> None:
    model, batch = zoo.fresh("llama"), ids(2, 17)
    want = stock(model, batch, num_beams=3, num_return_sequences=2)
    with registered():
        paged(model, batch)
        compiled(model)
        assert torch.equal(paged(model, batch, num_beams=3, num_return_sequences=2), want)
        assert hf_paged.cache_stats(model).hit_tokens > 0


def test_a_mask_with_holes_is_honoured_inside_the_graph() -> None:
    model, batch = zoo.fresh("llama"), ids(2, 10)
    holes = torch.ones_like(batch)
    holes[0, 4] = holes[1, 7] = 0
    want = model(batch, attention_mask=holes).logits
    model(batch, past_key_values=hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"}))
    compiled(model)
    cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})
    with torch.no_grad():
        got = model(batch, attention_mask=holes, past_key_values=cache).logits
        plain = model(batch).logits
    assert torch.allclose(got, want, atol=1e-5)
    assert not torch.allclose(got, plain, atol=1e-3), "the holes change nothing, so this test shows nothing"


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_graph_break_around_the_update_loses_no_keys(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = zoo.fresh("llama"), left_padded([11, 7])
    want = stock(model, **prompt)
    update = hf_paged.PagedCache.update

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if place == "before":
            torch._dynamo.graph_break()
        found = update(self, *args, **kwargs)
        if place == "after":
            torch._dynamo.graph_break()
        return found

    with registered():
        paged(model, **prompt)
        monkeypatch.setattr(hf_paged.PagedCache, "update", broken)
        compiled(model, fullgraph=False)
        assert torch.equal(paged(model, **prompt), want)
        assert torch.equal(paged(model, **prompt), want)


def test_gradients_reach_earlier_keys_through_a_compiled_forward() -> None:
    model, batch = zoo.fresh("llama"), ids(1, 8)

    def gradient(cache: Any, forward: Any) -> torch.Tensor:
        model.zero_grad()
        forward(batch[:, :5], past_key_values=cache)
        forward(batch[:, 5:], past_key_values=cache).logits.sum().backward()
        grad = model.model.layers[0].self_attn.k_proj.weight.grad
        assert grad is not None
        return grad.clone()

    config = {"memory": "8MiB"}
    want = gradient(hf_paged.PagedCache(model.config, cache_config=config), model.forward)
    got = gradient(
        hf_paged.PagedCache(model.config, cache_config=config), torch.compile(model.forward, backend="eager")
    )
    assert float(want.abs().sum()) > 0
    assert torch.allclose(got, want, atol=1e-6)


def test_the_operators_keep_torchs_contract() -> None:
    model = zoo.fresh("llama")
    model(ids(2, 5), past_key_values=(cache := hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})))
    layer = cache.paged_layers[0]
    heads, dim = model.config.num_attention_heads, layer.kv.spec.head_dim
    key = torch.randn(2, layer.kv.spec.num_kv_heads, 3, dim)
    query = torch.randn(2, heads, 3, dim)
    mask = torch.ones(1, 1, 3, 8, dtype=torch.bool).tril(5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        ops.attention, (query, key, key.clone(), mask, layer.token, 5, 0.5, None, None), test_utils=checks
    )
    torch.library.opcheck(ops.gathered, (key, key.clone(), layer.token, 5, 8), test_utils=checks)
