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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import NativeError
from . import declarations as c
from .chains import Chain, read_chains
from .devices import Backend
from .graphs import GraphSet, WholeNodes
from .interposer import EXPERT_WEIGHT
from .library import ggml
from .slots import Slots

log = logging.getLogger(__name__)

COLD = -1
_DEVICE_SHIFT = 20  # a place is device << 20 | slot
_SLOT_MASK = (1 << _DEVICE_SHIFT) - 1
_MAX_KEPT_SPLITS = 4096
# Pairs per launch on a slot device: bounds its arena. The CPU takes all at once, to read each expert once.
_MAX_PAIRS = 1024


def place_of(device: int, slot: int) -> int:
    """A slot of a device as one number."""
    return device << _DEVICE_SHIFT | slot


class Mover(Protocol):
    """Moves the experts of one bank between steps (``ggufmoe.run.residency``)."""

    done: deque[tuple[int, int, bool]]

    def arrive(self) -> None:
        """Let steps see what was uploaded since the last turn."""

    def route(self, chosen: Sequence[int]) -> None:
        """The router chose these distinct experts for one token; what is under way may still read them."""

    def route_batch(self, ids: NDArray[np.int32]) -> None:
        """The router's choice for several tokens, ``(n_tokens, k)``."""

    def computed_cold(self, seconds: float, n_pairs: int) -> None:
        """The CPU took this long for ``n_pairs`` cold pairs of one token."""


@dataclass
class Residents:
    """Where the experts of one bank are, and how often each was chosen.

    ``places[expert]`` is ``COLD`` or the place of its slot; ``place_array`` is the same for whole batches.
    ``counts`` are routings by expert of the current phase (see ``Executor.decoding``).
    """

    n_expert: int
    slots: dict[int, Slots] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    decode_counts: list[int] = field(default_factory=list)
    prefill_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    mover: Mover | None = None

    def __post_init__(self) -> None:
        self.places = [COLD] * self.n_expert
        self.place_array = np.full(self.n_expert, COLD, np.int32)
        self.decode_counts = [0] * self.n_expert
        self.prefill_counts = np.zeros(self.n_expert, np.int64)

    def put(self, expert: int, device: int, slot: int, sources: Mapping[str, int]) -> None:
        """Make ``expert`` resident: upload it, and only then let steps see it there."""
        place = place_of(device, slot)
        self.fill(place, sources)
        self.show(expert, place)

    def fill(self, place: int, sources: Mapping[str, int]) -> None:
        """Copy an expert to a place that no step can read now."""
        self.slots[place >> _DEVICE_SHIFT].upload(place & _SLOT_MASK, sources)

    def show(self, expert: int, place: int) -> None:
        """From the next step on, ``expert`` is resident at ``place``."""
        self.places[expert] = self.place_array[expert] = place

    def hide(self, expert: int) -> int:
        """From the next step on, ``expert`` is cold. Returns: the place that it leaves."""
        place = self.places[expert]
        self.places[expert] = self.place_array[expert] = COLD
        return place


@dataclass
class Traffic:
    """Routings answered from a slot, and all routings, in prefill and decode."""

    prefill_hits: int = 0
    prefill: int = 0
    decode_hits: int = 0
    decode: int = 0


class _Work:
    """One chain of one split, with all that stays the same from step to step."""

    def __init__(self, chain: Chain, residents: Residents | None, projections: tuple[str, ...]) -> None:
        self.chain, self.residents, self.projections = chain, residents, projections
        x, ids, out = (c.ggml_tensor.from_address(a) for a in (chain.x, chain.ids, chain.out))
        self.n_in, self.n_x, self.n_tokens = x.ne[0], x.ne[1], ids.ne[1]
        self.k, self.n_out = ids.ne[0], out.ne[0]
        self.x, self.x_strides, self.x_row_bytes = x.data, (x.nb[2], x.nb[1], x.nb[0]), x.ne[0] * 4
        self.ids, self.ids_strides = ids.data, (ids.nb[1], ids.nb[0])
        self.token_ids = (ctypes.c_int32 * self.k).from_address(ids.data)
        self.dst, self.dst_row_bytes = out.data, out.ne[0] * 4
        # each expert is counted once, by its last matrix
        self.counts = residents is not None and "down" in projections
        self.slot_weights: dict[int, tuple[int, ...]] = {}
        if residents is not None:
            for device, slots in residents.slots.items():
                self.slot_weights[device] = tuple(slots.tensors[p] for p in projections)


class Executor:
    """The ``Computer`` of one session.

    ``devices`` are the backends that hold slots; ``cpu`` computes what is cold. ``banks`` maps
    ``(layer, "exps" | "chexps")`` to its residents. ``error`` holds what went wrong in the last failed call.
    """

    def __init__(
        self, cpu: Backend, devices: Sequence[Backend], banks: Mapping[tuple[int, str], Residents]
    ) -> None:
        self.banks = dict(banks)
        self.traffic = Traffic()
        self.decoding = False
        self.error: Exception | None = None
        self.weights: dict[
            str, int
        ] = {}  # where llama.cpp has the bytes of every expert matrix it asked us for
        self._cpu = cpu
        self._devices = list(devices)
        self._cold_graphs = GraphSet(cpu)
        self._slot_graphs = [GraphSet(device) for device in devices]
        self._whole = WholeNodes(cpu)
        self._staging: dict[tuple[str, int], Any] = {}  # host memory by use and device
        self._splits: dict[int, list[_Work | int]] = {}
        functions = ggml()
        self._compute_cpu = functions.ggml_backend_graph_compute
        self._set, self._get = (
            functions.ggml_backend_tensor_set_async,
            functions.ggml_backend_tensor_get_async,
        )
        self._launch, self._sync = (
            functions.ggml_backend_graph_compute_async,
            functions.ggml_backend_synchronize,
        )

    @property
    def device_bytes(self) -> list[int]:
        """What the executor itself takes on each slot device, without the slots."""
        return [graphs.n_bytes for graphs in self._slot_graphs]

    def close(self) -> None:
        for graphs in (self._cold_graphs, *self._slot_graphs):
            graphs.close()
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

    def _read(self, uid: int, graph: int) -> list[_Work | int]:
        """What a split amounts to. Splits keep their uid as long as llama.cpp reuses its graph."""
        header = c.ggml_cgraph.from_address(graph)
        nodes: list[Any] = list((ctypes.c_void_p * header.n_nodes).from_address(header.nodes))
        parts = [part if isinstance(part, int) else self._work(part) for part in read_chains(nodes)]
        if uid:
            if len(self._splits) >= _MAX_KEPT_SPLITS:
                self._splits.clear()
            self._splits[uid] = parts
        return parts

    def _work(self, chain: Chain) -> _Work:
        names = [EXPERT_WEIGHT.fullmatch(c.ggml_tensor.from_address(w).name) for w in chain.weights]
        keys = {(int(name[1]), name[3].decode()) for name in names if name}
        residents = self.banks.get(keys.pop()) if len(keys) == 1 and all(names) else None
        return _Work(chain, residents, tuple(name[2].decode() for name in names if name))

    # One token ----------------------------------------------------------------------------------------

    def _run_token(self, work: _Work, graph: int) -> int:
        residents = work.residents
        if residents is None:
            return self._run_cold(work, graph)
        places = residents.places
        mover = residents.mover if work.counts else None
        if mover is not None and mover.done:
            mover.arrive()
        chosen = work.token_ids[:]
        if min(chosen) < 0:
            raise NativeError(f"the router chose expert {min(chosen)}")
        resident: list[int] = []  # positions in the token's choice
        cold: list[int] = []
        for position, expert in enumerate(chosen):
            (cold if places[expert] < 0 else resident).append(position)
        if work.counts:
            self._count_token(residents, chosen, len(resident))
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
            built = self._cold_graphs.get(work.chain, work.chain.weights, work.n_in, n_x, len(cold), 1)
            built.x_tensor.data = self._x_rows(work, cold, COLD)
            ids = (ctypes.c_int32 * len(cold)).from_address(c.ggml_tensor.from_address(built.ids).data)
            ids[:] = [chosen[position] for position in cold]
            started = time.perf_counter()
            status = self._compute_cpu(self._cpu.address, built.graph)
            if mover is not None:
                mover.computed_cold(time.perf_counter() - started, len(cold))
        for device, _, _ in launches:
            self._sync(self._devices[device].address)
        # every part has read x: now dst may be written
        row, dst = work.dst_row_bytes, work.dst
        if cold:
            for i, position in enumerate(cold):
                ctypes.memmove(dst + position * row, built.out_address + i * row, row)
        for _, positions, result in launches:
            for i, position in enumerate(positions):
                ctypes.memmove(dst + position * row, result + i * row, row)
        return status

    def _by_device(
        self, places: list[int], chosen: list[int], resident: list[int]
    ) -> list[tuple[int, list[int]]]:
        if len(self._devices) == 1:
            return [(0, resident)]
        groups: dict[int, list[int]] = {}
        for position in resident:
            groups.setdefault(places[chosen[position]] >> _DEVICE_SHIFT, []).append(position)
        return list(groups.items())

    def _x_rows(self, work: _Work, positions: list[int], device: int) -> int:
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

    def _launch_token(self, work: _Work, device: int, positions: list[int], chosen: list[int]) -> int:
        """Start the resident pairs of one device. Returns: where their rows will be after a synchronize."""
        assert work.residents is not None
        places = work.residents.places
        backend = self._devices[device].address
        n_x = 1 if work.n_x == 1 else len(positions)
        built = self._slot_graphs[device].get(
            work.chain, work.slot_weights[device], work.n_in, n_x, len(positions), 1
        )
        built.ids_host[:] = [places[chosen[position]] & _SLOT_MASK for position in positions]
        self._set(backend, built.x, self._x_rows(work, positions, device), 0, n_x * work.x_row_bytes)
        self._set(backend, built.ids, built.ids_host_address, 0, 4 * len(positions))
        status = self._launch(backend, built.graph)
        if status != c.GGML_STATUS_SUCCESS:
            raise NativeError(f"{self._devices[device].device.name} could not compute (status {status}).")
        size = len(positions) * work.dst_row_bytes
        result = self._stage("out", device, size)
        self._get(backend, built.out, result, 0, size)
        return result

    def _run_cold(self, work: _Work, graph: int) -> int:
        """All pairs on the CPU: llama.cpp's own nodes as they are."""
        if graph:
            return self._compute_cpu(self._cpu.address, graph)  # type: ignore[no-any-return]
        return self._whole.compute(work.chain.out)

    # Many tokens --------------------------------------------------------------------------------------

    def _run_batch(self, work: _Work, graph: int, *, count: bool = True) -> int:
        residents = work.residents
        if residents is None:
            return self._run_cold(work, graph)
        shape = (work.n_tokens, work.k)
        ids = _view(work.ids, shape, work.ids_strides, np.int32).ravel()
        if ids.min() < 0 or ids.max() >= residents.n_expert:
            raise NativeError(f"the router chose experts {ids.min()} to {ids.max()} of {residents.n_expert}")
        mover = residents.mover if work.counts else None
        if mover is not None and mover.done:
            mover.arrive()
        places = residents.place_array[ids]
        if mover is not None:
            mover.route_batch(ids.reshape(shape))
        cold = np.flatnonzero(places < 0)
        if count and work.counts:
            self._count_batch(residents, ids, ids.size - cold.size)
        if cold.size == ids.size:
            return self._run_cold(work, graph)

        x = _view(work.x, (work.n_tokens, work.n_x, work.n_in), work.x_strides, np.float32)
        results: list[tuple[NDArray[np.intp], NDArray[np.float32]]] = []
        sent: list[NDArray[np.float32]] = []  # inputs on their way to a device
        used: set[int] = set()
        for device in range(len(self._devices)):
            pairs = np.flatnonzero((places >= 0) & (places >> _DEVICE_SHIFT == device))
            for start in range(0, pairs.size, _MAX_PAIRS):
                part = pairs[start : start + _MAX_PAIRS]
                slots = places[part] & _SLOT_MASK
                sent.append(_gather(x, part, work))
                results.append((part, self._launch_batch(work, device, sent[-1], slots)))
                used.add(device)
        status = c.GGML_STATUS_SUCCESS
        if cold.size:
            built = self._cold_graphs.get(work.chain, work.chain.weights, work.n_in, 1, 1, cold.size)
            rows = _gather(x, cold, work)
            built.x_tensor.data = rows.ctypes.data
            _view(c.ggml_tensor.from_address(built.ids).data, (cold.size,), (4,), np.int32)[:] = ids[cold]
            status = self._compute_cpu(self._cpu.address, built.graph)
            out = _view(built.out_address, (cold.size, work.n_out), (work.dst_row_bytes, 4), np.float32)
            results.append((cold, out))
        for device in used:
            self._sync(self._devices[device].address)
        dst = _view(work.dst, (ids.size, work.n_out), (work.dst_row_bytes, 4), np.float32)
        for part, result in results:
            dst[part] = result
        for graphs in (self._cold_graphs, *self._slot_graphs):
            graphs.release_transient()
        return status

    def _launch_batch(
        self, work: _Work, device: int, rows: NDArray[np.float32], slots: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Start some pairs on one device. Returns: the array that holds their rows after a synchronize."""
        backend = self._devices[device].address
        built = self._slot_graphs[device].get(
            work.chain, work.slot_weights[device], work.n_in, 1, 1, slots.size
        )
        built.ids_host[:] = slots.tolist()
        result = np.empty((slots.size, work.n_out), np.float32)
        self._set(backend, built.x, rows.ctypes.data, 0, rows.nbytes)
        self._set(backend, built.ids, built.ids_host_address, 0, 4 * slots.size)
        status = self._launch(backend, built.graph)
        if status != c.GGML_STATUS_SUCCESS:
            raise NativeError(f"{self._devices[device].device.name} could not compute (status {status}).")
        self._get(backend, built.out, result.ctypes.data, 0, result.nbytes)
        return result

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


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Memory of ggml's as an array, without a copy. ``strides`` are in bytes."""
    n_bytes = (
        sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    )
    memory = (ctypes.c_uint8 * n_bytes).from_address(address)
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, 0, strides)
    return array


def _gather(x: NDArray[np.float32], pairs: NDArray[np.intp], work: _Work) -> NDArray[np.float32]:
    """The input row of each pair, as a contiguous array."""
    tokens = pairs // work.k
    rows: NDArray[np.float32] = x[tokens, 0] if work.n_x == 1 else x[tokens, pairs % work.k]
    return rows
