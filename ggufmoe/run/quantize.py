"""Which types the tensors of a converted file get, by llama.cpp's own choice for each part of the model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import NativeError, UsageError
from ..gguf.experts import is_expert_tensor
from ..gguf.imatrix import Importance, read_importance
from ..gguf.targets import Target
from ..gguf.writer import STRING, U32, KeyRecord, TableRow, data_offsets, header_data, key_record, with_key
from ..native.devices import type_numbers
from ..native.quantize import FILE_TYPES, TypeChoice, choose_types

UNQUANTISED = ("f32", "f16", "bf16")
QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION


@dataclass(frozen=True)
class Quantization:
    """File types for the experts and for all the rest, by llama.cpp's names; None keeps a part as it is."""

    expert_type: str | None = None
    dense_type: str | None = None
    imatrix: Path | None = None
    allow_requantize: bool = False

    def __bool__(self) -> bool:
        return self.expert_type is not None or self.dense_type is not None


@dataclass(frozen=True)
class Quantized:
    targets: tuple[Target, ...]
    keys: tuple[KeyRecord, ...]
    importance: Importance


def quantized(
    keys: Sequence[KeyRecord], targets: Sequence[Target], wanted: Quantization, scratch: Path
) -> Quantized:
    """The same tensors with the types that ``llama-quantize`` would give them, and the keys that say so.

    Each part has the types of a whole file of its type: the experts of a ``Q4_K_M`` file and the dense weights
    of a ``Q8_0`` one. ``scratch`` is a path for a header without data, which llama.cpp is asked about.
    Raises: UsageError for weights that are quantised already, or an importance matrix that is missing.
    """
    importance = read_importance(wanted.imatrix) if wanted.imatrix else {}
    types = {target.name: target.source_type for target in targets}
    for part, file_type in ((True, wanted.expert_type), (False, wanted.dense_type)):
        if file_type is None:
            continue
        choice = _choose(keys, targets, file_type, bool(importance), scratch)
        names = [target.name for target in targets if is_expert_tensor(target.name) is part]
        unnamed = [name for name in names if name not in choice.types]
        if unnamed:
            raise NativeError(f"llama.cpp names no type for {unnamed[0]} in a file of {file_type}.")
        types.update((name, choice.types[name]) for name in names)
        lacking = [name for name in choice.unaided if name in set(names) and name not in importance]
        if lacking:
            raise UsageError(
                f"{file_type} needs an importance matrix, and there is none for {lacking[0]}.",
                hint="Give one with --imatrix (llama-imatrix makes them), or choose a larger type.",
            )
    chosen = tuple(replace(target, type_name=types[target.name]) for target in targets)
    _check(chosen, wanted)
    importance = _fitting(chosen, importance, wanted.imatrix)
    main = wanted.expert_type or wanted.dense_type
    assert main is not None
    stated = with_key(keys, key_record("general.quantization_version", U32, QUANTIZATION_VERSION))
    stated = with_key(stated, key_record("general.file_type", U32, FILE_TYPES[main]))
    if wanted.imatrix:
        stated = with_key(stated, key_record("quantize.imatrix.file", STRING, wanted.imatrix.name))
    return Quantized(chosen, tuple(stated), importance)


def _choose(
    keys: Sequence[KeyRecord], targets: Sequence[Target], file_type: str, has_importance: bool, scratch: Path
) -> TypeChoice:
    numbers, alignment = type_numbers(), 32
    rows = [TableRow(t.shape, numbers[t.source_type], t.source_bytes) for t in targets]
    stated = with_key(keys, key_record("general.alignment", U32, alignment))
    header = header_data(stated, rows, alignment)
    try:
        scratch.write_bytes(header)
        os.truncate(scratch, len(header) + data_offsets(rows, alignment)[-1])  # a hole: it takes no space
        return choose_types(scratch, file_type, has_importance=has_importance)
    finally:
        scratch.unlink(missing_ok=True)


def _check(targets: Sequence[Target], wanted: Quantization) -> None:
    for target in targets:
        again = target.source_type not in UNQUANTISED and target.source_type != target.type_name
        if again and not wanted.allow_requantize:
            raise UsageError(
                f"{target.name} is {target.source_type} already; to make it {target.type_name} loses quality "
                "twice.",
                hint="Convert the 16-bit model, or use --allow-requantize.",
            )


def _fitting(targets: Sequence[Target], importance: Importance, path: Path | None) -> Importance:
    """The matrix for these tensors. That of the embeddings never fits; it is left out, as llama.cpp does."""
    found = {}
    for target in targets:
        values = importance.get(target.name)
        if values is None or target.type_name == target.source_type:
            continue
        if values.size == target.ne[0] * math.prod(target.ne[2:]):
            found[target.name] = values
        elif "token_embd" not in target.name:
            raise UsageError(
                f"{path}: {values.size:,} values for {target.name}, which needs "
                f"{target.ne[0] * math.prod(target.ne[2:]):,}.",
                hint="The importance matrix belongs to another model.",
            )
    return found
