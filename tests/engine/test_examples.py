"""The programs in ``examples/`` run as a user runs them, with a small input."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.regressions.engine_helpers import run_program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *args: object, text: str = "") -> str:
    """The output of an example, which must succeed."""
    done = run_program(EXAMPLES / name, *args, text=text)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_says_how_to_call_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert f"python examples/{path.name}" in shown and "--model" in shown


@pytest.mark.model
def test_a_file_of_prompts(tmp_path: Path) -> None:
    lines = [
        {"prompt": "The capital of France is", "id": 7},
        {"prompt": "The capital of France is", "max_tokens": 1},
        {"messages": [{"role": "user", "content": "What is the capital of Italy?"}], "temperature": 0},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    run("batch_jsonl.py", source, target, "--max-tokens", 8)
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [{k: v for k, v in f.items() if k not in ("completion", "finish_reason")} for f in found] == lines
    assert "Paris" in found[0]["completion"] and "Italy" in found[2]["completion"]
    assert len(found[1]["completion"]) < len(found[0]["completion"]) and found[1]["finish_reason"] == "length"


@pytest.mark.model
def test_a_chat() -> None:
    shown = run(
        "chat.py", "--stats", "--max-tokens", 20, text="What is the capital of France?\nAnd of Italy?\n\nnever asked\n"
    )
    assert "Paris" in shown and "Rome" in shown and shown.count("> ") == 3
    cached = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) of (\d+) prompt tokens", shown)]
    assert len(cached) == 2 and cached[0][0] == 0
    assert cached[1][0] >= cached[0][1], "the second turn reuses the first"


def test_several_continuations(tiny: Path) -> None:
    args = ("abc def", "--model", tiny, "--n", 3, "--max-tokens", 5, "--seed", 1, "--temperature", 2)
    shown = run("parallel_sampling.py", *args)
    found = [float(x) for x in re.findall(r"log-probability (-[\d.]+)", shown)]
    assert len(found) == 3 and found == sorted(found, reverse=True)
    assert shown.count("abc def") == 3
    assert "for 3 x 7 of the prompt" in shown


def test_training_with_generations_in_between(tiny: Path) -> None:
    args = ("--steps", 6, "--every", 3, "--lr", 0.01, "--prompt", "the capital", "--text", "the capital of atlantis")
    shown = run("train_while_generate.py", "--model", tiny, *args)
    steps = re.findall(r"step +(\d+)  loss +([\d.]+)  (.*)", shown)
    assert [int(step) for step, _, _ in steps] == [0, 3, 6]
    losses = [float(loss) for _, loss, _ in steps]
    assert losses[2] < losses[1] < losses[0]
    assert len({said for _, _, said in steps}) > 1, "what the model says changes with its weights"
