"""Headers through ggml's parser: every type of value, big vocabularies in no time, the same as gguf-py reads."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_models import (
    ARCHITECTURES,
    KV,
    RawTensor,
    gguf_header,
    kv_record,
    rewrite,
    tensor_record,
    write_raw,
    write_tiny_model,
)

from ggufmoe.errors import FormatError
from ggufmoe.gguf.model import open_model
from ggufmoe.native.library import ggml
from ggufmoe.native.metadata import FIRST_READ, MAX_ARRAY, ArrayInfo, read_header

N_VOCAB = 150_000

SCALARS: dict[str, tuple[Any, ...]] = {
    "uint8": (KV.UINT8, 0, 255),
    "int8": (KV.INT8, -128, 127),
    "uint16": (KV.UINT16, 0, 65535),
    "int16": (KV.INT16, -32768, 32767),
    "uint32": (KV.UINT32, 0, 2**32 - 1),
    "int32": (KV.INT32, -(2**31), 2**31 - 1),
    "float32": (KV.FLOAT32, -0.5, math.inf),
    "bool": (KV.BOOL, False, True),
    "uint64": (KV.UINT64, 0, 2**64 - 1),
    "int64": (KV.INT64, -(2**63), 2**63 - 1),
    "float64": (KV.FLOAT64, 0.1, -math.inf),
}


def value_of(content: Any, *kinds: Any) -> Any:
    """What ``read_header`` makes of one key with this content and these types."""
    [(name, value)] = read_header(gguf_header(1, kv_record("key", (content, *kinds)))).metadata.items()
    assert name == "key"
    return value


# Values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCALARS)
def test_scalars_keep_their_value_and_type(kind: str) -> None:
    number, *values = SCALARS[kind]
    for value in values:
        read = value_of(value, number)
        assert read == value
        assert type(read) is type(value)


def test_a_float_that_is_no_number_stays_one() -> None:
    assert math.isnan(value_of(math.nan, KV.FLOAT32))


@pytest.mark.parametrize("text", ["", "plain", "歪🙂é", "two\nlines\tand a tab", "x" * 100_000])
def test_strings(text: str) -> None:
    assert value_of(text, KV.STRING) == text


def test_bytes_that_are_no_text_are_replaced() -> None:
    record = kv_record("key", "ab").replace(b"ab", b"a\xff")
    assert read_header(gguf_header(1, record)).metadata == {"key": "a\ufffd"}


@pytest.mark.parametrize("kind", SCALARS)
def test_arrays_are_tuples_of_their_scalars(kind: str) -> None:
    number, *values = SCALARS[kind]
    read = value_of(values * 3, KV.ARRAY, number)
    assert read == tuple(values * 3)
    assert {type(value) for value in read} == {type(values[0])}


def test_arrays_of_strings() -> None:
    assert value_of(["", "a", "歪🙂"], KV.ARRAY, KV.STRING) == ("", "a", "歪🙂")


@pytest.mark.parametrize("element", [KV.STRING, KV.UINT8, KV.INT32, KV.FLOAT64, KV.BOOL])
def test_empty_arrays_are_empty_tuples(element: KV) -> None:
    assert value_of([], KV.ARRAY, element) == ()


@pytest.mark.parametrize(("element", "item"), [(KV.STRING, "t"), (KV.INT32, 7), (KV.BOOL, True)])
def test_only_short_arrays_are_read(element: KV, item: Any) -> None:
    assert value_of([item] * MAX_ARRAY, KV.ARRAY, element) == (item,) * MAX_ARRAY
    assert value_of([item] * (MAX_ARRAY + 1), KV.ARRAY, element) == ArrayInfo(int(element), MAX_ARRAY + 1)


def test_no_keys_and_no_tensors() -> None:
    header = read_header(gguf_header(0))
    assert (header.version, header.alignment, header.metadata, header.tensors) == (3, 32, {}, ())


# Tensors -------------------------------------------------------------------------------------------------


def test_tensors_have_ggmls_order_of_dimensions_and_offsets_into_the_data(tmp_path: Path) -> None:
    stack = RawTensor("blk.0.ffn_up_exps.weight", 8, (32, 2, 4), bytes(range(34)) * 8)  # Q8_0
    vector = RawTensor("v", 0, (3,), bytes(12))
    path = write_raw(tmp_path / "m.gguf", {"general.alignment": 64}, [vector, stack], alignment=64)
    header = read_header(path)
    first, second = header.tensors
    assert (first.name, first.type_name, first.ne, first.offset, first.n_bytes) == ("v", "f32", (3,), 0, 12)
    assert (second.type_number, second.type_name, second.ne) == (8, "q8_0", (32, 2, 4))
    assert (second.offset, second.n_bytes, header.alignment) == (64, 272, 64)
    start = header.data_offset + second.offset
    assert path.read_bytes()[start : start + second.n_bytes] == stack.data


@pytest.mark.parametrize(
    ("stored", "ne"),
    [((32, 1, 1, 1), (32,)), ((1, 1), (1,)), ((32, 1, 2), (32, 1, 2)), ((32, 2, 1), (32, 2))],
)
def test_dimensions_of_one_at_the_end_are_not_told(stored: tuple[int, ...], ne: tuple[int, ...]) -> None:
    data = gguf_header(0, tensor_record("t", stored, 0, 0), n_tensors=1) + bytes(512)
    assert read_header(data).tensors[0].ne == ne


# Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"text, and no model at all",
        gguf_header(1, kv_record("general.alignment", 48)),
        gguf_header(2, kv_record("a", 1)),
        gguf_header(0, version=4),
        gguf_header(0, n_tensors=1),
    ],
)
def test_what_ggml_refuses_is_a_format_error_with_its_reason(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"\w \w") as raised:
        read_header(data)
    assert not str(raised.value).startswith("gguf_")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "absent.gguf")


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(gguf_header(2, kv_record("long", "x" * FIRST_READ) + kv_record("last", 7)))
    metadata = read_header(path).metadata
    assert len(str(metadata["long"])) == FIRST_READ and metadata["last"] == 7


# Speed ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with as many tokens and merges as Qwen's."""
    folder = tmp_path_factory.mktemp("models")
    small = write_tiny_model(folder / "small.gguf", "qwen3moe")
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token{number}" for number in range(N_VOCAB)],
        "tokenizer.ggml.token_type": ([1] * N_VOCAB, KV.ARRAY, KV.INT32),
        "tokenizer.ggml.merges": [f"to ken{number}" for number in range(N_VOCAB)],
    }
    return rewrite(small, folder / "big.gguf", keys=keys)


def test_a_big_vocabulary_costs_no_time(big_vocabulary: Path) -> None:
    ggml()
    times = []
    for _ in range(3):
        started = time.process_time()
        model = open_model(big_vocabulary)
        times.append(time.process_time() - started)
        assert model.metadata["tokenizer.ggml.tokens"] == ArrayInfo(int(KV.STRING), N_VOCAB)
        assert model.metadata["tokenizer.ggml.merges"] == ArrayInfo(int(KV.STRING), N_VOCAB)
    assert min(times) < 0.3


# Against gguf-py -----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "llama-dense"])
@pytest.mark.parametrize("text", [False, True], ids=["nameless", "text"])
def test_the_same_as_gguf_py(arch: str, text: bool, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", arch, text=text)
    header, reader = read_header(path), gguf.GGUFReader(path)
    theirs = {
        name: plain(field.contents())
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")  # the reader's own names for the header
    }
    assert header.metadata == theirs
    assert (header.version, header.alignment) == (3, reader.alignment)
    assert header.data_offset == reader.data_offset
    assert [
        (t.name, t.type_number, t.ne, header.data_offset + t.offset, t.n_bytes) for t in header.tensors
    ] == [
        (t.name, int(t.tensor_type), tuple(int(n) for n in t.shape), int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    ]
