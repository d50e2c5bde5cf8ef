"""What is not an MoE model, or would end llama.cpp, is refused with the key, its value and the limit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES, RawTensor, rewrite, to_per_expert_layout, write_tiny_model

from ggufmoe.errors import FormatError
from ggufmoe.gguf.checks import check_moe, check_runnable, expert_faults, parameter_faults
from ggufmoe.gguf.experts import ExpertBank, TensorInfo, expert_span, find_banks, is_expert_tensor
from ggufmoe.gguf.model import open_model

N_EXPERT, N_LAYER = 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module")
def qwen3moe(folder: Path) -> Path:
    return write_tiny_model(folder / "qwen3moe.gguf", "qwen3moe", n_expert=N_EXPERT, n_layer=N_LAYER)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_models_that_run_have_no_faults(folder: Path, arch: str) -> None:
    model = open_model(write_tiny_model(folder / f"{arch}.gguf", arch, n_expert=N_EXPERT, n_layer=4))
    check_runnable(model)
    assert (expert_faults(model), parameter_faults(model), model.ollama_differences) == ([], [], ())


# Banks by name, matrices per bank, small tensors per bank, as the architectures define them
BANKS = {
    "qwen3moe": (["exps"] * 4, 3, 0),
    "qwen3moe-scaled": (["exps"] * 4, 3, 6),
    "deepseek2": (["exps"] * 3, 3, 0),  # the first layer is dense
    "llama4": (["exps"] * 2, 3, 0),  # every other layer
    "gpt-oss": (["exps"] * 4, 3, 3),
    "gemma4": (["exps"] * 4, 2, 1),  # gate and up in one
    "grovemoe": (["chexps", "exps"] * 4, 3, 0),
}


@pytest.mark.parametrize("arch", BANKS)
def test_experts_are_found_under_all_their_names(folder: Path, arch: str) -> None:
    model = open_model(write_tiny_model(folder / f"banks-{arch}.gguf", arch, n_expert=N_EXPERT, n_layer=4))
    names, n_weights, n_extras = BANKS[arch]
    assert [bank.name for bank in model.banks] == names
    for bank in model.banks:
        assert bank.n_expert == (N_EXPERT if bank.name == "exps" else N_EXPERT // 2)
        assert (len(bank.weights), len(bank.extras)) == (n_weights, n_extras)
    # nothing of an expert is left among the dense tensors, and nothing is counted twice
    assert not any("exps" in tensor.name for tensor in model.dense_tensors)
    dense = sum(tensor.n_bytes for tensor in model.dense_tensors)
    assert dense + sum(bank.n_bytes for bank in model.banks) == model.n_bytes


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "more used than there are": (
        {"expert_used_count": 9},
        r"expert_used_count is 9, .* 1 to expert_count \(8\)",
    ),
    "none used": ({"expert_used_count": 0}, "expert_used_count is 0, it must be 1 to"),
    "negative use": ({"expert_used_count": -1}, "expert_used_count is -1, it must be 1 to"),
    "one layer uses too many": ({"expert_used_count": [3, 9]}, "expert_used_count is 9"),
    "one layer uses a negative number": ({"expert_used_count": [3, -1]}, "expert_used_count is -1"),
    # llama.cpp looks at the largest number only; then it reads behind an empty list (SIGSEGV)
    "one layer uses none": ({"expert_used_count": [3, 0]}, "expert_used_count is 0 for layer 1"),
    "too many experts": ({"expert_count": 1025}, "expert_count is 1025, the limit is 1024"),
    "more experts than tensors hold": ({"expert_count": 9}, "expert_count is 9, but layer 0 holds 8 experts"),
    "no expert by the metadata": ({"expert_count": 0}, "expert_used_count is 3, .* expert_count .0."),
    "expert count of another type": ({"expert_count": "8"}, "expert_count is '8', it must be a number"),
    "as many groups as experts": ({"expert_group_count": 8}, "expert_group_count is 8, it must be below .*8"),
    "groups that do not divide": (
        {"expert_group_count": 3, "expert_group_used_count": 1},
        "expert_group_count is 3, it must divide",
    ),
    "no group used": ({"expert_group_count": 4}, "expert_group_used_count is 0, it must be 1 to 3"),
    "all groups used": (
        {"expert_group_count": 4, "expert_group_used_count": 4},
        "expert_group_used_count is 4, it must be 1 to 3",
    ),
    "no layer": ({"block_count": 0}, "block_count is 0, it must be 1 to 512"),
    "too many layers": ({"block_count": 513}, "block_count is 513, it must be 1 to 512"),
    "2^32-1 layers": ({"block_count": 2**32 - 1}, "block_count is 4294967295, it must be 1 to 512"),
    "fewer layers than tensors": ({"block_count": 1}, "block_count is 1, but there are experts in layer 1"),
    "more predicted layers than layers": (
        {"nextn_predict_layers": 3},
        "nextn_predict_layers is 3, it must not",
    ),
    "unknown rope scaling": (
        {"rope.scaling.type": "magic"},
        "rope.scaling.type is 'magic', it must be one of",
    ),
    "rope over nothing": ({"rope.dimension_count": 0}, "rope.dimension_count is 0, it must be 1 or more"),
    "NaN": ({"attention.layer_norm_rms_epsilon": float("nan")}, "attention.layer_norm_rms_epsilon is nan"),
    "negative epsilon": (
        {"attention.layer_norm_rms_epsilon": -1.0},
        "attention.layer_norm_rms_epsilon is -1.0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_would_end_llama_cpp_is_refused_by_key(qwen3moe: Path, tmp_path: Path, name: str) -> None:
    keys, says = FAULTS[name]
    path = rewrite(
        qwen3moe, tmp_path / "m.gguf", keys={f"qwen3moe.{key}": value for key, value in keys.items()}
    )
    model = open_model(path)  # a warning in inspect, no more
    with pytest.raises(FormatError, match=f"^{re.escape(str(path))}: qwen3moe\\.{says}") as raised:
        check_runnable(model)
    assert raised.value.hint


def test_a_division_by_zero_is_refused_where_llama_cpp_divides(folder: Path, tmp_path: Path) -> None:
    def with_zero(arch: str) -> Path:
        path = write_tiny_model(folder / f"zero-{arch}.gguf", arch, n_expert=N_EXPERT)
        return rewrite(path, tmp_path / "m.gguf", keys={f"{arch}.full_attention_interval": 0})

    with pytest.raises(FormatError, match=r"qwen3next.full_attention_interval is 0, it must be 1 or more"):
        check_runnable(open_model(with_zero("qwen3next")))
    check_runnable(open_model(with_zero("qwen3moe")))  # llama.cpp's saver writes such zeros


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length"])
def test_a_missing_key_is_named(qwen3moe: Path, tmp_path: Path, key: str) -> None:
    path = rewrite(qwen3moe, tmp_path / "m.gguf", drop=[f"qwen3moe.{key}"])
    with pytest.raises(FormatError, match=f"qwen3moe.{key} is missing"):
        check_runnable(open_model(path))


def test_counts_per_layer_are_read(qwen3moe: Path, tmp_path: Path) -> None:
    path = rewrite(qwen3moe, tmp_path / "m.gguf", keys={"qwen3moe.expert_used_count": [3, 2]})
    model = open_model(path)
    check_runnable(model)
    assert model.per_layer("expert_used_count", 0) == (3, 2)
    assert model.per_layer("absent", 7) == (7, 7)


def test_a_dense_model_is_told_apart(folder: Path) -> None:
    model = open_model(write_tiny_model(folder / "dense.gguf", "llama-dense"))
    with pytest.raises(FormatError, match=r"a dense model \(llama\)"):
        check_moe(model)


def test_the_layout_of_one_tensor_per_expert_is_named(folder: Path) -> None:
    merged = write_tiny_model(folder / "llama.gguf", "llama", n_expert=N_EXPERT)
    model = open_model(to_per_expert_layout(merged, folder / "old.gguf"))
    assert "blk.0.ffn_gate.3.weight" in model.by_name
    with pytest.raises(FormatError, match=r"one tensor per expert .* an old layout") as raised:
        check_runnable(model)
    assert raised.value.hint is not None
    assert "convert" in raised.value.hint


def test_a_block_of_our_own_table_is_not_the_old_layout(folder: Path, qwen3moe: Path) -> None:
    def split_off(tensors: list[RawTensor]) -> list[RawTensor]:
        return [*tensors, RawTensor("blk.0.ffn_gate_exps.3.weight", 0, (32,), bytes(128))]

    assert not open_model(rewrite(qwen3moe, folder / "block.gguf", tensors=split_off)).has_old_expert_layout


def renamed(old: str, new: str, tensors: list[RawTensor]) -> list[RawTensor]:
    return [replace(tensor, name=re.sub(old, new, tensor.name)) for tensor in tensors]


def test_experts_of_unknown_names_are_never_dense(qwen3moe: Path, tmp_path: Path) -> None:
    path = rewrite(
        qwen3moe,
        tmp_path / "m.gguf",
        tensors=lambda ts: renamed(r"ffn_(gate_inp|\w+_exps)", r"mixture.\1", ts),
    )
    with pytest.raises(FormatError, match="expert_count is 8, but no expert tensor was recognised"):
        check_moe(open_model(path))


def test_one_layer_of_unknown_names_is_noticed(qwen3moe: Path, tmp_path: Path) -> None:
    path = rewrite(
        qwen3moe,
        tmp_path / "m.gguf",
        tensors=lambda ts: renamed(r"blk\.1\.(ffn_\w+)_exps", r"blk.1.\1_mix", ts),
    )
    with pytest.raises(FormatError, match="layer 1 has a router, but none of its expert tensors"):
        check_moe(open_model(path))


def test_a_file_without_an_architecture_is_refused(qwen3moe: Path, tmp_path: Path) -> None:
    for keys in ({"general.architecture": 7}, {"general.architecture": ""}):
        with pytest.raises(FormatError, match="names no architecture"):
            check_moe(open_model(rewrite(qwen3moe, tmp_path / "m.gguf", keys=keys)))


def test_an_unknown_architecture_is_left_to_the_loader(qwen3moe: Path, tmp_path: Path) -> None:
    # its message is "unknown model architecture: 'nova'"; a list of our own would only be older
    path = rewrite(
        qwen3moe, tmp_path / "m.gguf", keys={"general.architecture": "nova", "nova.expert_count": 8}
    )
    model = open_model(path)
    check_moe(model)
    assert len(model.banks) == N_LAYER


def test_a_single_expert_is_a_stack_too(folder: Path) -> None:
    path = write_tiny_model(folder / "one.gguf", "qwen3moe", n_expert=1, n_expert_used=1)
    model = open_model(path)
    check_runnable(model)
    tensor = model.banks[0].weights["up"]
    assert tensor.ne == (128, 64, 1)
    assert expert_span(tensor, 0) == slice(0, tensor.n_bytes)


def test_experts_that_disagree_on_their_number_are_refused(qwen3moe: Path, tmp_path: Path) -> None:
    def halve(tensors: list[RawTensor]) -> list[RawTensor]:
        return [
            replace(t, ne=(*t.ne[:2], 4), data=t.data[: len(t.data) // 2]) if "1.ffn_up_exps" in t.name else t
            for t in tensors
        ]

    model = open_model(rewrite(qwen3moe, tmp_path / "m.gguf", tensors=halve))
    with pytest.raises(
        FormatError, match=r"m.gguf: the experts of layer 1 do not agree on their number: .*ffn_up_exps"
    ):
        check_moe(model)


def expert_tensor(ne: tuple[int, ...], name: str = "blk.0.ffn_up_exps.weight") -> TensorInfo:
    return TensorInfo(name, "f32", ne, 4 * ne[0] * ne[1] * (ne[2] if len(ne) > 2 else 1), 0, 0)


def test_each_expert_is_one_contiguous_span() -> None:
    tensor = expert_tensor((32, 2, 4))
    assert [expert_span(tensor, expert) for expert in range(4)] == [
        slice(start, start + 256) for start in range(0, 1024, 256)
    ]
    for absent in (-1, 4):
        with pytest.raises(IndexError, match="4 experts"):
            expert_span(tensor, absent)
    with pytest.raises(FormatError, match="not a stack of experts"):
        expert_span(expert_tensor((32, 2)), 0)


def test_a_stack_of_no_expert_is_refused() -> None:
    with pytest.raises(FormatError, match="do not agree on their number"):
        find_banks([expert_tensor((32, 2, 0))])


def test_biases_without_matrices_are_refused() -> None:
    with pytest.raises(FormatError, match="no matrix at all"):
        find_banks([expert_tensor((32, 4), "blk.0.ffn_up_exps.bias")])


def test_banks_come_in_order_of_layers() -> None:
    banks = find_banks(expert_tensor((32, 2, 4), f"blk.{n}.ffn_up_exps.weight") for n in (10, 9, 1))
    assert [bank.layer for bank in banks] == [1, 9, 10]
    assert all(isinstance(bank, ExpertBank) and bank.slot_bytes == 256 for bank in banks)


@pytest.mark.parametrize(
    ("name", "is_expert"),
    [
        ("blk.0.ffn_down_exps.weight", True),
        ("blk.10.ffn_gate_up_exps.bias", True),
        ("blk.0.ffn_up_chexps.weight", True),
        ("blk.0.ffn_up_exps.input_scale", True),
        ("blk.0.ffn_up_shexp.weight", False),
        ("blk.0.ffn_gate_inp.weight", False),
        ("blk.0.ffn_up_exps.3.weight", False),
        ("blk.0.ffn_up_exps.weight\n", False),
    ],
)
def test_only_routed_experts_are_experts(name: str, is_expert: bool) -> None:
    assert is_expert_tensor(name) is is_expert
