"""The trial before a model runs on the native decoder: whatever is not just what the kernels compute is refused, and
whatever goes wrong in it leaves a model that runs module by module."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_paged import LLM, SamplingParams
from hf_paged.kernels import cpu
from hf_paged.model import parts, runner
from hf_paged.model.fused import FusedDecoder
from tests import zoo
from tests.engine.test_fused import assert_stock_and, generate, is_fused, make
from tests.engine.test_llm_parity import prompts
from tests.regressions.helpers import ids

pytestmark = [
    pytest.mark.skipif(cpu.unavailable() is not None, reason="the CPU kernels are not built"),
    pytest.mark.usefixtures("told"),
]


# -- what is computed ----------------------------------------------------------------------------------------------

Forward = Callable[..., Any]


def unrotated(stock: Forward, layer_idx: int) -> Forward:
    def forward(self: Any, hidden_states: Any, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == layer_idx:
            cos, sin = position_embeddings
            position_embeddings = torch.ones_like(cos), torch.zeros_like(sin)
        return stock(self, hidden_states, position_embeddings, *args, **kwargs)

    return forward


def scaled(stock: Forward, layer_idx: int, by: Callable[[torch.Tensor], Any]) -> Forward:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        return (found[0] * by(found[0]), *found[1:]) if self.layer_idx == layer_idx else found

    return forward


def skipped(stock: Forward, layer_idx: int) -> Forward:
    return scaled(stock, layer_idx, lambda _: 0)


def softer(stock: Forward, layer_idx: int) -> Forward:
    return scaled(stock, layer_idx, lambda _: 0.9)


@pytest.mark.model
@pytest.mark.parametrize(
    ("twist", "layer_idx"),
    [
        *[(twist, layer_idx) for twist in (unrotated, skipped) for layer_idx in (0, 29)],
        *[(softer, layer_idx) for layer_idx in (0, 12, 25, 29)],
    ],
)
def test_one_unusual_layer_of_a_real_model_in_bfloat16(
    twist: Any, layer_idx: int, smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first token has numbers that are thousands of times larger than all others, whose rounding is larger, too."""
    model = copy.deepcopy(smollm2[0]).to(torch.bfloat16)
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", twist(attention.forward, layer_idx))
    assert not is_fused(LLM(model, num_blocks=16))


@pytest.mark.model
@pytest.mark.parametrize("on_the_way", [True, False])
def test_a_real_model_loaded_in_bfloat16_is_accepted(on_the_way: bool) -> None:
    """Its rotary frequencies stay in float32, where those of a model that is converted are rounded."""
    from hf_paged.model.loader import load

    model = load("demo", dtype=torch.bfloat16)[0] if on_the_way else load("demo", dtype=torch.float32)[0].bfloat16()
    frequencies = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    assert (frequencies.dtype == torch.float32) is on_the_way
    assert is_fused(LLM(model, num_blocks=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("only", ["first", "every sixth"])
def test_a_layer_that_treats_some_tokens_in_another_way(
    name: str, dtype: torch.dtype, only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside an MLP that chooses experts, and so may make single tokens something else by rounding."""
    model = zoo.fresh(name, dtype=dtype)
    attention = type(model.model.layers[0].self_attn)

    stock_forward = attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock_forward(self, *args, **kwargs)
        if self.layer_idx != 1:
            return found
        positions = kwargs["position_ids"]
        others = positions == 0 if only == "first" else positions % 6 == 2
        factor = torch.where(others, 0.7 if only == "first" else 0.5, 1.0)[..., None]
        return found[0] * factor.to(found[0].dtype), *found[1:]

    monkeypatch.setattr(attention, "forward", forward)
    assert not is_fused(make(model))


def feeds_half(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden = hidden_states + hidden
    return hidden + self.mlp(0.5 * self.post_attention_layernorm(hidden))


def takes_half(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden = hidden_states + hidden
    return hidden + 0.5 * self.mlp(self.post_attention_layernorm(hidden))


def twice(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden = hidden_states + hidden
    hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
    return hidden + self.mlp(self.post_attention_layernorm(hidden))


@pytest.mark.parametrize("forward", [feeds_half, takes_half, twice])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_that_uses_its_own_mlp_in_another_way(
    forward: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.fresh("mixtral", dtype=dtype)
    assert is_fused(make(model))
    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    assert not is_fused(make(model))


class Doubled(nn.Module):
    """An MLP that is computed in another precision than the rest."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.inner = old.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Rows(nn.Module):
    """An MLP that knows no batches."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.inner = old

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        return self.inner(x).view(rows, width)


def feeds_double(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden = hidden_states + hidden
    return hidden + self.mlp(self.post_attention_layernorm(hidden).double()).to(hidden.dtype)


def feeds_rows(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden = hidden_states + hidden
    return hidden + self.mlp(self.post_attention_layernorm(hidden)[0])[None]


@pytest.mark.parametrize(("kind", "forward"), [(Doubled, feeds_double), (Rows, feeds_rows)])
def test_an_mlp_that_is_called_in_another_way_than_ours(
    kind: Any, forward: Any, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    model = zoo.fresh("llama")
    for layer in model.model.layers:
        layer.mlp = kind(layer.mlp)
    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    llm = make(model)
    assert "to its MLP" in told.text
    batch = [[*p, *p][:12] for p in prompts()[:2]]
    assert generate(llm, batch) == generate(make(model, optimize=False), batch)


def test_rotary_tables_that_depend_on_what_is_rotated(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    model = zoo.fresh("llama")
    kind = type(model.model.rotary_emb)
    stock_forward = kind.forward

    def one_row(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        found = stock_forward(self, x, position_ids)
        return found if x.is_contiguous() else tuple(table[:, :1] for table in found)

    monkeypatch.setattr(kind, "forward", one_row)
    assert_stock_and(False, model)
    assert "its rotary tables of" in told.text


# -- what it is made of --------------------------------------------------------------------------------------------


def with_bias_on_gates(model: Any) -> None:
    for layer in model.model.layers:
        old = layer.mlp.gate_proj
        layer.mlp.gate_proj = nn.Linear(old.in_features, old.out_features, bias=True)
        layer.mlp.gate_proj.weight = old.weight


def test_a_bias_on_the_gate_alone() -> None:
    model = zoo.fresh("llama")
    with_bias_on_gates(model)
    assert_stock_and(True, model)


class Extended(nn.Module):
    """An MLP whose children have the usual names, and one more."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            old.gate_proj,
            old.up_proj,
            old.down_proj,
            old.act_fn,
        )
        self.extra = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def test_an_mlp_with_another_part_runs_as_it_is() -> None:
    model = zoo.fresh("llama")
    model.model.layers[1].mlp = Extended(model.model.layers[1].mlp).eval()
    llm = assert_stock_and(True, model)
    assert [layer.gate_up is None for layer in llm.core.runner._native.decoder.layers] == [False, True, False]


def without_attention(model: Any) -> None:
    layer = model.model.layers[1]
    layer.self_attn = None
    forward = type(layer).forward

    def only_mlp(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.self_attn is not None:
            return forward(self, hidden_states, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    type(layer).forward = only_mlp


def test_a_layer_whose_attention_was_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("llama")
    kind = type(model.model.layers[0])
    monkeypatch.setattr(kind, "forward", kind.forward)  # so that it comes back
    without_attention(model)
    assert generate(make(model), prompts()[:2]) == generate(make(model, optimize=False), prompts()[:2])


def test_an_mlp_that_is_no_module() -> None:
    model = zoo.fresh("llama")
    layer = model.model.layers[1]
    mlp = layer.mlp
    del layer.mlp
    layer.mlp = lambda x: mlp(x)
    assert_stock_and(False, model)


def test_a_norm_of_whole_queries_and_none_of_keys() -> None:
    model = zoo.fresh("llama")
    for layer in model.model.layers:
        layer.self_attn.q_norm = type(model.model.norm)(32)
    assert_stock_and(False, model)


def test_a_bias_that_is_spread_over_all_outputs(caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.fresh("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = nn.Parameter(torch.full((1,), 0.1))
    with caplog.at_level(logging.INFO, "hf_paged"):
        assert_stock_and(False, model)
    assert "the bias of a projection is of shape [1]" in caplog.text, "refused before it is read beyond its end"


@pytest.mark.parametrize("where", ["layer", "attention", "mlp"])
def test_a_limit_that_small_numbers_do_not_reach(where: str) -> None:
    model = zoo.fresh("llama")
    layer = model.model.layers[1]
    {"layer": layer, "attention": layer.self_attn, "mlp": layer.mlp}[where].clip_value = 1e4
    llm = assert_stock_and(where == "mlp", model)  # which then runs as it is
    if where == "mlp":
        assert llm.core.runner._native.decoder.layers[1].gate_up is None


@pytest.mark.parametrize("limit", ["clip_qkv", "final_logit_softcapping"])
def test_limits_of_a_config(limit: str) -> None:
    model = zoo.fresh("llama")
    setattr(model.config, limit, 1e4)
    assert_stock_and(False, model)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logits_that_a_model_caps(cap: float) -> None:
    model = zoo.fresh("gemma2")
    model.config.final_logit_softcapping = cap
    prompt = ids(1, 20)
    llm = assert_stock_and(True, model)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=zoo.VOCAB)
    (output,) = llm.generate([prompt[0].tolist()], params, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    got = torch.tensor([[row[t].logprob for t in range(zoo.VOCAB)] for row in rows])
    want = model(prompt).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_softcap_of_somebodys_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("gemma2")
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs))
    assert_stock_and(False, model)  # it may do anything with it


def test_rotary_embeddings_are_told_by_the_type_of_layer() -> None:
    model = zoo.fresh("gemma3")
    llm = assert_stock_and(True, model)
    assert llm.core.runner._native.decoder._kinds == model.config.layer_types
    one, two = ((torch.zeros(1), torch.zeros(1)) for _ in range(2))
    found = parts.Parts.of(model)

    def kinds(types: list[str] | None, *rotaries: Any) -> list[str | None]:
        seen = [parts.Seen(rotary=rotary) for rotary in rotaries]
        return dataclasses.replace(found, layer_types=types, seen=seen).rotary_kinds()

    assert kinds(["a", "b", "a"], one, two, one) == ["a", "b", "a"]
    assert kinds(None, one, one) == [None, None]
    for types, given in (
        (["a", "a", "b"], (one, two, two)), (["a", "b", "c"], (one, two, two)), (None, (one, two)),
        (["a", "b"], (one, two, one)), (["a", "b", "a"], (one, two, None)),
    ):  # fmt: skip
        with pytest.raises(parts.UnusualBuildError, match="rotary embedding"):
            kinds(types, *given)


def test_logits_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("llama")
    forward = type(model).forward

    def cut(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = out.logits[..., :-3]
        return out

    monkeypatch.setattr(type(model), "forward", cut)
    assert not is_fused(make(model))


def sized(name: str, part: str, size: tuple[int, int]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        linear = nn.Linear(*size, bias=False)
        target: Any = model if part == "" else getattr(model.model.layers[1], part)
        setattr(target, name, linear)

    return change


def scaled_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight = nn.Parameter(torch.ones(31))


def mixed(model: Any) -> None:
    model.model.layers[2].mlp.to(torch.bfloat16)


def other_sinks(model: Any) -> None:
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (sized("q_proj", "self_attn", (32, 40)), r"qkv of layer 1 is \(72, 32\)"),
        (sized("v_proj", "self_attn", (31, 16)), "Sizes of tensors must match"),
        (sized("o_proj", "self_attn", (32, 31)), r"o of layer 1 is \(31, 32\)"),
        (sized("o_proj", "self_attn", (64, 32)), r"o of layer 1 is \(32, 64\)"),
        (sized("gate_proj", "mlp", (32, 80)), "must match"),
        (sized("down_proj", "mlp", (80, 32)), "gate_up of layer 1 is"),
        (sized("down_proj", "mlp", (48, 64)), r"down of layer 1 is \(64, 48\)"),
        (sized("lm_head", "", (64, zoo.VOCAB)), "its head reads 64 numbers of 32"),
        (scaled_norm, "of another size"),
        (mixed, "its weights are torch.bfloat16, torch.float32"),
        (other_sinks, r"layer 1 has sinks of shape \[3\]"),
    ],
)
def test_sizes_that_the_kernels_would_read_beyond(change: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with such sizes cannot run at all, so it is shown only to what checks them."""
    shown: list[Any] = []

    class Noting(FusedDecoder):
        def __init__(self, found: Any, params: Any, spec: Any) -> None:
            shown.append((found.seen, list(params), spec))
            super().__init__(found, params, spec)

    monkeypatch.setattr(runner, "FusedDecoder", Noting)
    model = zoo.fresh("gpt_oss" if change is other_sinks else "llama")
    llm = make(model)
    assert is_fused(llm)
    (seen, params, spec), view = shown[0], llm.core.runner.view
    change(view)
    if change is other_sinks:
        params[1] = dataclasses.replace(params[1], sinks=view.model.layers[1].self_attn.sinks)

    def again() -> None:
        found = parts.Parts.of(view)
        found.seen = seen
        FusedDecoder(found, params, spec)

    with pytest.raises((parts.UnusualBuildError, RuntimeError), match=reason):
        again()


def test_an_activation_that_gives_more_than_numbers_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("llama")
    kind = type(model.model.layers[0].mlp)
    silu = nn.functional.silu
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = lambda x: (silu(x), None)
    monkeypatch.setattr(
        kind, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))[0] * self.up_proj(x))
    )
    llm = assert_stock_and(True, model)
    assert all(layer.gate_up is None for layer in llm.core.runner._native.decoder.layers)


def test_a_softcap_hides_no_other_limit() -> None:
    model = zoo.fresh("gemma2")
    model.config.final_logit_softcapping = None
    assert_stock_and(True, model)
    model.model.layers[1].self_attn.clip_qkv = 1e4
    assert_stock_and(False, model)
