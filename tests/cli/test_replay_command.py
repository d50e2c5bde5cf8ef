"""``ggufmoe replay`` through click, on traces written here."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ggufmoe.cli import CommandLine
from ggufmoe.cli.replay import MAX_LINE
from ggufmoe.cli.replay import replay as replay_command
from ggufmoe.moe.policies import DEFAULT_POLICY, POLICIES
from ggufmoe.moe.trace import TraceBank, TraceHeader, TraceStep, TraceWriter

BANKS = tuple(TraceBank(layer, "exps", 8, 2, 2**20) for layer in range(2))
HEADER = TraceHeader("tiny", "qwen3moe", 2, BANKS)
ROUTED = ((0, 1), (2, 3), (0, 1), (2, 4), (0, 1), (5, 1))


def write(path: Path, header: TraceHeader = HEADER, hits: int | None = None) -> Path:
    with path.open("w", encoding="utf-8") as file:
        writer = TraceWriter(file, header)
        for number, experts in enumerate(ROUTED):
            for bank in header.banks:
                writer.write(TraceStep(number, number < 2, bank.layer, "exps", (experts,), hits=hits))
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.trace")


class OneCommand(CommandLine):
    """The real group, which turns errors into text and an exit code, with one command."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        return replay_command


def run(*args: str | Path) -> Result:
    @click.group(cls=OneCommand)
    def group() -> None: ...

    return CliRunner().invoke(group, ["replay", *(os.fspath(arg) for arg in args)])


def as_json(*args: str | Path) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_whole_text(tiny: Path) -> None:
    result = run(tiny, "--resident-experts", "2,50%", "--policy", "lru", "--policy", "static")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "tiny.trace",
        "tiny (qwen3moe): 2 layers, 2 of 8 experts, 4 decoded tokens",
        "hit rate       2     50%",
        "lru       12.5 %  75.0 %",
        "static    62.5 %  75.0 %",
        "optimum   62.5 %  75.0 %",
        "uploads per token    2  50%",
        "lru                3.5  1.0",
        "static             0.0  0.0",
        "optimum            0.0  0.0",
        "bytes per token        2    50%",
        "lru              3.5 MiB  1 MiB",
        "static               0 B    0 B",
        "optimum              0 B    0 B",
        "",
    ]


def test_json(tiny: Path) -> None:
    found = as_json(tiny, "--resident-experts", "50%", "--resident-experts", "all,0")
    assert found["default_policy"] == DEFAULT_POLICY
    assert found["resident_experts"] == ["50%", "all", "0"]
    assert (found["max_uploads"], found["delay"]) == (None, 0)
    assert list(found["policies"]) == list(POLICIES)
    lru = found["policies"]["lru"]
    assert lru["by_residents"]["50%"] == {
        "hit_rate": 0.75,
        "uploads_per_token": 1.0,
        "bytes_per_token": 2**20,
    }
    rates = [by["hit_rate"] for by in lru["by_residents"].values()]
    assert lru["hit_rate"] == pytest.approx(sum(rates) / 3) and rates[2] == 0
    [trace] = found["traces"]
    assert (trace["model"], trace["architecture"], trace["decode_tokens"]) == ("tiny", "qwen3moe", 4)
    assert trace["policies"]["lru"]["50%"]["routings"] == 16
    assert trace["policies"]["lru"]["50%"]["hits"] == 12
    assert trace["recorded"] is None


def test_one_budget_is_the_hit_rate(tiny: Path) -> None:
    found = as_json(tiny, "--resident-experts", "50%", "--policy", "lru")
    assert found["policies"] == {
        "lru": {"hit_rate": 0.75, "by_residents": found["policies"]["lru"]["by_residents"]}
    }


def test_several_traces(tiny: Path, tmp_path: Path) -> None:
    header = replace(HEADER, banks=tuple(replace(bank, expert_bytes=0) for bank in BANKS))
    other = write(tmp_path / "other.trace", header)
    result = run(tiny, other)
    assert result.exit_code == 0 and "Mean of 2 traces" in result.stdout
    assert result.stdout.count("bytes per token") == 1  # the other does not know
    assert max(map(len, result.stdout.splitlines())) <= 100
    found = as_json(tiny, other)
    assert len(found["traces"]) == 2
    assert found["traces"][1]["policies"]["lru"]["25%"]["bytes_per_token"] is None


def test_budgets_in_bytes(tiny: Path) -> None:
    found = as_json(tiny, "--vram", "4MiB", "--vram", "8MiB")
    assert found["resident_experts"] == ["4 MiB", "8 MiB"]
    alike = as_json(tiny, "--resident-experts", "2,4")
    for name, figures in found["policies"].items():
        assert list(figures["by_residents"].values()) == list(
            alike["policies"][name]["by_residents"].values()
        )


def test_limits(tiny: Path) -> None:
    found = as_json(
        tiny, "--resident-experts", "all", "--max-uploads", "1", "--delay", "1", "--policy", "lru"
    )
    assert (found["max_uploads"], found["delay"]) == (1, 1)
    assert (
        found["policies"]["lru"]["hit_rate"]
        < as_json(tiny, "--resident-experts", "all")["optimum"]["hit_rate"]
    )


def test_a_recorded_run(tmp_path: Path) -> None:
    banks = tuple(replace(bank, n_slots=2, residents=(0, 7)) for bank in BANKS)
    header = replace(HEADER, banks=banks, policy="static")
    path = write(tmp_path / "run.trace", header, hits=0)
    result = run(path)
    assert result.exit_code == 1
    assert (
        "recorded with static: 0 hits of 24 routings, replayed 6; they differ from step 0, layer 0 on"
        in result.stdout.splitlines()
    )
    banks = tuple(replace(bank, residents=(6, 7)) for bank in banks)
    path = write(tmp_path / "run.trace", replace(header, banks=banks), hits=0)
    assert "recorded with static: 0 hits of 24 routings, replayed the same" in run(path).stdout.splitlines()
    assert as_json(path)["traces"][0]["recorded"] == {
        "policy": "static",
        "routings": 24,
        "hits": 0,
        "replayed_hits": 0,
        "equal": True,
    }


# What is refused ----------------------------------------------------------------------------------------


def refused(result: Result, *said: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ") and all(text in line for text in said), line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--resident-experts", "1,x"], "'x' is not a number of experts"),
        (["--resident-experts", ""], "'' is not a number of experts"),
        (["--resident-experts", "101%"], "'101%' is not a number of experts"),
    ],
)
def test_wrong_budgets(tiny: Path, args: list[str], said: str) -> None:
    refused(run(tiny, *args), said, code=2)


@pytest.mark.parametrize(
    "args", [["--policy", "best"], ["--vram", "6"], ["--delay", "-1"], ["--max-uploads", "x"]]
)
def test_wrong_options(tiny: Path, args: list[str]) -> None:
    assert run(tiny, *args).exit_code == 2


def test_bytes_of_unknown_experts(tmp_path: Path) -> None:
    header = replace(HEADER, banks=tuple(replace(bank, expert_bytes=0) for bank in BANKS))
    path = write(tmp_path / "a.trace", header)
    refused(
        run(path, "--vram", "1GiB"), "a.trace: The trace does not say how large", "--resident-experts", code=2
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1: the file ends before its first step"),
        (b"GGUF\x03\x00\x00\x00\xff\xfe", "line 1: is no routing trace"),
        (b"\x00" * (MAX_LINE + 1), f"a line is longer than {MAX_LINE:,} characters"),
        (b"ggufmoe-trace 7\n", "line 1: version 7 of the trace format is newer than 1. Update ggufmoe."),
        (b'ggufmoe-trace 1\n{"model":"a","arch":"b","n_layer":1}\n', "holds no step"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(content)
    refused(run(path), "a.trace", said)


def test_no_file(tmp_path: Path) -> None:
    refused(run(tmp_path / "none.trace"), "none.trace: No such file or directory")
    refused(run(tmp_path), "is no file")
    os.mkfifo(tmp_path / "pipe")
    refused(run(tmp_path / "pipe"), "is no file")


def test_errors_as_json(tmp_path: Path) -> None:
    result = run(tmp_path / "none.trace", "--json")
    assert result.exit_code == 1 and "No such file" in json.loads(result.stdout)["error"]
