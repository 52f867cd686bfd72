"""``generate(cache_implementation="paged")`` against stock ``generate()``: every architecture, every mode.

Gathered: bit for bit, scores included. Native kernels: the same tokens and scores within a tolerance.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import generation
from hf_paged.generation.shared import profile_of
from tests import zoo
from tests.parity import modes

#: what stock itself refuses, by (architecture, mode); asserted, so that a change on either side is noticed
STOCK_RAISES: set[tuple[str, str]] = {
    *((name, mode) for name in zoo.RECURRENT if name != "lfm2" for mode in ("assisted", "prompt_lookup")),
    ("mamba2", "chunked_prefill"),  # asks for the sequence length of a cache that has none
    ("mamba2", "attentions"),
    ("bamba", "inputs_embeds"),
    ("t5", "guidance_scale"),
    ("bart", "guidance_scale"),
}

#: what also runs on the oldest and the previous supported transformers
SMOKE_NAMES = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2", "deepseek_v3", "bart", "bamba", "llama4", "falcon")
SMOKE_MODES = ("padded", "beams", "sample", "prompt_lookup", "assisted", "chunked_prefill", "logits", "ragged_ends")


def in_smoke(name: str, mode: str) -> bool:
    # 5.17's own window layers fail when a draft model runs several steps at once, so no drafts on windows
    windowed = name in ("mistral", "gemma2", "gpt_oss", "llama4")
    return name in SMOKE_NAMES and mode in SMOKE_MODES and not (mode == "assisted" and windowed)


def pairs() -> list[Any]:
    return [
        pytest.param(name, mode, id=f"{name}-{mode}", marks=[pytest.mark.versions] if in_smoke(name, mode) else [])
        for name in zoo.ALL
        for mode in modes.MODES
    ]


@pytest.fixture(autouse=True)
def _registered() -> Any:
    yield hf_paged.register(memory="32MiB")
    hf_paged.unregister()


def both(name: str, mode: str, backend: str, block_size: int) -> tuple[modes.Outcome, modes.Outcome] | None:
    model = zoo.build(name)
    generation.clear(model)
    try:
        expected = modes.run(model, name, mode)
    except Exception:
        if (name, mode) in STOCK_RAISES:
            return None
        raise
    assert (name, mode) not in STOCK_RAISES, "stock no longer raises; the table is out of date"
    config = {"attention_backend": backend, "block_size": block_size, "engine": False}
    if backend != "gather":
        # the first paged forward of a kind of model probes it; only later ones run on kernels
        model.generate(**modes.prompt(rows=1), max_new_tokens=2, cache_implementation="paged", cache_config=config)
    profile = profile_of(model.config)
    native_before, gathered_before = profile.native_calls, profile.gathered_calls
    actual = modes.run(model, name, mode, cache_implementation="paged", cache_config=config)
    if backend != "gather" and name in zoo.NATIVE and mode not in ("attentions", "hidden_states"):
        # what ran, not what was planned: kernels answered, and nothing fell back
        assert profile.native_calls > native_before
        assert profile.gathered_calls == gathered_before
    generation.check_invariants(model)
    return expected, actual


@pytest.mark.parametrize(("name", "mode"), pairs())
def test_gathered_is_bit_identical(name: str, mode: str) -> None:
    outcome = both(name, mode, "gather", block_size=4)
    if outcome is None:
        return
    expected, actual = outcome
    assert torch.equal(actual.sequences, expected.sequences)
    assert actual.witnesses == expected.witnesses
    assert actual.tensors.keys() == expected.tensors.keys()
    for (path, got), (other, want) in zip(modes.flat(actual.tensors), modes.flat(expected.tensors), strict=True):
        assert path == other and got.dtype == want.dtype and got.shape == want.shape, path
        assert torch.equal(got, want), f"{path}: differs by {(got - want).abs().max()}"


# blocks of 16 run on the native kernels, blocks of 4 on the reference, with a border inside every prompt and window
@pytest.mark.parametrize("block_size", [16, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "mode"), pairs())
def test_native_gives_the_same_tokens(name: str, mode: str, block_size: int) -> None:
    outcome = both(name, mode, "auto", block_size)
    if outcome is None:
        return
    expected, actual = outcome
    assert torch.equal(actual.sequences, expected.sequences)
    assert actual.witnesses == expected.witnesses
    assert actual.tensors.keys() == expected.tensors.keys()
    for (path, got), (_, want) in zip(modes.flat(actual.tensors), modes.flat(expected.tensors), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape, path
        if got.is_floating_point():
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=lambda m, p=path: f"{p}: {m}")
        else:
            assert torch.equal(got, want), path


#: what returns tokens alone, so that the engine may run it
ENGINE_MODES = ("greedy", "padded", "exact_blocks", "ragged_ends")
#: architectures whose attention reads blocks and that keep nothing else
PACKED = tuple(name for name in zoo.NATIVE if name not in (*zoo.RECURRENT, *zoo.ENCODER_DECODER))


@pytest.mark.parametrize("mode", ENGINE_MODES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.versions] if n in SMOKE_NAMES else []) for n in zoo.ALL]
)
def test_default_settings_give_the_same_tokens(name: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.build(name)
    generation.clear(model)
    plain = {"return_dict_in_generate": False, "output_scores": False}
    call = modes.MODES[mode](name)
    want = model.generate(**call.inputs, **{"max_new_tokens": modes.NEW_TOKENS, **call.options, **plain})
    with caplog.at_level(logging.INFO, "hf_paged"):
        for _ in range(2):  # the second time from what the first one stored
            got = model.generate(
                **call.inputs, **{"max_new_tokens": modes.NEW_TOKENS, **call.options, **plain},
                cache_implementation="paged",
            )  # fmt: skip
            assert torch.equal(got, want)
    ran = [record.message for record in caplog.records if "ran on the engine" in record.message]
    assert len(ran) == (2 if name in PACKED else 0)
    generation.check_invariants(model)


@pytest.mark.parametrize("name", zoo.ALL)
def test_the_expected_layers_are_native(name: str) -> None:
    model = zoo.build(name)
    options = {"max_new_tokens": 2, "cache_implementation": "paged"}
    model.generate(**modes.prompt(rows=1), **options, cache_config={"engine": False})
    stats = generation.cache_stats(model)
    assert bool(stats.native) == (name in zoo.NATIVE), stats
    assert bool(stats.gathered) == (name in zoo.GATHERED), stats
    model.generate(**modes.prompt(rows=1), **options)
    assert generation.cache_stats(model).native == stats.native
    assert generation.cache_stats(model).gathered.keys() == stats.gathered.keys()
