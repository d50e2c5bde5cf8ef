"""What per-expert placement costs when nothing is resident: ours against stock llama.cpp, side by side.

Both run in this process, on the same file, with the same CPU kernels (repacked weights), in turns: decode token by
token, prefill of 512 tokens, and, in fresh processes, from opening the model to the first token. Then the time that
one callback spends outside ggml. Medians; the ratio is ours / stock for rates, stock / ours for times, so 1 is
a draw and less is a loss. Nothing else should run meanwhile.

Example:
  scripts/make_synthetic.py --shape deepseek-moe-16b --layers 12 --type Q4_0 -o 16b.gguf
  scripts/measure_overhead.py 16b.gguf
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from ggufmoe.moe.residents import parse_residents
from ggufmoe.native import declarations as c
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from ggufmoe.run.session import Session
from ggufmoe.run.setup import SessionOptions

N_PREFILL = 512


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True, help="Turns of each side.")
@click.option("--tokens", default=32, show_default=True, help="Decoded tokens per turn.")
@click.option(
    "--residents", default="0", show_default=True, help="Residents on the device 'cpu', for example 25%."
)
@click.option("--first-token", is_flag=True, hidden=True)
@click.option("--stock", is_flag=True, hidden=True)
def measure(model: Path, rounds: int, tokens: int, residents: str, first_token: bool, stock: bool) -> None:
    """Measure what MODEL costs with us and with stock llama.cpp."""
    options = SessionOptions(
        devices=("cpu",), residents=parse_residents(residents), cold_store="repack", context=1024
    )
    if first_token:
        print(_open_to_first_token(model, options, stock))
        return
    rows = _rates(model, options, rounds, tokens)
    if rounds > 1:
        rows["first token, s"] = _first_tokens(model, rounds)
    for name, (ours, theirs, ratio) in rows.items():
        print(f"{name:24} ours {ours:9.3f}   stock {theirs:9.3f}   ratio {ratio:.3f}")


def _stock(model: Path, options: SessionOptions) -> tuple[LlamaModel, LlamaContext]:
    llama = LlamaModel(model, LoadPlan(repack=True))
    return llama, LlamaContext(llama, ContextPlan(options.context or 0, psutil.cpu_count(logical=False) or 1))


def _rates(
    model: Path, options: SessionOptions, rounds: int, n_tokens: int
) -> dict[str, tuple[float, float, float]]:
    llama, context = _stock(model, options)
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, llama.n_vocab, N_PREFILL)]
    decode: dict[str, list[float]] = {"ours": [], "stock": []}
    prefill: dict[str, list[float]] = {"ours": [], "stock": []}
    with Session(model, options) as session:
        print(
            f"{session.setup.n_threads} threads, {psutil.Process().memory_info().rss / 2**30:.1f} GiB resident"
        )
        for turn in range(rounds + 1):
            session.reset()
            context.clear()
            evaluate: dict[str, Callable[[list[int]], Any]] = {
                "ours": session.evaluate,
                "stock": _Evaluate(context),
            }
            sides = ("ours", "stock") if turn % 2 else ("stock", "ours")
            for side in sides:
                seconds = _seconds(evaluate[side], prompt)
                if turn:  # the first turn warms up
                    prefill[side].append(seconds)
            for token in prompt[:n_tokens]:  # token by token, so that both see the same machine
                for side in sides:
                    seconds = _seconds(evaluate[side], [token])
                    if turn:
                        decode[side].append(seconds)
        callback = _callback_us(session, prompt)
    context.close()
    llama.close()
    print(f"one callback outside ggml: median {callback:.1f} microseconds")
    return {
        f"decode, tokens/s ({len(decode['ours'])})": _rate_row(decode, 1),
        f"prefill, tokens/s ({len(prefill['ours'])})": _rate_row(prefill, N_PREFILL),
    }


class _Evaluate:
    """Stock's counterpart of ``Session.evaluate``."""

    def __init__(self, context: LlamaContext) -> None:
        self._context, self._position = context, 0

    def __call__(self, tokens: list[int]) -> None:
        self._context.decode(tokens, self._position)
        self._position += len(tokens)


def _seconds(function: Callable[[list[int]], Any], tokens: list[int]) -> float:
    started = time.perf_counter()
    function(tokens)
    return time.perf_counter() - started


def _rate_row(seconds: dict[str, list[float]], n_tokens: int) -> tuple[float, float, float]:
    ours, stock = (n_tokens / statistics.median(seconds[side]) for side in ("ours", "stock"))
    return ours, stock, ours / stock


def _callback_us(session: Session, prompt: list[int]) -> float:
    """Median time of one call of ours from C and back, all of ggml's own work taken out."""
    executor: Any = session.executor
    graphs: list[int] = []
    compute = executor.compute

    def remember(graph: int) -> int:
        graphs.append(graph)
        return int(compute(graph))

    for _ in range(3):  # until llama.cpp reuses its graph
        executor.compute = remember
        graphs.clear()
        session.evaluate(prompt[:1])
    executor.compute = compute
    executor._compute_cpu = executor._whole.compute = lambda *_: c.GGML_STATUS_SUCCESS
    for lane in executor._lanes:
        for name in ("set", "get", "_launch", "_synchronize"):
            setattr(lane, name, lambda *_: c.GGML_STATUS_SUCCESS)
    call = c.graph_compute_t(lambda _backend, graph: executor.compute(graph))
    times = []
    for _ in range(200):
        for graph in graphs:
            started = time.perf_counter()
            call(None, graph)
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def _first_tokens(model: Path, rounds: int) -> tuple[float, float, float]:
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds + 1):
        for stock in (False, True) if turn % 2 else (True, False):
            command = [sys.executable, __file__, str(model), "--first-token", *(["--stock"] if stock else [])]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            if turn:
                times[stock].append(json.loads(output))
    ours, theirs = statistics.median(times[False]), statistics.median(times[True])
    return ours, theirs, theirs / ours


def _open_to_first_token(model: Path, options: SessionOptions, stock: bool) -> float:
    prompt = list(range(1, 33))
    started = time.perf_counter()
    if stock:
        _Evaluate(_stock(model, options)[1])(prompt)
    else:
        Session(model, options).evaluate(prompt)
    return time.perf_counter() - started


if __name__ == "__main__":
    measure()
