"""What can be converted: shards, old layouts, files of Ollama's; and what is refused by its fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversion import logits, profile_for, with_bad_block
from tiny_models import (
    RawTensor,
    gguf_header,
    kv_string,
    read_raw,
    rewrite,
    split_shards,
    tensor_record,
    to_per_expert_layout,
    write_tiny_model,
)

from ggufmoe import UsageError
from ggufmoe.errors import FormatError
from ggufmoe.gguf.model import open_model
from ggufmoe.run.convert import ConvertOptions, convert, export


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf", "qwen3moe", n_expert=4)


# Several files, old files, Ollama's files ---------------------------------------------------------------------


@pytest.fixture
def shards(tiny: Path, tmp_path: Path) -> list[Path]:
    return split_shards(tiny, tmp_path, -(-len(open_model(tiny).tensors) // 3))


@pytest.mark.parametrize("named", [0, 1, 2, None])
def test_shards_are_joined(shards: list[Path], tiny: Path, tmp_path: Path, named: int | None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    result = convert(tmp_path if named is None else shards[named], out / "b.gguf")
    assert len(result.source_hashes) == 3
    export(out / "b.gguf", out / "e.gguf")
    assert (out / "e.gguf").read_bytes() == tiny.read_bytes()
    assert np.array_equal(logits(out / "b.gguf"), logits(tiny))


def test_no_split_key_is_left_and_any_name_will_do(shards: list[Path], tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out-00001-of-00003.gguf"
    convert(shards[0], out)
    model = open_model(out)
    assert model.paths == (out,)
    assert model.blocks is not None
    assert b"split." not in b"".join(key.data for key in model.blocks.keys)
    assert not [key for key in model.metadata if key.startswith("split.")]
    exported = tmp_path / "e-00002-of-00009.gguf"
    export(out, exported)
    assert len(open_model(exported).tensors) == len(open_model(tiny).tensors)
    assert np.array_equal(logits(exported), logits(tiny))


def test_links_into_a_cache_are_followed_by_name(shards: list[Path], tiny: Path, tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    folder.mkdir()
    for number, shard in enumerate(shards):
        shard.rename(blobs / str(number))
        (folder / shard.name).symlink_to(Path("../blobs") / str(number))
    convert(folder / shards[1].name, tmp_path / "b.gguf")
    export(tmp_path / "b.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "e.gguf").read_bytes() == tiny.read_bytes()


def test_one_tensor_per_expert_is_merged(tmp_path: Path) -> None:
    merged = write_tiny_model(tmp_path / "m.gguf", "llama", n_expert=4)
    old = to_per_expert_layout(merged, tmp_path / "old.gguf")
    convert(old, tmp_path / "b.gguf", ConvertOptions(verify=True))
    assert np.array_equal(logits(tmp_path / "b.gguf"), logits(merged))
    convert(old, tmp_path / "s.gguf", ConvertOptions(layout="stock"))
    ours = {tensor.name: tensor.data for tensor in read_raw(tmp_path / "s.gguf")[1]}
    assert ours == {tensor.name: tensor.data for tensor in read_raw(merged)[1]}


def test_an_old_layout_with_a_missing_expert_is_refused(tmp_path: Path) -> None:
    old = to_per_expert_layout(
        write_tiny_model(tmp_path / "m.gguf", "llama", n_expert=4), tmp_path / "old.gguf"
    )
    path = rewrite(
        old, tmp_path / "x.gguf", tensors=lambda ts: [t for t in ts if t.name != "blk.1.ffn_up.2.weight"]
    )
    with pytest.raises(FormatError, match=r"expert 2 of blk.1.ffn_up_exps.weight is missing"):
        convert(path, tmp_path / "b.gguf")


def test_an_old_layout_is_not_reordered_on_the_way(tmp_path: Path) -> None:
    merged = write_tiny_model(tmp_path / "m.gguf", "llama", n_expert=4)
    old = to_per_expert_layout(merged, tmp_path / "old.gguf")
    with pytest.raises(UsageError, match="cannot be reordered as they are merged"):
        convert(old, tmp_path / "b.gguf", ConvertOptions(profile=profile_for(merged)))


def test_vision_parts_of_ollamas_files_are_left_out(tiny: Path, tmp_path: Path) -> None:
    extra = [RawTensor(f"v.blk.{i}.attn_q.weight", 0, (32,), bytes(128)) for i in range(3)]
    path = rewrite(tiny, tmp_path / "o.gguf", tensors=lambda ts: [extra[0], *ts, *extra[1:]])
    result = convert(path, tmp_path / "b.gguf", ConvertOptions(verify=True))
    assert result.n_left_out == 3
    assert np.array_equal(logits(tmp_path / "b.gguf"), logits(tiny))


def test_ollamas_mxfp4_is_never_copied(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "g.gguf", "gpt-oss", quant="MXFP4")
    path = rewrite(
        base, tmp_path / "o.gguf", tensors=lambda ts: [replace(t, type=4) if t.type == 39 else t for t in ts]
    )
    for layout in ("blocks", "stock"):
        with pytest.raises(FormatError, match=r"made for Ollama's own engine: .*type number 4"):
            convert(path, tmp_path / "b.gguf", ConvertOptions(layout=layout))


def test_version_2_is_read_and_version_3_written(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"GGUF\x03", b"GGUF\x02", 1))
    convert(path, tmp_path / "b.gguf")
    export(tmp_path / "b.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "e.gguf").read_bytes() == tiny.read_bytes()


# What cannot be converted ---------------------------------------------------------------------------------


def dense(_tiny: Path, folder: Path) -> Path:
    return write_tiny_model(folder / "bad.gguf", "llama-dense")


def edited(**kwargs: Any) -> Callable[[Path, Path], Path]:
    return lambda tiny, folder: rewrite(tiny, folder / "bad.gguf", **kwargs)


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], Path]:
    def make(tiny: Path, folder: Path) -> Path:
        (folder / "bad.gguf").write_bytes(change(tiny.read_bytes()))
        return folder / "bad.gguf"

    return make


def table(*records: bytes, data: int = 4096) -> Callable[[Path, Path], Path]:
    head = gguf_header(1, kv_string("general.architecture", "qwen3moe"), n_tensors=len(records))
    body = b"".join(records)
    whole = (head + kv_string("general.architecture", "qwen3moe")[:0] + body) + bytes(data)
    return changed(lambda _data: whole)


def shard_gone(tiny: Path, folder: Path) -> Path:
    paths = split_shards(tiny, folder, 20)
    paths[-1].unlink()
    return paths[0]


def shard_cut(tiny: Path, folder: Path) -> Path:
    paths = split_shards(tiny, folder, 20)
    paths[-1].write_bytes(paths[-1].read_bytes()[: paths[-1].stat().st_size // 2])
    return paths[0]


def shards_mixed(tiny: Path, folder: Path) -> Path:
    other = write_tiny_model(folder / "tiny.gguf", "deepseek", n_expert=4)
    (folder / "x").mkdir()
    theirs = split_shards(other, folder / "x", -(-len(open_model(other).tensors) // 2))
    paths = split_shards(tiny, folder, -(-len(open_model(tiny).tensors) // 2))
    shutil.copy(theirs[1], paths[1])
    return paths[0]


BAD: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "dense": (dense, r"a dense model \(llama\)"),
    "truncated": (changed(lambda data: data[:-5000]), "cut short"),
    "oversized": (
        changed(lambda data: data + bytes(5000)),
        r"too long: it has [\d,]+ bytes, its tensors end at",
    ),
    "duplicate names": (
        table(tensor_record("a", (32,), 0, 0), tensor_record("a", (32,), 0, 128)),
        "duplicate tensor name 'a'",
    ),
    "overlapping offsets": (
        table(tensor_record("a", (32,), 0, 0), tensor_record("b", (32,), 0, 0)),
        "'b' has offset 0, expected 128",
    ),
    "misordered offsets": (
        table(tensor_record("a", (32,), 0, 128), tensor_record("b", (32,), 0, 0)),
        "'a' has offset 128, expected 0",
    ),
    "dims that overflow": (table(tensor_record("a", (274177, 67280421310721), 0, 0)), "overflow"),
    "expert count that contradicts the tensors": (
        edited(keys={"qwen3moe.expert_count": 6}),
        r"expert_count is 6, but layer 0 holds 4 experts",
    ),
    "layers that disagree": (
        edited(
            tensors=lambda ts: [
                replace(t, ne=(*t.ne[:2], 2), data=t.data[: len(t.data) // 2])
                if t.name == "blk.0.ffn_up_exps.weight"
                else t
                for t in ts
            ]
        ),
        "do not agree on their number",
    ),
    "missing shard": (shard_gone, "this shard is missing"),
    "short shard": (shard_cut, "cut short|file ends"),
    "shards of different models": (shards_mixed, "belongs to another model"),
    "version 1": (changed(lambda data: data.replace(b"GGUF\x03", b"GGUF\x01", 1)), "version 1 is too old"),
    "version 4": (changed(lambda data: data.replace(b"GGUF\x03", b"GGUF\x04", 1)), "version 4 is newer"),
    "big-endian": (
        lambda tiny, folder: rewrite(tiny, folder / "bad.gguf", byte_order=">"),
        "another byte order",
    ),
    "no GGUF file": (changed(lambda _data: b"<!DOCTYPE html>" * 9), "a web page, not a model"),
    "weights that are no numbers": (
        edited(tensors=with_bad_block("blk.1.ffn_down_exps.weight", 1)),
        r"weights that are no numbers: layer 1, down, expert 1: 1 bad blocks$",
    ),
    "infinite weights": (
        edited(tensors=with_bad_block("blk.0.ffn_up_exps.weight", 3, 0x7C00)),
        r"layer 0, up, expert 3: 1 bad blocks$",
    ),
    "a router of NaN": (
        edited(
            tensors=lambda ts: [
                replace(t, data=b"\0\0\xc0\x7f" * (len(t.data) // 4))
                if t.name == "blk.0.ffn_gate_inp.weight"
                else t
                for t in ts
            ]
        ),
        r"layer 0, router, expert 0: 128 bad blocks \(and in 3 more places\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_its_fault(tiny: Path, tmp_path: Path, name: str) -> None:
    make, says = BAD[name]
    path = make(tiny, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FormatError, match=says) as caught:
        convert(path, out / "b.gguf")
    assert caught.value.hint
    assert list(out.iterdir()) == []


def test_bad_weights_can_be_converted_on_request(tiny: Path, tmp_path: Path) -> None:
    bad = rewrite(tiny, tmp_path / "bad.gguf", tensors=with_bad_block("blk.1.ffn_down_exps.weight", 1))
    convert(bad, tmp_path / "b.gguf", ConvertOptions(allow_bad_blocks=True, verify=True))
    export(tmp_path / "b.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "e.gguf").read_bytes() == bad.read_bytes()


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ({9: [1, 2, 3, 4]}, "counts experts of layer 9; this model has none there"),
        ({0: [1, 2, 3]}, "counts 3 experts in layer 0; this model has 4"),
        ({0: [1, 2, 3, float("nan")]}, "no number of 0 or more"),
        ({0: [1, 2, 3, -1]}, "no number of 0 or more"),
    ],
)
def test_a_profile_of_another_model_is_refused(
    tiny: Path, tmp_path: Path, profile: dict[int, list[float]], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        convert(tiny, tmp_path / "b.gguf", ConvertOptions(profile=profile))


def test_order_by_heat_needs_a_profile(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no routing profile"):
        convert(tiny, tmp_path / "b.gguf", ConvertOptions(order="heat"))
