"""llama.cpp's own quantiser: which type it gives each tensor, and the bytes of rows in that type.

``llama_model_quantize`` itself writes a whole file, with its tensors in another order, on the disk that the
converted file needs too, and its input is mapped at full size. So it is asked for its decisions only (a dry
run over a header without data), and the rows are quantised by the function that it calls for every row,
``ggml_quantize_chunk``, as they stream through. Rows do not depend on each other: the bytes are the same.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, NativeError
from . import declarations as c
from .aborts import guarded
from .library import collected_complaints, collected_log, ggml, llama_cpp

# The names that llama-quantize takes, and enum llama_ftype (llama.h).
# Source: QUANT_OPTIONS in tools/quantize/quantize.cpp
FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_0": 2, "Q4_1": 3, "MXFP4_MOE": 38,
    "Q6_K": 18, "Q5_K": 17, "Q5_K_M": 17, "Q5_K_S": 16, "Q4_K": 15, "Q4_K_M": 15, "Q4_K_S": 14,
    "Q3_K": 12, "Q3_K_L": 13, "Q3_K_M": 12, "Q3_K_S": 11, "Q2_K": 10, "Q2_K_S": 21,
    "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_M": 27, "IQ3_S": 26, "IQ3_XS": 22, "IQ3_XXS": 23,
    "IQ2_M": 29, "IQ2_S": 28, "IQ2_XS": 20, "IQ2_XXS": 19, "IQ1_M": 31, "IQ1_S": 24,
    "TQ2_0": 37, "TQ1_0": 36, "Q2_0": 41, "Q1_0": 40,
}  # fmt: skip

# Types that are garbage without an importance matrix; Q2_K is one of them in a Q2_K_S file.
# Source: ``tensor_requires_imatrix`` in src/llama-quant.cpp
NEEDS_IMPORTANCE = frozenset(("iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_m", "iq1_s"))
_SPECIAL_TYPE = {"Q2_K_S": "q2_K"}

_LINE = re.compile(
    r"\[ *\d+/ *\d+\] (?P<name>.*?) +- \[[^\]]*\], type = +(?P<old>\S+), "
    r"size = +\S+ MiB(?: -> +\S+ MiB \((?P<new>\S+)\))?"
)


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """The type that llama.cpp gives every tensor by name. ``unaided`` are those that need an importance matrix."""

    types: dict[str, str]
    unaided: tuple[str, ...]


def choose_types(header: Path, file_type: str, *, has_importance: bool) -> TypeChoice:
    """Ask llama.cpp which types a file of ``file_type`` has, for a GGUF file whose data need not be there.

    Raises: NativeError with llama.cpp's reason if it cannot quantise this model.
    """
    module = llama_cpp()
    ggml()
    params = module.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.dry_run = params.allow_requantize = True
    one = ctypes.c_float(1)
    # of the matrix, only whether there is one changes the choice
    matrix = (module.llama_model_imatrix_data * 2)()
    matrix[0].name, matrix[0].data, matrix[0].size = b"any", ctypes.pointer(one), 1
    if has_importance:
        params.imatrix = matrix
    with collected_log() as text, collected_complaints() as cause:
        status = guarded(
            module.llama_model_quantize, os.fsencode(header), os.fsencode(header) + b".none", params
        )
        if status != 0:
            raise NativeError(f"llama.cpp cannot quantise this model to {file_type}: {cause()}")
        found = [match for match in map(_LINE.match, text().splitlines()) if match]
    types = {match["name"]: match["new"] or match["old"] for match in found}
    needed = NEEDS_IMPORTANCE | {_SPECIAL_TYPE.get(file_type, "")}
    unaided = tuple(
        match["name"]
        for match in found
        if match["new"] in needed
        and match["name"] not in ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
    )
    return TypeChoice(types, unaided)


def row_bytes(type_number: int, n_per_row: int) -> int:
    return int(ggml().ggml_row_size(type_number, n_per_row))


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Rows from one type to another on several threads."""

    n_threads: int

    def rows(
        self,
        data: memoryview,
        source_type: int,
        target_type: int,
        n_per_row: int,
        importance: NDArray[np.float32] | None,
    ) -> memoryview:
        """Whole rows of ``n_per_row`` values, all with the same ``importance`` (one value per column, or none).

        Raises: FormatError if a result is not valid (weights that are no numbers).
        """
        old_size, new_size = row_bytes(source_type, n_per_row), row_bytes(target_type, n_per_row)
        source = np.frombuffer(data, np.uint8).reshape(-1, old_size)
        target = np.empty((len(source), new_size), np.uint8)
        step = max(-(-len(source) // self.n_threads), 1)

        def part(start: int) -> None:
            rows = slice(start, start + step)
            _quantize(source[rows], target[rows], source_type, target_type, n_per_row, importance)

        guarded(_in_parallel, part, range(0, len(source), step))
        return target.reshape(-1).data


def _in_parallel(function: Callable[[int], None], arguments: Sequence[int]) -> None:
    """Call the function once with each argument, each in a thread; the first error is raised."""
    errors: list[BaseException] = []

    def run(argument: int) -> None:
        try:
            function(argument)
        except BaseException as error:  # it belongs to the caller, whatever it is
            errors.append(error)

    # daemons, unlike those of a pool: one that ggml aborts in never ends, and the process must
    threads = [threading.Thread(target=run, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _quantize(
    source: NDArray[np.uint8],
    target: NDArray[np.uint8],
    source_type: int,
    target_type: int,
    n_per_row: int,
    importance: NDArray[np.float32] | None,
) -> None:
    functions = ggml()
    values = source
    if source_type != c.GGML_TYPE_F32:
        to_float = functions.ggml_get_type_traits(source_type).contents.to_float
        if not to_float:
            raise NativeError(f"llama.cpp cannot read weights of type {source_type} back.")
        values = np.empty((len(source), n_per_row * 4), np.uint8)
        to_float(source.ctypes.data, values.ctypes.data, len(source) * n_per_row)
    weights = importance.ctypes.data if importance is not None else None
    functions.ggml_quantize_chunk(
        target_type, values.ctypes.data, target.ctypes.data, 0, len(source), n_per_row, weights
    )
    if not functions.ggml_validate_row_data(target_type, target.ctypes.data, target.nbytes):
        raise FormatError("quantising it gives weights that are no numbers")
