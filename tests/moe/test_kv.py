"""Context sizes against what stock llama.cpp allocates, which it says in its log."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES, rewrite, write_tiny_model

from ggufmoe.gguf.model import open_model
from ggufmoe.models import demo_model_path
from ggufmoe.moe.kv import KV_TYPES, context_memory

# More architectures than the repository can write, where a checkout has them next to it.
MORE_MODELS = Path(__file__).parents[2].parent / "shared" / "archs"
CASES = [(3000, False, "f16"), (700, True, "q8_0"), (20000, False, "q4_0")]

ALLOCATE = """
import ctypes, json, os, re, sys
import llama_cpp
lines = []
log = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text.decode("utf-8", "replace")))
llama_cpp.llama_log_set(log, None)
llama_cpp.llama_backend_init()
types = {"f16": 1, "q8_0": 8, "q4_0": 2}
results = []
for path in sys.argv[2:]:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    for n_ctx, swa_full, kv_type in json.loads(sys.argv[1]):
        lines.clear()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.swa_full = n_ctx, swa_full
        params.type_k = params.type_v = types[kv_type]
        context = llama_cpp.llama_init_from_model(model, params)
        assert context, (path, kv_type, lines[-3:])
        found = re.findall(r"(llama_kv_cache|llama_memory_recurrent): size = +([0-9.]+) MiB", "".join(lines))
        results.append((path, n_ctx, swa_full, kv_type, found))
        llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
print(json.dumps(results))
"""


def _compare(paths: Sequence[Path]) -> None:
    """llama.cpp prints sizes in MiB with two decimals, one line per cache."""
    command = [sys.executable, "-c", ALLOCATE, json.dumps(CASES), *map(str, paths)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout)
    assert len(results) == len(paths) * len(CASES)
    for path, n_ctx, swa_full, kv_type, found in results:
        memory = context_memory(open_model(path), n_ctx, kv_type, swa_full=swa_full)
        case = f"{path} {n_ctx} {kv_type}"
        assert memory is not None, case
        for name, ours in (
            ("llama_kv_cache", memory.kv_bytes),
            ("llama_memory_recurrent", memory.state_bytes),
        ):
            theirs = [float(size) for kind, size in found if kind == name]
            assert ours / 2**20 == pytest.approx(sum(theirs), abs=0.0051 * max(1, len(theirs))), case


def test_tiny_models_against_llama_cpp(tmp_path: Path) -> None:
    _compare([write_tiny_model(tmp_path / f"{a}.gguf", a) for a in (*ARCHITECTURES, "llama-dense")])


def test_deeper_models_against_llama_cpp(tmp_path: Path) -> None:
    """Enough layers for the patterns of windows and recurrent layers to show."""
    deep = {"gpt-oss": 5, "llama4": 6, "qwen3next": 5, "lfm2moe": 5}
    _compare([write_tiny_model(tmp_path / f"{a}.gguf", a, n_layer=n) for a, n in deep.items()])


@pytest.mark.skipif(not MORE_MODELS.is_dir(), reason="no further models next to this checkout")
def test_further_architectures_against_llama_cpp() -> None:
    _compare(sorted(MORE_MODELS.glob("*.gguf")))


def test_the_demo_against_llama_cpp() -> None:
    _compare([demo_model_path()])


def test_a_window_needs_less_than_the_whole_context(tmp_path: Path) -> None:
    model = open_model(write_tiny_model(tmp_path / "m.gguf", "gpt-oss"))
    windowed, whole = context_memory(model, 20000), context_memory(model, 20000, swa_full=True)
    assert windowed and whole
    assert windowed.attention[0] < windowed.attention[1] == whole.attention[0] == whole.attention[1]
    small = context_memory(model, 256)
    assert small and small.attention[0] == small.attention[1]


def test_an_unknown_architecture_is_unknown(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "known.gguf", "qwen3moe")
    path = rewrite(source, tmp_path / "unknown.gguf", keys={"general.architecture": "qwen99moe"})
    assert context_memory(open_model(path), 4096) is None


def test_heads_that_quantised_blocks_do_not_fit_are_unknown(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "even.gguf", "qwen3moe")
    path = rewrite(source, tmp_path / "odd.gguf", keys={"qwen3moe.attention.key_length": 80})
    assert context_memory(open_model(path), 4096, "f16") is not None
    assert context_memory(open_model(path), 4096, "q8_0") is None


@pytest.mark.parametrize(
    "keys",
    [
        {"block_count": 2**31},
        {"block_count": 0},
        {"attention.head_count": 0},
        {"attention.head_count": -4},
        {"attention.head_count_kv": [1]},
        {"attention.head_count_kv": [1, 2, 3, 4]},
        {"attention.head_count_kv": "many"},
        {"attention.key_length": 2**32 - 1},
        {"nextn_predict_layers": 99},
    ],
)
def test_nonsense_in_the_metadata_is_no_crash(tmp_path: Path, keys: dict[str, object]) -> None:
    source = write_tiny_model(tmp_path / "good.gguf", "qwen3moe")
    path = rewrite(
        source, tmp_path / "bad.gguf", keys={f"qwen3moe.{name}": value for name, value in keys.items()}
    )
    for kv_type in KV_TYPES:
        memory = context_memory(open_model(path), 4096, kv_type)
        assert memory is None or memory.n_bytes >= 0
