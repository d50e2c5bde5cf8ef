"""Naming experts early, and finding out whether it pays."""

from __future__ import annotations

import numpy as np
import pytest

from ggufmoe.moe.prefetch import N_WINDOWS, WINDOW_TOKENS, PrefetchTrial, Router, predict


def router(seed: int, *, norm: bool = True, bias: bool = False) -> Router:
    dice = np.random.default_rng(seed)
    return Router(
        weight=dice.standard_normal((16, 32)).astype(np.float32),
        norm=(dice.random(32) + 0.5).astype(np.float32) if norm else None,
        selection_bias=dice.standard_normal(16).astype(np.float32) if bias else None,
        n_used=4,
    )


def test_the_other_layers_norm_is_put_in_the_place_of_this_ones() -> None:
    """If the layers between change nothing, the prediction is what the next router really chooses."""
    here, there = router(1), router(2)
    normalised = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    assert here.norm is not None and there.norm is not None
    chosen = np.argsort(-(there.weight @ (normalised * there.norm)))[:4]
    assert predict(normalised * here.norm, here, there) == chosen.tolist()


def test_a_selection_bias_counts_after_the_sigmoid() -> None:
    here, there = router(1, norm=False), router(2, norm=False, bias=True)
    x = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    assert there.selection_bias is not None
    scores = 1 / (1 + np.exp(-(there.weight @ x))) + there.selection_bias
    assert predict(x, here, there) == np.argsort(-scores)[:4].tolist()


def test_a_norm_weight_of_zero_is_no_division_by_zero() -> None:
    here, there = router(1), router(2)
    assert here.norm is not None
    here.norm[0] = 0
    assert len(predict(np.ones(32, np.float32), here, there)) == 4


@pytest.mark.parametrize(("on_s", "verdict"), [(0.9, True), (0.99, False), (1.0, False), (1.2, False)])
def test_a_trial_keeps_prefetch_only_where_it_pays(on_s: float, verdict: bool) -> None:
    trial = PrefetchTrial()
    ways = []
    for _ in range(WINDOW_TOKENS * N_WINDOWS):
        ways.append(trial.is_on)
        trial.stepped(on_s if trial.is_on else 1.0)
    assert trial.verdict is verdict is trial.is_on
    assert sum(ways) == len(ways) // 2
    trial.stepped(1.0)  # more tokens change nothing
    assert trial.is_on is verdict
