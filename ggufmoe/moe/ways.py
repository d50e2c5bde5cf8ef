"""Which of several ways of doing the same work is fastest here, found out by doing it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# How often the second best is tried again, in uses of the best, and how much slower it may have looked.
RETRY_EVERY = 40
RETRY_WITHIN = 1.5
NEWEST = 0.3


class WayChooser:
    """Chooses among named ways of one kind of work by the seconds that each took before.

    ``key`` tells kinds of work apart: what is measured for one says nothing of another. One that was never
    tried is tried first, unless its predicted cost already exceeds what the best one takes.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Hashable, str], float] = {}
        self._uses: dict[Hashable, int] = {}

    def choose(self, key: Hashable, ways: Sequence[tuple[str, float]]) -> str:
        """``ways`` are (name, predicted seconds; 0 where nothing is known), in order of trust."""
        known = [(self._seconds[key, name], name) for name, _ in ways if (key, name) in self._seconds]
        best_s, best = min(known, default=(float("inf"), ""))
        for name, predicted_s in ways:
            if (key, name) not in self._seconds and predicted_s < best_s:
                return name
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        others = sorted(pair for pair in known if pair[1] != best)
        if uses % RETRY_EVERY == 0 and others and others[0][0] < RETRY_WITHIN * best_s:
            return others[0][1]
        return best

    def observe(self, key: Hashable, way: str, seconds: float) -> None:
        """``way`` took so long, per token or in whatever unit predictions are made."""
        old = self._seconds.get((key, way))
        # the first time pays for page faults and new graphs: the second counts fully
        first = old is None or self._uses.get(key, 0) == 0
        self._seconds[key, way] = seconds if old is None or first else old + NEWEST * (seconds - old)
