"""Many tokens at once: nearly every expert of a layer is used, and there are several ways to compute them.

- ``cpu``: the whole layer as llama.cpp would compute it; no row is moved.
- ``split``: resident pairs on their devices, cold ones on the CPU at the same time.
- ``stream``: cold experts pass through staging slots of the device, so nothing is left to the CPU. Two lanes take
  turns: while one computes, the next group is copied into the other.

Which one is fastest depends on the machine and the model, so it is measured while the work is done: layers of
one shape and batches of one size are alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import NativeError
from . import declarations as c
from .devices import Backend
from .graphs import WholeNodes
from .lanes import MAX_PAIRS, Lane, StagingLane
from .library import ggml
from .residents import DEVICE_SHIFT, SLOT_MASK, Residents
from .work import Work, gather, view

log = logging.getLogger(__name__)

Pairs = NDArray[np.intp]
Rows = NDArray[np.float32]
WAYS = ("cpu", "split", "stream")


class Chooser(Protocol):
    """Decides by what was measured (``ggufmoe.moe.ways``)."""

    def choose(self, key: Hashable, ways: Sequence[tuple[str, float]]) -> str:
        """``ways`` are (name, seconds per token that it will take at least)."""

    def observe(self, key: Hashable, way: str, seconds: float) -> None:
        """It took so long, per token."""


class Batch:
    """The pairs of one step of a layer; ``places`` is where the expert of each pair is."""

    def __init__(self, work: Work, residents: Residents, ids: NDArray[np.int32]) -> None:
        self.work, self.residents, self.ids = work, residents, ids
        self.places = residents.place_array[ids]
        self.cold: Pairs = np.flatnonzero(self.places < 0)
        self.x: Rows = view(work.x, (work.n_tokens, work.n_x, work.n_in), work.x_strides, np.float32)

    @property
    def n_hits(self) -> int:
        return int(self.ids.size - self.cold.size)

    def rows(self, pairs: Pairs) -> Rows:
        return gather(self.x, pairs, self.work)


class BatchPath:
    """Computes batches, in the way that is fastest here.

    ``way`` fixes one of ``WAYS``; None measures. ``stream`` needs ``sources`` on the residents.
    """

    def __init__(
        self,
        cpu: Backend,
        whole: WholeNodes,
        cold: Lane,
        lanes: Sequence[Lane],
        devices: Sequence[Backend],
        chooser: Chooser | None,
    ) -> None:
        self.way: str | None = None if chooser else "split"
        self._chooser = chooser
        self._cpu, self._cold, self._lanes, self._devices = cpu, cold, lanes, devices
        self._whole = whole
        self._compute_cpu = ggml().ggml_backend_graph_compute
        self._staging: dict[object, tuple[StagingLane, StagingLane] | None] = {}

    @property
    def staging_bytes(self) -> int:
        """What staging takes on the first slot device."""
        return sum(lane.n_bytes for lanes in self._staging.values() if lanes for lane in lanes)

    def run(self, batch: Batch, graph: int) -> int:
        """Compute a batch; ``graph`` is llama.cpp's own split if it holds nothing else. Returns: a ggml status."""
        work, residents = batch.work, batch.residents
        ways = self._ways(batch)
        if len(ways) == 1:
            return self._compute(ways[0][0], batch, graph)
        key = (work.chain.steps, residents.shape_key, work.n_tokens.bit_length())
        assert self._chooser is not None
        way = self._chooser.choose(key, ways)
        started = time.perf_counter()
        status = self._compute(way, batch, graph)
        self._chooser.observe(key, way, (time.perf_counter() - started) / work.n_tokens)
        return status

    def _ways(self, batch: Batch) -> list[tuple[str, float]]:
        """The ways that can be taken, with the seconds per token that are known to be needed at least."""
        residents = batch.residents
        if not residents.slots or batch.work.n_tokens == 1:
            return [("split", 0.0)]
        can_stream = residents.sources is not None and batch.cold.size > 0
        if self.way == "stream" and not can_stream:
            return [("split", 0.0)]
        if self.way is not None:
            return [(self.way, 0.0)]
        ways = [("cpu", 0.0)]
        if batch.n_hits:
            ways.append(("split", 0.0))
        if can_stream and residents.upload_s:
            n_cold = len(np.unique(batch.ids[batch.cold]))
            ways.append(("stream", n_cold * residents.upload_s / batch.work.n_tokens))
        return ways

    def _compute(self, way: str, batch: Batch, graph: int) -> int:
        if way == "cpu" or (way == "split" and not batch.n_hits):
            return self._whole.compute(batch.work.chain.out, graph)
        # dst may lie where x lies: every part has read its input before the first result is written
        results, kept = self._start_residents(batch)
        staging = self._staging_for(batch) if way == "stream" else None
        if staging:
            results += self._stream(batch, staging, kept)
        elif batch.cold.size:
            results.append((batch.cold, self._compute_cold(batch, kept)))
        for lane in (*self._lanes, *(staging or ())):
            lane.synchronize()
        work = batch.work
        dst = view(work.dst, (batch.ids.size, work.n_out), (work.dst_row_bytes, 4), np.float32)
        for pairs, rows in results:
            dst[pairs] = rows
        for lane in (self._cold, *self._lanes, *(staging or ())):
            lane.graphs.release_transient()
        return c.GGML_STATUS_SUCCESS

    def _start_residents(self, batch: Batch) -> tuple[list[tuple[Pairs, Rows]], list[Rows]]:
        """Start the resident pairs. Returns: where their results will be, and the inputs to keep until then."""
        results: list[tuple[Pairs, Rows]] = []
        kept: list[Rows] = []
        places = batch.places
        for device, lane in enumerate(self._lanes):
            pairs = np.flatnonzero((places >= 0) & (places >> DEVICE_SHIFT == device))
            for start in range(0, pairs.size, MAX_PAIRS):
                part = pairs[start : start + MAX_PAIRS]
                kept.append(batch.rows(part))
                weights = batch.work.slot_weights[device]
                rows = lane.start_pairs(batch.work.chain, weights, kept[-1], places[part] & SLOT_MASK)
                results.append((part, rows))
        return results, kept

    def _compute_cold(self, batch: Batch, kept: list[Rows]) -> Rows:
        """All cold pairs on the CPU at once, so that each expert is read once."""
        work, cold = batch.work, batch.cold
        built = self._cold.graphs.get(work.chain, work.chain.weights, work.n_in, 1, 1, cold.size)
        kept.append(batch.rows(cold))
        built.x_tensor.data = kept[-1].ctypes.data
        view(c.ggml_tensor.from_address(built.ids).data, (cold.size,), (4,), np.int32)[:] = batch.ids[cold]
        status = self._compute_cpu(self._cpu.address, built.graph)
        if status != c.GGML_STATUS_SUCCESS:
            raise NativeError(f"The CPU could not compute the experts (status {status}).")
        return view(built.out_address, (cold.size, work.n_out), (work.dst_row_bytes, 4), np.float32)

    def _stream(
        self, batch: Batch, staging: tuple[StagingLane, StagingLane], kept: list[Rows]
    ) -> list[tuple[Pairs, Rows]]:
        """Pass all cold experts of a batch through staging, a group at a time."""
        sources = batch.residents.sources
        assert sources is not None
        results: list[tuple[Pairs, Rows]] = []
        experts = np.unique(batch.ids[batch.cold])
        slot_of = np.zeros(batch.residents.n_expert, np.int32)
        size = staging[0].slots.n_slots
        for turn, start in enumerate(range(0, len(experts), size)):
            lane, group = staging[turn % 2], experts[start : start + size]
            lane.load([int(expert) for expert in group], sources)
            weights = tuple(lane.slots.tensors[name] for name in batch.work.projections)
            slot_of[group] = np.arange(len(group))
            pairs = batch.cold[np.isin(batch.ids[batch.cold], group)]
            for first in range(0, pairs.size, MAX_PAIRS):
                part = pairs[first : first + MAX_PAIRS]
                kept.append(batch.rows(part))
                rows = lane.start_pairs(batch.work.chain, weights, kept[-1], slot_of[batch.ids[part]])
                results.append((part, rows))
        return results

    def _staging_for(self, batch: Batch) -> tuple[StagingLane, StagingLane] | None:
        """The two lanes for experts of this shape, made when first needed; None if the device has no room."""
        residents = batch.residents
        key = residents.shape_key
        if key not in self._staging:
            device, shapes = self._devices[0].device, residents.shapes
            try:
                self._staging[key] = (StagingLane(device, shapes), StagingLane(device, shapes))
            except NativeError as error:
                log.info("no staging slots on %s: %s", device.name, error)
                self._staging[key] = None
        return self._staging[key]

    def close(self) -> None:
        for lanes in self._staging.values():
            for lane in lanes or ():
                lane.close()
        self._staging.clear()
