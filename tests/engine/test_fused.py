"""Models of the usual build run on the native decoder, and give what stock generate() gives; others are left alone."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import pytest
import torch

from hf_paged import LLM, SamplingParams
from hf_paged.kernels import cpu
from hf_paged.model.parts import _activation
from tests import zoo
from tests.engine.fake import AdmitAll
from tests.engine.test_llm_parity import alone, check_clean, prompts, wanted
from tests.regressions.helpers import ids

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="the CPU kernels are not built")

GREEDY = SamplingParams(temperature=0, max_tokens=10)
FUSED = ["llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "gpt_oss", "phi3", "granite", "olmo2", "gemma2", "gemma3"]
LEFT_ALONE = {"gpt2": "not made of", "opt": "not made of"}


def make(model: Any, **options: Any) -> LLM:
    return LLM(model, **{"block_size": 16, "num_blocks": 64, **options})


def is_fused(llm: LLM) -> bool:
    return llm.core.runner._native.decoder is not None


def generate(llm: LLM, batch: list[list[int]]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(batch, GREEDY, use_tqdm=False)]


def assert_stock_and(expected: bool, model: Any, **options: Any) -> LLM:
    """Tokens are stock's, on the native decoder or not."""
    llm = make(model, **options)
    assert generate(llm, prompts()[:3]) == [alone(model, p) for p in prompts()[:3]]
    assert is_fused(llm) is expected
    return llm


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.versions) for n in FUSED])
def test_tokens_are_stocks(name: str) -> None:
    llm = make(zoo.build(name), num_blocks=8, max_num_batched_tokens=24, preemption="recompute")
    llm.core.scheduler.ratio = AdmitAll()
    for _ in range(2):
        assert generate(llm, prompts()) == wanted(name)
    assert is_fused(llm) and llm.stats()["preemptions"] >= 1
    assert llm.stats()["packed_bytes"] > 0
    check_clean(llm)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_models_run_module_by_module_and_the_log_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        llm = make(zoo.build(name))
        assert generate(llm, prompts()) == wanted(name)
    assert not is_fused(llm)
    assert any("module by module" in r.message and LEFT_ALONE[name] in r.message for r in caplog.records)


def test_it_can_be_switched_off() -> None:
    llm = make(zoo.build("llama"), optimize=False)
    assert generate(llm, prompts()) == wanted("llama")
    assert not is_fused(llm) and llm.stats()["packed_bytes"] == 0


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_bfloat16_is_no_further_from_float32_than_stock(name: str) -> None:
    exact = zoo.build(name)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    rounded = copy.deepcopy(model).float()
    batch = prompts()
    llm = make(model)
    step = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    scores = [o.prompt_logprobs for o in llm.generate(batch, SamplingParams(**step), use_tqdm=False)]
    assert is_fused(llm)
    ours, stocks = [], []
    for prompt, found in zip(batch, scores, strict=True):
        row = torch.tensor([prompt])
        with torch.no_grad():
            want, stock = (m(row).logits[0, :-1].float().log_softmax(-1) for m in (rounded, model))
        taken = row[0, 1:, None]
        want, stock = want.gather(1, taken)[:, 0], stock.gather(1, taken)[:, 0]
        got = torch.tensor([next(iter(d.values())).logprob for d in found[1:]])
        ours.append((got - want).abs())
        stocks.append((stock - want).abs())
    assert torch.cat(ours).mean() <= 1.1 * torch.cat(stocks).mean()


def test_changed_weights_are_packed_again() -> None:
    model = zoo.fresh("llama")
    llm = make(model)
    first = generate(llm, prompts()[:3])
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(-1.5)
    again = generate(llm, prompts()[:3])
    assert again == [alone(model, p) for p in prompts()[:3]] != first
    assert is_fused(llm)


def test_the_model_stays_its_users() -> None:
    model = zoo.fresh("llama")
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    attributes = {name: sorted(m.__dict__) for name, m in model.named_modules()}
    llm = make(model)
    generate(llm, prompts()[:3])
    assert is_fused(llm)
    assert {name: sorted(m.__dict__) for name, m in model.named_modules()} == attributes
    for name, p in model.named_parameters():
        kept, address, value = before[name]
        assert p is kept and p.data_ptr() == address and torch.equal(p, value) and p.requires_grad
    model.train()
    out = model(torch.tensor([prompts()[0]]), labels=torch.tensor([prompts()[0]]))
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def hook(module: Any, args: Any, output: Any) -> Any:
    return output + 1.0


class Twisted(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def test_what_a_user_hung_on_the_model_is_not_passed_over() -> None:
    model = zoo.fresh("llama")
    llm = make(model)
    generate(llm, prompts()[:2])
    assert is_fused(llm)
    handle = model.model.layers[1].mlp.register_forward_hook(hook)
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert not is_fused(llm)
    handle.remove()
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert is_fused(llm)
    old = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = Twisted(*old.weight.shape[::-1], bias=False)
    model.model.layers[0].mlp.down_proj.weight = old.weight
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert not is_fused(llm)


def twisted_residual(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    residual = hidden_states
    hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden = residual + 0.9 * hidden
    return hidden + self.mlp(self.post_attention_layernorm(hidden))


def half_turn(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


@pytest.mark.parametrize("part", ["layer", "mlp", "norm", "head"])
def test_parts_with_usual_names_that_compute_something_else_are_noticed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the check: each of these classes looks like Llama's and is not."""
    model = zoo.fresh("llama")
    layer = type(model.model.layers[0])
    mlp, norm = type(model.model.layers[0].mlp), type(model.model.norm)
    if part == "layer":
        monkeypatch.setattr(layer, "forward", twisted_residual)
    elif part == "mlp":
        monkeypatch.setattr(mlp, "forward", half_turn)
    elif part == "norm":
        monkeypatch.setattr(norm, "forward", lambda self, x: self.weight * torch.nn.functional.normalize(x, dim=-1))
    else:
        head = type(model).forward
        monkeypatch.setattr(
            type(model),
            "forward",
            lambda self, *a, **k: (o := head(self, *a, **k), setattr(o, "logits", o.logits / 3))[0],
        )
    llm = make(model)
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert not is_fused(llm)


def test_an_activation_that_is_cut_off_far_out_is_not_taken_for_one_that_is_not() -> None:
    from transformers.activations import ACT2FN

    same = {"silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    wanted = {**same, "relu6": None, "gelu_10": None}
    assert {name: _activation(ACT2FN[name]) for name in wanted} == wanted


def test_positions_far_beyond_the_first_tables() -> None:
    model, prompt = zoo.build("qwen3"), ids(1, 230, seed=9)[0].tolist()
    llm = make(model, max_num_batched_tokens=100)
    params = SamplingParams(temperature=0, max_tokens=24)
    got = llm.generate([prompt, prompt[:3]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [alone(model, p, max_new_tokens=24) for p in (prompt, prompt[:3])]
    assert is_fused(llm)


def assigned(model: Any) -> None:
    """Other weights, by assignment, among them what the first forward of an engine showed (sinks)."""
    torch.manual_seed(5)
    state = {
        name: torch.randn_like(p) * 0.3 if "sinks" in name else p.clone() for name, p in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt_oss", assigned),
        ("llama", lambda model: model.to(torch.bfloat16)),
        (
            "granite",
            lambda model: setattr(model, "logits_scaling", 8.0) or setattr(model.config, "logits_scaling", 8.0),
        ),
        ("llama", lambda model: setattr(model.model.layers[0].post_attention_layernorm, "variance_epsilon", 0.5)),
    ],
    ids=["assigned", "other dtype", "other scale", "other epsilon"],
)
def test_whatever_changes_is_tried_out_again(name: str, change: Any) -> None:
    model = zoo.fresh(name)
    llm = make(model)
    generate(llm, prompts()[:2])
    assert is_fused(llm)
    change(model)
    plain = make(model, optimize=False)
    step = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    ours, theirs = (x.generate(prompts()[:3], step, use_tqdm=False) for x in (llm, plain))
    for a, b in zip(ours, theirs, strict=True):
        for found, want in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert next(iter(found.values())).logprob == pytest.approx(next(iter(want.values())).logprob, abs=0.05)


def test_layers_of_other_sizes_are_refused_before_anything_runs() -> None:
    model = zoo.fresh("llama")
    attention = model.model.layers[1].self_attn
    width = model.config.num_attention_heads * attention.head_dim
    for name in ("k_proj", "v_proj"):  # as many heads of keys as of queries, in this layer only
        setattr(attention, name, torch.nn.Linear(model.config.hidden_size, width, bias=False))
    attention.num_key_value_groups = 1
    llm = make(model)
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert not is_fused(llm)


def test_what_happens_only_at_far_positions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("llama")
    attention = type(model.model.layers[0].self_attn)
    stock = attention.forward

    def louder(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        factor = 1 + torch.log1p((kwargs["position_ids"] // 64).float())[..., None]
        return stock(self, hidden_states * factor, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", louder)
    llm = make(model)
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert not is_fused(llm)


def test_an_interrupt_while_weights_are_packed_leaves_the_engine_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.fresh("llama")
    llm = make(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_paged.model.parts.pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, prompts()[:2])
    assert generate(llm, prompts()[:2]) == [alone(model, p) for p in prompts()[:2]]
    assert is_fused(llm)


def test_memory_is_set_aside_only_for_weights_that_will_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: sum(p.nbytes for p in zoo.build(name).parameters()) for name in ("gpt2", "llama")}
    monkeypatch.setattr("hf_paged.cache.pool.free_memory", lambda device: 1 << 20)
    for name in ("gpt2", "llama"):
        plain, packed = (
            make(zoo.build(name), num_blocks=None, memory="50%", optimize=on).core.runner.pool for on in (False, True)
        )
        lost = (plain.num_blocks - packed.num_blocks) * plain.bytes_per_block
        assert lost == pytest.approx(0 if name == "gpt2" else weights[name] / 2, abs=plain.bytes_per_block)


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_real_model_is_of_the_usual_build(dtype: torch.dtype, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    model = copy.deepcopy(model).to(dtype)
    llm = LLM(model, num_blocks=64)
    assert is_fused(llm)
    prompt = tokenizer("The capital of France is")["input_ids"]
    text = tokenizer.decode(generate(llm, [prompt])[0])
    assert "Paris" in text
    if dtype == torch.float32:
        assert text == tokenizer.decode(alone(model, prompt))


@pytest.mark.parametrize("rows", [5, 40])  # alone in a tile, and several tiles
def test_what_one_layer_left_behind_reaches_nobody_in_a_layer_of_another_width(rows: int) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(zoo.build("llama")).to(torch.bfloat16)  # others use it too
    for layer, inner in zip(model.model.layers, itertools.cycle((64, 40)), strict=False):
        for name in ("gate_proj", "up_proj"):
            setattr(layer.mlp, name, torch.nn.Linear(model.config.hidden_size, inner, bias=False, dtype=torch.bfloat16))
        layer.mlp.down_proj = torch.nn.Linear(inner, model.config.hidden_size, bias=False, dtype=torch.bfloat16)
    bad = model.config.vocab_size - 1
    mine, others = list(range(3, 3 + rows)), [bad] * rows
    llm = make(model, prefix_caching=False)
    assert is_fused(llm)
    (want,) = generate(llm, [mine])
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    llm = make(model, prefix_caching=False)
    for batch in ([others, mine], [mine, others]):
        assert generate(llm, batch)[batch.index(mine)] == want
    assert is_fused(llm)
