"""The tiny models are worth something only if stock llama.cpp runs them: load, decode, route, tokenise."""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_models import (
    ARCHITECTURES,
    KV,
    N_TEST_VOCAB,
    RawTensor,
    gguf_header,
    kv_array_of_strings_header,
    kv_record,
    kv_string,
    kv_u32,
    read_raw,
    rewrite,
    split_shards,
    tensor_record,
    to_per_expert_layout,
    write_tiny_model,
)

TEXT = "歪🙂é hello"
N_PROMPT, N_DECODED = 33, 8
N_EXPERT, N_EXPERT_USED = 8, 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files to run, by what the tests call them."""
    folder = tmp_path_factory.mktemp("tiny")
    paths = {}
    for arch in (*ARCHITECTURES, "llama-dense"):
        paths[arch] = write_tiny_model(folder / f"{arch}.gguf", arch)
        paths[f"{arch} text"] = write_tiny_model(folder / f"{arch}-text.gguf", arch, text=True)
    for quant in ("F32", "F16", "Q4_0"):
        paths[quant] = write_tiny_model(folder / f"{quant}.gguf", "qwen3moe", quant=quant)
    paths["gpt-oss MXFP4"] = write_tiny_model(folder / "mxfp4.gguf", "gpt-oss", quant="MXFP4")
    paths["16 experts"] = write_tiny_model(
        folder / "16-experts.gguf", "deepseek", n_layer=4, n_expert=16, n_expert_used=2
    )
    paths["rewritten"] = rewrite(
        paths["qwen3moe"], folder / "rewritten.gguf", keys={"a.b": ([], KV.ARRAY, KV.STRING)}
    )
    paths["shards"] = split_shards(paths["qwen3moe"], folder, 15)[0]
    paths["per expert"] = to_per_expert_layout(paths["llama"], folder / "per-expert.gguf")
    return paths


@pytest.fixture(scope="module")
def results(models: Mapping[str, Path]) -> dict[str, Any]:
    """What stock llama.cpp made of each file. One process for all is fast, and an abort stays in it."""
    command = [sys.executable, __file__, *map(str, models.values())]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, f"{child.stdout[-300:]}\n{child.stderr[-3000:]}"
    return dict(zip(models, map(json.loads, child.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "llama-dense"])
@pytest.mark.parametrize("text", ["", " text"])
def test_stock_llama_cpp_decodes_the_model(results: dict[str, Any], arch: str, text: str) -> None:
    result = results[arch + text]
    assert result["finite"]
    assert 0.7 < result["std"] < 3.5


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "gpt-oss MXFP4", "16 experts"])
def test_other_types_and_depths_decode(results: dict[str, Any], name: str) -> None:
    assert results[name]["finite"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_use_different_experts(results: dict[str, Any], arch: str) -> None:
    routing = results[arch]["routing"]
    assert routing
    for layer in routing.values():
        assert len(layer) >= N_PROMPT + N_DECODED
        assert len({frozenset(token) for token in layer}) > 10
        assert {expert for token in layer for expert in token} == set(range(N_EXPERT))


def test_the_dense_model_routes_nothing(results: dict[str, Any]) -> None:
    assert results["llama-dense"]["routing"] == {}


def test_blocks_without_experts_route_nothing(results: dict[str, Any]) -> None:
    assert set(results["deepseek"]["routing"]) == {"1"}
    assert set(results["llama4"]["routing"]) == {"1", "3"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_text_survives_the_tokenizer(results: dict[str, Any], arch: str) -> None:
    assert results[f"{arch} text"]["text"] == TEXT
    assert results[arch]["text"] is None


@pytest.mark.parametrize(("arch", "n_layer"), [("llama4", 3), ("lfm2moe", 1)])
def test_too_few_blocks_are_refused(tmp_path: Path, arch: str, n_layer: int) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        write_tiny_model(tmp_path / "short.gguf", arch, n_layer=n_layer)


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4", "lfm2moe"])
def test_the_seed_decides_every_byte(tmp_path: Path, models: Mapping[str, Path], arch: str) -> None:
    again = write_tiny_model(tmp_path / "again.gguf", arch)
    other = write_tiny_model(tmp_path / "other.gguf", arch, seed=2)
    assert again.read_bytes() == models[arch].read_bytes() != other.read_bytes()
    assert again.stat().st_size < 1_000_000


def test_weights_do_not_depend_on_the_number_of_layers(tmp_path: Path, models: Mapping[str, Path]) -> None:
    deeper = write_tiny_model(tmp_path / "deeper.gguf", "qwen3moe", n_layer=3)
    by_name = {tensor.name: tensor for tensor in read_raw(deeper)[1]}
    assert all(by_name[tensor.name] == tensor for tensor in read_raw(models["qwen3moe"])[1])


def test_a_rewritten_model_computes_the_same(results: dict[str, Any]) -> None:
    assert results["rewritten"] == results["qwen3moe"]


def test_rewrite_keeps_types_and_empty_arrays(models: Mapping[str, Path], tmp_path: Path) -> None:
    values, tensors = read_raw(models["rewritten"])
    assert values.pop("a.b") == ([], KV.ARRAY, KV.STRING)
    assert (values, tensors) == read_raw(models["qwen3moe"])
    again = rewrite(models["rewritten"], tmp_path / "again.gguf")
    assert again.read_bytes() == models["rewritten"].read_bytes()


def test_rewrite_reproduces_what_gguf_py_wrote(models: Mapping[str, Path], tmp_path: Path) -> None:
    for arch in ("gpt-oss", "qwen3next text"):
        copy = rewrite(models[arch], tmp_path / "copy.gguf")
        assert copy.read_bytes() == models[arch].read_bytes()


def test_rewrite_changes_keys_and_tensors(models: Mapping[str, Path], tmp_path: Path) -> None:
    def spoil(tensors: list[RawTensor]) -> list[RawTensor]:
        return [
            tensor.patched(4, b"\x00\x7e") for tensor in tensors if tensor.name.endswith("down_exps.weight")
        ]

    path = rewrite(
        models["qwen3moe"],
        tmp_path / "changed.gguf",
        keys={"qwen3moe.expert_used_count": 9, "general.file_type": (64, KV.INT8)},
        drop=["general.name"],
        tensors=spoil,
    )
    values, tensors = read_raw(path)
    assert values["qwen3moe.expert_used_count"] == (9, KV.UINT32, None)
    assert values["general.file_type"] == (64, KV.INT8, None)
    assert "general.name" not in values
    assert [tensor.name for tensor in tensors] == ["blk.0.ffn_down_exps.weight", "blk.1.ffn_down_exps.weight"]
    assert all(tensor.data[4:6] == b"\x00\x7e" for tensor in tensors)


def test_shards_hold_the_model_together(
    results: dict[str, Any], models: Mapping[str, Path], tmp_path: Path
) -> None:
    assert results["shards"] == results["qwen3moe"]
    values, tensors = read_raw(models["qwen3moe"])
    shards = [read_raw(path) for path in split_shards(models["qwen3moe"], tmp_path, 15)]
    assert [tensor for _, part in shards for tensor in part] == tensors
    assert [keys["split.no"][0] for keys, _ in shards] == list(range(len(shards)))
    assert values.items() <= shards[0][0].items()


def test_the_per_expert_layout_is_complete_and_unknown_to_stock(
    results: dict[str, Any], models: Mapping[str, Path]
) -> None:
    tensors = {tensor.name: tensor for tensor in read_raw(models["per expert"])[1]}
    stacked = {tensor.name: tensor for tensor in read_raw(models["llama"])[1]}
    parts = [tensors[f"blk.1.ffn_down.{expert}.weight"] for expert in range(N_EXPERT)]
    assert b"".join(part.data for part in parts) == stacked["blk.1.ffn_down_exps.weight"].data
    assert not any("_exps" in name for name in tensors)
    assert results["per expert"] == {"loaded": False}


def test_hand_made_records_are_what_readers_expect(tmp_path: Path) -> None:
    path = tmp_path / "hand.gguf"
    body = (
        kv_string("general.architecture", "é") + kv_u32("n", 7) + kv_record("empty", ([], KV.ARRAY, KV.INT8))
    )
    table = tensor_record("t", (2, 3), 0, 0)
    path.write_bytes((gguf_header(3, body + table, n_tensors=1)).ljust(160, b"\0") + bytes(24))
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "é"
    assert reader.fields["n"].contents() == 7
    assert reader.fields["empty"].contents() == []
    assert [int(n) for n in reader.tensors[0].shape] == [2, 3]


def test_hostile_headers_are_small() -> None:
    hostile = gguf_header(1, kv_array_of_strings_header("a", 2**29))
    assert hostile[:24] == b"GGUF" + bytes([3, 0, 0, 0]) + bytes(8) + bytes([1]) + bytes(7)
    assert len(hostile) < 60
    assert gguf_header(0, version=2, byte_order=">")[:8] == b"GGUF\0\0\0\2"


# The part below runs in the child process, on every file named on its command line.


def run_stock(path: str) -> dict[str, Any]:
    """Evaluate random tokens, then decode greedily, and note which experts each token was sent to."""
    import llama_cpp

    routing: dict[str, list[list[int]]] = {}
    ggml = llama_cpp.llama_cpp._lib
    ggml.ggml_get_name.restype = ctypes.c_char_p
    ggml.ggml_nbytes.restype = ctypes.c_size_t

    def watch(tensor: int, asked: bool, _: int) -> bool:
        pointer = ctypes.c_void_p(tensor)
        name = ggml.ggml_get_name(pointer).decode()
        if not name.startswith("ffn_moe_argsort-"):
            return not asked
        if not asked:
            order = np.empty(ggml.ggml_nbytes(pointer) // 4, np.int32)
            ggml.ggml_backend_tensor_get(
                pointer,
                order.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(0),
                ctypes.c_size_t(order.nbytes),
            )
            chosen = order.reshape(-1, N_EXPERT)[:, :N_EXPERT_USED]
            routing.setdefault(name.partition("-")[2], []).extend(chosen.tolist())
        return True

    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        return {"loaded": False}
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = 512, 1, 1
    settings.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(watch)
    context = llama_cpp.llama_init_from_model(model, settings)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)

    tokens = np.random.default_rng(0).integers(0, N_TEST_VOCAB, N_PROMPT).tolist()
    logits = []
    for _ in range(1 + N_DECODED):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)  # the batch only points to it
        batch = llama_cpp.llama_batch_get_one(array, len(array))
        # logits of every token: without them the last block drops all tokens but one before its experts
        batch.logits = (ctypes.c_int8 * len(array))(*[1] * len(array))
        assert llama_cpp.llama_decode(context, batch) == 0
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,)).copy()
        logits.append(row)
        tokens = [int(row.argmax())]
    stacked = np.stack(logits)
    result = {
        "finite": bool(np.isfinite(stacked).all()),
        "std": float(stacked.std()),
        "digest": hashlib.sha256(stacked.tobytes()).hexdigest(),
        "routing": routing,
        "text": round_trip(vocabulary, TEXT),
    }
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return result


def round_trip(vocabulary: Any, text: str) -> str | None:
    """Text to tokens and back; None if the vocabulary is not the byte-level one."""
    import llama_cpp

    if llama_cpp.llama_vocab_type(vocabulary) != llama_cpp.LLAMA_VOCAB_TYPE_BPE:
        return None
    data = text.encode()
    tokens = (llama_cpp.llama_token * 64)()
    n_tokens = llama_cpp.llama_tokenize(vocabulary, data, len(data), tokens, len(tokens), True, False)
    buffer = ctypes.create_string_buffer(256)
    n_bytes = llama_cpp.llama_detokenize(vocabulary, tokens, n_tokens, buffer, len(buffer), False, True)
    return buffer.raw[:n_bytes].decode()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(run_stock(argument)), flush=True)
