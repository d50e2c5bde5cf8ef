"""One file from another: the same bytes, the same logits, and nothing left behind when it cannot be."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import (
    ARCHITECTURES,
    KV,
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

from ggufmoe import GgufMoeError, Session, SessionOptions, UsageError, parse_residents, parse_rule
from ggufmoe.errors import FormatError
from ggufmoe.gguf import blocks as b
from ggufmoe.gguf.model import open_model
from ggufmoe.models import demo_model_path
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from ggufmoe.run import convert as module
from ggufmoe.run.convert import ConvertOptions, convert, export
from ggufmoe.run.verify import verify

Profile = dict[int, list[int]]


def profile_for(path: Path) -> Profile:
    """A count for every expert, another order in every layer."""
    return {
        bank.layer: [int(n) for n in np.random.default_rng(bank.layer).permutation(bank.n_expert)]
        for bank in open_model(path).banks
        if bank.name == "exps"
    }


def logits(path: Path, plan: ContextPlan = harness.PLAN) -> NDArray[np.float32]:
    """Stock llama.cpp's logits, of a block file through its stock table."""
    llama = LlamaModel(path, LoadPlan(), offset=open_model(path).stock_offset)
    context = LlamaContext(llama, plan)
    try:
        return harness.decode_greedily(context)
    finally:
        context.close()
        llama.close()


def left_behind(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".part")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf", "qwen3moe", n_expert=4)


# There and back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "demo"])
def test_export_gives_the_source_back(arch: str, tmp_path: Path) -> None:
    source = demo_model_path() if arch == "demo" else write_tiny_model(tmp_path / "s.gguf", arch, n_expert=4)
    keys, tensors = read_raw(source)
    for profile in (None, profile_for(source)):
        convert(source, tmp_path / "b.gguf", ConvertOptions(profile=profile, force=True, verify=True))
        result = export(tmp_path / "b.gguf", tmp_path / "e.gguf", force=True, verify=True)
        assert result.matches_source
        exported_keys, exported = read_raw(tmp_path / "e.gguf")
        assert list(exported_keys.items()) == list(keys.items())
        assert [t.name for t in exported] == [t.name for t in tensors]
        for ours, theirs in zip(exported, tensors, strict=True):
            assert (ours.type, ours.ne) == (theirs.type, theirs.ne)
            assert hashlib.sha256(ours.data).digest() == hashlib.sha256(theirs.data).digest()
        assert (tmp_path / "e.gguf").read_bytes() == source.read_bytes()


def test_empty_arrays_survive(tiny: Path, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.merges": ([], KV.ARRAY, KV.STRING), "x.none": ([], KV.ARRAY, KV.INT32)}
    source = rewrite(tiny, tmp_path / "a.gguf", keys=keys)
    convert(source, tmp_path / "b.gguf", ConvertOptions(order="file"))
    export(tmp_path / "b.gguf", tmp_path / "e.gguf")
    values, _ = read_raw(tmp_path / "e.gguf")
    assert values["tokenizer.ggml.merges"] == ([], KV.ARRAY, KV.STRING)
    assert (tmp_path / "e.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("alignment", [32, 64, 1024])
def test_the_sources_own_alignment_comes_back(tiny: Path, tmp_path: Path, alignment: int) -> None:
    source = rewrite(tiny, tmp_path / "a.gguf", keys={"general.alignment": alignment}, alignment=alignment)
    convert(source, tmp_path / "b.gguf")
    export(tmp_path / "b.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "e.gguf").read_bytes() == source.read_bytes()


def test_conversions_of_conversions(tiny: Path, tmp_path: Path) -> None:
    """Reordered, reordered again, to stock layout, and back: nothing is lost on the way."""
    first, second = profile_for(tiny), {layer: c[::-1] for layer, c in profile_for(tiny).items()}
    convert(tiny, tmp_path / "1.gguf", ConvertOptions(profile=first))
    convert(tmp_path / "1.gguf", tmp_path / "2.gguf", ConvertOptions(profile=second))
    convert(tiny, tmp_path / "direct.gguf", ConvertOptions(profile=second))
    assert (tmp_path / "2.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()
    convert(tmp_path / "2.gguf", tmp_path / "kept.gguf", ConvertOptions(order="file"))
    assert open_model(tmp_path / "kept.gguf").orders == open_model(tmp_path / "2.gguf").orders
    # the stored heat is a profile
    convert(tmp_path / "2.gguf", tmp_path / "heat.gguf", ConvertOptions(order="heat"))
    assert open_model(tmp_path / "heat.gguf").orders == open_model(tmp_path / "2.gguf").orders
    export(tmp_path / "heat.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "e.gguf").read_bytes() == tiny.read_bytes()


def test_a_profile_without_an_order_is_only_stored(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "b.gguf", ConvertOptions(order="file", profile=profile_for(tiny)))
    model = open_model(tmp_path / "b.gguf")
    assert not model.orders
    assert {layer: list(heat) for (layer, _), heat in model.heat.items()} == profile_for(tiny)


def test_the_stored_hash_is_that_of_the_source(tiny: Path, tmp_path: Path) -> None:
    result = convert(tiny, tmp_path / "b.gguf")
    facts = open_model(tmp_path / "b.gguf").blocks
    assert facts is not None
    assert facts.source_hashes == result.source_hashes == (hashlib.sha256(tiny.read_bytes()).hexdigest(),)


# The same model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [*(a for a in ARCHITECTURES if a != "grovemoe"), "groups"])
def test_a_reordered_file_has_the_same_logits_bit_for_bit(arch: str, tmp_path: Path) -> None:
    """8 experts: the sums over them come out the same in any order. ``groups`` chooses groups first."""
    source = write_tiny_model(tmp_path / "s.gguf", "deepseek2" if arch == "groups" else arch)
    if arch == "groups":
        keys = {"deepseek2.expert_group_count": 4, "deepseek2.expert_group_used_count": 2}
        source = rewrite(source, tmp_path / "g.gguf", keys=keys)
    convert(source, tmp_path / "b.gguf", ConvertOptions(order="heat", profile=profile_for(source)))
    model = open_model(tmp_path / "b.gguf")
    assert set(model.orders) == {(bank.layer, bank.name) for bank in model.banks}
    reference = logits(source)
    assert np.array_equal(logits(tmp_path / "b.gguf"), reference)
    # and with half of the experts in slots, placed by their original numbers
    options = SessionOptions(
        residents=parse_residents("50%"), cold_store="mmap", threads=2, context=256, rules=()
    )
    compared = verify(model, options, n_prompt=33, n_decode=8, seed=1)
    assert compared.max_difference == 0.0
    assert compared.decode_hit_rate is not None and compared.decode_hit_rate > 0


def test_the_demo_reordered_differs_no_more_than_stock_does_from_itself(tmp_path: Path) -> None:
    """64 experts: a softmax sums them up in the order of the file, so its last bit can differ. Stock llama.cpp
    differs as much between a prompt evaluated at once and token by token.
    """
    demo = demo_model_path()
    plan = ContextPlan(n_ctx=256, n_threads=2)

    def at_once_and_one_by_one() -> float:
        llama = LlamaModel(demo, LoadPlan())
        rows = []
        for at_once in (True, False):
            context = LlamaContext(llama, plan)
            tokens = harness.prompt_for(llama.n_vocab)
            if at_once:
                context.decode(tokens, 0, all_logits=True)
                rows.append(np.stack([context.logits(row).copy() for row in range(len(tokens))]))
            else:
                each = []
                for position, token in enumerate(tokens):
                    context.decode([token], position)
                    each.append(context.logits().copy())
                rows.append(np.stack(each))
            context.close()
        llama.close()
        return float(np.abs(rows[0] - rows[1]).max())

    own = at_once_and_one_by_one()
    assert own > 0
    reference = logits(demo)
    for seed in range(2):
        counts = {
            bank.layer: [int(n) for n in np.random.default_rng([seed, bank.layer]).permutation(64)]
            for bank in open_model(demo).banks
        }
        convert(demo, tmp_path / "b.gguf", ConvertOptions(profile=counts, force=True))
        ours = logits(tmp_path / "b.gguf")
        assert np.abs(ours - reference).max() < 2 * own
        assert (ours.argmax(axis=1) == reference.argmax(axis=1)).all()


def test_experts_that_go_by_their_numbers_stay_where_they_are(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "s.gguf", "grovemoe")
    with pytest.raises(FormatError, match="smaller experts of layer 0 go by the numbers of the experts"):
        convert(source, tmp_path / "b.gguf", ConvertOptions(order="heat", profile=profile_for(source)))
    convert(source, tmp_path / "b.gguf", ConvertOptions(order="auto", profile=profile_for(source)))
    model = open_model(tmp_path / "b.gguf")
    assert not model.orders
    assert len(model.heat[0, "exps"]) == 8 and len(model.heat[0, "chexps"]) == 4
    assert np.array_equal(logits(tmp_path / "b.gguf"), logits(source))


def test_rules_and_residents_mean_original_numbers(tiny: Path, tmp_path: Path) -> None:
    profile = {0: [1, 2, 3, 4], 1: [4, 3, 2, 1]}
    convert(tiny, tmp_path / "b.gguf", ConvertOptions(profile=profile))
    options = SessionOptions(
        devices=("cpu",),
        rules=(parse_rule(r"blk\.0\.ffn_.*_exps\.(0|2)\.weight=CPU"),),
        residents=parse_residents("2"),
        cold_store="mmap",
        threads=1,
        context=64,
    )
    with Session(tmp_path / "b.gguf", options) as session:
        placed = session.setup.placement.residents
        assert {expert for expert, _ in placed[0, "exps"]} == {0, 2}
        assert {expert for expert, _ in placed[1, "exps"]} == {0, 1}  # the hottest
        bank = session.model.banks[0]
        places = session.executor.banks[0, "exps"].places
        assert [bank.original(p) for p, place in enumerate(places) if place >= 0] == [2, 0]


def test_bad_blocks_are_reported_by_original_numbers(tiny: Path, tmp_path: Path) -> None:
    from ggufmoe.gguf.badblocks import find_bad_blocks

    bad = rewrite(tiny, tmp_path / "bad.gguf", tensors=with_bad_block("blk.1.ffn_down_exps.weight", 1))
    options = ConvertOptions(profile={0: [1, 2, 3, 4], 1: [4, 1, 3, 2]}, allow_bad_blocks=True)
    convert(bad, tmp_path / "b.gguf", options)
    model = open_model(tmp_path / "b.gguf")
    assert model.banks[1].order == (0, 2, 3, 1)
    found = find_bad_blocks(model)
    assert [(f.layer, f.projection, f.expert, f.n_bad_blocks) for f in found] == [(1, "down", 1, 1)]


# A process of its own, without any of our code: llama-cpp-python and a FILE that stands at the stock table
STOCK = """
import ctypes, json, sys
import numpy as np
from llama_cpp import llama_cpp as L
path, offset, prompt = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
quiet = L.llama_log_callback(lambda *_: None); L.llama_log_set(quiet, None)
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p; libc.fseek.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
file = libc.fopen(path.encode(), b"rb"); libc.fseek(file, offset, 0)
def anonymous():
    text = open("/proc/self/status").read()
    return int(text[text.index("RssAnon:") + 8 :].split()[0]) << 10
before = anonymous()
params = L.llama_model_default_params(); params.n_gpu_layers = 0; params.use_extra_bufts = False
model = L.llama_model_load_from_file_ptr(file, params)
loaded = anonymous()
cp = L.llama_context_default_params(); cp.n_ctx, cp.n_threads, cp.n_threads_batch = 256, 2, 2
context = L.llama_init_from_model(model, cp)
batch = L.llama_batch_init(64, 0, 1); batch.n_tokens = len(prompt)
for i, token in enumerate(prompt):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
    batch.seq_id[i][0] = 0
assert L.llama_decode(context, batch) == 0
n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
rows = np.stack([np.ctypeslib.as_array(L.llama_get_logits_ith(context, i), (n_vocab,)) for i in range(len(prompt))])
np.save(sys.argv[4], rows)
print(loaded - before)
"""


def test_unpatched_llama_cpp_reads_the_block_file_without_a_copy(tmp_path: Path) -> None:
    """The weights stay in the mapped file: what the process allocates is far less than they are."""
    source = write_tiny_model(tmp_path / "s.gguf", "qwen3moe", n_layer=4, n_expert=256, quant="F16")
    convert(source, tmp_path / "b.gguf")
    model = open_model(tmp_path / "b.gguf")
    prompt = harness.prompt_for(128)
    command = [sys.executable, "-c", STOCK, tmp_path / "b.gguf", str(model.stock_offset), str(prompt)]
    done = subprocess.run(
        [*command, tmp_path / "rows.npy"], capture_output=True, text=True, timeout=60, check=True
    )
    assert np.array_equal(np.load(tmp_path / "rows.npy"), logits(source)[: len(prompt)])
    assert model.n_bytes > 48 << 20
    assert int(done.stdout) < model.n_bytes // 4


@pytest.mark.parametrize("cold_store", ["mmap", "repack"])
def test_a_session_on_a_block_file_is_stocks(tmp_path: Path, cold_store: str) -> None:
    source = write_tiny_model(tmp_path / "s.gguf", "deepseek", quant="Q4_0")
    convert(source, tmp_path / "b.gguf")
    options = SessionOptions(residents=parse_residents("50%"), cold_store=cold_store, threads=2, context=256)
    assert (
        verify(open_model(tmp_path / "b.gguf"), options, n_prompt=33, n_decode=8, seed=1).max_difference == 0
    )


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
        with pytest.raises(FormatError, match="made for Ollama's own engine: .*type number 4"):
            convert(path, tmp_path / "b.gguf", ConvertOptions(layout=layout))


def test_version_2_is_read_and_version_3_written(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"GGUF\x03", b"GGUF\x02", 1))
    convert(path, tmp_path / "b.gguf")
    export(tmp_path / "b.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "e.gguf").read_bytes() == tiny.read_bytes()


# What cannot be converted ---------------------------------------------------------------------------------


def with_bad_block(
    name: str, expert: int, scale: int = 0x7E00
) -> Callable[[list[RawTensor]], list[RawTensor]]:
    """NaN for the scale of the first block of one expert."""

    def edit(tensors: list[RawTensor]) -> list[RawTensor]:
        return [
            t.patched(expert * (len(t.data) // t.ne[2]), struct.pack("<H", scale)) if t.name == name else t
            for t in tensors
        ]

    return edit


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
        convert(path, out / "b.gguf", ConvertOptions(quantization=module.Quantization()))
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


# Where it is written ----------------------------------------------------------------------------------------


def test_nothing_is_overwritten_without_force(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.gguf"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        convert(tiny, out)
    assert out.read_text() == "mine"
    convert(tiny, out, ConvertOptions(force=True))
    assert open_model(out).blocks is not None


@pytest.mark.parametrize("how", ["same", "link", "hard link", "shard"])
def test_the_input_is_never_written_over(tiny: Path, tmp_path: Path, how: str) -> None:
    source = Path(shutil.copy(tiny, tmp_path / "model.gguf"))
    out = source
    if how == "link":
        out = tmp_path / "link.gguf"
        out.symlink_to(source)
    elif how == "hard link":
        out = tmp_path / "hard.gguf"
        out.hardlink_to(source)
    elif how == "shard":
        paths = split_shards(tiny, tmp_path, 20)
        source, out = paths[0], paths[1]
    before = out.read_bytes()
    with pytest.raises(UsageError, match="that is the model itself"):
        convert(source, out, ConvertOptions(force=True))
    assert out.read_bytes() == before


def test_no_space_is_noticed_before_a_byte_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(GgufMoeError, match=r"needs [\d,]+ bytes, 1,000 are free there \([\d,]+ too few\)"):
        convert(tiny, tmp_path / "b.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write fails in the middle."""
    code = (
        "import resource, sys; from pathlib import Path; from ggufmoe.run.convert import convert\n"
        "from ggufmoe import GgufMoeError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: convert(sys.argv[1], Path(sys.argv[2]))\n"
        "except GgufMoeError as error: print(error)"
    )
    out = tmp_path / "b.gguf"
    done = subprocess.run([sys.executable, "-c", code, tiny, out], capture_output=True, text=True, timeout=60)
    assert f"{out}: cannot be written: File too large" in done.stdout, done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/ggufmoe.gguf", "/sys/ggufmoe.gguf"])
def test_a_place_that_cannot_be_written_is_named(tiny: Path, place: str) -> None:
    with pytest.raises(GgufMoeError, match=f"{place}: (cannot be written|needs)"):
        convert(tiny, Path(place))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tiny: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(GgufMoeError, match="cannot be written: Permission denied"):
        convert(tiny, tmp_path / "b.gguf")


def test_a_folder_and_a_missing_folder_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a folder, not a file"):
        convert(tiny, tmp_path)
    with pytest.raises(UsageError, match="its folder does not exist"):
        convert(tiny, tmp_path / "no" / "b.gguf")


def test_an_interrupt_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    def interrupt(_phase: str, done: int, total: int) -> None:
        if done > total // 2:
            assert len(left_behind(tmp_path)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny, tmp_path / "b.gguf", on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte(tiny: Path, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    convert(
        tiny,
        tmp_path / "b.gguf",
        ConvertOptions(verify=True),
        lambda phase, done, total: seen.setdefault(phase, []).append((done, total)),
    )
    assert list(seen) == ["Converting", "Verifying"]
    for steps in seen.values():
        assert steps[-1][0] == steps[-1][1]
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert seen["Converting"][-1][1] == tiny.stat().st_size


def test_verify_notices_what_the_disk_lost(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.FileComparer

    def corrupting(fd: int, path: Path) -> module.FileComparer:
        os.pwrite(fd, b"\xff\xff", 200_000)
        return real(fd, path)

    monkeypatch.setattr(module, "FileComparer", corrupting)
    with pytest.raises(FormatError, match=r"differs from the source at byte [\d,]+"):
        convert(tiny, tmp_path / "b.gguf", ConvertOptions(verify=True))
    assert list(tmp_path.iterdir()) == []


def test_export_of_what_is_no_block_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a block file"):
        export(tiny, tmp_path / "e.gguf")


def test_block_names_are_unique_and_their_spans_disjoint(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "b.gguf", ConvertOptions(profile=profile_for(tiny)))
    model = open_model(tmp_path / "b.gguf")
    found = list(b.list_blocks(model.banks, model.heat))
    assert len({block.name for block in found}) == len(found) == 2 * 3 * 4
    ends = [block.offset + block.n_bytes for block in found]
    assert all(end <= later.offset for end, later in zip(ends, found[1:], strict=False))
