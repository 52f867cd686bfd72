"""The scheduler over a fake runner that notices any token in the wrong place."""

from __future__ import annotations

import random
from array import array

import pytest

from hf_paged.engine.invariants import check_books
from hf_paged.engine.request import FinishReason, Request
from hf_paged.errors import ConfigError, InvalidRequestError, OutOfBlocksError
from tests.engine.fake import VOCAB, assert_as_alone, drive, make, one_step

POLICIES = ["fcfs", "lpm", "priority"]


def request(name: str, prompt: list[int], max_tokens: int = 6, **options: object) -> Request:
    return Request(name, array("q", prompt), max_tokens, **options)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_get_what_they_would_get_alone(policy: str) -> None:
    scheduler, runner = make(200, policy=policy, max_num_batched_tokens=16)
    requests = [request(f"r{i}", prompt(1 + 3 * i, i), 4 + i % 5) for i in range(12)]
    for r in requests:
        scheduler.add(r)
    drive(scheduler, runner, requests)
    for r in requests:
        assert_as_alone(r)
    assert scheduler.stats().preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_requests_continue_as_if_nothing_had_happened(policy: str) -> None:
    scheduler, runner = make(14, policy=policy, max_num_batched_tokens=8)
    scheduler.ratio.value = scheduler.ratio.LEAST  # admit too many
    requests = [request(f"r{i}", prompt(6, i), 24) for i in range(6)]
    for r in requests:
        scheduler.add(r)
    drive(scheduler, runner, requests)
    for r in requests:
        assert_as_alone(r)
    assert scheduler.stats().preemptions >= 3
    assert scheduler.manager.num_available_blocks == 14


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    scheduler, runner = make(100, max_num_batched_tokens=8)
    short, long = request("short", prompt(3), 20), request("long", prompt(60, 1), 4)
    scheduler.add(short)
    one_step(scheduler, runner, [short])
    scheduler.add(long)
    for _ in range(5):
        before = short.num_output
        output = one_step(scheduler, runner, [short, long])
        assert short.num_output == before + 1
        assert output.num_tokens == 8


def test_a_sibling_waits_one_step_and_then_reuses() -> None:
    scheduler, runner = make(200, max_num_batched_tokens=200)
    head = prompt(40)
    requests = [request(f"r{i}", [*head, i]) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    output = one_step(scheduler, runner, requests)
    assert [c.request.request_id for c in output.chunks] == ["r0"]
    drive(scheduler, runner, requests)
    assert [r.num_cached for r in requests] == [0, 40, 40]
    for r in requests:
        assert_as_alone(r)


def test_lpm_takes_the_longest_prefix_first_and_fcfs_does_not() -> None:
    order = {}
    for policy in ("fcfs", "lpm"):
        scheduler, runner = make(200, policy=policy, max_num_seqs=1, max_num_batched_tokens=100)
        head = prompt(30)
        first = request("first", head, 1)
        scheduler.add(first)
        drive(scheduler, runner, [first])
        cold, warm = request("cold", prompt(30, 5), 1), request("warm", [*head, 1], 1)
        scheduler.add(cold)
        scheduler.add(warm)
        order[policy] = one_step(scheduler, runner, [cold, warm]).chunks[0].request.request_id
    assert order == {"fcfs": "cold", "lpm": "warm"}


def test_priority_decides_and_waiting_makes_up_for_it() -> None:
    scheduler, runner = make(200, policy="priority", max_num_seqs=1, max_num_batched_tokens=100)
    patient = request("patient", prompt(4), 2, priority=2)
    scheduler.add(patient)
    others: list[Request] = []
    for i in range(400):
        if i % 2 == 0:
            others.append(request(f"r{i}", prompt(4, i), 2, priority=0))
            scheduler.add(others[-1])
        one_step(scheduler, runner, [])
        if patient.finished:
            break
    assert patient.finished and len(others) > 10
    assert others[0].finished


def test_a_request_that_can_never_fit_is_refused_and_the_others_finish() -> None:
    scheduler, runner = make(8)
    with pytest.raises(OutOfBlocksError, match=r"needs 11 blocks.*has 8") as caught:
        scheduler.add(request("huge", prompt(40)))
    assert (caught.value.needed, caught.value.available) == (11, 8)
    requests = [request(f"r{i}", prompt(5, i), 4) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    drive(scheduler, runner, requests)
    for r in requests:
        assert_as_alone(r)


def test_the_last_request_that_outgrows_the_pool_fails_alone() -> None:
    scheduler, runner = make(4)
    grows, small = request("grows", prompt(8), 40), request("small", prompt(3, 1), 4)
    scheduler.add(grows)
    scheduler.add(small)
    drive(scheduler, runner, [grows, small])
    assert grows.finish_reason is FinishReason.ERROR and isinstance(grows.error, OutOfBlocksError)
    assert_as_alone(small)
    assert scheduler.manager.num_available_blocks == 4


@pytest.mark.parametrize("when", ["waiting", "computing the prompt", "generating", "preempted", "finished"])
def test_abort_at_any_time_gives_every_block_back(when: str) -> None:
    scheduler, runner = make(14, max_num_batched_tokens=8)
    scheduler.ratio.value = scheduler.ratio.LEAST
    requests = [request(f"r{i}", prompt(12, i), 16) for i in range(4)]
    victim = requests[-1]
    for r in requests:
        scheduler.add(r)
    reached = {
        "waiting": lambda: True,
        "computing the prompt": lambda: victim.num_computed > 0 and victim.num_output == 0,
        "generating": lambda: victim.num_output > 2,
        "preempted": lambda: bool(victim.preemptions) and victim.table is None,
        "finished": lambda: victim.finished,
    }[when]
    if when == "preempted":
        victim = next(iter(requests))
        while not any(r.preemptions and r.table is None for r in requests):
            one_step(scheduler, runner, requests)
        victim = next(r for r in requests if r.preemptions and r.table is None)
    while not reached():
        one_step(scheduler, runner, requests)
    ended = scheduler.abort(victim.request_id)
    assert (ended is victim) == (when != "finished")
    assert scheduler.abort(victim.request_id) is None and scheduler.abort("nobody") is None
    check_books(scheduler, [victim])
    drive(scheduler, runner, requests)
    for r in requests:
        if r is not victim or when == "finished":
            assert_as_alone(r)
    assert victim.finished and scheduler.manager.num_available_blocks == 14


def test_a_stop_token_ends_a_request_and_min_tokens_delays_it() -> None:
    free = request("free", prompt(5), 30)
    scheduler, runner = make(100)
    scheduler.add(free)
    drive(scheduler, runner, [free])
    output = list(free.tokens[5:])
    stop = next(t for i, t in enumerate(output) if i > 3 and t not in output[:i])
    at = output.index(stop)
    stopped = request("stopped", prompt(5), 30, stop_token_ids=frozenset({stop}))
    delayed = request("delayed", prompt(5), 30, stop_token_ids=frozenset({stop}), min_tokens=at + 1)
    for r in (stopped, delayed):
        scheduler.add(r)
    drive(scheduler, runner, [stopped, delayed])
    assert list(stopped.tokens[5:]) == output[: at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)
    assert delayed.num_output > at + 1


def test_max_model_len_leaves_exactly_one_token() -> None:
    scheduler, runner = make(100, max_model_len=10)
    with pytest.raises(InvalidRequestError, match=r"10 tokens.*at most 9"):
        scheduler.add(request("over", prompt(10)))
    edge = request("edge", prompt(9))
    scheduler.add(edge)
    drive(scheduler, runner, [edge])
    assert edge.num_output == 1 and edge.finish_reason is FinishReason.LENGTH


def test_bad_requests_are_refused() -> None:
    scheduler, _ = make(100)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.add(request("empty", []))
    scheduler.add(request("twice", prompt(3)))
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add(request("twice", prompt(3)))
    with pytest.raises(ConfigError, match="fcfs, lpm, priority"):
        make(100, policy="sjf")


def test_whole_prompts_run_in_one_piece_past_the_budget() -> None:
    scheduler, runner = make(100, max_num_batched_tokens=8, whole_prompts=True)
    r = request("r", prompt(30), 4)
    scheduler.add(r)
    assert one_step(scheduler, runner, [r]).num_tokens == 30
    drive(scheduler, runner, [r])
    assert_as_alone(r)
