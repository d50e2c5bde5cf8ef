"""Damaged, foreign and malicious files: each is refused by name, at once, without memory."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import (
    KV,
    gguf_header,
    kv_array_header,
    kv_array_of_strings_header,
    kv_record,
    kv_string,
    kv_string_header,
    kv_u32,
    rewrite,
    tensor_record,
    write_tiny_model,
)

from ggufmoe.errors import FormatError, GgufMoeError
from ggufmoe.gguf.badblocks import find_bad_blocks
from ggufmoe.gguf.checks import check_runnable
from ggufmoe.gguf.model import open_model

F32 = 0


@dataclass(frozen=True)
class Hostile:
    """What a file holds, and what the refusal must say. ``n_bytes``: grown to this size without data."""

    data: bytes
    says: str
    n_bytes: int = 0


def one_tensor(
    name: str = "a", ne: tuple[int, ...] = (32,), type: int = F32, n_dims: int | None = None
) -> bytes:
    return gguf_header(0, tensor_record(name, ne, type, 0, n_dims=n_dims), n_tensors=1) + bytes(256)


def aligned(value: object) -> bytes:
    body = kv_record("general.alignment", value) + tensor_record("a", (32,), F32, 0)
    return gguf_header(1, body, n_tensors=1) + bytes(256)


HOSTILE = {
    "empty": Hostile(b"", "not a GGUF file"),
    "text": Hostile(b"once upon a time, there was a model", "not a GGUF file"),
    "magic only": Hostile(b"GGUF", "too short.*4 bytes"),
    "ends after the version": Hostile(b"GGUF\x03\0\0\0", "too short.*8 bytes"),
    "git lfs pointer": Hostile(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS pointer"
    ),
    "web page": Hostile(b"<!DOCTYPE html><html>Access denied</html>", "web page"),
    "ggml": Hostile(b"tjgg" + bytes(40), "too old"),
    "version 0": Hostile(gguf_header(0, version=0), "version 0 is too old"),
    "version 1": Hostile(gguf_header(0, version=1), "version 1 is too old"),
    "version 4": Hostile(gguf_header(0, version=4), "version 4 is newer than we know"),
    "big-endian": Hostile(gguf_header(0, byte_order=">"), "another byte order"),
    "2^64-1 keys": Hostile(gguf_header(2**64 - 1), "claims 18,446,744,073,709,551,615 keys"),
    "2^40 tensors": Hostile(gguf_header(0, n_tensors=2**40), "claims 1,099,511,627,776 tensors"),
    "one key more than there is": Hostile(
        gguf_header(2, kv_u32("a", 1)), "ends before the name of key 2 of 2"
    ),
    "one tensor more than there is": Hostile(
        gguf_header(0, tensor_record("a", (32,), F32, 0), n_tensors=2), "ends before .* entry 2 of 2"
    ),
    "empty key": Hostile(gguf_header(1, kv_u32("", 1)), "key 0 is empty"),
    "same key twice": Hostile(gguf_header(2, kv_u32("a", 1) + kv_u32("a", 2)), "duplicate key 'a'"),
    "2^29 strings": Hostile(
        gguf_header(1, kv_array_of_strings_header("a", 2**29)), "'a' claims 536,870,912 str"
    ),
    "2^29 numbers": Hostile(
        gguf_header(1, kv_array_header("a", KV.FLOAT64, 2**29)), "the 536,870,912 values that key 'a' claims"
    ),
    "2^64-1 numbers": Hostile(
        gguf_header(1, kv_array_header("a", KV.UINT8, 2**64 - 1)), "that key 'a' claims"
    ),
    "string of 2^29": Hostile(
        gguf_header(1, kv_string_header("a", 2**29)), "536,870,912 bytes .*key 'a' claims"
    ),
    "string of 2^64-1": Hostile(gguf_header(1, kv_string_header("a", 2**64 - 1)), "that key 'a' claims"),
    "key name of 2^40": Hostile(gguf_header(1, struct.pack("<Q", 2**40)), "the name of key 1 of 1 claims"),
    "array of arrays": Hostile(gguf_header(1, kv_array_header("a", KV.ARRAY, 1) + bytes(99)), "'a'.*type 9"),
    "unknown value type": Hostile(
        gguf_header(1, kv_string("a", "").replace(b"a\x08", b"a\x63") + bytes(99)), "'a'.*type 99"
    ),
    "alignment i32": Hostile(aligned((32, KV.INT32)), "general.alignment' must be of type u32 but is i32"),
    "alignment string": Hostile(aligned("32"), "general.alignment' must be of type u32 but is str"),
    "alignment 0": Hostile(aligned(0), "alignment 0 is not a power of 2"),
    "alignment 48": Hostile(aligned(48), "alignment 48 is not a power of 2"),
    "alignment 2^30": Hostile(aligned(2**30), "general.alignment is wrong"),
    "alignment 2^30, large file": Hostile(aligned(2**30), "general.alignment is wrong", n_bytes=2**31),
    "alignment 2^30, no tensor": Hostile(
        gguf_header(1, kv_u32("general.alignment", 2**30)), "general.alignment is 1,073,741,824 bytes"
    ),
    "5 dimensions": Hostile(one_tensor(ne=(1, 1, 1, 1, 1)), "'a' has invalid number of dimensions: 5 > 4"),
    "10^6 dimensions": Hostile(one_tensor(n_dims=10**6), "'a' has invalid number of dimensions: 1000000"),
    "negative dimension": Hostile(one_tensor(ne=(2**64 - 32,)), "'a' dimension 0.*-32 < 0"),
    "2^64+1 elements": Hostile(one_tensor(ne=(274177, 67280421310721)), "'a'.*overflow"),
    "2^62 blocks of 8": Hostile(one_tensor(ne=(2**62,)), "'a'"),
    "half a block": Hostile(one_tensor(ne=(33,), type=8), "'a' .*33 elements per row"),
    "type 5": Hostile(one_tensor(type=5), "'a' of type 5"),
    "type 999": Hostile(one_tensor(type=999), "'a' has invalid ggml type 999"),
    "name of 70": Hostile(one_tensor("n" * 70), "tensor name 0 is too long: 70"),
    "same tensor twice": Hostile(
        gguf_header(0, tensor_record("a", (32,), F32, 0) + tensor_record("a", (32,), F32, 128), n_tensors=2)
        + bytes(512),
        "duplicate tensor name 'a'",
    ),
    "same tensor twice but for a NUL": Hostile(
        gguf_header(0, tensor_record("a", (32,), F32, 0) + tensor_record("a\0", (32,), F32, 128), n_tensors=2)
        + bytes(512),
        "two tensors have the same name",
    ),
    "overlapping tensors": Hostile(
        gguf_header(0, tensor_record("a", (32,), F32, 0) + tensor_record("b", (32,), F32, 0), n_tensors=2)
        + bytes(512),
        "'b' has offset 0, expected 128",
    ),
    "data cut short": Hostile(one_tensor(ne=(2**20,)), "cut short: it has .* bytes"),
    "name with a newline": Hostile(one_tensor("x\ny", type=5), "'x y' of type 5"),
    # A sparse file is as large as it says, so ggml's own limit (the rest of the file) stops nothing.
    "100 GB, 2^30 strings": Hostile(
        gguf_header(1, kv_array_of_strings_header("a", 2**30)), "key 'a' claims 1,073,741,824", n_bytes=10**11
    ),
    "100 GB, 2^23 strings": Hostile(
        gguf_header(1, kv_array_of_strings_header("a", 2**23)), "key 'a' claims 8,388,608", n_bytes=10**11
    ),
    "100 GB, string of 2^30": Hostile(
        gguf_header(1, kv_string_header("a", 2**30)), "64 MiB end before the 1,073,741,824", n_bytes=10**11
    ),
    "100 GB, 2^30 numbers": Hostile(
        gguf_header(1, kv_array_header("a", KV.UINT64, 2**30)), "64 MiB end before", n_bytes=10**11
    ),
    "100 GB, 2^16 keys": Hostile(gguf_header(2**16), "key 0 is empty", n_bytes=10**11),
    "100 GB, 2^20 tensors": Hostile(
        gguf_header(0, n_tensors=2**20), "duplicate tensor name ''", n_bytes=10**11
    ),
}

# One process opens every file, with less memory than many of them claim.
CHILD = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (2_000_000 << 10,) * 2)
from pathlib import Path
from ggufmoe.errors import FormatError
from ggufmoe.gguf.model import open_model
for name in sys.argv[1:]:
    start, text = time.perf_counter(), "opened"
    try:
        open_model(name)
    except FormatError as error:
        text = str(error)
    print(json.dumps([name, text, time.perf_counter() - start]), flush=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each hostile file, what opening it said and how long it took; ``memory`` is the child's peak."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = {name: folder / f"{number}.gguf" for number, name in enumerate(HOSTILE)}
    for name, path in paths.items():
        path.write_bytes(HOSTILE[name].data)
        if HOSTILE[name].n_bytes:
            os.truncate(path, HOSTILE[name].n_bytes)
    command = [sys.executable, "-c", CHILD, *map(str, paths.values())]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, f"{child.stdout[-300:]}\n{child.stderr[-3000:]}"
    *lines, memory = child.stdout.splitlines()
    results = zip(paths.items(), map(json.loads, lines), strict=True)
    return {
        **{name: (text, seconds, str(path)) for (name, path), (_, text, seconds) in results},
        "memory": int(memory),
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_its_fault(refusals: dict[str, Any], name: str) -> None:
    text, seconds, path = refusals[name]
    assert text.startswith(f"{path}: ")
    assert re.search(HOSTILE[name].says, text), text
    assert "\n" not in text
    # the first call also loads the library; a busy machine gets some room
    assert seconds < 3


def test_hostile_files_take_no_memory(refusals: dict[str, Any]) -> None:
    assert refusals["memory"] < 1 << 30


def test_a_refusal_takes_no_time(refusals: dict[str, Any]) -> None:
    seconds = sorted(refusals[name][1] for name in HOSTILE)
    assert seconds[len(seconds) // 2] < 0.02


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("good") / "good.gguf", "qwen3moe", n_layer=1, n_expert=4)


def test_version_2_is_read(good: Path, tmp_path: Path) -> None:
    # versions 2 and 3 differ in nothing but that 3 may be big-endian
    path = tmp_path / "v2.gguf"
    path.write_bytes(good.read_bytes().replace(b"GGUF\x03", b"GGUF\x02", 1))
    assert open_model(path).tensors == open_model(good).tensors


@pytest.mark.parametrize("where", ["in the header", "in the data"])
def test_a_file_cut_anywhere_is_refused(good: Path, tmp_path: Path, where: str) -> None:
    model = open_model(good)
    data_start = model.tensors[0].offset
    end = model.tensors[-1].offset + model.tensors[-1].n_bytes
    cuts = range(data_start, -1, -1) if where == "in the header" else range(end - 1, data_start, -1000)
    path = tmp_path / "cut.gguf"
    path.write_bytes(good.read_bytes())
    for cut in cuts:  # from long to short, so that each is one truncation
        os.truncate(path, cut)
        with pytest.raises(FormatError, match=r"cut short|the file ends before|too short|not a GGUF file"):
            open_model(path)


def test_padding_behind_the_last_tensor_may_be_missing(good: Path, tmp_path: Path) -> None:
    last = open_model(good).tensors[-1]
    path = tmp_path / "unpadded.gguf"
    path.write_bytes(good.read_bytes()[: last.offset + last.n_bytes])
    assert len(open_model(path).tensors) == len(open_model(good).tensors)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(FormatError, match="not a file"):
        open_model(path)


def test_a_header_larger_than_the_first_read_is_read(good: Path, tmp_path: Path) -> None:
    big = rewrite(good, tmp_path / "big.gguf", keys={"tokenizer.chat_template": "x" * (17 << 20)})
    assert len(open_model(big).metadata["tokenizer.chat_template"]) == 17 << 20  # type: ignore[arg-type]


def test_of_two_keys_that_c_cannot_tell_apart_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "nul.gguf"
    path.write_bytes(gguf_header(2, kv_u32("x.y", 1) + kv_u32("x.y\0z", 2)))
    assert open_model(path).metadata == {"x.y": 1}


@settings(
    max_examples=500,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_do_more_than_an_error(good: Path, changes: list[tuple[int, int]]) -> None:
    whole = good.read_bytes()
    data_start = open_model(good).tensors[0].offset
    data = bytearray(whole)
    for position, value in changes:
        data[position % data_start] = value
    path = good.with_name("changed.gguf")
    path.write_bytes(data)
    try:
        model = open_model(path)
        assert model.n_bytes <= len(whole)
        assert model.name is not None
        assert len(model.dense_tensors) <= len(model.tensors)
        assert all(bad.n_bad_blocks > 0 for bad in find_bad_blocks(model))
        check_runnable(model)
    except GgufMoeError as error:
        assert str(path) in str(error)
