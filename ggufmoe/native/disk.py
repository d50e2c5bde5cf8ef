"""Computes the expert part of every layer where memory holds only some experts: the others come from the disk first.

An expert in memory lies where llama.cpp has mapped it (``paging``), so its ids stay as they are and llama.cpp's
own graph is computed, unchanged, as soon as all that it needs is there. Computing the pairs whose experts are
there while the others are read gained nothing where it was measured: reading takes the cores' time too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import NativeError
from . import declarations as c
from .devices import Backend
from .executor import Executor
from .residents import Residents
from .work import Work, gather, view

_MAX_PAIRS = 1024  # of one launch in a batch: bounds its working memory


class Shelf(Protocol):
    """The experts of one bank, in memory or in the file (``ggufmoe.run.disk``).

    ``present[expert]`` is 1 for those that are in memory or on their way, ``n_missed`` the routings of this step
    that had to be read for.
    """

    present: bytearray
    n_missed: int

    @property
    def most_at_once(self) -> int:
        """Experts that can be in memory together."""

    def fetch(self, experts: Sequence[int], running: Sequence[int]) -> None:
        """Start reading ``experts``, none of them present, in place of others, but of none of ``running``."""

    def settle(self) -> None:
        """Wait until all that is on its way is there. Raises: NativeError if it cannot be read."""

    def foresee(self, n_used: int) -> None:
        """A batch uses ``n_used`` of these experts: start reading what it will use of the next bank."""

    def touch(self, chosen: Sequence[int]) -> None:
        """The router chose these for one token."""

    def touch_batch(self, ids: NDArray[np.int32]) -> None:
        """The router's choice for several tokens, ``(n_tokens, k)``."""


class DiskExecutor(Executor):
    """The ``Computer`` of a session whose experts are read on demand; a hit is a routing that needed no reading."""

    def __init__(
        self,
        cpu: Backend,
        banks: Mapping[tuple[int, str], Residents],
        shelves: Mapping[tuple[int, str], Shelf],
    ) -> None:
        super().__init__(cpu, (), banks)
        self._shelves = {id(residents): shelves[key] for key, residents in banks.items() if key in shelves}

    def _shelf(self, work: Work, least: int, most: int) -> Shelf:
        residents = work.residents
        shelf = self._shelves.get(id(residents))
        if residents is None or shelf is None:
            raise NativeError("llama.cpp asked for experts that no memory was planned for.")
        if least < 0 or most >= residents.n_expert:
            raise NativeError(f"the router chose experts {least} to {most} of {residents.n_expert}")
        return shelf

    # One token ----------------------------------------------------------------------------------------

    def _run_token(self, work: Work, graph: int) -> int:
        if self.tape is not None and self.decoding:
            work.token_ids[:] = self.tape(work.layer, work.k)
        chosen = work.token_ids[:]
        shelf = self._shelf(work, min(chosen), max(chosen))
        present = shelf.present
        cold = [position for position, expert in enumerate(chosen) if not present[expert]]
        if cold:
            shelf.fetch(list(dict.fromkeys(chosen[position] for position in cold)), chosen)
            shelf.n_missed = max(shelf.n_missed, len(cold))
        if work.counts:
            assert work.residents is not None
            shelf.touch(chosen)
            self._count_token(work.residents, chosen, work.k - shelf.n_missed)
            shelf.n_missed = 0
        shelf.settle()
        return self._run_cold(work, graph)

    # Many tokens --------------------------------------------------------------------------------------

    def _run_batch(self, work: Work, graph: int, *, count: bool = True) -> int:
        shape = (work.n_tokens, work.k)
        ids = view(work.ids, shape, work.ids_strides, np.int32).ravel()
        shelf = self._shelf(work, ids.min(), ids.max())
        shelf.settle()
        is_there = np.frombuffer(bytes(shelf.present), np.uint8)
        shelf.n_missed = max(shelf.n_missed, ids.size - int(is_there[ids].sum()))
        if count and work.counts:
            assert work.residents is not None
            shelf.touch_batch(ids.reshape(shape))
            self._count_batch(work.residents, ids, ids.size - shelf.n_missed)
            shelf.n_missed = 0
        used: list[int] = np.unique(ids).tolist()
        if len(used) > shelf.most_at_once:
            return self._run_groups(work, shelf, ids, used)
        _need(shelf, used, used)
        shelf.settle()
        if work.counts:
            shelf.foresee(len(used))
        return self._run_cold(work, graph)

    def _run_groups(self, work: Work, shelf: Shelf, ids: NDArray[np.int32], used: list[int]) -> int:
        """More experts than memory holds: some at a time, reading the next ones meanwhile."""
        used = sorted(used, key=lambda expert: not shelf.present[expert])
        size = max(shelf.most_at_once // 2, 1)
        groups = [used[start : start + size] for start in range(0, len(used), size)]
        x = view(work.x, (work.n_tokens, work.n_x, work.n_in), work.x_strides, np.float32)
        results = np.empty((ids.size, work.n_out), np.float32)
        for number, group in enumerate(groups):
            _need(shelf, group, group)
            shelf.settle()
            if 2 * size <= shelf.most_at_once and number + 1 < len(groups):
                _need(shelf, groups[number + 1], group + groups[number + 1])
            pairs = np.flatnonzero(np.isin(ids, group))
            for start in range(0, pairs.size, _MAX_PAIRS):
                part = pairs[start : start + _MAX_PAIRS]
                built = self._cold.graphs.get(work.chain, work.chain.weights, work.n_in, 1, 1, part.size)
                rows = gather(x, part, work)
                built.x_tensor.data = rows.ctypes.data
                view(c.ggml_tensor.from_address(built.ids).data, (part.size,), (4,), np.int32)[:] = ids[part]
                status: int = self._compute_cpu(self._cpu.address, built.graph)
                if status != c.GGML_STATUS_SUCCESS:
                    shelf.settle()
                    return status
                results[part] = view(
                    built.out_address, (part.size, work.n_out), (work.dst_row_bytes, 4), np.float32
                )
                self._cold.graphs.release_transient()
        # only now: it may lie where x lies
        view(work.dst, results.shape, (work.dst_row_bytes, 4), np.float32)[:] = results
        return c.GGML_STATUS_SUCCESS


def _need(shelf: Shelf, experts: Sequence[int], running: Sequence[int]) -> None:
    missing = [expert for expert in experts if not shelf.present[expert]]
    if missing:
        shelf.fetch(missing, running)
