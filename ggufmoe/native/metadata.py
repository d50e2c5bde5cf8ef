"""GGUF headers through ggml's own parser: milliseconds, and the loader's own judgement of the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FormatError
from . import declarations as c
from .library import collected_complaints, ggml

Scalar: TypeAlias = "int | float | bool | str"


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """A metadata array that was not read: its element type (GGUF type number) and length."""

    element_type: int
    length: int


Value: TypeAlias = "Scalar | tuple[Scalar, ...] | ArrayInfo"


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One entry of the tensor table. ``ne`` is in ggml order; ``offset`` counts from the data section."""

    name: str
    type_number: int
    type_name: str
    ne: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the data section of one GGUF file. ``data_offset`` is in bytes from the start."""

    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, Value]
    tensors: tuple[RawTensor, ...]


# Arrays up to this length are values (layer lists); longer ones are vocabularies, which nobody here reads.
MAX_ARRAY = 4096

# A vocabulary of 260,000 tokens with its merges takes 15 MB, so most headers need the first read alone.
FIRST_READ = 16 << 20
MAX_HEADER_BYTES = 64 << 20


def read_start(path: Path, limit: int = MAX_HEADER_BYTES) -> bytes:
    """The first ``limit`` bytes of a file: all of its header, or nothing we would trust."""
    with path.open("rb") as file:
        return file.read(limit)


def read_header(source: Path | bytes) -> Header:
    """Parse the header of a GGUF file, or of the bytes of one.

    ggml never sees more than ``MAX_HEADER_BYTES``. Its parser believes a count up to what the size of the
    file allows: in a (sparse) file of 100 GB it would make room for 2^30 strings, and the process be gone.

    Raises: FormatError with ggml's reason (the caller knows the path and puts it in front); OSError if the
    file cannot be read.
    Source: ``gguf_init_from_reader`` in ggml/src/gguf.cpp.
    """
    if isinstance(source, bytes):
        return _parse(source)
    start = read_start(source, FIRST_READ)
    try:
        return _parse(start)
    except FormatError:
        if len(start) < FIRST_READ:
            raise
    return _parse(read_start(source))


def _parse(data: bytes) -> Header:
    functions = ggml()
    params = c.gguf_init_params(no_alloc=True, ctx=None)
    with collected_complaints() as cause:
        context = functions.gguf_init_from_buffer(data, len(data), params)
    if not context:
        raise FormatError(cause())
    try:
        return Header(
            version=functions.gguf_get_version(context),
            alignment=functions.gguf_get_alignment(context),
            data_offset=functions.gguf_get_data_offset(context),
            metadata=_read_metadata(functions, context),
            tensors=tuple(
                _read_tensor(functions, context, i) for i in range(functions.gguf_get_n_tensors(context))
            ),
        )
    finally:
        functions.gguf_free(context)


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def _read_metadata(functions: Any, context: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for i in range(functions.gguf_get_n_kv(context)):
        # Two keys can differ behind a NUL only; the loader (strcmp) takes the first of them, and so do we.
        metadata.setdefault(_text(functions.gguf_get_key(context, i)), _read_value(functions, context, i))
    return metadata


def _read_value(functions: Any, context: int, key: int) -> Value:
    kind = functions.gguf_get_kv_type(context, key)
    if kind == c.GGUF_TYPE_STRING:
        return _text(functions.gguf_get_val_str(context, key))
    if kind != c.GGUF_TYPE_ARRAY:
        return _scalar(c.GGUF_SCALARS[kind].from_address(functions.gguf_get_val_data(context, key)).value)
    element, length = functions.gguf_get_arr_type(context, key), functions.gguf_get_arr_n(context, key)
    if length > MAX_ARRAY:
        return ArrayInfo(element, length)
    if element == c.GGUF_TYPE_STRING:
        return tuple(_text(functions.gguf_get_arr_str(context, key, i)) for i in range(length))
    if length == 0:
        return ()
    array = (c.GGUF_SCALARS[element] * length).from_address(functions.gguf_get_arr_data(context, key))
    return tuple(_scalar(value) for value in array)


def _scalar(value: Any) -> Scalar:
    return value  # type: ignore[no-any-return]  # what a ctypes scalar's .value is: int, float or bool


def _read_tensor(functions: Any, context: int, index: int) -> RawTensor:
    kind = functions.gguf_get_tensor_type(context, index)
    ne: Any = functions.gguf_get_tensor_ne(context, index)
    dims = tuple(ne[: c.GGML_MAX_DIMS])
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]
    return RawTensor(
        name=_text(functions.gguf_get_tensor_name(context, index)),
        type_number=kind,
        type_name=_text(functions.ggml_type_name(kind)),
        ne=dims,
        offset=functions.gguf_get_tensor_offset(context, index),
        n_bytes=functions.gguf_get_tensor_size(context, index),
    )
