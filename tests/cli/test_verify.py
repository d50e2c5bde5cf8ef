"""``ggufmoe verify``: passes where nothing changed, and fails where something did, NaN included."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import ggufmoe, in_process
from numpy.typing import NDArray
from tiny_models import RawTensor, rewrite, write_tiny_model

from ggufmoe.run.verify import Comparison, compare

FEW = ("--prompt-tokens", "12", "--decode-tokens", "6", "--threads", "1")
HALF_NAN, HALF_INFINITY = 0x7E00, 0x7C00  # as fp16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def all_used(folder: Path) -> Path:
    """Every token uses all eight experts."""
    return write_tiny_model(folder / "all.gguf", "qwen3moe", n_expert_used=8, text=True)


@pytest.fixture(scope="module")
def no_tokenizer(folder: Path) -> Path:
    source = write_tiny_model(folder / "m.gguf", "qwen3moe")
    tokens = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "add_bos_token")]
    return rewrite(source, folder / "none.gguf", keys={"tokenizer.ggml.model": "no_vocab"}, drop=tokens)


def bad_scale(source: Path, path: Path, scale: int) -> Path:
    """The first block of expert 1 in layer 1 gets a scale that is no number."""

    def change(tensors: list[RawTensor]) -> list[RawTensor]:
        return [
            t.patched(len(t.data) // 8, struct.pack("<H", scale))
            if t.name == "blk.1.ffn_down_exps.weight"
            else t
            for t in tensors
        ]

    return rewrite(source, path, tensors=change)


def nan_router(source: Path, path: Path) -> Path:
    def change(tensors: list[RawTensor]) -> list[RawTensor]:
        nan = struct.pack("<f", math.nan)
        return [
            RawTensor(t.name, t.type, t.ne, nan * (len(t.data) // 4)) if "ffn_gate_inp" in t.name else t
            for t in tensors
        ]

    return rewrite(source, path, tensors=change)


def verify(model: Path | str, *args: str) -> tuple[int, dict[str, Any]]:
    outcome = in_process("verify", model, *FEW, "--json", *args)
    return outcome.code, outcome.json


# Through llama.cpp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("residents", ["0", "50%", "all"])
def test_nothing_changes(all_used: Path, residents: str) -> None:
    code, found = verify(all_used, "--resident-experts", residents)
    assert (code, found["passed"], found["max_difference"], found["n_not_finite"]) == (0, True, 0.0, 0)
    assert (found["n_prompt"], found["n_decode"], found["top1_agreement"]) == (12, 6, 1.0)
    assert found["decode_hit_rate"] == {"0": 0.0, "50%": 0.5, "all": 1.0}[residents]


def test_a_model_without_a_tokenizer_passes(no_tokenizer: Path) -> None:
    code, found = verify(no_tokenizer, "--resident-experts", "50%", "--seed", "7")
    assert (code, found["max_difference"], found["n_prompt"]) == (0, 0.0, 12)
    assert 0 < found["decode_hit_rate"] < 1


def test_the_answer_for_people(all_used: Path) -> None:
    outcome = ggufmoe("verify", all_used, *FEW, "--resident-experts", "2")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.split()[:2] == ["verify", "PASSED"]
    assert "12 prefill + 6 decode" in outcome.out and "0 (tolerance 0)" in outcome.out


@pytest.mark.parametrize("scale", [HALF_NAN, HALF_INFINITY])
@pytest.mark.parametrize("residents", ["0", "50%"])
def test_a_bad_scale_fails(all_used: Path, tmp_path: Path, scale: int, residents: str) -> None:
    path = bad_scale(all_used, tmp_path / "m.gguf", scale)
    code, found = verify(path, "--resident-experts", residents, "--tolerance", "1000")
    assert (code, found["passed"], found["max_difference"]) == (1, False, None)
    assert found["n_not_finite"] == 18
    outcome = in_process("verify", path, *FEW)
    assert outcome.code == 1
    assert outcome.out.split()[:2] == ["verify", "FAILED"]
    assert "tokens with logits that are not finite" in outcome.out
    assert in_process("verify", path, *FEW, "--tolerance", "inf").code == 1


@pytest.mark.parametrize("residents", ["0", "50%", "all"])
def test_a_router_of_nan_ends_nothing(folder: Path, tmp_path: Path, residents: str) -> None:
    source = write_tiny_model(folder / "text.gguf", "qwen3moe", text=True)
    path = nan_router(source, tmp_path / "m.gguf")
    code, found = verify(path, "--resident-experts", residents)
    assert (code, found["n_not_finite"]) == (1, 18)
    for temperature in ("0", "0.8"):
        args = ("-p", "hello", "-n", "4", "--threads", "1", "--temperature", temperature)
        outcome = ggufmoe("run", path, *args, "--resident-experts", residents, "--json")
        assert (outcome.code, outcome.err) == (0, "")  # ids from 0 to 7, or the executor would refuse them
        assert outcome.json["decode_routings"] == 3 * 2 * 3


def test_what_is_no_tolerance(all_used: Path) -> None:
    for tolerance in ("nan", "-1", "x"):
        assert in_process("verify", all_used, "--tolerance", tolerance).code == 2


# The comparison itself -----------------------------------------------------------------------------------


def logits(*rows: list[float]) -> NDArray[np.float32]:
    return np.array(rows, np.float32)


SAME = logits([0, 1, 2], [2, 1, 0], [0, 3, 0], [5, 0, 0])


def compared(ours: NDArray[np.float32], reference: NDArray[np.float32] = SAME) -> Comparison:
    return compare(reference, ours, 2, None)


def test_the_same_logits_are_the_same() -> None:
    found = compared(SAME.copy())
    assert found == Comparison(2, 2, 0.0, 0.0, 0.0, 1.0, None, 0, None)
    assert found.within(0.0)


def test_a_small_difference() -> None:
    ours = SAME.copy()
    ours[1, 2] += np.float32(0.25)
    found = compared(ours)
    assert (found.max_difference, found.first_difference, found.top1_agreement) == (0.25, None, 1.0)
    assert found.within(0.25) and not found.within(0.2) and not found.within(0.0)
    assert 0 < found.mean_kl_divergence < found.max_kl_divergence < 0.1


def test_another_likeliest_token() -> None:
    ours = SAME.copy()
    ours[2] = [9, 3, 0]
    found = compared(ours)
    assert (found.first_difference, found.top1_agreement, found.max_difference) == (2, 0.75, 9.0)
    assert not found.within(8.99)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["ours", "stock", "both"])
def test_what_is_not_finite_never_passes(value: float, side: str) -> None:
    bad = SAME.copy()
    bad[1, 0] = value
    found = compared(SAME if side == "stock" else bad, SAME if side == "ours" else bad)
    assert (found.n_not_finite, found.max_difference, found.top1_agreement) == (1, math.inf, 1.0)
    assert not found.within(0.0) and not found.within(1e9) and not found.within(math.inf)


def test_the_first_difference_counts_the_bad_rows_too() -> None:
    ours = SAME.copy()
    ours[0, 0] = math.nan
    ours[3] = [0, 5, 0]
    assert compared(ours).first_difference == 3


def test_nothing_but_nan() -> None:
    found = compared(np.full_like(SAME, math.nan))
    assert (found.n_not_finite, found.top1_agreement, found.first_difference) == (4, 0.0, None)
    assert not found.within(math.inf)


def test_a_tolerance_of_nan_never_passes() -> None:
    assert not compared(SAME.copy()).within(math.nan)
