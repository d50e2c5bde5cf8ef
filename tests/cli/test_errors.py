"""What is refused: one line that says what, where and what to do next; no traceback, no signal, no answer."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from command_line import assert_refused, ggufmoe, in_process
from tiny_models import RawTensor, rewrite, to_per_expert_layout, write_tiny_model

from ggufmoe import __version__
from ggufmoe.cli.options import BYTES

PROMPT = ("-p", "hello", "-n", "1", "--threads", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen3moe", text=True)


def refused_by_all(path: Path, *said: str, commands: tuple[str, ...] = ("run", "verify", "chat")) -> None:
    """Each command that loads a model says the same, at once, with or without --json."""
    for command in commands:
        start = time.perf_counter()
        assert_refused(in_process(command, path, *(PROMPT if command == "run" else ())), *said)
        assert time.perf_counter() - start < 2
    outcome = in_process("run", path, "--json", *PROMPT)
    assert_refused(outcome, *said)
    assert set(outcome.json) == {"error", "hint"}


# Files ---------------------------------------------------------------------------------------------------


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    outcome = in_process("run", tmp_path / "[red]x[/INST].gguf", "--json", *PROMPT)
    assert_refused(outcome, "[red]x[/INST].gguf: no such file", "'demo'", code=2)


def test_a_truncated_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "[/tmp].gguf"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(tiny.read_bytes()[:-5000])
    refused_by_all(path, "[", "tmp].gguf: ")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for data in (b"", b"GGUF", b"hello", b"\0" * 1000):
        path.write_bytes(data)
        assert_refused(in_process("run", path, *PROMPT), "x.gguf: ")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to("b.gguf")
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    for command in ("run", "inspect"):
        args = PROMPT if command == "run" else ()
        assert_refused(in_process(command, tmp_path / "a.gguf", *args), "a.gguf: cannot be opened")


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama-dense")
    refused_by_all(path, "a dense model (llama)", "no routed experts to place. Use llama.cpp")


def test_an_unknown_architecture_is_refused(tiny: Path, tmp_path: Path) -> None:
    values = {
        "context_length": 1024,
        "embedding_length": 128,
        "block_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": 8,
        "expert_used_count": 3,
    }
    keys = {f"new.{key}": value for key, value in values.items()}
    path = rewrite(tiny, tmp_path / "m.gguf", keys={"general.architecture": "new", **keys})
    refused_by_all(path, "unknown model architecture: 'new'")


def test_the_old_layout_is_refused(tmp_path: Path) -> None:
    new = write_tiny_model(tmp_path / "new.gguf", "llama")
    refused_by_all(to_per_expert_layout(new, tmp_path / "old.gguf"), "one tensor per expert", "an old layout")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert_used_count": 9}, "qwen3moe.expert_used_count is 9, it must be 1 to expert_count (8)"),
        ({"expert_used_count": 0}, "qwen3moe.expert_used_count is 0, it must be 1 to expert_count (8)"),
        ({"expert_count": 1025}, "qwen3moe.expert_count is 1025, the limit is 1024"),
        ({"expert_group_count": 8}, "qwen3moe.expert_group_count is 8, it must be below expert_count (8)"),
    ],
)
def test_hostile_numbers_of_experts_are_refused(
    tiny: Path, tmp_path: Path, keys: dict[str, int], said: str
) -> None:
    path = rewrite(tiny, tmp_path / "m.gguf", keys={f"qwen3moe.{key}": value for key, value in keys.items()})
    refused_by_all(path, said)
    assert_refused(ggufmoe("run", path, *PROMPT), said)  # a process of its own: llama.cpp would abort it


def test_files_of_ollamas_engine_are_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "m.gguf", "gpt-oss", quant="MXFP4")

    def renumbered(tensors: list[RawTensor]) -> list[RawTensor]:
        return [RawTensor(t.name, 4 if t.type == 39 else t.type, t.ne, t.data) for t in tensors]

    def with_vision(tensors: list[RawTensor]) -> list[RawTensor]:
        return [*tensors, RawTensor("v.blk.0.attn_q.weight", 0, (32, 4), bytes(32 * 4 * 4))]

    for change, difference in ((renumbered, "MXFP4"), (with_vision, "v.blk.0.attn_q.weight")):
        path = rewrite(source, tmp_path / "ollama.gguf", tensors=change)
        refused_by_all(path, "a file made for Ollama's own engine", difference, commands=("run",))
    key = "gpt-oss.attention.layer_norm_rms_epsilon"
    path = rewrite(source, tmp_path / "ollama.gguf", drop=[key])
    refused_by_all(path, "layer_norm_rms_epsilon", commands=("run",))


# Budgets, devices, rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("1KiB", 1024),
        ("64MB", 64_000_000),
        ("64MiB", 67_108_864),
        ("0.5GiB", 2**29),
        ("0.1 GB", 100_000_000),
        ("6gib", 6 * 2**30),
        ("10000GiB", 10_000 * 2**30),
        ("9007199254740993B", 9007199254740993),  # exact where a float is not
        ("4.35KB", 4350),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert BYTES.convert(text, None, None) == n_bytes


@pytest.mark.parametrize(
    "text",
    [
        "64",
        "-1",
        "-1GiB",
        "50%",
        "6G",
        "GiB",
        "",
        "1e3MiB",
        "nanGiB",
        "0x10B",
        "6 GiB free",
        "9" * 400 + "TiB",
    ],
)
def test_what_is_no_size(tiny: Path, text: str) -> None:
    outcome = in_process("run", tiny, *PROMPT, "--vram", text, "--json")
    assert (outcome.code, outcome.raw_out) == (2, b"")
    assert "is not a size with its unit, for example 6GiB" in outcome.err


@pytest.mark.parametrize("vram", ["0", "1KiB"])
def test_a_budget_that_is_too_small_names_the_missing_bytes(tiny: Path, vram: str) -> None:
    needed = 2 * 2 * 26112  # two experts of two layers
    missing = needed - (0 if vram == "0" else 1024)
    outcome = in_process("run", tiny, *PROMPT, "--vram", vram, "--resident-experts", "2", "--json")
    assert_refused(outcome, f"need {needed:,} bytes of slots", f"({missing:,} too few)")
    assert in_process("run", tiny, *PROMPT, "--vram", vram).code == 0  # nothing is resident then
    assert in_process("run", tiny, *PROMPT, "--vram", "10000GiB", "--resident-experts", "all").code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--device", "CUDA7"), "no device called"),
        (("--device", "[red]"), "[red]"),
        (("--rule", "nothing=CPU"), "The rule nothing=CPU matches no tensor of this model"),
        (("--rule", "[0-9][0-9][0-9]=CPU"), "The rule [0-9][0-9][0-9]=CPU matches no tensor"),
        (("--rule", "exps=CUDA0"), "a device that is not in use. Add --device CUDA0"),
        (("--rule", "attn_q=CUDA0"), "a device that is not in use. Add it with --device"),
        (("--rule", "ffn_up_exps=CPU"), "takes expert 0 of layer 0 apart"),
        (("--rule", "(=CPU"), "is not a regular expression"),
        (("--rule", "a{99999999999999999999}=CPU"), "is not a regular expression"),
        (("--rule", "exps"), "'exps' is not a rule of the form REGEX=DEVICE"),
        (("--cold-store", "pinned"), "--cold-store pinned needs a device with host memory"),
        (("--resident-experts", "nonsense"), "'nonsense' is not a number of experts per layer"),
        (("--resident-experts", "-1"), "'-1' is not a number of experts per layer"),
        (("--resident-experts", "101%"), "'101%' is not a number of experts per layer"),
        (("--rpc", "nonsense"), "'nonsense' is not the address of an RPC server"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Path, args: tuple[str, ...], said: str) -> None:
    for command in ("run", "verify"):
        outcome = in_process(command, tiny, "--json", *(PROMPT if command == "run" else ()), *args)
        assert_refused(outcome, said, code=2)
        assert outcome.json["error"] in outcome.err
    assert in_process("run", tiny, *PROMPT, *args).raw_out == b""


def test_rules_with_brackets_work(tiny: Path) -> None:
    assert in_process("run", tiny, *PROMPT, "--rule", "[0-9]=CPU").code == 0
    assert in_process("run", tiny, *PROMPT, "--rule", "[[a]?exps=CPU").err.count("\n") == 1  # and no warning


@pytest.mark.parametrize(
    "args",
    [
        ("--bogus",),
        ("--context", "many"),
        ("-n", "-2"),
        ("--temperature", "nan"),
        ("--temperature", "-1"),
        ("--top-k", str(2**32 + 1)),
        ("--top-p", "nan"),
        ("--seed", str(2**32)),
        ("--threads", "0"),
        ("--cold-store", "attic"),
        ("another", "argument"),
    ],
)
def test_a_command_line_that_is_wrong_exits_with_2(tiny: Path, args: tuple[str, ...]) -> None:
    outcome = in_process("run", tiny, "--json", *PROMPT, *args)
    assert (outcome.code, outcome.raw_out) == (2, b"")
    assert "Error: " in outcome.err and "Traceback" not in outcome.err


def test_unknown_commands_and_users() -> None:
    assert in_process("nonsense").code == 2
    assert in_process("run").code == 2
    assert_refused(
        in_process("run", "~no-such-user/x.gguf", *PROMPT), "~no-such-user/x.gguf: no such file", code=2
    )


# Processes -----------------------------------------------------------------------------------------------


def test_both_ways_to_start_agree(tmp_path: Path) -> None:
    script = str(Path(sys.executable).with_name("ggufmoe"))
    for args in (["--version"], ["--help"], ["run", "--help"], ["run", "/nonexistent", "-p", "x"], ["run"]):
        assert ggufmoe(*args, command=[script]) == ggufmoe(*args)
    assert ggufmoe("--version").out == f"ggufmoe, version {__version__}\n"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert_refused(ggufmoe("run", broken, *PROMPT, "--json"), "broken.gguf")


def test_help_keeps_its_examples_apart() -> None:
    for command in ("run", "chat", "verify", "inspect", "devices", "rpc-server"):
        help_text = in_process(command, "--help").out
        assert re.search(r"^  Examples:\n    (ggufmoe|echo) ", help_text, re.MULTILINE), help_text
        assert "\\b" not in help_text


@pytest.mark.parametrize(
    "name",
    ["[/]", "[/INST] [bold]x", "two\nlines", "\x1b]0;title\x07"],
    ids=["close", "inst", "lines", "escape"],
)
def test_names_from_files_are_shown_literally(tiny: Path, tmp_path: Path, name: str) -> None:
    path = rewrite(
        tiny, tmp_path / "m.gguf", keys={"general.name": name, "qwen3moe.rope.scaling.type": name or "x"}
    )
    outcome = in_process("run", path, *PROMPT)
    assert outcome.code in (0, 1)
    assert "\x1b" not in outcome.err and outcome.err.count("\n") == 1
    if outcome.code:
        assert name.encode("unicode_escape").decode() in outcome.err.replace("\\\\", "\\")


# llama.cpp that cannot be used ---------------------------------------------------------------------------

FAKES: dict[str, tuple[str, str]] = {
    "libgomp": ('raise OSError("libgomp.so.1: cannot open shared object file")', "apt-get install libgomp1"),
    "musl": ('raise OSError("libc.musl-x86_64.so.1: cannot open shared object file")', "another C library"),
    "version": (
        '__version__ = "0.3.37"',
        "llama-cpp-python 0.3.37 is installed; ggufmoe supports 0.3.36 only",
    ),
    "absent": (
        "raise ModuleNotFoundError(\"No module named 'llama_cpp'\")",
        "llama-cpp-python is not installed",
    ),
    "symbol": ('__version__ = "0.3.36"', "llama.cpp's library lacks the function"),
}
MODULES = {
    "version": "",
    "symbol": "import ctypes\n_lib = ctypes.CDLL(None)\n",
}


@pytest.fixture(scope="module", params=list(FAKES))
def fake(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], str]:
    """An environment in which llama_cpp cannot be used, and what is said then."""
    code, said = FAKES[request.param]
    folder = tmp_path_factory.mktemp("fake")
    write_package(folder, code, MODULES.get(request.param, ""))
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}, said


def write_package(folder: Path, code: str, module: str = "") -> None:
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text(code + "\n")
    (folder / "llama_cpp" / "llama_cpp.py").write_text(module)


def test_without_llama_cpp_one_line_says_why(fake: tuple[dict[str, str], str], tiny: Path) -> None:
    env, said = fake
    commands: list[tuple[str | Path, ...]] = [
        ("run", tiny, *PROMPT),
        ("inspect", tiny, "--json"),
        ("devices",),
    ]
    for args in commands:
        outcome = ggufmoe(*args, env=env)
        assert_refused(outcome, said)
        assert "Install" in outcome.err or "build it" in outcome.err


@pytest.mark.parametrize("args", [("--version",), ("--help",), ("inspect", "--help"), ("run", "--help")])
def test_help_does_not_import_llama_cpp(tmp_path: Path, args: tuple[str, ...]) -> None:
    write_package(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGILL)")
    outcome = ggufmoe(*args, env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    assert (outcome.code, outcome.err) == (0, "")
