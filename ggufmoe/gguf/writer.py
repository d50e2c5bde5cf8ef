"""GGUF headers, written: keys as the records they were read as, so that nothing about them changes.

gguf-py's writer refuses empty arrays and makes every key anew. A record here is the bytes of a key's name,
type and value, taken from a file or made by ``key_record``.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little-endian)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VERSION = 3
ALIGNMENT_KEY = b"general.alignment"
DEFAULT_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT

# enum gguf_type (gguf.h)
U16, U32, F32, STRING, ARRAY, U64 = 2, 4, 6, 8, 9, 10
_SCALARS = {U16: "<H", U32: "<I", F32: "<f", U64: "<Q"}

Element = int | float | str


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key. ``data`` is the whole record: name, type and value."""

    name: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class TableRow:
    """One tensor of a table to be written. ``shape_data`` is its record up to the type: name and dimensions."""

    shape_data: bytes
    type_number: int
    n_bytes: int


def padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def string_data(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key_record(name: str, kind: int, value: Element | Sequence[Element], *, array: bool = False) -> KeyRecord:
    """A key of our own. ``kind`` is the type of the value, or of the elements of an ``array``."""
    if array:
        elements = list(value) if not isinstance(value, (int, float)) else [value]
        content = struct.pack("<IQ", kind, len(elements)) + b"".join(_value(kind, e) for e in elements)
    else:
        assert isinstance(value, (int, float, str))
        content = _value(kind, value)
    raw = name.encode()
    return KeyRecord(raw, string_data(raw) + struct.pack("<I", ARRAY if array else kind) + content)


def _value(kind: int, value: Element) -> bytes:
    if kind == STRING:
        assert isinstance(value, str)
        return string_data(value.encode("utf-8", "surrogateescape"))
    return struct.pack(_SCALARS[kind], value)


def with_key(keys: Sequence[KeyRecord], new: KeyRecord) -> list[KeyRecord]:
    """``keys`` with ``new`` in the place of the key of its name, or at the end."""
    if any(key.name == new.name for key in keys):
        return [new if key.name == new.name else key for key in keys]
    return [*keys, new]


def without_keys(keys: Iterable[KeyRecord], *names: bytes, prefix: bytes | None = None) -> list[KeyRecord]:
    return [
        key
        for key in keys
        if key.name not in names and not (prefix is not None and key.name.startswith(prefix))
    ]


def shape_data(name: bytes, ne: Sequence[int]) -> bytes:
    """The record of a tensor up to its type."""
    return string_data(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne)


def data_offsets(rows: Sequence[TableRow], alignment: int) -> list[int]:
    """Where each tensor begins in the data section, and at the end the size of that section."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + padded(row.n_bytes, alignment))
    return offsets


def table_data(rows: Sequence[TableRow], alignment: int) -> bytes:
    """The tensor table."""
    offsets = data_offsets(rows, alignment)
    return b"".join(
        row.shape_data + struct.pack("<IQ", row.type_number, offset)
        for row, offset in zip(rows, offsets, strict=False)
    )


def header_data(keys: Sequence[KeyRecord], rows: Sequence[TableRow], alignment: int) -> bytes:
    """A whole header with its padding: the data section begins right behind it.

    Whether ``keys`` state ``alignment`` is the caller's business.
    """
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(rows), len(keys)), *(key.data for key in keys)]
    header = b"".join(parts) + table_data(rows, alignment)
    return header.ljust(padded(len(header), alignment), b"\0")
