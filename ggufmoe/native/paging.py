"""Memory in the place of a mapped file: pages that are filled and given back one expert at a time.

llama.cpp maps a model's file and computes from there, so whatever lies at a matrix's address is the matrix.
Here parts of its read-only mapping are replaced by anonymous memory at the same addresses. That is empty, costs
nothing until it is filled, is never evicted by other reads, and can be given back page by page. Linux only.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NativeError
from . import declarations as c
from .library import c_callback, ggml

PAGE = 4096  # bytes; also the alignment that direct reads need at most
HUGE_PAGE = 2 << 20
# Linux, include/uapi/asm-generic/mman*.h
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 10, 14, 15
_MAP_FAILED = ctypes.c_void_p(-1).value

_loading = threading.Lock()


def require_paging() -> None:
    """Raises: NativeError where this way of using memory does not exist."""
    if sys.platform != "linux":
        raise NativeError(
            "Experts can be read from the disk on demand on Linux only.", hint="Leave --ram out."
        )
    if mmap.PAGESIZE != PAGE:
        raise NativeError(
            f"This machine has pages of {mmap.PAGESIZE} bytes; reading experts on demand needs {PAGE}.",
            hint="Leave --ram out.",
        )


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    libc.madvise.restype, libc.madvise.argtypes = (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    )
    return libc


@dataclass(frozen=True, slots=True)
class FileMapping:
    """One run of a mapped file: ``[start, end)`` in memory holds the file from byte ``offset`` on."""

    start: int
    end: int
    offset: int

    def address(self, offset: int) -> int:
        """Where byte ``offset`` of the file is."""
        return self.start + offset - self.offset

    def holds(self, address: int, n_bytes: int) -> bool:
        return self.start <= address and address + n_bytes <= self.end


def mappings_of(path: Path) -> set[FileMapping]:
    """Where this process has mapped the file."""
    stat = path.stat()
    found = set()
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        span, _access, offset, device, inode, *_ = line.split(maxsplit=5)
        major, minor = (int(number, 16) for number in device.split(b":"))
        if int(inode) == stat.st_ino and os.makedev(major, minor) == stat.st_dev:
            start, end = (int(address, 16) for address in span.split(b"-"))
            found.add(FileMapping(start, end, int(offset, 16)))
    return found


@contextmanager
def mapped_without_reading(paths: Sequence[Path]) -> Iterator[list[set[FileMapping]]]:
    """llama.cpp loads a model inside the block, and maps its files without reading them.

    It leaves a mapping alone where the CPU's memory is said to be divided (NUMA), so we say so. The yielded
    list is filled at the end of the block: for each of ``paths``, the mappings that are new.
    """
    with _loading:
        before = [mappings_of(path) for path in paths]
        new: list[set[FileMapping]] = []
        with _said_to_be_numa():
            yield new
        new += [mappings_of(path) - known for path, known in zip(paths, before, strict=True)]


@contextmanager
def _said_to_be_numa() -> Iterator[None]:
    """Source: ``llama_model_loader::init_mappings`` asks the CPU's registry, ``llama_mmap`` obeys."""
    functions = ggml()
    cpu = functions.ggml_backend_dev_by_type(c.GGML_BACKEND_DEVICE_TYPE_CPU)
    registry = functions.ggml_backend_dev_backend_reg(cpu)
    place = registry + c.ggml_backend_reg.iface.offset + c.ggml_backend_reg_i.get_proc_address.offset
    pointer = ctypes.c_void_p.from_address(place)
    original = pointer.value
    assert original
    pointer.value = ctypes.cast(_lookup(original), ctypes.c_void_p).value
    try:
        yield
    finally:
        pointer.value = original


@functools.cache  # kept for good: another thread may be about to call it when it is taken out
def _lookup(original: int) -> Any:
    ask = c.get_proc_address_t(original)
    is_numa = ctypes.CFUNCTYPE(ctypes.c_bool)(lambda: True)
    answer = ctypes.cast(is_numa, ctypes.c_void_p).value

    def lookup(registry: int, name: bytes, _keep: object = is_numa) -> int | None:
        return answer if name == b"ggml_backend_cpu_is_numa" else ask(registry, name)

    return c_callback(c.get_proc_address_t, on_error=None)(lookup)


def put_memory(start: int, end: int) -> None:
    """Replace what is mapped in these whole pages by memory that is empty (all zeros, and taking none)."""
    libc = _libc()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    if libc.mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _MAP_FAILED:
        raise NativeError(f"The kernel gives no memory for experts: {os.strerror(ctypes.get_errno())}.")
    # a huge page would fill the places of experts that are not there
    libc.madvise(start, end - start, _MADV_NOHUGEPAGE)
    libc.madvise(start, end - start, _MADV_DONTFORK)  # a child that copies them would double the memory


def prefer_huge_pages(start: int, end: int) -> None:
    """Let the memory of ``[start, end)``, which stays and will be filled, be of huge pages where they fit."""
    first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if first < last:
        _libc().madvise(first, last - first, _MADV_HUGEPAGE)  # a refusal costs nothing but speed


def give_back(start: int, end: int) -> None:
    """Free the memory of all whole pages in ``[start, end)``; they read as zeros from now on."""
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    if first < last and _libc().madvise(first, last - first, _MADV_DONTNEED) != 0:
        raise NativeError(f"The kernel takes no memory back: {os.strerror(ctypes.get_errno())}.")


def n_present_pages(start: int, end: int) -> int:
    """How many of these whole pages have memory."""
    first, last = start // PAGE, -(-end // PAGE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(first * 8)
        entries = memoryview(file.read((last - first) * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries)
