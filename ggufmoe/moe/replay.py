"""Routing traces against policies, slots and budgets: what would have been hit, and what had to be uploaded."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import FormatError, UsageError
from .policies import POLICIES, Admission, Policy
from .residents import BankKey, ResidentRequest
from .trace import Trace, TraceBank, TraceHeader, TraceStep

Slots = Mapping[BankKey, int]
NEVER = 2**62


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A whole trace in memory, its steps by bank: banks are decided one by one."""

    header: TraceHeader
    banks: dict[BankKey, list[TraceStep]]

    @property
    def n_decoded(self) -> int:
        """Tokens of the decode phase."""
        return max(
            (sum(len(s.tokens) for s in steps if not s.is_prefill) for steps in self.banks.values()),
            default=0,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_pending``: uploads under way at a time, per bank; None: no limit. ``delay``: steps that an upload
    misses; with 0 the newcomer is resident in the next step."""

    max_pending: int | None = None
    delay: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Tally:
    """What decoding did: routings, those that a slot answered, and uploads; prefill only warms the slots."""

    routings: int = 0
    hits: int = 0
    uploads: int = 0
    upload_bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.routings + other.routings,
            self.hits + other.hits,
            self.uploads + other.uploads,
            self.upload_bytes + other.upload_bytes,
        )

    @property
    def hit_rate(self) -> float | None:
        """0 to 1; None if nothing was decoded."""
        return self.hits / self.routings if self.routings else None


def load_trace(trace: Trace) -> LoadedTrace:
    """Raises: FormatError, as reading does."""
    banks: dict[BankKey, list[TraceStep]] = defaultdict(list)
    for step in trace.steps:
        banks[step.key].append(step)
    return LoadedTrace(trace.header, dict(banks))


def slots_for_request(header: TraceHeader, request: ResidentRequest) -> dict[BankKey, int]:
    """Slots of each bank; a smaller bank gets its proportion of a count, as when a model is loaded."""
    largest = max((bank.n_expert for bank in header.banks), default=1)
    asked = request.of(largest) or 0
    return {
        bank.key: min(-(-asked * bank.n_expert // max(largest, 1)), bank.n_expert) for bank in header.banks
    }


def slots_for_budget(header: TraceHeader, n_bytes: int) -> dict[BankKey, int]:
    """``n_bytes`` of slots, the same share of every bank. Raises: UsageError if experts' sizes are unknown."""
    if not all(bank.expert_bytes for bank in header.banks):
        raise UsageError("The trace does not say how large its experts are.", hint="Use --resident-experts.")
    everything = sum(bank.expert_bytes * bank.n_expert for bank in header.banks)
    left = min(n_bytes, everything)
    return {bank.key: bank.n_expert * left // max(everything, 1) for bank in header.banks}


# Policies -----------------------------------------------------------------------------------------------


def replay(trace: LoadedTrace, policy: str, slots: Slots, limits: Limits = NO_LIMITS) -> Tally:
    """Drive ``policy``, a name of ``POLICIES``, with the whole trace. Slots start empty.

    ``static`` starts with what the prefill used most, since it would learn nothing from it.
    """
    by_key = trace.header.by_key
    total = Tally()
    for key, steps in trace.banks.items():
        bank = by_key[key]
        residents = hottest_of_prefill(steps, slots[key]) if policy == "static" else []
        player = POLICIES[policy](bank.n_expert, slots[key], residents, max_pending=limits.max_pending)
        total += _replay_bank(player, steps, limits.delay, bank.expert_bytes)
    return total


def hottest_of_prefill(steps: Sequence[TraceStep], n_slots: int) -> list[int]:
    counts = Counter(expert for step in steps if step.is_prefill for token in step.tokens for expert in token)
    return sorted(counts, key=lambda expert: (-counts[expert], expert))[:n_slots]


def _replay_bank(policy: Policy, steps: Iterable[TraceStep], delay: int, expert_bytes: int) -> Tally:
    routings = hits = uploads = 0
    under_way: deque[tuple[int, int]] = deque()  # (the step before which it is complete, expert)
    for number, step in enumerate(steps):
        while under_way and under_way[0][0] <= number:
            policy.commit(under_way.popleft()[1])
        n_hit = _count_hits(policy, step)
        admissions = _route(policy, step)
        under_way.extend((number + 1 + delay, admission.expert) for admission in admissions)
        if not step.is_prefill:
            routings += step.n_routings
            hits += n_hit
            uploads += len(admissions)
    return Tally(routings, hits, uploads, uploads * expert_bytes)


def _count_hits(policy: Policy, step: TraceStep) -> int:
    residents = policy.residents
    return sum(1 for token in step.tokens for expert in token if expert in residents)


def _route(policy: Policy, step: TraceStep) -> list[Admission]:
    if len(step.tokens) == 1:
        return policy.route(step.tokens[0])
    return policy.route_batch(np.array(step.tokens, np.int32))


# The optimum --------------------------------------------------------------------------------------------


def optimum(trace: LoadedTrace, slots: Slots) -> Tally:
    """What nobody can beat who sees the future: Belady's rule with bypass.

    Slots keep those of the residents and the step's experts whose next use in decoding comes soonest. Uploads are
    done by the next step, without a limit. A bound for steps of one token; for larger ones nearly so, since
    an expert that several tokens of a step share counts once in its choice.
    """
    by_key = trace.header.by_key
    parts = (_optimum_bank(steps, slots[key], by_key[key].expert_bytes) for key, steps in trace.banks.items())
    return sum(parts, Tally())


def _optimum_bank(steps: Sequence[TraceStep], n_slots: int, expert_bytes: int) -> Tally:
    next_uses = _next_uses(steps)
    routings = hits = uploads = 0
    residents: dict[int, int] = {}  # expert -> step of its next use
    for step, next_use in zip(steps, next_uses, strict=True):
        if not step.is_prefill:
            routings += step.n_routings
            hits += sum(1 for token in step.tokens for expert in token if expert in residents)
        before = residents.keys() & next_use.keys()
        wanted = {expert: use for expert, use in next_use.items() if use < NEVER}
        residents = {expert: use for expert, use in residents.items() if expert not in next_use} | wanted
        if len(residents) > n_slots:
            residents = dict(sorted(residents.items(), key=lambda item: item[1])[:n_slots])
        if not step.is_prefill:
            uploads += len((residents.keys() & next_use.keys()) - before)
    return Tally(routings, hits, uploads, uploads * expert_bytes)


def _next_uses(steps: Sequence[TraceStep]) -> list[dict[int, int]]:
    """Of each step: its experts, and the number of the next step of decoding that uses them."""
    coming: dict[int, int] = {}
    found = []
    for number in range(len(steps) - 1, -1, -1):
        step = steps[number]
        experts = {expert for token in step.tokens for expert in token}
        found.append({expert: coming.get(expert, NEVER) for expert in experts})
        if not step.is_prefill:
            coming.update(dict.fromkeys(experts, number))
    return found[::-1]


# A recorded run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run that an engine recorded, decided again. ``differs_at``: the first step whose hits are not those
    recorded, None if there is none. Both counts are of all steps, prefill included."""

    routings: int
    recorded_hits: int
    replayed_hits: int
    differs_at: TraceStep | None


def is_recorded(header: TraceHeader) -> bool:
    return header.policy is not None and all(bank.n_slots is not None for bank in header.banks)


def replay_recorded(header: TraceHeader, steps: Iterable[TraceStep]) -> RecordedRun:
    """Decide every step again, ending uploads when the engine ended them: the hits must be the same.

    ``steps`` may be in any order that keeps each bank's. Steps without recorded hits are not compared.
    Raises: FormatError if no engine recorded the trace, or if it ended an upload that the policy did not ask for.
    """
    if not is_recorded(header) or header.policy not in POLICIES:
        raise FormatError(f"The trace was not recorded with one of the policies {', '.join(POLICIES)}.")
    by_key = header.by_key
    policies: dict[BankKey, Policy] = {}
    routings = recorded = replayed = 0
    differs_at = None
    for step in steps:
        if step.key not in policies:
            policies[step.key] = _recorded_policy(header, by_key[step.key])
        policy = policies[step.key]
        _end_uploads(policy, step)
        policy.max_pending = _max_pending(header, step.max_pending, policy.n_slots)
        hits = _count_hits(policy, step)
        _route(policy, step)
        if step.hits is None:
            continue
        routings += step.n_routings
        recorded += step.hits
        replayed += hits
        if hits != step.hits and differs_at is None:
            differs_at = step
    return RecordedRun(routings, recorded, replayed, differs_at)


def _recorded_policy(header: TraceHeader, bank: TraceBank) -> Policy:
    assert header.policy is not None and bank.n_slots is not None
    return POLICIES[header.policy](
        bank.n_expert, bank.n_slots, bank.residents, max_pending=header.max_pending
    )


def _max_pending(header: TraceHeader, of_step: int | None, n_slots: int) -> int:
    if of_step is not None:
        return of_step
    return n_slots if header.max_pending is None else header.max_pending


def _end_uploads(policy: Policy, step: TraceStep) -> None:
    ended = [(policy.commit, expert) for expert in step.committed]
    ended += [(policy.abandon, expert) for expert in step.abandoned]
    for end, expert in ended:
        if expert not in policy.pending:
            raise FormatError(
                f"Step {step.step} of layer {step.layer} ends an upload of expert {expert}, for which the policy "
                "did not ask: the trace was changed, or recorded by another version."
            )
        end(expert)
