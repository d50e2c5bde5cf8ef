"""When uploads pay, from times that are given."""

from __future__ import annotations

import pytest

from ggufmoe.moe.throttle import MARGIN, MAX_CREDIT_S, PROBE_SHARE, Throttle


def run(throttle: Throttle, n_tokens: int, *, token_s: float, hits: int, wanted: int, upload_s: float) -> int:
    """Uploads that happen while each token would like ``wanted`` of them, each over before the next token."""
    uploads = 0
    for _ in range(n_tokens):
        now = 0
        while now < wanted and throttle.room(0):
            throttle.uploaded(upload_s)
            now += 1
        throttle.stepped(token_s, hits)
        uploads += now
    return uploads


@pytest.mark.parametrize(
    ("hits", "wanted", "pays"),
    [(900, 20, True), (330, 20, True), (10, 20, False), (0, 20, False)],
    ids=["warm", "break even", "thrashing", "all cold"],
)
def test_uploads_go_on_only_while_hits_repay_them(hits: int, wanted: int, pays: bool) -> None:
    throttle = Throttle(16)
    for _ in range(50):
        throttle.computed_cold(0.0004, 4)  # 0.1 ms a pair; an upload takes as long as 4 of them
    n = run(throttle, 1000, token_s=0.02, hits=hits, wanted=wanted, upload_s=0.0004)
    share = n * 0.0004 / (1000 * 0.02)
    if pays:
        assert n == 1000 * wanted
    else:
        # the probe: 2 % of the time, and what was saved up before
        saved = hits * 0.0001 / MARGIN / 0.02
        assert 0 < share < PROBE_SHARE + saved + MAX_CREDIT_S / 20 + 0.001


def test_a_fixed_share_is_kept() -> None:
    n = run(Throttle(16, share=0.1), 1000, token_s=0.02, hits=300, wanted=50, upload_s=0.001)
    assert n * 0.001 / 20 == pytest.approx(0.1, rel=0.1)
    assert run(Throttle(16, share=1.0), 100, token_s=0.02, hits=0, wanted=7, upload_s=1.0) == 700
    assert run(Throttle(16, share=0.0), 100, token_s=0.02, hits=9, wanted=7, upload_s=1.0) <= 1


def test_no_more_than_the_queue_holds() -> None:
    throttle = Throttle(3, share=1.0)
    assert [throttle.room(n) for n in range(5)] == [3, 2, 1, 0, 0]


def test_room_is_what_the_account_can_pay() -> None:
    throttle = Throttle(16)
    assert [throttle.room(n) for n in range(2)] == [1, 0]  # nothing is known of uploads yet
    throttle.uploaded(MAX_CREDIT_S / 5)
    assert [throttle.room(n) for n in range(6)] == [4, 3, 2, 1, 0, 0]
