"""Which experts start out resident: asked for, by rule, or as many as the budget holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import write_tiny_model

from ggufmoe.errors import MemoryPlanError, UsageError
from ggufmoe.gguf.experts import ExpertBank, TensorInfo
from ggufmoe.gguf.model import open_model
from ggufmoe.moe.residents import Placement, ResidentRequest, parse_residents, place_residents
from ggufmoe.moe.rules import parse_rule

NOTHING = ResidentRequest()


def bank(layer: int, n_expert: int = 8, expert_bytes: int = 100, name: str = "exps") -> ExpertBank:
    """One matrix per expert; the bias beside it takes no slot."""
    stack = f"blk.{layer}.ffn_up_{name}"
    weight = TensorInfo(f"{stack}.weight", "q8_0", (32, 1, n_expert), n_expert * expert_bytes, 0, 0)
    bias = TensorInfo(f"{stack}.bias", "f32", (1, n_expert), n_expert * 4, 0, 0)
    return ExpertBank(layer, name, n_expert, {"up": weight}, (bias,))


BANKS = [bank(0), bank(1)]


def place(
    banks: Sequence[ExpertBank] = BANKS,
    request: ResidentRequest | str = NOTHING,
    rules: Sequence[str] = (),
    devices: Sequence[str] = ("CUDA0",),
    budget: int | None = None,
) -> Placement:
    asked = parse_residents(request) if isinstance(request, str) else request
    """``budget`` is divided evenly between the devices."""
    n = len(devices)
    budgets = None if budget is None else [budget // n + (index < budget % n) for index in range(n)]
    return place_residents(banks, asked, [parse_rule(rule) for rule in rules], devices, budgets)


def experts(placement: Placement, layer: int, name: str = "exps") -> list[int]:
    return [expert for expert, _ in placement.residents[layer, name]]


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("8", ResidentRequest(count=8)),
        (" 0 ", ResidentRequest(count=0)),
        ("25%", ResidentRequest(share=0.25)),
        ("12.5 %", ResidentRequest(share=0.125)),
        ("0%", ResidentRequest(share=0.0)),
        ("100%", ResidentRequest(share=1.0)),
        ("ALL", ResidentRequest(share=1.0)),
    ],
)
def test_parsing(text: str, request_: ResidentRequest) -> None:
    assert parse_residents(text) == request_


@pytest.mark.parametrize(
    "text",
    ["", "-1", "+1", "1.5", "101%", "%", "8 experts", "nan", "inf%", "1e3", "0x8", "9" * 5000, "25%%", "٣"],
)
def test_what_is_no_number_of_experts(text: str) -> None:
    with pytest.raises(UsageError, match="is not a number of experts per layer"):
        parse_residents(text)


@pytest.mark.parametrize(
    ("request_", "n"), [("0", 0), ("3", 3), ("99", 8), ("0%", 0), ("50%", 4), ("20%", 2), ("all", 8)]
)
def test_what_was_asked_for_is_the_first_of_every_layer(request_: str, n: int) -> None:
    placement = place(request=request_)
    assert [experts(placement, layer) for layer in (0, 1)] == [list(range(n))] * 2
    assert placement.n_resident() == 2 * n
    assert placement.slot_bytes(BANKS, 0) == 2 * n * 100  # biases take no slot


def test_without_request_or_budget_nothing_is_resident() -> None:
    assert place().n_resident() == 0
    assert place(budget=0).n_resident() == 0
    assert place(request="all", devices=()).n_resident() == 0
    assert place(banks=[], request="all", budget=1000).residents == {}


@pytest.mark.parametrize(
    ("budget", "n"), [(99, 0), (199, 0), (200, 1), (1000, 5), (1599, 7), (1600, 8), (10**18, 8)]
)
def test_the_budget_is_spread_evenly(budget: int, n: int) -> None:
    placement = place(budget=budget)
    assert [len(experts(placement, layer)) for layer in (0, 1)] == [n, n]


def test_a_request_beyond_the_budget_names_the_missing_bytes() -> None:
    assert place(request="4", budget=800).n_resident() == 8
    with pytest.raises(MemoryPlanError, match=r"need 800 bytes of slots on CUDA0, 799 .* \(1 too few\)"):
        place(request="4", budget=799)
    with pytest.raises(MemoryPlanError, match=r"need 1,600 bytes of slots on CUDA0, 0 .* \(1,600 too few\)"):
        place(request="all", budget=0)


def test_rules_come_before_the_request() -> None:
    placement = place(
        request="3", rules=[r"blk\.0\.ffn_up_exps\.(5|7)\.=cuda0", r"blk\.1\..*\.0\.weight=CPU"]
    )
    assert experts(placement, 0) == [5, 7, 0]
    assert experts(placement, 1) == [1, 2, 3]  # a rule for the CPU keeps an expert out


def test_rules_can_place_more_than_was_asked_for() -> None:
    placement = place(request="1", rules=[r"blk\.0\.=CUDA0"])
    assert [len(experts(placement, layer)) for layer in (0, 1)] == [8, 1]


def test_rules_are_charged_to_the_budget() -> None:
    rules = [r"blk\.0\.=CUDA0"]
    placement = place(rules=rules, budget=1000)
    assert experts(placement, 0) == list(range(8))
    assert experts(placement, 1) == [0, 1]  # what the rule leaves, and no more
    with pytest.raises(MemoryPlanError, match=r"need 800 bytes of slots on CUDA0, 700 .* \(100 too few\)"):
        place(rules=rules, budget=700)
    with pytest.raises(MemoryPlanError, match=r"\(100 too few\)"):
        place(request="2", rules=rules, budget=900)


def test_rules_for_the_cpu_leave_their_share_to_others() -> None:
    placement = place(rules=[r"blk\.0\.=CPU"], budget=600)
    assert (experts(placement, 0), experts(placement, 1)) == ([], list(range(6)))


def test_a_rule_for_a_device_that_is_not_in_use_is_refused() -> None:
    with pytest.raises(UsageError, match="not in use") as error:
        place(rules=["exps=CUDA1"])
    assert error.value.hint and "--device CUDA1" in error.value.hint
    assert place(rules=["exps=CPU"], request="all").n_resident() == 0


def test_two_devices_take_turns() -> None:
    placement = place(request="3", devices=("CUDA0", "CUDA1"))
    assert placement.residents[0, "exps"] == ((0, 0), (1, 1), (2, 0))
    assert placement.residents[1, "exps"] == ((0, 1), (1, 0), (2, 1))  # so that both hold as much
    assert [placement.slot_bytes(BANKS, device) for device in (0, 1)] == [300, 300]


def test_one_resident_per_layer_is_spread_over_two_devices() -> None:
    placement = place([bank(layer) for layer in range(6)], request="1", devices=("CUDA0", "CUDA1"))
    assert Counter(device for each in placement.residents.values() for _, device in each) == {0: 3, 1: 3}


def test_rules_choose_among_two_devices() -> None:
    placement = place(
        rules=[r"\.2\.weight=CUDA1", r"blk\.1\.ffn_up_exps\.3\.=CUDA0"], devices=("CUDA0", "CUDA1")
    )
    assert placement.residents == {(0, "exps"): ((2, 1),), (1, "exps"): ((2, 1), (3, 0))}


def test_grovemoes_smaller_bank_gets_its_proportion() -> None:
    banks = [bank(0), bank(0, n_expert=4, name="chexps")]
    for request, n, n_small in (
        ("8", 8, 4),
        ("4", 4, 2),
        ("50%", 4, 2),
        ("3", 3, 2),
        ("1", 1, 1),
        ("all", 8, 4),
    ):
        placement = place(banks, request)
        assert (len(experts(placement, 0)), len(experts(placement, 0, "chexps"))) == (n, n_small)


def test_grovemoe_from_a_file(tmp_path: Path) -> None:
    model = open_model(write_tiny_model(tmp_path / "m.gguf", "grovemoe"))
    sizes = {each.name: each.n_expert for each in model.banks}
    placement = place(model.banks, "50%")
    assert sizes["chexps"] < sizes["exps"]
    for each in model.banks:
        assert len(placement.residents[each.layer, each.name]) == each.n_expert // 2


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5000)), min_size=1, max_size=6),
    budget=st.integers(0, 200_000),
    n_devices=st.integers(1, 3),
)
def test_the_budget_is_never_exceeded_and_well_used(
    sizes: list[tuple[int, int]], budget: int, n_devices: int
) -> None:
    banks = [bank(layer, n, n_bytes) for layer, (n, n_bytes) in enumerate(sizes)]
    devices = [f"CUDA{n}" for n in range(n_devices)]
    placement = place(banks, devices=devices, budget=budget)
    used = sum(placement.slot_bytes(banks, device) for device in range(n_devices))
    assert used <= budget
    # what is left over is less than one more expert in each layer, and one on each other device
    everything = sum(each.slot_bytes * each.n_expert for each in banks)
    most = sum(each.slot_bytes for each in banks) + (n_devices - 1) * max(each.slot_bytes for each in banks)
    assert min(budget, everything) - used < most * n_devices or used == everything
