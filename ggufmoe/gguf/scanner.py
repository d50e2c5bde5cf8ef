"""A walk over the bytes of a GGUF header that reads nothing but lengths.

ggml's parser judges a header; this one finds what that parser does not tell: where in the bytes a tensor's
type stands, and what exactly was being read when the bytes ran out. It allocates nothing on a claim.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import FormatError

# enum gguf_type in ggml/include/gguf.h -> bytes of one value; strings and arrays have a length of their own
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
# Far above any vocabulary with its merges (the largest has 800,000); it bounds the time of the walk.
MAX_STRINGS = 1 << 21

_U32, _U64, _TYPE_AND_OFFSET = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key: its name as it is spelt, and where its record (name, type and value) lies in the header."""

    name: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One entry of the tensor table: its name, its type, where it begins, and where its type stands.

    Name and dimensions lie between ``start`` and ``type_position``; type and offset take 12 bytes from there.
    """

    name: str
    type_number: int
    start: int
    type_position: int


@dataclass(frozen=True, slots=True)
class KeyScan:
    """The keys of a header, where they end, and how many tensors the header claims."""

    keys: tuple[KeyEntry, ...]
    end: int
    n_tensors: int


@dataclass(frozen=True, slots=True)
class Scan:
    """The keys and the tensor table of a header, and where the table ends."""

    keys: tuple[KeyEntry, ...]
    tensors: tuple[TensorEntry, ...]
    end: int


def scan_header(data: bytes, *, end_of_data: str = "the file ends") -> Scan:
    """Walk over ``data``, which begins with the header of a GGUF file of version 2 or 3, little-endian.

    Raises: FormatError that names the key or tensor at which the bytes run out or make no sense; its text
    begins with ``end_of_data``.
    """
    found = scan_keys(data, end_of_data=end_of_data)
    cursor = _Cursor(data, end_of_data)
    cursor.position = found.end
    return Scan(found.keys, tuple(_tensors(cursor, found.n_tensors)), cursor.position)


def scan_keys(data: bytes, *, end_of_data: str = "the file ends") -> KeyScan:
    """The first half of ``scan_header``: the keys, and nothing of the tensor table."""
    cursor = _Cursor(data, end_of_data)
    cursor.skip(8, "its version")
    n_tensors, n_keys = cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    keys = []
    for number in range(n_keys):
        start = cursor.position
        key = cursor.text(f"the name of key {number + 1} of {n_keys:,}")
        name_end = cursor.position
        _skip_value(cursor, f"key {key!r}")
        keys.append(KeyEntry(data[start + 8 : name_end], start, cursor.position))
    return KeyScan(tuple(keys), cursor.position, n_tensors)


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
        except (struct.error, OverflowError):
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


def _tensors(cursor: _Cursor, count: int) -> Iterator[TensorEntry]:
    """The tensor table. A tight loop too: a file may claim a million entries, and have them."""
    data, position = cursor.data, cursor.position
    for number in range(count):
        start = position
        try:
            (length,) = _U64.unpack_from(data, position)
            name, position = data[position + 8 : position + 8 + length], position + 8 + length
            (n_dims,) = _U32.unpack_from(data, position)
            type_position = position + 4 + 8 * n_dims
            kind, _offset = _TYPE_AND_OFFSET.unpack_from(data, type_position)
        except (struct.error, OverflowError) as error:
            where = f"entry {number + 1:,} of {count:,} of its tensor table"
            raise FormatError(f"{cursor.end_of_data} before the end of {where}") from error
        position = cursor.position = type_position + _TYPE_AND_OFFSET.size
        yield TensorEntry(name.decode("utf-8", "replace"), kind, start, type_position)
