"""Which tensors of a model are routed experts, by the names that llama.cpp gives them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ..errors import FormatError

T = TypeVar("T")
BankKey = tuple[int, str]  # layer, name of the bank


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a model's tensor table.

    ``ne`` is in ggml order: ``ne[0]`` is the contiguous dimension. ``offset`` is in bytes from the start of
    the file ``shard`` (an index into ``Model.paths``).
    """

    name: str
    type_name: str
    ne: tuple[int, ...]
    n_bytes: int
    shard: int
    offset: int


# Source: the names of LLM_TENSOR_FFN_*_EXPS and *_CHEXPS in src/llama-arch.cpp
EXPERT_NAME = re.compile(
    r"blk\.(?P<layer>\d+)\.ffn_(?P<projection>gate_up|gate|up|down)_(?P<bank>exps|chexps)"
    r"\.(?P<part>weight|bias|scale|input_scale)"
)
# Mixtral files of before April 2024: one 2-D tensor per expert
OLD_EXPERT_NAME = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?:gate|up|down)\.(?P<expert>\d+)\.weight")


@dataclass(frozen=True)
class ExpertBank:
    """The experts of one layer that one router choice indexes: ``exps``, or GroveMoE's smaller ``chexps``.

    ``weights`` are the stacked matrices ``(n_in, n_out, n_expert)`` by projection; ``extras`` the small
    per-expert biases and scales.

    An expert has two numbers where a conversion has reordered the file: its *position* in the tensors, which
    the router's ids and ``expert_span`` mean, and its *original* number, which users see and rules, plans,
    profiles and reports mean. ``order`` has the original number at each position; empty: they are the same.
    """

    layer: int
    name: str
    n_expert: int
    weights: dict[str, TensorInfo]
    extras: tuple[TensorInfo, ...]
    order: tuple[int, ...] = ()

    @property
    def experts(self) -> Sequence[int]:
        """The original numbers of all experts, in the order of the file."""
        return self.order or range(self.n_expert)

    def original(self, position: int) -> int:
        return self.order[position] if self.order else position

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {expert: position for position, expert in enumerate(self.order)}

    def position(self, expert: int) -> int:
        return self._positions[expert] if self.order else expert

    def by_original(self, values: Sequence[T]) -> list[T]:
        """Values by position (routing counts, for example) as values by original number."""
        return [values[self.position(expert)] for expert in range(self.n_expert)]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (*self.weights.values(), *self.extras)

    @cached_property
    def n_bytes(self) -> int:
        """All experts of the bank, with their biases and scales."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @cached_property
    def slot_bytes(self) -> int:
        """What one expert takes in a slot: its matrices. Biases and scales stay where the CPU adds them."""
        return sum(tensor.n_bytes for tensor in self.weights.values()) // self.n_expert


def is_expert_tensor(name: str) -> bool:
    return EXPERT_NAME.fullmatch(name) is not None


def stacked_ne(name: str, ne: tuple[int, ...]) -> tuple[int, ...]:
    """``ne`` with a third dimension if ``name`` is an expert matrix.

    ggml leaves out trailing ones, so a stack of one expert looks like a plain matrix.
    """
    match = EXPERT_NAME.fullmatch(name)
    return (*ne, 1) if match and match["part"] == "weight" and len(ne) == 2 else ne


def find_banks(
    tensors: Iterable[TensorInfo], orders: Mapping[BankKey, tuple[int, ...]] | None = None
) -> tuple[ExpertBank, ...]:
    """The expert banks of a model, in order of their layers; ``orders`` are those that were reordered.

    Raises: FormatError if the tensors of one bank disagree on the number of experts, a bank has no matrix, or
    an order is no permutation of its experts.
    """
    found: dict[tuple[int, str], list[tuple[re.Match[str], TensorInfo]]] = defaultdict(list)
    for tensor in tensors:
        match = EXPERT_NAME.fullmatch(tensor.name)
        if match:
            found[int(match["layer"]), match["bank"]].append((match, tensor))
    banks = []
    for (layer, name), members in sorted(found.items()):
        order = (orders or {}).get((layer, name), ())
        bank = _bank(layer, name, members, order)
        if order and sorted(order) != list(range(bank.n_expert)):
            raise FormatError(f"the stored order of the experts of layer {layer} is no permutation of them")
        banks.append(bank)
    return tuple(banks)


def _bank(
    layer: int, name: str, members: list[tuple[re.Match[str], TensorInfo]], order: tuple[int, ...]
) -> ExpertBank:
    weights = {match["projection"]: tensor for match, tensor in members if match["part"] == "weight"}
    counts = {tensor.ne[2] if len(tensor.ne) == 3 else 0 for tensor in weights.values()}
    if len(counts) != 1 or 0 in counts:
        stated = ", ".join(f"{tensor.name} {tensor.ne}" for tensor in weights.values()) or "no matrix at all"
        raise FormatError(f"the experts of layer {layer} do not agree on their number: {stated}")
    extras = tuple(tensor for match, tensor in members if match["part"] != "weight")
    return ExpertBank(layer, name, counts.pop(), weights, extras, order)


def expert_span(tensor: TensorInfo, expert: int) -> slice:
    """Byte range of one expert inside a stacked expert tensor.

    ``tensor.ne`` is ``(n_in, n_out, n_expert)``. The expert is the outermost dimension, so its weights are
    one contiguous run that can be copied alone.

    Returns: bytes relative to the start of the tensor.
    Raises: FormatError if the tensor is not 3-D; IndexError if there is no such expert.
    Source: ``ggml_mul_mat_id`` in ggml/src/ggml.c (``as -> [cols, rows, n_expert]``).
    """
    if len(tensor.ne) != 3:
        raise FormatError(f"{tensor.name} is not a stack of experts: its shape is {tensor.ne}")
    if not 0 <= expert < tensor.ne[2]:
        raise IndexError(f"{tensor.name} has {tensor.ne[2]} experts, there is no expert {expert}")
    size = tensor.n_bytes // tensor.ne[2]
    return slice(expert * size, (expert + 1) * size)
