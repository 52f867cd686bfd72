"""A peer's process: asking it, and what becomes of one that fails, dies, hangs or talks nonsense."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import psutil
import pytest

from hf_paged.bench.peers import PeerSpec
from hf_paged.bench.process import PeerDiedError, PeerError, PeerProcess
from hf_paged.bench.wire.hf_paged_peer import Request, Work

WORK = dataclasses.asdict(Work([Request([5, 6], 3), Request([7], 2)]))


def test_load_reset_run_stop(started, job):
    process = started()
    loaded = process.ask("load", 20, job=dataclasses.asdict(job))
    assert loaded["versions"]["python"] == sys.version.split()[0]
    assert "torch" in loaded["versions"]
    process.ask("reset", 20, work=WORK)
    answer = process.ask("run", 20, work=WORK)
    assert answer["outputs"] == [[[5, 5, 5]], [[7, 7]]]
    assert 0 <= answer["wall_s"] < 20
    assert process.peak_memory() > 0
    process.stop()
    assert not psutil.pid_exists(process.pid)


def test_what_libraries_print_is_not_taken_for_an_answer(started, job):
    process = started("print('noise'); os.system('echo more noise'); return right(work)")
    process.ask("load", 20, job=dataclasses.asdict(job))
    assert process.ask("run", 20, work=WORK)["outputs"]
    log = process.log.read_text()
    assert "a library says hello" in log
    assert "more noise" in log


def test_a_failure_is_reported_and_the_process_goes_on(started):
    process = started("if work.seed: raise MemoryError('no room for 7 blocks')\nreturn right(work)")
    with pytest.raises(PeerError, match="MemoryError: no room for 7 blocks"):
        process.ask("run", 20, work={**WORK, "seed": 1})
    assert "Traceback" in process.log.read_text()
    assert process.ask("run", 20, work=WORK)["ok"]
    with pytest.raises(PeerError, match="unknown order 'dance'"):
        process.ask("dance", 20)


def test_a_dead_peer_is_reported_with_its_last_words(started):
    process = started("print('out of luck', file=sys.stderr, flush=True); os._exit(3)")
    begin = time.perf_counter()
    with pytest.raises(PeerDiedError, match=r"ended with status 3 during 'run': (.|\n)*out of luck"):
        process.ask("run", 60, work=WORK)
    with pytest.raises(PeerDiedError, match="it has ended"):
        process.ask("run", 60, work=WORK)
    assert time.perf_counter() - begin < 30


def test_a_peer_that_hangs_is_ended_with_its_children(started):
    process = started("import subprocess; subprocess.Popen(['sleep', '597']); time.sleep(600)")
    process.ask("reset", 20, work=WORK)
    with pytest.raises(PeerDiedError, match="no answer to 'run' in 1 s; it was ended"):
        process.ask("run", 1, work=WORK)
    assert not psutil.pid_exists(process.pid)
    assert ["sleep", "597"] not in [other.info["cmdline"] for other in psutil.process_iter(["cmdline"])]


def test_an_answer_that_is_not_json(tmp_path):
    spec = PeerSpec("odd", (sys.executable, "-c", "print('hello', flush=True); input()"))
    process = PeerProcess(spec, tmp_path / "odd.log")
    with pytest.raises(PeerDiedError, match="something that is not JSON: b'hello"):
        process.ask("load", 20)


def test_a_python_that_is_not_there(tmp_path):
    with pytest.raises(PeerDiedError, match="gone cannot be started"):
        PeerProcess(PeerSpec("gone", (str(tmp_path / "python"),)), tmp_path / "gone.log")


def test_a_halted_peer_uses_no_time_until_it_is_resumed(started):
    body = """
        import threading
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
        return right(work)
    """
    process = started(body)
    process.ask("run", 20, work=WORK)
    process.suspend()
    halted = psutil.Process(process.pid)
    deadline = time.monotonic() + 20
    while halted.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = halted.cpu_times().user
    time.sleep(0.4)
    assert halted.cpu_times().user - before < 0.05
    process.resume()
    assert process.ask("reset", 20, work=WORK)["ok"]


def test_a_halted_peer_does_not_outlive_a_runner_that_was_killed(fake, tmp_path):
    spec = fake("orphan")
    script = f"""
import os, signal, sys
from pathlib import Path
from hf_paged.bench.peers import PeerSpec
from hf_paged.bench.process import PeerProcess
process = PeerProcess(PeerSpec("orphan", {spec.command!r}, {dict(spec.environment)!r}), Path({str(tmp_path / "log")!r}))
process.ask("reset", 20, work={WORK!r})
process.suspend()
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
