"""Slots: room for some experts of a bank in a device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import NativeError
from . import declarations as c
from .devices import Backend, Buffer
from .library import ggml


@dataclass(frozen=True, slots=True)
class StackShape:
    """One stacked expert matrix: its ggml type number, ``ne[0]``, ``ne[1]``, and the bytes of one expert."""

    type_number: int
    n_in: int
    n_out: int
    expert_bytes: int


class Slots:
    """``n_slots`` experts of one bank on one backend; ``tensors`` are its matrices by projection, by address."""

    def __init__(self, backend: Backend, shapes: Mapping[str, StackShape], n_slots: int) -> None:
        functions = ggml()
        self.backend, self.n_slots = backend, n_slots
        self._shapes = dict(shapes)
        size = (len(shapes) + 1) * functions.ggml_tensor_overhead()
        self._context = functions.ggml_init(c.ggml_init_params(size, None, True))
        self.tensors: dict[str, int] = {
            projection: functions.ggml_new_tensor_3d(
                self._context, shape.type_number, shape.n_in, shape.n_out, n_slots
            )
            for projection, shape in shapes.items()
        }
        alignment = functions.ggml_backend_buft_get_alignment(backend.buffer_type)
        offsets, end = [], 0
        for tensor in self.tensors.values():
            offsets.append(end)
            # more than the weights where a device's kernels read past the last row
            room = functions.ggml_backend_buft_get_alloc_size(backend.buffer_type, tensor)
            end += -(-room // alignment) * alignment
        self._buffer = Buffer(backend, end)
        for offset, tensor in zip(offsets, self.tensors.values(), strict=True):
            functions.ggml_backend_tensor_alloc(self._buffer.address, tensor, self._buffer.base + offset)

    @property
    def n_bytes(self) -> int:
        return self._buffer.n_bytes

    def upload(self, slot: int, sources: Mapping[str, int]) -> None:
        """Copy one expert into ``slot``; ``sources`` are the addresses of its bytes by projection."""
        if not 0 <= slot < self.n_slots:
            raise NativeError(f"there is no slot {slot} among {self.n_slots}")
        functions = ggml()
        for projection, tensor in self.tensors.items():
            size = self._shapes[projection].expert_bytes
            functions.ggml_backend_tensor_set(tensor, sources[projection], slot * size, size)

    def close(self) -> None:
        if self._context:
            self._buffer.close()
            ggml().ggml_free(self._context)
            self._context = 0
