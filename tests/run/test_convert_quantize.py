"""Quantising on the way: byte for byte what llama.cpp's own ``llama_model_quantize`` writes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import KV, RawTensor, read_raw, rewrite, split_shards, write_raw, write_tiny_model

from ggufmoe.errors import FormatError, NativeError, UsageError
from ggufmoe.gguf.experts import is_expert_tensor
from ggufmoe.gguf.imatrix import read_importance
from ggufmoe.gguf.model import open_model
from ggufmoe.native.library import llama_cpp
from ggufmoe.native.quantize import FILE_TYPES, choose_types
from ggufmoe.run.convert import ConvertOptions, convert, export
from ggufmoe.run.quantize import Quantization

Importance = Mapping[str, NDArray[np.float32]]


def in_16_bit(path: Path, copy: Path) -> Path:
    """The model with every quantised matrix as F16."""

    def widen(tensors: list[RawTensor]) -> list[RawTensor]:
        result = []
        for tensor in tensors:
            kind = gguf.GGMLQuantizationType(tensor.type)
            if kind == gguf.GGMLQuantizationType.Q8_0:
                values = gguf.quants.dequantize(np.frombuffer(tensor.data, np.uint8), kind)
                tensor = replace(tensor, type=1, data=values.astype(np.float16).tobytes())
            result.append(tensor)
        return result

    return rewrite(path, copy, tensors=widen)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 16-bit model with expert matrices whose rows hold whole blocks of 256."""
    folder = tmp_path_factory.mktemp("q")
    rng = np.random.default_rng(4)

    def widen(tensors: list[RawTensor]) -> list[RawTensor]:
        result = []
        for tensor in tensors:
            if is_expert_tensor(tensor.name):
                n_expert = tensor.ne[2]
                ne = (256, 48, n_expert)
                data = rng.standard_normal((n_expert, ne[1], ne[0]), np.float32).astype(np.float16).tobytes()
                tensor = replace(tensor, ne=ne, type=1, data=data)
            result.append(tensor)
        return result

    tiny = write_tiny_model(folder / "tiny.gguf", "qwen3moe", n_layer=2, n_expert=4, quant="F16")
    return rewrite(in_16_bit(tiny, folder / "16.gguf"), folder / "half.gguf", tensors=widen)


def quantized_by_llama_cpp(
    source: Path, out: Path, file_type: str, importance: Importance | None = None, requantize: bool = False
) -> dict[str, RawTensor]:
    module = llama_cpp()
    params = module.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = FILE_TYPES[file_type], 2, requantize
    matrix = (module.llama_model_imatrix_data * (len(importance or {}) + 1))()
    for entry, (name, values) in zip(matrix, (importance or {}).items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if importance:
        params.imatrix = matrix
    assert module.llama_model_quantize(bytes(source), bytes(out), params) == 0
    return {tensor.name: tensor for tensor in read_raw(out)[1]}


def converted(source: Path, folder: Path, quantization: Quantization) -> dict[str, RawTensor]:
    """Quantised, verified, and exported again, to compare tensor by tensor."""
    verify = "IQ" not in f"{quantization.expert_type}"  # those take seconds
    options = ConvertOptions(quantization=quantization, verify=verify, threads=2, force=True)
    convert(source, folder / "b.gguf", options)
    export(folder / "b.gguf", folder / "e.gguf", force=True)
    return {tensor.name: tensor for tensor in read_raw(folder / "e.gguf")[1]}


@pytest.mark.parametrize(
    "file_type", ["Q4_K_M", "Q4_0", "Q8_0", "Q3_K_S", "IQ4_XS", "MXFP4_MOE", "BF16", "Q2_K"]
)
def test_the_bytes_are_those_of_llama_model_quantize(half: Path, tmp_path: Path, file_type: str) -> None:
    theirs = quantized_by_llama_cpp(half, tmp_path / "theirs.gguf", file_type)
    ours = converted(half, tmp_path, Quantization(file_type, file_type))
    assert ours == theirs
    keys, _ = read_raw(tmp_path / "e.gguf")
    assert keys["general.file_type"][0] == FILE_TYPES[file_type]
    assert keys["general.quantization_version"][0] == 2


@pytest.mark.parametrize("arch", ["deepseek2", "gpt-oss", "gemma4", "lfm2moe", "grovemoe", "qwen3next"])
def test_other_architectures_too(arch: str, tmp_path: Path) -> None:
    source = in_16_bit(write_tiny_model(tmp_path / "t.gguf", arch, quant="F16"), tmp_path / "16.gguf")
    theirs = quantized_by_llama_cpp(source, tmp_path / "theirs.gguf", "Q4_K_M")
    assert converted(source, tmp_path, Quantization("Q4_K_M", "Q4_K_M")) == theirs


def test_each_part_has_its_own_type(half: Path, tmp_path: Path) -> None:
    experts = quantized_by_llama_cpp(half, tmp_path / "q4.gguf", "Q4_K_M")
    dense = quantized_by_llama_cpp(half, tmp_path / "q8.gguf", "Q8_0")
    ours = converted(half, tmp_path, Quantization(expert_type="Q4_K_M", dense_type="Q8_0"))
    for name, tensor in ours.items():
        assert tensor == (experts if is_expert_tensor(name) else dense)[name]
    original = {tensor.name: tensor for tensor in read_raw(half)[1]}
    ours = converted(half, tmp_path, Quantization(expert_type="Q4_K_M"))
    for name, tensor in ours.items():
        assert tensor == (experts if is_expert_tensor(name) else original)[name]
    ours = converted(half, tmp_path, Quantization(dense_type="Q8_0"))
    for name, tensor in ours.items():
        assert tensor == (original if is_expert_tensor(name) else dense)[name]


def test_reordered_and_from_shards(half: Path, tmp_path: Path) -> None:
    """Quantising does not depend on where an expert lies."""
    expected = converted(half, tmp_path, Quantization("Q4_K_M", "Q8_0"))
    shards = split_shards(half, tmp_path, 10)
    profile = {layer: [1, 4, 2, 3] for layer in range(2)}
    options = ConvertOptions(
        quantization=Quantization("Q4_K_M", "Q8_0"), profile=profile, verify=True, force=True
    )
    convert(shards[0], tmp_path / "b.gguf", options)
    assert set(open_model(tmp_path / "b.gguf").orders.values()) == {(1, 3, 2, 0)}
    export(tmp_path / "b.gguf", tmp_path / "e.gguf", force=True)
    assert {tensor.name: tensor for tensor in read_raw(tmp_path / "e.gguf")[1]} == expected
    # and of a block file that is reordered already
    convert(half, tmp_path / "16b.gguf", ConvertOptions(profile=profile))
    assert converted(tmp_path / "16b.gguf", tmp_path, Quantization("Q4_K_M", "Q8_0")) == expected


# Importance matrices -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sums(half: Path) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Sums and counts for every matrix; one expert was never chosen."""
    rng, found = np.random.default_rng(6), {}
    for tensor in open_model(half).tensors:
        if len(tensor.ne) > 1 and tensor.name != "token_embd.weight":
            n_matrix = tensor.ne[2] if len(tensor.ne) > 2 else 1
            counts = np.full(n_matrix, 64, np.float32)
            counts[1:2] = 0
            values = rng.random((n_matrix, tensor.ne[0]), np.float32) * counts[:, None]
            found[tensor.name] = values, counts
    return found


@pytest.fixture(scope="module")
def imatrix(sums: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]], half: Path) -> Path:
    tensors = []
    for name, (values, counts) in sums.items():
        tensors.append(RawTensor(f"{name}.in_sum2", 0, values.shape[::-1], values.tobytes()))
        tensors.append(RawTensor(f"{name}.counts", 0, (1, counts.size), counts.tobytes()))
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": ["calibration.txt"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 512,
    }
    return write_raw(half.with_name("imatrix.gguf"), keys, tensors)


def expected_importance(
    sums: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]],
) -> dict[str, NDArray[np.float32]]:
    found = {}
    for name, (values, counts) in sums.items():
        rows = [v / c if c > 0 else np.ones_like(v) for v, c in zip(values, counts, strict=True)]
        found[name] = np.concatenate(rows).astype(np.float32)
    return found


@pytest.mark.parametrize("file_type", ["Q4_K_M", "IQ2_XXS", "Q2_K_S"])
def test_an_importance_matrix_is_used_as_llama_cpp_does(
    half: Path,
    imatrix: Path,
    sums: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]],
    tmp_path: Path,
    file_type: str,
) -> None:
    importance = expected_importance(sums)
    read = read_importance(imatrix)
    assert set(read) == set(importance)
    assert all(np.array_equal(read[name], importance[name]) for name in read)
    theirs = quantized_by_llama_cpp(half, tmp_path / "theirs.gguf", file_type, importance)
    assert converted(half, tmp_path, Quantization(file_type, file_type, imatrix)) == theirs
    keys, _ = read_raw(tmp_path / "e.gguf")
    assert keys["quantize.imatrix.file"][0] == "imatrix.gguf"
    # the matrix goes by original numbers, wherever the experts lie
    convert(half, tmp_path / "16b.gguf", ConvertOptions(profile={0: [1, 4, 2, 3], 1: [1, 3, 2, 4]}))
    quantization = Quantization(file_type, file_type, imatrix)
    assert converted(tmp_path / "16b.gguf", tmp_path, quantization) == theirs


def test_the_older_form_is_read(
    sums: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]], tmp_path: Path
) -> None:
    records = b"".join(
        struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, v.size) + (v * 4).tobytes()
        for name, (v, _) in sums.items()
    )
    path = tmp_path / "imatrix.dat"
    path.write_bytes(struct.pack("<i", len(sums)) + records + struct.pack("<i", 2))
    found = read_importance(path)
    assert all(np.array_equal(found[name], v.reshape(-1)) for name, (v, _) in sums.items())
    for size in (0, 3, 40, len(records) - 9):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(FormatError, match=r"imatrix.dat: no importance matrix"):
            read_importance(path)


def test_a_matrix_of_another_model_is_refused(half: Path, tmp_path: Path) -> None:
    values = np.ones(8, np.float32)
    tensors = [
        RawTensor("blk.0.ffn_up_exps.weight.in_sum2", 0, (8,), values.tobytes()),
        RawTensor("blk.0.ffn_up_exps.weight.counts", 0, (1,), values[:1].tobytes()),
    ]
    path = write_raw(tmp_path / "i.gguf", {"general.type": "imatrix"}, tensors)
    with pytest.raises(UsageError, match=r"8 values for blk.0.ffn_up_exps.weight, which needs 1,024"):
        converted(half, tmp_path, Quantization("Q4_0", "Q4_0", path))
    tensors[0] = replace(tensors[0], data=np.full(8, np.nan, np.float32).tobytes())
    write_raw(path, {}, tensors)
    with pytest.raises(FormatError, match="values that are no numbers"):
        converted(half, tmp_path, Quantization("Q4_0", "Q4_0", path))
    with pytest.raises(FormatError, match="has no counts"):
        read_importance(write_raw(path, {}, tensors[:1]))
    with pytest.raises(FormatError, match="it holds no values"):
        read_importance(half)


# What is refused -------------------------------------------------------------------------------------------------


def test_what_is_quantised_already_needs_a_word(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "t.gguf", "qwen3moe", n_expert=4)
    with pytest.raises(UsageError, match=r"is q8_0 already; to make it \S+ loses quality twice"):
        converted(source, tmp_path, Quantization("Q4_0", "Q4_0"))
    assert not [p for p in tmp_path.iterdir() if p.name != "t.gguf"]
    theirs = quantized_by_llama_cpp(source, tmp_path / "theirs.gguf", "Q4_0", requantize=True)
    assert converted(source, tmp_path, Quantization("Q4_0", "Q4_0", allow_requantize=True)) == theirs


@pytest.mark.parametrize("file_type", ["IQ2_XXS", "Q2_K_S"])
def test_the_smallest_types_need_an_importance_matrix(half: Path, tmp_path: Path, file_type: str) -> None:
    with pytest.raises(
        UsageError, match=f"{file_type} needs an importance matrix, and there is none for blk"
    ):
        converted(half, tmp_path, Quantization(file_type, "Q8_0"))
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_no_numbers_are_not_quantised(half: Path, tmp_path: Path) -> None:
    def spoil(tensors: list[RawTensor]) -> list[RawTensor]:
        return [t.patched(0, b"\0\x7e") if t.name == "blk.0.attn_q.weight" else t for t in tensors]

    bad = rewrite(half, tmp_path / "bad.gguf", tensors=spoil)
    with pytest.raises(FormatError, match=r"blk.0.attn_q.weight: it holds weights that are no numbers"):
        convert(bad, tmp_path / "b.gguf", ConvertOptions(quantization=Quantization("Q4_0", "Q8_0")))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_header_that_llama_cpp_does_not_know_is_its_to_refuse(half: Path, tmp_path: Path) -> None:
    path = rewrite(half, tmp_path / "x.gguf", keys={"general.architecture": ("nosuch", KV.STRING)})
    with pytest.raises(NativeError, match=r"cannot quantise this model to Q4_0: .*nosuch"):
        choose_types(path, "Q4_0", has_importance=False)
