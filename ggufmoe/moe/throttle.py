"""When an upload pays: the CPU time that hits save, against the time that uploads take."""

from __future__ import annotations

import math

# Uploads that do not pay still get this share of the time, to notice when they would.
PROBE_SHARE = 0.02
# What hits save must be this many times what uploads take: a copy also slows down what it shares memory with.
MARGIN = 4
# Weight of the newest value in a running average.
NEWEST = 0.05
MAX_CREDIT_S = 0.05


class Throttle:
    """Keeps an account of time, in seconds that the caller measured: hits pay into it, uploads take from it.

    Every hit pays the CPU time of one cold pair, divided by ``MARGIN``; every token ``PROBE_SHARE`` of its time. An
    upload that throws an expert out may start while the account, less what is queued, is above zero. One into a
    free slot always may: it is made once.
    """

    def __init__(self, max_queued: int, share: float | None = None) -> None:
        """``max_queued`` uploads may wait at a time. With ``share``, uploads get that share of the time and no
        more, whatever hits save; 1 never limits them."""
        self.max_queued = max_queued
        self.share = share
        self.upload_s = 0.0  # of one expert
        self.cold_pair_s = 0.0
        self._credit_s = MAX_CREDIT_S

    def uploaded(self, seconds: float) -> None:
        """One upload took this long."""
        self.upload_s = _average(self.upload_s, seconds)
        self._credit_s -= seconds

    def computed_cold(self, seconds: float, n_pairs: int) -> None:
        """The CPU took this long for ``n_pairs`` cold pairs."""
        self.cold_pair_s = _average(self.cold_pair_s, seconds / n_pairs)

    def stepped(self, seconds: float, hits: int) -> None:
        """A token was decoded, with how many hits."""
        if self.share is None:
            earned = PROBE_SHARE * seconds + hits * self.cold_pair_s / MARGIN
        else:
            earned = self.share * seconds
        self._credit_s = min(self._credit_s + earned, MAX_CREDIT_S)

    def room(self, n_queued: int) -> int:
        """How many uploads that throw an expert out may start now, while ``n_queued`` wait."""
        left = self.max_queued - n_queued
        if self.share is not None and self.share >= 1:
            return max(left, 0)
        if self.upload_s == 0:  # nothing is known yet: one at a time
            return 1 if n_queued == 0 else 0
        affordable = math.ceil(self._credit_s / self.upload_s) - n_queued
        return max(0, min(left, affordable))


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + NEWEST * (new - old)
