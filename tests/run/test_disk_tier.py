"""``--ram``: sessions whose experts do not fit into memory, their budget, and disks that fail."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_models import write_tiny_model

from ggufmoe import (
    GgufMoeError,
    NativeError,
    Sampling,
    Session,
    SessionOptions,
    UsageError,
    parse_residents,
    verify,
)
from ggufmoe.cli import cli
from ggufmoe.errors import MemoryPlanError
from ggufmoe.gguf.model import open_model
from ggufmoe.moe.ram import plan_ram
from ggufmoe.native.paging import mappings_of
from ggufmoe.run.setup import prepare

OPTIONS = SessionOptions(context=256, threads=1)
GREEDY = Sampling(temperature=0)
N_EXPERT = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ram") / "model.gguf"
    return write_tiny_model(path, "qwen3moe", n_expert=N_EXPERT, text=True)


def least_bytes(path: Path) -> int:
    with pytest.raises(MemoryPlanError) as caught:
        prepare(open_model(path), replace(OPTIONS, ram_bytes=0))
    match = re.search(r"need ([\d,]+) bytes of RAM, the budget is 0 \(\1 too few\)", str(caught.value))
    assert match is not None
    return int(match[1].replace(",", ""))


def test_the_least_budget_works_and_answers_as_without(model: Path) -> None:
    least = least_bytes(model)
    with Session(model, OPTIONS) as session:
        expected = "".join(session.generate("one two three", GREEDY, max_tokens=30))
        assert session.disk is None
    with Session(model, replace(OPTIONS, ram_bytes=least)) as session:
        assert session.disk is not None
        assert "".join(session.generate("one two three", GREEDY, max_tokens=30)) == expected
        assert session.hit_rate is not None and 0.05 < session.hit_rate < 0.99
        (use,) = session.slot_use()
        assert (use.device, use.n_resident) == ("RAM", 6)
        assert use.slot_bytes == session.disk.plan.slot_bytes
        counts = [sum(residents.decode_counts) for residents in session.executor.banks.values()]
        assert counts[0] == counts[1] > 3 * 10
        assert sum(counts) == session.executor.traffic.decode
    with pytest.raises(MemoryPlanError, match=r"\(1 too few\)") as caught:
        Session(model, replace(OPTIONS, ram_bytes=least - 1))
    assert "--ram" in (caught.value.hint or "")


def test_budgets_divide(model: Path) -> None:
    opened, least = open_model(model), least_bytes(model)
    each = sum(bank.slot_bytes for bank in opened.banks)
    plan = plan_ram(opened, least + 2 * each, 256, 256)
    assert plan is not None
    assert plan.slots_per_layer == 5
    fixed = plan.dense_bytes + plan.edge_bytes + plan.context_bytes + plan.work_bytes
    assert fixed + plan.slot_bytes == plan.ram_bytes
    assert "token_embd.weight" not in {tensor.name for tensor in plan.dense}, "looked up, not read"
    assert plan_ram(opened, 8 << 30, 256, 256) is None


def test_what_fits_is_loaded_as_ever(model: Path) -> None:
    setup = prepare(open_model(model), replace(OPTIONS, ram_bytes=8 << 30))
    assert setup.ram is None
    assert setup.cold_store in ("mmap", "repack")


def test_verify_finds_no_difference(model: Path) -> None:
    options = replace(OPTIONS, ram_bytes=least_bytes(model) + 100_000)
    comparison = verify(open_model(model), options, n_prompt=40, n_decode=20, seed=1)
    assert comparison.within(0.0)
    assert comparison.decode_hit_rate is not None and comparison.decode_hit_rate < 1


@pytest.mark.parametrize(
    "others",
    [
        {"devices": ("cpu",)},
        {"residents": parse_residents("4")},
        {"vram_bytes": 1 << 30},
        {"cold_store": "repack"},
        {"trace": Path("trace")},
    ],
    ids=lambda others: next(iter(others)),
)
def test_ram_excludes_slots_elsewhere(model: Path, others: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--ram"):
        prepare(open_model(model), SessionOptions(ram_bytes=1 << 30, **others))  # type: ignore[arg-type]


def test_the_command_line(model: Path) -> None:
    arguments = ["run", str(model), "-p", "one two", "-n", "8", "--temperature", "0", "--context", "256"]
    ram = f"{least_bytes(model)}B"
    with_ram = CliRunner().invoke(cli, [*arguments, "--ram", ram, "--json"])
    assert with_ram.exit_code == 0, with_ram.output
    facts = json.loads(with_ram.stdout)
    assert facts["cold_store"] == "disk"
    assert facts["devices"][0]["device"] == "RAM"
    assert facts["text"] == json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["text"]
    too_small = CliRunner().invoke(cli, [*arguments, "--ram", "1MiB"])
    assert too_small.exit_code == 1
    assert "Use --ram" in too_small.stderr


def test_a_file_cut_short_ends_in_an_error(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model.read_bytes())
    last = open_model(path).banks[-1]
    with Session(path, replace(OPTIONS, ram_bytes=least_bytes(path))) as session:
        session.evaluate([1, 2, 3])
        os.truncate(path, min(tensor.offset for tensor in last.weights.values()) + 1000)
        with pytest.raises(NativeError, match="ends at byte") as caught:
            for token in range(60):
                session.evaluate([token])
        assert "Load it again" in (caught.value.hint or "")
        assert session.tokens == []


def test_a_disk_that_fails_for_a_while(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(3, 60))
    with Session(model, OPTIONS) as session:
        expected = session.evaluate(tokens).copy()
        last = [session.evaluate([token]).copy() for token in (7, 8, 9)]
    with Session(model, replace(OPTIONS, ram_bytes=least_bytes(model))) as session:
        preadv = os.preadv

        def fail(fd: int, views: list[memoryview], offset: int) -> int:
            views[0].cast("B")[:100] = bytes(100)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        for attempt in ([1], tokens, [1, 2, 3]):
            with pytest.raises(NativeError, match=r"cannot be read at byte [\d,]+: Input/output error"):
                for _ in range(20):
                    session.evaluate(attempt)
        monkeypatch.setattr(os, "preadv", preadv)
        np.testing.assert_array_equal(session.evaluate(tokens), expected)
        for token, logits in zip((7, 8, 9), last, strict=True):
            np.testing.assert_array_equal(session.evaluate([token]), logits)


def test_sessions_one_after_the_other_and_two_at_a_time(model: Path) -> None:
    options = replace(OPTIONS, ram_bytes=least_bytes(model) + 60_000)
    with Session(model, options) as one, Session(model, options) as two, Session(model, OPTIONS) as stock:
        for tokens in ([5, 6, 7], [8], [9]):
            expected = stock.evaluate(tokens)
            np.testing.assert_array_equal(one.evaluate(tokens), expected)
            np.testing.assert_array_equal(two.evaluate(tokens), expected)
    assert mappings_of(model) == set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ggufmoe-read")]
    with Session(model, options) as again:
        assert np.isfinite(again.evaluate([5, 6, 7])).all()


def test_a_failed_load_leaves_nothing(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model.read_bytes().replace(b"attn_norm.weight", b"attn_nope.weight"))
    options = replace(OPTIONS, ram_bytes=least_bytes(model) + 60_000)
    for _ in range(2):
        with pytest.raises(GgufMoeError, match="attn_norm"):
            Session(path, options)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ggufmoe-read")]
