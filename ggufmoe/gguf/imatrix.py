"""Importance matrices, which tell the quantiser what weights matter: the GGUF form, and the older ``.dat``.

Source: common/imatrix-loader.cpp and ``load_imatrix`` in tools/quantize/quantize.cpp
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..native.metadata import RawTensor, read_start
from .header import open_header

Importance: TypeAlias = "Mapping[str, NDArray[np.float32]]"  # by tensor: one value per column and expert

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_BYTES = 4 << 30
HINT = "An importance matrix is made by llama-imatrix, for the same model."


def read_importance(path: Path) -> Importance:
    """The values as the quantiser takes them, ``(n_expert * n_columns,)`` for a stack of experts.

    Raises: FormatError if the file is no importance matrix, or holds values that are no numbers.
    """
    try:
        found = _read_gguf(path) if read_start(path, 4) == b"GGUF" else _read_legacy(path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened: {error.strerror or error}") from error
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise FormatError(f"{path}: the importance of {name} holds values that are no numbers", hint=HINT)
    if not found:
        raise FormatError(f"{path}: no importance matrix: it holds no values", hint=HINT)
    return found


def _read_gguf(path: Path) -> dict[str, NDArray[np.float32]]:
    header = open_header(path).header
    tensors = {tensor.name: tensor for tensor in header.tensors}
    found = {}
    for name, sums in tensors.items():
        if not name.endswith(SUMS):
            continue
        stem = name.removesuffix(SUMS)
        counts = tensors.get(stem + COUNTS)
        if counts is None or (sums.type_name, counts.type_name) != ("f32", "f32"):
            raise FormatError(f"{path}: the importance of {stem} has no counts", hint=HINT)
        values = _floats(path, header.data_offset, sums)
        times = np.rint(_floats(path, header.data_offset, counts))
        if not times.size or values.size % times.size:
            raise FormatError(f"{path}: the importance of {stem} does not fit its counts", hint=HINT)
        rows = values.reshape(times.size, -1)
        # an expert that no token chose counts as evenly important
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(times[:, None] > 0, rows / times[:, None], np.float32(1))
        found[stem] = np.ascontiguousarray(mean.reshape(-1), np.float32)
    return found


def _floats(path: Path, data_offset: int, tensor: RawTensor) -> NDArray[np.float32]:
    return np.fromfile(path, "<f4", tensor.n_bytes // 4, offset=data_offset + tensor.offset)


def _read_legacy(path: Path) -> dict[str, NDArray[np.float32]]:
    if path.stat().st_size > MAX_BYTES:
        raise FormatError(f"{path}: larger than any importance matrix", hint=HINT)
    data = path.read_bytes()
    found = {}
    try:
        (n_entries,), position = struct.unpack_from("<i", data), 4
        for _ in range(n_entries):
            (length,) = struct.unpack_from("<i", data, position)
            name = data[position + 4 : position + 4 + length].decode()
            position += 4 + length
            n_calls, n_values = struct.unpack_from("<ii", data, position)
            if length < 1 or n_values < 1:
                raise ValueError
            values = np.frombuffer(data, "<f4", n_values, position + 8)
            found[name] = np.ascontiguousarray(values / n_calls if n_calls > 0 else values, np.float32)
            position += 8 + 4 * n_values
    except (struct.error, ValueError) as error:
        raise FormatError(f"{path}: no importance matrix", hint=HINT) from error
    return found
