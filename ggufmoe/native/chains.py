"""What llama.cpp asks of us: the expert part of a layer, read from the nodes of a scheduler split.

The common case is one chain, ``MUL_MAT_ID gate, MUL_MAT_ID up, GLU, MUL_MAT_ID down`` (or a merged
``gate_up`` with two views), which can be computed anew for any part of the (token, expert) pairs. Whatever
does not fit that form comes as single ``MUL_MAT_ID`` nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from . import declarations as c
from .library import ggml

INPUT = -1  # as the source of a step: the chain's input


@dataclass(frozen=True, slots=True)
class MatMul:
    """``MUL_MAT_ID`` of the next weight with the output of step ``source``."""

    source: int
    params: bytes


@dataclass(frozen=True, slots=True)
class Glu:
    """A gated activation of one step's output (``up`` is None) or of two."""

    gate: int
    up: int | None
    params: bytes


@dataclass(frozen=True, slots=True)
class View:
    """The first ``n`` floats of every row of ``source``, from ``offset`` bytes on."""

    source: int
    n: int
    offset: int


Step: TypeAlias = "MatMul | Glu | View"


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of steps and the tensors of llama.cpp's graph that it stands for, by address.

    ``weights`` belong to the ``MatMul`` steps in order. ``x`` is the input ``(n_in, 1 or k, n_tokens)``, ``ids``
    the router's choice ``(k, n_tokens)``, ``out`` the result ``(n_out, k, n_tokens)``.
    """

    steps: tuple[Step, ...]
    weights: tuple[int, ...]
    x: int
    ids: int
    out: int


class _NotOneChain(Exception):
    """The nodes do more than one chain can say."""


@functools.cache
def op_number(name: str) -> int:
    """The number of a ggml operation by its name, for example ``MUL_MAT_ID``."""
    functions = ggml()
    for number in range(256):
        if functions.ggml_op_name(number) == name.encode():
            return number
    raise AssertionError(f"the pinned ggml has no operation {name}")


@functools.cache
def view_ops() -> frozenset[int]:
    """Operations that compute nothing (``ggml_is_view_op``, ggml-impl.h)."""
    return frozenset(op_number(name) for name in ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"))


def read_chains(nodes: Sequence[int]) -> list[Chain | int]:
    """What the nodes of one split amount to, in order: chains, and the nodes that no chain covers."""
    try:
        return [_one_chain(nodes)]
    except _NotOneChain:
        pass
    parts: list[Chain | int] = []
    for address in nodes:
        node = c.ggml_tensor.from_address(address)
        if node.op == op_number("MUL_MAT_ID"):
            parts.append(_single(address, node))
        elif node.op not in view_ops():
            parts.append(address)
    return parts


def _single(address: int, node: c.ggml_tensor) -> Chain:
    step = MatMul(INPUT, bytes(node.op_params))
    return Chain((step,), (node.src[0],), node.src[1], node.src[2], address)


def _one_chain(nodes: Sequence[int]) -> Chain:
    """All nodes as one chain. Raises: _NotOneChain."""
    steps: list[Step] = []
    weights: list[int] = []
    step_of: dict[int, int] = {}  # address of a node -> its step
    inputs: set[int] = set()
    ids: set[int] = set()
    out = 0

    def source(address: int) -> int:
        """The step that computes this tensor; a view becomes a step only when something reads it here."""
        if address not in step_of:
            node = c.ggml_tensor.from_address(address)
            if node.op != op_number("VIEW") or node.view_src not in step_of:
                raise _NotOneChain
            steps.append(_view(node, step_of[node.view_src]))
            step_of[address] = len(steps) - 1
        return step_of[address]

    for address in nodes:
        node = c.ggml_tensor.from_address(address)
        if node.op in view_ops():
            continue
        if node.op == op_number("MUL_MAT_ID"):
            if node.src[1] in step_of:
                steps.append(MatMul(step_of[node.src[1]], bytes(node.op_params)))
            else:
                inputs.add(node.src[1])
                steps.append(MatMul(INPUT, bytes(node.op_params)))
            weights.append(node.src[0])
            ids.add(node.src[2])
        elif node.op == op_number("GLU"):
            gate, up = source(node.src[0]), source(node.src[1]) if node.src[1] else None
            steps.append(Glu(gate, up, bytes(node.op_params)))
        else:
            raise _NotOneChain
        step_of[address], out = len(steps) - 1, address
    used = {number for step in steps for number in _sources(step)}
    if len(inputs) != 1 or len(ids) != 1 or set(range(len(steps))) - used != {len(steps) - 1}:
        raise _NotOneChain
    return Chain(tuple(steps), tuple(weights), inputs.pop(), ids.pop(), out)


def _view(node: c.ggml_tensor, source: int) -> View:
    base = c.ggml_tensor.from_address(node.view_src)
    same_rows = list(node.ne[1:]) == list(base.ne[1:]) and list(node.nb[1:3]) == list(base.nb[1:3])
    if not same_rows or base.view_src:
        raise _NotOneChain
    return View(source, node.ne[0], node.view_offs)


def _sources(step: Step) -> tuple[int, ...]:
    if isinstance(step, Glu):
        return (step.gate,) if step.up is None else (step.gate, step.up)
    return (step.source,)
