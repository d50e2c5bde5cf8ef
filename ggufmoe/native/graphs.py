"""ggml graphs of our own: a chain of steps for some of the pairs, on one backend, built once per shape."""

from __future__ import annotations

import ctypes
from typing import Any

from . import declarations as c
from .chains import INPUT, Chain, Glu, MatMul
from .devices import Backend, Buffer
from .library import ggml

# Up to this many pairs a graph is kept for the next call; prefill shapes hardly ever repeat.
KEPT_PAIRS = 64
GRAPH_NODES = 16


class ChainGraph:
    """One built graph. ``x``, ``ids`` and ``out`` are tensors in the arena; ``n_ids`` x ``n_tokens`` pairs."""

    __slots__ = (
        "context",
        "graph",
        "ids",
        "ids_host",
        "ids_host_address",
        "n_out",
        "out",
        "out_address",
        "x",
        "x_tensor",
    )

    def __init__(self, context: int, graph: int, x: int, ids: int, out: int, n_pairs: int) -> None:
        self.context, self.graph, self.x, self.ids, self.out = context, graph, x, ids, out
        self.x_tensor = c.ggml_tensor.from_address(x)
        result = c.ggml_tensor.from_address(out)
        self.out_address: int = result.data
        self.n_out: int = result.ne[0]
        self.ids_host = (ctypes.c_int32 * n_pairs)()
        self.ids_host_address = ctypes.addressof(self.ids_host)

    def close(self) -> None:
        ggml().ggml_free(self.context)


class GraphSet:
    """All graphs of one backend. They share one arena for inputs, ids and results, since they never overlap.

    ``n_bytes`` is what the arena takes on the device.
    """

    def __init__(self, backend: Backend) -> None:
        functions = ggml()
        self.backend = backend
        self._arena: Buffer | None = None
        self._alignment: int = functions.ggml_backend_buft_get_alignment(backend.buffer_type)
        self._kept: dict[Any, ChainGraph] = {}
        self._transient: list[ChainGraph] = []

    @property
    def n_bytes(self) -> int:
        return self._arena.n_bytes if self._arena else 0

    def get(
        self, chain: Chain, weights: tuple[int, ...], n_in: int, n_x: int, n_ids: int, n_tokens: int
    ) -> ChainGraph:
        """The graph of ``chain`` with these weight tensors for ``n_ids`` experts of each of ``n_tokens`` tokens.

        A graph of more than ``KEPT_PAIRS`` pairs is only valid until ``release_transient``.
        """
        if n_ids * n_tokens > KEPT_PAIRS:
            graph = self._build(chain, weights, n_in, n_x, n_ids, n_tokens)
            self._transient.append(graph)
            return graph
        key = (weights, chain.steps, n_x, n_ids, n_tokens)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._build(chain, weights, n_in, n_x, n_ids, n_tokens)
        return found

    def release_transient(self) -> None:
        for graph in self._transient:
            graph.close()
        self._transient.clear()

    def close(self) -> None:
        self._forget()
        if self._arena:
            self._arena.close()
            self._arena = None

    def _forget(self) -> None:
        self.release_transient()
        for graph in self._kept.values():
            graph.close()
        self._kept.clear()

    def _build(
        self, chain: Chain, weights: tuple[int, ...], n_in: int, n_x: int, n_ids: int, n_tokens: int
    ) -> ChainGraph:
        functions = ggml()
        n_tensors = 2 + len(chain.steps)
        size = n_tensors * functions.ggml_tensor_overhead()
        size += functions.ggml_graph_overhead_custom(GRAPH_NODES, False) + 1024
        context = functions.ggml_init(c.ggml_init_params(size, None, True))
        x = functions.ggml_new_tensor_3d(context, c.GGML_TYPE_F32, n_in, n_x, n_tokens)
        ids = functions.ggml_new_tensor_3d(context, c.GGML_TYPE_I32, n_ids, n_tokens, 1)
        outputs: list[int] = []
        remaining = iter(weights)
        for step in chain.steps:
            outputs.append(_add_step(context, step, outputs, x, ids, remaining))
        graph = functions.ggml_new_graph_custom(context, GRAPH_NODES, False)
        functions.ggml_build_forward_expand(graph, outputs[-1])
        self._place((x, ids, *outputs))
        return ChainGraph(context, graph, x, ids, outputs[-1], n_ids * n_tokens)

    def _place(self, tensors: tuple[int, ...]) -> None:
        """Give every tensor its place in the arena, which grows when a graph needs more than any before."""
        functions = ggml()
        offsets, end = {}, 0
        for address in tensors:
            if not c.ggml_tensor.from_address(address).view_src:
                offsets[address] = end
                size = functions.ggml_backend_buft_get_alloc_size(self.backend.buffer_type, address)
                end += -(-size // self._alignment) * self._alignment
        if self._arena is None or self._arena.n_bytes < end:
            self._forget()  # they point into the old arena
            if self._arena:
                self._arena.close()
                self._arena = None
            self._arena = Buffer(self.backend, end)
        for address in tensors:
            if address in offsets:
                place = self._arena.base + offsets[address]
                functions.ggml_backend_tensor_alloc(self._arena.address, address, place)
            else:
                functions.ggml_backend_view_init(address)


def _add_step(context: int, step: Any, outputs: list[int], x: int, ids: int, weights: Any) -> int:
    """One step as a node of our graph, with the parameters of llama.cpp's own node."""
    functions = ggml()
    tensor: int
    if isinstance(step, MatMul):
        source = x if step.source == INPUT else outputs[step.source]
        tensor = functions.ggml_mul_mat_id(context, next(weights), source, ids)
    elif isinstance(step, Glu):
        kind = int.from_bytes(step.params[:4], "little")
        if step.up is None:
            swapped = any(step.params[4:8])
            tensor = functions.ggml_glu(context, outputs[step.gate], kind, swapped)
        else:
            tensor = functions.ggml_glu_split(context, outputs[step.gate], outputs[step.up], kind)
    else:
        base = c.ggml_tensor.from_address(outputs[step.source])
        return int(
            functions.ggml_view_3d(
                context, outputs[step.source], step.n, *base.ne[1:3], *base.nb[1:3], step.offset
            )
        )
    node = c.ggml_tensor.from_address(tensor)
    ctypes.memmove(node.op_params, step.params, c.GGML_MAX_OP_PARAMS)
    return tensor


class WholeNodes:
    """llama.cpp's own nodes, computed as they are by the CPU backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def compute(self, address: int, split: int = 0) -> int:
        """Compute one node, or the whole ``split`` that it ends, if that is given. Returns: a ggml status."""
        functions = ggml()
        if split:
            return functions.ggml_backend_graph_compute(self._backend.address, split)  # type: ignore[no-any-return]
        size = functions.ggml_graph_overhead_custom(GRAPH_NODES, False) + 1024
        context = functions.ggml_init(c.ggml_init_params(size, None, True))
        try:
            graph = functions.ggml_new_graph_custom(context, GRAPH_NODES, False)
            functions.ggml_graph_add_node(graph, address)
            return functions.ggml_backend_graph_compute(self._backend.address, graph)  # type: ignore[no-any-return]
        finally:
            functions.ggml_free(context)
