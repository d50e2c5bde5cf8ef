"""``ggufmoe`` as users start it: a real process with its exit code and streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing
from tiny_models import RawTensor, rewrite

from ggufmoe.cli import cli

COMMAND = [sys.executable, "-m", "ggufmoe"]
# A GPU or a width of the terminal must not change what these tests see.
ENVIRONMENT = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "100",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}


@dataclass(frozen=True)
class Outcome:
    """How a process ended. ``out`` must be UTF-8, so a test that reads it checks that too."""

    code: int
    raw_out: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw_out.decode("utf-8")

    @property
    def json(self) -> Any:
        return strict_json(self.out)


def ggufmoe(
    *args: str | bytes | Path,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    command: list[str] | None = None,
) -> Outcome:
    done = subprocess.run(
        [*(command or COMMAND), *args],
        input=stdin,
        capture_output=True,
        env={**ENVIRONMENT, **(env or {})},
        cwd=cwd,
        timeout=60,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr.decode("utf-8"))


def in_process(*args: str | Path, stdin: bytes | None = None) -> Outcome:
    """The same through click's runner: no process, so that many cases cost little."""
    result = click.testing.CliRunner().invoke(cli, [os.fspath(arg) for arg in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout_bytes, result.stderr)


def assert_refused(outcome: Outcome, *said: str, code: int = 1) -> None:
    """One line on stderr that says all of ``said``, nothing on stdout (with --json one object), no traceback."""
    assert outcome.code == code, outcome
    lines = outcome.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), outcome
    for text in said:
        assert text in lines[0], outcome
    if outcome.raw_out:
        assert lines[0].startswith(f"Error: {outcome.json['error']}"), outcome


def strict_json(text: str) -> Any:
    """Raises: ValueError for NaN and Infinity, which are no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def endless(source: Path, path: Path) -> Path:
    """A text model whose likeliest token is never one that ends the answer: their rows of the output are zero."""
    n_control = 3

    def change(tensors: list[RawTensor]) -> list[RawTensor]:
        changed = []
        for tensor in tensors:
            row_bytes = len(tensor.data) // tensor.ne[-1]
            zeros = bytes(n_control * row_bytes)
            is_output = tensor.name == "output.weight"
            changed.append(tensor.patched(len(tensor.data) - len(zeros), zeros) if is_output else tensor)
        return changed

    return rewrite(source, path, tensors=change)
