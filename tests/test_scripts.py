"""The scripts, run as a user runs them, on real files; llama.cpp judges what they write."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from ggufmoe.models import demo_model_path

SCRIPTS = Path(__file__).parent.parent / "scripts"
SHAPES = ["deepseek-moe-16b", "qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"]
TEXT = "def main():\n\treturn 'plain ASCII' ~ w300"
N_VOCAB = 512

# In a process of its own, because a GGML_ASSERT ends the process.
EVALUATE = """
import ctypes, json, sys
import llama_cpp as llama, numpy as np
path, text = sys.argv[1].encode(), sys.argv[2].encode()
model = llama.llama_model_load_from_file(path, llama.llama_model_default_params())
vocab = llama.llama_model_get_vocab(model)
params = llama.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
context = llama.llama_init_from_model(model, params)
tokens = (llama.llama_token * 256)()
n_token = llama.llama_tokenize(vocab, text, len(text), tokens, 256, False, False)
piece = ctypes.create_string_buffer(1024)
n_byte = llama.llama_detokenize(vocab, tokens, n_token, piece, 1024, False, False)
status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, n_token))
n_vocab = llama.llama_vocab_n_tokens(vocab)
logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (n_vocab,))
print(json.dumps({
    "status": status, "n_vocab": n_vocab, "text": piece.raw[:n_byte].decode(),
    "finite": bool(np.isfinite(logits).all()), "std": float(logits.std()),
}))
"""


def run_script(
    name: str, *args: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / name, *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def make_synthetic(out: Path, shape: str, *args: str) -> subprocess.CompletedProcess[str]:
    size = ["--layers", "2", "--shrink", "16", "--vocab", str(N_VOCAB)]
    return run_script("make_synthetic.py", "--shape", shape, *size, "-o", out, *args)


def evaluate(model: Path, text: str) -> dict[str, Any]:
    command = [sys.executable, "-c", EVALUATE, str(model), text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest of the shapes, in Q4_0, with seed 0."""
    path = tmp_path_factory.mktemp("synthetic") / "mixtral.gguf"
    assert make_synthetic(path, "mixtral-8x7b").returncode == 0
    return path


@pytest.mark.parametrize(
    ("shape", "type_"),
    [*zip(SHAPES, ["Q4_0", "Q8_0", "Q4_K", "F16"], strict=True), ("qwen3-30b-a3b", "Q6_K")],
)
def test_synthetic_model_runs_in_llama_cpp(shape: str, type_: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    done = make_synthetic(path, shape, "--type", type_)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{path}\n"
    result = evaluate(path, TEXT)
    assert result["status"] == 0
    assert result["n_vocab"] == N_VOCAB
    assert result["text"] == TEXT
    assert result["finite"]
    assert 0.8 < result["std"] < 1.25  # weights keep the scale of their input


def test_gpt_oss_experts_are_mxfp4(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_synthetic(path, "gpt-oss-20b", "--type", "Q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert types["blk.0.ffn_up_exps.weight"] == "MXFP4"
    assert types["blk.0.attn_q.weight"] == "Q8_0"


def test_no_two_experts_are_alike(mixtral: Path) -> None:
    stacks = [tensor.data for tensor in GGUFReader(mixtral).tensors if "_exps" in tensor.name]
    experts = [expert.tobytes() for stack in stacks for expert in stack]
    assert len(experts) == 2 * 3 * 8
    assert len(set(experts)) == len(experts)
    rows = [row.tobytes() for stack in stacks for row in stack[0]]
    assert len(set(rows)) == len(rows)


def test_half_of_the_scales_are_negative(mixtral: Path) -> None:
    """A mean other than zero would let every token choose the same experts."""
    [output] = [tensor.data for tensor in GGUFReader(mixtral).tensors if tensor.name == "output.weight"]
    high_bytes_of_scales = output.reshape(-1, 18)[:, 1]
    assert 0.45 < (high_bytes_of_scales >= 0x80).mean() < 0.55


def test_same_seed_same_bytes(mixtral: Path, tmp_path: Path) -> None:
    for seed in ("0", "1"):
        make_synthetic(tmp_path / seed, "mixtral-8x7b", "--seed", seed)
    same, other = (tmp_path / seed for seed in ("0", "1"))
    assert same.read_bytes() == mixtral.read_bytes()
    assert other.read_bytes() != mixtral.read_bytes()
    assert other.stat().st_size == mixtral.stat().st_size


def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("precious")
    done = make_synthetic(path, "mixtral-8x7b")
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert path.read_text() == "precious"
    assert make_synthetic(path, "mixtral-8x7b", "--force").returncode == 0
    assert path.read_bytes()[:4] == b"GGUF"
    assert list(tmp_path.iterdir()) == [path]  # no temporary file stays behind


def test_a_disk_too_small_is_noticed_before_writing(tmp_path: Path) -> None:
    size = ["--layers", "20000", "--type", "F16"]  # 56 TB
    done = run_script("make_synthetic.py", "--shape", "mixtral-8x7b", *size, "-o", tmp_path / "big.gguf")
    assert done.returncode == 1
    assert "are free on its disk" in done.stderr
    assert not list(tmp_path.iterdir())


def test_interrupted_writing_leaves_no_file(tmp_path: Path) -> None:
    size = ["--layers", "8", "--vocab", str(N_VOCAB)]  # 6.5 GB, of which little gets written
    command = [sys.executable, str(SCRIPTS / "make_synthetic.py"), "--shape", "mixtral-8x7b", *size]
    with subprocess.Popen(
        [*command, "-o", str(tmp_path / "big.gguf")], stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "Aborted!" in errors
    assert not list(tmp_path.iterdir())


def test_training_without_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError(name='torch')")
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_script("train_demo_model.py", "train", tmp_path, tmp_path / "out.gguf", env=env)
    assert done.returncode == 1
    assert done.stderr == "Error: Training needs torch, which is missing: pip install 'ggufmoe[train]'\n"


def test_corpus_without_the_debian_packages_names_them(tmp_path: Path) -> None:
    done = run_script("train_demo_model.py", "corpus", tmp_path / "texts", "--root", tmp_path)
    assert done.returncode == 1
    assert "bible-kjv and debian-handbook" in done.stderr
    assert not (tmp_path / "texts").exists()


def test_demo_model_is_small_and_documented() -> None:
    path = demo_model_path()
    assert path.stat().st_size <= 26_000_000
    readme = path.with_name("README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(path.read_bytes()).hexdigest() in readme
    assert all(word in readme for word in ("bible-kjv", "debian-handbook", "CC-BY-SA-3.0", "PSF-2.0"))


def test_demo_model_runs_in_llama_cpp() -> None:
    result = evaluate(demo_model_path(), TEXT)
    assert result["status"] == 0
    assert result["n_vocab"] == 6144
    assert result["text"] == TEXT
    assert result["finite"]
