"""Which experts start out resident, and on which slot device."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import MemoryPlanError, UsageError
from ..gguf.experts import ExpertBank
from .rules import Rule, expert_rule

BankKey = tuple[int, str]  # layer, name of the bank


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
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if match and match[2] and float(match[1]) <= 100:
        return ResidentRequest(share=float(match[1]) / 100)
    if match and not match[2] and "." not in match[1]:
        return ResidentRequest(count=int(match[1]))
    raise UsageError(f"{text!r} is not a number of experts per layer, a share such as 25%, or 'all'.")


@dataclass(frozen=True, slots=True)
class Placement:
    """``residents[layer, bank]`` lists (expert, device index) in order of their slots."""

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
    budget_bytes: int | None,
) -> Placement:
    """Choose the first residents: those that rules name, then the first ones of every layer up to the request.

    ``devices`` are the names of the slot devices; residents that no rule places are dealt to them in turn.
    Without a request, ``budget_bytes`` of slots are spread evenly over the layers.
    Raises: UsageError for a rule that names a device without slots; MemoryPlanError if the request does not fit
    ``budget_bytes``.
    """
    indices = {name.lower(): index for index, name in enumerate(devices)}
    per_bank = _wanted(banks, request, budget_bytes) if devices else (lambda _bank: 0)
    residents: dict[BankKey, tuple[tuple[int, int], ...]] = {}
    for bank in banks:
        fixed: dict[int, int] = {}
        free: list[int] = []
        for expert in range(bank.n_expert):
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
        n_more = max(per_bank(bank) - len(fixed), 0)
        dealt = [(expert, turn % len(devices)) for turn, expert in enumerate(free[:n_more])]
        residents[bank.layer, bank.name] = (*fixed.items(), *dealt)
    placement = Placement(residents)
    needed = sum(placement.slot_bytes(banks, device) for device in range(len(devices)))
    if budget_bytes is not None and needed > budget_bytes:
        raise MemoryPlanError(
            f"The residents need {needed:,} bytes of slots, {budget_bytes:,} are left of the budget "
            f"({needed - budget_bytes:,} too few).",
            hint="Ask for fewer --resident-experts, or raise --vram.",
        )
    return placement


def _wanted(
    banks: Sequence[ExpertBank], request: ResidentRequest, budget_bytes: int | None
) -> Callable[[ExpertBank], int]:
    """How many residents each bank gets."""
    if request.count is not None or request.share is not None:
        largest = max((bank.n_expert for bank in banks), default=1)

        def asked(bank: ExpertBank) -> int:
            # a count is meant for the layer's main bank; GroveMoE's smaller one gets its proportion
            whole = request.of(largest) or 0
            return -(-whole * bank.n_expert // largest)

        return asked
    if not budget_bytes:
        return lambda _bank: 0
    everything = sum(bank.slot_bytes * bank.n_expert for bank in banks)
    share = min(1.0, budget_bytes / max(everything, 1))
    return lambda bank: int(share * bank.n_expert)
