"""One chain of one split as the executor keeps it, and ggml's memory as arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import declarations as c
from .chains import Chain
from .residents import Residents


class Work:
    """One chain of one split, with all that stays the same from step to step."""

    def __init__(
        self, chain: Chain, residents: Residents | None, layer: int, projections: tuple[str, ...]
    ) -> None:
        self.chain, self.residents, self.layer, self.projections = chain, residents, layer, projections
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


def view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Memory of ggml's as an array, without a copy. ``strides`` are in bytes."""
    n_bytes = (
        sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    )
    memory = (ctypes.c_uint8 * n_bytes).from_address(address)
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, 0, strides)
    return array


def gather(x: NDArray[np.float32], pairs: NDArray[np.intp], work: Work) -> NDArray[np.float32]:
    """The input row of each pair, as a contiguous array."""
    tokens = pairs // work.k
    rows: NDArray[np.float32] = x[tokens, 0] if work.n_x == 1 else x[tokens, pairs % work.k]
    return rows
