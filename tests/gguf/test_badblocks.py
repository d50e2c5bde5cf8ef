"""Weights that are no numbers are found, and blamed on the right expert."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import RawTensor, rewrite, write_tiny_model

from ggufmoe.gguf import badblocks
from ggufmoe.gguf.badblocks import FORMATS, BadBlocks, find_bad_blocks, unchecked_tensors
from ggufmoe.gguf.model import Model, open_model
from ggufmoe.native.library import ggml

N_EXPERT = 4
NAN_F16, INF_F16 = struct.pack("<H", 0x7E00), struct.pack("<H", 0xFC00)
DOWN = "blk.1.ffn_down_exps.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0", "Q5_1", "F32", "F16", "BF16"])
def any_type(request: pytest.FixtureRequest, folder: Path) -> Path:
    return write_tiny_model(
        folder / f"{request.param}.gguf", "qwen3moe", n_expert=N_EXPERT, quant=request.param
    )


@pytest.fixture(scope="module")
def q8_0(folder: Path) -> Path:
    return write_tiny_model(folder / "good.gguf", "qwen3moe", n_expert=N_EXPERT)


def damage(**patches: Callable[[RawTensor], RawTensor]) -> Callable[[list[RawTensor]], list[RawTensor]]:
    """Patch tensors by name; ``__`` stands for a dot."""
    by_name = {name.replace("__", "."): patch for name, patch in patches.items()}
    return lambda tensors: [by_name[t.name](t) if t.name in by_name else t for t in tensors]


def place(tensor: RawTensor, expert: int, block: int, block_bytes: int) -> int:
    return expert * (len(tensor.data) // N_EXPERT) + block * block_bytes


def test_good_models_have_no_bad_blocks(any_type: Path) -> None:
    model = open_model(any_type)
    assert find_bad_blocks(model) == []
    assert unchecked_tensors(model) == []


def test_nan_and_infinite_scales_are_counted_by_expert(q8_0: Path, tmp_path: Path) -> None:
    def patch(tensor: RawTensor) -> RawTensor:
        for expert, block, scale in ((1, 0, NAN_F16), (1, 255, INF_F16), (3, 7, NAN_F16)):
            tensor = tensor.patched(place(tensor, expert, block, 34), scale)
        return tensor.patched(place(tensor, 0, 0, 34) + 2, b"\xff" * 32)  # weights, which may be anything

    path = rewrite(q8_0, tmp_path / "m.gguf", tensors=damage(**{DOWN: patch}))
    assert find_bad_blocks(open_model(path)) == [
        BadBlocks(1, "down", 1, 2, DOWN),
        BadBlocks(1, "down", 3, 1, DOWN),
    ]


def test_chunks_smaller_than_an_expert_find_the_same(
    q8_0: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rewrite(
        q8_0, tmp_path / "m.gguf", tensors=damage(**{DOWN: lambda t: replace(t, data=b"\xff" * len(t.data))})
    )
    whole = find_bad_blocks(open_model(path))
    assert [found.n_bad_blocks for found in whole] == [256] * N_EXPERT
    monkeypatch.setattr(badblocks, "CHUNK_BYTES", 1000)
    assert find_bad_blocks(open_model(path)) == whole


def test_a_router_of_nan_is_found_row_by_row(q8_0: Path, tmp_path: Path) -> None:
    def patch(tensor: RawTensor) -> RawTensor:
        row = len(tensor.data) // N_EXPERT
        return tensor.patched(2 * row, struct.pack("<f", float("nan")) * (row // 4))

    path = rewrite(q8_0, tmp_path / "m.gguf", tensors=damage(blk__0__ffn_gate_inp__weight=patch))
    assert find_bad_blocks(open_model(path)) == [BadBlocks(0, "router", 2, 128, "blk.0.ffn_gate_inp.weight")]


def test_biases_and_scales_of_experts_are_scanned(folder: Path, tmp_path: Path) -> None:
    good = write_tiny_model(folder / "scaled.gguf", "qwen3moe-scaled", n_expert=N_EXPERT)
    path = rewrite(
        good,
        tmp_path / "m.gguf",
        tensors=damage(blk__1__ffn_up_exps__scale=lambda t: t.patched(4, struct.pack("<f", float("inf")))),
    )
    assert find_bad_blocks(open_model(path)) == [BadBlocks(1, "up.scale", 1, 1, "blk.1.ffn_up_exps.scale")]


def test_what_belongs_to_no_single_expert_is_said_of_the_layer(folder: Path, tmp_path: Path) -> None:
    good = write_tiny_model(folder / "gemma4.gguf", "gemma4", n_expert=N_EXPERT)
    nan = struct.pack("<f", float("nan"))
    path = rewrite(
        good,
        tmp_path / "m.gguf",
        tensors=damage(
            blk__0__ffn_gate_inp__scale=lambda t: t.patched(8, nan),
            blk__0__ffn_gate_inp__weight=lambda t: t.patched(len(t.data) - 4, nan),
            blk__0__ffn_gate_up_exps__weight=lambda t: t.patched(0, NAN_F16),
        ),
    )
    assert [(bad.projection, bad.expert) for bad in find_bad_blocks(open_model(path))] == [
        ("gate_up", 0),
        ("router", None),
        ("router", N_EXPERT - 1),
    ]


def test_one_block_of_several_experts_is_said_of_the_layer(q8_0: Path, tmp_path: Path) -> None:
    name = "blk.0.exp_probs_b.bias"
    path = rewrite(
        q8_0, tmp_path / "m.gguf", tensors=lambda ts: [*ts, RawTensor(name, 8, (32,), NAN_F16 + bytes(32))]
    )
    assert find_bad_blocks(open_model(path)) == [BadBlocks(0, "router", None, 1, name)]


def test_dense_weights_are_left_to_others(q8_0: Path, tmp_path: Path) -> None:
    path = rewrite(q8_0, tmp_path / "m.gguf", tensors=damage(output__weight=lambda t: t.patched(0, NAN_F16)))
    assert find_bad_blocks(open_model(path)) == []


@pytest.mark.parametrize(
    ("quant", "offset", "bad"),
    [
        ("F16", 0, NAN_F16),
        ("BF16", 0, struct.pack("<H", 0x7F80)),
        ("F32", 0, struct.pack("<f", float("-inf"))),
        ("Q4_0", 0, NAN_F16),
        ("Q4_1", 2, INF_F16),
        ("Q5_0", 0, NAN_F16),
        ("Q5_1", 2, NAN_F16),
        ("MXFP4", 0, b"\xff"),
    ],
)
def test_one_bad_block_of_each_type_is_found(
    folder: Path, tmp_path: Path, quant: str, offset: int, bad: bytes
) -> None:
    good = write_tiny_model(folder / f"one-{quant}.gguf", "qwen3moe", n_expert=N_EXPERT, quant=quant)
    n_bytes = FORMATS[quant.lower()].n_bytes

    def patch(tensor: RawTensor) -> RawTensor:
        return tensor.patched(place(tensor, 2, 5, n_bytes) + offset, bad)

    path = rewrite(good, tmp_path / "m.gguf", tensors=damage(**{DOWN: patch}))
    assert find_bad_blocks(open_model(path)) == [BadBlocks(1, "down", 2, 1, DOWN)]


def with_type(q8_0: Path, path: Path, kind: gguf.GGMLQuantizationType, n_bytes: int, block: bytes) -> Model:
    """The down projection of layer 1 as two blocks of 256 per expert, of which the last one is ``block``."""
    data = bytes(n_bytes * (2 * N_EXPERT - 1)) + block

    def retype(tensor: RawTensor) -> RawTensor:
        return RawTensor(tensor.name, int(kind), (256, 2, N_EXPERT), data)

    return open_model(rewrite(q8_0, path, tensors=damage(**{DOWN: retype})))


@pytest.mark.parametrize("name", [name for name in FORMATS if "K" in name or name[:2] in ("iq", "tq")])
def test_superblock_formats_are_those_of_ggml(q8_0: Path, tmp_path: Path, name: str) -> None:
    """gguf-py's dequantisation says what a NaN at each offset does to the block."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    layout = FORMATS[name]
    assert layout.n_bytes == n_bytes == ggml().ggml_type_size(int(kind))
    for offset in layout.offsets:
        block = bytearray(b"\x11" * n_bytes)
        for other in layout.offsets:
            block[other : other + 2] = struct.pack("<e", 1.0)
        block[offset : offset + 2] = NAN_F16
        with np.errstate(all="ignore"):
            weights = gguf.quants.dequantize(np.frombuffer(bytes(block), np.uint8), kind)
        assert weights.size == n_weights
        assert np.isnan(weights).all()
        if n_weights == 256:
            model = with_type(q8_0, tmp_path / "m.gguf", kind, n_bytes, bytes(block))
            assert find_bad_blocks(model) == [BadBlocks(1, "down", N_EXPERT - 1, 1, DOWN)]


def test_types_that_cannot_be_judged_are_named(q8_0: Path, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.IQ1_M
    n_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    model = with_type(q8_0, tmp_path / "m.gguf", kind, n_bytes, bytes(n_bytes))
    assert [(t.name, t.type_name) for t in unchecked_tensors(model)] == [(DOWN, "iq1_m")]
    assert find_bad_blocks(model) == []
