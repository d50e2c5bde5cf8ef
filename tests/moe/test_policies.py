"""Residency policies: promises that hold whatever the router does, and how well they do on real routing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmoe.moe import policies
from ggufmoe.moe.policies import DEFAULT_POLICY, POLICIES, Admission, Lfru, Lru, Policy, Static, Threshold
from ggufmoe.moe.replay import NO_LIMITS, Limits, LoadedTrace, load_trace, replay, slots_for_request
from ggufmoe.moe.residents import ResidentRequest
from ggufmoe.moe.trace import read_trace

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
N_EXPERT = 12
EVERY_POLICY = pytest.mark.parametrize("name", POLICIES)

tokens = st.permutations(range(N_EXPERT)).map(lambda order: order[:3])
batches = st.lists(tokens, min_size=1, max_size=6)


def run(policy: Policy, steps: Sequence[Sequence[Sequence[int]]]) -> list[list[Admission]]:
    """Every upload is complete before the next step."""
    found = []
    for step in steps:
        found.append(route(policy, step))
        for admission in found[-1]:
            policy.commit(admission.expert)
    return found


def route(policy: Policy, step: Sequence[Sequence[int]]) -> list[Admission]:
    return policy.route(step[0]) if len(step) == 1 else policy.route_batch(np.array(step, np.int32))


# Promises -----------------------------------------------------------------------------------------------


@EVERY_POLICY
@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_promised_to_the_engine(name: str, data: st.DataObject) -> None:
    """Uploads end late, in any order, or fail; limits change between steps."""
    n_slots = data.draw(st.integers(0, 8), "slots")
    residents = data.draw(st.permutations(range(N_EXPERT)), "residents")[: data.draw(st.integers(0, n_slots))]
    policy = POLICIES[name](N_EXPERT, n_slots, residents)
    for step in data.draw(st.lists(batches, max_size=20), "steps"):
        policy.max_pending = data.draw(st.integers(0, 8), "max_pending")
        before, waiting = set(policy.residents), set(policy.pending)
        admissions = route(policy, step)
        running = {expert for token in step for expert in token}
        newcomers = [admission.expert for admission in admissions]
        victims = [admission.victim for admission in admissions if admission.victim is not None]
        assert set(newcomers) <= running - before - waiting and len(set(newcomers)) == len(newcomers)
        assert set(victims) <= before - running and len(set(victims)) == len(victims)
        assert policy.residents == before - set(victims)
        assert policy.pending == waiting | set(newcomers)
        assert len(policy.residents) + len(policy.pending) <= n_slots
        assert not newcomers or len(policy.pending) <= policy.max_pending
        for expert in data.draw(st.permutations(sorted(policy.pending)), "ending"):
            end = data.draw(st.sampled_from(["commit", "abandon", "wait"]), "end")
            if end != "wait":
                getattr(policy, end)(expert)
                assert (expert in policy.residents) == (end == "commit")
                assert expert not in policy.pending


@EVERY_POLICY
@settings(derandomize=True, deadline=None, max_examples=60)
@given(steps=st.lists(batches, max_size=20), n_slots=st.integers(0, 8))
def test_same_calls_same_answers(name: str, steps: list[Any], n_slots: int) -> None:
    make = POLICIES[name]
    assert run(make(N_EXPERT, n_slots), steps) == run(make(N_EXPERT, n_slots), steps)


@EVERY_POLICY
def test_uploads_that_nobody_asked_for(name: str) -> None:
    policy = POLICIES[name](N_EXPERT, 4, [1, 2])
    for end in (policy.commit, policy.abandon):
        with pytest.raises(KeyError):
            end(1)
    assert list(policy.residents) == [1, 2]


@EVERY_POLICY
@pytest.mark.parametrize("residents", [[0, 1, 2], [N_EXPERT], [-1]])
def test_impossible_residents(name: str, residents: list[int]) -> None:
    with pytest.raises(ValueError, match="no residents of 2 slots for 12 experts"):
        POLICIES[name](N_EXPERT, 2, residents)


def test_an_empty_batch_changes_nothing() -> None:
    policy = Lfru(N_EXPERT, 2, [1, 2])
    assert policy.route_batch(np.empty((0, 3), np.int32)) == []


# Each policy --------------------------------------------------------------------------------------------


def naive_lru(n_slots: int, steps: Sequence[Sequence[int]]) -> list[set[int]]:
    """Residents after each token."""
    used: list[int] = []  # longest unused first
    found = []
    for experts in steps:
        # of experts used at the same time, the one that the router ranks first counts as the latest
        used = [expert for expert in used if expert not in experts] + list(reversed(experts))
        used = used[-n_slots:]
        found.append(set(used))
    return found


@settings(derandomize=True, deadline=None, max_examples=60)
@given(steps=st.lists(tokens, max_size=40), n_slots=st.integers(3, 10))
def test_lru_is_the_naive_one(steps: list[list[int]], n_slots: int) -> None:
    policy = Lru(N_EXPERT, n_slots)
    for experts, expected in zip(steps, naive_lru(n_slots, steps), strict=True):
        run(policy, [[experts]])
        assert policy.residents == expected


@pytest.mark.parametrize("make", [Lru, Lfru, Threshold])
@pytest.mark.parametrize("n_slots", [2, 6])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(steps=st.lists(batches, max_size=12))
def test_a_batch_is_remembered_token_by_token(make: type[Lru], n_slots: int, steps: list[Any]) -> None:
    """``max_pending`` of 0: residents stay alike, so that only what is remembered can differ."""
    one, other = (make(N_EXPERT, n_slots, [0, 1], max_pending=0) for _ in range(2))
    for step in steps:
        route(one, step)
        for token in step:
            other.route(token)
    scores = [[score / policy._gain for score in policy._score] for policy in (one, other)]
    assert scores[0] == pytest.approx(scores[1])
    if isinstance(one, Threshold) and isinstance(other, Threshold):
        assert one._count == other._count


def test_lfru_keeps_the_frequent_over_the_recent() -> None:
    policy = Lfru(N_EXPERT, 3)
    run(policy, [[[0]], [[0]], [[0]], [[1]], [[2]], [[3]]])
    assert policy.residents == {0, 2, 3}  # an LRU would have lost 0


def test_lfru_forgets_what_was_frequent_long_ago() -> None:
    policy = Lfru(N_EXPERT, 3)
    run(policy, [[[0]]] * 4 + [[[1 + number % 2]] for number in range(60)] + [[[3]]])
    assert policy.residents == {1, 2, 3}


def test_lfru_keeps_what_usually_follows() -> None:
    policy = Lfru(N_EXPERT, 3)
    for _ in range(12):  # 5 follows 4, and in between come others
        run(policy, [[[4]], [[5]], [[6]], [[7]]])
    run(policy, [[[5]], [[6]], [[7]], [[4]]])
    assert 5 in policy.residents and 6 not in policy.residents  # 5 is the longest unused and no more frequent


def test_late_uploads_need_a_hotter_expert() -> None:
    policy = Lfru(N_EXPERT, 3)
    run(policy, [[[0]], [[1]], [[2]], [[0]], [[1]], [[2]]])
    [admission] = policy.route([3])
    assert admission.victim is not None
    assert policy.route([4]) == []  # 3 is still under way
    policy.commit(3)
    assert [each.expert for each in policy.route([4])] == [4]


@pytest.mark.parametrize("name", ["lru", "lfru"])
def test_fewer_slots_than_a_token_uses_hold_the_hottest(name: str) -> None:
    policy = POLICIES[name](N_EXPERT, 2)
    steps = [[[0, 1, 2 + number % 10]] for number in range(30)]
    run(policy, steps)
    assert policy.residents == {0, 1}
    assert run(policy, steps) == [[]] * 30


def test_the_hottest_newcomer_comes_first() -> None:
    policy = Lfru(N_EXPERT, 6, max_pending=1)
    run(policy, [[[0, 1, 2]], [[3, 1, 4]]])
    assert policy.route([3, 5, 4]) == [Admission(3, None)]
    assert policy.route([3, 5, 4]) == []


def test_threshold_waits() -> None:
    policy = Threshold(N_EXPERT, 2)
    assert run(policy, [[[0]]] * policies.THRESHOLD) == [[]] * policies.THRESHOLD
    assert run(policy, [[[0]]]) == [[Admission(0, None)]]
    run(policy, [[[1]], [[1]], [[0]], [[2]]])
    assert policy.route([2]) == [Admission(2, 1)]  # the longest unused


def test_static_never_changes() -> None:
    policy = Static(N_EXPERT, 4, [3, 5])
    assert run(policy, [[[0, 1, 2]], [[0, 1, 2], [4, 6, 7]]]) == [[], []]
    assert policy.residents == {3, 5}


def test_scores_stay_finite() -> None:
    policy = Lfru(4, 2)
    for number in range(20_000):
        for admission in policy.route([number % 3]):
            policy.commit(admission.expert)
    assert max(policy._score) < 1e200 and len(policy.residents) == 2
    policy.route_batch(np.zeros((50_000, 1), np.int32))
    assert max(policy._score) < 1e200


# Real routing -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces() -> list[LoadedTrace]:
    paths = sorted(TRACES.glob("*.route.csv")) if TRACES.is_dir() else []
    if not paths:
        pytest.skip("the evaluation traces are not here")
    found = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            found.append(load_trace(read_trace(file, path.name)))
    return found


def hit_rates(
    traces: list[LoadedTrace], policy: str, share: float, limits: Limits = NO_LIMITS
) -> list[float]:
    request = ResidentRequest(share=share)
    tallies = [replay(each, policy, slots_for_request(each.header, request), limits) for each in traces]
    return [100 * (tally.hit_rate or 0) for tally in tallies]


@pytest.mark.parametrize(("share", "bar"), [(0.125, 66.0), (0.25, 82.0), (0.4, 90.5), (0.5, 93.2)])
def test_the_default_policy_on_real_routing(traces: list[LoadedTrace], share: float, bar: float) -> None:
    rates = hit_rates(traces, DEFAULT_POLICY, share)
    assert sum(rates) / len(rates) >= bar
    for rate, lru in zip(rates, hit_rates(traces, "lru", share), strict=True):
        assert rate >= lru - 0.3


@pytest.mark.parametrize("limits", [Limits(2), Limits(1), Limits(None, 1), Limits(2, 1)], ids=str)
def test_the_default_policy_when_uploads_are_few_or_late(traces: list[LoadedTrace], limits: Limits) -> None:
    for share in (0.125, 0.25):
        rates, lru = (hit_rates(traces, name, share, limits) for name in (DEFAULT_POLICY, "lru"))
        assert sum(rates) / len(rates) >= sum(lru) / len(lru) + 1
