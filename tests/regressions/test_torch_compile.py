"""A compiled model with a paged cache: one opaque operator per layer, no graph break, and the same tokens.

The backend is "aot_eager" except where the generated code matters: it traces, functionalizes and drops what is unused
as Inductor does, and compiles nothing.
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
    model.forward = torch.compile(model.forward, **{"backend": "aot_eager", "fullgraph": True, **options})
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


@pytest.mark.parametrize(
    ("name", "part"),
    [("llama", "layer"), ("mistral", "layer"), ("llama4", "layer"), ("gpt_oss", "layer"), ("llama", "attention")],
)
def test_regional_compilation_honours_masks_made_outside(name: str, part: str) -> None:
    model, prompt = zoo.fresh(name), left_padded([13, 8])
    want = stock(model, **prompt)
    with registered():
        paged(model, **prompt)
        profile = profile_of(model.config)
        for layer in model.model.layers:
            module = layer if part == "layer" else layer.self_attn
            module.forward = torch.compile(module.forward, backend="aot_eager")
        before = profile.native_calls
        assert torch.equal(paged(model, **prompt), want)
        assert profile.native_calls > before


CACHE = {"memory": "8MiB", "block_size": 4}


def _new_cache(model: Any) -> hf_paged.PagedCache:
    return hf_paged.PagedCache(model.config, cache_config=CACHE)


def _probed(name: str = "llama") -> tuple[Any, torch.Tensor]:
    model, batch = zoo.fresh(name), ids(1, 12)
    with torch.no_grad():
        model(batch, past_key_values=_new_cache(model))
    return model, batch


def test_keys_of_layers_whose_output_is_not_used_are_stored() -> None:
    model, batch = _probed()
    want = model(batch).logits[:, 8:]

    def early_exit(tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        return model(tokens, past_key_values=cache, output_hidden_states=True).hidden_states[1]

    def prefill(tokens: torch.Tensor, cache: Any) -> None:
        model(tokens, past_key_values=cache)

    with torch.no_grad():
        for function in (early_exit, prefill):
            cache = _new_cache(model)
            torch.compile(function, backend="aot_eager")(batch[:, :8], cache)
            assert torch.allclose(model(batch[:, 8:], past_key_values=cache).logits, want, atol=1e-4)


def test_several_forwards_and_a_crop_in_one_compiled_function() -> None:
    model, batch = _probed()
    want = model(batch).logits[:, 8:]

    def speculate(head: torch.Tensor, junk: torch.Tensor, rest: torch.Tensor, cache: Any) -> torch.Tensor:
        model(head, past_key_values=cache)
        model(junk, past_key_values=cache)
        cache.crop(-3)
        logits: torch.Tensor = model(rest, past_key_values=cache).logits
        return logits

    with torch.no_grad():
        compiled_ = torch.compile(speculate, backend="aot_eager")
        got = compiled_(batch[:, :8], batch[:, :3], batch[:, 8:], _new_cache(model))
    assert torch.allclose(got, want, atol=1e-4)


def test_gradients_first_and_a_compiled_step_without_them_afterwards() -> None:
    model, batch = _probed()
    holes = torch.ones_like(batch)
    holes[0, 3] = 0
    forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for mask in (holes, torch.ones_like(batch)):
        cache = _new_cache(model)
        model(batch[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        with torch.no_grad():
            want = model(batch, attention_mask=mask).logits
            got = forward(batch[:, 5:9], attention_mask=mask[:, :9], past_key_values=cache).logits
        assert torch.allclose(got, want[:, 5:9], atol=1e-4)
        last = model(batch[:, 9:], attention_mask=mask, past_key_values=cache).logits
        assert torch.allclose(last, want[:, 9:], atol=1e-4)


def test_autocast_gives_the_dtypes_that_were_promised() -> None:
    model, batch = zoo.fresh("llama"), ids(1, 12)
    forward = torch.compile(model.forward, backend="inductor")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(batch).logits
        cache = _new_cache(model)
        got = [forward(part, past_key_values=cache).logits for part in (batch[:, :8], batch[:, 8:])]
    assert torch.allclose(torch.cat(got, 1).float(), want.float(), atol=0.1 * float(want.abs().max()))


def test_one_buffer_may_hold_the_masks_of_several_layers() -> None:
    model, _ = _probed()
    cache = _new_cache(model)
    key, value, query = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 4, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].clone()
    out = []
    for layer in (0, 1):
        if layer:
            mask[..., 2] = False
        out.append(ops.attention(query, key, value, mask, cache.state.token, layer, 0, 0.3, None, None))
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(out[1], want.transpose(1, 2), atol=1e-5)
    assert not torch.allclose(out[0], out[1], atol=1e-3)


def test_a_padded_cache_wants_its_mask_in_a_compiled_step_too() -> None:
    model, _ = _probed()
    cache = _new_cache(model)
    with torch.no_grad():
        model(**left_padded([8, 5]), past_key_values=cache)
        with pytest.raises(Exception, match="attention_mask"):
            torch.compile(model.forward, backend="aot_eager")(ids(2, 1), past_key_values=cache)


def test_a_first_run_with_graph_breaks_says_nothing_about_the_model() -> None:
    model, prompt = zoo.fresh("llama"), left_padded([11, 7])
    want = stock(model, **prompt)
    for layer in model.model.layers:
        layer.self_attn.forward = torch.compiler.disable(layer.self_attn.forward)
    profile = compiled(model, fullgraph=False)
    with registered():
        assert torch.equal(paged(model, **prompt), want)
    assert not any(profile.obstacles.values())


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_operators_keep_torchs_contract(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    model, _ = _probed()
    cache = _new_cache(model)
    heads, shape = model.config.num_attention_heads, (2, 3, model.config.num_key_value_heads, 8)
    key, value = (torch.randn(shape).to(dtype).transpose(1, 2) for dtype in dtypes)
    query, token = torch.randn(2, heads, 3, 8), cache.state.token
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.gathered, (key, value, token, 0, 0, 3), test_utils=checks)
    if dtypes[0] is dtypes[1]:
        arguments = (query, key, value, mask, token, 0, 0, 0.5, None, None)
        torch.library.opcheck(ops.attention, arguments, test_utils=checks)
