"""The command line: what each command prints and the exit status it ends with."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import hf_paged
from hf_paged import cli, demo, doctor
from hf_paged.cli.app import app
from hf_paged.errors import UnsupportedError
from hf_paged.model.loader import load_tokenizer

runner = CliRunner()


def test_version():
    done = runner.invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"hf-paged {hf_paged.__version__}\n")


def test_missing_libraries_are_a_sentence_not_a_traceback(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs typer and rich: pip install 'hf-paged\[cli\]'"):
        cli.main()


# -- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.versions
def test_doctor_says_what_is_used():
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert torch.__version__ in done.stdout
    assert "chosen" in done.stdout
    assert "hf_paged can be used here." in done.stdout


def test_doctor_as_json():
    done = runner.invoke(app, ["doctor", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert report["usable"] is True
    assert [backend["name"] for backend in report["backends"] if backend["chosen"]]
    assert {"name", "available", "chosen", "reason"} <= set(report["backends"][0])
    assert report["extras"]["flash"]["how"] == "pip install 'hf-paged[flash]'"


def test_doctor_fails_on_a_transformers_that_is_not_supported(monkeypatch):
    def refuse():
        raise UnsupportedError("this transformers is from another time")

    monkeypatch.setattr(doctor, "check_supported", refuse)
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "from another time" in done.stdout


def test_doctor_without_a_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "apt install g++" in done.stdout


def test_doctor_knows_every_extra_a_user_may_install():
    """Its table and pyproject.toml are two lists of the same thing."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    named = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert named - {"test", "dev", "clients"} == {extra.name for extra in doctor.EXTRAS} - {"demo model"}


# -- demo -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(smollm2, tmp_path_factory) -> Path:
    """A small Llama with random weights and a real tokenizer: the whole demo in seconds."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer("demo").save_pretrained(folder)
    return folder


def run_demo(folder: Path | str, *options: str):
    return runner.invoke(app, ["demo", "--model", str(folder), "--quick", "--max-new-tokens", "8", *options])


@pytest.mark.model
@pytest.mark.versions
def test_demo_shows_each_part_and_succeeds_when_tokens_are_equal(tiny_folder):
    done = run_demo(tiny_folder)
    assert done.exit_code == 0, done.output
    for part in ("Answers", "One chat", "Tokens against stock", "Keys and values held", "Time"):
        assert part in done.stdout
    assert "exactly the tokens of stock generate()" in done.stdout


@pytest.mark.model
def test_demo_fails_when_one_token_differs(tiny_folder, monkeypatch):
    real = demo.generate

    def wrong(subject, inputs, paged, **options):
        made = real(subject, inputs, paged, **options)
        if paged and "num_beams" not in options:
            made.sequences[-1, -1] += 1
        return made

    monkeypatch.setattr(demo, "generate", wrong)
    done = run_demo(tiny_folder)
    assert done.exit_code == 1
    assert "differ from stock generate()" in done.stdout


@pytest.mark.model
def test_demo_leaves_nothing_registered(tiny_folder):
    from hf_paged.generation import is_registered

    run_demo(tiny_folder)
    assert not is_registered()


@pytest.mark.model
def test_demo_chat_computes_only_what_is_new(tiny_folder):
    subject = demo.prepare(demo.Settings(str(tiny_folder), quick=True, max_new_tokens=8), lambda text: None)
    try:
        first, *later = demo.compare_chat(subject, lambda text: None)
    finally:
        hf_paged.unregister()
    assert first.prefilled_tokens == first.prompt_tokens
    for turn in later:
        assert turn.prefilled_tokens < turn.prompt_tokens / 2
        assert turn.comparison.identical


@pytest.mark.model
def test_demo_batch_and_beams_hold_less_than_stock(tiny_folder):
    subject = demo.prepare(demo.Settings(str(tiny_folder), quick=True, max_new_tokens=8), lambda text: None)
    try:
        for compared in (demo.compare_ragged(subject, len), demo.compare_beams(subject, len)):
            assert compared.holds
            assert compared.paged.kv_bytes < compared.stock.kv_bytes
    finally:
        hf_paged.unregister()


def test_demo_with_a_bad_dtype_is_a_sentence():
    done = runner.invoke(app, ["demo", "--dtype", "int8"])
    assert done.exit_code == 2
    assert "dtype='int8' must be float32, bfloat16 or float16" in done.output


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_on_the_real_model(dtype):
    done = run_demo("demo", "--dtype", dtype)
    assert done.exit_code == 0, done.output
    assert "Paris" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="symlinks need a privilege there")
def test_integrations_are_importable_as_a_subpackage():
    import hf_paged.integrations

    folder = Path(hf_paged.__file__).parent / "integrations"
    assert Path(hf_paged.integrations.__file__).parent == folder
