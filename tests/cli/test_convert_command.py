"""``ggufmoe convert``, ``export`` and ``blocks`` as users run them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import COMMAND, ENVIRONMENT, assert_refused, ggufmoe, in_process
from tiny_models import rewrite, split_shards, write_tiny_model

from ggufmoe.gguf.model import open_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf", "qwen3moe", n_expert=4, text=True)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("p") / "profile.json"
    path.write_text(json.dumps({"layers": {"0": [1, 2, 3, 4], "1": [0, 0.5, 0, 9]}}))
    return path


@pytest.fixture(scope="module")
def reordered(tiny: Path, profile: Path) -> Path:
    path = tiny.with_name("reordered.gguf")
    assert in_process("convert", tiny, "-o", path, "--profile", profile).code == 0
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# The whole way ----------------------------------------------------------------------------------------------


def test_there_and_back_with_default_names(tiny: Path, tmp_path: Path) -> None:
    done = ggufmoe("convert", tiny, "--verify", cwd=tmp_path)
    assert (done.code, done.out) == (0, "tiny-blocks.gguf\n")
    assert re.fullmatch(
        r"\[\S+ \S+, f32/q8_0, 24 blocks aligned to 512, order: file, verified\]\n", done.err
    ), done
    done = ggufmoe("export", "tiny-blocks.gguf", "--verify", cwd=tmp_path)
    assert (done.code, done.out) == (0, "tiny-stock.gguf\n")
    assert "identical to the source (SHA-256)" in done.err
    assert (tmp_path / "tiny-stock.gguf").read_bytes() == tiny.read_bytes()
    assert names_in(tmp_path) == ["tiny-blocks.gguf", "tiny-stock.gguf"]


def test_the_demo_converts_and_all_commands_take_the_result(tmp_path: Path) -> None:
    out = tmp_path / "demo.gguf"
    done = in_process("convert", "demo", "-o", out, "--json")
    assert done.code == 0
    assert done.json["blocks"] == 6 * 64 * 3
    assert done.json["bytes"] == out.stat().st_size
    inspected, original = (in_process("inspect", path, "--json").json for path in (out, "demo"))
    for one in (inspected, original):
        del one["models"][0]["path"], one["models"][0]["files"]
    assert inspected == original
    args = (
        "-p",
        "In the beginning",
        "-n",
        "12",
        "--temperature",
        "0",
        "--threads",
        "1",
        "--resident-experts",
        "25%",
    )
    assert in_process("run", out, *args).out == in_process("run", "demo", *args).out
    verified = in_process("verify", out, "--resident-experts", "50%", "--decode-tokens", "4", "--json")
    assert verified.code == 0 and verified.json["max_difference"] == 0.0
    chat = in_process(
        "chat", out, "--temperature", "0", "--threads", "1", "--max-tokens", "4", stdin=b"Hello\n"
    )
    assert chat.code == 0


def test_shards_get_one_name(tiny: Path, tmp_path: Path) -> None:
    split_shards(tiny, tmp_path, 20)
    done = ggufmoe("convert", "tiny-00002-of-00002.gguf", cwd=tmp_path)
    assert (done.code, done.out) == (0, "tiny-blocks.gguf\n")


def test_stock_layout_and_json(tiny: Path, tmp_path: Path) -> None:
    done = ggufmoe("convert", tiny, "--layout", "stock", "--json", cwd=tmp_path)
    assert done.code == 0
    assert done.json["path"] == "tiny-stock.gguf"
    assert done.err == ""
    assert open_model(tmp_path / "tiny-stock.gguf").blocks is None


def test_quantising_by_names_of_any_case(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "t.gguf", "qwen3moe", n_expert=4, quant="F16")
    args = ("--expert-type", "q4_0", "--layout", "stock")
    done = in_process("convert", source, "-o", tmp_path / "q.gguf", *args)
    assert done.code == 0
    types = {tensor.type_name for tensor in open_model(tmp_path / "q.gguf").tensors if "exps" in tensor.name}
    assert types == {"q4_0"}
    refused = in_process("convert", source, "-o", tmp_path / "x.gguf", "--quantize", "Q5_X")
    assert refused.code == 2 and "Q4_K_M" in refused.err
    refused = in_process("convert", source, "-o", tmp_path / "x.gguf", "--imatrix", source)
    assert_refused(refused, "--imatrix is for quantising", code=2)


# Blocks -----------------------------------------------------------------------------------------------------


def test_blocks_are_listed_with_their_original_numbers(tiny: Path, reordered: Path) -> None:
    plain, ours = (in_process("blocks", path, "--json").json for path in (tiny, reordered))
    assert (plain["block_file"], ours["block_file"]) == (False, True)
    assert plain["count"] == ours["count"] == 24
    assert (ours["order"], ours["version"], ours["source"]["names"]) == ("heat", 1, ["tiny.gguf"])
    by_name = {block["name"]: block for block in plain["blocks"]}
    with tiny.open("rb") as source, reordered.open("rb") as file:
        for block in ours["blocks"]:
            other = by_name[block["name"]]
            assert {**other, "offset": 0, "heat": None} == {**block, "offset": 0, "heat": None}
            source.seek(other["offset"])
            file.seek(block["offset"])
            assert source.read(other["bytes"]) == file.read(block["bytes"])
    layer_1 = [b for b in ours["blocks"] if b["layer"] == 1 and b["projection"] == "down"]
    assert [(b["expert"], b["heat"]) for b in layer_1] == [(3, 9.0), (1, 0.5), (0, 0.0), (2, 0.0)]


def test_blocks_are_filtered_and_placed(reordered: Path) -> None:
    args = ("--filter", r"blk\.1\.ffn_(up|down)", "--resident-experts", "2", "--device", "cpu", "--json")
    found = in_process("blocks", reordered, *args).json
    assert found["count"] == 8
    assert {block["projection"] for block in found["blocks"]} == {"up", "down"}
    assert {block["device"] for block in found["blocks"]} == {"CPU"}
    rule = r"blk\.0\..*_exps\.(1|2)\.weight=cpu"
    assert in_process("blocks", reordered, "--rule", rule, "--json").code == 0


def test_the_table_of_blocks(reordered: Path) -> None:
    done = in_process("blocks", reordered, "--filter", "blk.0.ffn_up", "--limit", "3")
    lines = done.out.splitlines()
    assert lines[1] == "block file, order: heat, blocks aligned to 512; 4 blocks, 34 KiB"
    assert lines[3].split() == ["block", "layer", "expert", "type", "offset", "bytes", "heat"]
    assert [line.split()[0] for line in lines[4:]] == [f"blk.0.ffn_up_exps.{e}.weight" for e in (3, 2, 1)]
    assert max(map(len, lines[3:])) <= 100
    assert done.err == "\n1 more; --limit 0 prints all, --json too.\n"


@pytest.mark.parametrize("arch", ["grovemoe", "gemma4", "qwen3next", "gpt-oss"])
def test_every_bank_and_merged_projection_is_listed(arch: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "t.gguf", arch)
    found = in_process("blocks", path, "--json").json
    banks = open_model(path).banks
    assert found["count"] == sum(bank.n_expert * len(bank.weights) for bank in banks)
    assert found["bytes"] == sum(bank.slot_bytes * bank.n_expert for bank in banks)


def test_a_dense_model_has_no_blocks(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "d.gguf", "llama-dense")
    assert_refused(in_process("blocks", path, "--json"), "a dense model")
    refused = in_process("blocks", path, "--filter", "(")
    assert refused.code == 2 and "is not a regular expression" in refused.err


# What is refused --------------------------------------------------------------------------------------------


def test_refusals_are_one_line(tiny: Path, reordered: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.gguf"
    out.write_text("mine")
    assert_refused(ggufmoe("convert", tiny, "-o", out), "exists already", "--force", code=2)
    assert_refused(ggufmoe("convert", tiny, "-o", tiny, "--force"), "the model itself", code=2)
    assert_refused(ggufmoe("convert", tiny, "-o", out, "--json"), "exists already", code=2)
    assert_refused(ggufmoe("export", tiny, "-o", tmp_path / "e.gguf"), "not a block file", code=2)
    assert_refused(ggufmoe("convert", tmp_path / "none.gguf"), "no such file", code=2)
    assert_refused(
        ggufmoe("convert", tiny, "--order", "heat", "-o", tmp_path / "x.gguf"), "no routing profile", code=2
    )
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(reordered.read_bytes()[:-5000])
    assert_refused(ggufmoe("convert", cut, "-o", tmp_path / "x.gguf"), "cut short")
    assert_refused(ggufmoe("convert", tiny, "-o", "/proc/x.gguf"), "/proc/x.gguf")
    assert names_in(tmp_path) == ["b.gguf", "cut.gguf"]
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"layers": {}}',
        '{"layers": [1]}',
        '{"layers": {"a": [1]}}',
        '{"layers": {"0": [true]}}',
        '{"layers": {"0": "1234"}}',
        '{"layers": {"0": [1, 2, 3]}}',
        '{"layers": {"0": [NaN, 1, 1, 1]}}',
    ],
)
def test_what_is_no_profile_is_refused(tiny: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    done = in_process("convert", tiny, "-o", tmp_path / "b.gguf", "--profile", path)
    assert_refused(done, "rofile", code=done.code or 1)
    assert names_in(tmp_path) == ["p.json"]


HOSTILE = "\x1b[31m[red]x[/INST]\x07\r\n[/]"


def test_hostile_strings_are_never_printed_raw(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d\x1b[2Jx\n[/INST]"
    folder.mkdir(parents=True)
    keys = {"general.name": HOSTILE, "general.alignment": 32}
    path = rewrite(tiny, folder / "m.gguf", keys=keys)
    out = folder / "b\x1b]0;x\x07.gguf"
    for outcome in (
        ggufmoe("convert", path, "-o", out),
        ggufmoe("blocks", out),
        ggufmoe("export", out, "-o", folder / "e.gguf"),
        ggufmoe("convert", path, "-o", out),
        ggufmoe("blocks", folder / "absent\x1b.gguf"),
    ):
        printed = outcome.raw_out.decode() + outcome.err
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", printed), outcome
    assert (folder / "e.gguf").read_bytes() == path.read_bytes()
    assert open_model(out).name == HOSTILE


@pytest.mark.parametrize(
    "name",
    [
        'it\'s "q" $x #1%20.gguf',
        "Загрузки 模型.gguf",
        "[red]x[INST].gguf",
        "a\nb.gguf",
        "-x.gguf",
        "x" * 250,
    ],
)
def test_names_of_every_kind(tiny: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(tiny.read_bytes())
    done = ggufmoe("convert", "--json", "-o", "out", "--", name, cwd=tmp_path)
    assert done.code == 0, done
    (tmp_path / name).unlink()
    assert ggufmoe("export", "--json", "-o", f"./{name}", "out", cwd=tmp_path).code == 0
    assert (tmp_path / name).read_bytes() == tiny.read_bytes()


def test_a_name_that_is_no_text(tiny: Path, tmp_path: Path) -> None:
    name = b"\xff.gguf"
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(tiny.read_bytes())
    done = ggufmoe("convert", name, "-o", b"\xfe.gguf", "--json", cwd=tmp_path)
    assert done.code == 0, done
    assert done.json["path"] == "\udcfe.gguf"
    assert ggufmoe("blocks", b"\xfe.gguf", "--json", cwd=tmp_path).json["source"]["names"] == ["\ufffd.gguf"]


def test_ctrl_c_cleans_up(tmp_path: Path) -> None:
    """SIGINT while the file grows: 130, nothing left."""
    source = write_tiny_model(tmp_path / "big.gguf", "qwen3moe", n_layer=4, n_expert=256, quant="F16")
    # quantising takes long enough to be interrupted
    command = [*COMMAND, "convert", str(source), "-o", str(tmp_path / "b.gguf"), "--quantize", "IQ4_XS"]
    process = subprocess.Popen(
        [*command, "--allow-requantize", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        if any(p.name.endswith(".part") and p.stat().st_size > 1_000_000 for p in tmp_path.iterdir()):
            break
        time.sleep(0.005)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, (out, err)
    assert out == b"" and b"Traceback" not in err
    assert names_in(tmp_path) == ["big.gguf"]


def test_what_ends_up_in_the_file_reads_nothing_but_base_names(tiny: Path, tmp_path: Path) -> None:
    """A shared file says nothing of the folders of whoever made it."""
    out = tmp_path / "b.gguf"
    assert in_process("convert", tiny, "-o", out).code == 0
    assert os.fsencode(tiny.parent) not in out.read_bytes()
