"""Which experts start out resident, and on which slot device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MemoryPlanError, UsageError
from ..gguf.experts import BankKey as BankKey
from ..gguf.experts import ExpertBank
from .rules import Rule, expert_rule


@dataclass(frozen=True, slots=True)
class ResidentRequest:
    """What the user asked for: ``count`` experts or a ``share`` (0 to 1) of each layer; neither: by the budget."""

    count: int | None = None
    share: float | None = None

    def of(self, n_expert: int) -> int | None:
        """Experts of a bank of ``n_expert``; None if nothing was asked."""
        if self.count is not None:
            return min(self.count, n_expert)
        return None if self.share is None else round(self.share * n_expert)


def parse_residents(text: str) -> ResidentRequest:
    """``8`` (experts per layer), ``25%`` or ``all``. Raises: UsageError."""
    if text.strip().lower() == "all":
        return ResidentRequest(share=1.0)
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(%?)\s*", text)
    if match and match[2] and float(match[1]) <= 100:
        return ResidentRequest(share=float(match[1]) / 100)
    if match and not match[2] and "." not in match[1]:
        return ResidentRequest(count=int(match[1]))
    raise UsageError(f"{text!r} is not a number of experts per layer, a share such as 25%, or 'all'.")


@dataclass(frozen=True, slots=True)
class Placement:
    """``residents[layer, bank]`` lists (original number of an expert, device index) in order of their slots."""

    residents: dict[BankKey, tuple[tuple[int, int], ...]]

    def n_resident(self) -> int:
        return sum(len(members) for members in self.residents.values())

    def slot_bytes(self, banks: Sequence[ExpertBank], device: int) -> int:
        """Bytes of all slots on one device."""
        return sum(
            bank.slot_bytes * sum(1 for _, place in self.residents[bank.layer, bank.name] if place == device)
            for bank in banks
        )


def place_residents(
    banks: Sequence[ExpertBank],
    request: ResidentRequest,
    rules: Sequence[Rule],
    devices: Sequence[str],
    budgets: Sequence[int] | None,
) -> Placement:
    """Choose the first residents: those that rules name, then the first ones of every layer up to the request.

    ``devices`` are the names of the slot devices, ``budgets`` the bytes of slots that each may hold. Residents
    that no rule places are dealt to the device with the most room, or in turn where there are no budgets.
    Without a request, what rules leave of the budgets is spread evenly over the layers.
    Raises: UsageError for a rule that names a device without slots; MemoryPlanError if rules and request do not
    fit a device's budget.
    """
    ruled = [_ruled(bank, rules, devices) for bank in banks]
    room = list(budgets) if budgets is not None else [0] * len(devices)
    for bank, (fixed, _) in zip(banks, ruled, strict=True):
        for device in fixed.values():
            room[device] -= bank.slot_bytes
    n_more = _dealt(banks, request, ruled, sum(room)) if devices else [0] * len(banks)
    residents: dict[BankKey, tuple[tuple[int, int], ...]] = {}
    for bank, (fixed, free), n_free in zip(banks, ruled, n_more, strict=True):
        dealt = []
        for expert in free[:n_free]:
            device = room.index(max(room))
            if request == ResidentRequest() and room[device] < bank.slot_bytes:
                break  # what fits all devices together need not fit one of them
            room[device] -= bank.slot_bytes
            dealt.append((expert, device))
        residents[bank.layer, bank.name] = (*fixed.items(), *dealt)
    if budgets is not None and min(room, default=0) < 0:
        device = room.index(min(room))
        raise MemoryPlanError(
            f"The residents need {budgets[device] - room[device]:,} bytes of slots on {devices[device]}, "
            f"{budgets[device]:,} are left of the budget ({-room[device]:,} too few).",
            hint="Ask for fewer --resident-experts, or raise --vram.",
        )
    return Placement(residents)


def _ruled(
    bank: ExpertBank, rules: Sequence[Rule], devices: Sequence[str]
) -> tuple[dict[int, int], list[int]]:
    """What rules say of a bank: expert -> index of its device, and the experts that no rule places."""
    indices = {name.lower(): index for index, name in enumerate(devices)}
    fixed: dict[int, int] = {}
    free: list[int] = []
    for expert in bank.experts:  # in the order of the file: hottest first, if it was converted so
        rule = expert_rule(rules, bank, expert) if rules else None
        if rule is None:
            free.append(expert)
        elif rule.device.lower() in indices:
            fixed[expert] = indices[rule.device.lower()]
        elif rule.device.lower() != "cpu":
            raise UsageError(
                f"The rule {rule} names a device that is not in use.",
                hint=f"Add --device {rule.device}; `ggufmoe devices` lists what there is.",
            )
    return fixed, free


def _dealt(
    banks: Sequence[ExpertBank],
    request: ResidentRequest,
    ruled: Sequence[tuple[dict[int, int], list[int]]],
    room_bytes: int,
) -> list[int]:
    """How many residents each bank gets beside those that rules place; ``room_bytes`` is what these leave."""
    if request.count is not None or request.share is not None:
        largest = max((bank.n_expert for bank in banks), default=1)
        asked = request.of(largest) or 0
        # a count is meant for the layer's main bank; GroveMoE's smaller one gets its proportion
        wanted = [-(-asked * bank.n_expert // largest) for bank in banks]
        return [max(n - len(fixed), 0) for n, (fixed, _) in zip(wanted, ruled, strict=True)]
    members = list(zip(banks, ruled, strict=True))
    everything = sum(bank.slot_bytes * len(free) for bank, (_, free) in members)
    left = max(0, min(room_bytes, everything))
    return [len(free) * left // max(everything, 1) for _, (_, free) in members]
