"""ggml's devices by name, and the backends (streams of work) that we open on them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from types import TracebackType

from ..errors import NativeError, UsageError
from . import declarations as c
from .aborts import guarded
from .library import ggml

KINDS = {
    c.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    c.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    c.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    c.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accelerator",
}
OUR_DEVICE = "GGUFMOE"

# Devices of RPC servers by address: we name them, ggml's registry need not know them. They are described once,
# since each question is a connection, and one to a server that was lost would wait for ever.
_rpc_devices: dict[int, Device] = {}


@dataclass(frozen=True, slots=True)
class Device:
    """One ggml device. ``free_bytes`` and ``total_bytes`` are its own memory; 0 means that it does not say."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int
    address: int

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def is_rpc(self) -> bool:
        return self.address in _rpc_devices


def list_devices() -> tuple[Device, ...]:
    """Every device that slots can be put on: ggml's own, then those of the RPC servers added so far."""
    functions = ggml()
    own = (functions.ggml_backend_dev_get(i) for i in range(functions.ggml_backend_dev_count()))
    devices = [*(guarded(_describe, address) for address in own), *_rpc_devices.values()]
    return tuple(device for device in devices if device.name != OUR_DEVICE)


def find_device(name: str) -> Device:
    """The device called ``name`` (case does not matter); ``cpu`` is always there.

    Raises: UsageError that lists the names there are.
    """
    devices = list_devices()
    for device in devices:
        if device.name.lower() == name.lower():
            return device
    names = ", ".join(device.name for device in devices)
    raise UsageError(
        f"There is no device called {name!r}. This build of llama.cpp knows: {names}.",
        hint="`ggufmoe devices` lists them; --rpc HOST:PORT adds those of an RPC server.",
    )


def register_rpc_devices(endpoint: str) -> tuple[Device, ...]:
    """The devices of a server that has already been found to answer (see ``ggufmoe.native.rpc``)."""
    functions = ggml()
    registry = guarded(functions.ggml_backend_rpc_add_server, endpoint.encode())
    if not registry:
        raise NativeError(f"The RPC server {endpoint} offers no device.")
    count = functions.ggml_backend_reg_dev_count(registry)
    addresses = [functions.ggml_backend_reg_dev_get(registry, i) for i in range(count)]
    for address in addresses:
        _rpc_devices[address] = guarded(_describe, address)
    return tuple(_rpc_devices[address] for address in addresses)


def _describe(address: int) -> Device:
    functions = ggml()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    functions.ggml_backend_dev_memory(address, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=functions.ggml_backend_dev_name(address).decode("utf-8", "replace"),
        description=functions.ggml_backend_dev_description(address).decode("utf-8", "replace"),
        kind=KINDS.get(functions.ggml_backend_dev_type(address), "other"),
        free_bytes=free.value,
        total_bytes=total.value,
        address=address,
    )


def buffer_type(device: Device) -> int:
    """The device's own kind of memory, as llama.cpp's overrides name it."""
    return int(guarded(ggml().ggml_backend_dev_buffer_type, device.address))


def host_buffer_type(device: Device) -> int:
    """Host memory that the device copies from fastest (pinned), or 0 if it has none."""
    return int(guarded(ggml().ggml_backend_dev_host_buffer_type, device.address) or 0)


@functools.cache
def type_numbers() -> dict[str, int]:
    """ggml's tensor types by name, for example ``{"q8_0": 8}``."""
    functions = ggml()
    names = ((number, functions.ggml_type_name(number)) for number in range(c.GGML_TYPE_COUNT))
    return {name.decode(): number for number, name in names if name}


class Backend:
    """A stream of work on one device, and the buffer type of its memory. Freed by ``close``."""

    def __init__(self, device: Device, *, n_threads: int = 0) -> None:
        functions = ggml()
        self.device = device
        self.address: int = guarded(functions.ggml_backend_dev_init, device.address, None)
        if not self.address:
            raise NativeError(f"The device {device.name} cannot be opened.")
        self.buffer_type = buffer_type(device)
        if device.is_cpu:
            functions.ggml_backend_cpu_set_n_threads(self.address, n_threads)

    def close(self) -> None:
        if self.address:
            guarded(ggml().ggml_backend_free, self.address)
            self.address = 0

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Buffer:
    """A run of a device's memory."""

    def __init__(self, backend: Backend, n_bytes: int) -> None:
        functions = ggml()
        self.n_bytes = n_bytes
        self.address: int = functions.ggml_backend_buft_alloc_buffer(backend.buffer_type, n_bytes)
        if not self.address:
            raise NativeError(
                f"{backend.device.name} has no room for {n_bytes:,} more bytes.",
                hint="Use fewer --resident-experts, or a smaller --context.",
            )
        self.base: int = functions.ggml_backend_buffer_get_base(self.address)

    def close(self) -> None:
        if self.address:
            ggml().ggml_backend_buffer_free(self.address)
            self.address = 0
