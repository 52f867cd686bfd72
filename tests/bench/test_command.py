"""``hf-paged bench`` from its options to its files."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from hf_paged.bench import peers
from hf_paged.cli.app import app

pytest.importorskip("matplotlib", reason="the chart needs the `bench` extra")

runner = CliRunner()

WORK = {
    "short": [{"prompt": [5, 6, 7], "out": 6}, {"prompt": [5, 6], "out": 4}],
    "step": {"2": [{"prompt": [5, 6, 7], "out": 5}, {"prompt": [8, 6, 7], "out": 5}]},
    "samples": {"prompt": [5, 6, 7], "n": 2, "out": 3},
}


@pytest.fixture
def work(tmp_path):
    path = tmp_path / "work.json"
    path.write_text(json.dumps(WORK))
    return path


def bench(*arguments):
    return runner.invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.parametrize(
    "names",
    [
        ["hf-paged", "stock"],
        pytest.param(["hf-paged-generate", "stock-batch"], marks=pytest.mark.slow),
    ],
)
def test_a_user_s_model_beside_stock(tiny_folder, work, tmp_path, quick_machine, monkeypatch, names):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    options = ("--workloads", work, "--dtype", "float32", "--threads", 1, "--repeats", 1, "--accept-load")
    done = bench(tiny_folder, *options, "--peers", ",".join(names), "--out", out)
    assert done.exit_code == 0, done.output
    data = json.loads((out / "tiny-llama-float32.json").read_text())
    assert (out / "tiny-llama-float32.png").read_bytes().startswith(b"\x89PNG")
    assert data["model"] == "tiny-llama"
    assert list(data["peers"]) == names
    for peer in data["peers"].values():
        assert {name: figures["state"] for name, figures in peer["cases"].items()} == dict.fromkeys(data["cases"], "ok")
        assert peer["cases"]["short"]["agreement"] == {"requests": 2, "identical": 2, "prefix": 1.0}
        assert peer["start_s"] > 0 and peer["first_token_s"] > 0 and peer["rss_ready"] > 0
        assert peer["cases"]["short"]["repeats"][0]["peak_rss"] > 0
    assert data["machine"]["devices"] and data["machine"]["versions"]["torch"]
    assert set(data["floor"]["figures"]) == {"short", "step b=2", "samples"}
    assert data["ratios"]["of"] == names[0]
    assert data["ratios"]["to"][names[1]]["short"] > 0
    assert str(tmp_path) not in json.dumps(data)
    assert f"{names[0]} is so many times as fast" in done.output
    assert "2 of 2 (1.00)" in done.output


def test_other_engines_run_in_their_own_python(tiny_folder, work, tmp_path, quick_machine, fake, monkeypatch):
    """Adapters are found in a folder, and the one that is not installed is in the table."""
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    specs = {"here": fake("here"), "absent": fake("absent", missing="not installed: make bench-peers")}
    monkeypatch.setattr("hf_paged.bench.command.available", lambda adapters, environments: specs)
    done = bench(tiny_folder, "--workloads", work, "--only", "short", "--accept-load", "--no-agreement", "--repeats", 1,
                 "--out", tmp_path / "out")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "not installed: make bench-peers" in done.output
    data = json.loads((tmp_path / "out" / "tiny-llama-bfloat16.json").read_text())
    assert data["peers"]["here"]["cases"]["short"]["median"] > 0
    assert data["ratios"]["of"] is None


def test_a_failed_peer_is_exit_status_1(tiny_folder, work, tmp_path, quick_machine, fake, monkeypatch):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    spec = fake("short", "return [[ids[:1] for ids in one] for one in right(work)]")
    monkeypatch.setattr("hf_paged.bench.command.available", lambda adapters, environments: {"short": spec})
    done = bench(tiny_folder, "--workloads", work, "--only", "short", "--accept-load", "--no-agreement", "--out",
                 tmp_path / "out")  # fmt: skip
    assert done.exit_code == 1
    assert "wrong length: request 0 has 1 new tokens, not 6" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--peers", "vlm"), "no peer 'vlm'; there are hf-paged, hf-paged-int8, hf-paged-int8-weights, hf-paged-gen"),
        (("--only", "W9"), "no entry 'W9' in workloads.json"),
        (("--dtype", "int8"), "dtype='int8' must be one of"),
        (("--workloads", "nowhere.json"), "cannot read the workload file nowhere.json"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(tiny_folder, options, message):
    done = bench(tiny_folder, *options)
    assert done.exit_code == 2
    assert f"hf-paged bench: {message}" in " ".join(done.output.split())


def test_what_is_missing_is_known_before_anything_is_measured(tiny_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = bench(tiny_folder)
    assert done.exit_code == 2
    assert "the chart is drawn with matplotlib: pip install 'hf-paged[bench]'" in " ".join(done.output.split())


def test_a_model_that_is_not_there():
    done = bench("no/such-model")
    assert done.exit_code == 2
    assert "cannot find 'no/such-model'" in done.output


def test_ids_of_another_tokenizer_are_refused_unless_drawn_anew(tiny_folder, tmp_path):
    path = tmp_path / "work.json"
    path.write_text(json.dumps({"A": [{"prompt": [97], "out": 2}]}))
    done = bench(tiny_folder, "--workloads", path)
    assert done.exit_code == 2
    assert "outside the model's vocabulary of 97" in " ".join(done.output.split())
    # the packaged work has its ids drawn anew for a model of its own; this one's positions are too few for it
    done = bench(tiny_folder, "--only", "W1")
    assert "the model has positions for 256; leave it out with --only" in " ".join(done.output.split())


def test_every_adapter_of_the_repository_is_a_peer():
    if not peers.ADAPTERS.is_dir():
        pytest.skip("the adapters of other engines are in the repository only")
    known = peers.available()
    assert {"vllm", "openvino", "llama-cpp"} <= set(known)
    assert all(os.path.isabs(spec.command[0]) for spec in known.values())
