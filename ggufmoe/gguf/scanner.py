"""A walk over the bytes of a GGUF header that reads nothing but lengths.

ggml's parser judges a header; this one finds what that parser does not tell: where in the bytes a tensor's
type stands, and what exactly was being read when the bytes ran out. It allocates nothing that a header claims.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import FormatError

# enum gguf_type in ggml/include/gguf.h -> bytes of one value; strings and arrays have a length of their own
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
MAX_DIMS = 4  # GGML_MAX_DIMS
# Far above any vocabulary with its merges (the largest has 800,000); it bounds the time of the walk.
MAX_STRINGS = 1 << 21

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One entry of the tensor table: its name, its type, and where in the header the type stands."""

    name: str
    type_number: int
    type_position: int


@dataclass(frozen=True, slots=True)
class Scan:
    """The tensor table of a header, and where the table ends."""

    tensors: tuple[TensorEntry, ...]
    end: int


def scan_header(data: bytes, *, end_of_data: str = "the file ends") -> Scan:
    """Walk over ``data``, which begins with the header of a GGUF file of version 2 or 3, little-endian.

    Raises: FormatError that names the key or tensor at which the bytes run out or make no sense; its text
    begins with ``end_of_data``.
    """
    cursor = _Cursor(data, end_of_data)
    cursor.skip(8, "its version")
    n_tensors, n_keys = cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    for number in range(n_keys):
        key = cursor.text(f"the name of key {number + 1} of {n_keys:,}")
        _skip_value(cursor, f"key {key!r}")
    tensors = tuple(_tensor(cursor, f"entry {number + 1} of {n_tensors:,}") for number in range(n_tensors))
    return Scan(tensors, cursor.position)


class _Cursor:
    def __init__(self, data: bytes, end_of_data: str) -> None:
        self.data, self.position, self.end_of_data = data, 0, end_of_data

    def skip(self, n_bytes: int, what: str) -> int:
        """Go on by ``n_bytes``. Returns: where they begin."""
        start = self.position
        if n_bytes > len(self.data) - start:
            raise FormatError(f"{self.end_of_data} before {what}")
        self.position = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8, what))[0])

    def text(self, what: str) -> str:
        length = self.u64(what)
        start = self.skip(length, f"the {length:,} bytes that {what} claims")
        return self.data[start : start + min(length, 80)].decode("utf-8", "replace")

    def skip_strings(self, count: int, what: str) -> None:
        """The tight loop of the walk: every string of a vocabulary."""
        if count > MAX_STRINGS:
            raise FormatError(f"{what} claims {count:,} strings, more than any vocabulary has")
        data, position, length_at = self.data, self.position, _U64.unpack_from
        try:
            for _ in range(count):
                position += 8 + length_at(data, position)[0]
        except struct.error:
            position = len(data) + 1
        if position > len(data):
            raise FormatError(f"{self.end_of_data} before the {count:,} strings that {what} claims")
        self.position = position


def _skip_value(cursor: _Cursor, what: str) -> None:
    kind = cursor.u32(f"the type of {what}")
    if kind == STRING:
        length = cursor.u64(f"the length of {what}")
        cursor.skip(length, f"the {length:,} bytes of text that {what} claims")
    elif kind == ARRAY:
        element = cursor.u32(f"the type of {what}")
        count = cursor.u64(f"the length of {what}")
        if element == STRING:
            cursor.skip_strings(count, what)
        else:
            cursor.skip(count * _scalar_bytes(element, what), f"the {count:,} values that {what} claims")
    else:
        cursor.skip(_scalar_bytes(kind, what), f"the value of {what}")


def _scalar_bytes(kind: int, what: str) -> int:
    if kind not in SCALAR_BYTES:
        raise FormatError(f"{what} has the unknown type {kind}")
    return SCALAR_BYTES[kind]


def _tensor(cursor: _Cursor, entry: str) -> TensorEntry:
    name = cursor.text(f"the tensor name in {entry}")
    what = f"tensor {name!r}"
    n_dims = cursor.u32(f"the dimensions of {what}")
    if n_dims > MAX_DIMS:
        raise FormatError(f"{what} claims {n_dims:,} dimensions, the limit is {MAX_DIMS}")
    cursor.skip(8 * n_dims, f"the dimensions of {what}")
    kind = cursor.u32(f"the type of {what}")
    type_position = cursor.position - 4
    cursor.skip(8, f"the offset of {what}")
    return TensorEntry(name, kind, type_position)
