"""Placement changes no bit: logits against stock llama.cpp with the same kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import (
    CHOICES,
    N_DECODE,
    N_PROMPT,
    PLAN,
    Choice,
    Logits,
    decode_greedily,
    everything,
    half,
    none,
    placed,
    prompt_for,
    some,
    spread,
    stock,
)
from tiny_models import ARCHITECTURES, write_tiny_model

from ggufmoe.gguf.checks import check_runnable
from ggufmoe.gguf.model import open_model
from ggufmoe.models import demo_model_path
from ggufmoe.native.chains import Chain
from ggufmoe.native.executor import Executor
from ggufmoe.native.llama import LlamaContext, LoadPlan
from ggufmoe.native.work import Work

MORE_MODELS = Path(__file__).parents[2].parent / "shared" / "archs"


@pytest.fixture(scope="module")
def stock_of(model_of: Callable[[str], Path]) -> Callable[[str], Logits]:
    known: dict[str, Logits] = {}

    def logits(arch: str) -> Logits:
        if arch not in known:
            known[arch] = stock(model_of(arch))
        return known[arch]

    return logits


def assert_same(ours: Logits, reference: Logits) -> None:
    assert np.isfinite(reference).all()
    assert reference.std() > 0.1, "a model that says nothing proves nothing"
    np.testing.assert_array_equal(ours, reference)


@pytest.mark.parametrize("choose", CHOICES, ids=lambda choice: choice.__name__)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(
    arch: str, choose: Choice, model_of: Callable[[str], Path], stock_of: Callable[[str], Logits]
) -> None:
    ours, executor = placed(model_of(arch), choose)
    assert_same(ours, stock_of(arch))
    traffic = executor.traffic
    assert traffic.prefill > 0, "the experts were not computed by us"
    if choose is none:
        assert traffic.prefill_hits == 0
    elif choose is everything:
        assert traffic.prefill_hits == traffic.prefill
    else:
        assert 0 < traffic.prefill_hits < traffic.prefill


@pytest.mark.skipif(not MORE_MODELS.is_dir(), reason="the folder of more models is not there")
@pytest.mark.parametrize("choose", CHOICES, ids=lambda choice: choice.__name__)
@pytest.mark.parametrize("path", sorted(MORE_MODELS.glob("*.gguf")), ids=lambda path: path.stem)
def test_models_of_llama_cpps_own_generator(path: Path, choose: Choice) -> None:
    check_runnable(open_model(path))
    ours, executor = placed(path, choose)
    assert_same(ours, stock(path))
    assert executor.traffic.prefill > 0


@pytest.mark.parametrize("choose", [half, some], ids=lambda choice: choice.__name__)
def test_the_demo_model(choose: Choice) -> None:
    ours, executor = placed(demo_model_path(), choose)
    assert_same(ours, stock(demo_model_path()))
    # 6 MoE layers, top-6; every token of the prompt asked for logits
    assert executor.traffic.prefill == (N_PROMPT + N_DECODE) * 36


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "grovemoe", "gemma4", "llama4"])
def test_two_slot_devices(
    arch: str, model_of: Callable[[str], Path], stock_of: Callable[[str], Logits]
) -> None:
    ours, _ = placed(model_of(arch), spread, n_devices=2)
    assert_same(ours, stock_of(arch))


def evaluate_sequences(context: LlamaContext) -> Logits:
    """Three sequences that advance together: batches of three tokens of different sequences."""
    tokens = prompt_for(context.model.n_vocab, 30)
    rows = []
    for position in range(10):
        context.decode(tokens[position * 3 : position * 3 + 3], position, sequences=[0, 1, 2])
        rows += [context.logits(row).copy() for row in range(3)]
    return np.stack(rows)


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "deepseek2", "qwen3next"])
def test_several_sequences_in_one_batch(arch: str, model_of: Callable[[str], Path]) -> None:
    plan = replace(PLAN, n_seq_max=3)
    ours, _ = placed(model_of(arch), half, evaluate_sequences, plan=plan)
    assert_same(ours, stock(model_of(arch), evaluate_sequences, plan=plan))


@pytest.mark.parametrize(
    ("n_prompt", "n_ubatch"),
    [(1, 512), (2, 512), (21, 512), (22, 512), (64, 32), (65, 32), (700, 512)],
    ids=lambda number: str(number),
)
def test_prompts_around_every_border(n_prompt: int, n_ubatch: int, model_of: Callable[[str], Path]) -> None:
    """One token, the last kept graph (64 pairs at top-3), ubatch borders, more pairs than one launch takes."""
    plan = replace(PLAN, n_ctx=1024, n_ubatch=n_ubatch)

    def evaluate(context: LlamaContext) -> Logits:
        return decode_greedily(context, n_prompt, 2)

    for arch in ("qwen3moe", "llama4"):
        ours, _ = placed(model_of(arch), half, evaluate, plan=plan)
        assert_same(ours, stock(model_of(arch), evaluate, plan=plan))


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "deepseek2", "llama4"])
def test_batches_in_which_no_token_needs_logits(arch: str, model_of: Callable[[str], Path]) -> None:
    """The last layer of all ubatches but the last then has no tokens at all."""
    plan = replace(PLAN, n_ubatch=16)

    def evaluate(context: LlamaContext) -> Logits:
        tokens = prompt_for(context.model.n_vocab, 50)
        context.decode(tokens, 0)
        return np.stack([context.logits()])

    ours, _ = placed(model_of(arch), half, evaluate, plan=plan)
    assert_same(ours, stock(model_of(arch), evaluate, plan=plan))


def test_repacked_cold_experts_equal_repacked_stock(tmp_path: Path) -> None:
    """Q4_0 is a type that the CPU repacks; all cold, so that both sides use the same kernels."""
    path = write_tiny_model(tmp_path / "q4.gguf", "qwen3moe", quant="Q4_0")
    load = LoadPlan(repack=True)
    ours, executor = placed(path, none, load=load)
    assert_same(ours, stock(path, load=load))
    assert executor.traffic.prefill > 0
    # where residents are not repacked, other kernels round differently, but not much
    mixed, _ = placed(path, half, load=load)
    np.testing.assert_allclose(mixed, stock(path, load=load), atol=0.05)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_0", "Q5_1", "MXFP4"])
def test_expert_types(quant: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "qwen3moe", quant=quant)
    ours, _ = placed(path, half)
    assert_same(ours, stock(path))


def _parts_of(path: Path) -> list[Work | int]:
    """What the executor reads in the splits of a one-token step."""
    seen: list[Work | int] = []

    def watch(executor: Executor) -> None:
        read = executor._read

        def remember(uid: int, graph: int) -> list[Work | int]:
            parts = read(uid, graph)
            seen.extend(part for part in parts if isinstance(part, int) or part.n_tokens == 1)
            return parts

        executor._read = remember  # type: ignore[method-assign]

    placed(path, half, lambda context: decode_greedily(context, 4, 1), prepare=watch)
    return seen


@pytest.mark.parametrize(
    ("arch", "n_layers"), [("qwen3moe", 2), ("deepseek", 1), ("llama4", 2), ("olmoe", 2), ("granitemoe", 2)]
)
def test_the_common_chain_is_one_callback_per_layer(
    arch: str, n_layers: int, model_of: Callable[[str], Path]
) -> None:
    parts = _parts_of(model_of(arch))
    chains: list[Chain] = [part.chain for part in parts if isinstance(part, Work)]
    assert [len(chain.weights) for chain in chains] == [3] * n_layers
    assert len(parts) == n_layers


def test_biases_leave_single_matrices(model_of: Callable[[str], Path]) -> None:
    parts = _parts_of(model_of("gpt-oss"))
    assert [len(part.chain.weights) for part in parts if isinstance(part, Work)] == [1] * 6


def test_merged_gate_up_is_one_chain(model_of: Callable[[str], Path]) -> None:
    parts = _parts_of(model_of("qwen3next"))
    assert [len(part.chain.weights) for part in parts if isinstance(part, Work)] == [2, 2]


def test_graphs_are_reused(model_of: Callable[[str], Path]) -> None:
    """A step of a shape that was seen before builds nothing and reads no split anew."""
    built: list[int] = []

    def watch(executor: Executor) -> None:
        for lane in (executor._cold, *executor._lanes):
            build = lane.graphs._build

            def remember(*args: object, _build: Callable[..., object] = build) -> object:
                built.append(1)
                return _build(*args)

            lane.graphs._build = remember  # type: ignore[assignment, method-assign]

    counts: list[int] = []

    def evaluate(context: LlamaContext) -> Logits:
        rows = []
        for position in range(60):
            context.decode([position % 7], position)
            rows.append(context.logits().copy())
            counts.append(len(built))
        return np.stack(rows)

    placed(model_of("qwen3moe"), half, evaluate, prepare=watch)
    # 2 layers, 1 to 3 of 3 pairs on either side; what was built before the arena grew is built again
    assert counts[-1] <= 2 * (2 * 2 * 3)
    assert counts[-1] == counts[-10]


def test_routing_is_counted_once_per_token_and_layer(model_of: Callable[[str], Path]) -> None:
    for arch in ("qwen3moe", "gpt-oss", "gemma4"):
        _, executor = placed(model_of(arch), half)
        for residents in executor.banks.values():
            assert residents.prefill_counts.sum() == (N_PROMPT + N_DECODE) * 3, arch
        assert executor.traffic.prefill == sum(r.prefill_counts.sum() for r in executor.banks.values())
