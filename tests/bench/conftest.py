"""Peers that compute nothing: scripts of a few lines, run as real processes through the real protocol."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="measuring needs the `bench` extra")

from hf_paged.bench import peers, wire
from hf_paged.bench.model import Subject
from hf_paged.bench.peers import PeerSpec
from hf_paged.bench.process import PeerProcess
from hf_paged.bench.wire.hf_paged_peer import Job

SCRIPT = """
import os, sys, time
from hf_paged_peer import Peer, serve

class Fake(Peer):
    packages = ("torch",)

    def load(self):
        print("a library says hello")

    def run(self, work):
{body}

def right(work):
    return [[[request.prompt[0]] * request.out for _ in range(work.samples)] for request in work.requests]

serve(Fake())
"""

RATES = """
class Machine(Peer):
    def load(self): pass
    def run(self, work): return []
    def details(self): return {"gflops": {"a": 1.0, "b": 100.0}, "read_gb_s": {"64 MiB": 10.0}}
"""


@pytest.fixture
def fake(tmp_path):
    """``fake(name, body of run)`` is the spec of a peer."""

    def make(name: str, body: str = "return right(work)", missing: str = "") -> PeerSpec:
        script = tmp_path / f"{name}_peer.py"
        script.write_text(SCRIPT.format(body=textwrap.indent(textwrap.dedent(body), " " * 8)))
        return spec_of(name, script, missing)

    return make


def spec_of(name: str, script: Path, missing: str = "") -> PeerSpec:
    path = str(Path(wire.__file__).parent)
    return PeerSpec(name, (sys.executable, str(script)), {"PYTHONPATH": path}, missing)


@pytest.fixture
def started(fake, tmp_path):
    """``started(body)`` is a running peer; all are ended."""
    running = []

    def start(body: str = "return right(work)") -> PeerProcess:
        process = PeerProcess(fake(f"fake{len(running)}", body), tmp_path / "peer.log")
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()


@pytest.fixture
def job(tmp_path):
    return Job(
        model="nowhere",
        dtype="float32",
        threads=1,
        scratch=str(tmp_path / "scratch"),
        max_len=8,
        max_seqs=2,
        kv_tokens=16,
    )


@pytest.fixture
def quick_machine(monkeypatch, tmp_path):
    """The machine's rates without measuring them."""
    script = tmp_path / "machine.py"
    script.write_text("from hf_paged_peer import Peer, serve\n" + RATES + "\nserve(Machine())\n")
    monkeypatch.setattr(peers, "machine", lambda: spec_of("machine", script))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Llama of 32 hidden numbers as a folder, without a tokenizer."""
    from tests import zoo

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    zoo.fresh("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_subject(tiny_folder, tmp_path):
    return Subject("tiny-llama", tiny_folder, tmp_path / "scratch", vocabulary=97, longest=256, special=frozenset({0}))
