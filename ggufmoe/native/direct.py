"""Reading parts of a file straight to where they are used, many at a time and past the page cache."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from ..errors import NativeError
from .paging import PAGE

log = logging.getLogger(__name__)


class _Edges(threading.local):
    """Two aligned pages of each thread."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * PAGE)
        whole = memoryview(self._memory)
        self.head, self.tail = whole[:PAGE], whole[PAGE:]
        self.address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))


@functools.cache
def _edges() -> _Edges:
    return _Edges()


class DirectFile:
    """A file open for reading past the page cache, or through it where the file system allows nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_direct = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._direct_fd = -1
            try:
                self._direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back()
        except OSError as error:
            raise NativeError(f"{path}: cannot be opened: {error.strerror}") from error

    def _fall_back(self) -> None:
        log.debug("%s: its file system has no direct reads", self.path)
        self.is_direct = False

    def read_to(self, address: int, offset: int, n_bytes: int) -> None:
        """Read bytes ``[offset, offset + n_bytes)`` to ``address``, and touch nothing around them.

        Address and offset must be at the same place in their pages. Whole pages are read straight to where they
        belong, in one call with the pages at either end, which come by way of a buffer.
        Raises: NativeError if the file cannot be read, or has become too short.
        """
        assert address % PAGE == offset % PAGE
        end, start = offset + n_bytes, offset // PAGE * PAGE
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        edges, views = _edges(), []
        if start < first:
            views.append(edges.head)
        if first < last:
            memory = (ctypes.c_uint8 * (last - first)).from_address(address + first - offset)
            views.append(memoryview(memory).cast("B"))
        if first <= last < end:
            views.append(edges.tail)
        try:
            n_read = self._read(views, start)
        except OSError as error:
            raise NativeError(f"{self.path}: cannot be read at byte {start:,}: {error.strerror}") from error
        there = start + n_read
        if there < end and (n_read == 0 or n_read % PAGE):
            raise NativeError(
                f"{self.path}: the file ends at byte {there:,}, inside a tensor.",
                hint="It was changed while it was in use. Load it again.",
            )
        if start < first:
            ctypes.memmove(address, edges.address + offset - start, min(first, end) - offset)
        if there < end:
            self.read_to(address + there - offset, there, end - there)
        elif first <= last < end:
            ctypes.memmove(address + last - offset, edges.address + PAGE, end - last)

    def _read(self, views: list[memoryview], offset: int) -> int:
        if self.is_direct:
            try:
                return os.preadv(self._direct_fd, views, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back()
        n_read = os.preadv(self._fd, views, offset)
        # the page cache must not grow at the cost of what is resident
        os.posix_fadvise(self._fd, offset, n_read, os.POSIX_FADV_DONTNEED)
        return n_read

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``[offset, offset + n_bytes)`` of a file to ``address`` (see ``DirectFile.read_to``)."""

    file: DirectFile
    address: int
    offset: int
    n_bytes: int


class Batch:
    """Reads that were started together. ``wait`` for them before what they fill is used, or given back."""

    def __init__(self, reads: Sequence[Read]) -> None:
        self.reads = reads
        self.error: Exception | None = None
        self._left = len(reads)
        self._lock = threading.Lock()
        self._all_done = threading.Lock()
        if reads:
            self._all_done.acquire()

    def done(self, error: Exception | None = None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left == 0:
                self._all_done.release()

    def wait(self) -> None:
        """Wait for all of them. Raises: the first error among them, when none is under way any more."""
        with self._all_done:
            pass
        if self.error is not None:
            raise self.error


class Readers:
    """Threads that read; nearly all of their time is spent in the kernel, without the interpreter lock."""

    def __init__(self, n_threads: int) -> None:
        self._queue: SimpleQueue[tuple[Batch, Read] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"ggufmoe-read-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, reads: Sequence[Read]) -> Batch:
        batch = Batch(reads)
        for read in reads:
            self._queue.put((batch, read))
        return batch

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            batch, read = job
            try:
                read.file.read_to(read.address, read.offset, read.n_bytes)
                batch.done()
            except Exception as error:  # raised again where the batch is waited for
                batch.done(error)

    def close(self) -> None:
        """End the threads after the reads that were started."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
