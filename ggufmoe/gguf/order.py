"""Hot-first orders: in which order the experts of a layer lie in the file, and what else must follow them.

The router chooses by row number, so whatever has one row or value per expert is permuted alike: matrices,
biases and scales of the experts, rows of the router and its biases. Two kinds of model give the numbers
themselves a meaning: a router that first chooses groups of neighbouring experts (the groups stay together), and
GroveMoE, where an expert's number says which smaller expert it shares, and that one's number whose probability
weighs it (nothing can move).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import FormatError, UsageError
from .experts import BankKey
from .model import Model

# One row or value per expert of the bank ``exps``. Source: the names in src/llama-arch.cpp
ROUTER_PART = re.compile(
    r"blk\.(?P<layer>\d+)\.(?:ffn_gate_inp\.(?:weight|bias)|exp_probs_b(?:_vl)?(?:\.\w+)?)"
)
# A table of expert numbers by token: to permute it, its values would have to change
FIXED_ROUTING = re.compile(r"blk\.\d+\.ffn_gate_tid2eid\.weight")

Profile = Mapping[int, Sequence[float]]  # layer -> count of every expert, by original number


def check_profile(model: Model, profile: Profile) -> None:
    """Raises: UsageError if the profile is one of another model."""
    sizes = {bank.layer: bank.n_expert for bank in model.banks if bank.name == "exps"}
    for layer, counts in profile.items():
        if layer not in sizes:
            raise UsageError(
                f"The profile counts experts of layer {layer}; this model has none there.",
                hint="A profile belongs to one model.",
            )
        if len(counts) != sizes[layer]:
            raise UsageError(
                f"The profile counts {len(counts)} experts in layer {layer}; this model has {sizes[layer]}.",
                hint="A profile belongs to one model.",
            )
        if not all(math.isfinite(count) and count >= 0 for count in counts):
            raise UsageError(f"The profile has a count in layer {layer} that is no number of 0 or more.")


def bank_heat(model: Model, profile: Profile) -> dict[BankKey, tuple[float, ...]]:
    """The profile by bank. A smaller expert of GroveMoE is as hot as all experts that share it."""
    heat: dict[BankKey, tuple[float, ...]] = {}
    for bank in model.banks:
        counts = profile.get(bank.layer)
        if counts is None:
            continue
        if bank.name == "exps":
            heat[bank.layer, bank.name] = tuple(float(count) for count in counts)
        elif len(counts) % bank.n_expert == 0:
            share = len(counts) // bank.n_expert
            groups = [counts[start : start + share] for start in range(0, len(counts), share)]
            heat[bank.layer, bank.name] = tuple(float(sum(group)) for group in groups)
    return heat


def hot_orders(model: Model, heat: Mapping[BankKey, Sequence[float]]) -> dict[BankKey, tuple[int, ...]]:
    """The original number of the expert at each position, for every bank whose heat is known.

    A reordered router computes the same numbers; what a softmax over all experts sums up in another order may
    differ in its last bit.

    Raises: FormatError for a model whose experts cannot change places.
    """
    fixed = next((t.name for t in model.tensors if FIXED_ROUTING.fullmatch(t.name)), None)
    shared = next((bank for bank in model.banks if bank.name != "exps"), None)
    if fixed or shared:
        what = fixed or f"the smaller experts of layer {shared.layer if shared else 0}"
        raise FormatError(
            f"{model.paths[0]}: {what} go by the numbers of the experts, so their order cannot change",
            hint="Use --order file.",
        )
    n_group = max(model.get("expert_group_count", 0), 1)
    orders: dict[BankKey, tuple[int, ...]] = {}
    for bank in model.banks:
        temperatures = heat.get((bank.layer, bank.name))
        if temperatures is not None:
            size = bank.n_expert // n_group if n_group > 1 else 1
            orders[bank.layer, bank.name] = hot_first(temperatures, size)
    return orders


def hot_first(heat: Sequence[float], group: int = 1) -> tuple[int, ...]:
    """Experts by falling heat, in groups of ``group`` neighbours: the hottest group first, and in it the
    hottest expert. Equal ones keep their order.
    """
    starts = range(0, len(heat), group)
    groups = sorted(starts, key=lambda start: -sum(heat[start : start + group]))
    return tuple(
        expert for start in groups for expert in sorted(range(start, start + group), key=lambda e: -heat[e])
    )


def moving_tensors(model: Model) -> dict[str, BankKey]:
    """Tensors with one part per expert in their outermost dimension, and the bank whose order it follows."""
    moving = {tensor.name: (bank.layer, bank.name) for bank in model.banks for tensor in bank.tensors}
    banks = {(bank.layer, bank.name) for bank in model.banks}
    for tensor in model.tensors:
        match = ROUTER_PART.fullmatch(tensor.name)
        if match and (int(match["layer"]), "exps") in banks:
            moving[tensor.name] = int(match["layer"]), "exps"
    return moving


def profile_from(value: object, path: Path) -> Profile:
    """A profile from parsed JSON, ``{"layers": {"3": [12, 0, 7, ...]}}``: counts by original number.

    Raises: FormatError if it is anything else.
    """
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, dict) or not layers:
        raise FormatError(f'{path}: no routing profile: it has no "layers"', hint=PROFILE_HINT)
    profile: dict[int, tuple[float, ...]] = {}
    for name, counts in layers.items():
        numbers = isinstance(counts, list) and all(type(count) in (int, float) for count in counts)
        if not re.fullmatch(r"[0-9]{1,4}", name) or not numbers:
            raise FormatError(
                f"{path}: no routing profile: layer {name!r} is no list of counts", hint=PROFILE_HINT
            )
        profile[int(name)] = tuple(counts)
    return profile


PROFILE_HINT = 'A profile looks like {"layers": {"3": [12, 0, 7]}}: a count for every expert of a layer.'
