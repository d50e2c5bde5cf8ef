"""``ggufmoe inspect`` through click, on real files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from tiny_models import ARCHITECTURES, KV, RawTensor, rewrite, to_per_expert_layout, write_tiny_model

from ggufmoe.cli import CommandLine
from ggufmoe.cli.inspect import inspect
from ggufmoe.gguf.model import open_model


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(inspect, [os.fspath(arg) for arg in args])


def run_as_command(*args: str | Path) -> Result:
    """Through the group, which turns errors into text and an exit code."""

    @click.group(cls=CommandLine)
    def group() -> None: ...

    return CliRunner().invoke(group, ["inspect", *(os.fspath(arg) for arg in args)])


def as_json(*args: str | Path) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen3moe")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "dense.gguf", "llama-dense")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_experts_are_what_the_tensors_say(tmp_path: Path, arch: str) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", arch)
    [found] = as_json(path)["models"]
    tensors = [t for t in open_model(path).tensors if "exps." in t.name]
    assert found["layout"] == "moe"
    assert found["moe_layers"] == len({t.name.split(".")[1] for t in tensors})
    assert found["bytes"]["experts"] == sum(t.n_bytes for t in tensors)
    assert found["parameters"]["experts"] == sum(math.prod(t.ne) for t in tensors)
    for layer in found["layers"]:
        own = [t for t in tensors if t.name.startswith(f"blk.{layer['layer']}.")]
        assert layer["experts"] * layer["bytes_per_expert"] == layer["bytes"] == sum(t.n_bytes for t in own)
        assert layer["top_k"] == 3
    for kind in ("parameters", "bytes"):
        amounts = found[kind]
        assert amounts["dense"] + amounts["experts"] == amounts["total"]
        assert amounts["active_dense"] + amounts["active_experts"] == amounts["active"] <= amounts["total"]


def test_text_says_what_the_model_is(tmp_path: Path) -> None:
    result = run(write_tiny_model(tmp_path / "m.gguf", "deepseek", n_layer=4))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "  name          tiny deepseek" in lines
    assert "  layers        4: 3 MoE, 1 dense; 2 shared experts in each MoE layer" in lines
    assert "  KV cache      2 MiB (1,024 tokens, f16)" in lines
    assert ["1-3", "8", "3", "25.5", "KiB", "q8_0"] in [line.split() for line in lines]


def test_interleaved_layers_are_joined(tmp_path: Path) -> None:
    result = run(write_tiny_model(tmp_path / "m.gguf", "llama4", n_layer=8))
    assert "1-7 by 2" in result.stdout


def test_context_and_type_set_the_size_of_the_cache(tiny: Path) -> None:
    def kv_bytes(*options: str) -> int:
        return int(as_json(tiny, *options)["models"][0]["context"]["kv_bytes"])

    n_bytes = kv_bytes("--context", "4096")
    assert n_bytes == 2 * 2 * 64 * 4096 * 2  # K and V, 2 layers, one head of 64, f16
    assert kv_bytes("--context", "8192") == 2 * n_bytes
    assert kv_bytes("--context", "4096", "--kv-type", "q8_0") == n_bytes * 34 // 64
    assert kv_bytes("--context", "4096", "--kv-type", "q4_0") == n_bytes * 18 // 64
    assert as_json(tiny)["models"][0]["context"]["tokens"] == 1024  # the trained length


def test_an_unknown_cache_is_null_and_said(tiny: Path, tmp_path: Path) -> None:
    path = rewrite(
        tiny,
        tmp_path / "m.gguf",
        keys={"general.architecture": "new", "new.expert_count": 8, "new.expert_used_count": 3},
    )
    assert as_json(path)["models"][0]["context"]["kv_bytes"] is None
    assert "unknown for this architecture" in run(path).stdout


def test_a_dense_model_has_nothing_to_schedule(dense: Path) -> None:
    result = run(dense)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "dense model: nothing to schedule" in result.stdout
    [found] = as_json(dense)["models"]
    assert (found["layout"], found["layers"], found["moe_layers"]) == ("dense", [], 0)


def test_the_old_layout_is_named(tmp_path: Path) -> None:
    path = to_per_expert_layout(write_tiny_model(tmp_path / "new.gguf", "llama"), tmp_path / "old.gguf")
    result = run(path)
    assert result.exit_code == 0
    assert "one tensor per expert (old layout)" in result.stdout
    assert "old layout" in result.stderr
    assert as_json(path)["models"][0]["layout"] == "one_tensor_per_expert"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert_used_count": 9}, "expert_used_count is 9"),
        ({"expert_used_count": 0}, "expert_used_count is 0"),
        ({"expert_count": 1025}, "expert_count is 1025, the limit is 1024"),
        ({"expert_group_count": 8}, "expert_group_count is 8"),
    ],
)
def test_faults_of_the_metadata_are_warnings(
    tiny: Path, tmp_path: Path, keys: dict[str, int], said: str
) -> None:
    path = rewrite(tiny, tmp_path / "m.gguf", keys={f"qwen3moe.{key}": value for key, value in keys.items()})
    result = run(path)
    assert result.exit_code == 0
    assert said in result.stderr and result.stderr.startswith("Warning: ")
    assert "MoE layers" in result.stdout
    assert said in " ".join(as_json(path)["models"][0]["warnings"])


@pytest.mark.parametrize("n_expert", [8, 0])
def test_experts_that_are_not_recognised_are_no_dense_model(
    tiny: Path, tmp_path: Path, n_expert: int
) -> None:
    def rename(tensors: list[RawTensor]) -> list[RawTensor]:
        return [RawTensor(t.name.replace("_exps", "_specialists"), t.type, t.ne, t.data) for t in tensors]

    path = rewrite(tiny, tmp_path / "m.gguf", keys={"qwen3moe.expert_count": n_expert}, tensors=rename)
    result = run_as_command(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "recognised" in result.stderr


def test_files_of_ollamas_engine_are_shown_and_named(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "m.gguf", "gpt-oss", quant="MXFP4")
    mxfp4 = 39

    def as_ollama(tensors: list[RawTensor]) -> list[RawTensor]:
        vision = RawTensor("v.blk.0.attn_q.weight", 0, (32, 4), bytes(32 * 4 * 4))
        return [RawTensor(t.name, 4 if t.type == mxfp4 else t.type, t.ne, t.data) for t in tensors] + [vision]

    path = rewrite(source, tmp_path / "ollama.gguf", tensors=as_ollama)
    result = run(path)
    assert result.exit_code == 0
    assert "Ollama" in result.stderr and "MXFP4" in result.stderr
    [found], [stock] = as_json(path)["models"], as_json(source)["models"]
    assert found["layers"] == stock["layers"]
    assert found["bytes"]["active"] == stock["bytes"]["active"]
    assert found["bytes"]["total"] == stock["bytes"]["total"] + 512


def test_several_models_side_by_side(tmp_path: Path, tiny: Path, dense: Path) -> None:
    other = write_tiny_model(tmp_path / "gpt.gguf", "gpt-oss", n_layer=4, n_expert=64)
    result = run(dense, other, tiny, "--vram", "1MiB")
    assert result.exit_code == 0
    assert all(len(line) <= 100 for line in result.stdout.splitlines() if not line.startswith("/"))
    assert "It says nothing about the quality of answers." in " ".join(result.stdout.split())
    value = as_json(dense, other, tiny, "--vram", "1MiB")
    order = value["verdict"]["order"]
    assert sorted(entry["model"] for entry in order) == [0, 1, 2]
    slow = [entry["slow_bytes_per_token"] for entry in order]
    assert slow == sorted(slow) and slow[-1] > 0 and order[-1]["model"] == 1
    assert [model["path"] for model in value["models"]] == [str(dense), str(other), str(tiny)]
    assert "verdict" not in as_json(tiny)


@pytest.mark.parametrize(
    "name",
    [
        "[red]x[/INST].gguf",
        "[bold]",
        "-x.gguf",
        'Загрузки 模型 it\'s "q" $x #1%20.gguf',
        "two  spaces.gguf",
        "x" * 200 + ".gguf",
    ],
)
def test_names_are_shown_literally(tiny: Path, dense: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tiny)
    result = run(path, dense)
    assert result.exit_code == 0
    assert str(path) in result.stdout
    assert as_json(path)["models"][0]["path"] == str(path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"\xff.gguf", "\\udcff.gguf"),
        (b"a\nb.gguf", "a\\nb.gguf"),
        (b"\x1b[31mred.gguf", "\\x1b[31mred.gguf"),
    ],
)
def test_names_that_are_no_text_are_escaped(tiny: Path, tmp_path: Path, name: bytes, shown: str) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.symlink_to(tiny)
    result = run(path, tiny)
    assert result.exit_code == 0
    assert shown in result.stdout and "\x1b" not in result.stdout
    assert as_json(path)["models"][0]["path"] == str(path)


@pytest.mark.parametrize("name", ["[/]", "[/INST] [bold]x", "two\nlines", "\x1b]0;title\x07", "\u202egnp"])
def test_model_names_are_shown_literally(tiny: Path, tmp_path: Path, name: str) -> None:
    path = rewrite(tiny, tmp_path / "m.gguf", keys={"general.name": name})
    result = run(path, tiny)
    shown = name.encode("unicode_escape").decode() if not name.startswith("[") else name
    assert result.exit_code == 0
    assert f"  name          {shown}" in result.stdout.splitlines()
    assert as_json(path)["models"][0]["name"] == name


def test_errors_are_one_line(tmp_path: Path) -> None:
    absent = run_as_command(tmp_path / "[red]x[/INST].gguf")
    assert (absent.exit_code, absent.stdout) == (2, "")
    assert "[red]x[/INST].gguf: no such file" in absent.stderr and absent.stderr.count("\n") == 1
    (tmp_path / "no.gguf").write_text("hello")
    broken = run_as_command(tmp_path / "no.gguf", "--json")
    assert broken.exit_code == 1
    assert "error" in json.loads(broken.stdout)
    assert run_as_command("--context", "0", tmp_path).exit_code == 2
    assert run_as_command().exit_code == 2


def test_a_large_vocabulary_costs_nothing(tiny: Path, tmp_path: Path) -> None:
    tokens = [f"token number {n}" for n in range(150_000)]
    path = rewrite(
        tiny, tmp_path / "large.gguf", keys={"tokenizer.ggml.tokens": (tokens, KV.ARRAY, KV.STRING)}
    )
    start = time.perf_counter()
    assert run(path).exit_code == 0
    assert time.perf_counter() - start < 1


def test_importing_the_command_does_not_import_numpy() -> None:
    code = "import sys, ggufmoe.cli.inspect; print('numpy' in sys.modules)"
    run_ = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run_.stdout.strip() == "False"


def test_check_names_the_expert_whose_weights_are_no_numbers(tmp_path: Path) -> None:
    """The fp16 scale of one Q8_0 block set to NaN: layer 1, down, expert 1 (B7)."""

    def damaged(tensors: list[RawTensor]) -> list[RawTensor]:
        return [
            tensor.patched(len(tensor.data) // 8, b"\x00\x7e")
            if tensor.name == "blk.1.ffn_down_exps.weight"
            else tensor
            for tensor in tensors
        ]

    good = write_tiny_model(tmp_path / "good.gguf", "qwen3moe")
    bad = rewrite(good, tmp_path / "bad.gguf", tensors=damaged)
    result = CliRunner().invoke(inspect, [str(bad), "--check", "--json"])
    assert result.exit_code == 1
    (model,) = json.loads(result.stdout)["models"]
    (found,) = model["bad_blocks"]
    assert (found["layer"], found["projection"], found["expert"], found["n_bad_blocks"]) == (1, "down", 1, 1)
    assert "layer 1, down, expert 1: 1 blocks hold no numbers" in result.stderr
    assert CliRunner().invoke(inspect, [str(good), "--check"]).exit_code == 0
    assert (
        json.loads(CliRunner().invoke(inspect, [str(bad), "--json"]).stdout)["models"][0]["bad_blocks"]
        is None
    )
