"""Replays: hits and uploads counted by hand, the optimum above every policy, a recorded run decided again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmoe.errors import FormatError, UsageError
from ggufmoe.moe.policies import POLICIES
from ggufmoe.moe.replay import (
    Limits,
    LoadedTrace,
    Tally,
    is_recorded,
    load_trace,
    optimum,
    replay,
    replay_recorded,
    slots_for_budget,
    slots_for_request,
)
from ggufmoe.moe.residents import parse_residents
from ggufmoe.moe.trace import Trace, TraceBank, TraceHeader, TraceStep

N_EXPERT = 12
BANKS = (TraceBank(0, "exps", N_EXPERT, 3, 100), TraceBank(1, "exps", N_EXPERT, 3, 50))
HEADER = TraceHeader("a", "b", 2, BANKS)

tokens = st.permutations(range(N_EXPERT)).map(lambda order: tuple(order[:3]))


def trace(*tokens: Sequence[int], n_prefill: int = 0, header: TraceHeader = HEADER) -> LoadedTrace:
    """Layer 0 alone, one token a step."""
    steps = [
        TraceStep(number, number < n_prefill, 0, "exps", (tuple(token),))
        for number, token in enumerate(tokens)
    ]
    return load_trace(Trace(header, iter(steps)))


def test_by_hand() -> None:
    found = trace([0, 1], [0, 2], [3, 0], n_prefill=1)
    assert replay(found, "lru", {(0, "exps"): 2}) == Tally(routings=4, hits=2, uploads=2, upload_bytes=200)
    assert replay(found, "lru", {(0, "exps"): 12}, Limits(delay=1)) == Tally(4, 1, 2, 200)
    assert replay(found, "lru", {(0, "exps"): 12}, Limits(max_pending=0)) == Tally(4, 0, 0, 0)
    assert replay(found, "static", {(0, "exps"): 1}) == Tally(4, 2, 0, 0)
    assert optimum(found, {(0, "exps"): 2}) == Tally(4, 2, 0, 0)
    assert optimum(found, {(0, "exps"): 0}) == Tally(4, 0, 0, 0)
    assert found.n_decoded == 2


def test_nothing_decoded() -> None:
    tally = replay(trace([0, 1], n_prefill=1), "lfru", {(0, "exps"): 2})
    assert tally == Tally() and tally.hit_rate is None


def test_a_trace_without_a_step() -> None:
    assert replay(trace(), "lfru", {}) == optimum(trace(), {}) == Tally()
    assert trace().n_decoded == 0


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    steps=st.lists(tokens, min_size=1, max_size=30),
    n_prefill=st.integers(0, 10),
    n_slots=st.integers(0, N_EXPERT),
    limits=st.builds(Limits, st.none() | st.integers(0, 3), st.integers(0, 2)),
)
def test_no_policy_beats_the_optimum(
    steps: list[tuple[int, ...]], n_prefill: int, n_slots: int, limits: Limits
) -> None:
    found = trace(*steps, n_prefill=n_prefill)
    slots = {(0, "exps"): n_slots}
    best = optimum(found, slots)
    for name in POLICIES:
        tally = replay(found, name, slots, limits)
        assert tally.hits <= best.hits and tally.routings == best.routings


def best_by_trying(steps: Sequence[tuple[int, ...]], n_slots: int) -> int:
    """Hits of the best of all ways to fill the slots."""
    reached = {frozenset[int](): 0}
    for experts in steps:
        following: dict[frozenset[int], int] = {}
        for residents, hits in reached.items():
            total = hits + len(residents & set(experts))
            for kept in subsets(residents | set(experts), n_slots):
                following[kept] = max(total, following.get(kept, 0))
        reached = following
    return max(reached.values())


def subsets(experts: frozenset[int], most: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for expert in experts:
        found += [each | {expert} for each in found if len(each) < most]
    return found


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.permutations(range(5)).map(lambda order: tuple(order[:2])), max_size=7), st.integers(0, 3))
def test_the_optimum_is_the_best_of_all(steps: list[tuple[int, ...]], n_slots: int) -> None:
    if steps:
        assert optimum(trace(*steps), {(0, "exps"): n_slots}).hits == best_by_trying(steps, n_slots)


# Budgets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "large", "small"), [("25%", 32, 8), ("8", 8, 2), ("all", 128, 32), ("500", 128, 32), ("0", 0, 0)]
)
def test_slots_of_a_request(text: str, large: int, small: int) -> None:
    header = replace(HEADER, banks=(TraceBank(0, "exps", 128, 8), TraceBank(0, "chexps", 32, 8)))
    slots = slots_for_request(header, parse_residents(text))
    assert slots == {(0, "exps"): large, (0, "chexps"): small}


@pytest.mark.parametrize(("n_bytes", "n_slots"), [(0, 0), (900, 6), (1799, 11), (1800, 12), (10**9, 12)])
def test_slots_of_a_budget(n_bytes: int, n_slots: int) -> None:
    assert slots_for_budget(HEADER, n_bytes) == {(0, "exps"): n_slots, (1, "exps"): n_slots}


def test_a_budget_needs_sizes() -> None:
    header = replace(HEADER, banks=(BANKS[0], replace(BANKS[1], expert_bytes=0)))
    with pytest.raises(UsageError, match="does not say how large its experts are"):
        slots_for_budget(header, 100)


# A recorded run -----------------------------------------------------------------------------------------


def record(
    policy_name: str, n_slots: int, seed: int, n_steps: int = 60
) -> tuple[TraceHeader, list[TraceStep]]:
    """Plays an engine whose uploads take a while, may fail, and are held back at times."""
    chance = random.Random(seed)
    banks = tuple(replace(bank, n_slots=n_slots, residents=tuple(range(n_slots // 2))) for bank in BANKS)
    header = replace(HEADER, banks=banks, policy=policy_name, max_pending=2)
    policies = {
        bank.key: POLICIES[policy_name](N_EXPERT, n_slots, bank.residents, max_pending=2) for bank in banks
    }
    steps = []
    for number in range(n_steps):
        for bank in banks:
            policy = policies[bank.key]
            ended = [expert for expert in policy.pending if chance.random() < 0.5]
            failed = [expert for expert in ended if chance.random() < 0.2]
            committed = [expert for expert in ended if expert not in failed]
            for expert in committed:
                policy.commit(expert)
            for expert in failed:
                policy.abandon(expert)
            limit = chance.choice([None, None, 0, 1])
            policy.max_pending = 2 if limit is None else limit
            routed = tuple(
                tuple(sorted(chance.sample(range(N_EXPERT), 3), key=lambda expert: chance.random() * expert))
                for _ in range(chance.choice([1, 1, 1, 4]))
            )
            hits = sum(expert in policy.residents for token in routed for expert in token)
            if len(routed) == 1:
                policy.route(routed[0])
            else:
                policy.route_batch(np.array(routed, np.int32))
            steps.append(
                TraceStep(
                    number,
                    number < 5,
                    bank.layer,
                    bank.bank,
                    routed,
                    tuple(committed),
                    tuple(failed),
                    limit,
                    hits,
                )
            )
    return header, steps


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n_slots", [2, 6])
def test_a_recorded_run_gives_its_hits_again(name: str, n_slots: int) -> None:
    for seed in range(5):
        header, steps = record(name, n_slots, seed)
        assert is_recorded(header)
        found = replay_recorded(header, steps)
        assert found.differs_at is None
        assert found.recorded_hits == found.replayed_hits == sum(step.hits or 0 for step in steps)
        assert found.routings == sum(step.n_routings for step in steps)


def test_steps_without_hits_are_not_compared() -> None:
    header, steps = record("lfru", 6, 0)
    found = replay_recorded(header, [steps[0], *(replace(step, hits=None) for step in steps[1:])])
    assert found.routings == steps[0].n_routings and found.differs_at is None


def test_a_wrong_hit_is_found() -> None:
    header, steps = record("lfru", 6, 0)
    wrong = replace(steps[40], hits=(steps[40].hits or 0) + 1)
    found = replay_recorded(header, [*steps[:40], wrong, *steps[41:]])
    assert found.differs_at == wrong and found.recorded_hits == found.replayed_hits + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda step: replace(step, committed=(*step.committed, *step.committed)),
        lambda step: replace(step, abandoned=step.committed),
        lambda step: replace(step, committed=(11,)),
    ],
)
def test_uploads_that_the_policy_did_not_ask_for(change: Callable[[TraceStep], TraceStep]) -> None:
    header, steps = record("lru", 6, 1)
    at = next(number for number, step in enumerate(steps) if step.committed and step.committed != (11,))
    with pytest.raises(FormatError, match="for which the policy did not ask"):
        replay_recorded(header, [*steps[:at], change(steps[at]), *steps[at + 1 :]])


@pytest.mark.parametrize("policy", [None, "clairvoyant"])
def test_not_recorded(policy: str | None) -> None:
    header, steps = record("lru", 6, 1)
    with pytest.raises(FormatError, match="was not recorded with one of the policies lfru, lru"):
        replay_recorded(replace(header, policy=policy), steps)
