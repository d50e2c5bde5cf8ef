"""The pool of experts that are in memory on demand: promises that hold whatever the router does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufmoe.moe.demand import MAX_GAIN, DemandBank, DemandPool

BANKS = [DemandBank(8, 100), DemandBank(8, 150), DemandBank(6, 70)]
choices = st.tuples(
    st.integers(0, 2), st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), st.booleans()
)


def need(pool: DemandPool, bank: int, experts: list[int]) -> list[tuple[int, int]]:
    missing = [expert for expert in experts if not pool.present[bank][expert]]
    return pool.admit(bank, missing, [(bank, expert) for expert in experts])


@given(st.lists(choices, max_size=60))
def test_the_budget_holds_and_the_running_step_stays(steps: list[tuple[int, list[int], bool]]) -> None:
    pool = DemandPool(BANKS, 700)
    for bank, experts, is_batch in steps:
        before = [bytes(present) for present in pool.present]
        victims = need(pool, bank, experts)
        if is_batch:
            pool.touch_batch(bank, np.array([experts, experts], np.int32))
        else:
            pool.touch(bank, experts)
        assert all(pool.present[bank][expert] for expert in experts)
        assert all(before[owner][expert] and not pool.present[owner][expert] for owner, expert in victims)
        assert len(set(victims)) == len(victims)
        used = sum(sum(present) * b.expert_bytes for present, b in zip(pool.present, BANKS, strict=True))
        assert used == pool.used_bytes <= pool.capacity_bytes
        assert pool.n_present == sum(map(sum, pool.present))


def test_no_room_changes_nothing() -> None:
    pool = DemandPool(BANKS, 200)
    need(pool, 0, [1, 2])
    with pytest.raises(ValueError, match="no room for 150 more"):
        pool.admit(1, [0], [(0, 1), (0, 2)])
    assert pool.present[0] == bytearray(b"\0\1\1\0\0\0\0\0")
    assert pool.used_bytes == 200


def test_the_least_used_goes_and_use_fades() -> None:
    pool = DemandPool([DemandBank(8, 1)], 3)
    for experts in ([0, 1], [0, 2], [0, 1]):
        need(pool, 0, experts)
        pool.touch(0, experts)
    assert need(pool, 0, [3]) == [(0, 2)]
    pool = DemandPool([DemandBank(8, 1)], 2)
    for _ in range(10):
        need(pool, 0, [0])
        pool.touch(0, [0])
    for _ in range(60):
        need(pool, 0, [1])
        pool.touch(0, [1])
    pool.touch(0, [1])
    assert need(pool, 0, [2]) == [(0, 0)]


def test_experts_of_later_layers_are_worth_more() -> None:
    pool = DemandPool([DemandBank(4, 1), DemandBank(4, 1)], 3)
    for bank, expert in ((0, 0), (0, 1), (1, 0)):
        need(pool, bank, [expert])
    for bank, expert in ((0, 0), (0, 0), (1, 0)):  # both layers: once a token
        pool.touch(bank, [expert])
    assert need(pool, 0, [2]) == [(0, 1)]
    assert need(pool, 0, [3]) == [(0, 2)]
    need(pool, 1, [1])
    assert pool.present[1][0], "passed over by its own layer only once"


def test_scores_never_overflow() -> None:
    pool = DemandPool([DemandBank(4, 1)], 2)
    for step in range(400):
        pool.touch_batch(0, np.full((600, 1), step % 4, np.int32))
    assert pool._gain <= MAX_GAIN * 2.0**80
    assert np.isfinite(pool._score).all()
