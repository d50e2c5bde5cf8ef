"""Files of Ollama's own engine: inspected like any other, refused by name when they are to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import RawTensor, read_raw, rewrite, split_shards, write_tiny_model

from ggufmoe.errors import FormatError
from ggufmoe.gguf.checks import check_runnable
from ggufmoe.gguf.model import open_model
from ggufmoe.gguf.ollama_dialect import is_extra_tensor, with_llama_cpp_types
from ggufmoe.gguf.scanner import scan_header

F32, MXFP4, OLLAMA_MXFP4 = 0, 39, 4


@pytest.fixture(scope="module")
def qwen3moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("o") / "q.gguf", "qwen3moe", n_layer=1, n_expert=4)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("o") / "g.gguf"
    return write_tiny_model(path, "gpt-oss", n_layer=2, n_expert=4, quant="MXFP4")


def as_ollama_writes(tensors: list[RawTensor]) -> list[RawTensor]:
    return [replace(t, type=OLLAMA_MXFP4) if t.type == MXFP4 else t for t in tensors]


def with_extra(*names: str) -> Callable[[list[RawTensor]], list[RawTensor]]:
    return lambda tensors: [*tensors, *(RawTensor(name, F32, (32,), bytes(128)) for name in names)]


def assert_refused(path: Path, difference: str) -> None:
    with pytest.raises(FormatError, match=f"a file made for Ollama's own engine: .*{difference}") as raised:
        check_runnable(open_model(path))
    assert raised.value.hint is not None
    assert "made for llama.cpp" in raised.value.hint


def test_files_made_for_llama_cpp_have_no_differences(qwen3moe: Path, gpt_oss: Path) -> None:
    for path in (qwen3moe, gpt_oss):
        assert open_model(path).ollama_differences == ()
        check_runnable(open_model(path))


@pytest.mark.parametrize(
    "name", ["v.blk.0.attn_q.weight", "mm.0.weight", "a.conv1d.1.weight", "s.position_embd"]
)
def test_a_vision_or_audio_part_is_named(qwen3moe: Path, tmp_path: Path, name: str) -> None:
    path = rewrite(qwen3moe, tmp_path / "m.gguf", tensors=with_extra(name))
    model = open_model(path)
    assert name in model.by_name
    assert [bank.n_bytes for bank in model.banks] == [bank.n_bytes for bank in open_model(qwen3moe).banks]
    assert_refused(path, f"the tensor {name} of a vision or audio part")


def test_text_tensors_are_no_extra_tensors(qwen3moe: Path) -> None:
    assert not any(is_extra_tensor(tensor.name) for tensor in open_model(qwen3moe).tensors)


def test_a_left_out_norm_epsilon_is_named(qwen3moe: Path, tmp_path: Path) -> None:
    key = "qwen3moe.attention.layer_norm_rms_epsilon"
    path = rewrite(qwen3moe, tmp_path / "m.gguf", drop=[key])
    assert len(open_model(path).banks) == 1
    assert_refused(path, f"the key {key} is left out")


def test_type_4_is_read_as_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    path = rewrite(gpt_oss, tmp_path / "m.gguf", tensors=as_ollama_writes)
    ours, theirs = open_model(path), open_model(gpt_oss)
    assert ours.tensors == theirs.tensors
    assert ours.metadata == theirs.metadata
    tensor = ours.banks[0].weights["up"]
    assert tensor.type_name == "mxfp4"
    assert tensor.n_bytes * 32 == tensor.ne[0] * tensor.ne[1] * tensor.ne[2] * 17
    assert_refused(path, r"6 tensors \(blk.0.ffn_\w+_exps.weight, ...\) of type number 4, Ollama's MXFP4")


def test_type_4_is_read_in_shards_too(gpt_oss: Path, tmp_path: Path) -> None:
    (tmp_path / "ollama").mkdir()
    shards = [
        rewrite(shard, tmp_path / "ollama" / shard.name, tensors=as_ollama_writes)
        for shard in split_shards(gpt_oss, tmp_path, 12)
    ]
    assert len(open_model(shards[1]).tensors) == len(open_model(gpt_oss).tensors)
    assert_refused(shards[0], "6 tensors")


def test_a_short_file_of_type_4_is_cut_short(gpt_oss: Path, tmp_path: Path) -> None:
    path = rewrite(gpt_oss, tmp_path / "m.gguf", tensors=as_ollama_writes)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match="cut short"):
        open_model(path)


def test_another_fault_beside_type_4_is_still_found(gpt_oss: Path, tmp_path: Path) -> None:
    def damage(tensors: list[RawTensor]) -> list[RawTensor]:
        *others, last = as_ollama_writes(tensors)
        return [*others, replace(last, type=999)]

    path = rewrite(gpt_oss, tmp_path / "m.gguf", tensors=damage)
    with pytest.raises(FormatError, match="invalid ggml type 999"):
        open_model(path)


def test_an_architecture_of_ollamas_is_named(gpt_oss: Path, tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        return name.replace("gpt-oss.", "gptoss.")

    values, _ = read_raw(gpt_oss)
    keys = {renamed(name): value for name, value in values.items() if name != "general.architecture"}
    path = rewrite(
        gpt_oss,
        tmp_path / "m.gguf",
        keys={**keys, "general.architecture": "gptoss"},
        drop=[name for name in values if name.startswith("gpt-oss.")],
        tensors=as_ollama_writes,
    )
    assert open_model(path).get("expert_count", 0) == 4
    assert_refused(path, "its architecture is called gptoss, in llama.cpp gpt-oss; 6 tensors")


def test_only_the_types_change_in_a_header(gpt_oss: Path) -> None:
    data = gpt_oss.read_bytes()
    scan = scan_header(data)
    assert [entry.name for entry in scan.tensors] == [t.name for t in open_model(gpt_oss).tensors]
    assert {data[entry.type_position] for entry in scan.tensors} == {F32, 8, MXFP4}
    assert with_llama_cpp_types(data, scan) == (data[: scan.end + (2 << 20)], ())
