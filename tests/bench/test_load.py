"""What others use of the processors is seen, and what the measured tree uses is not taken for theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from hf_paged.bench.load import Load, LoadWatch, wait_until_quiet


@pytest.fixture
def busy():
    """A process that computes without end, as a child of a shell that waits."""
    script = "while True: pass"
    shell = subprocess.Popen(["sh", "-c", f"{sys.executable} -c '{script}'; true"], start_new_session=True)
    deadline = time.monotonic() + 20
    while not any(child.cpu_times().user > 0.05 for child in psutil.Process(shell.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield shell.pid
    os.killpg(shell.pid, 9)
    shell.wait()


def tree(pid):
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_a_busy_process_outside_disturbs(busy):
    child = psutil.Process(busy).children()[0]
    before, watch = child.cpu_times().user, LoadWatch(list)
    time.sleep(0.6)
    load, used = watch.stop(), child.cpu_times().user - before
    assert load.seconds >= 0.8 * used > 0
    assert load.disturbs(0.1) or used < 0.1 * load.wall + 0.04


def test_the_measured_tree_is_not_counted(busy):
    without, everything = LoadWatch(lambda: tree(busy)), LoadWatch(list)
    child = psutil.Process(busy).children()[0]
    before = child.cpu_times().user
    time.sleep(0.6)
    others, all_of_them = without.stop(), everything.stop()
    used = child.cpu_times().user - before
    assert all_of_them.seconds - others.seconds == pytest.approx(used, abs=0.1)


def test_time_of_children_that_ended_is_their_parents():
    """An engine may start helpers for a moment: their time is its own once it has waited for them."""
    helper = "subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])"
    script = f"import subprocess, sys; input(); {helper}; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        own, everyone = LoadWatch(lambda: [psutil.Process(parent.pid)]), LoadWatch(list)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.stdout.readline()
        others, all_of_them = own.stop(), everyone.stop()
        helped = psutil.Process(parent.pid).cpu_times().children_user
        assert helped > 0.05
        assert all_of_them.seconds - others.seconds >= helped - 0.05
        parent.kill()


def test_short_stretches_are_not_disturbed_by_the_grain_of_the_clock():
    assert not Load(seconds=0.03, wall=0.01).disturbs(0.1)
    assert Load(seconds=0.3, wall=1.0).disturbs(0.1)
    assert not Load(seconds=0.3, wall=4.0).disturbs(0.1)
    assert Load(0.3, 4.0).share == pytest.approx(0.075)


def test_waiting_for_quiet_ends(busy):
    begin = time.monotonic()
    assert not wait_until_quiet(limit=0.0, patience=0.5, stretch=0.2)
    assert time.monotonic() - begin < 10
    assert wait_until_quiet(limit=1000.0, patience=0, stretch=0.05)
