"""The ggml device that makes an unpatched llama.cpp bring us its expert matrices.

llama.cpp gives every context one backend of each ACCEL device, between the GPUs and the CPU. Ours reads the
CPU's memory and offers to compute ``MUL_MAT_ID`` on routed experts, so the scheduler sends us just those
nodes, wherever the loader has put the weights: mapped, repacked or pinned. It has no buffer type of its own,
and so no influence on how a model is loaded.

The registered device is inert. A context that is made inside ``Interposer.attach`` gets a backend with a
device structure of its own, bound to one executor; contexts of anybody else in the process get one that
declines every node.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from . import declarations as c
from .chains import op_number
from .devices import OUR_DEVICE
from .library import c_callback, ggml

# Source: the names of LLM_TENSOR_FFN_*_EXPS and *_CHEXPS in src/llama-arch.cpp
EXPERT_WEIGHT = re.compile(rb"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_(exps|chexps)\.weight")


class Computer(Protocol):
    """What computes the nodes that the scheduler gives to one session."""

    def claim(self, name: str, tensor: int) -> None:
        """The scheduler has asked for the expert matrix called ``name``; it is ``tensor``, by address."""

    def compute(self, graph: int) -> int:
        """Compute the split ``graph`` (a ``ggml_cgraph``). Returns: a ggml status. Must not raise."""


class _Bound:
    """A backend and the device it names, for one context. The callbacks live as long as this object."""

    def __init__(self, inert: c.ggml_backend_device, computer: Computer | None) -> None:
        self.device = c.ggml_backend_device(inert.iface, inert.reg, None)
        self.backend = c.ggml_backend()
        self._guid = (ctypes.c_uint8 * 16)(*b"ggufmoe expert()")
        self._claimed: dict[int, bool] = {}
        self._computer = computer
        self.freed = False
        self._matmul, self._glu = op_number("MUL_MAT_ID"), op_number("GLU")
        self._keep = [
            c_callback(c.supports_op_t, on_error=False)(self._supports_op if computer else _decline),
            c_callback(c.graph_compute_t, on_error=c.GGML_STATUS_FAILED)(
                lambda _backend, graph: computer.compute(graph) if computer else c.GGML_STATUS_FAILED
            ),
            c_callback(c.free_t, on_error=None)(self._free),
        ]
        self.device.iface.supports_op = self._keep[0]
        self.backend.guid = ctypes.addressof(self._guid)
        self.backend.iface.get_name = inert.iface.get_name
        self.backend.iface.graph_compute = self._keep[1]
        self.backend.iface.free = self._keep[2]
        self.backend.device = ctypes.addressof(self.device)

    def _free(self, _backend: int) -> None:
        self._computer = None
        self.freed = True  # not deleted here, while C still runs in one of our callbacks

    def _supports_op(self, _device: int, address: int) -> bool:
        node = c.ggml_tensor.from_address(address)
        if node.op == self._matmul:
            return self._is_expert(node.src[0])
        if node.op == self._glu:
            # only the activation between expert matrices; that of dense layers is not ours
            return self._is_from_expert(node.src[0]) and (
                not node.src[1] or self._is_from_expert(node.src[1])
            )
        return False

    def _is_expert(self, weight: int) -> bool:
        claimed = self._claimed.get(weight)
        if claimed is None:
            name = c.ggml_tensor.from_address(weight).name
            claimed = self._claimed[weight] = EXPERT_WEIGHT.fullmatch(name) is not None
            if claimed and self._computer is not None:
                self._computer.claim(name.decode(), weight)
        return claimed

    def _is_from_expert(self, address: int) -> bool:
        node = c.ggml_tensor.from_address(address)
        if node.view_src:
            node = c.ggml_tensor.from_address(node.view_src)
        return node.op == self._matmul and self._is_expert(node.src[0])


def _decline(_device: int, _op: int) -> bool:
    return False


class Interposer:
    """The registered device. There is one for the process: ``interposer()``."""

    def __init__(self) -> None:
        functions = ggml()
        self._lock = threading.Lock()
        self._computer: Computer | None = None
        self._bound: list[_Bound] = []
        self._name = ctypes.create_string_buffer(OUR_DEVICE.encode())
        name = ctypes.addressof(self._name)
        cpu = c.ggml_backend_device.from_address(
            functions.ggml_backend_dev_by_type(c.GGML_BACKEND_DEVICE_TYPE_CPU)
        )
        self.device, self.registry = c.ggml_backend_device(), c.ggml_backend_reg()
        iface = self.device.iface
        iface.get_name = c_callback(c.get_name_t, on_error=None)(lambda _device: name)
        iface.get_description = iface.get_name
        iface.get_memory = c_callback(c.get_memory_t, on_error=None)(_no_memory)
        iface.get_type = c_callback(c.get_type_t, on_error=c.GGML_BACKEND_DEVICE_TYPE_ACCEL)(
            lambda _device: c.GGML_BACKEND_DEVICE_TYPE_ACCEL
        )
        iface.get_props = c_callback(c.get_props_t, on_error=None)(self._properties)
        iface.init_backend = c_callback(c.init_backend_t, on_error=None)(self._init_backend)
        cpu_buffer_type = functions.ggml_backend_cpu_buffer_type()
        iface.get_buffer_type = c_callback(c.get_buffer_type_t, on_error=None)(
            lambda _device: cpu_buffer_type
        )
        iface.supports_op = c_callback(c.supports_op_t, on_error=False)(_decline)
        iface.supports_buft = cpu.iface.supports_buft  # a C function that does not look at its device
        self.device.reg = ctypes.addressof(self.registry)
        registry = self.registry
        registry.api_version = c.GGML_BACKEND_API_VERSION
        registry.iface.get_name = iface.get_name
        registry.iface.get_device_count = c_callback(c.get_device_count_t, on_error=0)(lambda _registry: 1)
        address = ctypes.addressof(self.device)
        registry.iface.get_device = c_callback(c.get_device_t, on_error=None)(
            lambda _registry, _index: address
        )
        registry.iface.get_proc_address = c_callback(c.get_proc_address_t, on_error=None)(
            lambda _registry, _name: None
        )
        functions.ggml_backend_register(ctypes.addressof(registry))

    @contextmanager
    def attach(self, computer: Computer) -> Iterator[None]:
        """Contexts that are made inside the block send their expert matrices to ``computer``."""
        with self._lock:
            self._computer = computer
            try:
                yield
            finally:
                self._computer = None

    def _init_backend(self, _device: int, _params: int | None) -> int:
        self._bound = [bound for bound in self._bound if not bound.freed]
        bound = _Bound(self.device, self._computer)
        self._bound.append(bound)
        return ctypes.addressof(bound.backend)

    def _properties(self, _device: int, properties: ctypes._Pointer[c.ggml_backend_dev_props]) -> None:
        target = properties.contents
        target.name = target.description = ctypes.addressof(self._name)
        target.memory_free = target.memory_total = 0
        target.type = c.GGML_BACKEND_DEVICE_TYPE_ACCEL
        target.device_id = None
        target.caps = c.ggml_backend_dev_caps()


def _no_memory(
    _device: int, free: ctypes._Pointer[ctypes.c_size_t], total: ctypes._Pointer[ctypes.c_size_t]
) -> None:
    free[0] = total[0] = ctypes.c_size_t(0)


@functools.cache
def interposer() -> Interposer:
    """Our device, registered with ggml at the first call."""
    return Interposer()
