"""Placement rules in llama.cpp's form, ``REGEX=DEVICE``: the first rule that matches a tensor's name decides.

Names are the dense tensors' own (``blk.3.attn_q.weight``) and, for experts, those of single blocks
(``blk.3.ffn_up_exps.12.weight``) or of the whole stack (``blk.3.ffn_up_exps.weight``). Python's ``re.search`` is
the truth; llama.cpp is handed the names that matched, not the pattern, so that its own dialect does not matter.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..gguf.blocks import block_name
from ..gguf.experts import ExpertBank


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors whose name ``pattern`` is found in go to ``device``."""

    pattern: re.Pattern[str]
    device: str

    def __str__(self) -> str:
        return f"{self.pattern.pattern}={self.device}"


def parse_rule(text: str) -> Rule:
    """``REGEX=DEVICE`` -> Rule; the last ``=`` separates. Raises: UsageError."""
    pattern, separator, device = text.rpartition("=")
    if not separator or not pattern or not device.strip():
        raise UsageError(rf"{text!r} is not a rule of the form REGEX=DEVICE, for example blk\.0\.=CPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later Python may read differently
            return Rule(re.compile(pattern), device.strip())
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{pattern!r} in the rule {text!r} is not a regular expression: {error}") from error


def first_match(rules: Sequence[Rule], name: str) -> Rule | None:
    return next((rule for rule in rules if rule.pattern.search(name)), None)


def expert_rule(rules: Sequence[Rule], bank: ExpertBank, expert: int) -> Rule | None:
    """The rule that places one expert; all its matrices must agree, since an expert is moved as a whole.

    Raises: UsageError if a rule takes some of its matrices and leaves the others.
    """
    found = {
        stack.name: next(
            (
                rule
                for rule in rules
                if rule.pattern.search(block_name(stack.name, expert)) or rule.pattern.search(stack.name)
            ),
            None,
        )
        for stack in bank.weights.values()
    }
    targets = {rule.device.lower() if rule else None for rule in found.values()}
    if len(targets) > 1:
        rule = next(rule for rule in found.values() if rule)
        left = next(
            name
            for name, other in found.items()
            if other is None or other.device.lower() != rule.device.lower()
        )
        raise UsageError(
            f"The rule {rule} takes expert {expert} of layer {bank.layer} apart: {block_name(left, expert)} does "
            "not go with the others.",
            hint=r"Match all matrices of an expert, for example blk\.7\.ffn_.*_exps\.(3|12)\.weight=CUDA0",
        )
    return next(iter(found.values()))


def unmatched(rules: Sequence[Rule], names: Iterable[str], banks: Iterable[ExpertBank]) -> list[Rule]:
    """Rules that find no tensor and no block at all."""
    every = list(names)
    for bank in banks:
        for stack in bank.weights.values():
            every.append(stack.name)
            every += [block_name(stack.name, expert) for expert in range(bank.n_expert)]
    return [rule for rule in rules if not any(rule.pattern.search(name) for name in every)]


_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)")


def exact_patterns(names: Iterable[str]) -> list[str]:
    """Few regular expressions that match exactly these tensor names, in llama.cpp's dialect (std::regex)."""
    layers: dict[str, list[str]] = defaultdict(list)
    patterns = []
    for name in names:
        match = _LAYER_NAME.fullmatch(name)
        if match:
            layers[match[2]].append(match[1])
        else:
            patterns.append(f"^{_escaped(name)}$")
    patterns += [rf"^blk\.({'|'.join(numbers)})\.{_escaped(rest)}$" for rest, numbers in layers.items()]
    return patterns


def _escaped(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: "\\" + match[0], name)
