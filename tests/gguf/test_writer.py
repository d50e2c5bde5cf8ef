"""Headers that are written: golden bytes, and every key as it was read."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import KV, read_raw, rewrite, write_tiny_model

from ggufmoe.gguf.model import open_model
from ggufmoe.gguf.targets import read_source
from ggufmoe.gguf.writer import (
    F32,
    STRING,
    U16,
    U32,
    U64,
    KeyRecord,
    TableRow,
    data_offsets,
    header_data,
    key_record,
    shape_data,
    with_key,
    without_keys,
)
from ggufmoe.native.metadata import read_header

EVERY_KIND = {
    "t.u8": (255, KV.UINT8),
    "t.i8": (-128, KV.INT8),
    "t.u16": (65535, KV.UINT16),
    "t.i16": (-32768, KV.INT16),
    "t.u32": (2**32 - 1, KV.UINT32),
    "t.i32": (-(2**31), KV.INT32),
    "t.f32": (0.5, KV.FLOAT32),
    "t.bool": (True, KV.BOOL),
    "t.string": ("", KV.STRING),
    "t.u64": (2**64 - 1, KV.UINT64),
    "t.i64": (-(2**63), KV.INT64),
    "t.f64": (1e300, KV.FLOAT64),
    "t.no_strings": ([], KV.ARRAY, KV.STRING),
    "t.no_numbers": ([], KV.ARRAY, KV.INT32),
    "t.strings": (["", "a\nb", "歪"], KV.ARRAY, KV.STRING),
    "t.bools": ([True, False], KV.ARRAY, KV.BOOL),
}


def test_golden_bytes() -> None:
    header = header_data(
        [key_record("a", U32, 7), key_record("b", STRING, ["x", ""], array=True)],
        [TableRow(shape_data(b"t", (32, 2)), 0, 256), TableRow(shape_data(b"u", (1,)), 24, 1)],
        64,
    )
    expected = bytes.fromhex(
        "47475546 03000000 0200000000000000 0200000000000000"
        "0100000000000000 61 04000000 07000000"
        "0100000000000000 62 09000000 08000000 0200000000000000"
        "0100000000000000 78 0000000000000000"
        "0100000000000000 74 02000000 2000000000000000 0200000000000000 00000000 0000000000000000"
        "0100000000000000 75 01000000 0100000000000000 18000000 0001000000000000"
    )
    assert header == expected.ljust(192, b"\0")


def test_records_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base.gguf", "qwen3moe", n_layer=1, n_expert=4)
    path = rewrite(base, tmp_path / "keys.gguf", keys=EVERY_KIND)
    source = read_source(open_model(path))
    model = open_model(path)
    rows: list[TableRow] = []
    for tensor in model.tensors:
        number = read_header(path).tensors[len(rows)].type_number
        rows.append(TableRow(source.shapes[tensor.name], number, tensor.n_bytes))
    header = header_data(source.keys, rows, 32)
    assert header == path.read_bytes()[: len(header)]
    values, _ = read_raw(path)
    for name, value in EVERY_KIND.items():
        assert values[name][0] == value[0], name


def test_a_key_is_replaced_in_its_place_or_added_at_the_end() -> None:
    keys = [KeyRecord(name, name) for name in (b"a", b"b", b"c")]
    new = KeyRecord(b"b", b"new")
    assert [key.data for key in with_key(keys, new)] == [b"a", b"new", b"c"]
    assert [key.data for key in with_key(keys[:1], new)] == [b"a", b"new"]
    assert without_keys(keys, b"a", prefix=b"c") == [keys[1]]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    keys=st.dictionaries(
        NAMES.filter(lambda name: name != "general.alignment"),
        st.one_of(
            st.tuples(st.just(U32), st.integers(0, 2**32 - 1)),
            st.tuples(st.just(U64), st.integers(0, 2**64 - 1)),
            st.tuples(st.just(F32), st.floats(width=32, allow_nan=False)),
            st.tuples(st.just(STRING), st.text(st.characters(codec="utf-8", exclude_characters="\0"))),
        ),
        max_size=6,
    ),
    numbers=st.lists(st.integers(0, 65535), max_size=20),
    tensors=st.lists(st.integers(1, 500), max_size=8),
    power=st.integers(5, 12),
)
def test_what_is_written_is_read_by_ggml(
    keys: dict[str, tuple[int, float | str]], numbers: list[int], tensors: list[int], power: int
) -> None:
    alignment = 1 << power
    records = [key_record(name, kind, value) for name, (kind, value) in keys.items()]
    records.append(key_record("n", U16, numbers, array=True))
    records = with_key(records, key_record("general.alignment", U32, alignment))
    rows = [TableRow(shape_data(b"t%d" % i, (n,)), 0, 4 * n) for i, n in enumerate(tensors)]
    if "n" in keys:  # a name twice is no header
        return
    data = header_data(records, rows, alignment)
    header = read_header(data + bytes(alignment))
    assert header.alignment == alignment
    assert header.metadata["n"] == tuple(numbers)
    assert {name: header.metadata[name] for name in keys} == {
        name: value for name, (_, value) in keys.items()
    }
    assert [tensor.offset for tensor in header.tensors] == data_offsets(rows, alignment)[:-1]
    assert not rows or header.data_offset == len(data)


def test_the_record_of_a_shape() -> None:
    assert shape_data("é".encode(), (3, 4)) == struct.pack("<Q2sI2Q", 2, "é".encode(), 2, 3, 4)
