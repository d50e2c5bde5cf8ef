"""Sizes against the tensors themselves: every byte counts once, and what a token reads is a part."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES, RawTensor, rewrite, to_per_expert_layout, write_tiny_model

from ggufmoe.gguf.model import Model, open_model
from ggufmoe.moe.sizes import Amount, LayerSizes, ModelSizes, model_sizes, schedule_order

MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sizes")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return open_model(write_tiny_model(folder / f"{request.param}.gguf", request.param))


def test_dense_and_experts_are_all_there_is(model: Model) -> None:
    sizes = model_sizes(model)
    whole = Amount(sum(math.prod(t.ne) for t in model.tensors), model.n_bytes)
    assert sizes.dense + sizes.experts == sizes.total == whole


def test_every_expert_tensor_belongs_to_an_expert(model: Model) -> None:
    sizes = model_sizes(model)
    for layer in sizes.layers:
        prefix = f"blk.{layer.layer}.ffn_"
        found = [t for t in model.tensors if t.name.startswith(prefix) and "exps." in t.name]
        assert layer.n_expert * layer.expert_bytes == sum(t.n_bytes for t in found) == layer.experts.n_bytes
        assert (layer.n_expert, layer.n_used) == (8, 3)
    in_layers = {layer.layer for layer in sizes.layers}
    assert in_layers == {int(t.name.split(".")[1]) for t in model.tensors if "exps." in t.name}
    assert sizes.n_moe_layer + sizes.n_dense_layer == sizes.n_layer == model.get("block_count", 0)


def test_a_token_reads_a_part(model: Model) -> None:
    sizes = model_sizes(model)
    assert 0 < sizes.active.n_bytes < sizes.total.n_bytes
    embedding = model.by_name["token_embd.weight"]
    other_rows = embedding.n_bytes - embedding.n_bytes // embedding.ne[1]
    per_layer = model.by_name.get("per_layer_token_embd.weight")
    if per_layer is not None:
        other_rows += per_layer.n_bytes - per_layer.n_bytes // per_layer.ne[1]
    assert sizes.active_dense.n_bytes == sizes.dense.n_bytes - other_rows
    exps = sum(bank.n_bytes for bank in model.banks if bank.name == "exps")
    chunks = [bank for bank in model.banks if bank.name == "chexps"]
    used_chunks = sum(bank.n_bytes * min(3, bank.n_expert) // bank.n_expert for bank in chunks)
    assert sizes.active_experts.n_bytes == exps * 3 // 8 + used_chunks


def test_shared_experts_are_dense_weights(folder: Path) -> None:
    sizes = model_sizes(open_model(write_tiny_model(folder / "shared.gguf", "deepseek")))
    assert sizes.n_shared == 2
    assert 0 < sizes.shared.n_bytes < sizes.dense.n_bytes
    assert sizes.active_shared == sizes.shared


def test_a_tied_embedding_is_read_as_a_whole(folder: Path) -> None:
    source = write_tiny_model(folder / "untied.gguf", "qwen3moe")
    path = rewrite(
        source, folder / "tied.gguf", tensors=lambda ts: [t for t in ts if t.name != "output.weight"]
    )
    sizes = model_sizes(open_model(path))
    assert sizes.active_dense == sizes.dense


def test_layers_may_differ_in_what_they_use(folder: Path) -> None:
    source = write_tiny_model(folder / "same.gguf", "qwen3moe")
    path = rewrite(source, folder / "differ.gguf", keys={"qwen3moe.expert_used_count": [1, 4]})
    first, second = model_sizes(open_model(path)).layers
    assert (first.n_used, second.n_used) == (1, 4)
    assert 4 * first.active.n_bytes == second.active.n_bytes


def test_mixed_types_are_named_by_size(folder: Path) -> None:
    def widen_down(tensors: list[RawTensor]) -> list[RawTensor]:
        return [
            replace(t, type=0, data=bytes(4 * math.prod(t.ne))) if "ffn_down_exps" in t.name else t
            for t in tensors
        ]

    path = rewrite(
        write_tiny_model(folder / "q8.gguf", "qwen3moe"), folder / "mixed.gguf", tensors=widen_down
    )
    assert {layer.types for layer in model_sizes(open_model(path)).layers} == {"f32/q8_0"}


def test_a_draft_head_is_counted_but_not_read(folder: Path) -> None:
    source = write_tiny_model(folder / "trunk.gguf", "qwen3moe")
    path = rewrite(source, folder / "draft.gguf", keys={"qwen3moe.nextn_predict_layers": 1})
    with_draft, without = model_sizes(open_model(path)), model_sizes(open_model(source))
    assert [layer.is_draft for layer in with_draft.layers] == [False, True]
    assert with_draft.total == without.total
    assert with_draft.active_experts.n_bytes * 2 == without.active_experts.n_bytes
    assert with_draft.active_dense.n_bytes < without.active_dense.n_bytes


def test_the_old_layout_has_the_same_experts(folder: Path) -> None:
    source = write_tiny_model(folder / "stacked.gguf", "llama")
    old = model_sizes(open_model(to_per_expert_layout(source, folder / "old.gguf")))
    new = model_sizes(open_model(source))
    assert (old.layers, old.active) == (new.layers, new.active)


def test_a_dense_model_reads_everything(folder: Path) -> None:
    sizes = model_sizes(open_model(write_tiny_model(folder / "dense.gguf", "llama-dense")))
    assert sizes.layers == () and sizes.experts == Amount() and sizes.largest_expert_bytes == 0
    assert sizes.dense == sizes.total


@pytest.mark.parametrize("n_used", [0, 9, 2**31])
def test_nonsense_in_the_metadata_stays_within_the_tensors(folder: Path, n_used: int) -> None:
    source = write_tiny_model(folder / f"base{n_used}.gguf", "qwen3moe")
    path = rewrite(source, folder / f"used{n_used}.gguf", keys={"qwen3moe.expert_used_count": n_used})
    for layer in model_sizes(open_model(path)).layers:
        assert 0 <= layer.active.n_bytes <= layer.experts.n_bytes


def _sizes(dense: int, experts: int, n_expert: int, n_used: int) -> ModelSizes:
    """A model of one MoE layer, in bytes; one byte per parameter."""
    whole = Amount(experts, experts)
    layers = (LayerSizes(0, n_expert, n_used, "q8_0", whole, whole.part(n_used, n_expert), False),)
    weights = Amount(dense, dense)
    return ModelSizes(weights, Amount(), weights, Amount(), 1, 0, layers if experts else ())


def test_fast_memory_takes_context_then_dense_weights_then_experts() -> None:
    sizes = _sizes(dense=4 * MIB, experts=64 * MIB, n_expert=64, n_used=8)
    assert sizes.slow_bytes(0) == sizes.active.n_bytes == 12 * MIB
    assert sizes.slow_bytes(2 * MIB) == 10 * MIB
    assert sizes.slow_bytes(4 * MIB) == 8 * MIB
    assert sizes.slow_bytes(36 * MIB) == 4 * MIB
    assert sizes.slow_bytes(36 * MIB, context_bytes=32 * MIB) == 8 * MIB
    assert sizes.slow_bytes(68 * MIB) == sizes.slow_bytes(10**12) == 0


def test_more_fast_memory_never_makes_it_worse(model: Model) -> None:
    sizes = model_sizes(model)
    slow = [sizes.slow_bytes(budget) for budget in range(0, sizes.total.n_bytes + 10_000, 5_000)]
    assert slow == sorted(slow, reverse=True)
    assert slow[-1] == 0


def test_the_model_that_leans_least_on_slow_memory_comes_first() -> None:
    dense = _sizes(dense=16 * MIB, experts=0, n_expert=1, n_used=1)
    few_large = _sizes(dense=4 * MIB, experts=64 * MIB, n_expert=8, n_used=2)
    many_small = _sizes(dense=4 * MIB, experts=64 * MIB, n_expert=64, n_used=4)
    models = [few_large, dense, many_small]
    assert schedule_order(models, 4 * MIB, [0, 0, 0]) == [2, 1, 0]
    assert schedule_order(models, 10**9, [0, 0, 0]) == [2, 1, 0]  # all fit: fewest bytes per token


def test_on_a_tie_smaller_experts_win() -> None:
    coarse = _sizes(dense=4 * MIB, experts=64 * MIB, n_expert=8, n_used=1)
    fine = _sizes(dense=4 * MIB, experts=64 * MIB, n_expert=64, n_used=8)
    assert schedule_order([coarse, fine], 8 * MIB, [0, 0]) == [1, 0]
