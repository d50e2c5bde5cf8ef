"""Who gets a slot: the residency policies of one bank (the routed experts of one layer).

A policy hears what the router chose and answers with admissions. From that moment the victim is no longer
resident, and the newcomer is pending; it becomes resident when its upload is complete (``commit``), or gives its
slot back if that fails (``abandon``). The same calls in the same order always give the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 14  # tokens; anything from 10 to 20 is within 0.5 points of it on the traces measured
GROWTH = 2 ** (1 / HALF_LIFE)
MAX_GAIN = 1e100  # scores are scaled down before a double could overflow
THRESHOLD = 1  # routings after which the threshold policy admits

N_LEADERS = 3  # experts of a token that stand for it when the next token's are foretold
N_CANDIDATES = 4  # coldest residents that foretelling may choose among
FORETOLD_WEIGHT = 20  # score of an expert that has always followed, in routings
MAX_SEEN = 128  # of an expert, before what followed it is half forgotten; counts must fit a byte
MAX_LEARNT = 64  # tokens of a batch, its last ones: some 4 microseconds each
HALVED = bytes(count // 2 for count in range(256))


class Admission(NamedTuple):
    """Upload ``expert`` into the slot of ``victim``, or into a free one (None)."""

    expert: int
    victim: int | None


class Policy(Protocol):
    """What the engine asks of a policy.

    An expert of the running step is never a victim, a pending one is not admitted again, and resident and
    pending experts together are never more than the slots. ``max_pending`` may be changed between steps.
    """

    n_slots: int
    max_pending: int

    @property
    def residents(self) -> KeysView[int]:
        """A live view: ask it for hits before ``route``, which may take victims out."""

    @property
    def pending(self) -> KeysView[int]: ...

    def route(self, experts: Sequence[int]) -> list[Admission]:
        """One token's distinct experts, those with the largest router weights first if that is known."""

    def route_batch(self, ids: NDArray[np.int32]) -> list[Admission]:
        """A step of several tokens, ``(n_tokens, k)``: remembered as if routed token by token."""

    def foresee(self, experts: Sequence[int]) -> list[Admission]:
        """The next token will probably use these: none of them is a victim, and nothing is remembered of it."""

    def commit(self, expert: int) -> None:
        """The upload is complete. Raises: KeyError if ``expert`` is not pending."""

    def abandon(self, expert: int) -> None:
        """The upload failed: the slot is free. Raises: KeyError if ``expert`` is not pending."""


class Static:
    """The first residents stay for good."""

    def __init__(
        self, n_expert: int, n_slots: int, residents: Iterable[int] = (), *, max_pending: int | None = None
    ) -> None:
        """``residents``: hottest first. ``max_pending``: uploads under way at a time; None: as many as slots."""
        self.n_slots = n_slots
        self.max_pending = n_slots if max_pending is None else max_pending
        self._residents: dict[int, None] = dict.fromkeys(residents)
        self._pending: dict[int, None] = {}
        if len(self._residents) > n_slots or not all(0 <= expert < n_expert for expert in self._residents):
            raise ValueError(
                f"{list(self._residents)} are no residents of {n_slots} slots for {n_expert} experts"
            )

    @property
    def residents(self) -> KeysView[int]:
        return self._residents.keys()

    @property
    def pending(self) -> KeysView[int]:
        return self._pending.keys()

    def route(self, experts: Sequence[int]) -> list[Admission]:
        return []

    def route_batch(self, ids: NDArray[np.int32]) -> list[Admission]:
        return []

    def foresee(self, experts: Sequence[int]) -> list[Admission]:
        return []

    def commit(self, expert: int) -> None:
        del self._pending[expert]
        self._residents[expert] = None

    def abandon(self, expert: int) -> None:
        del self._pending[expert]


class Hottest(Static):
    """Every newcomer gets in, the resident with the lowest score goes: what the recency policies share.

    The score is the decayed frequency: the number of an expert's routings, each worth half as much every 14
    tokens. It is kept without touching every expert at every token: what a routing adds grows instead.

    A newcomer is admitted whatever its score, since most routings repeat one of the last few tokens. Where being
    new pays nothing it must be hotter than its victim: while an earlier upload of this bank is still under way (it
    would come too late for the next token), and with no more slots than one token uses (all would be replaced at
    every token).
    """

    def __init__(
        self, n_expert: int, n_slots: int, residents: Iterable[int] = (), *, max_pending: int | None = None
    ) -> None:
        super().__init__(n_expert, n_slots, residents, max_pending=max_pending)
        self._score = [0.0] * n_expert
        self._gain = 1.0
        # coldest first when it was last sorted: a list that is nearly in order is sorted again in little time
        self._order = list(reversed(self._residents))

    def route(self, experts: Sequence[int]) -> list[Admission]:
        self._touch(experts)
        residents = self._residents
        for expert in experts:
            if expert not in residents:
                return self._admit(experts, len(experts))
        return []

    def route_batch(self, ids: NDArray[np.int32]) -> list[Admission]:
        if len(ids) == 1:
            return self.route(ids[0].tolist())
        if not len(ids):
            return []
        self._touch_batch(ids)
        return self._admit(np.unique(ids).tolist(), ids.shape[1])

    def foresee(self, experts: Sequence[int]) -> list[Admission]:
        return self._admit(experts, len(experts))

    def commit(self, expert: int) -> None:
        super().commit(expert)
        self._order.append(expert)

    def _touch(self, experts: Sequence[int]) -> None:
        score, gain = self._score, self._gain
        for expert in experts:
            score[expert] += gain
        self._gain = gain * GROWTH
        if gain > MAX_GAIN:
            self._score = [each / gain for each in score]
            self._gain = GROWTH

    def _touch_batch(self, ids: NDArray[np.int32]) -> None:
        n_tokens, k = ids.shape
        age = np.arange(n_tokens, 0, -1)  # of each token when the next one comes
        added = np.bincount(ids.ravel(), np.repeat(GROWTH**-age, k), len(self._score))
        self._score = (np.array(self._score) / self._gain * GROWTH**-n_tokens + added).tolist()
        self._gain = 1.0

    def _admit(self, experts: Sequence[int], n_used: int) -> list[Admission]:
        """Admissions among the running step's ``experts``, of which one token uses ``n_used``."""
        residents, pending = self._residents, self._pending
        room = min(self.max_pending, self.n_slots) - len(pending)
        newcomers = self._newcomers(experts)
        if room <= 0 or not newcomers:
            return []
        score = self._score.__getitem__
        if len(newcomers) > 1:
            newcomers.sort(key=score, reverse=True)
            del newcomers[room:]
        n_free = self.n_slots - len(residents) - len(pending)
        must_be_hotter = bool(pending) or n_used >= self.n_slots
        admissions = [Admission(expert, None) for expert in newcomers[:n_free]]
        if len(newcomers) > n_free:
            self._order.sort(key=score)
            victims = self._victims(experts, len(newcomers) - n_free)
            for expert, victim in zip(newcomers[n_free:], victims, strict=False):
                if must_be_hotter and score(victim) >= score(expert):
                    continue
                del residents[victim]
                self._order.remove(victim)
                admissions.append(Admission(expert, victim))
        for expert, _ in admissions:
            pending[expert] = None
        return admissions

    def _newcomers(self, experts: Sequence[int]) -> list[int]:
        residents, pending = self._residents, self._pending
        return [expert for expert in experts if expert not in residents and expert not in pending]

    def _victims(self, experts: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` residents that are not among ``experts``, the first to go first."""
        return self._coldest(experts, count)

    def _coldest(self, experts: Sequence[int], count: int) -> list[int]:
        running = set(experts)
        return [expert for expert in self._order[: count + len(experts)] if expert not in running][:count]


class Lfru(Hottest):
    """Recency, frequency, and which experts follow each other.

    Every newcomer gets in, and the resident with the lowest decayed frequency goes (``Hottest``), but for this:
    among the few coldest, those that usually came one token after the experts of this token may stay. The policy
    counts, for each of a token's first experts, which experts the next token used; an expert that has always
    followed weighs as much as 20 routings. It learns at misses alone, so that hits cost nothing.
    """

    def __init__(
        self, n_expert: int, n_slots: int, residents: Iterable[int] = (), *, max_pending: int | None = None
    ) -> None:
        super().__init__(n_expert, n_slots, residents, max_pending=max_pending)
        self._followed: dict[int, bytearray] = {}  # of a leader: how often each expert came a token later
        self._n_seen = [1] * n_expert  # one more than it was seen: what was seen once foretells little
        self._leaders: Sequence[int] = ()

    def route(self, experts: Sequence[int]) -> list[Admission]:
        before, self._leaders = self._leaders, experts[:N_LEADERS]
        admissions = super().route(experts)
        if admissions:
            self._learn(before, experts)
        return admissions

    def route_batch(self, ids: NDArray[np.int32]) -> list[Admission]:
        if len(ids) > 1:
            if len(ids) > MAX_LEARNT:
                self._leaders = ()
            for experts in ids[-MAX_LEARNT:].tolist():
                self._learn(self._leaders, experts)
                self._leaders = experts[:N_LEADERS]
        return super().route_batch(ids)

    def _learn(self, before: Sequence[int], experts: Sequence[int]) -> None:
        n_seen = self._n_seen
        for leader in before:
            followed = self._followed.get(leader)
            if followed is None:
                followed = self._followed[leader] = bytearray(len(n_seen))
            elif n_seen[leader] >= MAX_SEEN:
                followed = self._followed[leader] = followed.translate(HALVED)
                n_seen[leader] //= 2
            n_seen[leader] += 1
            for expert in experts:
                followed[expert] += 1

    def _victims(self, experts: Sequence[int], count: int) -> list[int]:
        candidates = self._coldest(experts, count + N_CANDIDATES)
        values = [self._score[expert] for expert in candidates]
        for leader in self._leaders:
            if leader in self._followed:
                followed = self._followed[leader]
                weight = FORETOLD_WEIGHT * self._gain / (len(self._leaders) * self._n_seen[leader])
                values = [
                    value + followed[expert] * weight
                    for value, expert in zip(values, candidates, strict=True)
                ]
        if count == 1 and values:
            return [candidates[values.index(min(values))]]
        return [expert for _, expert in sorted(zip(values, candidates, strict=True))[:count]]


class Lru(Hottest):
    """Every newcomer gets in, the longest unused goes.

    With fewer slots than a token uses that would only thrash, and it holds the hottest, as ``Hottest`` does.
    """

    _clock = 0

    def _touch(self, experts: Sequence[int]) -> None:
        if len(experts) > self.n_slots:
            return super()._touch(experts)
        score = self._score
        for clock, expert in enumerate(reversed(experts), self._clock + 1):
            score[expert] = clock
        self._clock += len(experts)
        return None

    def _touch_batch(self, ids: NDArray[np.int32]) -> None:
        n_tokens, k = ids.shape
        if k > self.n_slots:
            return super()._touch_batch(ids)
        experts, from_end = np.unique(ids[::-1].ravel(), return_index=True)
        self._clock += n_tokens * k
        for expert, place in zip(experts.tolist(), from_end.tolist(), strict=True):
            self._score[expert] = self._clock - place
        return None


class Threshold(Lru):
    """An expert that was routed more than ``THRESHOLD`` times so far gets in, the longest unused goes."""

    def __init__(
        self, n_expert: int, n_slots: int, residents: Iterable[int] = (), *, max_pending: int | None = None
    ) -> None:
        super().__init__(n_expert, n_slots, residents, max_pending=max_pending)
        self._count = [0] * n_expert

    def _touch(self, experts: Sequence[int]) -> None:
        super()._touch(experts)
        for expert in experts:
            self._count[expert] += 1

    def _touch_batch(self, ids: NDArray[np.int32]) -> None:
        super()._touch_batch(ids)
        self._count = (np.bincount(ids.ravel(), minlength=len(self._count)) + self._count).tolist()

    def _newcomers(self, experts: Sequence[int]) -> list[int]:
        return [expert for expert in super()._newcomers(experts) if self._count[expert] > THRESHOLD]


POLICIES: dict[str, Callable[..., Policy]] = {
    "lfru": Lfru,
    "lru": Lru,
    "threshold": Threshold,
    "static": Static,
}
DEFAULT_POLICY = "lfru"
