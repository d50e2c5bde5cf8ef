"""What the residency engine gains and costs, side by side in one run: hits, decode, prefill, uploads.

Every line is one way to run the same model with the same tokens: all cold; residents that stay; residents that move.
The routing of decoded tokens can come from a trace of real text, since random weights route at random. Ways take
turns; medians; ratios are to the first line. The slot device is `cpu`, or an RPC server on loopback that this script
starts. Nothing else should run meanwhile.

Example:
  scripts/make_synthetic.py --shape deepseek-moe-16b --layers 12 --type Q4_0 -o 16b.gguf
  scripts/measure_residency.py 16b.gguf --residents 25% --trace qwen.route.csv --rpc
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np

from ggufmoe import Session, SessionOptions, parse_residents

N_PREFILL = 512


@dataclass
class Way:
    """One way to run, and what was measured of it."""

    name: str
    options: SessionOptions
    decode_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    hit_rate: float | None = None
    uploads_per_token: float = 0.0
    upload_share: float = 0.0


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--residents", default="25%", show_default=True)
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Routing to decode with."
)
@click.option("--rounds", default=3, show_default=True)
@click.option("--tokens", default=100, show_default=True, help="Decoded tokens per turn.")
@click.option("--threads", default=2, show_default=True)
@click.option("--cold-store", default="mmap", show_default=True)
@click.option(
    "--rpc", is_flag=True, help="Slots and dense weights on an RPC server instead of slots on `cpu`."
)
def measure(
    model: Path,
    residents: str,
    trace: Path | None,
    rounds: int,
    tokens: int,
    threads: int,
    cold_store: str,
    rpc: bool,
) -> None:
    """Measure MODEL with residents that stay and that move."""
    with _server(rpc) as endpoint:
        base = SessionOptions(
            devices=() if endpoint else ("cpu",),
            rpc_endpoints=(endpoint,) if endpoint else (),
            context=1024,
            threads=threads,
            cold_store=cold_store,
            routing_from=trace,
            policy="static",
        )
        some = parse_residents(residents)
        ways = [
            Way("all cold", replace(base, residents=parse_residents("0"))),
            Way(f"{residents}, static", replace(base, residents=some)),
            Way(f"{residents}, lfru", replace(base, residents=some, policy="lfru")),
            Way(
                f"{residents}, lfru, no limit", replace(base, residents=some, policy="lfru", upload_share=1.0)
            ),
        ]
        for turn in range(rounds + 1):
            for way in ways if turn % 2 else reversed(ways):
                _run(model, way, tokens, counts=turn > 0)
    _print(ways)


def _run(model: Path, way: Way, n_tokens: int, *, counts: bool) -> None:
    """One turn in a session of its own: prefill twice (the first finds out what is fastest), then decode."""
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 1000, N_PREFILL)]
    with Session(model, way.options) as session:
        prefill = []
        for _ in range(2):
            session.reset()
            started = time.perf_counter()
            session.evaluate(prompt)
            prefill.append(time.perf_counter() - started)
        session.executor.decoding = True
        steps = []
        begun = time.perf_counter()
        for token in prompt[:n_tokens]:
            started = time.perf_counter()
            session.evaluate([token])
            steps.append(time.perf_counter() - started)
            session.engine.stepped(steps[-1], session.executor.traffic.decode_hits)
        seconds = time.perf_counter() - begun
        if counts:
            way.prefill_s.append(prefill[-1])
            way.decode_s += steps
            way.hit_rate = session.hit_rate
            if session.engine.uploads is not None:
                way.uploads_per_token = session.engine.uploads.n_uploaded / n_tokens
                way.upload_share = session.engine.uploads.busy_s / seconds


def _print(ways: list[Way]) -> None:
    first_decode, first_prefill = (statistics.median(s) for s in (ways[0].decode_s, ways[0].prefill_s))
    print(
        f"{'':22}{'decode/s':>10}{'ratio':>8}{'prefill/s':>11}{'ratio':>8}{'hits':>8}{'uploads':>9}{'share':>8}"
    )
    for way in ways:
        decode, prefill = statistics.median(way.decode_s), statistics.median(way.prefill_s)
        hits = "-" if way.hit_rate is None else f"{way.hit_rate:.1%}"
        print(
            f"{way.name:22}{1 / decode:10.2f}{first_decode / decode:8.3f}{N_PREFILL / prefill:11.1f}"
            f"{first_prefill / prefill:8.3f}{hits:>8}{way.uploads_per_token:9.2f}{way.upload_share:8.1%}"
        )
    print(
        "uploads are per token, their share of the time is the uploading thread's; hit rates are of the last turn"
    )


@contextmanager
def _server(wanted: bool) -> Iterator[str | None]:
    """An RPC server of this build on loopback, as a second device."""
    if not wanted:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ggufmoe", "rpc-server", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(3)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    measure()
