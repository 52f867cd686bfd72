"""Weights in 8 bits: models that torchao quantized, and engines that do it themselves, give what torchao gives."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers

from hf_paged import LLM, ConfigError, SamplingParams, UnsupportedError, cache_stats
from hf_paged.kernels import cpu
from hf_paged.model import quantized
from tests import zoo
from tests.engine.fake import AdmitAll
from tests.engine.test_fused import GREEDY, generate, is_fused, make
from tests.engine.test_llm_parity import alone, check_clean, prompts
from tests.regressions.helpers import ids, paged, registered, stock

quantization = pytest.importorskip("torchao.quantization", reason="needs the `quantization` extra")
needs_kernels = pytest.mark.skipif(cpu.unavailable() is not None, reason="the CPU kernels are not built")

KINDS = {
    "int8_weight_only": quantization.Int8WeightOnlyConfig,
    "int8_dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
}
#: of the usual build, with experts of their own, and run module by module
NAMES = ["llama", "qwen3", "phi3", "olmo2", "mixtral", "gpt_oss", "gemma3", "opt"]


def by_torchao(model: Any, kind: str, head: bool = True, **options: Any) -> Any:
    """A copy of a model that its user quantized, with its head or, as transformers does it, without."""
    made = copy.deepcopy(model)
    skipped = None if head else made.get_output_embeddings()
    quantization.quantize_(
        made,
        KINDS[kind](set_inductor_config=False, **options),
        filter_fn=lambda module, name: type(module) is torch.nn.Linear and module is not skipped,
    )
    return made


def logits_of(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities of every next token behind each token of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=zoo.VOCAB)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    return torch.tensor([[row[t].logprob for t in range(zoo.VOCAB)] for row in rows])


@torch.no_grad()
def logits_by_model(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


def off(left: Callable[[list[int]], torch.Tensor], right: Callable[[list[int]], torch.Tensor]) -> float:
    """Mean difference of log-probabilities over all prompts."""
    return float(torch.stack([(left(p) - right(p)).abs().mean() for p in prompts()]).mean())


@pytest.mark.parametrize("name", NAMES)
def test_weights_quantized_by_the_user_give_what_torchao_gives(name: str) -> None:
    model = by_torchao(zoo.build(name), "int8_weight_only")
    llm = make(model)
    assert generate(llm, prompts()) == [alone(model, p) for p in prompts()]
    assert is_fused(llm) is (name != "opt" and cpu.unavailable() is None)
    error = off(partial(logits_of, llm), partial(logits_by_model, model))
    assert error < 1e-4 * off(partial(logits_by_model, model), partial(logits_by_model, zoo.build(name)))
    check_clean(llm)


@pytest.mark.parametrize("name", NAMES)
def test_rows_quantized_as_well_differ_as_much_as_rounding_makes_them(name: str) -> None:
    """The number of a row that is largest lies between two steps if it is negative, so that the least of changes is one
    of a step: the model itself, fed what differs in the last bits, is further from what it was."""
    model, nearly = by_torchao(zoo.build(name), "int8_dynamic"), copy.deepcopy(zoo.build(name))
    torch.manual_seed(0)
    embeddings = nearly.get_input_embeddings().weight.data
    embeddings *= 1 + 3e-6 * torch.randn_like(embeddings)
    nearly = by_torchao(nearly, "int8_dynamic")
    llm = make(model)
    assert is_fused(llm) is (name != "opt" and cpu.unavailable() is None)
    want = partial(logits_by_model, model)
    assert off(partial(logits_of, llm), want) < 1.25 * off(partial(logits_by_model, nearly), want)
    check_clean(llm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_quantizes_does_as_torchao_and_leaves_the_model_alone(name: str, kind: str) -> None:
    model = copy.deepcopy(zoo.build(name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    llm = make(model, quantization=kind)
    want = make(by_torchao(model, kind, head=False))
    assert is_fused(llm) is is_fused(want)
    assert generate(llm, prompts()) == generate(want, prompts())
    assert torch.equal(logits_of(llm, prompts()[1]), logits_of(want, prompts()[1]))
    assert all(p is parameters[key] for key, p in model.named_parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert llm.stats()["packed_bytes"] > want.stats()["packed_bytes"]  # the copies that torchao made


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str) -> None:
    model = by_torchao(copy.deepcopy(zoo.build("llama")).to(torch.bfloat16), kind)
    llm = make(model)
    assert is_fused(llm)
    exact = partial(logits_by_model, by_torchao(zoo.build("llama"), kind))
    # no further off than torchao's own, where roundings to 8 bits leave most to chance
    assert off(partial(logits_of, llm), exact) < 1.25 * off(partial(logits_by_model, model), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_goes_to_the_engine_where_the_result_is_certain(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = by_torchao(zoo.build("llama"), kind)
    with registered(), caplog.at_level(logging.INFO, logger="hf_paged"):
        paged(model, ids(1, 14))
        assert any("rounded to few bits" in r.message for r in caplog.records) is (kind == "int8_dynamic")
        caplog.clear()
        paged(model, ids(1, 14), cache_config={"engine": True})
        assert any("rows ran on the engine" in r.message for r in caplog.records)


@needs_kernels
def test_weights_that_were_spoilt_would_show() -> None:
    """The negative control of this file: one scale that is twice as large."""
    model = by_torchao(zoo.build("llama"), "int8_weight_only")
    want = logits_by_model(model, prompts()[1])
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.scale[3] *= 2
    llm = make(model)
    assert is_fused(llm)
    assert (logits_of(llm, prompts()[1]) - want).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_changed_weights_are_quantized_again(kind: str) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    before = copy.deepcopy(model.state_dict())
    llm = make(model, quantization=kind)
    first = generate(llm, prompts())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
        model.lm_head.weight[5] += 1
    changed = generate(llm, prompts())
    assert changed != first
    assert changed == generate(make(by_torchao(model, kind, head=False)), prompts())
    model.load_state_dict(before)
    assert generate(llm, prompts()) == first


@pytest.mark.parametrize("kind", KINDS)
def test_changes_inside_quantized_weights_are_seen(kind: str) -> None:
    model = by_torchao(zoo.build("llama"), kind)
    llm = make(model)
    first = generate(llm, prompts())
    model.model.layers[1].self_attn.v_proj.weight.qdata.neg_()
    assert generate(llm, prompts()) != first
    # beside copies that nothing is kept of: rows in 8 bits make steps of last bits, of which stock has others
    with registered():
        prompt = ids(1, 14)
        before = paged(copy.deepcopy(model), prompt)
        assert torch.equal(paged(model, prompt), before)
        for _ in range(2):
            again = paged(model, prompt)
        assert cache_stats(model).hit_tokens > 0
        model.model.layers[0].mlp.down_proj.weight.scale.mul_(3)
        changed = paged(copy.deepcopy(model), prompt)
        assert not torch.equal(changed, before), "the test needs a change that matters"
        assert torch.equal(paged(model, prompt), changed)
        if kind == "int8_weight_only":
            assert torch.equal(again, before) and torch.equal(changed, stock(model, prompt))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"act_mapping_type": quantization.MappingType.ASYMMETRIC}, "rows are quantized by"),
        ({"reduce_range": True}, "rows are quantized by"),
    ],
)
def test_other_ways_of_quantizing_run_module_by_module(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = by_torchao(zoo.build("llama"), "int8_dynamic", **options)
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        llm = make(model)
    assert not is_fused(llm)
    if cpu.unavailable() is None:
        assert any("module by module" in r.message and why in r.message for r in caplog.records)
    assert generate(llm, prompts()[:1]) == [alone(model, prompts()[0])]


def test_a_scale_for_all_rows_of_a_forward_is_refused() -> None:
    model = by_torchao(zoo.build("llama"), "int8_dynamic", granularity=quantization.PerTensor())
    with pytest.raises(UnsupportedError, match="requests would change each other: quantize with a gran"):
        make(model)
    with registered():
        assert torch.equal(paged(model, ids(1, 14)), stock(model, ids(1, 14)))


@needs_kernels
def test_a_scale_for_all_outputs_and_scales_of_groups() -> None:
    one = by_torchao(zoo.build("llama"), "int8_weight_only", granularity=quantization.PerTensor())
    llm = make(one)
    assert is_fused(llm) and generate(llm, prompts()) == [alone(one, p) for p in prompts()]
    groups = by_torchao(zoo.build("llama"), "int8_weight_only", granularity=quantization.PerGroup(16))
    llm = make(groups)
    assert not is_fused(llm) and generate(llm, prompts()) == [alone(groups, p) for p in prompts()]


@needs_kernels
def test_some_projections_quantized_and_some_not() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    quantization.quantize_(model.model.layers[1].mlp, config)  # the projections of one product are alike
    llm = make(model)
    assert is_fused(llm) and generate(llm, prompts()) == [alone(model, p) for p in prompts()]
    quantization.quantize_(model.model.layers[0].self_attn.q_proj, config)  # here they are not
    llm = make(model)
    assert not is_fused(llm) and generate(llm, prompts()) == [alone(model, p) for p in prompts()]


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_and_company_change_nothing(kind: str) -> None:
    model, options = zoo.build("llama"), {"quantization": kind, "block_size": 4, "prefix_caching": False}
    alone_ = [generate(make(model, **options), [p])[0] for p in prompts()]
    llm = make(model, **options, preemption="recompute", num_blocks=16)
    llm.core.scheduler.ratio = AdmitAll()
    assert generate(llm, prompts()) == alone_
    assert llm.stats()["preemptions"] >= 1
    check_clean(llm)


def _without_memory(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Quantizing fails so many times."""
    real, left = quantized.quantized, [times]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise MemoryError("no memory left")
        return real(*args)

    monkeypatch.setattr(quantized, "quantized", failing)


@pytest.mark.parametrize("failing", [1, 2])
def test_quantizing_that_fails_ends_requests_and_is_done_again(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are weights used that are no longer the model's, nor those that are not quantized."""
    model = copy.deepcopy(zoo.build("llama"))
    llm = make(model, quantization="int8_weight_only")
    first = generate(llm, prompts())
    _without_memory(monkeypatch, failing)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    with pytest.raises(MemoryError, match="no memory left"):
        llm.weights_changed()
    if failing == 2:
        with pytest.raises(MemoryError, match="no memory left"):
            generate(llm, prompts())
    want = generate(make(by_torchao(model, "int8_weight_only", head=False)), prompts())
    assert generate(llm, prompts()) == want != first
    check_clean(llm)


def test_weights_that_a_step_quantized_are_followed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    llm = make(model, quantization="int8_weight_only")
    stream = llm.stream(prompts()[0], GREEDY)
    next(stream)
    _without_memory(monkeypatch, 1)
    with pytest.raises(MemoryError, match="no memory left"):
        llm.weights_changed()  # while a request runs
    assert len(list(stream)[-1].outputs[0].token_ids) == 10
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    want = generate(make(by_torchao(model, "int8_weight_only", head=False)), prompts())
    assert generate(llm, prompts()) == want
    check_clean(llm)


def test_only_changed_weights_are_quantized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.register_forward_hook(lambda module, args, output: None)  # nobody can tell what it does
    llm, real, calls = make(model, quantization="int8_weight_only"), quantized.quantized, []
    monkeypatch.setattr(quantized, "quantized", lambda *args: calls.append(args) or real(*args))
    first = generate(llm, prompts()[:2])
    assert generate(llm, prompts()[:2]) == first
    model.model.config.rms_norm_eps = 1e-5
    generate(llm, prompts()[:2])
    assert not calls
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    assert generate(llm, prompts()[:2]) != first
    assert len(calls) == 1


def test_what_is_asked_for_in_vain_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"quantization='int4' is not known.*int8_weight_only, int8_dynamic"):
        make(zoo.build("llama"), quantization="int4")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 15, "num_attention_heads": 2}
    small = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=1)
    with pytest.raises(UnsupportedError, match=r"no nn\.Linear besides its head"):
        make(transformers.LlamaForCausalLM(small).eval(), quantization="int8_dynamic")
    with pytest.raises(UnsupportedError, match="quantized already, and runs so without the option"):
        make(by_torchao(zoo.build("llama"), "int8_dynamic"), quantization="int8_dynamic")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match="needs torchao, which cannot be imported"):
        make(zoo.build("llama"), quantization="int8_dynamic")


def kinds_of(llm: LLM) -> dict[str, str]:
    return {name: type(p).__name__ for name, p in llm.core.runner.view.named_parameters()}


def test_adapters_stay_as_they_are() -> None:
    peft = pytest.importorskip("peft", reason="needs the `clients` extra")
    base = copy.deepcopy(zoo.build("llama"))
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=16, target_modules=["q_proj", "v_proj", "lm_head"], modules_to_save=["up_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(base, config).eval()
    llm = make(model, quantization="int8_weight_only")
    kinds = kinds_of(llm)
    for part, kind in (("lora_", "Parameter"), ("up_proj", "Parameter"), ("lm_head", "Parameter")):
        assert {k for name, k in kinds.items() if part in name} == {kind}, part
    for part in ("q_proj.base_layer.weight", "down_proj.weight"):
        assert {k for name, k in kinds.items() if part in name} == {"Int8Tensor"}, part
    with_adapter = generate(llm, prompts())
    with model.disable_adapter():
        assert generate(llm, prompts()) != with_adapter
    assert generate(llm, prompts()) == with_adapter


def test_what_chooses_among_experts_stays_as_it_is() -> None:
    model = zoo.fresh("llama")
    model.config.num_experts = 24
    model.model.layers[1].mlp.router = torch.nn.Linear(32, 24)
    model.model.layers[1].mlp.other = torch.nn.Linear(32, 25)
    model.model.layers[1].mlp.other_proj = torch.nn.Linear(32, 24)
    kinds = kinds_of(make(model, quantization="int8_weight_only"))
    assert kinds["model.layers.1.mlp.router.weight"] == "Parameter"
    assert kinds["model.layers.1.mlp.other.weight"] == "Int8Tensor"
    assert kinds["model.layers.1.mlp.other_proj.weight"] == "Int8Tensor"
