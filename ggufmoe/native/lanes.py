"""A lane: one stream of work on one device, that computes pairs with experts in that device's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import NativeError
from . import declarations as c
from .chains import Chain
from .devices import Backend, Device
from .graphs import GraphSet
from .library import ggml
from .slots import Slots, StackShape

# Pairs per launch on a slot device: bounds its arena.
MAX_PAIRS = 1024
# Of the staging slots of one lane. More experts at a time launch less often, and take more of the device.
STAGE_BYTES = 32 << 20


class Lane:
    """A backend and the graphs that were built for it."""

    def __init__(self, backend: Backend) -> None:
        functions = ggml()
        self.address, self.name = backend.address, backend.device.name
        self.graphs = GraphSet(backend)
        self.set, self.get = functions.ggml_backend_tensor_set_async, functions.ggml_backend_tensor_get_async
        self._launch = functions.ggml_backend_graph_compute_async
        self._synchronize = functions.ggml_backend_synchronize

    def launch(self, graph: int) -> None:
        """Start a graph. Raises: NativeError if the device refuses."""
        status = self._launch(self.address, graph)
        if status != c.GGML_STATUS_SUCCESS:
            raise NativeError(f"{self.name} could not compute (status {status}).")

    def start_pairs(
        self, chain: Chain, weights: tuple[int, ...], rows: NDArray[np.float32], slots: NDArray[np.integer]
    ) -> NDArray[np.float32]:
        """Start one pair per row of ``rows`` ``(n, n_in)``, with the expert in the slot of the same index.

        ``rows`` must live until ``synchronize``. Returns: the array ``(n, n_out)`` that holds the results then.
        """
        built = self.graphs.get(chain, weights, rows.shape[1], 1, 1, len(slots))
        built.ids_host[:] = slots.tolist()
        result = np.empty((len(slots), built.n_out), np.float32)
        self.set(self.address, built.x, rows.ctypes.data, 0, rows.nbytes)
        self.set(self.address, built.ids, built.ids_host_address, 0, 4 * len(slots))
        self.launch(built.graph)
        self.get(self.address, built.out, result.ctypes.data, 0, result.nbytes)
        return result

    def synchronize(self) -> None:
        """Wait for everything that was started."""
        self._synchronize(self.address)

    def close(self) -> None:
        self.graphs.close()


class StagingLane(Lane):
    """A lane of its own on a slot device, with slots that cold experts of one shape pass through."""

    def __init__(self, device: Device, shapes: Mapping[str, StackShape]) -> None:
        self._backend = Backend(device, n_threads=1)
        super().__init__(self._backend)
        expert_bytes = sum(shape.expert_bytes for shape in shapes.values())
        self.slots = Slots(self._backend, shapes, max(1, STAGE_BYTES // expert_bytes))

    def load(self, experts: Sequence[int], sources: Callable[[int], Mapping[str, int]]) -> None:
        """Copy a group of experts into the first slots, once what was computed here before is done."""
        self.synchronize()
        self.graphs.release_transient()
        for slot, expert in enumerate(experts):
            self.slots.upload(slot, sources(expert))

    @property
    def n_bytes(self) -> int:
        return self.slots.n_bytes + self.graphs.n_bytes

    def close(self) -> None:
        super().close()
        self.slots.close()
        self._backend.close()
