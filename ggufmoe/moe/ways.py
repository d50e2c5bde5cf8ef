"""Which of several ways of doing the same work is fastest here, found out by doing it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# The first time pays for page faults and new graphs: a way is judged by the better of its first tries, unless
# the first was this many times slower than the best.
FIRST_TRIES = 2
HOPELESS = 3.0
# How often the second best is tried again, in uses of the best, and how much slower it may have looked.
RETRY_EVERY = 40
RETRY_WITHIN = 1.5
NEWEST = 0.3


class WayChooser:
    """Chooses among named ways of one kind of work by the seconds that each took before.

    ``key`` tells kinds of work apart: what is measured for one says nothing of another. A way that was hardly
    tried is tried first, unless its predicted cost already exceeds what the best one takes.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Hashable, str], float] = {}
        self._tries: dict[tuple[Hashable, str], int] = {}
        self._uses: dict[Hashable, int] = {}

    def choose(self, key: Hashable, ways: Sequence[tuple[str, float]]) -> str:
        """``ways`` are (name, predicted seconds; 0 where nothing is known), in order of trust."""
        known = [(self._seconds[key, name], name) for name, _ in ways if (key, name) in self._seconds]
        best_s, best = min(known, default=(float("inf"), ""))
        for name, predicted_s in ways:
            expected_s = self._seconds.get((key, name), HOPELESS * predicted_s) / HOPELESS
            if self._tries.get((key, name), 0) < FIRST_TRIES and expected_s < best_s:
                return name
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        others = sorted(pair for pair in known if pair[1] != best)
        if uses % RETRY_EVERY == 0 and others and others[0][0] < RETRY_WITHIN * best_s:
            return others[0][1]
        return best

    def observe(self, key: Hashable, way: str, seconds: float) -> None:
        """``way`` took so long, per token or in whatever unit predictions are made."""
        tries = self._tries[key, way] = self._tries.get((key, way), 0) + 1
        old = self._seconds.get((key, way), seconds)
        if tries <= FIRST_TRIES:
            self._seconds[key, way] = min(old, seconds)
        else:
            self._seconds[key, way] = old + NEWEST * (seconds - old)
