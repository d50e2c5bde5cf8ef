"""One model in several files: any of them opens it, and what is wrong with one is said of that one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_models import KV, read_raw, rewrite, split_shards, write_raw, write_tiny_model

from ggufmoe.errors import FormatError, UsageError
from ggufmoe.gguf.model import Model, open_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("whole") / "t.gguf", "qwen3moe", n_expert=4)


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> list[Path]:
    n_tensors = len(open_model(whole).tensors)
    paths = split_shards(whole, tmp_path, -(-n_tensors // 3))
    assert [path.name for path in paths] == [f"t-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return paths


def edit(shard: Path, **keys: object) -> None:
    """Set ``split.*`` keys of a shard in place; None drops the key."""
    values, tensors = read_raw(shard)
    for name, value in keys.items():
        values.pop(f"split.{name}", None)
        if value is not None:
            values[f"split.{name}"] = value
    write_raw(shard, values, tensors)


def assert_same_weights(model: Model, whole: Path) -> None:
    original = open_model(whole)
    assert {t.name: (t.type_name, t.ne, t.n_bytes) for t in model.tensors} == {
        t.name: (t.type_name, t.ne, t.n_bytes) for t in original.tensors
    }
    assert model.n_bytes == original.n_bytes
    for tensor in (model.tensors[0], model.tensors[-1]):
        source = original.by_name[tensor.name]
        with model.paths[tensor.shard].open("rb") as ours, whole.open("rb") as theirs:
            ours.seek(tensor.offset)
            theirs.seek(source.offset)
            assert ours.read(tensor.n_bytes) == theirs.read(tensor.n_bytes)


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_shard_opens_the_whole_model(shards: list[Path], whole: Path, named: int) -> None:
    model = open_model(shards[named])
    assert model.paths == tuple(shards)
    assert model.metadata["general.name"] == "tiny qwen3moe"
    assert_same_weights(model, whole)


def test_a_folder_of_shards_is_one_model(shards: list[Path], whole: Path) -> None:
    (shards[0].parent / "mmproj-t.gguf").write_bytes(whole.read_bytes())
    (shards[0].parent / "README.md").write_text("three shards")
    assert open_model(shards[0].parent).paths == tuple(shards)


def test_a_folder_of_two_models_is_refused_with_their_names(shards: list[Path], whole: Path) -> None:
    shutil.copy(whole, shards[0].parent / "other.gguf")
    with pytest.raises(UsageError, match=r"holds 2 GGUF models \(other.gguf, t-00001-of-00003.gguf\)"):
        open_model(shards[0].parent)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds 0 GGUF models \(none\)"):
        open_model(tmp_path)


@pytest.fixture
def snapshot(shards: list[Path], tmp_path: Path) -> Path:
    """The Hugging Face cache: shards are links, and what they link to has no name of a shard."""
    blobs, folder = tmp_path / "hf" / "blobs", tmp_path / "hf" / "snapshots" / "x"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, shard in enumerate(shards):
        blob = blobs / (f"{number:x}" * 64)
        shard.rename(blob)
        (folder / shard.name).symlink_to(Path("../../blobs") / blob.name)
    return folder


@pytest.mark.parametrize("named", ["t-00001-of-00003.gguf", "t-00002-of-00003.gguf", ""])
def test_links_into_a_cache_keep_their_names(snapshot: Path, whole: Path, named: str) -> None:
    model = open_model(snapshot / named)
    assert [path.parent for path in model.paths] == [snapshot] * 3
    assert_same_weights(model, whole)


def test_a_shard_under_another_name_is_told_why(snapshot: Path) -> None:
    blob = (snapshot / "t-00001-of-00003.gguf").resolve()
    with pytest.raises(
        FormatError, match=r"one of 3 shards, but its name does not end in -0000N-of-00003.gguf"
    ):
        open_model(blob)


@pytest.mark.parametrize("named", [0, 1])
def test_a_missing_shard_is_named(shards: list[Path], named: int) -> None:
    shards[2].unlink()
    with pytest.raises(FormatError, match=r"t-00003-of-00003.gguf: this shard is missing"):
        open_model(shards[named])


@pytest.mark.parametrize("size", ["half", "header", "nothing"])
def test_a_short_shard_is_named(shards: list[Path], size: str) -> None:
    data = shards[2].read_bytes()
    shards[2].write_bytes(data[: {"half": len(data) // 2, "header": 100, "nothing": 0}[size]])
    with pytest.raises(FormatError, match=r"t-00003-of-00003.gguf: .*(cut short|file ends|not a GGUF)"):
        open_model(shards[0])


def test_renamed_shards_are_noticed(shards: list[Path]) -> None:
    spare = shards[1].with_name("spare")
    shards[1].rename(spare)
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    with pytest.raises(
        FormatError, match=r"00002-of-00003.gguf: by its name shard 2 of 3, but split.no in it is 2"
    ):
        open_model(shards[0])


def test_a_shard_of_a_model_with_other_shards_is_noticed(shards: list[Path]) -> None:
    edit(shards[1], count=(4, KV.UINT16))
    with pytest.raises(FormatError, match=r"00002-of-00003.gguf: .* another model: split.count in it is 4"):
        open_model(shards[0])


def test_a_shard_of_a_model_with_other_tensors_is_noticed(shards: list[Path], tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "t.gguf", "deepseek", n_expert=4)
    (tmp_path / "other").mkdir()
    theirs = split_shards(other, tmp_path / "other", -(-len(open_model(other).tensors) // 3))
    shutil.copy(theirs[2], shards[2])
    with pytest.raises(FormatError, match=r"00003-of-00003.gguf: .* another model: split.tensors.count"):
        open_model(shards[0])


def test_too_few_tensors_in_all_shards_are_noticed(shards: list[Path]) -> None:
    for shard in shards:
        edit(shard, **{"tensors.count": (99, KV.INT32)})
    with pytest.raises(FormatError, match=r"the shards hold \d+ tensors, but split.tensors.count is 99"):
        open_model(shards[0])


def test_a_tensor_in_two_shards_is_noticed(shards: list[Path]) -> None:
    shutil.copy(shards[1], shards[2])
    edit(shards[2], no=(2, KV.UINT16))
    for shard in shards:
        edit(shard, **{"tensors.count": None})
    with pytest.raises(FormatError, match="two shards hold the tensor blk"):
        open_model(shards[0])


def test_a_count_that_the_name_contradicts_is_refused(shards: list[Path]) -> None:
    edit(shards[0], count=(65535, KV.UINT16))
    with pytest.raises(FormatError, match=r"one of 65535 shards, but its name"):
        open_model(shards[0])


def test_a_name_beyond_the_last_shard_is_refused(shards: list[Path]) -> None:
    extra = shutil.copy(shards[0], shards[0].with_name("t-00004-of-00003.gguf"))
    with pytest.raises(FormatError, match="but its name does not end in"):
        open_model(extra)


@pytest.mark.parametrize("keys", [{}, {"split.count": (1, KV.UINT16), "split.no": (0, KV.UINT16)}])
def test_a_name_alone_makes_no_shard(whole: Path, tmp_path: Path, keys: dict[str, object]) -> None:
    path = rewrite(whole, tmp_path / "out-00001-of-00003.gguf", keys=keys)
    assert open_model(path).paths == (path,)
    assert_same_weights(open_model(tmp_path), whole)
