"""Experts read on demand change no bit: logits against stock llama.cpp, with room for the experts of one token."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import N_DECODE, N_PROMPT, PLAN, Logits, decode_greedily, prompt_for
from harness import stock as stock_with
from on_demand import on_demand
from tiny_models import ARCHITECTURES, split_shards, write_tiny_model

from ggufmoe.errors import NativeError
from ggufmoe.models import demo_model_path
from ggufmoe.native import paging
from ggufmoe.native.direct import DirectFile, Read, Readers
from ggufmoe.native.llama import ContextPlan, LlamaContext
from ggufmoe.native.paging import give_back, mappings_of, n_present_pages, put_memory
from ggufmoe.run.disk import DiskTier

ALONE = replace(PLAN, n_threads=1)
WIDE = replace(ALONE, n_ctx=1024)


def stock(
    path: Path, evaluate: Callable[[LlamaContext], Logits] = decode_greedily, *, plan: ContextPlan = ALONE
) -> Logits:
    return stock_with(path, evaluate, plan=plan)


def long_prompt(context: LlamaContext) -> Logits:
    return decode_greedily(context, 700, 4)


def sequences(context: LlamaContext) -> Logits:
    """Three sequences that advance together."""
    tokens = prompt_for(context.model.n_vocab, 30)
    rows = []
    for position in range(10):
        context.decode(tokens[position * 3 : position * 3 + 3], position, sequences=[0, 1, 2])
        rows += [context.logits(row).copy() for row in range(3)]
    return np.stack(rows)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str, model_of: Callable[[str], Path]) -> None:
    path = model_of(arch)
    reference = stock(path)
    for n_slots in (3, 4, 8):
        logits, executor, tier = on_demand(path, n_slots)
        np.testing.assert_array_equal(logits, reference)
        n_layers = len({layer for layer, _ in executor.banks})
        assert executor.traffic.prefill >= (N_PROMPT + N_DECODE) * 3 * n_layers
        assert tier.pool.used_bytes <= tier.plan.slot_bytes
        if n_slots == 8:
            assert executor.traffic.prefill_hits == executor.traffic.prefill
        else:
            assert 0 < executor.traffic.prefill_hits < executor.traffic.prefill


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_long_prompts_and_sequences(arch: str, model_of: Callable[[str], Path]) -> None:
    path = model_of(arch)
    np.testing.assert_array_equal(
        on_demand(path, 3, long_prompt, plan=WIDE)[0], stock(path, long_prompt, plan=WIDE)
    )
    plan = replace(ALONE, n_seq_max=3)
    np.testing.assert_array_equal(
        on_demand(path, 4, sequences, plan=plan)[0], stock(path, sequences, plan=plan)
    )


def test_one_slot_per_layer_reads_nothing_ahead(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "one.gguf", "llama4", n_expert_used=1)
    np.testing.assert_array_equal(on_demand(path, 1)[0], stock(path))


def test_shards(tmp_path: Path, model_of: Callable[[str], Path]) -> None:
    shards = split_shards(model_of("qwen3moe"), tmp_path, 7)
    np.testing.assert_array_equal(on_demand(shards[0], 3)[0], stock(model_of("qwen3moe")))


def test_memory_is_given_back(model_of: Callable[[str], Path]) -> None:
    """Pages that hold experts: those of the ones in memory, and at most the edges of the others."""
    shares = []

    def watch(tier: DiskTier) -> None:
        allowed = present = everything = 0
        for bank, shelf in zip(tier.plan.banks, tier.shelves, strict=True):
            for stack in shelf.stacks:
                end = stack.address + stack.expert_bytes * bank.n_expert
                present += n_present_pages(stack.address, end)
                everything += (end - stack.address) // paging.PAGE
                allowed += sum(shelf.present) * (stack.expert_bytes // paging.PAGE) + bank.n_expert + 1
        assert present <= allowed
        shares.append(present / everything)

    _, _, tier = on_demand(demo_model_path(), 8, watch=watch)
    assert tier.n_read > 500
    assert max(shares) < 0.4


def test_everything_is_gone_in_the_end(model_of: Callable[[str], Path]) -> None:
    path = model_of("qwen3moe")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        on_demand(path, 3)
        assert mappings_of(path) == set()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 1


def test_file_systems_without_direct_reads(
    model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, open_, preadv = model_of("qwen3moe"), os.open, os.preadv
    reference = stock(path)
    direct: set[int] = set()

    def refuse_open(file: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_(file, flags)

    def remember(file: Path, flags: int) -> int:
        fd = open_(file, flags)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def refuse_read(fd: int, views: list[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_open)
        logits, _, tier = on_demand(path, 3)
    assert not tier.files[0].is_direct
    np.testing.assert_array_equal(logits, reference)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", remember)
        patch.setattr(os, "preadv", refuse_read)
        logits, _, tier = on_demand(path, 3)
    assert not tier.files[0].is_direct
    np.testing.assert_array_equal(logits, reference)


def test_direct_reads_leave_the_surroundings_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    data = np.random.default_rng(1).integers(0, 256, 5 * paging.PAGE + 100, np.uint8).tobytes()
    path.write_bytes(data)
    memory = np.zeros(8 * paging.PAGE, np.uint8)
    base = -(-memory.ctypes.data // paging.PAGE) * paging.PAGE
    first = base - memory.ctypes.data
    file, readers = DirectFile(path), Readers(2)
    spans = [(100, 5000), (5000, 5001), (paging.PAGE, 2 * paging.PAGE), (20_000, len(data))]
    readers.start([Read(file, base + start, start, end - start) for start, end in spans]).wait()
    for start, end in spans:
        assert memory[first + start : first + end].tobytes() == data[start:end]
    assert memory[: first + 100].max() == 0 and memory[first + len(data) :].max() == 0
    assert memory[first + 5001 : first + 20_000].sum() == memory[first + 5001 : first + 2 * paging.PAGE].sum()
    with pytest.raises(NativeError, match="ends at byte"):
        readers.start([Read(file, base, 0, len(data) + 1)]).wait()
    with pytest.raises(NativeError, match="ends at byte"):
        readers.start([Read(file, base, 7 * paging.PAGE, 10)]).wait()
    readers.start([]).wait()
    readers.close()
    file.close()
    file.close()


def test_pages_come_and_go() -> None:
    memory = np.zeros(16 * paging.PAGE, np.uint8)
    start = -(-memory.ctypes.data // paging.PAGE) * paging.PAGE
    view = memory[start - memory.ctypes.data :][: 8 * paging.PAGE]
    view[:] = 1
    put_memory(start, start + 8 * paging.PAGE)
    assert n_present_pages(start, start + 8 * paging.PAGE) == 0
    view[:] = 2
    assert n_present_pages(start, start + 8 * paging.PAGE) == 8
    give_back(start + 1, start + 3 * paging.PAGE + 1)
    assert n_present_pages(start, start + 8 * paging.PAGE) == 6
    assert view[paging.PAGE : 3 * paging.PAGE].max() == 0 and view[0] == 2
    give_back(start + 1, start + paging.PAGE)  # no whole page


@pytest.mark.parametrize(("platform", "page"), [("darwin", 4096), ("linux", 16384)])
def test_other_systems_are_refused(platform: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("mmap.PAGESIZE", page)
    with pytest.raises(NativeError, match="on demand"):
        paging.require_paging()


def test_loading_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock llama.cpp maps a file with all of its pages; ours leaves it unread, and the registry as it was."""
    path = write_tiny_model(tmp_path / "model.gguf", "qwen3moe", n_expert=64)
    present = []

    def watch(self: DiskTier, _weights: object) -> None:
        mapping = max(self._mappings[0], key=lambda m: m.end - m.start)
        present.append(n_present_pages(mapping.start, mapping.end) * paging.PAGE / path.stat().st_size)

    monkeypatch.setattr(DiskTier, "start", watch)
    on_demand(path, 3, lambda _context: np.zeros((1, 1), np.float32))
    monkeypatch.undo()
    assert present[0] < 0.2
    np.testing.assert_array_equal(on_demand(path, 3)[0], stock(path))
