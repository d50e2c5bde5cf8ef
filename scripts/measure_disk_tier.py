"""The disk tier against stock llama.cpp where memory does not hold the model: tokens per second, side by side.

12 layers of Qwen3-30B-A3B's shape, 4.6 GB, are decoded under memory limits. Both sides route by a trace of a real
conversation (``route_trace v1``), since random weights choose experts at random. Stock maps the file, as it does
by default; ours gets the limit as ``--ram``. Every run is a process of its own in a cgroup of its own, with the
page cache emptied before it; the sides take turns. Needs root, and a disk that reads as fast as it does for real.

Example:
  sudo scripts/measure_disk_tier.py /tmp/qwen3-12.gguf qwen.route.csv
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from gguf import GGMLQuantizationType as GGMLType
from make_synthetic import SHAPES, model_tensors, write_model

from ggufmoe.native import declarations as c
from ggufmoe.native.chains import op_number
from ggufmoe.native.interposer import EXPERT_WEIGHT
from ggufmoe.native.library import ggml, llama_cpp
from ggufmoe.native.llama import LlamaModel, LoadPlan
from ggufmoe.run.session import Session
from ggufmoe.run.setup import SessionOptions

N_LAYER = 12
N_CTX = 512
THREADS = 2
MAX_OTHERS = 0.15  # of a core
MAX_REPEATS = 4
MAX_WAIT_S = 300
# decode step -> layer -> the experts that the router chose
Steps = list[dict[int, list[int]]]


@click.command()
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--limit", "limits", multiple=True, default=("1500", "2000", "3000", "24000"), help="MB (10^6 bytes)."
)
@click.option(
    "--tokens", default=90, show_default=True, help="Decoded tokens per run; a short trace is repeated."
)
@click.option("--rounds", default=2, show_default=True, help="Turns of each side.")
@click.option("--side", type=click.Choice(["ours", "stock", "stock as it comes"]), hidden=True)
def measure(
    model: Path, trace: Path, limits: tuple[str, ...], tokens: int, rounds: int, side: str | None
) -> None:
    """Decode MODEL, which is written if it is not there, by the routing of TRACE."""
    steps = list(itertools.islice(itertools.cycle(decode_steps(trace)), tokens))
    if side is not None:
        run: Callable[..., dict[str, Any]] = ours if side == "ours" else stock
        print(json.dumps(run(model, steps, int(limits[0]) * 10**6, side)))
        return
    if not model.exists():
        shape = replace(SHAPES["qwen3-30b-a3b"], n_layer=N_LAYER, n_expert_used=len(steps[0][0]))
        write_model(
            model, shape, "qwen3-30b-a3b", list(model_tensors(shape, GGMLType.Q4_0)), 0, lambda _: None
        )
    for limit in limits:
        is_tight = int(limit) * 10**6 < model.stat().st_size * 1.5
        sides = ("stock" if is_tight else "stock as it comes", "ours")
        results = defaultdict(list)
        for turn in range(rounds):
            for each in sides if turn % 2 == 0 else sides[::-1]:
                results[each].append(in_cgroup(model, trace, limit, tokens, each))
                click.echo(f"  {limit} MB, {each}: {results[each][-1]}", err=True)
        best = {each: statistics.median(r["tokens_per_s"] for r in rows) for each, rows in results.items()}
        late = {
            each: statistics.median(r["late_tokens_per_s"] for r in rows) for each, rows in results.items()
        }
        facts = results["ours"][-1]
        print(
            f"{limit:>6} MB: {sides[0]} {best[sides[0]]:6.2f} tokens/s, ours {best['ours']:6.2f}, "
            f"ratio {best['ours'] / best[sides[0]]:5.2f} (last two thirds {late['ours'] / late[sides[0]]:5.2f}); "
            f"hit rate {facts['hit_rate']}, peak {max(r['peak_mb'] for r in results['ours']):.0f} MB",
            flush=True,
        )


def decode_steps(trace: Path) -> Steps:
    steps: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    with trace.open() as file:
        for line in file:
            if line[0].isdigit():
                turn, phase, step, layer, _, expert = map(int, line.split(",")[:6])
                if phase == 1:
                    steps[turn, step][layer].append(expert)
    return [steps[key] for key in sorted(steps)]


# The sides, each in a process of its own ------------------------------------------------------------------


def ours(model: Path, steps: Steps, limit_bytes: int, _side: str) -> dict[str, Any]:
    started = time.perf_counter()
    options = SessionOptions(ram_bytes=limit_bytes, context=N_CTX, threads=THREADS, n_ubatch=32)
    with Session(model, options) as session:
        loaded = time.perf_counter() - started
        executor: Any = session.executor
        compute, matmul = executor.compute, op_number("MUL_MAT_ID")
        current: list[dict[int, list[int]]] = [{}]
        known: dict[int, tuple[Any, int]] = {}

        def routed(graph: int) -> int:
            """Put the trace's choice in the place of the router's."""
            uid = c.ggml_cgraph.from_address(graph).uid
            if uid not in known:
                known[uid] = _ids(graph, matmul)
            ids, layer = known[uid]
            ids[:] = current[0][layer]
            return int(compute(graph))

        session.executor.decoding = True
        if session.disk is not None:
            executor.compute = routed
        rates = _decode(lambda token, _: session.evaluate([token]), current, steps)
        read = session.disk.n_read if session.disk else 0
        return {
            **rates,
            "hit_rate": session.hit_rate and round(session.hit_rate, 3),
            "load_s": round(loaded, 2),
            "read": read,
            "slots": session.disk and round(session.disk.plan.slots_per_layer, 1),
        }


def _ids(graph: int, matmul: int) -> tuple[Any, int]:
    header = c.ggml_cgraph.from_address(graph)
    for address in (ctypes.c_void_p * header.n_nodes).from_address(header.nodes):
        node = c.ggml_tensor.from_address(address)
        if node.op == matmul:
            name = EXPERT_WEIGHT.fullmatch(c.ggml_tensor.from_address(node.src[0]).name)
            assert name is not None
            ids = c.ggml_tensor.from_address(node.src[2])
            return (ctypes.c_int32 * ids.ne[0]).from_address(ids.data), int(name[1])
    raise AssertionError("no experts in a split of ours")


def stock(model: Path, steps: Steps, limit_bytes: int, side: str) -> dict[str, Any]:
    started = time.perf_counter()
    module = llama_cpp()
    ggml()
    # as it comes: repacked weights, and no callback, since all experts are in memory anyway
    as_it_comes = side != "stock"
    llama = LlamaModel(model, LoadPlan(repack=as_it_comes))
    current: list[dict[int, list[int]]] = [{}]

    def on_node(address: int, is_question: bool, _data: int | None) -> bool:
        node = c.ggml_tensor.from_address(address)
        name = node.name
        if not name.startswith(b"ffn_moe_topk-"):
            return not is_question
        if not is_question and node.ne[1] == 1:
            ids = (ctypes.c_int32 * node.ne[0]).from_address(node.data)
            ids[:] = current[0][int(name[13:])]
        return True

    params = module.llama_context_default_params()
    params.n_ctx, params.n_ubatch, params.n_threads, params.n_threads_batch = N_CTX, 32, THREADS, THREADS
    callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(on_node)
    if not as_it_comes:
        params.cb_eval = ctypes.cast(callback, type(params.cb_eval))
    context = module.llama_init_from_model(llama.address, params)
    loaded = time.perf_counter() - started

    def evaluate(token: int, _position: int) -> None:
        tokens = (ctypes.c_int32 * 1)(token)
        assert module.llama_decode(context, module.llama_batch_get_one(tokens, 1)) == 0
        module.llama_synchronize(context)

    return {**_decode(evaluate, current, steps), "load_s": round(loaded, 2)}


def _decode(
    evaluate: Callable[[int, int], Any], current: list[dict[int, list[int]]], steps: Steps
) -> dict[str, float]:
    seconds = []
    for position, step in enumerate(steps):
        current[0] = step
        started = time.perf_counter()
        evaluate(1000 + position, position)
        seconds.append(time.perf_counter() - started)
    late = seconds[len(seconds) // 3 :]
    return {
        "tokens_per_s": round(len(seconds) / sum(seconds), 2),
        "late_tokens_per_s": round(len(late) / sum(late), 2),
    }


# Memory limits ----------------------------------------------------------------------------------------------


def in_cgroup(model: Path, trace: Path, limit: str, tokens: int, side: str) -> dict[str, Any]:
    """One run under a limit of ``limit`` MB. Returns: what it reports, its peak, and what others took of a core.

    A run that others disturbed is repeated, a few times at most: threads that spin lose all pace beside them.
    """
    command = [sys.executable, __file__, str(model), str(trace), "--limit", limit, "--tokens", str(tokens)]
    for _ in range(MAX_REPEATS):
        wait_for_quiet()
        os.sync()  # what is not written yet cannot be dropped, and would count for nobody
        Path("/proc/sys/vm/drop_caches").write_text("3")
        with memory_limit(int(limit) * 10**6) as (join, peak):
            watch = OthersWatch()
            result = subprocess.run(
                [*command, "--side", side], stdout=subprocess.PIPE, text=True, check=False, preexec_fn=join
            )
            others = watch.share()
            if result.returncode != 0:
                raise click.ClickException(f"{side} with {limit} MB ended with {result.returncode}.")
            facts: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
            facts |= {"peak_mb": round(peak() / 1e6), "others": round(others, 2)}
        if others < MAX_OTHERS:
            break
        click.echo(f"  disturbed: {facts}", err=True)
    return facts


class OthersWatch:
    """How much of a core other processes have taken since this object was made."""

    def __init__(self) -> None:
        self._started, self._busy, self._mine = time.monotonic(), _busy_s(), _mine_s()

    def share(self) -> float:
        others = _busy_s() - self._busy - (_mine_s() - self._mine)
        return others / (time.monotonic() - self._started)


def _busy_s() -> float:
    """CPU time of user and system, of all processes, without the kernel's interrupts and idle time."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _mine_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def wait_for_quiet() -> None:
    for _ in range(MAX_WAIT_S):
        watch = OthersWatch()
        time.sleep(1.0)
        if watch.share() < MAX_OTHERS:
            return


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[tuple[Callable[[], None], Callable[[], int]]]:
    """A cgroup (version 1 or 2) with a memory limit: how a process joins it, and the peak of its memory."""
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"ggufmoe-{os.getpid()}"
    limit, members, peak = (
        ("memory.limit_in_bytes", "tasks", "memory.max_usage_in_bytes")
        if v1.is_dir()
        else ("memory.max", "cgroup.procs", "memory.peak")
    )
    group.mkdir()
    try:
        (group / limit).write_text(str(n_bytes))

        def join() -> None:
            (group / members).write_text(str(os.getpid()))

        yield join, lambda: int((group / peak).read_text())
    finally:
        for _ in range(50):  # the kernel takes a moment to see that it is empty
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


if __name__ == "__main__":
    measure()
