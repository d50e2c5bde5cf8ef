"""The fastest way is found by trying, and kept."""

from __future__ import annotations

from collections import Counter

from ggufmoe.moe.ways import FIRST_TRIES, RETRY_EVERY, WayChooser


def take(chooser: WayChooser, costs: dict[str, float], n: int, key: str = "layer") -> Counter[str]:
    """Use the chooser ``n`` times where each way costs what it costs."""
    taken: Counter[str] = Counter()
    for _ in range(n):
        way = chooser.choose(key, [(name, 0.0) for name in costs])
        chooser.observe(key, way, costs[way])
        taken[way] += 1
    return taken


def test_every_way_is_tried_and_the_fastest_kept() -> None:
    """Twice, since the first time may be slow by accident; once where it was hopeless."""
    taken = take(WayChooser(), {"cpu": 2.0, "split": 1.0, "stream": 9.0}, 30)
    assert taken == {"cpu": 2, "split": 27, "stream": 1}


def test_a_slow_first_time_is_forgiven() -> None:
    chooser = WayChooser()
    ways = [("cpu", 0.0), ("split", 0.0)]
    taken = []
    for turn in range(20):
        taken.append(chooser.choose("layer", ways))
        chooser.observe("layer", taken[-1], 2.0 if turn == 0 else {"cpu": 1.0, "split": 1.5}[taken[-1]])
    assert taken[4:] == ["cpu"] * 16


def test_a_way_that_must_be_slower_is_not_tried() -> None:
    chooser = WayChooser()
    assert chooser.choose("layer", [("cpu", 0.0), ("stream", 5.0)]) == "cpu"
    for _ in range(FIRST_TRIES):
        chooser.observe("layer", "cpu", 2.0)
    assert chooser.choose("layer", [("cpu", 0.0), ("stream", 5.0)]) == "cpu"
    assert chooser.choose("layer", [("cpu", 0.0), ("stream", 1.0)]) == "stream"


def test_kinds_of_work_are_measured_apart() -> None:
    chooser = WayChooser()
    take(chooser, {"cpu": 1.0, "split": 2.0}, 5, "short")
    assert take(chooser, {"cpu": 2.0, "split": 1.0}, 20, "long")["split"] == 18


def test_a_close_second_is_tried_again_and_may_win() -> None:
    chooser = WayChooser()
    take(chooser, {"cpu": 1.2, "split": 1.0}, 5)
    taken = take(chooser, {"cpu": 0.5, "split": 1.0}, 3 * RETRY_EVERY)
    assert taken["cpu"] > RETRY_EVERY
    # one that is far behind is left alone
    chooser = WayChooser()
    take(chooser, {"cpu": 9.0, "split": 1.0}, 5)
    assert take(chooser, {"cpu": 9.0, "split": 1.0}, 3 * RETRY_EVERY)["cpu"] == 0
