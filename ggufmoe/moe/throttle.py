"""When an upload pays: the CPU time that the hits of uploaded experts save, against the time uploads take."""

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
    """Decides whether another upload may start. All times are in seconds, measured by the caller.

    An upload into a free slot is always allowed: it is made once. One that throws an expert out has to be repaid
    by hits: as long as ``hits x CPU time of one cold pair`` is less than ``MARGIN`` times the time of uploads, only
    ``PROBE_SHARE`` of the time goes into them.
    """

    def __init__(self, max_queued: int, share: float | None = None) -> None:
        """``max_queued`` uploads may wait at a time. ``share`` fixes the share of time instead: 1 never limits."""
        self.max_queued = max_queued
        self.share = share
        self.upload_s = 0.0  # of one expert
        self.cold_pair_s = 0.0
        self._hits = 0.0
        self._uploads = 0.0
        self._credit_s = MAX_CREDIT_S

    def uploaded(self, seconds: float) -> None:
        """One upload took this long."""
        self.upload_s = _average(self.upload_s, seconds)
        self._credit_s -= seconds

    def computed_cold(self, seconds: float, n_pairs: int) -> None:
        """The CPU took this long for ``n_pairs`` cold pairs."""
        self.cold_pair_s = _average(self.cold_pair_s, seconds / n_pairs)

    def stepped(self, seconds: float, hits: int, uploads: int) -> None:
        """A token was decoded; with how many hits, and how many uploads were started meanwhile."""
        self._hits += NEWEST * (hits - self._hits)
        self._uploads += NEWEST * (uploads - self._uploads)
        share = PROBE_SHARE if self.share is None else self.share
        self._credit_s = min(self._credit_s + share * seconds, MAX_CREDIT_S)

    @property
    def pays(self) -> bool:
        """Whether hits have lately saved enough CPU time for what uploads took."""
        return self._hits * self.cold_pair_s >= MARGIN * self._uploads * self.upload_s

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
