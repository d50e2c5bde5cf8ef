"""The disk tier: experts in RAM as far as ``--ram`` goes, the others read from the file when they are routed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import NativeError
from ..gguf.experts import BankKey, TensorInfo
from ..gguf.model import Model
from ..moe.demand import DemandBank, DemandPool
from ..moe.ram import PAGE_BYTES, RamPlan
from ..native.direct import Batch, DirectFile, Read, Readers
from ..native.paging import (
    FileMapping,
    give_back,
    mapped_without_reading,
    prefer_huge_pages,
    put_memory,
    require_paging,
)

log = logging.getLogger(__name__)

N_READERS = 8
CHUNK_BYTES = 4 << 20  # of dense weights, read at once
# A batch that uses this share of a layer's experts will use nearly all of the next layer's.
FORESEEN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Stack:
    """One stacked matrix: its file, where it begins there and in memory, and the bytes of one expert."""

    file: DirectFile
    offset: int
    address: int
    expert_bytes: int

    def read(self, expert: int) -> Read:
        start = expert * self.expert_bytes
        return Read(self.file, self.address + start, self.offset + start, self.expert_bytes)


class BankShelf:
    """The experts of one bank, in memory or in the file. Only the thread that computes uses it."""

    def __init__(self, tier: DiskTier, index: int) -> None:
        self.present = tier.pool.present[index]
        self.n_missed = 0
        self.stacks: tuple[Stack, ...] = ()
        self._tier, self._index = tier, index
        self._under_way: list[tuple[Sequence[int], Batch]] = []

    @property
    def most_at_once(self) -> int:
        return self._tier.pool.most_at_once(self._index)

    def fetch(self, experts: Sequence[int], running: Sequence[int]) -> None:
        """Start reading ``experts``, none of them present, in place of others, but of none of ``running``.

        What they replace is given back while they are read.
        """
        self._tier.settle()
        self.read(experts, [(self._index, expert) for expert in running])

    def read(self, experts: Sequence[int], keep: Sequence[tuple[int, int]]) -> None:
        """As ``fetch``, in place of others than ``keep`` (bank, expert); what is under way must be among these."""
        tier, index = self._tier, self._index
        victims = tier.pool.admit(index, experts, keep)
        reads = [stack.read(expert) for expert in experts for stack in self.stacks]
        self._under_way.append((experts, tier.readers.start(reads)))
        tier.n_read += len(experts)
        for bank, expert in victims:
            tier.shelves[bank].drop(expert)

    def settle(self) -> None:
        error: Exception | None = None
        while self._under_way:
            experts, batch = self._under_way.pop()
            try:
                batch.wait()
            except Exception as failed:
                error = failed
                for expert in experts:
                    self._tier.pool.forget(self._index, expert)
                    self.drop(expert)
        if error is not None:
            raise error

    def foresee(self, n_used: int) -> None:
        """A batch uses ``n_used`` of these experts: if that is most, start reading all of the next bank."""
        tier, following = self._tier, self._index + 1
        if following == len(tier.shelves) or n_used < FORESEEN_SHARE * len(self.present):
            return
        shelf, pool = tier.shelves[following], tier.pool
        missing = [expert for expert, there in enumerate(shelf.present) if not there]
        room = pool.capacity_bytes - len(shelf.present) * pool.banks[following].expert_bytes
        if missing and n_used * pool.banks[self._index].expert_bytes <= room:
            running = [(self._index, expert) for expert, there in enumerate(self.present) if there]
            shelf.read(missing, running + [(following, expert) for expert in range(len(shelf.present))])

    def drop(self, expert: int) -> None:
        """Give the memory of an expert back, but for pages that its neighbours share."""
        for stack in self.stacks:
            start = stack.address + expert * stack.expert_bytes
            give_back(start, start + stack.expert_bytes)

    def touch(self, chosen: Sequence[int]) -> None:
        self._tier.pool.touch(self._index, chosen)

    def touch_batch(self, ids: NDArray[np.int32]) -> None:
        self._tier.pool.touch_batch(self._index, ids)


class DiskTier:
    """The memory of a session's experts, from loading to closing.

    Load the model inside ``loading``, then ``start`` before anything is evaluated. ``close`` after llama.cpp's
    context, which reads this memory, and before its model, which frees it.
    """

    def __init__(self, model: Model, plan: RamPlan) -> None:
        require_paging()
        self.plan = plan
        self.n_read = 0  # experts
        self._model = model
        self._mappings: list[set[FileMapping]] = []
        self.files = [DirectFile(path) for path in model.paths]
        self.readers = Readers(N_READERS)
        self.pool = DemandPool(
            [DemandBank(bank.n_expert, bank.slot_bytes) for bank in plan.banks], plan.slot_bytes
        )
        self.shelves = [BankShelf(self, index) for index in range(len(plan.banks))]

    @property
    def by_key(self) -> dict[BankKey, BankShelf]:
        return {
            (bank.layer, bank.name): shelf for bank, shelf in zip(self.plan.banks, self.shelves, strict=True)
        }

    @contextmanager
    def loading(self) -> Iterator[None]:
        """llama.cpp maps the model's files inside the block, without reading their weights."""
        with mapped_without_reading(self._model.paths) as mappings:
            yield
        self._mappings = mappings

    def start(self, weights: Mapping[str, int], on_progress: Callable[[float], None] | None = None) -> None:
        """Put memory in the place of the weights, read the dense ones, and experts as far as the budget goes.

        ``weights`` are the addresses of the expert matrices that llama.cpp has asked us to compute with.
        Raises: NativeError if they are not where the files are mapped, or cannot be read.
        """
        for bank in self.plan.banks:
            for tensor in bank.weights.values():
                if weights.get(tensor.name, self._address(tensor)) != self._address(tensor):
                    raise NativeError(f"{tensor.name} does not lie where llama.cpp has mapped its file.")
        for bank, shelf in zip(self.plan.banks, self.shelves, strict=True):
            shelf.stacks = tuple(
                Stack(
                    self.files[tensor.shard],
                    tensor.offset,
                    self._address(tensor),
                    tensor.n_bytes // bank.n_expert,
                )
                for tensor in bank.weights.values()
            )
        runs = self._runs()
        for start, end in runs:
            put_memory(start, end)
        for tensor in self.plan.dense:
            prefer_huge_pages(self._address(tensor), self._address(tensor) + tensor.n_bytes)
        reads = [
            *self._neighbours(runs),
            *(read for tensor in self.plan.dense for read in self._chunks(tensor)),
        ]
        first = self._first_residents()
        self.readers.start(reads).wait()
        for index, experts in first.items():
            self.shelves[index].read(experts, ())
        self.settle()
        log.debug("%d experts of %.1f per layer in memory", self.pool.n_present, self.plan.slots_per_layer)

    def settle(self) -> None:
        """Wait until all that is on its way is there."""
        for shelf in self.shelves:
            shelf.settle()

    def _address(self, tensor: TensorInfo) -> int:
        address = self._find(tensor)
        if address is None:
            raise NativeError(f"{tensor.name} does not lie where llama.cpp has mapped its file.")
        return address

    def _find(self, tensor: TensorInfo) -> int | None:
        """Where the tensor is mapped; None for what llama.cpp has no use for."""
        for mapping in self._mappings[tensor.shard]:
            address = mapping.address(tensor.offset)
            if mapping.holds(address, tensor.n_bytes):
                return address
        return None

    def _runs(self) -> list[tuple[int, int]]:
        """Whole pages that hold dense weights or experts, as few runs as there are."""
        matrices = [tensor for bank in self.plan.banks for tensor in bank.weights.values()]
        spans = sorted(
            (self._address(t), self._address(t) + t.n_bytes) for t in (*self.plan.dense, *matrices)
        )
        runs: list[tuple[int, int]] = []
        for start, end in spans:
            start, end = start // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
            else:
                runs.append((start, end))
        return runs

    def _neighbours(self, runs: Sequence[tuple[int, int]]) -> Iterator[Read]:
        """What else lies in the pages at the ends of runs: parts of tensors that stay mapped."""
        planned = {tensor.name for tensor in self.plan.dense}
        planned |= {tensor.name for bank in self.plan.banks for tensor in bank.weights.values()}
        for tensor in self._model.tensors:
            address = self._find(tensor) if tensor.name not in planned else None
            if address is not None:
                for start, end in runs:
                    start, end = max(start, address), min(end, address + tensor.n_bytes)
                    if start < end:
                        yield Read(
                            self.files[tensor.shard], start, tensor.offset + start - address, end - start
                        )

    def _chunks(self, tensor: TensorInfo) -> Iterator[Read]:
        """The reads of a dense tensor; all but the first begin with a page."""
        address, file = self._address(tensor), self.files[tensor.shard]
        start = 0
        while start < tensor.n_bytes:
            end = min(
                (tensor.offset + start) // CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES - tensor.offset,
                tensor.n_bytes,
            )
            yield Read(file, address + start, tensor.offset + start, end - start)
            start = end

    def _first_residents(self) -> dict[int, list[int]]:
        """What is read at the start: the hottest experts the model knows of, or the first ones of every layer."""
        order: list[tuple[float, int, int]] = []
        for index, bank in enumerate(self.plan.banks):
            heat = self._model.heat.get((bank.layer, bank.name))
            total = sum(heat) if heat else 0.0
            for expert in range(bank.n_expert):
                share = heat[bank.original(expert)] / total if heat and total else 0.0
                order.append((-share, expert, index))
        order.sort()
        left, first = self.plan.slot_bytes, dict[int, list[int]]()
        for _, expert, index in order:
            left -= self.plan.banks[index].slot_bytes
            if left < 0:
                break
            first.setdefault(index, []).append(expert)
        return first

    def close(self) -> None:
        self.readers.close()
        for file in self.files:
            file.close()
