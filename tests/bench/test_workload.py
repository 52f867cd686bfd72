"""Files of token ids: what they mean, and what is said about those that mean nothing."""

from __future__ import annotations

import json

import pytest

from hf_paged.bench import workload
from hf_paged.errors import ConfigError

REQUEST = {"prompt": [5, 6, 7], "out": 4}


def read(tmp_path, data):
    path = tmp_path / "work.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return workload.read(path)


def test_the_form_of_an_entry_says_what_is_measured(tmp_path):
    first = {"prompt": [5, 6], "out": 1}
    works = read(
        tmp_path,
        {"A": [REQUEST, first], "B": {"2": [REQUEST, REQUEST]}, "C": [first], "D": {"prompt": [5], "n": 3, "out": 2}},
    )
    assert [(case.name, case.kind, case.unit) for case in works.cases] == [
        ("A", "throughput", "tokens/s"),
        ("B b=2", "step", "ms/step"),
        ("C", "first token", "s"),
        ("D", "samples", "s"),
    ]
    a, b, c, d = works.cases
    assert a.figure([2.0]) == 5 / 2.0
    assert b.figure([1.3, 1.0]) == pytest.approx(1000 * 0.3 / 3)
    assert [work.requests[0].out for work in b.works] == [4, 1]
    assert (c.figure([0.5]), d.figure([0.7])) == (0.5, 0.7)
    assert d.works[0].samples == 3
    assert a.greedy and not d.greedy


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "not JSON"),
        ("[]", "one name for each workload"),
        ({"A": []}, "workload A must be a list of requests"),
        ({"A": {}}, "workload A must be a list of requests"),
        ({"A": [REQUEST, {"prompt": [], "out": 1}]}, "workload A, request 1: 'prompt' must be a list of token ids"),
        ({"A": [{"prompt": ["x"], "out": 1}]}, "'prompt' must be a list of token ids"),
        ({"A": [{"prompt": [-1], "out": 1}]}, "'prompt' must be a list of token ids"),
        ({"A": [{"prompt": [1], "out": 0}]}, "'out' must be the number of tokens to generate, at least 1, not 0"),
        ({"A": [{"prompt": [1]}]}, "not None"),
        ({"A": [7]}, "'prompt' must be"),
        ({"A": {"3": [REQUEST]}}, "holds 1 requests; its name must be their number"),
        ({"A": {"1": [{"prompt": [1], "out": 1}]}}, "must be the same number of at least 2"),
        ({"A": {"2": [REQUEST, {**REQUEST, "out": 5}]}}, "must be the same number of at least 2"),
        ({"A": {"prompt": [1], "n": 1, "out": 2}}, "'n' must be a number of samples, at least 2, not 1"),
        ({"A": {"prompt": [1], "n": 2, "out": 2, "seed": -1}}, "'seed' must be a number"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_place(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, data)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the workload file"):
        workload.read(tmp_path / "none.json")


def test_entries_are_picked_by_name():
    works = workload.read(workload.DEFAULT)
    assert [case.name for case in works.only(["W3", "W4"]).cases] == ["W3 b=1", "W3 b=8", "W3 b=32", "W4"]
    with pytest.raises(ConfigError, match=r"no entry 'W9' in workloads\.json; it has W1, W2, W3, W4, W5"):
        works.only(["W9"])


def test_the_packaged_file_is_the_published_work():
    cases = {case.name: case for case in workload.read(workload.DEFAULT).cases}
    first, second = cases["W1"].works[0], cases["W2"].works[0]
    assert len(first.requests) == len(second.requests) == 64
    assert sum(len(request.prompt) for request in first.requests) == 10_250
    assert sum(request.out for request in first.requests) == 6_445
    assert second.shared_prefix() == 512
    assert {
        len(request.prompt) for name in cases if name.startswith("W3") for request in cases[name].works[0].requests
    } == {224}
    assert len(cases["W4"].works[0].requests[0].prompt) == 2_048
    assert (cases["W5"].works[0].samples, len(cases["W5"].works[0].requests[0].prompt)) == (8, 512)


def test_token_ids_and_lengths_that_a_model_cannot_take_are_refused(tmp_path):
    works = read(tmp_path, {"A": [REQUEST, {"prompt": [96, 97], "out": 3}]})
    works.check(98, 7)
    with pytest.raises(ConfigError, match="token id 97 in A, request 1, is outside the model's vocabulary of 97"):
        works.check(97, None)
    with pytest.raises(ConfigError, match="A, request 0, needs 7 tokens and the model has positions for 6"):
        works.check(98, 6)


def test_synthetic_ids_keep_lengths_and_shared_prefixes():
    works = workload.read(workload.DEFAULT)
    other = works.synthetic(50, special=[0, 1])
    for case, drawn in zip(works.cases, other.cases, strict=True):
        for work, changed in zip(case.works, drawn.works, strict=True):
            assert [len(r.prompt) for r in work.requests] == [len(r.prompt) for r in changed.requests]
            assert [r.out for r in work.requests] == [r.out for r in changed.requests]
            assert work.shared_prefix() <= changed.shared_prefix()
    other.check(50, None)
    used = {token for case in other.cases for request in case.works[0].requests for token in request.prompt}
    assert used <= set(range(2, 50))
    assert "random token ids" in other.note
