"""Weights that are not plain tensors in memory: offloaded, quantized, sparse, or added to by an adapter.

Keys computed with weights that nobody can read are not kept for later calls, and nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hf_paged
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

PROMPT = ids(1, 14)


def _assert_stocks_without_reuse(model: Any) -> None:
    with registered():
        for _ in range(3):
            assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))
        stats = hf_paged.cache_stats(model)
        assert stats.calls == 3 and stats.hit_tokens == 0


# -- PEFT: virtual tokens ---------------------------------------------------------------------------------------------


def _with_virtual_tokens(name: str, kind: str) -> tuple[Any, Any]:
    """A zoo model and the same model inside a PEFT wrapper with five virtual tokens that matter."""
    peft = pytest.importorskip("peft", reason="needs the `clients` extra")
    base = zoo.fresh(name)
    torch.manual_seed(1)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_(0.0, 1.0)
    return base, model


@pytest.mark.filterwarnings("ignore:Position ids are not supported", "ignore:Both `past_key_values` and `cache`")
@pytest.mark.parametrize(
    ("kind", "name", "padded"),
    [
        ("PromptTuningConfig", "llama", False),
        ("PromptTuningConfig", "gpt2", False),
        ("PromptTuningConfig", "llama", True),
        ("PromptTuningConfig", "gpt2", True),
        ("PrefixTuningConfig", "llama", False),
        ("PrefixTuningConfig", "gpt2", False),
        ("PrefixTuningConfig", "llama", True),
        ("PrefixTuningConfig", "gpt2", True),
    ],
)
def test_virtual_tokens_stay_with_their_adapter(kind: str, name: str, padded: bool) -> None:
    base, model = _with_virtual_tokens(name, kind)
    batch = left_padded([14, 9]) if padded else {"input_ids": ids(2, 14)}
    plain = stock(base, **batch)
    with registered():
        for _ in range(2):
            assert torch.equal(paged(base, **batch), plain)
            # tokens alone may agree by chance
            got, want = (
                call(model, **batch, output_logits=True, return_dict_in_generate=True) for call in (paged, stock)
            )
            assert torch.equal(got.sequences, want.sequences)
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
            assert kind == "PrefixTuningConfig" or not torch.equal(want.sequences, plain), "the adapter must matter"
            del got
            with model.disable_adapter():
                assert torch.equal(paged(model, **batch), plain)
        assert torch.equal(paged(base, **batch), plain)


# -- accelerate: hooks and offloaded weights --------------------------------------------------------------------------


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offloaded_weights_generate_and_are_not_reused(offload_buffers: bool) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the `accelerate` extra")
    model = zoo.fresh("llama")
    want = stock(model, PROMPT)
    accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=offload_buffers)
    assert model.lm_head.weight.device.type == "meta"
    assert torch.equal(stock(model, PROMPT), want)
    _assert_stocks_without_reuse(model)


def test_weights_offloaded_to_disk_and_back(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the `accelerate` extra")
    model = zoo.fresh("llama")
    with registered():
        paged(model, PROMPT)
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
        for _ in range(2):
            assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))
        assert hf_paged.cache_stats(model).hit_tokens == 0
        accelerate.hooks.remove_hook_from_submodules(model)
        assert model.lm_head.weight.device.type == "cpu"
        for _ in range(2):
            assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))


def test_a_dispatched_model_reuses_its_prefixes() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the `accelerate` extra")
    model = zoo.fresh("llama")
    want = stock(model, PROMPT)
    parts = ["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"]
    model = accelerate.dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True)
    assert hasattr(model.model.layers, "_hf_hook") and hasattr(model, "_hf_hook")
    with registered():
        for _ in range(3):
            assert torch.equal(paged(model, PROMPT), want)
        assert hf_paged.cache_stats(model).hit_tokens > 0


def test_a_users_accelerate_hook_stops_reuse() -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="needs the `accelerate` extra")

    class Louder(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 1.5

    model = zoo.fresh("llama")
    with registered():
        paged(model, PROMPT)
        before = stock(model, PROMPT)
        hooks.add_hook_to_module(model.model.layers[0].mlp, Louder())
        assert not torch.equal(stock(model, PROMPT), before), "the test needs a hook that matters"
        assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))


# -- quantized, sparse and wrapped weights ----------------------------------------------------------------------------


class _Int8(torch.Tensor):
    """A weight in eight bits behind the shape and dtype of the original, as torchao makes them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> _Int8:
        made: _Int8 = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = [a.codes.to(a.scale.dtype) * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


def _projection(model: Any) -> Any:
    return model.model.layers[1].self_attn.k_proj


def _wrapped() -> tuple[Any, Callable[[], Any]]:
    model = zoo.fresh("llama")
    weight = _projection(model).weight.detach()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    _projection(model).weight = torch.nn.Parameter(_Int8(codes, scale), requires_grad=False)
    return model, codes.neg_


def _sparse() -> tuple[Any, Callable[[], Any]]:
    model = zoo.fresh("llama")
    weight = _projection(model).weight.detach().to_sparse_csr()
    _projection(model).weight = torch.nn.Parameter(weight, requires_grad=False)
    return model, weight.values().neg_


def _quantized(dtype: torch.dtype) -> tuple[Any, Callable[[], Any]]:
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no quantized kernels")
    model, other = (
        torch.ao.quantization.quantize_dynamic(zoo.fresh("llama", seed), {torch.nn.Linear}, dtype=dtype)
        for seed in (0, 1)
    )
    return model, lambda: _projection(model).set_weight_bias(*_projection(other)._weight_bias())


def _int8() -> tuple[Any, Callable[[], Any]]:
    return _quantized(torch.qint8)


def _half() -> tuple[Any, Callable[[], Any]]:
    return _quantized(torch.float16)


_quiet = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated", "ignore:Sparse", "ignore:.*[qQ]uantiz"
)


@_quiet
@pytest.mark.parametrize("make", [_wrapped, _sparse, _int8])
def test_weights_that_cannot_be_read_are_not_reused(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    model, _ = make()
    _assert_stocks_without_reuse(model)


@_quiet
@pytest.mark.parametrize("make", [_wrapped, _sparse, _int8, _half])
def test_changes_of_weights_that_cannot_be_read_show(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    model, change = make()
    with registered():
        before = stock(model, PROMPT)
        for _ in range(2):
            assert torch.equal(paged(model, PROMPT), before)
        change()
        assert not torch.equal(stock(model, PROMPT), before), "the test needs a change that matters"
        assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))


class _Gain(torch.nn.Module):
    """Multiplies by something that is no parameter and no buffer."""

    def __init__(self, inner: torch.nn.Module, gain: Any) -> None:
        super().__init__()
        self.inner, self.gain = inner, gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = next(iter(self.gain.values())) if isinstance(self.gain, dict) else getattr(self.gain, "value", self.gain)
        return self.inner(x) * float(gain[0] if isinstance(gain, list | np.ndarray) else gain)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1.0, 3.0),
        (-1.0, -2.0),  # Python hashes the two alike
        pytest.param(np.float32(1), np.float32(4), id="numpy"),
        pytest.param(np.array([1.0], np.float32), np.array([4.0], np.float32), id="array"),
        pytest.param(SimpleNamespace(value=1.0), SimpleNamespace(value=4.0), id="object"),
        pytest.param(torch.tensor(1.0), torch.tensor(3.0), id="tensor"),
        pytest.param([1.0], [3.0], id="list"),
        pytest.param({"a": [1.0]}, {"a": [3.0]}, id="dict"),
    ],
)
def test_an_attribute_that_acts_like_a_weight(before: Any, after: Any) -> None:
    model = zoo.fresh("llama")
    gain = model.model.layers[0].mlp = _Gain(model.model.layers[0].mlp, before)
    with registered():
        for _ in range(2):
            paged(model, PROMPT)
        first = stock(model, PROMPT)
        gain.gain = after
        assert not torch.equal(stock(model, PROMPT), first), "the test needs a change that matters"
        assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))


def test_modules_of_unusual_origin_and_attributes_that_hold_themselves() -> None:
    model = zoo.fresh("llama")
    cyclic: dict[str, Any] = {"a": 1}
    cyclic["self"] = cyclic
    model.model.settings = cyclic
    odd = type("Odd", (torch.nn.Identity,), {"__module__": "never_imported"})
    model.model.odd = odd()
    with registered():
        for _ in range(2):
            assert torch.equal(paged(model, PROMPT), stock(model, PROMPT))
        assert hf_paged.cache_stats(model).hit_tokens > 0
