"""Every mistake ends in one clear error that names the numbers and the way out, and costs later calls nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import compat, errors, generation
from hf_paged.config import CacheConfig, parse_size
from tests import zoo
from tests.regressions.helpers import ids, paged, registered, stock

pytestmark = pytest.mark.versions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blok_size": 16}, "did you mean 'block_size'"),
        ({"block_size": 0}, "block_size=0 must be an int from 1 to 1024"),
        ({"block_size": -4}, "block_size=-4"),
        ({"block_size": 2.5}, "block_size=2.5"),
        ({"block_size": True}, "block_size=True"),
        ({"memory": "lots"}, "memory='lots' is not a size"),
        ({"memory": 0}, "more than 0 bytes"),
        ({"memory": -1}, "more than 0 bytes"),
        ({"memory": "1GiB", "num_blocks": 4}, "not both"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"prefix_caching": "yes"}, "must be True or False"),
        ({"attention_backend": "cuda-magic"}, "choose one of: auto"),
        ({"attention_backend": None}, "must be text"),
        ({"salt": 3}, "salt=3"),
    ],
)
def test_a_bad_cache_config_is_named(options: dict[str, Any], message: str) -> None:
    model, prompt = zoo.build("llama"), ids(1, 6)
    with registered():
        with pytest.raises(errors.ConfigError, match=message):
            paged(model, prompt, cache_config=options)
        assert torch.equal(paged(model, prompt), stock(model, prompt))
    with pytest.raises(errors.ConfigError, match=message):
        hf_paged.PagedCache(model.config, cache_config=options)


@pytest.mark.parametrize(
    ("text", "size"), [("2 kB", 2000), ("1.5g", 15 * 10**8), ("3TiB", 3 << 40), ("10PiB", 10 << 50)]
)
def test_sizes_as_text(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_bad_register_changes_nothing() -> None:
    with pytest.raises(errors.ConfigError):
        hf_paged.register(block_size=0)
    assert not generation.is_registered()
    with pytest.raises(errors.ConfigError, match="not both"):
        hf_paged.register({"block_size": 4}, memory="1MiB")
    with pytest.raises(errors.ConfigError, match="choose one of: auto"):
        hf_paged.register(attention_backend="cuda-magic")
    assert not generation.is_registered()


def test_a_second_register_with_other_arguments_takes_over() -> None:
    model, prompt = zoo.build("llama"), ids(1, 9)
    want = stock(model, prompt)
    with registered():
        assert torch.equal(paged(model, prompt), want)
        assert hf_paged.cache_stats(model).block_size == 4
        hf_paged.register(block_size=16, memory="16MiB")
        assert torch.equal(paged(model, prompt), want)
        assert hf_paged.cache_stats(model).block_size == 16


def test_memory_too_small_for_one_block() -> None:
    model = zoo.fresh("llama")
    with registered(), pytest.raises(errors.OutOfBlocksError, match=r"memory=100 bytes .* takes 1536 bytes") as caught:
        paged(model, ids(1, 6), cache_config={"memory": 100})
    assert caught.value.needed == 1 and caught.value.available == 0


def test_memory_too_small_for_the_sequence_names_needed_and_available() -> None:
    """Case 4, for a single call: the call fails alone and the pool serves the next one."""
    model = zoo.build("llama")
    with registered(memory=None, num_blocks=8):
        with pytest.raises(errors.OutOfBlocksError, match=r"11 .*8") as caught:
            paged(model, ids(1, 40))
        assert (caught.value.needed, caught.value.available) == (11, 8)
        short = ids(1, 6)
        assert torch.equal(paged(model, short), stock(model, short))
        with pytest.raises(errors.OutOfBlocksError):  # grows out of the pool while decoding
            paged(model, ids(1, 28), max_new_tokens=12)
        assert torch.equal(paged(model, short), stock(model, short))


@pytest.mark.parametrize("bad", [-1, zoo.VOCAB, 10**6])
def test_token_ids_outside_the_vocabulary(bad: int) -> None:
    model, prompt = zoo.build("llama"), ids(2, 6)
    broken = prompt.clone()
    broken[1, 3] = bad
    with registered():
        with pytest.raises(
            errors.InvalidRequestError, match=f"token id {bad}, the model's vocabulary is 0..{zoo.VOCAB - 1}"
        ):
            paged(model, broken)
        assert torch.equal(paged(model, prompt), stock(model, prompt))


def test_a_backend_that_cannot_serve_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = zoo.build("llama"), ids(1, 9)
    hf_paged.attention.registry._log_once.cache_clear()
    with registered(block_size=6), caplog.at_level(logging.WARNING, "hf_paged"):
        for _ in range(2):
            assert torch.equal(paged(model, prompt, cache_config={"attention_backend": "cpu"}), stock(model, prompt))
    lines = [r.getMessage() for r in caplog.records if "cannot serve" in r.getMessage()]
    assert len(lines) == 1 and "'cpu'" in lines[0] and "block" in lines[0] and "'torch'" in lines[0]


def test_a_model_without_keys_and_values_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = zoo.build("mamba2"), ids(1, 9)
    with registered(), caplog.at_level(logging.INFO, "hf_paged"):
        assert torch.equal(paged(model, prompt), stock(model, prompt))
    assert any("Mamba2ForCausalLM keeps no plain keys and values" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("version", ["5.16.2", "6.0.0", "4.57.0"])
def test_register_on_an_unsupported_transformers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.transformers, "__version__", version)
    with pytest.raises(errors.UnsupportedError, match=f"5.17 up to, not including, 6.0; this is {version}"):
        hf_paged.register()
    assert not generation.is_registered()


def test_without_register_the_word_is_still_transformers_own() -> None:
    config = compat.generation_configuration_utils.GenerationConfig
    with pytest.raises(ValueError, match=r"Invalid .*cache_implementation"):
        config(cache_implementation="hf_paged")
    config(cache_implementation="paged")


def test_a_generation_config_can_carry_the_word() -> None:
    model, prompt = zoo.fresh("llama"), ids(2, 9)
    want = stock(model, prompt)
    with registered():
        model.generation_config.cache_implementation = "paged"
        assert torch.equal(stock(model, prompt), want)
        assert hf_paged.cache_stats(model).calls == 1
        model.generation_config.cache_config = {"block_size": 8}
        assert torch.equal(stock(model, prompt), want)
        assert hf_paged.cache_stats(model).block_size == 8
        # a cache returned by one call can be passed to the next, although the default names an implementation too
        first = stock(model, prompt, return_dict_in_generate=True)
        turn = torch.cat([first.sequences, ids(2, 3, seed=4)], dim=1)
        again = stock(model, turn, past_key_values=first.past_key_values)
        del first
        model.generation_config.cache_implementation = model.generation_config.cache_config = None
        assert torch.equal(again, stock(model, turn))


def test_a_stock_cache_beside_the_word_is_stocks_error() -> None:
    model, prompt = zoo.build("llama"), ids(1, 9)
    with registered(), pytest.raises(ValueError, match="Passing both"):
        paged(model, prompt, past_key_values=compat.DynamicCache(config=model.config))


def test_dtype_change_between_calls_is_noticed() -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 9)
    with registered():
        paged(model, prompt)
        model.to(torch.bfloat16)
        assert torch.equal(paged(model, prompt, cache_config={"attention_backend": "gather"}), stock(model, prompt))
        paged(model, prompt)
        model.to(torch.float32)
        assert torch.equal(paged(model, prompt), stock(model, prompt))


def test_autocast_has_keys_of_its_own() -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 9)
    with registered(attention_backend="gather"):
        paged(model, prompt)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(paged(model, prompt), stock(model, prompt))
        assert torch.equal(paged(model, prompt), stock(model, prompt))


def test_a_cache_refuses_another_number_of_rows() -> None:
    model = zoo.build("llama")
    cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})
    with torch.no_grad():
        model(ids(2, 5), past_key_values=cache)
        with pytest.raises(errors.InvalidRequestError, match="holds 2 rows, the forward has 3"):
            model(ids(3, 1), past_key_values=cache)


def test_a_padded_cache_wants_its_mask() -> None:
    model = zoo.build("llama")
    cache = hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"})
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        model(ids(2, 5), attention_mask=mask, past_key_values=cache)
        with pytest.raises(errors.UnsupportedError, match="Pass the 2D mask"):
            model(ids(2, 1), past_key_values=cache)


def test_pickling_a_cache_is_refused() -> None:
    import pickle

    with pytest.raises(errors.UnsupportedError, match="cannot be pickled"):
        pickle.dumps(hf_paged.PagedCache(zoo.config_of("llama"), cache_config=CacheConfig(memory="1MiB")))


def test_empty_prompts_behave_as_stock_does() -> None:
    model, nothing = zoo.build("llama"), torch.zeros(1, 0, dtype=torch.long)

    def outcome(call: Any) -> Any:
        try:
            return call(model, nothing).tolist()
        except Exception as error:
            return type(error)

    with registered():
        assert outcome(paged) == outcome(stock)
