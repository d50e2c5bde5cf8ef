"""Find weights that are no numbers, before a token is routed to them hours later.

A quantised block is bad if its scale (or minimum) is NaN or infinite: every weight of the block then is. Only
scales are read out of the blocks, and of unquantised tensors the exponents; nothing is dequantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from .experts import EXPERT_NAME, TensorInfo
from .model import Model

Bytes: TypeAlias = "NDArray[np.uint8]"

CHUNK_BYTES = 8 << 20
# One row per expert, so that a row of NaN is the fault of one expert
ROUTER_NAME = re.compile(
    r"blk\.(?P<layer>\d+)\.(?P<projection>ffn_gate_inp|exp_probs_b)\.(?:weight|bias|scale)"
)


@dataclass(frozen=True, slots=True)
class BadBlocks:
    """Blocks of one expert that hold no numbers.

    ``projection`` is ``gate``, ``up``, ``down``, ``gate_up`` (``.bias`` or ``.scale`` appended where it is
    not the matrix), or ``router``. ``expert`` is None where a tensor has not one row per expert. For
    unquantised types a block is one value.
    """

    layer: int
    projection: str
    expert: int | None
    n_bad_blocks: int
    tensor: str


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Where a block keeps what must be finite: ``(offset, mask)`` in little-endian units of ``unit_bytes``.

    The value is not finite if all bits of the mask (the exponent) are set.
    """

    n_bytes: int
    unit_bytes: int
    mask: int
    offsets: tuple[int, ...] = (0,)


def _half(n_bytes: int, *offsets: int) -> BlockFormat:
    return BlockFormat(n_bytes, 2, 0x7C00, offsets or (0,))


# Source: block_* in ggml/src/ggml-common.h; the names are ggml's. IQ1_M scatters its scale over four words
# and NVFP4 has scales of its own kind: those, and types yet to come, are reported as not checked.
FORMATS = {
    "f32": BlockFormat(4, 4, 0x7F800000),
    "f16": _half(2),
    "bf16": BlockFormat(2, 2, 0x7F80),
    "mxfp4": BlockFormat(17, 1, 0xFF),  # E8M0: 255 is NaN
    "q4_0": _half(18),
    "q4_1": _half(20, 0, 2),
    "q5_0": _half(22),
    "q5_1": _half(24, 0, 2),
    "q8_0": _half(34),
    "q2_K": _half(84, 80, 82),
    "q3_K": _half(110, 108),
    "q4_K": _half(144, 0, 2),
    "q5_K": _half(176, 0, 2),
    "q6_K": _half(210, 208),
    "iq4_nl": _half(18),
    "iq4_xs": _half(136),
    "iq3_xxs": _half(98),
    "iq3_s": _half(110),
    "iq2_xxs": _half(66),
    "iq2_xs": _half(74),
    "iq2_s": _half(82),
    "iq1_s": _half(50),
    "tq1_0": _half(54, 52),
    "tq2_0": _half(66, 64),
}


def find_bad_blocks(model: Model) -> list[BadBlocks]:
    """Scan the experts and routers of a model for blocks that are NaN or infinite.

    Every byte of them is read once, in chunks of ``CHUNK_BYTES``. What cannot be judged is left out; see
    ``unchecked_tensors``.

    Returns: in order of layers, then projections, then experts.
    Raises: FormatError if a file cannot be read to its end.
    """
    found = [bad for tensor in _routed_tensors(model) for bad in _bad_in(model, tensor)]
    return sorted(found, key=lambda bad: (bad.layer, bad.projection, bad.tensor, bad.expert or 0))


def unchecked_tensors(model: Model) -> list[TensorInfo]:
    """Experts and routers of a type whose blocks ``find_bad_blocks`` does not know."""
    return [tensor for tensor in _routed_tensors(model) if tensor.type_name not in FORMATS]


def _routed_tensors(model: Model) -> list[TensorInfo]:
    return [t for t in model.tensors if EXPERT_NAME.fullmatch(t.name) or ROUTER_NAME.fullmatch(t.name)]


def _bad_in(model: Model, tensor: TensorInfo) -> Iterator[BadBlocks]:
    block = FORMATS.get(tensor.type_name)
    if block is None or not tensor.n_bytes:
        return
    layer, projection = _place(tensor.name)
    # experts are the outermost dimension: of matrices, biases, scales, and of a router's rows
    n_expert = tensor.ne[-1]
    known = projection != "router" or n_expert == _n_expert(model, layer)
    if tensor.n_bytes % (n_expert * block.n_bytes):  # one value per expert, several of them in a block
        known = False
    n_part = n_expert if known else 1
    part_bytes = tensor.n_bytes // n_part
    for part in range(n_part):
        n_bad = sum(
            count_bad(chunk, block)
            for chunk in _chunks(
                model.paths[tensor.shard], tensor.offset + part * part_bytes, part_bytes, block
            )
        )
        if n_bad:
            expert = _original(model, tensor.name, part) if known else None
            yield BadBlocks(layer, projection, expert, n_bad, tensor.name)


def _place(name: str) -> tuple[int, str]:
    match = EXPERT_NAME.fullmatch(name)
    if match is None:
        router = ROUTER_NAME.fullmatch(name)
        assert router is not None
        return int(router["layer"]), "router"
    part = "" if match["part"] == "weight" else f".{match['part']}"
    bank = "" if match["bank"] == "exps" else f" ({match['bank']})"
    return int(match["layer"]), f"{match['projection']}{part}{bank}"


def _n_expert(model: Model, layer: int) -> int:
    return next((bank.n_expert for bank in model.banks if bank.layer == layer and bank.name == "exps"), 0)


def _original(model: Model, name: str, position: int) -> int:
    """The original number of the expert whose part of a tensor is at ``position``."""
    match = EXPERT_NAME.fullmatch(name) or ROUTER_NAME.fullmatch(name)
    assert match is not None
    bank = match["bank"] if "bank" in match.groupdict() else "exps"
    found = next((b for b in model.banks if (b.layer, b.name) == (int(match["layer"]), bank)), None)
    return found.original(position) if found else position


def _chunks(path: Path, offset: int, n_bytes: int, block: BlockFormat) -> Iterator[Bytes]:
    """The bytes of a part in whole blocks. Read, not mapped: a file that shrinks meanwhile would kill us."""
    step = CHUNK_BYTES // block.n_bytes * block.n_bytes
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        for start in range(0, n_bytes, step):
            size = min(step, n_bytes - start)
            chunk = np.fromfile(file, np.uint8, size)
            if chunk.size < size:
                raise FormatError(
                    f"{path}: the file is cut short: it ended at byte {offset + start + chunk.size:,} "
                    "while its weights were read",
                    hint="Something else is changing the file.",
                )
            yield chunk


def count_bad(chunk: Bytes, block: BlockFormat) -> int:
    """How many of the whole blocks in ``chunk`` hold no number."""
    n_block = chunk.size // block.n_bytes
    kind = np.dtype(f"<u{block.unit_bytes}")
    mask = kind.type(block.mask)  # of the same width, so that nothing is widened
    bad = np.zeros(n_block, np.bool_)
    for offset in block.offsets:
        # one strided look at what must be finite: the rest of the blocks is not touched
        value: NDArray[Any] = np.ndarray((n_block,), kind, chunk, offset, (block.n_bytes,))
        exponents = value & mask
        if n_block and exponents.max() == mask:
            bad |= exponents == mask
    return int(np.count_nonzero(bad))
