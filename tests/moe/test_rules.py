"""Placement rules: ``REGEX=DEVICE``, the first that matches decides, and an expert moves as a whole."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, write_tiny_model

from ggufmoe.errors import UsageError
from ggufmoe.gguf.blocks import block_name
from ggufmoe.gguf.experts import ExpertBank
from ggufmoe.gguf.model import Model, open_model
from ggufmoe.moe.rules import (
    Rule,
    exact_patterns,
    expert_rule,
    first_match,
    parse_rule,
    unmatched,
)


def rules(*texts: str) -> list[Rule]:
    return [parse_rule(text) for text in texts]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    names = ("qwen3moe", "gemma4", "grovemoe", "llama4")
    models = {name: open_model(write_tiny_model(folder / f"{name}.gguf", name)) for name in names}
    many = write_tiny_model(folder / "many.gguf", "qwen3moe", n_layer=12)
    return {**models, "12 layers": open_model(many)}


@pytest.fixture(scope="module")
def bank(models: dict[str, Model]) -> ExpertBank:
    return models["qwen3moe"].banks[1]


@pytest.mark.parametrize(
    ("text", "pattern", "device"),
    [
        (r"blk\.7\.=CPU", r"blk\.7\.", "CPU"),
        ("[0-9]=CPU", "[0-9]", "CPU"),
        ("(?=ffn)=CUDA0", "(?=ffn)", "CUDA0"),  # the last = separates
        ("exps= RPC0[10.0.0.7:50052] ", "exps", "RPC0[10.0.0.7:50052]"),
        ("^$=cpu", "^$", "cpu"),
    ],
)
def test_parsing(text: str, pattern: str, device: str) -> None:
    rule = parse_rule(text)
    assert (rule.pattern.pattern, rule.device) == (pattern, device)
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize("text", ["", "=", "exps", "exps=", "exps= ", "=CPU"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(UsageError, match="not a rule of the form REGEX=DEVICE"):
        parse_rule(text)


@pytest.mark.parametrize("pattern", ["(", "[", "*", "a{99999999999999999999}", "(?P<a", "(" * 5000])
def test_what_is_no_regular_expression(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        parse_rule(f"{pattern}=CPU")


def test_a_doubtful_pattern_causes_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_rule("[[a]=CPU").pattern.search("[")


def test_the_first_match_wins() -> None:
    some = rules(r"blk\.1\.=CPU", r"attn=CUDA0", r".=CUDA1")
    assert [first_match(some, name) for name in ("blk.1.attn_q.weight", "blk.2.attn_q.weight", "x")] == some
    assert first_match(some[:2], "blk.2.ffn_norm.weight") is None
    assert first_match(rules(r"blk.1.ffn=CPU"), "blk.11.ffn_norm.weight") is None
    assert first_match(rules(r"blk.1.*ffn=CPU"), "blk.11.ffn_norm.weight") is not None


def test_names_of_blocks(bank: ExpertBank) -> None:
    assert block_name("blk.3.ffn_up_exps.weight", 12) == "blk.3.ffn_up_exps.12.weight"
    assert {block_name(stack.name, 0) for stack in bank.weights.values()} == {
        f"blk.1.ffn_{projection}_exps.0.weight" for projection in ("gate", "up", "down")
    }


def placed(bank: ExpertBank, *texts: str) -> dict[int, str]:
    """Expert -> device, where a rule says one."""
    some = rules(*texts)
    found = {expert: expert_rule(some, bank, expert) for expert in range(bank.n_expert)}
    return {expert: rule.device for expert, rule in found.items() if rule}


def test_rules_for_experts(bank: ExpertBank) -> None:
    every = range(bank.n_expert)
    assert placed(bank, "exps=CPU") == dict.fromkeys(every, "CPU")
    assert placed(bank, r"blk\.0\.=CPU") == {}
    assert placed(bank, r"ffn_.*_exps\.weight=CPU") == dict.fromkeys(every, "CPU")  # names whole stacks
    assert placed(bank, r"blk\.1\.ffn_.*_exps\.(3|5)\.weight=A") == {3: "A", 5: "A"}
    assert placed(bank, r"_exps\.(3|5)\.=A", "exps=B") == {**dict.fromkeys(every, "B"), 3: "A", 5: "A"}
    assert placed(bank, "exps=B", r"_exps\.(3|5)\.=A") == dict.fromkeys(every, "B")
    assert placed(bank, "attn=A", r"\.0\.weight=B") == {0: "B"}


def test_merged_experts_go_by_their_own_names(models: dict[str, Model]) -> None:
    bank = models["gemma4"].banks[0]
    assert placed(bank, r"ffn_(gate_up|down)_exps\.2\.=A") == {2: "A"}


def test_the_smaller_bank_has_rules_of_its_own(models: dict[str, Model]) -> None:
    by_name = {bank.name: bank for bank in models["grovemoe"].banks if bank.layer == 0}
    assert placed(by_name["chexps"], r"_exps=A") == {}
    assert set(placed(by_name["chexps"], r"exps=A")) == set(range(by_name["chexps"].n_expert))
    assert placed(by_name["exps"], r"_chexps\.1\.=A") == {}
    assert placed(by_name["chexps"], r"_chexps\.1\.=A") == {1: "A"}


@pytest.mark.parametrize(
    ("texts", "left"),
    [
        (["ffn_up_exps=CPU"], "blk.1.ffn_(gate|down)_exps.0.weight"),
        ([r"ffn_(up|gate)_exps\.4\.=CPU"], "blk.1.ffn_down_exps.4.weight"),
        (["ffn_down_exps=A", "exps=B"], "blk.1.ffn_.*_exps.0.weight"),
        (["ffn_gate_exps=CPU", "ffn_up_exps=cpu"], "blk.1.ffn_down_exps.0.weight"),
    ],
)
def test_a_rule_that_takes_an_expert_apart_is_refused(bank: ExpertBank, texts: list[str], left: str) -> None:
    with pytest.raises(UsageError, match=rf"takes expert \d of layer 1 apart: {left} does not go") as error:
        placed(bank, *texts)
    assert error.value.hint and "ffn_.*_exps" in error.value.hint


def test_rules_that_agree_take_nothing_apart(bank: ExpertBank) -> None:
    assert len(placed(bank, "ffn_gate_exps=CPU", "ffn_up_exps=cpu", "ffn_down_exps=Cpu")) == bank.n_expert


def test_rules_that_match_nothing(models: dict[str, Model]) -> None:
    model = models["qwen3moe"]
    dense = [tensor.name for tensor in model.dense_tensors]
    good = rules("attn_q=A", r"exps\.7\.weight=A", r"exps\.weight=A", "^output=A")
    bad = rules(r"exps\.8\.weight=A", r"blk\.2\.=A", "ATTN=A", "^attn=A")
    assert unmatched([*good, *bad], dense, model.banks) == bad


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4", "grovemoe", "llama4", "12 layers"])
@pytest.mark.parametrize("part", ["experts", "dense", "layer 1", "one", "none"])
def test_exact_patterns_match_exactly_the_given_names(models: dict[str, Model], arch: str, part: str) -> None:
    every = [tensor.name for tensor in models[arch].tensors]
    chosen = {
        "experts": [name for name in every if "exps" in name],
        "dense": [name for name in every if "exps" not in name],
        "layer 1": [name for name in every if name.startswith("blk.1.")],
        "one": every[:1],
        "none": [],
    }[part]
    patterns = exact_patterns(chosen)
    near = [variant for name in every for variant in (f"x{name}", f"{name}x", name.replace(".", "_"))]
    found = [name for name in every + near if any(re.search(pattern, name) for pattern in patterns)]
    assert found == chosen
    assert len(patterns) <= 30


@given(
    st.lists(st.text("ab.1[](){}*+?|^$\\-_/ \n\"'", min_size=1, max_size=12), unique=True, max_size=5),
    st.data(),
)
def test_any_name_is_matched_literally(names: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    patterns = exact_patterns(chosen)
    assert [n for n in names if any(re.fullmatch(p, n) for p in patterns)] == [
        n for n in names if n in chosen
    ]


# What std::regex (ECMAScript) and Python read alike: anchors, one group of numbers, letters, escaped punctuation.
CONSERVATIVE = re.compile(r"\^(?:[A-Za-z0-9_-]|\\[^A-Za-z0-9_-]|\(\d+(?:\|\d+)*\))+\$")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_exact_patterns_need_no_dialect(tmp_path: Path, arch: str) -> None:
    model = open_model(write_tiny_model(tmp_path / "m.gguf", arch))
    for pattern in exact_patterns(tensor.name for tensor in model.tensors):
        assert CONSERVATIVE.fullmatch(pattern), pattern
