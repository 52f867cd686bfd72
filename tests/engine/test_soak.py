"""A short soak, and that the soak notices what it looks for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged.cache.manager import KVCacheManager
from hf_paged.engine.core import EngineCore
from hf_paged.engine.stepper import Stepper
from hf_paged.model.runner import ModelRunner
from tests.regressions.engine_helpers import run_program

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
TINY = ("--host-memory", "64KiB", "--threads", "1")


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("hf_paged_soak", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return run_program(PROGRAM, *args)


def test_a_soak_of_a_tiny_model_passes(tiny: Path) -> None:
    done = run("--model", tiny, "--requests", 300, "--clients", 60, "--seconds", 240, *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 requests" in done.stdout and done.stdout.rstrip().endswith("passed")


def test_a_soak_without_steps_that_overlap_passes(tiny: Path) -> None:
    done = run("--model", tiny, "--requests", 300, "--clients", 60, "--no-overlap", "--ids", "--seed", 7, *TINY)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.model
def test_a_soak_of_a_real_model_passes() -> None:
    done = run("--requests", 120, "--clients", 60, "--seconds", 270, "--rss-limit", 32)
    assert done.returncode == 0, done.stdout + done.stderr


# -- it fails when it should -------------------------------------------------------------------------------------------


def soak(program: Any, tiny: Path, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The output of a short soak in this process, which must not succeed."""
    threads = torch.get_num_threads()
    common = ("--model", str(tiny), "--requests", "60", "--clients", "30", "--seconds", "100", "--rss-limit", "1000")
    assert program.main([*common, *TINY, *args]) == 1
    torch.set_num_threads(threads)
    return capsys.readouterr().out


def test_blocks_that_stay_in_use_are_noticed(
    program: Any, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, kept = KVCacheManager.free, list[Any]()

    def forget_one(self: KVCacheManager, table: Any) -> None:
        if not kept and table.num_tokens:
            kept.append((self, table))
        if (self, table) not in kept:
            free(self, table)

    monkeypatch.setattr(KVCacheManager, "free", forget_one)
    assert "blocks are in use by 1 tables" in soak(program, tiny, capsys)
    free(*kept[0])


def test_wrong_tokens_are_noticed(
    program: Any, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step, steps = ModelRunner.run, []

    def disturbed(self: ModelRunner, *args: Any) -> torch.Tensor:
        steps.append(1)
        logits = run_step(self, *args)
        return logits.roll(1, dims=-1) if len(steps) > 3 else logits

    monkeypatch.setattr(ModelRunner, "run", disturbed)
    assert "the stock loop gives" in soak(program, tiny, capsys)


def test_samplers_that_stay_behind_are_noticed(
    program: Any, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "_done", lambda self, events: events)
    assert "requests are still known" in soak(program, tiny, capsys)


def test_a_fault_of_the_loop_is_noticed(
    program: Any, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Stepper.step, []

    def fail(self: Stepper) -> Any:
        steps.append(1)
        if len(steps) > 5:
            raise ZeroDivisionError("a fault")
        return step(self)

    monkeypatch.setattr(Stepper, "step", fail)
    assert "EngineDeadError" in soak(program, tiny, capsys)


def test_requests_that_were_not_run_in_time_are_noticed(
    program: Any, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "were not run in 0 seconds" in soak(program, tiny, capsys, "--seconds", "0.01")


def test_a_hang_ends_the_process(tiny: Path, tmp_path: Path) -> None:
    hang = tmp_path / "hang.py"
    hang.write_text(
        f"import runpy, sys, time\n"
        f"from hf_paged.engine.stepper import Stepper\n"
        f"Stepper.step = lambda self: time.sleep(100)\n"
        f"sys.argv = ['soak', '--model', {str(tiny)!r}, '--watchdog', '2', *{TINY!r}]\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(hang)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "Timeout" in done.stderr and "hang.py" in done.stderr


def test_the_slope_of_a_line(program: Any) -> None:
    assert program.slope([(0, 5), (1, 7), (2, 9)]) == pytest.approx(2)
    assert program.slope([(0, 5), (1, 9), (2, 5)]) == pytest.approx(0)
    assert program.slope([(3, 5)]) == program.slope([]) == program.slope([(1, 2), (1, 9)]) == 0


def test_memory_that_grows_is_noticed(program: Any) -> None:
    record = program.Record()
    record.left.update(dict.fromkeys(program.MOMENTS, 1))
    stats = {"preemptions": 3}
    record.rss = [(t, 500.0 + min(t, 50)) for t in range(101)]  # all of it in the first half
    assert program.verdict(record, stats, rss_limit=16) == []
    record.rss = [(t, 500.0 + t) for t in range(101)]
    (found,) = program.verdict(record, stats, rss_limit=16)
    assert "grew by 50.0 MiB" in found
    record.rss, record.left = [(0, 500.0), (1, 500.0)], type(record.left)()
    assert len(program.verdict(record, {"preemptions": 0}, 16)) == 1 + len(program.MOMENTS)
