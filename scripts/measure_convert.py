"""How fast `ggufmoe convert` is next to `cp` on the same disk, and how much memory it takes.

Copy and conversion take turns; before each, what the disk has not written yet is written (`sync`). The result
of each is deleted. With --synced, the time until the disk has everything counts too.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click


@dataclass(frozen=True, slots=True)
class Run:
    """``peak_bytes`` is the process's largest resident set; pages of mapped files count."""

    seconds: float
    cpu_s: float
    peak_bytes: int


def run(command: list[str], synced: bool) -> Run:
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise click.ClickException(f"{command}: {error.decode()}")
    if synced:
        os.sync()
    return Run(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)


def describe(name: str, runs: list[Run], n_bytes: int) -> float:
    seconds = statistics.median(each.seconds for each in runs)
    times = ", ".join(f"{each.seconds:.2f}" for each in runs)
    peak = max(each.peak_bytes for each in runs)
    click.echo(
        f"{name:8} {seconds:7.2f} s  {n_bytes / seconds / 1e6:7.0f} MB/s  peak {peak / 2**20:6.0f} MiB  "
        f"CPU {statistics.median(each.cpu_s for each in runs):.1f} s  (all: {times})"
    )
    return seconds


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--rounds", default=3, show_default=True, help="Runs of each; the median counts.")
@click.option("--synced", is_flag=True, help="Count the time until the disk has everything.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write. Default: beside MODEL.")
@click.argument("options", nargs=-1)
def main(model: Path, rounds: int, synced: bool, folder: Path | None, options: tuple[str, ...]) -> None:
    """Measure MODEL; OPTIONS behind `--` go to `ggufmoe convert`."""
    out = (folder or model.parent) / f".measure-{os.getpid()}.gguf"
    commands = {
        "cp": ["cp", str(model), str(out)],
        "convert": [sys.executable, "-m", "ggufmoe", "convert", str(model), "-o", str(out), *options],
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    try:
        for _ in range(rounds):
            for name, command in commands.items():
                runs[name].append(run(command, synced))
                out.unlink()
    finally:
        out.unlink(missing_ok=True)
    n_bytes = model.stat().st_size
    seconds = {name: describe(name, each, n_bytes) for name, each in runs.items()}
    click.echo(f"convert has {seconds['cp'] / seconds['convert']:.2f} of the throughput of cp")


if __name__ == "__main__":
    main()
