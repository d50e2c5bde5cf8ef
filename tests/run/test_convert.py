"""One file from another and back: the same bytes, the same logits, the same numbers for the experts."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import harness
import numpy as np
import pytest
from conversion import logits, profile_for, with_bad_block
from numpy.typing import NDArray
from tiny_models import (
    ARCHITECTURES,
    KV,
    read_raw,
    rewrite,
    write_tiny_model,
)

from ggufmoe import Session, SessionOptions, parse_residents, parse_rule
from ggufmoe.errors import FormatError
from ggufmoe.gguf.model import open_model
from ggufmoe.models import demo_model_path
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from ggufmoe.run.convert import ConvertOptions, convert, export
from ggufmoe.run.verify import PASSAGE, compare, verify


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
    keys: dict[str, object] = {
        "tokenizer.ggml.merges": ([], KV.ARRAY, KV.STRING),
        "x.none": ([], KV.ARRAY, KV.INT32),
    }
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


def evaluated(path: Path, *, at_once: bool) -> NDArray[np.float32]:
    """Stock llama.cpp's logits after every token of a text, as one batch or token by token."""
    llama = LlamaModel(path, LoadPlan(), offset=open_model(path).stock_offset)
    context = LlamaContext(llama, ContextPlan(n_ctx=256, n_threads=2))
    tokens = llama.tokenize(PASSAGE + "\n" + PASSAGE)[:160]
    step = len(tokens) if at_once else 1
    rows = []
    for start in range(0, len(tokens), step):
        context.decode(tokens[start : start + step], start, all_logits=True)
        rows += [context.logits(row).copy() for row in range(step)]
    context.close()
    llama.close()
    return np.stack(rows)


def test_the_demo_reordered_differs_less_than_stock_does_from_itself(tmp_path: Path) -> None:
    """64 experts: a softmax adds them up in the order of the file, so its last bit can differ. Stock llama.cpp
    differs more between a text evaluated at once and token by token.
    """
    demo = demo_model_path()
    reference = evaluated(demo, at_once=True)
    own = compare(reference, evaluated(demo, at_once=False), len(reference), None)
    for seed in range(3):
        counts = {
            bank.layer: [int(n) for n in np.random.default_rng([seed, bank.layer]).permutation(64)]
            for bank in open_model(demo).banks
        }
        convert(demo, tmp_path / "b.gguf", ConvertOptions(profile=counts, force=True))
        ours = compare(reference, evaluated(tmp_path / "b.gguf", at_once=True), len(reference), None)
        assert ours.max_difference <= own.max_difference < 1
        assert ours.mean_kl_divergence <= own.mean_kl_divergence < 1e-3
        assert ours.top1_agreement >= own.top1_agreement > 0.95


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
    command = [sys.executable, "-c", STOCK, str(tmp_path / "b.gguf"), str(model.stock_offset), str(prompt)]
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
