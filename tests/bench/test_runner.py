"""The order of runs, and what becomes of peers that fail and of repeats that others disturbed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hf_paged.bench import peers, runner, workload
from hf_paged.bench.contestant import check_lengths
from hf_paged.bench.process import PeerError
from hf_paged.bench.runner import Settings, measure
from hf_paged.bench.wire.hf_paged_peer import Request, Work
from hf_paged.errors import ConfigError

#: never waits, never throws away
LOOSE = {"repeats": 2, "threads": 1, "dtype": "float32", "load_limit": 1000.0, "agreement": False, "timeout": 20.0}


@pytest.fixture
def works(tmp_path):
    file = tmp_path / "work.json"
    file.write_text(
        '{"A": [{"prompt": [5, 6], "out": 3}, {"prompt": [7], "out": 2}], "B": [{"prompt": [8], "out": 1}]}'
    )
    return workload.read(file)


@pytest.fixture
def run(quick_machine, tiny_subject, works, tmp_path, monkeypatch):
    """``run(specs, **settings)`` measures the two cases; what was said is in ``run.said``."""
    monkeypatch.setattr(runner, "wait_until_quiet", lambda limit, patience: True)

    def go(specs, **changed):
        go.said = []
        return measure(tiny_subject, works, specs, Settings(**{**LOOSE, **changed}), tmp_path / "logs", go.said.append)

    return go


def figures(results, name, case):
    return next(peer for peer in results.peers if peer.name == name).cases[case]


def test_repeats_are_interleaved(fake, run, tmp_path):
    log = tmp_path / "order"
    body = "open({path!r}, 'a').write({name!r} + str(sum(r.out for r in work.requests)))\nreturn right(work)"
    names = ("x", "y", "z")
    results = run([fake(name, body.format(path=str(log), name=name)) for name in names])
    # the first token, a warm-up at loading, and one for each case come before
    assert log.read_text() == "x1x5y1y5z1z5" + "x5y5z5" + "x5y5z5" * 2 + "x1y1z1" + "x1y1z1" * 2
    assert [len(figures(results, name, "A").repeats) for name in names] == [2, 2, 2]
    assert set(results.floors) == {"A", "B"}
    assert len(results.rates) == 2


def test_wrong_lengths_are_that_peer_s_error(fake, run):
    results = run([fake("short", "return [[ids[:2] for ids in one] for one in right(work)]"), fake("good")])
    bad = figures(results, "short", "A")
    assert (bad.state, bad.shown) == ("failed", False)
    assert bad.reason == "wrong length: request 0 has 2 new tokens, not 3"
    assert figures(results, "short", "B").shown  # one token is not cut
    assert figures(results, "good", "A").shown
    assert results.failed
    assert "median" not in results.as_data()["peers"]["short"]["cases"]["A"]


def test_a_dead_peer_is_reported_and_started_again_for_the_next_case(fake, run):
    body = """
        self.runs = getattr(self, "runs", 0) + 1
        if self.runs > 3:  # its first token and two warm-ups
            os._exit(9)
        return right(work)
    """
    results = run([fake("frail", body), fake("good")], repeats=1)
    dead = figures(results, "frail", "A")
    assert dead.state == "failed"
    assert "its process ended with status 9 during 'run'" in dead.reason
    assert figures(results, "frail", "B").shown
    assert figures(results, "good", "A").shown


def test_a_peer_that_hangs_is_ended(fake, run):
    results = run([fake("slow", "time.sleep(600 if len(work.requests) == 2 else 0)\nreturn right(work)")], timeout=0.8)
    assert "no answer to 'run' in 1 s" in results.peers[0].reason


def test_a_peer_that_is_not_installed_is_in_the_results(fake, run):
    results = run([fake("absent", missing="not installed: make bench-peers"), fake("good")])
    assert results.as_data()["peers"]["absent"]["reason"] == "not installed: make bench-peers"
    assert "absent: not installed: make bench-peers" in run.said
    assert not results.failed


def test_a_peer_that_cannot_be_loaded_says_why(fake, run):
    results = run([fake("broken", "raise RuntimeError('no such dtype')"), fake("good")])
    assert results.peers[0].reason == "cannot be loaded: RuntimeError: no such dtype"
    assert figures(results, "good", "A").shown


def test_disturbed_repeats_are_thrown_away_and_give_no_number(fake, run):
    results = run([fake("good")], load_limit=-1e9, retries=2)
    found = figures(results, "good", "A")
    assert (found.state, found.shown, found.thrown_away) == ("disturbed", False, 3)
    assert "median" not in found.as_data()
    assert "quiet machine, or with --accept-load" in found.reason
    assert results.floors == {}
    assert results.floor_note.startswith("no floor: others used the processors")
    assert any("thrown away: others used" in line for line in run.said)
    assert not results.failed


def test_a_machine_that_is_never_quiet_gives_no_number(fake, run, monkeypatch):
    monkeypatch.setattr(runner, "wait_until_quiet", lambda limit, patience: False)
    found = figures(run([fake("good")]), "good", "A")
    assert (found.state, found.repeats) == ("disturbed", [])


def test_accepted_load_is_marked(fake, run):
    results = run([fake("good")], load_limit=-1e9, accept_load=True)
    found = figures(results, "good", "A")
    assert "while others used the processors" in results.floor_note
    assert found.shown and found.marked
    assert found.as_data()["under_load"] is True


def test_an_interrupt_keeps_what_was_measured(fake, run, monkeypatch):
    calls = iter([True, True, True])  # the machine's rates, and a repeat of each

    def quiet_at_first(limit, patience):
        for answer in calls:
            return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "wait_until_quiet", quiet_at_first)
    results = run([fake("x"), fake("y")], agreement=True)
    assert results.interrupted
    assert [len(figures(results, name, "A").repeats) for name in ("x", "y")] == [1, 1]
    assert "B" not in results.peers[0].cases
    assert results.as_data()["interrupted"] is True


def test_agreement_is_with_fp32_stock_whose_tokens_are_kept(fake, run, monkeypatch, tiny_subject):
    stock = fake("stock", "open(__file__ + '.runs', 'a').write('x')\nreturn right(work)")
    monkeypatch.setattr(peers, "builtin", lambda name: stock)
    body = "out = right(work)\nout[0][0][-1:] = [9] * len(out[0][0][-1:])\nreturn out"
    for _ in range(2):
        results = run([fake("other", body)], agreement=True, dtype="bfloat16")
        found = figures(results, "other", "A").agreement
        assert (found.requests, found.identical) == (2, 1)
        assert found.prefix == pytest.approx((2 / 3 + 1) / 2)
    # loading, its warm-up is not asked for; one run for A, none later
    assert Path(stock.command[1] + ".runs").read_text() == "x"
    assert "agreement_note" in results.as_data()


def test_lengths():
    work = Work([Request([1], 2)], samples=2)
    check_lengths(work, [[[1, 2], [3, 4]]])
    for outputs, message in (
        ([], "0 for 1 requests"),
        ([[[1, 2]]], "1 completions, not 2"),
        ([[[1], [3, 4]]], "1 new"),
    ):
        with pytest.raises(PeerError, match=message):
            check_lengths(work, outputs)


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"threads": 0}, {"repeats": 0}, {"timeout": 0}])
def test_settings_that_cannot_work(wrong):
    with pytest.raises(ConfigError):
        Settings(**wrong)


def test_peers_by_name(tmp_path):
    (tmp_path / "other_engine_peer.py").touch()
    known = peers.available(tmp_path, tmp_path)
    ours = ["hf-paged", "hf-paged-int8", "hf-paged-int8-weights", "hf-paged-generate", "stock", "stock-batch"]
    assert list(known) == [*ours, "other-engine"]
    assert known["other-engine"].missing == "not installed: make bench-peers"
    assert not known["stock"].missing
    python = tmp_path / "other_engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert not peers.available(tmp_path, tmp_path)["other-engine"].missing
    assert [spec.name for spec in peers.choose(["stock", "hf-paged"], known)] == ["hf-paged", "stock"]
    with pytest.raises(ConfigError, match="no peer 'vlm'; there are hf-paged"):
        peers.choose(["vlm"], known)


def test_peers_of_quantized_weights_need_torchao(monkeypatch):
    assert peers.builtin("hf-paged-int8").command[-1] == "int8_dynamic"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("hf-paged-int8", "hf-paged-int8-weights"):
        assert peers.builtin(name).missing == "not installed: pip install 'hf-paged[quantization]'"
    assert not peers.builtin("hf-paged").missing
