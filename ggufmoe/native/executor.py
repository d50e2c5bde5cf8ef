"""Computes the expert part of every layer: resident pairs on the slot devices, cold ones on the CPU.

A *pair* is one (token, chosen expert). ``Executor.compute`` is called by llama.cpp's scheduler once per split,
so once per layer where the experts form one chain. It reads the router's choice from host memory, starts the
resident pairs on their devices, computes the cold ones on the CPU meanwhile, and writes all of them into
llama.cpp's own result tensor. Every pair is one row of one matrix product with one expert, so how pairs are
divided changes no bit of the result as long as the kernels are the same.

``dst`` may lie where ``x`` lies (the allocator reuses it as soon as gate and up have read it), so nothing is
written to ``dst`` before every part has read its input.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import NativeError
from . import declarations as c
from .batch import Batch, BatchPath, Chooser
from .chains import Chain, read_chains
from .devices import Backend
from .graphs import WholeNodes
from .interposer import EXPERT_WEIGHT
from .lanes import Lane
from .library import ggml
from .residents import COLD, DEVICE_SHIFT, SLOT_MASK, Residents, Traffic
from .work import Work, view

log = logging.getLogger(__name__)

_MAX_KEPT_SPLITS = 4096


class Foreseer(Protocol):
    """Names the experts of later layers early (``ggufmoe.run.prefetch``)."""

    def arrive(self, layer: int, x: NDArray[np.float32]) -> None:
        """The experts of a layer are about to be computed for one token with the input ``x``."""

    def chosen(self, layer: int, experts: list[int], is_resident: list[bool]) -> None:
        """What the layer's router has chosen, and which of it a slot answers."""


class Executor:
    """The ``Computer`` of one session.

    ``devices`` are the backends that hold slots; ``cpu`` computes what is cold. ``banks`` maps
    ``(layer, "exps" | "chexps")`` to its residents. ``error`` holds what went wrong in the last failed call.
    """

    def __init__(
        self,
        cpu: Backend,
        devices: Sequence[Backend],
        banks: Mapping[tuple[int, str], Residents],
        chooser: Chooser | None = None,
    ) -> None:
        """``chooser`` decides how batches are computed; without one, residents always compute their part."""
        self.banks = dict(banks)
        self.traffic = Traffic()
        self.decoding = False
        self.error: Exception | None = None
        self.foreseer: Foreseer | None = None
        self.tape: Callable[[int, int], list[int]] | None = None  # for benchmarks: (layer, k) -> experts
        # where llama.cpp has the bytes of the matrices that it asked us for
        self.weights: dict[str, int] = {}
        self._cpu = cpu
        self._cold = Lane(cpu)
        self._lanes = [Lane(device) for device in devices]
        self._whole = WholeNodes(cpu)
        self.batches = BatchPath(cpu, self._whole, self._cold, self._lanes, devices, chooser)
        self._staging: dict[tuple[str, int], Any] = {}  # host memory by use and device
        self._splits: dict[int, list[Work | int]] = {}
        self._compute_cpu = ggml().ggml_backend_graph_compute

    @property
    def device_bytes(self) -> list[int]:
        """What the executor itself takes on each slot device, without the slots."""
        sizes = [lane.graphs.n_bytes for lane in self._lanes]
        if sizes:
            sizes[0] += self.batches.staging_bytes
        return sizes

    def close(self) -> None:
        self.batches.close()
        for lane in (self._cold, *self._lanes):
            lane.close()
        self._splits.clear()

    def claim(self, name: str, tensor: int) -> None:
        self.weights[name] = c.ggml_tensor.from_address(tensor).data

    def compute(self, graph: int) -> int:
        """Compute one split of llama.cpp's graph. Returns: a ggml status; the reason is in ``error``."""
        try:
            uid = c.ggml_cgraph.from_address(graph).uid
            parts = self._splits.get(uid) or self._read(uid, graph)
            whole = graph if len(parts) == 1 else 0
            for part in parts:
                if isinstance(part, int):
                    status = self._whole.compute(part)
                elif part.n_tokens == 0:
                    continue  # the last layer, where no token of the batch needs logits
                elif part.n_tokens == 1:
                    status = self._run_token(part, whole)
                else:
                    status = self._run_batch(part, whole)
                if status != c.GGML_STATUS_SUCCESS:
                    raise NativeError(f"ggml could not compute the experts (status {status}).")
            return c.GGML_STATUS_SUCCESS
        except Exception as error:  # C must get a status; the session raises this when llama_decode returns
            log.debug("computing experts failed", exc_info=True)
            self.error = error
            return c.GGML_STATUS_FAILED

    def _read(self, uid: int, graph: int) -> list[Work | int]:
        """What a split amounts to. Splits keep their uid as long as llama.cpp reuses its graph."""
        header = c.ggml_cgraph.from_address(graph)
        nodes: list[Any] = list((ctypes.c_void_p * header.n_nodes).from_address(header.nodes))
        parts = [part if isinstance(part, int) else self._work(part) for part in read_chains(nodes)]
        if uid:
            if len(self._splits) >= _MAX_KEPT_SPLITS:
                self._splits.clear()
            self._splits[uid] = parts
        return parts

    def _work(self, chain: Chain) -> Work:
        names = [EXPERT_WEIGHT.fullmatch(c.ggml_tensor.from_address(w).name) for w in chain.weights]
        keys = {(int(name[1]), name[3].decode()) for name in names if name}
        key = keys.pop() if len(keys) == 1 and all(names) else (-1, "")
        projections = tuple(name[2].decode() for name in names if name)
        return Work(chain, self.banks.get(key), key[0], projections)

    # One token ----------------------------------------------------------------------------------------

    def _run_token(self, work: Work, graph: int) -> int:
        residents = work.residents
        if residents is None:
            return self._run_cold(work, graph)
        places = residents.places
        mover = residents.mover if work.counts else None
        if mover is not None and mover.done:
            mover.arrive()
        if self.tape is not None and self.decoding:
            work.token_ids[:] = self.tape(work.layer, work.k)
        chosen = work.token_ids[:]
        if min(chosen) < 0:
            raise NativeError(f"the router chose expert {min(chosen)}")
        resident: list[int] = []  # positions in the token's choice
        cold: list[int] = []
        for position, expert in enumerate(chosen):
            (cold if places[expert] < 0 else resident).append(position)
        if work.counts:
            self._count_token(residents, chosen, len(resident))
            if self.foreseer is not None and self.decoding:
                self._foresee(work, chosen)
        if not resident:
            if mover is not None:
                mover.route(list(dict.fromkeys(chosen)))
            return self._run_cold(work, graph)
        if len(set(chosen)) < work.k:  # GroveMoE's chexps: kernels may not expect an expert twice for a token
            return self._run_batch(work, graph, count=False)

        launches = []
        for device, positions in self._by_device(places, chosen, resident):
            launches.append((device, positions, self._launch_token(work, device, positions, chosen)))
        if mover is not None:
            mover.route(chosen)  # what it uploads goes on its way while the CPU computes
        status: int = c.GGML_STATUS_SUCCESS
        if cold:
            n_x = 1 if work.n_x == 1 else len(cold)
            built = self._cold.graphs.get(work.chain, work.chain.weights, work.n_in, n_x, len(cold), 1)
            built.x_tensor.data = self._x_rows(work, cold, COLD)
            ids = (ctypes.c_int32 * len(cold)).from_address(c.ggml_tensor.from_address(built.ids).data)
            ids[:] = [chosen[position] for position in cold]
            started = time.perf_counter()
            status = self._compute_cpu(self._cpu.address, built.graph)
            if mover is not None:
                mover.computed_cold(time.perf_counter() - started, len(cold))
        for device, _, _ in launches:
            self._lanes[device].synchronize()
        # every part has read x: now dst may be written
        row, dst = work.dst_row_bytes, work.dst
        if cold:
            for i, position in enumerate(cold):
                ctypes.memmove(dst + position * row, built.out_address + i * row, row)
        for _, positions, result in launches:
            for i, position in enumerate(positions):
                ctypes.memmove(dst + position * row, result + i * row, row)
        return status

    def _foresee(self, work: Work, chosen: list[int]) -> None:
        """Tell the foreseer of a decoded token. Only where gate, up and down come as one chain is x the layer's."""
        assert self.foreseer is not None and work.residents is not None
        if len(work.projections) > 1 and work.n_x == 1:
            places = work.residents.places
            self.foreseer.chosen(work.layer, chosen, [places[expert] >= 0 for expert in chosen])
            self.foreseer.arrive(work.layer, view(work.x, (work.n_in,), (4,), np.float32).copy())

    def _by_device(
        self, places: list[int], chosen: list[int], resident: list[int]
    ) -> list[tuple[int, list[int]]]:
        if len(self._lanes) == 1:
            return [(0, resident)]
        groups: dict[int, list[int]] = {}
        for position in resident:
            groups.setdefault(places[chosen[position]] >> DEVICE_SHIFT, []).append(position)
        return list(groups.items())

    def _x_rows(self, work: Work, positions: list[int], device: int) -> int:
        """The address of the rows of x for these positions: where they lie, if all experts share one row."""
        if work.n_x == 1:
            return work.x  # type: ignore[no-any-return]
        size = work.x_row_bytes
        rows = self._stage("x", device, size * len(positions))
        for i, position in enumerate(positions):
            ctypes.memmove(rows + i * size, work.x + position * work.x_strides[1], size)
        return rows

    def _stage(self, use: str, device: int, n_bytes: int) -> int:
        """The address of host memory that stays ours until the next step."""
        buffer = self._staging.get((use, device))
        if buffer is None or len(buffer) < n_bytes:
            buffer = self._staging[use, device] = (ctypes.c_uint8 * n_bytes)()
        return ctypes.addressof(buffer)

    def _launch_token(self, work: Work, device: int, positions: list[int], chosen: list[int]) -> int:
        """Start the resident pairs of one device. Returns: where their rows will be after a synchronize."""
        assert work.residents is not None
        places, lane = work.residents.places, self._lanes[device]
        n_x = 1 if work.n_x == 1 else len(positions)
        built = lane.graphs.get(work.chain, work.slot_weights[device], work.n_in, n_x, len(positions), 1)
        built.ids_host[:] = [places[chosen[position]] & SLOT_MASK for position in positions]
        lane.set(lane.address, built.x, self._x_rows(work, positions, device), 0, n_x * work.x_row_bytes)
        lane.set(lane.address, built.ids, built.ids_host_address, 0, 4 * len(positions))
        lane.launch(built.graph)
        size = len(positions) * work.dst_row_bytes
        result = self._stage("out", device, size)
        lane.get(lane.address, built.out, result, 0, size)
        return result

    def _run_cold(self, work: Work, graph: int) -> int:
        """All pairs on the CPU: llama.cpp's own nodes as they are."""
        return self._whole.compute(work.chain.out, graph)

    # Many tokens --------------------------------------------------------------------------------------

    def _run_batch(self, work: Work, graph: int, *, count: bool = True) -> int:
        residents = work.residents
        if residents is None:
            return self._run_cold(work, graph)
        shape = (work.n_tokens, work.k)
        ids = view(work.ids, shape, work.ids_strides, np.int32).ravel()
        if ids.min() < 0 or ids.max() >= residents.n_expert:
            raise NativeError(f"the router chose experts {ids.min()} to {ids.max()} of {residents.n_expert}")
        mover = residents.mover if work.counts else None
        if mover is not None and mover.done:
            mover.arrive()
        batch = Batch(work, residents, ids)
        if mover is not None:
            mover.route_batch(ids.reshape(shape))
        if count and work.counts:
            self._count_batch(residents, ids, batch.n_hits)
        return self.batches.run(batch, graph)

    # Routing ------------------------------------------------------------------------------------------

    def _count_token(self, residents: Residents, chosen: list[int], hits: int) -> None:
        if self.decoding:
            counts = residents.decode_counts
            for expert in chosen:
                counts[expert] += 1
            self.traffic.decode += len(chosen)
            self.traffic.decode_hits += hits
        else:
            self._count_batch(residents, np.asarray(chosen), hits)

    def _count_batch(self, residents: Residents, ids: NDArray[Any], hits: int) -> None:
        counts = np.bincount(ids, minlength=residents.n_expert)
        if self.decoding:
            residents.decode_counts = (np.asarray(residents.decode_counts) + counts).tolist()
            self.traffic.decode += ids.size
            self.traffic.decode_hits += hits
        else:
            residents.prefill_counts += counts
            self.traffic.prefill += ids.size
            self.traffic.prefill_hits += hits
